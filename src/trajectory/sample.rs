//! Lineages to samples and the ledger.

use std::collections::HashMap;
use std::sync::Arc;

use super::account::{self, Entry};
use super::lineage::{Lineage, LineageCall, Lineages};
use crate::record::{Call, CallId, Disposition, EpisodeId, GroupId, Sample, SampleParts};

/// Whose tokens these are, for the samples' `episode_id` and `group_id`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Episode {
    pub episode_id: EpisodeId,
    pub group_id: GroupId,
}

/// Samples and where every sampled token went.
#[derive(Debug, Clone, Default)]
pub struct Built {
    /// One a lineage that has tokens to train.
    pub samples: Vec<Sample>,
    /// Each sampled token of the calls, once.
    pub ledger: Vec<Entry>,
}

/// Tokens that are in no bucket, or in two: the sum that law 6 demands is off.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "call {call_id} choice {choice_index}: {sampled} tokens were sampled, {booked} are in the ledger, \
     {in_samples} are in samples and {trained} are booked as trained"
)]
pub struct Unbalanced {
    pub call_id: CallId,
    pub choice_index: u16,
    pub sampled: u64,
    pub booked: u64,
    pub in_samples: u64,
    pub trained: u64,
}

/// Builds one sample a lineage. A call that has not all values the loss needs is context in its lineage's
/// sample, and its tokens are dropped with the reason.
#[must_use]
pub fn samples(lineages: &Lineages, episode: Option<Episode>) -> Built {
    let mut built = Built { samples: vec![], ledger: lineages.set_aside.clone() };
    for lineage in &lineages.lineages {
        add(lineage, episode, &mut built);
    }
    built
}

fn add(lineage: &Lineage, episode: Option<Episode>, built: &mut Built) {
    let mut parts = SampleParts {
        lineage_id: lineage.index,
        episode_id: episode.map(|episode| episode.episode_id),
        group_id: episode.map(|episode| episode.group_id),
        ..SampleParts::default()
    };
    let mut entries = vec![];
    for LineageCall { call, is_own } in &lineage.calls {
        if !is_own {
            continue;
        }
        let disposition = match account::targets(call) {
            Ok(targets) => {
                append(&mut parts, call, targets);
                Disposition::Trained
            }
            Err(reason) => Disposition::Dropped(reason),
        };
        entries.push(Entry::of(call, disposition));
    }
    if !parts.call_spans.is_empty() {
        match Sample::new(parts) {
            Ok(sample) => built.samples.push(sample),
            Err(error) => {
                for entry in &mut entries {
                    if entry.disposition == Disposition::Trained {
                        entry.disposition = Disposition::Dropped(error.to_string());
                    }
                }
            }
        }
    }
    built.ledger.extend(entries);
}

/// Adds the context up to the call's completion and the completion. Every earlier call of the lineage is a
/// prefix of this one's prompt, so what is there already stays as it is.
fn append(parts: &mut SampleParts, call: &Call, targets: account::Targets) {
    let prompt = call.prompt_token_ids.as_deref().unwrap_or_default();
    let completion = call.sampled_ids().unwrap_or_default();
    let (start, end) = (prompt.len(), prompt.len() + completion.len());
    parts.token_ids.extend_from_slice(&prompt[parts.token_ids.len()..]);
    parts.loss_mask.resize(start, false);
    parts.logprobs.resize(start, None);
    parts.weight_version.resize(start, None);
    parts.temperature.resize(start, None);
    parts.token_ids.extend_from_slice(completion);
    parts.loss_mask.resize(end, true);
    parts.logprobs.extend(targets.logprobs.into_iter().map(Some));
    parts.weight_version.extend(targets.versions.into_iter().map(Some));
    parts.temperature.resize(end, Some(targets.temperature));
    parts.call_spans.push((call.call_id, start, end));
}

impl Built {
    /// Proves that each sampled token of `calls` is in the ledger once, and in a sample exactly if it is
    /// booked as trained. Tokens that the engine reported without ids count as sampled too.
    ///
    /// # Errors
    /// The first call whose sum is off.
    pub fn check(&self, calls: &[Arc<Call>]) -> Result<(), Unbalanced> {
        let mut ids: HashMap<(CallId, u16), u64> = HashMap::new();
        let mut reported: HashMap<CallId, u64> = HashMap::new();
        for call in calls {
            let sampled = call.sampled_ids().map_or(0, <[u32]>::len) as u64;
            ids.insert((call.call_id, call.choice_index), sampled);
            if let Some(usage) = call.usage {
                reported.insert(call.call_id, usage.completion_tokens);
            }
        }
        let mut booked: HashMap<(CallId, u16), (u64, u64)> = HashMap::new();
        let mut without_ids: HashMap<CallId, u64> = HashMap::new();
        for entry in &self.ledger {
            if entry.disposition == Disposition::NoIds {
                *without_ids.entry(entry.call_id).or_default() += entry.tokens;
                continue;
            }
            let (all, trained) = booked.entry((entry.call_id, entry.choice_index)).or_default();
            *all += entry.tokens;
            if entry.disposition == Disposition::Trained {
                *trained += entry.tokens;
            }
        }
        let mut spans: HashMap<CallId, u64> = HashMap::new();
        for sample in &self.samples {
            for &(call_id, start, end) in &sample.call_spans {
                *spans.entry(call_id).or_default() += (end - start) as u64;
            }
        }
        let mut arrived: HashMap<CallId, (u64, u64)> = HashMap::new();
        for (&(call_id, choice_index), &sampled) in &ids {
            let (all, trained) = booked.remove(&(call_id, choice_index)).unwrap_or_default();
            let sums = arrived.entry(call_id).or_default();
            sums.0 += sampled;
            sums.1 += trained;
            if all != sampled {
                let in_samples = spans.get(&call_id).copied().unwrap_or(0);
                return Err(Unbalanced { call_id, choice_index, sampled, booked: all, in_samples, trained });
            }
        }
        for (call_id, (sampled, trained)) in arrived {
            let in_samples = spans.remove(&call_id).unwrap_or(0);
            let missing = reported.get(&call_id).map_or(0, |all| all.saturating_sub(sampled));
            let booked_missing = without_ids.get(&call_id).copied().unwrap_or(0);
            if in_samples != trained || missing != booked_missing {
                return Err(Unbalanced {
                    call_id,
                    choice_index: 0,
                    sampled: sampled + missing,
                    booked: sampled + booked_missing,
                    in_samples,
                    trained,
                });
            }
        }
        Ok(())
    }
}
