//! The calls of one journal segment, in the order in which they were written or session by session.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::vec;

use bytes::Bytes;

use super::error::CaptureError;
use super::frame::{self, Frames, HEADER_LEN, Salt, Step};
use super::payload;
use crate::record::{Call, CallId};

/// The calls of one journal segment, up to the last whole frame. A call written twice comes once.
pub(super) struct SegmentCalls {
    path: PathBuf,
    source: Option<Source>,
    ready: VecDeque<Call>,
    seen: HashSet<(CallId, u16)>,
    /// Where it must end, if that is known.
    length: Option<u64>,
    /// Bytes so far that hold no call although they should.
    pub(super) damaged_bytes: u64,
    /// Those of them behind which whole frames follow.
    pub(super) lost_bytes: u64,
}

enum Source {
    Written(Frames<BufReader<io::Take<File>>>),
    Sorted { file: File, salt: Salt, frames: vec::IntoIter<Place> },
}

/// Where a frame lies, and what it is sorted by: its calls are choices of one, or it need not be in order.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    first: Option<(String, i64, CallId)>,
    at: u64,
    bytes: usize,
}

impl SegmentCalls {
    /// `length`: how much of the file to read, all of it if `None`.
    pub(super) fn open(path: &Path, length: Option<u64>) -> Result<Self, CaptureError> {
        let file = File::open(path).map_err(CaptureError::io("open", path))?;
        Self::of(path.to_owned(), file, length)
    }

    /// The same of a file that is open, at its beginning.
    pub(super) fn of(path: PathBuf, mut file: File, length: Option<u64>) -> Result<Self, CaptureError> {
        let mut head = Vec::new();
        file.by_ref()
            .take(HEADER_LEN as u64)
            .read_to_end(&mut head)
            .map_err(CaptureError::io("read", &path))?;
        let salt = frame::parse_header(&head);
        // Before there is a whole header nothing in the segment is acknowledged.
        let damaged_bytes = match (salt, length) {
            (Some(_), _) => 0,
            (None, Some(length)) => length,
            (None, None) if head.len() < HEADER_LEN => 0,
            (None, None) => file.metadata().map_err(CaptureError::io("read", &path))?.len(),
        };
        let behind = length.unwrap_or(u64::MAX).saturating_sub(HEADER_LEN as u64);
        let source = salt.map(|salt| {
            Source::Written(Frames::new(BufReader::with_capacity(1 << 20, file.take(behind)), salt))
        });
        let (ready, seen) = (VecDeque::new(), HashSet::new());
        Ok(Self { path, source, ready, seen, length, damaged_bytes, lost_bytes: 0 })
    }

    /// Those of a segment of this length session by session, in each as they were received. The file is read twice, so
    /// that only the frames' places are in memory.
    pub(super) fn sorted(path: &Path, length: u64) -> Result<Self, CaptureError> {
        let failed = || CaptureError::io("read", path);
        let mut calls = Self::open(path, Some(length))?;
        let Some(Source::Written(mut written)) = calls.source.take() else {
            return Ok(calls);
        };
        let mut frames = vec![];
        loop {
            let at = written.at();
            match written.step().map_err(failed())? {
                Step::Frame(payload) => {
                    let bytes = usize::try_from(written.at() - at).unwrap_or(usize::MAX);
                    frames.push(Place { first: payload::first(&payload), at, bytes });
                }
                Step::Damage { bytes, .. } => calls.lose(bytes),
                Step::End { at, torn } => {
                    calls.end(at, torn);
                    break;
                }
            }
        }
        frames.sort_unstable();
        let salt = written.salt();
        let file = File::open(path).map_err(CaptureError::io("open", path))?;
        calls.source = Some(Source::Sorted { file, salt, frames: frames.into_iter() });
        Ok(calls)
    }

    /// The next whole frame; `None` at the end.
    fn frame(&mut self) -> Result<Option<Bytes>, CaptureError> {
        loop {
            let step = match &mut self.source {
                None => return Ok(None),
                Some(Source::Written(frames)) => {
                    frames.step().map_err(CaptureError::io("read", &self.path))?
                }
                Some(Source::Sorted { file, salt, frames }) => {
                    let Some(Place { at, bytes, .. }) = frames.next() else {
                        return Ok(None);
                    };
                    let mut frame = vec![0; bytes];
                    file.read_exact_at(&mut frame, at).map_err(CaptureError::io("read", &self.path))?;
                    let payload = frame::whole_payload(frame, *salt);
                    let changed =
                        || CaptureError::corrupt(&self.path, format!("byte {at} changed while it was read"));
                    return payload.ok_or_else(changed).map(Some);
                }
            };
            match step {
                Step::Frame(payload) => return Ok(Some(payload)),
                Step::Damage { bytes, .. } => self.lose(bytes),
                Step::End { at, torn } => {
                    self.end(at, torn);
                    self.source = None;
                }
            }
        }
    }

    /// Damaged bytes are passed over.
    const fn lose(&mut self, bytes: u64) {
        self.damaged_bytes += bytes;
        self.lost_bytes += bytes;
    }

    /// Nothing whole follows `at`.
    fn end(&mut self, at: u64, torn: u64) {
        let missing = self.length.map_or(0, |length| length.saturating_sub(at + torn));
        self.damaged_bytes += torn + missing;
    }

    /// Reads frames until one with new calls; false at the end.
    fn refill(&mut self) -> Result<bool, CaptureError> {
        while self.ready.is_empty() {
            let Some(payload) = self.frame()? else {
                return Ok(false);
            };
            let calls =
                payload::decode(&payload).map_err(|reason| CaptureError::corrupt(&self.path, reason))?;
            self.ready =
                calls.into_iter().filter(|c| self.seen.insert((c.call_id, c.choice_index))).collect();
        }
        Ok(true)
    }
}

impl Iterator for SegmentCalls {
    type Item = Result<Call, CaptureError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.refill() {
            Ok(true) => self.ready.pop_front().map(Ok),
            Ok(false) => None,
            Err(error) => {
                self.source = None;
                Some(Err(error))
            }
        }
    }
}
