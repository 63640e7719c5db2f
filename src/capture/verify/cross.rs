//! What must hold between records: no choice twice, ids of all choices against the usage, other calls that are named.
//!
//! Memory is bounded: with more than [`MAX_CALLS`] calls only those of a slice of all ids are kept in mind, and the rest
//! is left to further passes over the store, a slice each.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Finding, invariants};
use crate::capture::error::CaptureError;
use crate::capture::filter::Filter;
use crate::capture::layout::date_of;
use crate::capture::reader::{Query, Reader};
use crate::record::{Call, CallId, ClientApi};

/// Calls that are kept in mind.
const MAX_CALLS: usize = 1 << 20;

pub(super) struct Cross {
    /// When the first of all calls was received. Those of days before it may have been pruned.
    oldest: Option<i64>,
    /// A power of two.
    slices: u128,
    slice: u128,
    calls: HashMap<CallId, Known>,
    named: Vec<Named>,
    twice: Vec<Finding>,
    file: Arc<Path>,
}

/// What is known of a call so far.
struct Known {
    choices: Vec<u16>,
    /// Of all choices.
    sampled: u64,
    /// Somebody wants to hear of it.
    is_wanted: bool,
    /// It has exact ids, and a usage that they are to sum to: completion tokens.
    completion: Option<u64>,
    /// The same of the prompt: prompt tokens, and ids.
    prompt: Option<(u64, u64)>,
    /// It says itself that they do not.
    is_said: bool,
    is_prompt_said: bool,
    file: Arc<Path>,
}

/// A call that another one names.
struct Named {
    by: CallId,
    choice_index: u16,
    file: Arc<Path>,
    column: &'static str,
    id: CallId,
}

impl Cross {
    pub(super) fn new() -> Self {
        let file = Arc::from(PathBuf::new());
        Self { oldest: None, slices: 1, slice: 0, calls: HashMap::new(), named: vec![], twice: vec![], file }
    }

    fn is_mine(&self, id: CallId) -> bool {
        // The last bits of a UUIDv7 are random.
        id.0.as_u128() % self.slices == self.slice
    }

    /// Takes a record in.
    pub(super) fn see(&mut self, call: &Call, file: &Path, is_wanted: bool) {
        if *self.file != *file {
            self.file = Arc::from(file);
        }
        self.oldest = Some(self.oldest.map_or(call.received_at, |oldest| oldest.min(call.received_at)));
        for (column, id) in [("retry_of", call.retry_of), ("parent_call_id", call.parent_call_id)] {
            if let Some(id) = id.filter(|id| is_wanted && self.is_mine(*id)) {
                let (by, choice_index, file) = (call.call_id, call.choice_index, Arc::clone(&self.file));
                self.named.push(Named { by, choice_index, file, column, id });
            }
        }
        if !self.is_mine(call.call_id) {
            return;
        }
        let known = self.calls.entry(call.call_id).or_insert_with(|| Known {
            choices: vec![],
            sampled: 0,
            is_wanted: false,
            completion: None,
            prompt: None,
            is_said: false,
            is_prompt_said: false,
            file: Arc::clone(&self.file),
        });
        if known.choices.contains(&call.choice_index) {
            if is_wanted {
                let found = format!("it is in {} too", known.file.display());
                self.twice.push(Finding::of_call(call, file, "once", found));
            }
            return;
        }
        known.choices.push(call.choice_index);
        known.is_wanted |= is_wanted;
        known.is_said |= invariants::says(call, &["ids_usage_mismatch"]);
        known.is_prompt_said |= invariants::says(call, &["prompt_ids_usage_mismatch"]);
        if let Some(ids) = call.sampled_ids() {
            known.sampled += ids.len() as u64;
            known.completion = known.completion.or(call.usage.map(|usage| usage.completion_tokens));
        }
        let prompt = call.prompt_token_ids.as_ref().filter(|_| call.prompt_ids_source.is_exact());
        // Only completions have several prompts in one call.
        let may_have_several = call.upstream_api == ClientApi::OpenaiCompletions && known.choices.len() > 1;
        known.prompt = match (prompt, call.usage) {
            _ if may_have_several => None,
            (Some(ids), Some(usage)) => Some((usage.prompt_tokens, ids.len() as u64)),
            _ => known.prompt,
        };
        if self.calls.len() > MAX_CALLS {
            self.slices *= 2;
            let (slices, slice) = (self.slices, self.slice);
            let is_mine = |id: CallId| id.0.as_u128() % slices == slice;
            self.calls.retain(|id, _| is_mine(*id));
            self.named.retain(|named| is_mine(named.id));
        }
    }

    /// What is wrong in this slice, once all records were seen.
    pub(super) fn findings(&mut self) -> Vec<Finding> {
        let mut found = std::mem::take(&mut self.twice);
        for named in std::mem::take(&mut self.named) {
            let what = match () {
                () if named.id == named.by => "it names itself",
                () if self.calls.contains_key(&named.id) || self.may_be_pruned(named.id) => continue,
                () => "it is not there",
            };
            let text = format!("{}: {what}", named.id);
            let finding = Finding::of_file(&named.file, named.column, text);
            found.push(Finding {
                call_id: Some(named.by),
                choice_index: Some(named.choice_index),
                ..finding
            });
        }
        for (id, known) in std::mem::take(&mut self.calls) {
            let choices = known.choices.len();
            let finding = |invariant, text: String| Finding {
                call_id: Some(id),
                ..Finding::of_file(&known.file, invariant, text)
            };
            if let Some(usage) = known.completion.filter(|usage| *usage != known.sampled)
                && known.is_wanted
                && !known.is_said
            {
                let text = format!("{} ids in {choices} choices, the usage says {usage}", known.sampled);
                found.push(finding("completion_usage", text));
            }
            if let Some((usage, ids)) = known.prompt.filter(|(usage, ids)| usage != ids)
                && known.is_wanted
                && !known.is_prompt_said
            {
                found.push(finding("prompt_usage", format!("{ids} prompt ids, the usage says {usage}")));
            }
        }
        found.sort_by_key(|finding| (finding.call_id, finding.choice_index));
        found
    }

    /// Whether the day on which the call was made is older than all that are there.
    fn may_be_pruned(&self, id: CallId) -> bool {
        let made = id.0.get_timestamp().map(|time| time.to_unix());
        let made = made.and_then(|(seconds, _)| i64::try_from(seconds).ok()?.checked_mul(1_000_000));
        made.zip(self.oldest).is_some_and(|(made, oldest)| date_of(made) < date_of(oldest))
    }

    /// Turns to the next slice; false: all are done.
    pub(super) fn next_pass(&mut self) -> bool {
        self.slice += 1;
        self.slice < self.slices
    }

    /// Reads all records again.
    pub(super) fn read(&mut self, dir: &Path, filter: Option<&Filter>) -> Result<(), CaptureError> {
        let without_bodies = !filter.is_some_and(Filter::uses_bodies);
        let without_routing = !filter.is_some_and(Filter::uses_routing);
        let query = Query { without_bodies, without_routing, ..Query::default() };
        // Whatever cannot be read was told in the first pass.
        for call in Reader::open_stored(dir, query)?.flatten() {
            let is_wanted = filter.is_none_or(|filter| filter.matches(&call));
            self.see(&call, dir, is_wanted);
        }
        Ok(())
    }
}
