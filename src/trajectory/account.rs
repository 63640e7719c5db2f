//! The ledger's entries, and the verdict on each call by itself.

use std::collections::HashMap;

use crate::record::{Call, CallId, Disposition, IdsSource};

/// Where `tokens` sampled tokens of one choice went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub call_id: CallId,
    pub choice_index: u16,
    pub tokens: u64,
    /// [`Disposition::Trained`] means: in a sample with mask 1. What happens to the sample afterwards (too
    /// stale, its trial filtered) is the trainer's to book.
    pub disposition: Disposition,
}

impl Entry {
    pub(super) fn of(call: &Call, disposition: Disposition) -> Self {
        let tokens = call.sampled_ids().map_or(0, <[u32]>::len) as u64;
        Self { call_id: call.call_id, choice_index: call.choice_index, tokens, disposition }
    }
}

/// Ids of all choices of each call, to compare with its usage.
pub(super) struct IdCounts(HashMap<CallId, u64>);

impl IdCounts {
    pub(super) fn of<'a>(calls: impl Iterator<Item = &'a Call>) -> Self {
        let mut counts = HashMap::new();
        for call in calls {
            let ids = call.sampled_ids().map_or(0, <[u32]>::len) as u64;
            *counts.entry(call.call_id).or_default() += ids;
        }
        Self(counts)
    }

    fn arrived(&self, call: &Call) -> u64 {
        self.0.get(&call.call_id).copied().unwrap_or(0)
    }

    /// Tokens that the engine reported beyond the ids that arrived.
    pub(super) fn without_ids(&self, call: &Call) -> u64 {
        call.usage.map_or(0, |usage| usage.completion_tokens.saturating_sub(self.arrived(call)))
    }

    /// Why no token of this call can be trained whatever the other calls are, and whatever it was made for.
    pub(super) fn bucket(&self, call: &Call) -> Option<Disposition> {
        let dropped = |reason: &str| Some(Disposition::Dropped(reason.to_owned()));
        let Some(usage) = call.usage else {
            return Some(Disposition::UsageUnknown);
        };
        if usage.completion_tokens != self.arrived(call) {
            return dropped("ids do not sum to the usage");
        }
        None
    }
}

/// Why the record says that it cannot be trained, whatever the call was made for: which kinds are trained is for the
/// config to say.
pub(super) fn defect(call: &Call) -> Option<String> {
    let reasons = &call.not_trainable_reasons;
    let of_kind = call.kind.reason();
    let others: Vec<&str> = reasons.iter().map(String::as_str).filter(|reason| *reason != of_kind).collect();
    match others.as_slice() {
        _ if call.trainable => None,
        [] if reasons.is_empty() => Some("not trainable".to_owned()),
        [] => None,
        others => Some(others.join(", ")),
    }
}

/// What a trained token needs besides its id.
pub(super) struct Targets {
    pub(super) logprobs: Vec<f32>,
    pub(super) versions: Vec<u64>,
    pub(super) temperature: f32,
}

/// The values that the loss needs for every completion token, or why the call has not got them (laws 2, 3).
pub(super) fn targets(call: &Call) -> Result<Targets, String> {
    if let Some(defect) = defect(call) {
        return Err(defect);
    }
    if call.completion_ids_source != IdsSource::Engine {
        return Err("completion ids are not the engine's".to_owned());
    }
    if !matches!(call.prompt_ids_source, IdsSource::Engine | IdsSource::SentByUs) {
        return Err("prompt ids are not the engine's".to_owned());
    }
    if call.prompt_token_ids.as_ref().is_none_or(Vec::is_empty) {
        return Err("no prompt ids".to_owned());
    }
    let tokens = call.sampled_ids().map_or(0, <[u32]>::len);
    let logprobs = call.completion_logprobs.as_deref().unwrap_or_default();
    if logprobs.len() != tokens {
        return Err("log-probs and ids differ in number".to_owned());
    }
    let known: Option<Vec<f32>> = logprobs.iter().copied().collect();
    let logprobs = known.ok_or("a log-prob is missing")?;
    if !logprobs.iter().all(|value| value.is_finite() && *value <= 0.0) {
        return Err("a log-prob is not a finite number at most 0".to_owned());
    }
    let versions = versions(call, tokens).ok_or("the weight version of a token is not known")?;
    let temperature = call.sampling_sent.temperature.ok_or("the temperature is not known")? as f32;
    Ok(Targets { logprobs, versions, temperature })
}

/// The version of each token, if the spans tile them and their labels are numbers.
fn versions(call: &Call, tokens: usize) -> Option<Vec<u64>> {
    let mut versions = Vec::with_capacity(tokens);
    for span in call.weight_spans.as_deref()? {
        let (start, end) = (span.start as usize, span.end as usize);
        let is_next = start == versions.len() && start <= end && end <= tokens;
        let version = span.version.parse().ok().filter(|_| is_next)?;
        versions.resize(end, version);
    }
    (versions.len() == tokens).then_some(versions)
}
