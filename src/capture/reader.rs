//! Calls back out of a folder: Parquet and journal together, also while a writer runs. Every call comes exactly once
//! ([`Listing`]), without remembering ids.

use std::collections::VecDeque;
use std::path::PathBuf;

use super::ahead::{self, Calls};
use super::error::CaptureError;
use super::filter::Filter;
use super::history::{Joiner, Parts};
use super::layout;
use super::listing::{ListedFile, Listing};
use super::place::Place;
use super::remote::Tally;
use super::segment::SegmentCalls;
use crate::record::{Call, CallId, SessionId, TrialId};

/// Which calls to read, and how much of each. Default: all of everything.
#[derive(Debug, Clone, Default)]
pub struct Query {
    /// Only this session.
    pub session_id: Option<SessionId>,
    /// Only this trial.
    pub trial_id: Option<TrialId>,
    /// Only this call.
    pub call_id: Option<CallId>,
    /// Only calls received then or later, µs since the Unix epoch. Of earlier days only the rows of routing are
    /// read that such calls go on from.
    pub since: Option<i64>,
    /// Only calls for which this is true.
    pub filter: Option<Filter>,
    /// Leave `client_request`, `upstream_request` and `response` null: what training needs is far smaller.
    pub without_bodies: bool,
    /// Leave expert routing out.
    pub without_routing: bool,
    /// Leave out what an earlier call has, as the store does ([`Call::shared`]).
    pub as_stored: bool,
}

impl Query {
    /// All calls of one session.
    #[must_use]
    pub fn session(session_id: SessionId) -> Self {
        Self { session_id: Some(session_id), ..Self::default() }
    }

    /// Whether a call as it lies in the store may be wanted: a filter on bodies has to see them whole.
    pub(super) fn may_want(&self, call: &Call) -> bool {
        self.session_id.as_ref().is_none_or(|id| *id == call.session_id)
            && self.trial_id.as_ref().is_none_or(|id| Some(id) == call.trial_id.as_ref())
            && self.call_id.is_none_or(|id| id == call.call_id)
            && self.since.is_none_or(|since| call.received_at >= since)
            && self.filter.as_ref().is_none_or(|filter| filter.uses_bodies() || filter.matches(call))
    }

    /// Takes away from a call that is wanted what is not wanted of it.
    fn strip(&self, call: &mut Call) {
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
/// Memory: one row group's columns, or one journal frame, and up to 256 MiB of what later calls may go on from, whatever
/// the folder's size.
pub struct Reader {
    query: Query,
    whole: Whole,
    files: VecDeque<ListedFile>,
    segments: VecDeque<SegmentCalls>,
    current: Option<(Calls, ListedFile)>,
    read: Tally,
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
        reader.whole.dir.expect_some(reader.files.is_empty() && reader.segments.is_empty())?;
        Ok(reader)
    }

    /// As [`Reader::open`], without the files of segments before `since`.
    pub(super) fn open_since(dir: &Place, query: Query, since: u64) -> Result<Self, CaptureError> {
        let Listing { segments, files, read } = Listing::of(dir, since, query.since)?;
        let segments = segments.into_iter().map(|open| SegmentCalls::of(open.path, open.file, None));
        let segments = segments.collect::<Result<_, _>>()?;
        let aside = |path: &PathBuf| {
            format!("{}: damaged, and set aside: not all of it could be read", path.display())
        };
        let skipped = layout::damaged(dir.dir())?.iter().map(aside).collect();
        let (whole, files, current) = (Whole::new(dir, &query), files.into(), None);
        Ok(Self { query, whole, files, segments, current, read, skipped, damaged_bytes: 0, lost_bytes: 0 })
    }

    /// Bytes that were read of Parquet files so far, footers and Bloom filters included; without what was read again
    /// for calls whose history was forgotten.
    #[must_use]
    pub fn parquet_bytes_read(&self) -> u64 {
        self.read.bytes()
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
                Some(Ok(call)) if !self.query.may_want(&call) => {}
                Some(Ok(call)) => return Some(Ok(call)),
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
        loop {
            let next = self.next_from_parquet().or_else(|| self.next_from_journal())?;
            match next.and_then(|call| self.whole.make(call)) {
                Ok(None) => {}
                Ok(Some(call)) => return Some(Ok(call)),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

/// Makes of calls as they lie in the store what a query asks for.
pub(super) struct Whole {
    dir: Place,
    query: Query,
    joiner: Joiner,
}

impl Whole {
    pub(super) fn new(dir: &Place, query: &Query) -> Self {
        let uses_bodies = query.filter.as_ref().is_some_and(Filter::uses_bodies);
        let parts = Parts {
            ids: !query.as_stored,
            bodies: !(query.as_stored || query.without_bodies) || uses_bodies,
            routing: !(query.as_stored || query.without_routing),
        };
        Self { dir: dir.clone(), query: query.clone(), joiner: Joiner::new(parts) }
    }

    /// What was not there may be by now.
    pub(super) fn look_again(&mut self) {
        self.joiner.look_again();
    }

    /// `None`: the call is not wanted.
    pub(super) fn make(&mut self, mut call: Call) -> Result<Option<Call>, CaptureError> {
        let read = |call: &Call, give: &mut dyn FnMut(&Call)| stored(&self.dir, call, &self.query, give);
        if let Some(filter) = self.query.filter.as_ref().filter(|filter| filter.uses_bodies())
            && !filter.matches(&self.joiner.with_bodies(&call, read)?)
        {
            return Ok(None);
        }
        if !self.query.as_stored {
            self.joiner.join(&mut call, read)?;
        }
        self.query.strip(&mut call);
        Ok(Some(call))
    }
}

/// Gives the calls that a call may go on from, those of its session and day, as they lie in the store; those of other days
/// too where rows of routing may be theirs. What is damaged is left out: who reads those calls is told. Of each is read what
/// `query` reads.
pub(super) fn stored(
    dir: &Place,
    call: &Call,
    query: &Query,
    give: &mut dyn FnMut(&Call),
) -> Result<(), CaptureError> {
    let without_bodies = query.without_bodies && !query.filter.as_ref().is_some_and(Filter::uses_bodies);
    let has_rows_elsewhere =
        !query.without_routing && call.routing.as_ref().is_some_and(|routing| routing.base().is_some());
    let day = call.received_at.div_euclid(layout::DAY_US) * layout::DAY_US;
    let session = Query {
        without_bodies,
        without_routing: query.without_routing,
        as_stored: true,
        since: (!has_rows_elsewhere).then_some(day),
        ..Query::session(call.session_id.clone())
    };
    for call in Reader::open(dir, session)? {
        match call {
            Ok(call) => give(&call),
            Err(error @ CaptureError::Corrupt { .. }) => {
                tracing::warn!(%error, "calls may lack what others have of them");
            }
            // What cannot be read now is not damaged.
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
