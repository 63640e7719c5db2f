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
        self.0.write_all(&[0xce])?;
        self.0.write_all(&value.to_be_bytes())
    }

    pub(super) fn float(&mut self, value: f64) -> io::Result<()> {
        self.0.write_all(&[0xcb])?;
        self.0.write_all(&value.to_be_bytes())
    }

    pub(super) fn text(&mut self, text: &str) -> io::Result<()> {
        self.0.write_all(&[0xdb])?;
        self.0.write_all(&short(text.len())?.to_be_bytes())?;
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
