//! The sampled text at hand, and how far it has been read.
//!
//! Offsets count the bytes of the whole reply. Text before `mark` is in events and gets dropped; text from `mark` on
//! stays until a form has decided what it is. Reading moves `at` forward and comes back only over white space, so the
//! work is linear in the text, however it is cut.

use std::collections::VecDeque;
use std::ops::Range;

/// A piece of sampled text: a token's, or any other cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece<'a> {
    /// The text.
    pub text: &'a str,
    /// Whether this is the whole text of one control token (`<tool_call>`, `</think>`), not spelled by ordinary ones.
    pub is_control: bool,
}

impl<'a> Piece<'a> {
    /// Text of ordinary tokens, or of tokens that nobody told apart.
    #[must_use]
    pub fn text(text: &'a str) -> Self {
        Self { text, is_control: false }
    }

    /// The text of one control token.
    #[must_use]
    pub fn control(text: &'a str) -> Self {
        Self { text, is_control: true }
    }
}

/// How long a name may be, of a call or a parameter: beyond, text is not held back to see whether it is one.
const MAX_NAME: usize = 256;

/// Tags, as a form spells them.
pub(super) type Tags = &'static [&'static str];

/// What stands at the cursor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// The tag with this index; the cursor is behind it.
    Tag(usize),
    /// Too little text to tell.
    Wait,
    /// None of the tags.
    Other,
}

#[derive(Debug, Default)]
pub(super) struct Window {
    text: String,
    /// Offset of `text` in the reply.
    base: usize,
    /// Where reading goes on.
    pub at: usize,
    /// Start of what is in no event yet.
    pub mark: usize,
    is_end: bool,
    /// Where control tokens are, of those that are not dropped.
    controls: VecDeque<Range<usize>>,
    /// Tags that count only as control tokens.
    token_tags: Vec<&'static str>,
    /// Bytes looked at or moved, for the tests.
    #[cfg(test)]
    pub work: usize,
}

impl Window {
    pub fn require_tokens(&mut self, tags: impl Iterator<Item = &'static str>) {
        self.token_tags.extend(tags);
    }

    pub fn push(&mut self, piece: Piece<'_>) {
        let done = self.mark - self.base;
        if done > 0 {
            self.count(self.text.len() - done);
            self.text.drain(..done);
            self.base = self.mark;
            while self.controls.front().is_some_and(|control| control.end <= self.base) {
                self.controls.pop_front();
            }
        }
        if piece.is_control && !piece.text.is_empty() && !self.token_tags.is_empty() {
            self.controls.push_back(self.len()..self.len() + piece.text.len());
        }
        self.text.push_str(piece.text);
    }

    /// No more text will come.
    pub fn end(&mut self) {
        self.is_end = true;
    }

    pub fn is_end(&self) -> bool {
        self.is_end
    }

    /// Bytes of the reply so far.
    pub fn len(&self) -> usize {
        self.base + self.text.len()
    }

    /// Text that is not read yet.
    pub fn rest(&self) -> &str {
        &self.text[self.at - self.base..]
    }

    /// Text from `mark` on, by offsets in the reply.
    pub fn slice(&self, range: Range<usize>) -> &str {
        &self.text[range.start - self.base..range.end - self.base]
    }

    /// What may be read as text: up to the next control token where control tokens are known, else all.
    pub fn plain(&self) -> &str {
        let next = self.controls.partition_point(|control| control.start < self.at);
        let end = self.controls.get(next).map_or(self.len(), |control| control.start);
        self.slice(self.at..end)
    }

    /// Goes over white space, as JSON has it.
    pub fn skip_space(&mut self) {
        let space = self.rest().bytes().take_while(|byte| is_space(*byte)).count();
        self.count(space);
        self.at += space;
    }

    /// What stands at the cursor.
    pub fn next(&mut self, tags: Tags) -> Next {
        if let Some(tag) = tags.iter().position(|tag| self.has_tag(self.at, tag)) {
            self.at += tags[tag].len();
            return Next::Tag(tag);
        }
        let is_open = !self.is_end && tags.iter().any(|tag| self.may_become(self.at, tag));
        if is_open { Next::Wait } else { Next::Other }
    }

    /// Goes to the first of the tags, and over it; gives its index. Without one the cursor goes as far as is certain:
    /// to what may be the beginning of a tag, or to the end.
    pub fn find(&mut self, tags: Tags) -> Option<usize> {
        let mut from = self.at;
        loop {
            let first = |byte: u8| tags.iter().any(|tag| tag.as_bytes()[0] == byte);
            let rest = self.slice(from..self.len());
            let Some(candidate) = rest.bytes().position(first) else {
                self.count(self.len() - self.at);
                self.at = self.len();
                return None;
            };
            let here = from + candidate;
            if let Some(tag) = tags.iter().position(|tag| self.has_tag(here, tag)) {
                self.count(here - self.at);
                self.at = here + tags[tag].len();
                return Some(tag);
            }
            if !self.is_end && tags.iter().any(|tag| self.may_become(here, tag)) {
                self.count(self.len() - self.at);
                self.at = here;
                return None;
            }
            from = here + 1;
        }
    }

    /// Goes over a name that begins at `from`, to the first of the tags and over it; gives its index. `None` waits for
    /// more text; `Err` at the first character that is not allowed, or that makes the name too long.
    pub fn find_name(
        &mut self,
        from: usize,
        tags: Tags,
        is_allowed: fn(char) -> bool,
    ) -> Result<Option<usize>, ()> {
        loop {
            if let Some(tag) = tags.iter().position(|tag| self.has_tag(self.at, tag)) {
                self.at += tags[tag].len();
                return Ok(Some(tag));
            }
            if !self.is_end && tags.iter().any(|tag| self.may_become(self.at, tag)) {
                return Ok(None);
            }
            match self.rest().chars().next() {
                None => return Ok(None),
                Some(character) if is_allowed(character) && self.at - from < MAX_NAME => {
                    self.count(1);
                    self.at += character.len_utf8();
                }
                Some(_) => return Err(()),
            }
        }
    }

    fn has_tag(&self, at: usize, tag: &str) -> bool {
        self.text.as_bytes()[at - self.base..].starts_with(tag.as_bytes())
            && (!self.token_tags.contains(&tag) || self.is_control(at..at + tag.len()))
    }

    /// Whether the text ends at `at` with the beginning of `tag`. A control token comes whole.
    fn may_become(&self, at: usize, tag: &str) -> bool {
        let rest = &self.text.as_bytes()[at - self.base..];
        rest.len() < tag.len() && tag.as_bytes().starts_with(rest) && !self.token_tags.contains(&tag)
            || rest.is_empty()
    }

    fn is_control(&self, range: Range<usize>) -> bool {
        self.controls
            .binary_search_by_key(&range.start, |control| control.start)
            .is_ok_and(|index| self.controls[index] == range)
    }

    #[cfg_attr(
        not(test),
        expect(clippy::unused_self, clippy::needless_pass_by_ref_mut, reason = "counts in tests")
    )]
    pub fn count(&mut self, _bytes: usize) {
        #[cfg(test)]
        {
            self.work += _bytes;
        }
    }
}

pub(super) fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}
