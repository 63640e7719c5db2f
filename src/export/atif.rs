//! A conversation as a trajectory of ATIF (Agent Trajectory Interchange Format, version 1.8).

use serde_json::{Map, Value, json};

use super::conversation::{Conversation, Turn};
use super::messages::{arguments, is_same_reply, reply, text};
use super::sharegpt::place;
use crate::capture::date_of;
use crate::record::{Call, SessionId};

const VERSION: &str = "ATIF-v1.8";
/// In the place of a name that ATIF needs and nobody told.
const UNKNOWN: &str = "unknown";

/// The trajectory. What ATIF has no place for is in its `extra`.
pub(super) fn trajectory(
    session: &SessionId,
    index: usize,
    found: &Conversation,
    columns: Map<String, Value>,
) -> Value {
    let last = found.turns.last().map(|turn| &turn.call);
    let named =
        |of: fn(&Call) -> Option<&String>| last.and_then(|call| of(call)).map_or(UNKNOWN, String::as_str);
    let agent = json!({
        "name": named(|call| call.harness.as_ref()), "version": named(|call| call.harness_version.as_ref()),
        "model_name": last.map(|call| model(call)), "tool_definitions": found.tools,
    });
    let steps = steps(found);
    let sum = |of: fn(&Call) -> Option<u64>| {
        let counts = found.turns.iter().map(|turn| of(&turn.call));
        counts.sum::<Option<u64>>()
    };
    let final_metrics = json!({
        "total_prompt_tokens": sum(|call| Some(call.usage?.prompt_tokens)),
        "total_completion_tokens": sum(|call| Some(call.usage?.completion_tokens)),
        "total_steps": steps.len(),
    });
    without_nulls(json!({
        "schema_version": VERSION, "session_id": session, "trajectory_id": format!("{session}.{index}"),
        "agent": agent, "steps": steps, "final_metrics": final_metrics, "extra": columns,
    }))
}

fn model(call: &Call) -> &str {
    call.model_served.as_deref().unwrap_or(&call.model_requested)
}

fn steps(found: &Conversation) -> Vec<Value> {
    let mut steps: Vec<Value> = vec![];
    // What the steps of the model called since another side spoke, each with its step.
    let mut called: Vec<(usize, &Value)> = vec![];
    for (at, message) in found.messages.iter().enumerate() {
        let turn = found.turns.iter().find(|turn| turn.at == at);
        let said = content(&message["content"]);
        match message["role"].as_str() {
            Some("assistant") => {
                if steps.last().is_none_or(|step| step["source"] != "agent") {
                    called.clear();
                }
                called.extend(
                    message["tool_calls"].as_array().into_iter().flatten().map(|call| (steps.len(), call)),
                );
                steps.push(agent_step(message, said, turn, at + 1 == found.messages.len()));
            }
            Some("tool") => {
                let calls: Vec<&Value> = called.iter().map(|(_, call)| *call).collect();
                let of = place(message, &calls);
                let step = of.map(|place| called[place].0);
                let id = of.map(|_| &message["tool_call_id"]);
                let unmatched = id.is_none().then(|| json!({"tool_call_id": message["tool_call_id"]}));
                let result = json!({"source_call_id": id, "content": said, "extra": unmatched});
                observe(&mut steps, step, result);
            }
            Some("user") => steps.push(json!({"source": "user", "message": said})),
            role => {
                let extra = (!matches!(role, Some("system"))).then(|| json!({"role": role}));
                steps.push(json!({"source": "system", "message": said, "extra": extra}));
            }
        }
    }
    for (id, step) in (1_u64..).zip(&mut steps) {
        step["step_id"] = id.into();
    }
    steps
}

/// Adds the result of a tool to the step that called it; to the last one of the model if nobody knows which that is.
fn observe(steps: &mut Vec<Value>, step: Option<usize>, result: Value) {
    let last = steps.len().checked_sub(1).filter(|last| steps[*last]["source"] == "agent");
    match step.or(last) {
        Some(step) => match steps[step]["observation"]["results"].as_array_mut() {
            Some(results) => results.push(result),
            None => steps[step]["observation"] = json!({"results": [result]}),
        },
        None => {
            let observation = json!({"results": [result]});
            steps.push(json!({"source": "system", "message": "", "observation": observation}));
        }
    }
}

fn agent_step(message: &Value, said: Value, turn: Option<&Turn>, is_last: bool) -> Value {
    let tools = message["tool_calls"].as_array().into_iter().flatten().map(|tool| {
        let function = &tool["function"];
        let (arguments, raw) = match arguments(function) {
            arguments @ Value::Object(_) => (arguments, None),
            other => (json!({}), Some(json!({"arguments": other}))),
        };
        json!({
            "tool_call_id": tool["id"].as_str().unwrap_or_default(),
            "function_name": function["name"].as_str().unwrap_or_default(), "arguments": arguments, "extra": raw,
        })
    });
    let tools: Vec<Value> = tools.collect();
    // Ids belong to the text that was sampled, and to no other.
    let own = turn.filter(|turn| is_last || is_same_reply(message, &reply(&turn.call)));
    let extra = turn.map(|turn| {
        json!({
            "call_id": turn.call.call_id, "choice_index": turn.call.choice_index,
            "changed_by_harness": own.is_none().then_some(true),
        })
    });
    json!({
        "source": "agent", "message": said, "reasoning_content": message["reasoning_content"],
        "tool_calls": Some(tools).filter(|tools| !tools.is_empty()), "extra": extra,
        "model_name": turn.map(|turn| model(&turn.call)), "timestamp": turn.map(|turn| time(turn.call.received_at)),
        "is_copied_context": turn.is_some_and(|turn| turn.is_shared).then_some(true),
        "metrics": own.map(|turn| metrics(&turn.call)), "llm_call_count": turn.map(|_| 1),
    })
}

fn metrics(call: &Call) -> Value {
    let ids = call.sampled_ids();
    let logprobs = call.completion_logprobs.as_ref().filter(|_| ids.is_some());
    // ATIF has no null among them.
    let logprobs: Option<Vec<f32>> = logprobs.and_then(|logprobs| logprobs.iter().copied().collect());
    json!({
        "prompt_tokens": call.usage.map(|usage| usage.prompt_tokens),
        "completion_tokens": call.usage.map(|usage| usage.completion_tokens),
        "cached_tokens": call.usage.and_then(|usage| usage.cached_tokens),
        "completion_token_ids": ids, "logprobs": logprobs,
    })
}

/// Text as it is; of anything else its parts, those that are no text by their kind.
fn content(content: &Value) -> Value {
    if let Ok(text) = text(content) {
        return text.into();
    }
    let parts = content.as_array().map_or(&[][..], Vec::as_slice).iter().map(|part| {
        let text = part["text"].as_str().map(str::to_owned);
        let text = text.unwrap_or_else(|| format!("[{}]", part["type"].as_str().unwrap_or("not text")));
        json!({"type": "text", "text": text})
    });
    parts.collect::<Vec<_>>().into()
}

/// As ISO 8601 has it, UTC.
fn time(us: i64) -> String {
    let of_day = us.rem_euclid(86_400_000_000);
    let (seconds, us_of_second) = (of_day / 1_000_000, of_day % 1_000_000);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{}T{hours:02}:{minutes:02}:{:02}.{us_of_second:06}Z", date_of(us), seconds % 60)
}

/// What is not known is left out; ATIF's optional members are.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(members) => {
            let members = members.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(members.map(|(name, value)| (name, without_nulls(value))).collect())
        }
        Value::Array(items) => items.into_iter().map(without_nulls).collect::<Vec<_>>().into(),
        other => other,
    }
}
