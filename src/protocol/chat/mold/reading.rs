//! JSON that is read strictly: what is not as it is looked for is left to the parser.

use std::borrow::Cow;

use super::Part;
use crate::protocol::chat::view::{Few, TOKEN_ID, logprob_of};
use crate::protocol::json;

/// An event on its way: each method takes what it is called for, or `None` where something else is.
pub(super) struct Reading<'a> {
    pub(super) text: &'a [u8],
    pub(super) at: usize,
}

impl<'a> Reading<'a> {
    fn rest(&self) -> &'a [u8] {
        &self.text[self.at..]
    }

    pub(super) fn same(&mut self, bytes: &[u8]) -> Option<()> {
        self.rest().starts_with(bytes).then(|| self.at += bytes.len())
    }

    fn space(&mut self) {
        self.at = json::skip_space(self.text, self.at);
    }

    fn digits(&mut self) -> Option<&'a [u8]> {
        let rest = self.rest();
        let count = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        self.at += count;
        (count > 0).then(|| &rest[..count])
    }

    /// An integer as JSON writes it, without sign, fraction or exponent.
    pub(super) fn integer(&mut self) -> Option<u32> {
        let digits = self.digits()?;
        let is_one = !matches!(self.text.get(self.at), Some(b'.' | b'e' | b'E'));
        let is_plain = is_one && (digits.len() == 1 || digits[0] != b'0') && digits.len() <= 10;
        if !is_plain {
            return None;
        }
        let value = digits.iter().fold(0_u64, |value, digit| 10 * value + u64::from(digit - b'0'));
        u32::try_from(value).ok()
    }

    fn number(&mut self) -> Option<&'a str> {
        let start = self.at;
        self.at += usize::from(self.text.get(self.at) == Some(&b'-'));
        let whole = self.digits()?;
        if whole.len() > 1 && whole[0] == b'0' {
            return None;
        }
        if self.text.get(self.at) == Some(&b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.text.get(self.at), Some(b'e' | b'E')) {
            self.at += 1;
            self.at += usize::from(matches!(self.text.get(self.at), Some(b'+' | b'-')));
            self.digits()?;
        }
        std::str::from_utf8(&self.text[start..self.at]).ok()
    }

    pub(super) fn logprob(&mut self) -> Option<Option<f32>> {
        if self.same(b"null").is_some() {
            return Some(None);
        }
        self.number().map(logprob_of)
    }

    /// What is between the quotes of a string, as it is written.
    fn quoted(&mut self) -> Option<&'a str> {
        self.same(b"\"")?;
        let start = self.at;
        loop {
            match *self.text.get(self.at)? {
                b'"' => break,
                b'\\' => {
                    self.at += 1;
                    match *self.text.get(self.at)? {
                        b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.at += 1,
                        // One half of a pair is no text. Who reads the string sees to it.
                        b'u' => {
                            let digits = self.text.get(self.at + 1..self.at + 5)?;
                            if !digits.iter().all(u8::is_ascii_hexdigit) {
                                return None;
                            }
                            self.at += 5;
                        }
                        _ => return None,
                    }
                }
                0..=0x1f => return None,
                _ => self.at += 1,
            }
        }
        let quoted = std::str::from_utf8(&self.text[start..self.at]).ok();
        self.at += 1;
        quoted
    }

    pub(super) fn string(&mut self) -> Option<Cow<'a, str>> {
        let quoted = self.quoted()?;
        let mut parts = quoted.split('\\');
        let first = parts.next()?;
        if first.len() == quoted.len() {
            return Some(Cow::Borrowed(quoted));
        }
        let mut text = first.to_owned();
        while let Some(part) = parts.next() {
            let Some(escape) = part.chars().next() else {
                // Two of them: what is behind the second one is as it is.
                text.push('\\');
                text.push_str(parts.next()?);
                continue;
            };
            text.push(match escape {
                'b' => '\u{8}',
                'f' => '\u{c}',
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                // Others are rare.
                'u' => return None,
                other => other,
            });
            text.push_str(&part[escape.len_utf8()..]);
        }
        Some(Cow::Owned(text))
    }

    /// A list that is not empty.
    pub(super) fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Option<T>) -> Option<Few<T>> {
        self.same(b"[")?;
        self.space();
        let mut few = Few::default();
        loop {
            few.push(item(self)?);
            self.space();
            match *self.text.get(self.at)? {
                b',' => self.at += 1,
                b']' => break,
                _ => return None,
            }
            self.space();
        }
        self.at += 1;
        Some(few)
    }

    pub(super) fn entry(&mut self, same: &[u8], parts: &[Part]) -> Option<Option<f32>> {
        let mut value = None;
        for part in parts {
            match part {
                Part::Same(range) => self.same(&same[range.clone()])?,
                Part::Logprob => value = self.logprob()?,
                Part::Token => {
                    if self.quoted()?.starts_with(TOKEN_ID) {
                        return None;
                    }
                }
                _ => self.any(0)?,
            }
        }
        Some(value)
    }

    /// A value of any kind, as far as lists in objects in lists.
    pub(super) fn any(&mut self, depth: u8) -> Option<()> {
        match *self.text.get(self.at)? {
            b'"' => drop(self.quoted()?),
            b'n' => self.same(b"null")?,
            b't' => self.same(b"true")?,
            b'f' => self.same(b"false")?,
            bracket @ (b'[' | b'{') if depth < 8 => {
                let end = bracket + 2;
                self.at += 1;
                self.space();
                if self.text.get(self.at) == Some(&end) {
                    self.at += 1;
                    return Some(());
                }
                loop {
                    if bracket == b'{' {
                        self.quoted()?;
                        self.space();
                        self.same(b":")?;
                        self.space();
                    }
                    self.any(depth + 1)?;
                    self.space();
                    let next = *self.text.get(self.at)?;
                    self.at += 1;
                    if next == end {
                        break;
                    }
                    if next != b',' {
                        return None;
                    }
                    self.space();
                }
            }
            _ => drop(self.number()?),
        }
        Some(())
    }
}
