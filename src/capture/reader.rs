//! Calls back out of a folder: Parquet and journal together, also while a writer runs. Every call comes exactly once
//! ([`Listing`]), without remembering ids.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use super::ahead::{self, Calls};
use super::error::CaptureError;
use super::filter::Filter;
use super::frame::{self, Frames, HEADER_LEN, Step};
use super::layout;
use super::listing::{ListedFile, Listing};
use super::payload;
use super::place::Place;
use super::rows::{self, Joiner};
use crate::record::{Call, CallId, Routing, RoutingBase, SessionId, TrialId};

/// Which calls to read, and how much of each. Default: all of everything.
#[derive(Debug, Clone, Default)]
pub struct Query {
    /// Only this session.
    pub session_id: Option<SessionId>,
    /// Only this trial.
    pub trial_id: Option<TrialId>,
    /// Only this call.
    pub call_id: Option<CallId>,
    /// Only calls for which this is true.
    pub filter: Option<Filter>,
    /// Leave `client_request`, `upstream_request` and `response` null: what training needs is far smaller.
    pub without_bodies: bool,
    /// Leave expert routing out.
    pub without_routing: bool,
}

impl Query {
    /// All calls of one session.
    #[must_use]
    pub fn session(session_id: SessionId) -> Self {
        Self { session_id: Some(session_id), ..Self::default() }
    }

    pub(super) fn wants(&self, call: &Call) -> bool {
        self.session_id.as_ref().is_none_or(|id| *id == call.session_id)
            && self.trial_id.as_ref().is_none_or(|id| Some(id) == call.trial_id.as_ref())
            && self.call_id.is_none_or(|id| id == call.call_id)
            && self.filter.as_ref().is_none_or(|filter| filter.matches(call))
    }

    /// Takes away from a call that is wanted what is not wanted of it.
    pub(super) fn strip(&self, call: &mut Call) {
        if self.without_bodies {
            call.client_request = None;
            call.upstream_request = None;
            call.response = None;
        }
        if self.without_routing {
            call.routing = None;
        }
    }
}

/// The calls of a capture folder: an iterator over `Result<Call, CaptureError>`, oldest file first.
///
/// Memory: one row group's columns, or one journal frame, and up to 256 MiB of expert routing for the calls that follow,
/// whatever the folder's size.
pub struct Reader {
    dir: Place,
    query: Query,
    /// Puts back the rows of expert routing that a call shares with an earlier one; `None`: as they lie in the store.
    rows: Option<Joiner>,
    files: VecDeque<ListedFile>,
    segments: VecDeque<SegmentCalls>,
    current: Option<(Calls, ListedFile)>,
    skipped: Vec<String>,
    damaged_bytes: u64,
    lost_bytes: u64,
}

impl Reader {
    /// Opens `dir` for `query`.
    ///
    /// # Errors
    /// The folder is missing or cannot be listed.
    pub fn open(dir: impl Into<Place>, query: Query) -> Result<Self, CaptureError> {
        let reader = Self::open_since(&dir.into(), query, 0)?;
        reader.dir.expect_some(reader.files.is_empty() && reader.segments.is_empty())?;
        Ok(reader)
    }

    /// As [`Reader::open`]; calls come as they lie in the store, without rows of routing that others have.
    pub(super) fn open_stored(dir: &Place, query: Query) -> Result<Self, CaptureError> {
        Ok(Self { rows: None, ..Self::open(dir, query)? })
    }

    /// As [`Reader::open`], without the files of segments before `since`.
    pub(super) fn open_since(dir: &Place, query: Query, since: u64) -> Result<Self, CaptureError> {
        let Listing { segments, files } = Listing::of(dir, since)?;
        let segments = segments.into_iter().map(|open| SegmentCalls::of(open.path, open.file, None));
        let segments = segments.collect::<Result<_, _>>()?;
        let aside = |path: &PathBuf| {
            format!("{}: damaged, and set aside: not all of it could be read", path.display())
        };
        let skipped = layout::damaged(dir.dir())?.iter().map(aside).collect();
        let rows = (!query.without_routing).then(Joiner::default);
        let (dir, files, current) = (dir.clone(), files.into(), None);
        Ok(Self { dir, query, rows, files, segments, current, skipped, damaged_bytes: 0, lost_bytes: 0 })
    }

    /// The rows of a session's calls as they lie in the store, but for what is damaged: who reads those calls is told.
    pub(super) fn stored_rows(
        dir: &Place,
        session_id: &SessionId,
    ) -> Result<Vec<(RoutingBase, Routing)>, CaptureError> {
        let query = Query { without_bodies: true, ..Query::session(session_id.clone()) };
        let calls = Self::open_stored(dir, query)?;
        let mut rows = Vec::new();
        for call in calls {
            match call {
                Ok(mut call) => rows.extend(call.routing.take().map(|routing| (rows::name(&call), routing))),
                Err(error) => {
                    tracing::warn!(%error, session = %session_id, "calls may lack rows of expert routing")
                }
            }
        }
        Ok(rows)
    }

    /// Files that were left out so far, each with the reason: empty, unreadable or foreign Parquet files, and damaged
    /// segments of the journal.
    #[must_use]
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// Journal bytes passed over so far because their checksum is wrong. What a running writer has not
    /// finished yet counts too.
    #[must_use]
    pub fn damaged_bytes(&self) -> u64 {
        self.damaged_bytes
    }

    /// What calls may be missing so far, in words: [`Reader::skipped`], and bytes of the journal whose checksum is wrong
    /// and behind which whole frames follow, so that they are no end that a writer has not finished.
    #[must_use]
    pub fn left_out(&self) -> Vec<String> {
        let lost = self.lost_bytes;
        let lost =
            (lost > 0).then(|| format!("{lost} damaged bytes of the journal: the calls in them are lost"));
        self.skipped.iter().cloned().chain(lost).collect()
    }

    fn next_from_parquet(&mut self) -> Option<Result<Call, CaptureError>> {
        loop {
            if let Some((current, _)) = &mut self.current {
                match current.next() {
                    Some(call) => return Some(call),
                    None => self.current = None,
                }
            }
            let file = self.files.pop_front()?;
            let path = &file.path;
            match ahead::open(&file, self.files.iter(), &self.query) {
                Ok(Ok(calls)) => self.current = Some((calls, file)),
                // A place that cannot be reached now is no file that is left out.
                Err(error) => return Some(Err(error)),
                Ok(Err(reason)) => {
                    tracing::warn!(path = %path.display(), %reason, "not read as captures");
                    self.skipped.push(format!("{}: {reason}", path.display()));
                }
            }
        }
    }

    fn next_from_journal(&mut self) -> Option<Result<Call, CaptureError>> {
        loop {
            let segment = self.segments.front_mut()?;
            match segment.next() {
                Some(Ok(mut call)) => {
                    if !self.query.wants(&call) {
                        continue;
                    }
                    self.query.strip(&mut call);
                    return Some(Ok(call));
                }
                Some(Err(error)) => return Some(Err(error)),
                None => {
                    self.damaged_bytes += segment.damaged_bytes;
                    self.lost_bytes += segment.lost_bytes;
                    self.segments.pop_front();
                }
            }
        }
    }
}

impl Iterator for Reader {
    type Item = Result<Call, CaptureError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut next = self.next_from_parquet().or_else(|| self.next_from_journal())?;
        if let (Some(rows), Ok(call)) = (&mut self.rows, &mut next)
            && let Err(error) = rows.join(call, |session| Self::stored_rows(&self.dir, session))
        {
            return Some(Err(error));
        }
        Some(next)
    }
}

/// The calls of one journal segment, up to the last whole frame. A call written twice comes once.
pub(super) struct SegmentCalls {
    path: PathBuf,
    frames: Option<Frames<BufReader<io::Take<File>>>>,
    ready: VecDeque<Call>,
    seen: HashSet<(CallId, u16)>,
    /// Where it must end, if that is known.
    length: Option<u64>,
    /// Bytes so far that hold no call although they should.
    pub(super) damaged_bytes: u64,
    /// Those of them behind which whole frames follow.
    lost_bytes: u64,
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
        let frames = salt.map(|salt| Frames::new(BufReader::with_capacity(1 << 20, file.take(behind)), salt));
        let (ready, seen) = (VecDeque::new(), HashSet::new());
        Ok(Self { path, frames, ready, seen, length, damaged_bytes, lost_bytes: 0 })
    }

    /// Reads frames until one with new calls; false at the end.
    fn refill(&mut self) -> Result<bool, CaptureError> {
        while self.ready.is_empty() {
            let Some(frames) = &mut self.frames else {
                return Ok(false);
            };
            match frames.step().map_err(CaptureError::io("read", &self.path))? {
                Step::Frame(bytes) => {
                    let calls = payload::decode(&bytes)
                        .map_err(|reason| CaptureError::corrupt(&self.path, reason))?;
                    let new = calls.into_iter();
                    self.ready = new.filter(|c| self.seen.insert((c.call_id, c.choice_index))).collect();
                }
                Step::Damage { bytes, .. } => {
                    self.damaged_bytes += bytes;
                    self.lost_bytes += bytes;
                }
                Step::End { at, torn } => {
                    let missing = self.length.map_or(0, |length| length.saturating_sub(at + torn));
                    self.damaged_bytes += torn + missing;
                    self.frames = None;
                }
            }
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
                self.frames = None;
                Some(Err(error))
            }
        }
    }
}
