//! A checksum over what a Parquet file says. Parquet's own page checksums are not written by the library, so the file's
//! metadata has one over all bytes before the indexes: a flipped bit in a page of raw numbers decodes as well. Indexes and
//! footer have their own ([`footer`]), which are known only when those are made: they are held back until then.

use std::fs::File;
use std::io::{self, Read, Write};

use parquet::file::metadata::KeyValue;

use super::footer;
use super::storage::Disk;

/// Key of the checksum in a file's metadata: `<bytes>:<crc32c, hex>`, of its first bytes.
const KEY: &str = "lego.crc32c";

/// A file that is summed while it is written.
pub(super) struct Summed {
    disk: Box<dyn Disk>,
    bytes: u64,
    crc: u32,
    held: Option<Vec<u8>>,
}

impl Summed {
    pub(super) fn new(disk: Box<dyn Disk>) -> Self {
        Self { disk, bytes: 0, crc: 0, held: None }
    }

    /// What is written from here on, indexes and footer, is held back.
    pub(super) fn hold(&mut self) {
        self.held = Some(vec![]);
    }

    /// Writes what was held back, with its checksums.
    pub(super) fn release(&mut self) -> io::Result<()> {
        let mut end = self.held.take().unwrap_or_default();
        footer::sign(&mut end, self.bytes).map_err(io::Error::other)?;
        self.write_all(&end)
    }

    /// Brings what was written to disk.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.disk.sync()
    }

    /// The checksum of what was written so far.
    pub(super) fn key_value(&self) -> KeyValue {
        KeyValue::new(KEY.to_owned(), format!("{}:{:08x}", self.bytes, self.crc))
    }
}

impl Write for Summed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(held) = &mut self.held {
            held.extend_from_slice(bytes);
            return Ok(bytes.len());
        }
        self.disk.write_at(self.bytes, bytes)?;
        self.bytes += bytes.len() as u64;
        self.crc = crc32c::crc32c_append(self.crc, bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a file's checksum says of its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Sum {
    Right,
    /// The file is from before there were checksums.
    Absent,
    Wrong(String),
}

/// Reads what is summed, from the file's beginning.
pub(super) fn check(file: &File, metadata: Option<&Vec<KeyValue>>) -> io::Result<Sum> {
    let told = metadata.and_then(|pairs| pairs.iter().find(|pair| pair.key == KEY));
    let Some(told) = told else {
        return Ok(Sum::Absent);
    };
    let text = told.value.as_deref().unwrap_or_default();
    let parsed = text
        .split_once(':')
        .and_then(|(bytes, crc)| Some((bytes.parse::<u64>().ok()?, u32::from_str_radix(crc, 16).ok()?)));
    let Some((bytes, wanted)) = parsed else {
        return Ok(Sum::Wrong(format!("its checksum reads {text:?}")));
    };
    let mut rest = file.take(bytes);
    let (mut buffer, mut read, mut crc) = (vec![0; 1 << 20], 0, 0);
    loop {
        let count = rest.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        read += count as u64;
        crc = crc32c::crc32c_append(crc, &buffer[..count]);
    }
    if (read, crc) == (bytes, wanted) {
        return Ok(Sum::Right);
    }
    Ok(Sum::Wrong(format!("CRC-32C of its first {bytes} bytes is {crc:08x}, it was written as {wanted:08x}")))
}
