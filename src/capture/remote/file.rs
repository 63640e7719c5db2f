//! A Parquet file, wherever it lies. Of one in object storage only the ranges are fetched that are asked for.
//!
//! Columns that are wanted and lie side by side are fetched together, [`AHEAD`] bytes at a time; those that rows are
//! chosen by come alone, so that a row group without a match costs no more. What was fetched is kept up to
//! [`KEPT`] bytes: columns are decoded in turns.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::Bytes;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};
use parquet::file::reader::{ChunkReader, Length};

use super::{Object, Remote};
use crate::capture::error::CaptureError;
use crate::capture::footer;

/// Bytes of wanted columns that are fetched at once, if they are not asked for in larger pieces.
const AHEAD: u64 = 1 << 20;
/// Bytes that are fetched of what nobody said to be wanted, at least: a page's head.
const LITTLE: u64 = 8 << 10;
/// Bytes at the end that are fetched first. Most footers fit.
const END: u64 = 64 << 10;
/// Bytes that are skipped rather than fetched apart, and bytes of one file that are kept.
const GAP: u64 = 64 << 10;
const KEPT: u64 = 64 << 20;

/// A Parquet file that is open.
#[derive(Clone)]
pub(in crate::capture) enum Stored {
    Local { file: Arc<File>, read: Tally, footer: Footer },
    Remote(RemoteFile),
}

/// Of a file that is opened several times, read once.
pub(in crate::capture) type Footer = Arc<OnceLock<ArrowReaderMetadata>>;

/// Counts bytes that are read.
#[derive(Debug, Clone, Default)]
pub(in crate::capture) struct Tally(Arc<AtomicU64>);

impl Tally {
    pub(in crate::capture) fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(in crate::capture) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Stored {
    /// One of this machine.
    pub(in crate::capture) fn here(file: File, read: &Tally, footer: &Footer) -> Self {
        Self::Local { file: Arc::new(file), read: read.clone(), footer: Arc::clone(footer) }
    }

    pub(in crate::capture) fn footer(&self) -> Result<ArrowReaderMetadata> {
        let read = || footer::read(self);
        match self {
            Self::Local { footer, .. } => match footer.get() {
                Some(footer) => Ok(footer.clone()),
                None => read().inspect(|read| drop(footer.set(read.clone()))),
            },
            Self::Remote(file) => file.0.remote.footer(&file.0.object.key, read),
        }
    }

    /// Tells which columns will be read, and those by which rows are chosen before.
    pub(in crate::capture) fn expect(
        &self,
        metadata: &ParquetMetaData,
        groups: &[usize],
        wanted: &ProjectionMask,
        first: &[usize],
    ) {
        let Self::Remote(file) = self else { return };
        let mut runs: Vec<Range<u64>> = vec![];
        for &group in groups {
            let columns = metadata.row_group(group).columns().iter().enumerate();
            let mut ranges: Vec<(Range<u64>, bool)> = columns
                .filter(|(leaf, _)| wanted.leaf_included(*leaf) || first.contains(leaf))
                .filter_map(|(leaf, column)| Some((range(column)?, first.contains(&leaf))))
                .collect();
            ranges.sort_by_key(|(range, _)| range.start);
            let mut may_join = false;
            for (range, is_first) in ranges {
                match runs.last_mut() {
                    Some(last) if may_join && !is_first && range.start <= last.end + GAP => {
                        last.end = last.end.max(range.end);
                    }
                    _ => runs.push(range),
                }
                may_join = !is_first;
            }
        }
        file.windows().runs = runs;
    }

    /// What went wrong on the network, if anything did: then it is no fault of the file.
    pub(in crate::capture) fn failure(&self) -> Option<CaptureError> {
        match self {
            Self::Local { .. } => None,
            Self::Remote(file) => file.windows().failure.take(),
        }
    }
}

/// Where a column lies; a damaged footer may say what cannot be.
fn range(column: &ColumnChunkMetaData) -> Option<Range<u64>> {
    let start = column.dictionary_page_offset().unwrap_or_else(|| column.data_page_offset());
    let start = u64::try_from(start).ok()?;
    Some(start..start.checked_add(u64::try_from(column.compressed_size()).ok()?)?)
}

/// One in object storage.
#[derive(Clone)]
pub(in crate::capture) struct RemoteFile(Arc<Inner>);

struct Inner {
    remote: Remote,
    object: Object,
    windows: Mutex<Windows>,
    read: Tally,
}

#[derive(Default)]
struct Windows {
    /// Ranges of which all will be wanted, in order, of each row group.
    runs: Vec<Range<u64>>,
    /// What was fetched, each with its place; the newest last.
    pieces: VecDeque<(u64, Bytes)>,
    bytes: u64,
    failure: Option<CaptureError>,
}

impl Windows {
    /// Bytes from `start` on, if at least `least` of them are at hand.
    fn kept(&self, start: u64, least: u64) -> Option<Bytes> {
        let holds = |(at, bytes): &&(u64, Bytes)| *at <= start && start + least <= at + bytes.len() as u64;
        let (at, bytes) = self.pieces.iter().find(holds)?;
        Some(bytes.slice((start - at) as usize..))
    }
}

impl RemoteFile {
    pub(in crate::capture) fn new(remote: Remote, object: Object, read: &Tally) -> Self {
        Self(Arc::new(Inner { remote, object, windows: Mutex::default(), read: read.clone() }))
    }

    /// No code panics while it holds this lock.
    fn windows(&self) -> MutexGuard<'_, Windows> {
        self.0.windows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes from `start` on, at least `least` of them.
    fn bytes_at(&self, start: u64, least: u64) -> Result<Bytes> {
        let size = self.0.object.bytes;
        let Some(end) = start.checked_add(least).filter(|end| *end <= size) else {
            let found = format!("{least} bytes at byte {start} of {size} are wanted");
            return Err(ParquetError::EOF(found));
        };
        let mut windows = self.windows();
        if let Some(bytes) = windows.kept(start, least) {
            return Ok(bytes);
        }
        // A long page whose beginning came with what lies before it.
        let begun = windows.kept(start, 1).unwrap_or_default();
        let from = start + begun.len() as u64;
        let run = windows.runs.iter().find(|run| run.contains(&from));
        let range = match run {
            Some(run) => from..end.max(run.end.min(from + AHEAD)),
            None if windows.runs.is_empty() && start + END >= size => size.saturating_sub(END)..size,
            None => from..end,
        };
        let at = range.start;
        let fetched = self.0.remote.fetch(&self.0.object, range);
        let bytes = fetched.map_err(|error| {
            let told = ParquetError::General(error.to_string());
            windows.failure = Some(error);
            told
        })?;
        self.0.read.add(bytes.len() as u64);
        let (at, bytes) = if at == from && !begun.is_empty() {
            (start, Bytes::from([begun, bytes].concat()))
        } else {
            (at, bytes)
        };
        windows.bytes += bytes.len() as u64;
        windows.pieces.push_back((at, bytes.clone()));
        while windows.bytes > KEPT && windows.pieces.len() > 1 {
            let oldest = windows.pieces.pop_front();
            windows.bytes -= oldest.map_or(0, |(_, bytes)| bytes.len() as u64);
        }
        Ok(bytes.slice((start - at) as usize..))
    }
}

impl Length for Stored {
    fn len(&self) -> u64 {
        match self {
            Self::Local { file, .. } => file.len(),
            Self::Remote(file) => file.0.object.bytes,
        }
    }
}

impl ChunkReader for Stored {
    type T = StoredRead;

    fn get_read(&self, start: u64) -> Result<StoredRead> {
        Ok(match self {
            Self::Local { file, read, .. } => StoredRead::Local(file.get_read(start)?, read.clone()),
            Self::Remote(file) => StoredRead::Remote { file: file.clone(), at: start },
        })
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        match self {
            Self::Local { file, read, .. } => {
                read.add(length as u64);
                file.get_bytes(start, length)
            }
            Self::Remote(file) => Ok(file.bytes_at(start, length as u64)?.slice(..length)),
        }
    }
}

/// Reads from some place on.
pub(in crate::capture) enum StoredRead {
    Local(BufReader<File>, Tally),
    Remote { file: RemoteFile, at: u64 },
}

impl Read for StoredRead {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (file, at) = match self {
            Self::Local(file, tally) => {
                let count = file.read(buffer)?;
                tally.add(count as u64);
                return Ok(count);
            }
            Self::Remote { file, at } => (file, at),
        };
        let left = file.0.object.bytes.saturating_sub(*at);
        if left == 0 || buffer.is_empty() {
            return Ok(0);
        }
        // What is kept will do, however little it is.
        let kept = file.windows().kept(*at, 1);
        let bytes =
            kept.map_or_else(|| file.bytes_at(*at, left.min(LITTLE)), Ok).map_err(io::Error::other)?;
        let count = bytes.len().min(buffer.len());
        buffer[..count].copy_from_slice(&bytes[..count]);
        *at += count as u64;
        Ok(count)
    }
}

/// A whole copy of one in object storage that has no name, to be read as a file of this machine.
pub(in crate::capture) fn copied(
    remote: &Remote,
    object: &Object,
) -> std::result::Result<File, CaptureError> {
    let shown: PathBuf = remote.path(object);
    let mut file = crate::capture::spill::nameless(&std::env::temp_dir())
        .map_err(CaptureError::io("make a place on this machine for", &shown))?;
    remote.copy_to(object, &mut file)?;
    Ok(file)
}
