//! The input of a custom tool, taken out of the arguments of the function that stands for it.

use serde::Deserialize;

/// The arguments: one string, and nothing else.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wrapper {
    input: String,
}

/// The input in whole arguments; `None` if they are not the wrapper.
pub(super) fn input(arguments: &str) -> Option<String> {
    serde_json::from_str::<Wrapper>(arguments).ok().map(|wrapper| wrapper.input)
}

/// Gives the input while the arguments come in.
#[derive(Debug, Default)]
pub(super) struct Unwrapper {
    state: State,
    /// What was given so far.
    given: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// Before the string.
    #[default]
    Head,
    /// Within the string: offset of the first byte that was not read.
    Inside(usize),
    /// After the string, or the arguments are not the wrapper.
    Over,
}

impl Unwrapper {
    /// What became certain with the arguments so far; they only ever grow.
    pub fn more(&mut self, arguments: &str) -> String {
        if self.state == State::Head {
            self.state = head(arguments.as_bytes());
        }
        let State::Inside(start) = self.state else {
            return String::new();
        };
        let mut out = String::new();
        let mut at = start;
        self.state = loop {
            let rest = arguments.get(at..).unwrap_or_default();
            let plain = rest.find(['"', '\\']).unwrap_or(rest.len());
            if rest[..plain].bytes().any(|byte| byte < b' ') {
                break State::Over;
            }
            out.push_str(&rest[..plain]);
            at += plain;
            match rest.as_bytes().get(plain) {
                None => break State::Inside(at),
                Some(b'"') => break State::Over,
                Some(_) => match escape(&rest[plain..]) {
                    Escape::Whole(character, length) => {
                        out.push(character);
                        at += length;
                    }
                    Escape::Begun => break State::Inside(at),
                    Escape::Wrong => break State::Over,
                },
            }
        };
        self.given.push_str(&out);
        out
    }

    /// What is left to give when the arguments are whole and the input is `input`. Nothing, if something else was
    /// given before: the client is told the whole at the end.
    pub fn rest<'a>(&self, input: &'a str) -> &'a str {
        input.strip_prefix(self.given.as_str()).unwrap_or_default()
    }
}

fn head(arguments: &[u8]) -> State {
    let mut at = 0;
    for token in [&b"{"[..], b"\"input\"", b":", b"\""] {
        at = crate::protocol::json::skip_space(arguments, at);
        let rest = arguments.get(at..).unwrap_or_default();
        if !rest.starts_with(token) {
            return if token.starts_with(rest) { State::Head } else { State::Over };
        }
        at += token.len();
    }
    State::Inside(at)
}

enum Escape {
    /// The character, and the length of what it was written as.
    Whole(char, usize),
    /// The rest has not come yet.
    Begun,
    Wrong,
}

/// Reads the escape that `text` begins with.
fn escape(text: &str) -> Escape {
    let simple = match text.as_bytes().get(1) {
        None => return Escape::Begun,
        Some(b'u') => return unicode(text),
        Some(b'"') => '"',
        Some(b'\\') => '\\',
        Some(b'/') => '/',
        Some(b'b') => '\u{8}',
        Some(b'f') => '\u{c}',
        Some(b'n') => '\n',
        Some(b'r') => '\r',
        Some(b't') => '\t',
        Some(_) => return Escape::Wrong,
    };
    Escape::Whole(simple, 2)
}

fn unicode(text: &str) -> Escape {
    let first = match unit(text.as_bytes()) {
        Ok(unit) => unit,
        Err(escape) => return escape,
    };
    if let Some(character) = char::from_u32(u32::from(first)) {
        return Escape::Whole(character, 6);
    }
    let second = match unit(&text.as_bytes()[6..]) {
        Ok(unit) => unit,
        Err(escape) => return escape,
    };
    match char::decode_utf16([first, second]).next() {
        Some(Ok(character)) => Escape::Whole(character, 12),
        _ => Escape::Wrong,
    }
}

/// The number of a `\uXXXX`.
fn unit(text: &[u8]) -> Result<u16, Escape> {
    let is_right = |(index, byte): (usize, &u8)| match index {
        0 => *byte == b'\\',
        1 => *byte == b'u',
        _ => byte.is_ascii_hexdigit(),
    };
    if !text.iter().take(6).enumerate().all(is_right) {
        return Err(Escape::Wrong);
    }
    let digits = text.get(2..6).ok_or(Escape::Begun)?;
    let digits = std::str::from_utf8(digits).map_err(|_| Escape::Wrong)?;
    u16::from_str_radix(digits, 16).map_err(|_| Escape::Wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn streamed(arguments: &str, cuts: &[usize]) -> (String, Unwrapper) {
        let mut unwrapper = Unwrapper::default();
        let mut out = String::new();
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (arguments.len() + 1)).collect();
        ends.sort_unstable();
        for end in ends.into_iter().filter(|end| arguments.is_char_boundary(*end)) {
            out.push_str(&unwrapper.more(&arguments[..end]));
        }
        out.push_str(&unwrapper.more(arguments));
        (out, unwrapper)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn the_deltas_of_a_wrapper_are_its_input(
            text in "[a\"\\\\\n\u{1F389}é/]{0,12}",
            cuts in prop::collection::vec(any::<usize>(), 0..8),
            is_ascii in any::<bool>(),
        ) {
            let mut quoted = serde_json::to_string(&text).unwrap();
            if is_ascii {
                quoted = quoted
                    .chars()
                    .map(|c| if c.is_ascii() {
                        c.to_string()
                    } else {
                        c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect()
                    })
                    .collect();
            }
            let arguments = format!("{{ \"input\" : {quoted}}}");
            prop_assert_eq!(input(&arguments), Some(text.clone()));
            let (out, unwrapper) = streamed(&arguments, &cuts);
            prop_assert_eq!(&out, &text);
            prop_assert_eq!(unwrapper.rest(&text), "");
        }

        #[test]
        fn whatever_comes_nothing_breaks(
            arguments in "[{}:\"\\\\inputé\u{1F389}d8ucC ]{0,20}",
            cuts in prop::collection::vec(any::<usize>(), 0..8),
        ) {
            let (out, _) = streamed(&arguments, &cuts);
            if let Some(input) = input(&arguments) {
                prop_assert!(input.starts_with(&out));
            }
        }
    }

    #[test]
    fn what_is_not_the_wrapper_has_no_input() {
        for arguments in [
            "",
            "*** Begin Patch",
            r#"{"input":"a","more":1}"#,
            r#"{"input":"a","input":"b"}"#,
            r#"{"input":1}"#,
            r#"{"input":"a"#,
            "{\"input\":\"a\nb\"}",
        ] {
            assert_eq!(input(arguments), None, "{arguments}");
        }
        let mut unwrapper = Unwrapper::default();
        assert_eq!(unwrapper.more("*** Begin"), "");
        assert_eq!(unwrapper.rest("*** Begin Patch"), "*** Begin Patch");
    }
}
