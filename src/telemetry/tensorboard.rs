//! TensorBoard event files: TFRecord framing around a few protobuf fields.
//!
//! Record (tensorflow/core/lib/io/record_writer.h): `u64 length, u32 masked crc of length, data, u32 masked crc
//! of data`, little-endian. Event (tensorflow/core/util/event.proto): `1 double wall_time, 2 int64 step,
//! 3 string file_version, 5 Summary summary, 7 SessionLog session_log`; Summary.Value: `1 string tag,
//! 2 float simple_value`.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::TelemetryError;

/// One point of a curve.
#[derive(Debug, Clone, PartialEq)]
pub struct Scalar {
    pub step: u64,
    pub tag: String,
    pub value: f32,
}

/// Writes one event file.
#[derive(Debug)]
pub struct TensorBoard {
    path: PathBuf,
    file: File,
}

impl TensorBoard {
    /// Opens a new event file in `folder`. With `resume_at`, readers drop earlier files' points at or after
    /// that step.
    ///
    /// # Errors
    /// [`TelemetryError::Io`].
    pub fn create(folder: &Path, resume_at: Option<u64>) -> Result<Self, TelemetryError> {
        std::fs::create_dir_all(folder).map_err(TelemetryError::io(folder))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // Readers take files in the order of their names; a counter parts those of one second.
        let (path, file) = (0..)
            .find_map(|count| {
                let name =
                    format!("events.out.tfevents.{:010}.lego.{}.{count}", now.as_secs(), std::process::id());
                let path = folder.join(name);
                match File::options().write(true).create_new(true).open(&path) {
                    Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => None,
                    opened => Some((path, opened)),
                }
            })
            .expect("some count is free");
        let file = file.map_err(TelemetryError::io(&path))?;
        let mut board = Self { path, file };
        let mut event = Message::default();
        event.double(1, now.as_secs_f64());
        event.bytes(3, b"brain.Event:2");
        board.record(&event.0)?;
        if let Some(step) = resume_at {
            let mut session = Message::default();
            session.varint(1, 1); // SessionLog.START
            let mut event = Message::default();
            event.double(1, now.as_secs_f64());
            event.varint(2, step);
            event.bytes(7, &session.0);
            board.record(&event.0)?;
        }
        Ok(board)
    }

    /// The event file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the points of one step.
    ///
    /// # Errors
    /// [`TelemetryError::Io`].
    pub fn write(&mut self, step: u64, scalars: &[(String, f32)]) -> Result<(), TelemetryError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut summary = Message::default();
        for (tag, value) in scalars {
            let mut point = Message::default();
            point.bytes(1, tag.as_bytes());
            point.float(2, *value);
            summary.bytes(1, &point.0);
        }
        let mut event = Message::default();
        event.double(1, now.as_secs_f64());
        event.varint(2, step);
        event.bytes(5, &summary.0);
        self.record(&event.0)
    }

    fn record(&mut self, data: &[u8]) -> Result<(), TelemetryError> {
        let length = (data.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(data.len() + 16);
        record.extend_from_slice(&length);
        record.extend_from_slice(&masked_crc(&length).to_le_bytes());
        record.extend_from_slice(data);
        record.extend_from_slice(&masked_crc(data).to_le_bytes());
        self.file.write_all(&record).map_err(TelemetryError::io(&self.path))
    }
}

fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// A protobuf message under construction.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value as u8) | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u64, wire_type: u64) {
        self.raw_varint(field << 3 | wire_type);
    }

    fn varint(&mut self, field: u64, value: u64) {
        self.key(field, 0);
        self.raw_varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.key(field, 1);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.key(field, 2);
        self.raw_varint(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, 5);
        self.0.extend_from_slice(&value.to_le_bytes());
    }
}

/// The points of an event file, in order; a torn last record is left out.
///
/// # Errors
/// [`TelemetryError::Io`], and [`TelemetryError::Broken`] on a wrong checksum or field.
pub fn read_scalars(path: &Path) -> Result<Vec<Scalar>, TelemetryError> {
    let bytes = std::fs::read(path).map_err(TelemetryError::io(path))?;
    let broken = |cause: &str| TelemetryError::Broken { path: path.to_owned(), cause: cause.to_owned() };
    let mut scalars = Vec::new();
    let mut rest = bytes.as_slice();
    while let Some((data, tail)) = next_record(rest).map_err(broken)? {
        rest = tail;
        scalars.extend(points(data).ok_or_else(|| broken("a record is no event"))?);
    }
    Ok(scalars)
}

fn next_record(bytes: &[u8]) -> Result<Option<(&[u8], &[u8])>, &'static str> {
    let Some((header, rest)) = bytes.split_first_chunk::<12>() else {
        return Ok(None);
    };
    let (length, crc) = header.split_at(8);
    if crc != masked_crc(length).to_le_bytes() {
        return Err("a record's length has a wrong checksum");
    }
    let length = length.iter().rev().fold(0_usize, |length, byte| length << 8 | usize::from(*byte));
    if rest.len() < length + 4 {
        return Ok(None);
    }
    let (data, rest) = rest.split_at(length);
    let (crc, rest) = rest.split_at(4);
    if crc != masked_crc(data).to_le_bytes() {
        return Err("a record has a wrong checksum");
    }
    Ok(Some((data, rest)))
}

/// A field: its number and, by wire type, its number or bytes.
enum Field<'a> {
    Number(u64, u64),
    Bytes(u64, &'a [u8]),
}

fn fields(mut bytes: &[u8]) -> Option<Vec<Field<'_>>> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = take_varint(&mut bytes)?;
        fields.push(match key & 7 {
            0 => Field::Number(key >> 3, take_varint(&mut bytes)?),
            1 => Field::Bytes(key >> 3, bytes.split_off(..8)?),
            2 => {
                let length = usize::try_from(take_varint(&mut bytes)?).ok()?;
                Field::Bytes(key >> 3, bytes.split_off(..length)?)
            }
            5 => Field::Bytes(key >> 3, bytes.split_off(..4)?),
            _ => return None,
        });
    }
    Some(fields)
}

fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.split_off_first()?;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

fn points(event: &[u8]) -> Option<Vec<Scalar>> {
    let mut step = 0;
    let mut scalars = Vec::new();
    for field in fields(event)? {
        match field {
            Field::Number(2, value) => step = value,
            Field::Bytes(5, summary) => {
                for value in fields(summary)? {
                    let Field::Bytes(1, value) = value else {
                        return None;
                    };
                    let mut tag = None;
                    let mut number = None;
                    for field in fields(value)? {
                        match field {
                            Field::Bytes(1, text) => tag = String::from_utf8(text.to_vec()).ok(),
                            Field::Bytes(2, bytes) => number = bytes.try_into().ok().map(f32::from_le_bytes),
                            _ => {}
                        }
                    }
                    scalars.push(Scalar { step, tag: tag?, value: number? });
                }
            }
            _ => {}
        }
    }
    for scalar in &mut scalars {
        scalar.step = step;
    }
    Some(scalars)
}
