//! The little of msgpack that a micro batch needs.

use std::io::{self, Write};

/// Writes values one after the other.
pub(super) struct Msgpack<W>(pub W);

impl<W: Write> Msgpack<W> {
    /// Begins an array of so many values. Its length has four bytes, at one behind where it begins.
    pub(super) fn array(&mut self, length: u32) -> io::Result<()> {
        self.0.write_all(&[0xdd])?;
        self.0.write_all(&length.to_be_bytes())
    }

    pub(super) fn nil(&mut self) -> io::Result<()> {
        self.0.write_all(&[0xc0])
    }

    pub(super) fn bool(&mut self, value: bool) -> io::Result<()> {
        self.0.write_all(&[if value { 0xc3 } else { 0xc2 }])
    }

    pub(super) fn int(&mut self, value: u32) -> io::Result<()> {
        if value < 0x80 {
            return self.0.write_all(&[value as u8]);
        }
        self.0.write_all(&[0xce])?;
        self.0.write_all(&value.to_be_bytes())
    }

    pub(super) fn float(&mut self, value: f64) -> io::Result<()> {
        self.0.write_all(&[0xcb])?;
        self.0.write_all(&value.to_be_bytes())
    }

    pub(super) fn float32(&mut self, value: f32) -> io::Result<()> {
        self.0.write_all(&[0xca])?;
        self.0.write_all(&value.to_be_bytes())
    }

    pub(super) fn text(&mut self, text: &str) -> io::Result<()> {
        if text.len() < 32 {
            self.0.write_all(&[0xa0 | text.len() as u8])?;
        } else {
            self.0.write_all(&[0xdb])?;
            self.0.write_all(&short(text.len())?.to_be_bytes())?;
        }
        self.0.write_all(text.as_bytes())
    }

    pub(super) fn bytes(&mut self, bytes: &[&[u8]]) -> io::Result<()> {
        self.0.write_all(&[0xc6])?;
        self.0.write_all(&short(bytes.iter().map(|part| part.len()).sum())?.to_be_bytes())?;
        bytes.iter().try_for_each(|part| self.0.write_all(part))
    }
}

/// A length as msgpack has it.
pub(super) fn short(length: usize) -> io::Result<u32> {
    let too_long = || io::Error::new(io::ErrorKind::FileTooLarge, "msgpack has no place for more than 4 GiB");
    u32::try_from(length).map_err(|_| too_long())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_bytes_of_the_specification() {
        let mut out = Msgpack(vec![]);
        let mut write = || {
            out.array(2)?;
            out.int(127)?;
            out.int(128)?;
            out.nil()?;
            out.bool(true)?;
            out.float(1.5)?;
            out.float32(-0.5)?;
            out.text("ab")?;
            out.text(&"c".repeat(32))?;
            out.bytes(&[&[1], &[2, 3]])
        };
        write().expect("memory");
        let mut expected = vec![0xdd, 0, 0, 0, 2, 127, 0xce, 0, 0, 0, 128, 0xc0, 0xc3];
        expected.extend([0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0, 0xca, 0xbf, 0, 0, 0, 0xa2, b'a', b'b']);
        expected.extend([0xdb, 0, 0, 0, 32]);
        expected.extend([b'c'; 32]);
        expected.extend([0xc6, 0, 0, 0, 3, 1, 2, 3]);
        assert_eq!(out.0, expected);
    }
}
