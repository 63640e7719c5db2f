//! What must hold between records: no choice twice, ids of all choices against the usage, other calls that are named.
//!
//! Memory is bounded: with more than [`MAX_CALLS`] calls only those of a slice of all ids are kept in mind, and the rest
//! is left to further passes over the store, a slice each.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use super::{Finding, invariants};
use crate::capture::error::CaptureError;
use crate::capture::filter::Filter;
use crate::capture::layout::date_of;
use crate::capture::place::Place;
use crate::capture::reader::{Query, Reader};
use crate::record::{Call, CallId, ClientApi};

/// Calls that are kept in mind.
pub(super) const MAX_CALLS: usize = 1 << 20;

pub(super) struct Cross {
    /// Calls that are kept in mind.
    room: usize,
    /// When the first of all calls was received. Those of days before it may have been pruned.
    oldest: Option<i64>,
    /// A power of two.
    /// Those whose ids leave `slice` when they are divided by `slices` are in mind.
    slices: u128,
    slice: u128,
    /// What other passes are to look at, each a number of slices and a slice of those.
    rest: Vec<(u128, u128)>,
    calls: HashMap<CallId, Known>,
    named: Vec<Named>,
    file: Arc<Path>,
}

/// What is known of a call so far.
struct Known {
    choices: Vec<u16>,
    /// How often one came again that was there, which, and where it came last.
    again: Option<(u64, u16, Arc<Path>)>,
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

impl Known {
    fn is_wrong(&self) -> bool {
        let is_off = self.completion.is_some_and(|usage| usage != self.sampled) && !self.is_said;
        let is_prompt_off = self.prompt.is_some_and(|(usage, ids)| usage != ids) && !self.is_prompt_said;
        self.again.is_some() || is_off || is_prompt_off
    }

    fn findings(&self, id: CallId) -> Vec<Finding> {
        let finding = |invariant, text: String| Finding {
            call_id: Some(id),
            ..Finding::of_file(&self.file, invariant, text)
        };
        let mut found = vec![];
        if let Some((times, choice, file)) = &self.again {
            let more = if *times == 1 {
                "once more".to_owned()
            } else {
                format!("{times} times more, the last time")
            };
            let finding = finding("once", format!("it is there {more} in {}", file.display()));
            found.push(Finding { choice_index: Some(*choice), ..finding });
        }
        if let Some(usage) = self.completion.filter(|usage| *usage != self.sampled && !self.is_said) {
            let choices = self.choices.len();
            let text = format!("{} ids in {choices} choices, the usage says {usage}", self.sampled);
            found.push(finding("completion_usage", text));
        }
        if let Some((usage, ids)) = self.prompt.filter(|(usage, ids)| usage != ids && !self.is_prompt_said) {
            found.push(finding("prompt_usage", format!("{ids} prompt ids, the usage says {usage}")));
        }
        found
    }
}

/// Whether the day on which a call was made is older than the oldest call that is there.
fn may_be_pruned(id: CallId, oldest: Option<i64>) -> bool {
    let made = id.0.get_timestamp().map(|time| time.to_unix());
    let made = made.and_then(|(seconds, _)| i64::try_from(seconds).ok()?.checked_mul(1_000_000));
    made.zip(oldest).is_some_and(|(made, oldest)| date_of(made) < date_of(oldest))
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
    pub(super) fn new(room: usize) -> Self {
        let (calls, named) = (HashMap::new(), vec![]);
        Self {
            room,
            oldest: None,
            slices: 1,
            slice: 0,
            rest: vec![],
            calls,
            named,
            file: Arc::from(PathBuf::new()),
        }
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
            again: None,
            sampled: 0,
            is_wanted: false,
            completion: None,
            prompt: None,
            is_said: false,
            is_prompt_said: false,
            file: Arc::clone(&self.file),
        });
        if known.choices.contains(&call.choice_index) {
            let times = known.again.as_ref().map_or(0, |(times, ..)| *times);
            known.again = Some((times + 1, call.choice_index, Arc::clone(&self.file)));
            return;
        }
        known.choices.push(call.choice_index);
        known.is_wanted |= is_wanted;
        known.is_said |= invariants::says(call, &["ids_usage_mismatch"]);
        known.is_prompt_said |= invariants::says(call, &["prompt_ids_usage_mismatch"]);
        if let Some(ids) = call.sampled_ids() {
            known.sampled += ids.len() as u64;
            // A choice that ended before the others may have what was counted by then.
            known.completion = known.completion.max(call.usage.map(|usage| usage.completion_tokens));
        }
        let prompt = call.prompt_tokens().filter(|_| call.prompt_ids_source.is_exact());
        // Only completions have several prompts in one call.
        let may_have_several = call.upstream_api == ClientApi::OpenaiCompletions && known.choices.len() > 1;
        known.prompt = match (prompt, call.usage) {
            _ if may_have_several => None,
            (Some(ids), Some(usage)) => Some((usage.prompt_tokens, ids)),
            _ => known.prompt,
        };
        while self.calls.len() > self.room {
            // The other half has a pass of its own.
            self.rest.push((2 * self.slices, self.slice + self.slices));
            self.slices *= 2;
            let (slices, slice) = (self.slices, self.slice);
            let is_mine = |id: CallId| id.0.as_u128() % slices == slice;
            self.calls.retain(|id, _| is_mine(*id));
            self.named.retain(|named| is_mine(named.id));
        }
    }

    /// What is wrong in this slice, once all records were seen. It is told one by one: much may be.
    pub(super) fn findings(&mut self) -> impl Iterator<Item = Finding> + use<> {
        let calls = Rc::new(std::mem::take(&mut self.calls));
        let oldest = self.oldest;
        let named = std::mem::take(&mut self.named).into_iter();
        let there = Rc::clone(&calls);
        let named = named.filter_map(move |named| {
            let what = match () {
                () if named.id == named.by => "it names itself",
                () if there.contains_key(&named.id) || may_be_pruned(named.id, oldest) => return None,
                () => "it is not there",
            };
            let finding = Finding::of_file(&named.file, named.column, format!("{}: {what}", named.id));
            Some(Finding { call_id: Some(named.by), choice_index: Some(named.choice_index), ..finding })
        });
        let mut wrong: Vec<CallId> = calls
            .iter()
            .filter(|(_, known)| known.is_wanted && known.is_wrong())
            .map(|(id, _)| *id)
            .collect();
        wrong.sort();
        named.chain(
            wrong
                .into_iter()
                .flat_map(move |id| calls.get(&id).map_or_else(Vec::new, |known| known.findings(id))),
        )
    }

    /// Turns to the next slice; false: all are done.
    pub(super) fn next_pass(&mut self) -> bool {
        let Some(next) = self.rest.pop() else {
            return false;
        };
        (self.slices, self.slice) = next;
        true
    }

    /// Reads all records again.
    pub(super) fn read(&mut self, dir: &Place, filter: Option<&Filter>) -> Result<(), CaptureError> {
        let without_bodies = !filter.is_some_and(Filter::uses_bodies);
        let without_routing = !filter.is_some_and(Filter::uses_routing);
        let query = Query { without_bodies, without_routing, as_stored: without_bodies, ..Query::default() };
        // Whatever cannot be read was told in the first pass.
        for call in Reader::open(dir, query)?.flatten() {
            let is_wanted = filter.is_none_or(|filter| filter.matches(&call));
            self.see(&call, dir.dir(), is_wanted);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::example;

    #[test]
    fn several_passes_find_what_one_finds() {
        let mut calls: Vec<Call> = vec![];
        for number in 0..200_u64 {
            let usage = serde_json::json!({"prompt_tokens": 0, "completion_tokens": number % 3});
            let mut call = example::call(serde_json::json!({
                "completion_token_ids": [1, 2], "completion_ids_source": "engine", "usage": usage
            }));
            // Ids of their own, in no order: what a v7 made in one millisecond ends in is counted up.
            call.call_id = CallId(uuid::Uuid::new_v4());
            call.retry_of = match number % 4 {
                0 => calls.last().map(|last| last.call_id),
                1 => Some(CallId(uuid::Uuid::new_v4())),
                _ => None,
            };
            calls.push(call.clone());
            if number % 10 == 0 {
                calls.push(call);
            }
        }
        let find = |room| {
            let mut cross = Cross::new(room);
            let (mut found, mut passes) = (vec![], 0);
            loop {
                for call in &calls {
                    cross.see(call, Path::new("file"), true);
                    assert!(cross.calls.len() <= room);
                }
                found.extend(cross.findings());
                passes += 1;
                if !cross.next_pass() {
                    break;
                }
            }
            found.sort_by_key(|finding| (finding.call_id, finding.invariant));
            (found, passes)
        };
        let (all, passes) = find(1000);
        assert_eq!(passes, 1);
        let count = |invariant| all.iter().filter(|finding| finding.invariant == invariant).count();
        assert_eq!(["once", "retry_of", "completion_usage"].map(count), [20, 50, 134]);
        let (several, passes) = find(20);
        assert!(passes >= 10, "{passes}");
        assert_eq!(several, all);
    }
}
