//! What sessions there are, and their calls, some sessions at a time.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::ExportError;
use super::counts::Counts;
use super::episodes::Episodes;
use crate::capture::{CaptureError, Filter, Place, Query, Reader};
use crate::record::{Call, CallId, SessionId, TaskId, TrialId};

/// Why calls are not trainable whose earlier rows of expert routing are gone. The reader says it of calls that it reads
/// with their routing; the others are told by the [`Index`].
const ROUTING_BASE_MISSING: &str = "routing_base_missing";

/// A session, as the first pass over the captures found it.
#[derive(Debug, Default)]
pub(super) struct Session {
    /// Sampled choices.
    pub calls: u64,
    bytes: usize,
    /// Of all of its calls, in whatever order: a session to which calls are added has another.
    print: u64,
    pub trial: Option<TrialId>,
    pub task: Option<TaskId>,
    /// Somebody asked for one of its calls.
    pub is_wanted: bool,
    pub has_routing: bool,
}

/// All sessions of a folder.
#[derive(Debug, Default)]
pub(super) struct Index {
    pub sessions: BTreeMap<SessionId, Session>,
    /// Calls whose earlier rows of expert routing are gone.
    routing_lost: HashSet<(CallId, u16)>,
    /// Sampled choices in all sessions.
    pub calls: u64,
}

fn print(call: &Call) -> u64 {
    let mut hasher = DefaultHasher::new();
    (call.call_id, call.choice_index).hash(&mut hasher);
    hasher.finish()
}

pub(super) fn has_lost_routing(call: &Call) -> bool {
    call.not_trainable_reasons.iter().any(|reason| reason == ROUTING_BASE_MISSING)
}

impl Index {
    /// Reads all calls once, for samples with their routing: a call whose earlier rows are gone trains nobody, whether or
    /// not routing is exported. Where bodies are read later, they fill the memory.
    pub(super) fn of(
        dir: &Place,
        filter: Option<&Filter>,
        is_of_samples: bool,
        with_bodies: bool,
        counts: &mut Counts,
    ) -> Result<Self, ExportError> {
        let query = Query {
            without_bodies: !with_bodies && !filter.is_some_and(Filter::uses_bodies),
            without_routing: !is_of_samples && !filter.is_some_and(Filter::uses_routing),
            ..Query::default()
        };
        let mut reader = Reader::open(dir, query)?;
        let mut index = Self::default();
        for call in reader.by_ref() {
            let call = call?;
            let is_wanted = filter.is_none_or(|filter| filter.matches(&call));
            let has_lost_routing = has_lost_routing(&call);
            if has_lost_routing {
                index.routing_lost.insert((call.call_id, call.choice_index));
            }
            let session = index.sessions.entry(call.session_id.clone()).or_default();
            session.calls += 1;
            session.bytes += bytes(&call, with_bodies);
            session.print = session.print.wrapping_add(print(&call));
            session.is_wanted |= is_wanted;
            session.has_routing |= has_lost_routing || call.routing.is_some();
            session.trial = session.trial.take().or(call.trial_id);
            session.task = session.task.take().or(call.task_id);
            index.calls += 1;
        }
        counts.unread.extend(reader.left_out());
        counts.calls.all = index.calls;
        counts.sessions.all = index.sessions.len() as u64;
        Ok(index)
    }
}

/// What a call takes in memory without routing: lineages keep some more of it.
fn bytes(call: &Call, with_bodies: bool) -> usize {
    let bodies = [&call.client_request, &call.upstream_request, &call.response];
    let bodies = bodies.into_iter().flatten().filter(|_| with_bodies).map(|body| body.bytes().len());
    let ids = [&call.prompt_token_ids, &call.completion_token_ids];
    let ids: usize = ids.into_iter().flatten().map(|ids| 4 * ids.len()).sum();
    let texts = call.text.as_ref().map_or(0, String::len);
    let tools: usize = call.tool_calls.iter().flatten().map(|call| 100 + call.arguments.len()).sum();
    // A sample has the ids once more, with 40 bytes each of what is aligned to them.
    let own = size_of::<Call>() + 512 + bodies.sum::<usize>() + texts + tools;
    own + 3 * ids + 8 * call.completion_logprobs.as_ref().map_or(0, Vec::len)
}

const CHANGED: &str = "changed while it was read";

/// Reads the sessions of an index.
pub(super) struct Sessions<'a> {
    pub room: usize,
    pub dir: &'a Place,
    pub index: &'a Index,
}

impl Sessions<'_> {
    /// Gives `each` the calls of every session of `episodes`, in the order they were made, and counts what becomes of the
    /// session and its episode: that is what `each` gives back. One that is no longer what the index says is left out,
    /// and told. With bodies or without; never with routing.
    pub(super) fn each(
        &self,
        episodes: &Episodes,
        with_bodies: bool,
        counts: &mut Counts,
        progress: &mut dyn FnMut(u64, u64),
        each: &mut dyn FnMut(&SessionId, &[Arc<Call>], &mut Counts) -> Result<&'static str, ExportError>,
    ) -> Result<(), ExportError> {
        let mut done = 0;
        for batch in self.batches(&episodes.order) {
            let query = Query {
                filter: Some(Filter::sessions(batch.iter().copied())),
                without_bodies: !with_bodies,
                without_routing: true,
                ..Query::default()
            };
            let mut read: BTreeMap<SessionId, Vec<Call>> = BTreeMap::new();
            let mut reader = Reader::open(self.dir, query)?;
            for call in reader.by_ref() {
                let call = call?;
                read.entry(call.session_id.clone()).or_default().push(call);
            }
            counts.unread.extend(reader.left_out());
            for id in batch {
                let calls = read.remove(id).unwrap_or_default();
                let all = self.index.sessions[id].calls;
                let bucket = if self.is_unchanged(id, &calls) {
                    each(id, &self.calls(calls), counts)?
                } else {
                    counts.unread.insert(format!("session {id}: {CHANGED}"));
                    counts.calls.add(CHANGED, all);
                    CHANGED
                };
                counts.sessions.add(bucket, 1);
                let is_episode = episodes.is_of_run && episodes.by_session[id].is_in_group();
                counts.episodes.add(bucket, u64::from(is_episode));
                done += all;
                progress(done, self.index.calls);
            }
        }
        Ok(())
    }

    fn is_unchanged(&self, id: &SessionId, calls: &[Call]) -> bool {
        let session = &self.index.sessions[id];
        let of = calls.iter().fold(0_u64, |sum, call| sum.wrapping_add(print(call)));
        (session.calls, session.print) == (calls.len() as u64, of)
    }

    fn calls(&self, mut calls: Vec<Call>) -> Vec<Arc<Call>> {
        for call in &mut calls {
            if self.index.routing_lost.contains(&(call.call_id, call.choice_index)) && !has_lost_routing(call)
            {
                call.trainable = false;
                call.not_trainable_reasons.push(ROUTING_BASE_MISSING.to_owned());
            }
        }
        calls.sort_by_key(|call| (call.received_at, call.call_id, call.choice_index));
        calls.into_iter().map(Arc::new).collect()
    }

    fn batches<'o>(&self, order: &'o [SessionId]) -> Vec<Vec<&'o SessionId>> {
        let (mut batches, mut left) = (Vec::<Vec<_>>::new(), 0);
        for id in order {
            let bytes = self.index.sessions[id].bytes;
            if batches.is_empty() || bytes > left {
                batches.push(vec![]);
                left = self.room;
            }
            left = left.saturating_sub(bytes);
            if let Some(batch) = batches.last_mut() {
                batch.push(id);
            }
        }
        batches
    }

    /// Gives `each` the calls of one session with their routing, in the order of the store.
    pub(super) fn with_routing(
        &self,
        id: &SessionId,
        counts: &mut Counts,
        each: &mut dyn FnMut(Call),
    ) -> Result<(), CaptureError> {
        let query = Query { without_bodies: true, ..Query::session(id.clone()) };
        let mut reader = Reader::open(self.dir, query)?;
        for call in reader.by_ref() {
            each(call?);
        }
        counts.unread.extend(reader.left_out());
        Ok(())
    }
}
