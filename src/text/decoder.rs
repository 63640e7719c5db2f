//! Ids to text, a token at a time.

use super::Tokenizer;

/// Incremental decoder: gives whole characters only, and keeps the bytes of an unfinished one for the next token.
/// Ids of SentencePiece-like tokenizers that are bytes are kept until a piece follows: whether they are characters
/// shows only then, and if one is not, none of them is (as the crate `tokenizers` decodes them).
#[derive(Debug, Clone)]
pub struct Decoder {
    skip_special_tokens: bool,
    /// Spaces that are still to be dropped.
    to_drop: usize,
    /// The beginning of a character, at most 3 bytes; or a run of ids that are bytes.
    pending: Vec<u8>,
    /// Whether `pending` is such a run.
    is_run: bool,
}

impl Decoder {
    /// A decoder at the beginning of a completion.
    #[must_use]
    pub fn new(skip_special_tokens: bool) -> Self {
        Self { skip_special_tokens, to_drop: 0, pending: Vec::new(), is_run: false }
    }

    /// A decoder at the beginning of a text, where encoding may have put a space that is not in the text.
    #[must_use]
    pub fn at_beginning(tokenizer: &Tokenizer, skip_special_tokens: bool) -> Self {
        Self { to_drop: tokenizer.dropped_spaces(), ..Self::new(skip_special_tokens) }
    }

    /// Appends to `text` what is complete once `id` has arrived.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) {
        if self.skip_special_tokens && tokenizer.is_special(id) {
            return;
        }
        let bytes = tokenizer.token_bytes(id);
        if tokenizer.is_byte(id) {
            self.is_run = true;
            self.pending.extend_from_slice(bytes);
            return;
        }
        self.end_run(text);
        let from = text.len();
        self.push_bytes(bytes, text);
        self.drop_spaces(from, text);
    }

    /// The run of bytes is over: text, or U+FFFD for each of them.
    fn end_run(&mut self, text: &mut String) {
        if !std::mem::take(&mut self.is_run) {
            return;
        }
        let from = text.len();
        match std::str::from_utf8(&self.pending) {
            Ok(characters) => text.push_str(characters),
            Err(_) => text.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, self.pending.len())),
        }
        self.pending.clear();
        self.drop_spaces(from, text);
    }

    /// What was appended behind `from` is the first text, or goes on from spaces that were dropped.
    fn drop_spaces(&mut self, from: usize, text: &mut String) {
        if self.to_drop == 0 || text.len() == from {
            return;
        }
        let spaces = text[from..].bytes().take_while(|&byte| byte == b' ').take(self.to_drop).count();
        text.replace_range(from..from + spaces, "");
        self.to_drop = if text.len() == from { self.to_drop - spaces } else { 0 };
    }

    fn push_bytes(&mut self, bytes: &[u8], text: &mut String) {
        if self.pending.is_empty() {
            let kept = append_lossy(bytes, text);
            self.pending.extend_from_slice(&bytes[bytes.len() - kept..]);
        } else {
            self.pending.extend_from_slice(bytes);
            let all = std::mem::take(&mut self.pending);
            let kept = append_lossy(&all, text);
            self.pending.extend_from_slice(&all[all.len() - kept..]);
        }
    }

    /// The end of the completion: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        self.end_run(text);
        if !self.pending.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }
}

/// Appends `bytes` as `String::from_utf8_lossy` would, except for an unfinished character at their end: gives its length.
fn append_lossy(mut bytes: &[u8], text: &mut String) -> usize {
    loop {
        match std::str::from_utf8(bytes) {
            Ok(valid) => {
                text.push_str(valid);
                return 0;
            }
            Err(error) => {
                let (valid, rest) = bytes.split_at(error.valid_up_to());
                text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                let Some(bad) = error.error_len() else {
                    return rest.len();
                };
                text.push(char::REPLACEMENT_CHARACTER);
                bytes = &rest[bad..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn cutting_bytes_anywhere_gives_the_same_text(
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), Just(0xf0), Just(0x9f), Just(0x8e)], 0..40),
            cuts in prop::collection::vec(1usize..5, 0..40),
        ) {
            let mut decoder = Decoder::new(false);
            let (mut text, mut rest) = (String::new(), &bytes[..]);
            for cut in cuts.into_iter().chain(std::iter::repeat(1)) {
                if rest.is_empty() { break; }
                let (head, tail) = rest.split_at(cut.min(rest.len()));
                decoder.push_bytes(head, &mut text);
                rest = tail;
            }
            decoder.finish(&mut text);
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn a_character_comes_with_its_last_byte() {
        let mut decoder = Decoder::new(false);
        let mut text = String::new();
        for byte in &"🎉".as_bytes()[..3] {
            decoder.push_bytes(&[*byte], &mut text);
            assert_eq!(text, "");
        }
        decoder.push_bytes(&"🎉".as_bytes()[3..], &mut text);
        assert_eq!(text, "🎉");
    }
}
