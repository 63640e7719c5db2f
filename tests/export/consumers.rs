//! Each form, loaded by what its consumer loads it with. Which that is, and what stands in for torch, is written in
//! `tests/python/export_consumers.py` and in `docs/exports.md`.

use std::fs;

use lego::record::{Call, CapturedToolCall};
use serde_json::{Value, json};

use crate::calls::routing;
use crate::python;
use crate::setup::{Run, body, sampled};

/// Packages of consumers, with what the definitions that are loaded need, and without what the rest of them needs.
const CONSUMERS: [&str; 6] =
    ["atif==1.8.0", "harbor==0.26.0", "llamafactory==0.9.5", "miles-rl==0.0.2", "trl==1.16.0", "verl==0.9.1"];
const NEEDED: [&str; 8] =
    ["datasets", "jinja2", "msgspec", "numpy", "pandas", "polars", "pydantic", "transformers"];

fn told(mut call: Call, messages: Value, tools: &[&str]) -> Call {
    let tools = tools.iter().map(|name| json!({"type": "function", "function": {
        "name": name, "description": "", "parameters": {"type": "object", "properties": {*name: {"type": "string"}}},
    }}));
    call.client_request = body(&json!({"messages": messages, "tools": tools.collect::<Vec<_>>()}));
    call
}

/// Two policy versions; an episode with two turns and expert routing, one with two conversations, one that ran out of
/// memory, one whose routing is not all there; tools that differ from conversation to conversation.
async fn run() -> Run {
    let mut run = Run::new(2);
    for (trial, version, reward) in [
        ("v0-g0-0", 0, 1.0),
        ("v0-g0-1", 0, 0.0),
        ("v1-g1-0", 1, 0.25),
        ("v10-g9-0", 10, 1.0),
        ("v10-g9-1", 10, 0.0),
    ] {
        run.trial(trial, version, Some(reward), json!({}));
    }
    run.ended("v1-g1-1", 1, Some(0.0), json!({"outcome": "valid", "termination": "agent_oom"}));
    run.result("v1-g1-1", Some(0.0), json!({"termination": "agent_oom"}));
    let user = json!({"role": "user", "content": "fix it"});
    let mut first = told(sampled("v0-g0-0", 1, &[1, 2], &[3, 4]), json!([user]), &["edit"]);
    first.routing = Some(routing(0, 3, 0));
    first.text = None;
    let sent = json!([user, {"role": "assistant", "content": "", "tool_calls": [{
        "id": "call_1", "type": "function", "function": {"name": "edit", "arguments": "{\"a\": 1,\"b\":2}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"}]);
    let mut second = told(sampled("v0-g0-0", 1, &[1, 2, 3, 4, 5], &[6]), sent, &["edit"]);
    second.routing = Some(routing(0, 5, 100));
    let mut side = told(
        sampled("v0-g0-1", 1, &[7, 8], &[9]),
        json!([{"role": "user", "content": "a title"}]),
        &["view", "ls"],
    );
    side.tool_calls = Some(vec![CapturedToolCall {
        id: "call_9".to_owned(),
        name: "view".to_owned(),
        arguments: "not JSON".to_owned(),
        arguments_valid_json: false,
    }]);
    let main = told(sampled("v0-g0-1", 1, &[1, 2], &[5, 5, 5]), json!([user]), &[]);
    let mut lost = sampled("v1-g1-0", 1, &[1], &[2, 3]);
    lost.routing = Some(routing(1, 1, 0));
    lost.finish_reason = Some("length".to_owned());
    let oom = sampled("v1-g1-1", 1, &[1], &[4, 4]);
    let mut wide = sampled("v10-g9-0", 1, &[1], &[2, 2]);
    wide.routing = Some(routing(0, 2, 300));
    let narrow = sampled("v10-g9-1", 1, &[1], &[9, 9]);
    run.capture(vec![first, second, side, main, lost, oom, wide, narrow]).await;
    run
}

/// Token ids, where the response starts, mask, log-probs; as `tests/common/calls.rs` makes them up.
fn samples() -> Value {
    let logprob = |id: u32| -(f64::from(id) + 1.0) / 7.0;
    let of = |ids: &[u32], start: usize, mask: &[u8], sampled: &[u8]| {
        let logprobs = ids[start..].iter().zip(sampled);
        let logprobs = logprobs.map(|(id, is_sampled)| if *is_sampled == 1 { logprob(*id) } else { 0.0 });
        json!([ids, start, mask, logprobs.collect::<Vec<_>>()])
    };
    json!([
        of(&[1, 2, 3, 4, 5, 6], 2, &[1, 1, 0, 1], &[1, 1, 0, 1]),
        of(&[7, 8, 9], 2, &[1], &[1]),
        of(&[1, 2, 5, 5, 5], 2, &[1, 1, 1], &[1, 1, 1]),
        of(&[1, 2, 3], 1, &[1, 1], &[1, 1]),
        of(&[1, 4, 4], 1, &[0, 0], &[1, 1]),
        of(&[1, 2, 2], 1, &[1, 1], &[1, 1]),
        of(&[1, 9, 9], 1, &[1, 1], &[1, 1]),
    ])
}

#[tokio::test]
async fn consumers_load_what_was_captured() {
    let python = python::venv(&NEEDED);
    let packages = python::alone(&python, &CONSUMERS);
    let run = run().await;
    let expected = run.at("expected.json");
    fs::write(&expected, samples().to_string()).expect("written");
    for (form, consumer, rows) in [
        ("calls", "calls", 8),
        ("openai", "openai", 6),
        ("sharegpt", "sharegpt", 6),
        ("atif", "atif", 6),
        ("trl", "trl", 7),
        ("verl", "verl", 7),
        ("slime", "slime", 7),
        ("prime-rl", "prime_rl", 7),
    ] {
        let exported = run.export(form, if form == "prime-rl" { &["--ranks", "2"] } else { &[] }).ok();
        assert_eq!(exported.by("rows")["written"], rows, "{form}: {}", exported.counts);
        let arguments = [&packages, &exported.path, &expected].map(|path| path.to_str().expect("text"));
        let arguments = [&[consumer], &arguments[..]].concat();
        let told = python::script(&python, "export_consumers.py", &arguments);
        assert_eq!(told.trim(), consumer);
    }
}
