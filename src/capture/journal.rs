//! The active segment: writes a batch of payloads, syncs once, and takes back what was not synced.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::Histogram;

use super::frame::{self, HEADER_LEN};
use super::layout::{SegmentName, journal_dir};
use super::payload::{LONG, Payload};
use super::storage::{Disk, Storage};
use super::writer::{Durability, WriterOptions};

/// Capacity kept between commits.
const KEPT_BUFFER: usize = 1 << 20;

/// A segment that takes no more frames.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sealed {
    pub(super) name: SegmentName,
    /// Its acknowledged bytes; what lies behind them was taken back.
    pub(super) length: u64,
}

struct Segment {
    name: SegmentName,
    path: PathBuf,
    disk: Box<dyn Disk>,
    /// Bytes that are acknowledged; what lies behind them may be overwritten.
    committed: u64,
    opened: Instant,
}

/// Appends batches to segments and hands out the names of those that are full.
pub(super) struct Journal {
    dir: PathBuf,
    options: WriterOptions,
    next_number: u64,
    active: Option<Segment>,
    storage: Arc<dyn Storage>,
    buffer: Vec<u8>,
    sync_time: Histogram,
}

impl Journal {
    pub(super) fn new(
        dir: PathBuf,
        options: WriterOptions,
        next_number: u64,
        storage: Arc<dyn Storage>,
    ) -> Self {
        let sync_time = metrics::histogram!("lego_capture_fsync_seconds");
        Self { dir, options, next_number, active: None, storage, buffer: Vec::new(), sync_time }
    }

    /// Writes `payloads` as frames and syncs them, all or none: after an error the segment ends where it
    /// ended before, and a segment whose sync failed is never written again.
    ///
    /// `sealed` gets the segments that take no more frames.
    pub(super) fn commit(&mut self, payloads: &[&Payload], sealed: &mut Vec<Sealed>) -> io::Result<()> {
        let mut segment = match self.active.take() {
            Some(segment) => segment,
            None => self.create_segment()?,
        };
        let mut end = segment.committed;
        let written = self.write(&mut segment, payloads, &mut end);
        self.buffer.clear();
        self.buffer.shrink_to(KEPT_BUFFER);
        let outcome = match written {
            Ok(()) if self.options.durability == Durability::Full => {
                let began = Instant::now();
                let synced = segment.disk.sync().map_err(|error| (error, true));
                self.sync_time.record(began.elapsed());
                synced
            }
            Ok(()) => Ok(()),
            Err(error) => Err((error, false)),
        };
        match outcome {
            Ok(()) => {
                segment.committed = end;
                self.active = Some(segment);
                if end >= self.options.segment_bytes {
                    sealed.extend(self.seal());
                }
                Ok(())
            }
            Err((error, is_sync)) => {
                let taken_back = segment.disk.truncate(segment.committed);
                if is_sync || taken_back.is_err() {
                    sealed.extend(self.retire(segment));
                } else {
                    self.active = Some(segment);
                }
                Err(error)
            }
        }
    }

    /// Writes `payloads` as frames from `at` on, which then is where they end. Long parts are written from where they lie.
    fn write(&mut self, segment: &mut Segment, payloads: &[&Payload], at: &mut u64) -> io::Result<()> {
        let buffer = &mut self.buffer;
        buffer.clear();
        let mut write = |bytes: &[u8]| -> io::Result<()> {
            segment.disk.write_at(*at, bytes)?;
            *at += bytes.len() as u64;
            Ok(())
        };
        for payload in payloads {
            let parts = payload.parts().iter().map(|part| part.as_ref());
            buffer.extend_from_slice(&frame::head(segment.name.salt, payload.len(), parts));
            for part in payload.parts() {
                if part.len() < LONG {
                    buffer.extend_from_slice(part);
                    continue;
                }
                write(buffer)?;
                buffer.clear();
                write(part)?;
            }
        }
        if buffer.is_empty() { Ok(()) } else { write(buffer) }
    }

    /// When the active segment is old enough to be sealed.
    pub(super) fn due(&self) -> Option<Instant> {
        let segment = self.active.as_ref()?;
        (segment.committed > HEADER_LEN as u64).then(|| segment.opened + self.options.segment_age)
    }

    /// Ends the active segment, if it holds anything.
    pub(super) fn seal(&mut self) -> Option<Sealed> {
        let segment = self.active.take()?;
        self.retire(segment)
    }

    fn create_segment(&mut self) -> io::Result<Segment> {
        let salt = uuid::Uuid::new_v4().into_bytes();
        let salt = std::array::from_fn(|i| salt[i] ^ salt[i + 8]);
        let name = SegmentName { number: self.next_number, salt };
        let path = name.journal_path(&self.dir);
        let start = || {
            let mut disk = self.storage.create(&path)?;
            disk.write_at(0, &frame::header(salt))?;
            if self.options.durability == Durability::Full {
                self.storage.sync_folder(&journal_dir(&self.dir))?;
            }
            Ok(disk)
        };
        let disk = start().inspect_err(|_: &io::Error| {
            // An empty segment may stay behind on a full disk; recovery removes it.
            let _ = self.storage.remove(&path);
        })?;
        self.next_number += 1;
        let committed = HEADER_LEN as u64;
        Ok(Segment { name, path, disk, committed, opened: Instant::now() })
    }

    fn retire(&self, segment: Segment) -> Option<Sealed> {
        if segment.committed > HEADER_LEN as u64 {
            return Some(Sealed { name: segment.name, length: segment.committed });
        }
        let _ = self.storage.remove(&segment.path);
        None
    }
}

/// Time left until `due`, at least nothing.
pub(super) fn until(due: Instant) -> Duration {
    due.saturating_duration_since(Instant::now())
}
