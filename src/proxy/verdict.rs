//! The capture-time verdict: why a record, by itself, must not be trained on. Each reason is a stable word.

use crate::record::{Call, CallKind, CallStatus, LogprobSemantics, WeightSource};
use crate::upstream::dialect;

/// Reasons that are one word.
const REASONS: [&str; 32] = [
    "no_prompt_token_ids",
    "empty_prompt",
    "no_token_ids",
    "no_sampled_tokens",
    "no_logprobs",
    "logprobs_length_mismatch",
    "logprob_missing",
    "usage_unknown",
    "ids_usage_mismatch",
    "prompt_ids_usage_mismatch",
    "no_finish_reason",
    "finish_reason_abort",
    "finish_reason_error",
    "finish_reason_content_filter",
    "greedy_sampling",
    "constrained_decoding",
    "sampling_unknown_or_truncated",
    "logprob_semantics_unknown",
    "raw_logprobs_at_other_temperature",
    "weight_version_unknown",
    "weight_spans_broken",
    "routing_without_ids",
    "routing_rows_mismatch",
    "routing_unreadable",
    "capture_refused_by_upstream",
    PROMPT_CHANGED,
    OUTSIDE,
    LOCAL_IDS,
    LOCAL_COMPLETION_REFUSED,
    LOCAL_PROMPT_REFUSED,
    LOCAL_IDS_USAGE,
    AUX_ROUTE,
];

/// The engine read other prompt ids than lego sent.
pub(super) const PROMPT_CHANGED: &str = "prompt_ids_differ_from_sent";
/// Sampled ids that the model's folder has no token for: it may be another model's.
pub(super) const OUTSIDE: &str = "ids_outside_the_local_tokenizer";
/// Ids are those of a local tokenizer.
pub(super) const LOCAL_IDS: &str = "ids_from_local_tokenizer";
/// The local tokenizer has no one sequence of ids for what the reply says.
pub(super) const LOCAL_COMPLETION_REFUSED: &str = "local_completion_ids_refused";
/// It has none for the prompt, or another number than the upstream counted.
pub(super) const LOCAL_PROMPT_REFUSED: &str = "local_prompt_ids_refused";
/// The upstream counted another number of sampled tokens than the reply's text has.
pub(super) const LOCAL_IDS_USAGE: &str = "local_ids_usage_mismatch";
/// A route of kind `aux` answered: what it samples is another model's, whoever takes in side calls.
pub(super) const AUX_ROUTE: &str = "aux_route";

/// Every reason that there is: those here, of the routing (room `upstream`), and of a refused capture.
pub(super) fn all_reasons() -> impl Iterator<Item = String> {
    let statuses = CallStatus::ALL.iter().filter(|status| **status != CallStatus::Ok);
    let is_other = |kind: &&CallKind| !matches!(kind, CallKind::Policy | CallKind::Unknown);
    let kinds = CallKind::ALL.iter().filter(is_other);
    REASONS
        .iter()
        .map(|reason| (*reason).to_owned())
        .chain(statuses.map(|status| format!("status_{}", status.as_str())))
        .chain(kinds.map(|kind| kind.reason()))
}

/// The reasons; none: trainable. `sampled_in_call` is the number of ids over all choices of the call,
/// `prompts_in_call` that over all prompts where it has several. What the record says already (its routing could not
/// be read) stays.
pub(super) fn reasons(
    call: &Call,
    sampled_in_call: u64,
    prompts_in_call: Option<u64>,
    is_constrained: bool,
) -> Vec<String> {
    let mut found: Vec<String> = call.not_trainable_reasons.clone();
    let mut say = |reason: &str| found.push(reason.to_owned());
    if call.status != CallStatus::Ok {
        say(&format!("status_{}", call.status.as_str()));
    }
    if !matches!(call.kind, CallKind::Policy | CallKind::Unknown) {
        say(&call.kind.reason());
    }
    let prompt = call.prompt_token_ids.as_ref().filter(|_| call.prompt_ids_source.is_exact());
    let ids = call.completion_token_ids.as_ref().filter(|_| call.completion_ids_source.is_exact());
    match prompt {
        None => say("no_prompt_token_ids"),
        Some(ids) if ids.is_empty() => say("empty_prompt"),
        Some(_) => {}
    }
    match ids {
        None => say("no_token_ids"),
        Some(ids) if ids.is_empty() => say("no_sampled_tokens"),
        Some(_) => {}
    }
    match (ids, &call.completion_logprobs) {
        (_, None) => say("no_logprobs"),
        (Some(ids), Some(logprobs)) if ids.len() != logprobs.len() => say("logprobs_length_mismatch"),
        (_, Some(logprobs)) if logprobs.contains(&None) => say("logprob_missing"),
        _ => {}
    }
    match call.usage {
        None => say("usage_unknown"),
        Some(usage) => {
            if ids.is_some() && usage.completion_tokens != sampled_in_call {
                say("ids_usage_mismatch");
            }
            let of_prompts = |prompt: &Vec<u32>| prompts_in_call.unwrap_or(prompt.len() as u64);
            if prompt.is_some_and(|prompt| of_prompts(prompt) != usage.prompt_tokens) {
                say("prompt_ids_usage_mismatch");
            }
        }
    }
    match call.finish_reason.as_deref() {
        None => say("no_finish_reason"),
        Some(reason @ ("abort" | "error" | "content_filter")) => say(&format!("finish_reason_{reason}")),
        Some(_) => {}
    }
    sampling(call, is_constrained, &mut say);
    weights(call, ids.map_or(0, Vec::len), &mut say);
    found
}

/// The log-prob must be of the distribution that was sampled from (law 12).
fn sampling(call: &Call, is_constrained: bool, say: &mut impl FnMut(&str)) {
    let sent = &call.sampling_sent;
    if sent.temperature == Some(0.0) {
        say("greedy_sampling");
    }
    if is_constrained {
        say("constrained_decoding");
    }
    // Engines fill what nobody sent from the model's own generation_config.
    if !dialect::is_untruncated(sent) {
        say("sampling_unknown_or_truncated");
        return;
    }
    match call.logprob_semantics {
        LogprobSemantics::Unknown => say("logprob_semantics_unknown"),
        LogprobSemantics::RawT1 if sent.temperature != Some(1.0) => {
            say("raw_logprobs_at_other_temperature");
        }
        _ => {}
    }
}

fn weights(call: &Call, sampled: usize, say: &mut impl FnMut(&str)) {
    let Some(spans) = call.weight_spans.as_ref().filter(|_| call.weight_source != WeightSource::Unknown)
    else {
        say("weight_version_unknown");
        return;
    };
    let mut at = 0;
    let tiles = spans.iter().all(|span| {
        let follows = span.start == at && span.end >= span.start;
        at = span.end;
        follows
    });
    if !tiles || at as usize != sampled {
        say("weight_spans_broken");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words that `/metrics` counts by must be those that are said.
    #[test]
    fn every_reason_in_the_sources_is_listed() {
        let own = include_str!("verdict.rs");
        let said = own.split("say(\"").skip(1);
        let routing = include_str!("../upstream/routing.rs");
        let routing = routing.split("\"routing_").skip(1).map(|rest| ("routing_", rest));
        let words: Vec<String> = said
            .map(|rest| ("", rest))
            .chain(routing)
            .filter_map(|(head, rest)| Some(format!("{head}{}", rest.split_once('"')?.0)))
            .filter(|word| !word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
            .collect();
        assert!(words.len() > 20, "{words:?}");
        for word in &words {
            assert!(all_reasons().any(|reason| reason == *word), "{word} is not in REASONS");
        }
    }
}
