//! Ids to text, a token at a time.

use super::Tokenizer;

/// Incremental decoder: gives whole characters only, and keeps the bytes of an unfinished one for the next token.
#[derive(Debug, Clone)]
pub struct Decoder {
    skip_special_tokens: bool,
    /// The beginning of a character: at most 3 bytes.
    pending: Vec<u8>,
}

impl Decoder {
    /// A decoder at the beginning of a completion.
    #[must_use]
    pub fn new(skip_special_tokens: bool) -> Self {
        Self { skip_special_tokens, pending: Vec::new() }
    }

    /// Appends to `text` what is complete once `id` has arrived.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) {
        if self.skip_special_tokens && tokenizer.is_special(id) {
            return;
        }
        self.push_bytes(tokenizer.token_bytes(id), text);
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
