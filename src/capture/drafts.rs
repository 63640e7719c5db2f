//! Drafts: what is known of a call at the moment when its client may act on a part of it, long before the end.
//!
//! A reply with several tool calls lets its client act on the first while the second is still being sampled. The
//! call's record is written once, at its end; until then a draft in a journal of its own (`drafts/`) keeps what the
//! client may have acted on. The record makes its drafts worthless, and a journal without living drafts is deleted.
//! After kill -9 or power loss the last draft of a call without a record becomes its record.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::error::CaptureError;
use super::filter::Filter;
use super::frame::{self, Frames, HEADER_LEN, Step};
use super::journal::Journal;
use super::layout;
use super::payload::{self, Payload};
use super::place::Place;
use super::reader::{Query, Reader};
use super::room::Limits;
use super::storage::{Storage, make_folder};
use super::writer::{Durability, WriterOptions};
use crate::record::{Call, CallId};

/// A journal of drafts this long takes no more of them.
const SEGMENT_BYTES: u64 = 64 << 20;
/// One this long is deleted as soon as none of its drafts lives.
const SMALL: u64 = 4 << 20;

/// The drafts of calls that run.
pub(super) struct Drafts {
    dir: PathBuf,
    durability: Durability,
    storage: Arc<dyn Storage>,
    /// Calls that ran when this writer opened its folder have their records in segments from this number on.
    since: u64,
    segments: Vec<Segment>,
}

struct Segment {
    journal: Journal,
    bytes: u64,
    living: HashSet<CallId>,
}

impl Drafts {
    pub(super) fn new(dir: &Path, durability: Durability, since: u64, storage: Arc<dyn Storage>) -> Self {
        Self { dir: folder(dir), durability, storage, since, segments: vec![] }
    }

    /// Writes and syncs drafts, all or none.
    pub(super) fn write(&mut self, drafts: &[(&Payload, &[CallId])]) -> io::Result<()> {
        let has_room = self.segments.last().is_some_and(|segment| segment.bytes < SEGMENT_BYTES);
        if !has_room {
            make_folder(&*self.storage, &layout::journal_dir(&self.dir))?;
            let options = WriterOptions {
                durability: self.durability,
                segment_bytes: u64::MAX,
                segment_age: Duration::MAX,
                limits: Limits::default(),
            };
            let storage = Arc::clone(&self.storage);
            let journal = Journal::new(self.dir.clone(), options, self.since, storage);
            self.segments.push(Segment { journal, bytes: 0, living: HashSet::new() });
        }
        let Some(segment) = self.segments.last_mut() else {
            return Ok(());
        };
        let payloads: Vec<&Payload> = drafts.iter().map(|(payload, _)| *payload).collect();
        let written = segment.journal.commit(&payloads, &mut vec![]);
        if written.is_err() {
            // It keeps what it has. The next draft begins a new one: this one's next file would have a higher number, and
            // say that its calls have their records in later segments than they have.
            segment.bytes = SEGMENT_BYTES;
        }
        written?;
        segment.bytes += payloads.iter().map(|payload| payload.len() as u64).sum::<u64>();
        segment.living.extend(drafts.iter().flat_map(|(_, calls)| *calls));
        Ok(())
    }

    /// These calls have their records.
    pub(super) fn settle<'a>(&mut self, calls: impl Iterator<Item = &'a CallId>) {
        if self.segments.is_empty() {
            return;
        }
        for call in calls {
            for segment in &mut self.segments {
                segment.living.remove(call);
            }
        }
        self.segments.retain_mut(|segment| {
            let is_worthless = segment.living.is_empty() && segment.bytes >= SMALL;
            if is_worthless {
                delete(&*self.storage, &self.dir, segment);
            }
            !is_worthless
        });
    }

    /// Deletes what no running call needs. The drafts of calls without a record stay for the next writer.
    pub(super) fn close(mut self) {
        for segment in &mut self.segments {
            if segment.living.is_empty() {
                delete(&*self.storage, &self.dir, segment);
            }
        }
    }
}

fn delete(storage: &dyn Storage, dir: &Path, segment: &mut Segment) {
    if let Some(sealed) = segment.journal.seal() {
        let path = sealed.name.journal_path(dir);
        if let Err(error) = storage.remove(&path) {
            tracing::warn!(path = %path.display(), %error, "a journal of drafts could not be deleted");
        }
    }
}

/// Where the drafts of a capture folder lie.
pub(super) fn folder(dir: &Path) -> PathBuf {
    dir.join("drafts")
}

/// What an earlier writer left: the last drafts of calls that have no record, and the files to delete once they do.
pub(super) fn recover(place: &Place) -> Result<(Vec<Call>, Vec<PathBuf>), CaptureError> {
    let drafts = folder(place.dir());
    let names = layout::segments(&drafts)?;
    let Some(since) = names.iter().map(|name| name.number).min() else {
        return Ok((vec![], vec![]));
    };
    let mut last: BTreeMap<(CallId, u16), Call> = BTreeMap::new();
    let mut files = vec![];
    for name in names {
        let path = name.journal_path(&drafts);
        for call in calls(&path)? {
            last.insert((call.call_id, call.choice_index), call);
        }
        files.push(path);
    }
    if !last.is_empty() {
        let ids: BTreeSet<CallId> = last.keys().map(|(id, _)| *id).collect();
        // What was uploaded since is asked for by id: only a few row groups have any of them.
        let filter = place.is_remote().then(|| Filter::calls(&ids));
        let query = Query {
            without_bodies: true,
            without_routing: true,
            as_stored: true,
            filter,
            ..Query::default()
        };
        for call in Reader::open_since(place, query, since)? {
            let call = call?;
            if ids.contains(&call.call_id) {
                last.remove(&(call.call_id, call.choice_index));
            }
        }
    }
    Ok((last.into_values().collect(), files))
}

/// The whole frames of a journal of drafts, oldest first.
fn calls(path: &Path) -> Result<Vec<Call>, CaptureError> {
    let mut file = File::open(path).map_err(CaptureError::io("open", path))?;
    let mut head = Vec::new();
    file.by_ref().take(HEADER_LEN as u64).read_to_end(&mut head).map_err(CaptureError::io("read", path))?;
    let Some(salt) = frame::parse_header(&head) else {
        return Ok(vec![]);
    };
    let mut frames = Frames::new(BufReader::with_capacity(1 << 20, file), salt);
    let mut found = vec![];
    loop {
        match frames.step().map_err(CaptureError::io("read", path))? {
            Step::Frame(bytes) => {
                let calls = payload::decode(&bytes).map_err(|reason| CaptureError::corrupt(path, reason))?;
                found.extend(calls);
            }
            Step::Damage { at, bytes } => {
                tracing::error!(path = %path.display(), at, bytes, "damaged bytes in a journal of drafts");
            }
            Step::End { .. } => return Ok(found),
        }
    }
}
