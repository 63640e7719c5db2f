//! What must hold of a record by itself.
//!
//! A record is what was seen, and an upstream may contradict itself. So a contradiction between its parts is a finding
//! unless the record says it (`not_trainable_reasons`); then nobody will train on it. Probes are lego's own, never
//! train, and need not say why.

use crate::record::{Call, CallKind, CallStatus, IdsSource, LogprobSemantics, SCHEMA_VERSION, WeightSource};

/// Tells what is wrong: which invariant, and what was found.
pub(super) fn check(call: &Call, tell: &mut dyn FnMut(&'static str, String)) {
    if call.schema_version > SCHEMA_VERSION {
        tell(
            "schema_version",
            format!("{}, this lego knows those up to {SCHEMA_VERSION}", call.schema_version),
        );
    }
    tokens(call, tell);
    logprobs(call, tell);
    spans(call, tell);
    routing(call, tell);
    ending(call, tell);
    json(call, tell);
    verdict(call, tell);
}

/// Whether the record gives one of these reasons not to train, or needs none.
pub(super) fn says(call: &Call, reasons: &[&str]) -> bool {
    let is_probe = call.kind == CallKind::Probe && !call.trainable;
    is_probe || call.not_trainable_reasons.iter().any(|reason| reasons.contains(&reason.as_str()))
}

/// The ids that the model was given, or that were written for it.
fn exact_prompt(call: &Call) -> Option<&[u32]> {
    call.prompt_token_ids.as_deref().filter(|_| call.prompt_ids_source.is_exact())
}

fn tokens(call: &Call, tell: &mut dyn FnMut(&'static str, String)) {
    let sides = [
        ("prompt", call.prompt_token_ids.is_some(), call.prompt_ids_source),
        ("completion", call.completion_token_ids.is_some(), call.completion_ids_source),
    ];
    for (side, has_ids, source) in sides {
        if has_ids && source == IdsSource::Absent {
            tell("ids_source", format!("{side} ids are there, and their source is absent"));
        }
    }
}

fn logprobs(call: &Call, tell: &mut dyn FnMut(&'static str, String)) {
    let Some(logprobs) = &call.completion_logprobs else {
        return;
    };
    if let Some(ids) = call.sampled_ids()
        && ids.len() != logprobs.len()
        && !says(call, &["logprobs_length_mismatch"])
    {
        tell("logprobs_length", format!("{} log-probs of {} completion ids", logprobs.len(), ids.len()));
    }
    let bad = logprobs.iter().enumerate().find_map(|(at, value)| {
        let value = (*value)?;
        (!value.is_finite() || value > 0.0).then_some((at, value))
    });
    if let Some((at, value)) = bad {
        tell("logprob_value", format!("log-prob {at} is {value}: not a finite number of at most 0"));
    }
}

/// The spans tile the sampled ids.
fn spans(call: &Call, tell: &mut dyn FnMut(&'static str, String)) {
    let Some(spans) = &call.weight_spans else {
        return;
    };
    let sampled = call.sampled_ids().map_or(0, <[u32]>::len);
    let mut at = 0;
    let is_tiled = spans.iter().all(|span| {
        let follows = span.start == at && span.end >= span.start;
        at = span.end;
        follows
    });
    let is_said = says(call, &["weight_spans_broken", "weight_version_unknown"]);
    if (!is_tiled || at as usize != sampled) && !is_said {
        let spans: Vec<String> = spans.iter().map(|span| format!("[{}, {})", span.start, span.end)).collect();
        tell("weight_spans", format!("{} do not tile {sampled} sampled ids", spans.join(" ")));
    }
}

/// One row for each token of prompt and completion but the last, the rows that an earlier call has counted in.
fn routing(call: &Call, tell: &mut dyn FnMut(&'static str, String)) {
    let Some(routing) = &call.routing else {
        return;
    };
    let shape = routing.shape();
    if shape.rows > 0 && (shape.layers == 0 || shape.top_k == 0) {
        tell("routing_shape", format!("{} layers, {} experts a token", shape.layers, shape.top_k));
    }
    if routing.ids().any(|id| i32::try_from(id).is_err()) {
        tell("routing_shape", "an expert's id is negative".to_owned());
    }
    match (&call.prompt_token_ids, &call.completion_token_ids) {
        (Some(prompt), Some(completion)) => {
            let tokens = prompt.len() as u64 + completion.len() as u64;
            let end = u64::from(shape.start) + u64::from(shape.rows);
            if end != tokens.saturating_sub(1) {
                tell(
                    "routing_rows",
                    format!("rows end at {end}, {tokens} tokens need {}", tokens.saturating_sub(1)),
                );
            }
        }
        _ => tell("routing_rows", "there is routing, and not all ids that it is of".to_owned()),
    }
}

fn ending(call: &Call, tell: &mut dyn FnMut(&'static str, String)) {
    if call.status != CallStatus::Ok {
        return;
    }
    if !(200..300).contains(&call.http_status) {
        tell("status", format!("status ok, and the upstream answered with {}", call.http_status));
    }
    if let Some(error) = &call.error {
        tell("status", format!("status ok, and an error: {error}"));
    }
    match call.finish_reason.as_deref() {
        None if !says(call, &["no_finish_reason"]) => {
            tell("finish_reason", "status ok, and no finish reason".to_owned());
        }
        Some(reason @ ("abort" | "error")) if !says(call, &[&format!("finish_reason_{reason}")]) => {
            tell("finish_reason", format!("status ok, and the finish reason {reason}"));
        }
        _ => {}
    }
}

fn json(call: &Call, tell: &mut dyn FnMut(&'static str, String)) {
    let is_json = |text: &str| serde_json::from_str::<&serde_json::value::RawValue>(text).map(drop);
    let bodies = [
        ("client_request", &call.client_request),
        ("upstream_request", &call.upstream_request),
        ("response", &call.response),
    ];
    for (name, body) in bodies {
        if let Some(Err(error)) = body.as_ref().map(|body| is_json(body.get())) {
            tell("json_body", format!("{name}: {error}"));
        }
    }
    for tool in call.tool_calls.iter().flatten() {
        let is_valid = is_json(&tool.arguments).is_ok();
        if is_valid != tool.arguments_valid_json {
            let (said, is) = if is_valid { ("not JSON", "they are") } else { ("JSON", "they are not") };
            tell("tool_arguments", format!("the arguments of {} are said to be {said}, and {is}", tool.name));
        }
    }
}

/// `trainable` if and only if nothing speaks against it.
fn verdict(call: &Call, tell: &mut dyn FnMut(&'static str, String)) {
    if call.trainable != call.not_trainable_reasons.is_empty() {
        let found = match call.not_trainable_reasons.as_slice() {
            [] => "not trainable, and no reason why".to_owned(),
            reasons => format!("trainable, and reasons why not: {}", reasons.join(", ")),
        };
        tell("trainable_reasons", found);
    }
    if !call.trainable {
        return;
    }
    let ids = call.sampled_ids().unwrap_or_default();
    let lacks = [
        (call.status != CallStatus::Ok, "its status is not ok"),
        (!matches!(call.kind, CallKind::Policy | CallKind::Unknown), "its kind never trains"),
        (exact_prompt(call).is_none_or(<[u32]>::is_empty), "the prompt's exact ids are not known"),
        (ids.is_empty(), "no sampled ids are known"),
        (
            call.completion_logprobs.as_ref().is_none_or(|logprobs| logprobs.contains(&None)),
            "a log-prob is missing",
        ),
        (call.logprob_semantics == LogprobSemantics::Unknown, "nobody knows what its log-probs are of"),
        (
            call.weight_spans.is_none() || call.weight_source == WeightSource::Unknown,
            "the weights are not known",
        ),
        (call.usage.is_none(), "there is no usage to count its ids against"),
        (call.finish_reason.is_none(), "there is no finish reason"),
    ];
    let lacks: Vec<&str> = lacks.into_iter().filter_map(|(is, what)| is.then_some(what)).collect();
    if !lacks.is_empty() {
        tell("trainable", format!("trainable, but {}", lacks.join(", ")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{JsonText, example};

    #[test]
    fn bodies_that_are_no_json_are_told_each_by_its_name() {
        let broken = || Some(JsonText::of_read("{\"a\": "));
        let mut call = example::call(serde_json::json!({"not_trainable_reasons": ["no_finish_reason"]}));
        let told = |call: &Call| {
            let mut told = vec![];
            check(call, &mut |invariant, found| told.push((invariant, found)));
            told
        };
        assert_eq!(told(&call), []);
        (call.client_request, call.upstream_request, call.response) = (broken(), broken(), broken());
        let told = told(&call);
        let names = ["client_request", "upstream_request", "response"];
        assert_eq!(told.len(), names.len());
        for ((invariant, found), name) in told.iter().zip(names) {
            assert!(*invariant == "json_body" && found.starts_with(name), "{found}");
        }
    }
}
