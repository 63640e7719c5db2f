//! The token account of captures: where every sampled token went (law 6 of the design), and whether that adds up to what
//! the engines reported.
//!
//! Invariants:
//! - Every sampled token of the calls is in exactly one bucket. What is not so is told call by call.
//! - Where a call has a usage, its tokens in all buckets sum to it; one without counts the ids that arrived.
//! - Memory: some sessions at a time, [`ROOM`] bytes of them, or one that is longer.
//!
//! What became of a sample is the trainer's to say ([`RunBooks`]); captures that belong to no run have a bucket
//! [`IN_SAMPLE`] in the place of `trained`.

mod table;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde::Serialize;

use crate::capture::{CaptureError, Filter, Place, Query, Reader};
use crate::config::Samples;
use crate::record::{Call, CallId, Disposition, SessionId, TrialId};
use crate::telemetry::{BooksError, RunBooks};
use crate::trajectory::{self, needs_bodies};

pub use table::{session_table, table};

/// Bytes of calls that are in memory together.
const ROOM: usize = 256 << 20;
/// Bucket of tokens that a trainer would train on, where there is no run that says whether one did.
pub const IN_SAMPLE: &str = "in_sample";

/// What the accounts are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// All calls together.
    Run,
    Session,
    /// Calls without a trial have an account of their own.
    Trial,
}

/// Where the tokens of some calls went.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Account {
    /// Calls, each once whatever its choices.
    pub calls: u64,
    /// Tokens in all buckets.
    pub booked: u64,
    /// Completion tokens that upstreams reported.
    pub usage: u64,
    /// Ids of calls whose upstream reported nothing.
    pub without_usage: u64,
    /// By bucket, with its reason.
    pub buckets: BTreeMap<String, u64>,
}

impl Account {
    /// Whether the buckets hold what the upstreams reported, and the ids of which they reported nothing.
    #[must_use]
    pub fn is_balanced(&self) -> bool {
        let in_buckets: u64 = self.buckets.values().sum();
        in_buckets == self.booked && self.booked == self.usage + self.without_usage
    }
}

/// Something that does not add up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Offence {
    pub call_id: Option<CallId>,
    pub session_id: Option<SessionId>,
    pub trial_id: Option<TrialId>,
    pub found: String,
}

/// The accounts.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    pub total: Account,
    /// By the name of what they are of; empty for [`By::Run`].
    pub accounts: BTreeMap<String, Account>,
    pub offences: Vec<Offence>,
}

/// Why there is no ledger.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Books(#[from] BooksError),
}

/// Accounts for the calls of `dir`, or for those of them for which `filter` is true. `books` are those of the run that
/// made them. `progress` is told how many calls of how many are done.
///
/// # Errors
/// [`LedgerError`].
pub fn ledger(
    dir: impl Into<Place>,
    books: Option<&RunBooks>,
    by: By,
    filter: Option<&Filter>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Ledger, LedgerError> {
    within(ROOM, &dir.into(), books, by, filter, progress)
}

fn within(
    room: usize,
    dir: &Place,
    books: Option<&RunBooks>,
    by: By,
    filter: Option<&Filter>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Ledger, LedgerError> {
    let (ledger, trials) = (Ledger::default(), BTreeMap::new());
    let policy = books.map_or_else(|| Ok(Samples::default()), RunBooks::samples)?;
    let mut work = Work { room, dir, books, policy, by, filter, ledger, trials, done: 0 };
    let (sessions, calls) = work.first_pass()?;
    let all = sessions.values().map(|size| size.calls).sum();
    progress(0, all);
    match calls {
        Some(calls) => work.book(calls)?,
        None => {
            for batch in batches(&sessions, room) {
                let calls = work.read(Some(Filter::sessions(batch)))?;
                work.book(calls)?;
                progress(work.done, all);
            }
        }
    }
    progress(all, all);
    if filter.is_none() {
        work.compare_with_trainer();
    }
    Ok(work.ledger)
}

/// How much of a session there is.
#[derive(Default)]
struct Size {
    calls: u64,
    bytes: usize,
}

/// Sessions that are in memory together.
fn batches(sessions: &BTreeMap<SessionId, Size>, all: usize) -> Vec<Vec<&SessionId>> {
    let (mut batches, mut room) = (vec![], 0);
    for (session, size) in sessions {
        if batches.is_empty() || size.bytes > room {
            batches.push(vec![]);
            room = all;
        }
        room = room.saturating_sub(size.bytes);
        if let Some(batch) = batches.last_mut() {
            batch.push(session);
        }
    }
    batches
}

fn ids_bytes(call: &Call) -> usize {
    let ids = [&call.prompt_token_ids, &call.completion_token_ids];
    ids.into_iter().flatten().map(|ids| 4 * ids.len()).sum()
}

/// A call, without what the account does not need, and whether somebody asked for it.
struct Counted {
    call: Arc<Call>,
    is_wanted: bool,
}

impl Counted {
    fn bytes(&self) -> usize {
        let bodies = [&self.call.client_request, &self.call.upstream_request];
        let bodies: usize = bodies.into_iter().flatten().map(|body| body.bytes().len()).sum();
        // A log-prob is 8 bytes, and lineages keep some more of each call.
        size_of::<Call>()
            + 512
            + ids_bytes(&self.call)
            + bodies
            + 8 * self.call.completion_logprobs.as_ref().map_or(0, Vec::len)
    }
}

struct Work<'a> {
    /// Bytes of calls that are in memory together.
    room: usize,
    dir: &'a Place,
    books: Option<&'a RunBooks>,
    /// What the run trains of its calls.
    policy: Samples,
    by: By,
    filter: Option<&'a Filter>,
    ledger: Ledger,
    /// Tokens of each trial, to be compared with the trainer's count.
    trials: BTreeMap<TrialId, u64>,
    done: u64,
}

impl Work<'_> {
    fn calls(&self, filter: Option<Filter>) -> Result<Reader, CaptureError> {
        let uses_bodies = needs_bodies(&self.policy) || self.filter.is_some_and(Filter::uses_bodies);
        let uses_routing = self.filter.is_some_and(Filter::uses_routing);
        let query = Query {
            without_bodies: !uses_bodies,
            without_routing: !uses_routing,
            filter,
            ..Query::default()
        };
        Reader::open(self.dir, query)
    }

    fn counted(&self, mut call: Call) -> Counted {
        let is_wanted = self.filter.is_none_or(|filter| filter.matches(&call));
        (call.response, call.routing) = (None, None);
        if !needs_bodies(&self.policy) {
            (call.client_request, call.upstream_request) = (None, None);
            (call.text, call.tool_calls) = (None, None);
        }
        Counted { call: Arc::new(call), is_wanted }
    }

    /// The sessions that are wanted, and all of their calls if these are few.
    fn first_pass(&mut self) -> Result<(BTreeMap<SessionId, Size>, Option<Vec<Counted>>), CaptureError> {
        let mut sessions: BTreeMap<SessionId, Size> = BTreeMap::new();
        let mut wanted: BTreeSet<SessionId> = BTreeSet::new();
        let (mut kept, mut bytes) = (Some(vec![]), 0);
        let mut reader = self.calls(None)?;
        for call in reader.by_ref() {
            let counted = self.counted(call?);
            let session = counted.call.session_id.clone();
            if counted.is_wanted && !wanted.contains(&session) {
                wanted.insert(session.clone());
            }
            let size = sessions.entry(session).or_default();
            size.calls += 1;
            size.bytes += counted.bytes();
            bytes += counted.bytes();
            if bytes > self.room {
                kept = None;
            } else if let Some(kept) = &mut kept {
                kept.push(counted);
            }
        }
        // Nobody knows what these hold.
        for found in reader.left_out() {
            let found = format!("left out {found}");
            self.ledger.offences.push(Offence { call_id: None, session_id: None, trial_id: None, found });
        }
        sessions.retain(|session, _| wanted.contains(session));
        if let Some(kept) = &mut kept {
            kept.retain(|counted| wanted.contains(&counted.call.session_id));
        }
        Ok((sessions, kept))
    }

    fn read(&self, sessions: Option<Filter>) -> Result<Vec<Counted>, CaptureError> {
        let calls = self.calls(sessions)?;
        calls.map(|call| Ok(self.counted(call?))).collect()
    }

    /// Books all calls of some sessions.
    fn book(&mut self, counted: Vec<Counted>) -> Result<(), BooksError> {
        let mut sessions: BTreeMap<SessionId, Vec<Counted>> = BTreeMap::new();
        for counted in counted {
            sessions.entry(counted.call.session_id.clone()).or_default().push(counted);
        }
        for (session, counted) in sessions {
            self.done += counted.len() as u64;
            self.book_session(&session, &counted)?;
        }
        Ok(())
    }

    fn book_session(&mut self, session: &SessionId, counted: &[Counted]) -> Result<(), BooksError> {
        let calls: Vec<Arc<Call>> = counted.iter().map(|counted| Arc::clone(&counted.call)).collect();
        let wanted: BTreeSet<CallId> =
            counted.iter().filter(|counted| counted.is_wanted).map(|counted| counted.call.call_id).collect();
        let trial = calls.iter().find_map(|call| call.trial_id.clone());
        let built = trajectory::samples(&trajectory::lineages(&calls), None, &self.policy);
        if let Err(unbalanced) = built.check(&calls) {
            self.offend(Some(unbalanced.call_id), session, trial.clone(), unbalanced.to_string());
        }
        let verdict = match (self.books, &trial) {
            (Some(books), Some(trial)) => Some(books.verdict(trial, session)?),
            _ => None,
        };
        let mut account = Account::default();
        let mut booked: HashMap<CallId, u64> = HashMap::new();
        for entry in built.ledger.into_iter().filter(|entry| wanted.contains(&entry.call_id)) {
            let bucket = match (&entry.disposition, &verdict) {
                (Disposition::Trained, Some(verdict)) => verdict.bucket(),
                (Disposition::Trained, None) => IN_SAMPLE.to_owned(),
                (disposition, _) => disposition.bucket(),
            };
            *account.buckets.entry(bucket).or_default() += entry.tokens;
            account.booked += entry.tokens;
            *booked.entry(entry.call_id).or_default() += entry.tokens;
        }
        let mut reported: BTreeMap<CallId, (Option<u64>, u64)> = BTreeMap::new();
        for call in calls.iter().filter(|call| wanted.contains(&call.call_id)) {
            let (usage, ids) = reported.entry(call.call_id).or_default();
            // A choice that ended before the others may have what was counted by then.
            *usage = (*usage).max(call.usage.map(|usage| usage.completion_tokens));
            *ids += call.sampled_ids().map_or(0, <[u32]>::len) as u64;
        }
        for (id, (usage, ids)) in reported {
            account.calls += 1;
            match usage {
                Some(usage) => account.usage += usage,
                None => account.without_usage += ids,
            }
            let booked = booked.remove(&id).unwrap_or(0);
            if booked != usage.unwrap_or(ids) {
                let of_what =
                    usage.map_or_else(|| "no usage".to_owned(), |usage| format!("a usage of {usage}"));
                let found = format!("{booked} tokens in buckets, {ids} ids, {of_what}");
                self.offend(Some(id), session, trial.clone(), found);
            }
        }
        if let Some(trial) = &trial {
            *self.trials.entry(trial.clone()).or_default() += account.booked;
        }
        let name = match self.by {
            By::Run => None,
            By::Session => Some(session.to_string()),
            By::Trial => Some(trial.map_or_else(|| "-".to_owned(), |trial| trial.to_string())),
        };
        if let Some(name) = name {
            add(self.ledger.accounts.entry(name).or_default(), &account);
        }
        add(&mut self.ledger.total, &account);
        Ok(())
    }

    fn offend(
        &mut self,
        call_id: Option<CallId>,
        session: &SessionId,
        trial_id: Option<TrialId>,
        found: String,
    ) {
        self.ledger.offences.push(Offence { call_id, session_id: Some(session.clone()), trial_id, found });
    }

    /// The captures must hold what the run's trainer counted.
    fn compare_with_trainer(&mut self) {
        let Some(books) = self.books else { return };
        for (trial_id, counted) in books.sampled() {
            let captured = self.trials.get(trial_id).copied().unwrap_or(0);
            if captured != counted {
                let found =
                    format!("the trainer counted {counted} sampled tokens, the captures hold {captured}");
                let trial_id = Some(trial_id.clone());
                self.ledger.offences.push(Offence { call_id: None, session_id: None, trial_id, found });
            }
        }
        let trained = self.ledger.total.buckets.get("trained").copied().unwrap_or(0);
        if let Some(reported) = books.reported_trained().filter(|reported| *reported != trained) {
            let found = format!(
                "the run's report says that {reported} tokens were trained, the captures hold {trained}"
            );
            self.ledger.offences.push(Offence { call_id: None, session_id: None, trial_id: None, found });
        }
    }
}

fn add(to: &mut Account, account: &Account) {
    to.calls += account.calls;
    to.booked += account.booked;
    to.usage += account.usage;
    to.without_usage += account.without_usage;
    for (bucket, tokens) in &account.buckets {
        *to.buckets.entry(bucket.clone()).or_default() += tokens;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::capture::{Writer, WriterOptions};
    use crate::record::{CallSink as _, example};

    #[tokio::test]
    async fn sessions_a_few_at_a_time_come_to_what_all_at_once_come_to() {
        let dir = tempfile::tempdir().expect("folder");
        for file in 0..3_u64 {
            let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
            for number in 0..20_u64 {
                let ids = vec![1; (1 + number % 4) as usize];
                let call = example::call(json!({
                    "session_id": format!("s{}", number % 7), "received_at": file, "prompt_token_ids": [number],
                    "prompt_ids_source": "engine", "completion_token_ids": ids, "completion_ids_source": "engine",
                    "usage": {"prompt_tokens": 1, "completion_tokens": 1 + number % 4},
                    "not_trainable_reasons": ["no_logprobs"],
                }));
                writer.append(vec![call]).await.expect("room");
            }
            writer.close().await;
        }
        let filter: Filter = "session_id != 's3'".parse().expect("a predicate");
        for filter in [None, Some(&filter)] {
            let of = |room| {
                let mut told = vec![];
                let mut progress = |done, all| told.push((done, all));
                let ledger =
                    within(room, &dir.path().into(), None, By::Session, filter, &mut progress).expect("read");
                assert_eq!(ledger.offences, []);
                assert!(ledger.total.is_balanced());
                (ledger.total, ledger.accounts, told.len())
            };
            let (total, accounts, _) = of(ROOM);
            assert_eq!((total.calls, accounts.len()), if filter.is_none() { (60, 7) } else { (51, 6) });
            assert!(total.buckets.contains_key("superseded"), "{total:?}");
            let (few, accounts_of_few, told) = of(1);
            assert_eq!((few, &accounts_of_few), (total, &accounts));
            assert_eq!(told, accounts.len() + 2, "a pass for each session");
        }
    }
}
