//! Stop strings in text that arrives in pieces.

/// Finds the first stop string; holds back what may be the beginning of one.
#[derive(Debug, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    include: bool,
    held: String,
}

impl StopMatcher {
    /// `include`: whether the stop string itself is part of the text.
    pub fn new(stops: Vec<String>, include: bool) -> Self {
        Self { stops, include, held: String::new() }
    }

    /// Appends to `out` what is certain; gives the stop string that ended the text.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<String> {
        if self.stops.is_empty() {
            out.push_str(text);
            return None;
        }
        self.held.push_str(text);
        // The string that is complete first wins; of those that end together the longest.
        let found = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()).map(|at| (at + stop.len(), at, stop)))
            .min();
        if let Some((end, at, stop)) = found {
            out.push_str(&self.held[..if self.include { end } else { at }]);
            let stop = stop.clone();
            self.held.clear();
            return Some(stop);
        }
        let keep = self.stops.iter().map(|stop| partial(&self.held, stop)).max().unwrap_or(0);
        out.push_str(&self.held[..self.held.len() - keep]);
        self.held.drain(..self.held.len() - keep);
        None
    }

    /// The end of the text without a stop string.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

/// Length of the longest end of `text` that begins `stop`.
fn partial(text: &str, stop: &str) -> usize {
    stop.char_indices()
        .map(|(at, _)| at)
        .filter(|&length| length > 0 && text.ends_with(&stop[..length]))
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read<'a>(
        stops: &[&str],
        include: bool,
        pieces: impl IntoIterator<Item = &'a str>,
    ) -> (String, Option<String>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|&stop| stop.to_owned()).collect(), include);
        let mut out = String::new();
        for piece in pieces {
            if let Some(stop) = matcher.push(piece, &mut out) {
                return (out, Some(stop));
            }
        }
        matcher.finish(&mut out);
        (out, None)
    }

    #[test]
    fn the_first_complete_stop_string_ends_the_text() {
        let stop = |text: &str| Some(text.to_owned());
        assert_eq!(read(&["\n\n", "END"], false, ["a\nb EN", "D\n\n"]), ("a\nb ".to_owned(), stop("END")));
        assert_eq!(read(&["END"], true, ["x END y"]), ("x END".to_owned(), stop("END")));
        assert_eq!(read(&["END"], false, ["x EN"]), ("x EN".to_owned(), None));
        assert_eq!(read(&["bc", "abc"], false, ["xabcy"]), ("x".to_owned(), stop("abc")));
    }

    proptest! {
        #[test]
        fn cutting_does_not_matter(text in "[abé]{0,12}", stops in prop::collection::vec("[abé]{1,4}", 0..3)) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let characters: Vec<String> = text.chars().map(String::from).collect();
            let by_character = read(&stops, false, characters.iter().map(String::as_str));
            for (at, _) in text.char_indices() {
                // Two pieces find the same string that ends first.
                prop_assert_eq!(&read(&stops, false, [&text[..at], &text[at..]]), &by_character);
            }
        }
    }
}
