//! A file as `torch.save` writes it: a zip archive, not compressed, in which `data.pkl` is a pickle. It holds plain
//! values and numpy arrays, so that nothing of torch's is needed to write it.
//!
//! The pickle is of protocol 4: opcodes as in Python's `pickletools`.

use std::fs::File;
use std::io::{self, BufWriter, Seek as _, SeekFrom, Write};

use flate2::Crc;

/// A file of the archive whose length is known at its end.
const NAME: &str = "archive/data.pkl";
/// Offset of the checksum in a file's header, and of the sizes, which are behind the name.
const CRC_AT: u64 = 14;
const HEADER_LEN: u64 = 30;
const ZIP64_VERSION: u16 = 45;
/// 1980-01-01: the archive has the same bytes whenever it is made.
const DATE: u16 = 0x21;

/// Writes a pickle.
pub(super) struct Pickle {
    out: BufWriter<File>,
    crc: Crc,
    length: u64,
}

impl Pickle {
    pub(super) fn new(mut out: BufWriter<File>) -> io::Result<Self> {
        header(&mut out, NAME, 0, None)?;
        let mut pickle = Self { out, crc: Crc::new(), length: 0 };
        pickle.raw(b"\x80\x04")?;
        Ok(pickle)
    }

    fn raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.crc.update(bytes);
        self.length += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    /// Begins a dict; keys and values follow in turn.
    pub(super) fn dict(&mut self) -> io::Result<()> {
        self.raw(b"}(")
    }

    pub(super) fn end_dict(&mut self) -> io::Result<()> {
        self.raw(b"u")
    }

    /// Begins a list.
    pub(super) fn list(&mut self) -> io::Result<()> {
        self.raw(b"](")
    }

    pub(super) fn end_list(&mut self) -> io::Result<()> {
        self.raw(b"e")
    }

    pub(super) fn none(&mut self) -> io::Result<()> {
        self.raw(b"N")
    }

    pub(super) fn bool(&mut self, value: bool) -> io::Result<()> {
        self.raw(if value { b"\x88" } else { b"\x89" })
    }

    pub(super) fn int(&mut self, value: u64) -> io::Result<()> {
        match i32::try_from(value) {
            Ok(small) => {
                self.raw(b"J")?;
                self.raw(&small.to_le_bytes())
            }
            Err(_) => {
                // A ninth byte, so that the highest bit is no sign.
                self.raw(b"\x8a\x09")?;
                self.raw(&value.to_le_bytes())?;
                self.raw(b"\0")
            }
        }
    }

    pub(super) fn float(&mut self, value: f64) -> io::Result<()> {
        self.raw(b"G")?;
        self.raw(&value.to_be_bytes())
    }

    pub(super) fn text(&mut self, text: &str) -> io::Result<()> {
        self.raw(b"\x8d")?;
        self.raw(&(text.len() as u64).to_le_bytes())?;
        self.raw(text.as_bytes())
    }

    /// A numpy array of `i32`, which may be written to.
    pub(super) fn array(&mut self, shape: &[u64], data: &[u8]) -> io::Result<()> {
        self.raw(b"cnumpy\nndarray\n(")?;
        self.raw(b"(")?;
        shape.iter().try_for_each(|size| self.int(*size))?;
        self.raw(b"t")?;
        self.text("<i4")?;
        self.raw(b"cbuiltins\nbytearray\n\x8e")?;
        self.raw(&(data.len() as u64).to_le_bytes())?;
        self.raw(data)?;
        self.raw(b"\x85RtR")
    }

    /// A value of JSON.
    pub(super) fn json(&mut self, value: &serde_json::Value) -> io::Result<()> {
        use serde_json::Value;
        match value {
            Value::Null => self.none(),
            Value::Bool(value) => self.bool(*value),
            Value::Number(number) => match number.as_u64() {
                Some(number) => self.int(number),
                None => self.float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => self.text(text),
            Value::Array(items) => {
                self.list()?;
                items.iter().try_for_each(|item| self.json(item))?;
                self.end_list()
            }
            Value::Object(members) => {
                self.dict()?;
                for (name, value) in members {
                    self.text(name)?;
                    self.json(value)?;
                }
                self.end_dict()
            }
        }
    }

    /// Ends the pickle and the archive.
    pub(super) fn end(mut self) -> io::Result<BufWriter<File>> {
        self.raw(b".")?;
        let Self { mut out, crc, length, .. } = self;
        let mut entries = vec![Entry { name: NAME, at: 0, crc: crc.sum(), length }];
        for (name, content) in [("archive/byteorder", &b"little"[..]), ("archive/version", b"3\n")] {
            let at = out.stream_position()?;
            let mut crc = Crc::new();
            crc.update(content);
            header(&mut out, name, crc.sum(), Some(content.len() as u64))?;
            out.write_all(content)?;
            entries.push(Entry { name, at, crc: crc.sum(), length: content.len() as u64 });
        }
        let directory = out.stream_position()?;
        entries.iter().try_for_each(|entry| entry.write(&mut out))?;
        let end = out.stream_position()?;
        ends(&mut out, entries.len() as u64, directory, end - directory)?;
        // The checksum and the length of the pickle are known now.
        out.seek(SeekFrom::Start(CRC_AT))?;
        out.write_all(&crc.sum().to_le_bytes())?;
        out.seek(SeekFrom::Start(HEADER_LEN + NAME.len() as u64 + 4))?;
        out.write_all(&length.to_le_bytes())?;
        out.write_all(&length.to_le_bytes())?;
        out.seek(SeekFrom::End(0))?;
        Ok(out)
    }
}

/// A file's header; without a length it has room for one of 64 bits.
fn header(out: &mut impl Write, name: &str, crc: u32, length: Option<u64>) -> io::Result<()> {
    out.write_all(b"PK\x03\x04")?;
    out.write_all(&ZIP64_VERSION.to_le_bytes())?;
    for field in [0, 0, 0, DATE] {
        out.write_all(&u16::to_le_bytes(field))?;
    }
    out.write_all(&crc.to_le_bytes())?;
    let short = length.map_or(u32::MAX, |length| length as u32);
    out.write_all(&short.to_le_bytes())?;
    out.write_all(&short.to_le_bytes())?;
    out.write_all(&(name.len() as u16).to_le_bytes())?;
    let extra: u16 = if length.is_some() { 0 } else { 20 };
    out.write_all(&extra.to_le_bytes())?;
    out.write_all(name.as_bytes())?;
    if length.is_none() {
        out.write_all(&[1, 0, 16, 0])?;
        out.write_all(&[0; 16])?;
    }
    Ok(())
}

/// A file in the archive's directory.
struct Entry {
    name: &'static str,
    at: u64,
    crc: u32,
    length: u64,
}

impl Entry {
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(b"PK\x01\x02")?;
        for field in [ZIP64_VERSION, ZIP64_VERSION, 0, 0, 0, DATE] {
            out.write_all(&field.to_le_bytes())?;
        }
        out.write_all(&self.crc.to_le_bytes())?;
        out.write_all(&[0xff; 8])?;
        out.write_all(&(self.name.len() as u16).to_le_bytes())?;
        // Extra field of 28 bytes, no comment, first disk, no attributes.
        out.write_all(&28_u16.to_le_bytes())?;
        out.write_all(&[0; 10])?;
        out.write_all(&[0xff; 4])?;
        out.write_all(self.name.as_bytes())?;
        out.write_all(&[1, 0, 24, 0])?;
        for field in [self.length, self.length, self.at] {
            out.write_all(&field.to_le_bytes())?;
        }
        Ok(())
    }
}

/// The end of an archive's directory, in both of its forms.
fn ends(out: &mut impl Write, entries: u64, at: u64, length: u64) -> io::Result<()> {
    out.write_all(b"PK\x06\x06")?;
    out.write_all(&44_u64.to_le_bytes())?;
    out.write_all(&ZIP64_VERSION.to_le_bytes())?;
    out.write_all(&ZIP64_VERSION.to_le_bytes())?;
    out.write_all(&[0; 8])?;
    for field in [entries, entries, length, at] {
        out.write_all(&field.to_le_bytes())?;
    }
    out.write_all(b"PK\x06\x07\0\0\0\0")?;
    out.write_all(&(at + length).to_le_bytes())?;
    out.write_all(&1_u32.to_le_bytes())?;
    out.write_all(b"PK\x05\x06\0\0\0\0")?;
    out.write_all(&[0xff; 12])?;
    out.write_all(&[0; 2])
}
