//! The proof that every sampled token is accounted for.

use std::collections::HashMap;
use std::sync::Arc;

use super::sample::Built;
use crate::record::{Call, CallId, Disposition};

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
            for span in &sample.call_spans {
                let tokens = span.end.index() - span.start.index();
                *spans.entry(span.choice.call_id).or_default() += tokens as u64;
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
