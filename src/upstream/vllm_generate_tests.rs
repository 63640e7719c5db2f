use super::*;
use crate::record::{LayerAxis, LogprobSemantics, Routing, RoutingDtype, RoutingShape};
use crate::upstream::dialect::Wanted;

const PINNED: SamplingPlan = SamplingPlan::Pinned { temperature: 1.0, seed: 7 };

fn request(more: Value) -> Request {
    let mut body = json!({"model": "asked", "prompt": [5, 6], "stream": true, "max_tokens": null});
    body.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
    Request::parse(body.to_string().into()).expect("a request")
}

fn sent(plan: SamplingPlan, more: Value) -> (Value, Prepared) {
    let asking = Asking { wanted: Wanted { token_ids: true, logprobs: true }, routing: true, plan };
    let prepared = of_completions(asking, &request(more), "served", None);
    (serde_json::from_slice(&prepared.body).expect("JSON"), prepared)
}

#[test]
fn law_12_all_of_the_sampling_is_told_and_nothing_else_of_the_clients() {
    let asked = json!({"temperature": 0.3, "top_k": 5, "max_tokens": 9, "stop_token_ids": [3], "logit_bias": {"1": 2},
        "ignore_eos": true, "user": "u", "cache_salt": "v1", "priority": 2, "request_id": "r"});
    let (body, prepared) = sent(PINNED, asked);
    let expected = json!({
        "model": "served", "token_ids": [5, 6], "stream": true, "stream_options": {"include_usage": true},
        "return_token_ids": true, "cache_salt": "v1", "priority": 2, "request_id": "r",
        "sampling_params": {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "repetition_penalty": 1.0, "seed": 7, "stop_token_ids": [3],
            "max_tokens": 9, "logprobs": 0,
        },
    });
    assert_eq!(body, expected);
    assert_eq!(prepared.sampling_requested.temperature, Some(0.3));
    assert_eq!((prepared.sampling_sent.temperature, prepared.sampling_sent.max_tokens), (Some(1.0), Some(9)));
    assert_eq!(prepared.logprob_semantics, LogprobSemantics::RawT1);
    assert!(prepared.upstream_is_stream && prepared.sent_prompts == [Prompt::TokenIds(vec![5, 6])]);
}

#[test]
fn all_that_there_is_room_for_is_said_and_not_left_out() {
    let (body, _) = sent(PINNED, json!({}));
    assert_eq!(body["sampling_params"].get("max_tokens"), Some(&Value::Null));
}

#[test]
fn rows_that_are_held_are_not_asked_for() {
    let wanted = Wanted { token_ids: true, logprobs: true };
    let asking = Asking { wanted, routing: true, plan: PINNED };
    let prepared = of_completions(asking, &request(json!({})), "served", Some(1));
    let body: Value = serde_json::from_slice(&prepared.body).expect("JSON");
    assert_eq!((&body["sampling_params"][START], prepared.routing_start), (&json!(1), Some(1)));
}

#[test]
fn what_the_endpoint_would_fill_in_or_cannot_do_is_not_asked_of_it() {
    let in_full = json!({"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "repetition_penalty": 1.0});
    let with = |name: &str, value: Value| {
        let mut all = in_full.clone();
        all[name] = value;
        all
    };
    let is = |plan, more: &Value| is_expressible(plan, &request(more.clone()));
    let own = SamplingPlan::PassThrough;
    assert!(is(own, &in_full) && is(PINNED, &json!({})));
    let (body, _) = sent(own, in_full.clone());
    assert_eq!(
        (&body["sampling_params"]["temperature"], &body["sampling_params"]["top_k"]),
        (&json!(0.7), &json!(20))
    );
    // The model's generation_config would say the rest to completions, and not to this one.
    for name in in_full.as_object().expect("object").keys() {
        assert!(!is(own, &with(name, Value::Null)), "{name}");
    }
    for (name, value) in [
        ("logit_bias", json!({"3": 1})),
        ("ignore_eos", json!(true)),
        ("min_tokens", json!(4)),
        ("thinking_token_budget", json!(9)),
    ] {
        // Pinned, they are left out anyway.
        assert!(!is(own, &with(name, value.clone())) && is(PINNED, &with(name, value)), "{name}");
    }
    for (name, value) in [
        ("stop", json!(["x"])),
        ("stop", json!("x")),
        ("n", json!(2)),
        ("prompt", json!("text")),
        ("prompt", json!([[1], [2]])),
        ("guided_json", json!({"type": "object"})),
    ] {
        assert!(!is(PINNED, &with(name, value.clone())), "{name} {value}");
    }
    assert!(is(PINNED, &json!({"stop": [], "n": 1, "ignore_eos": false})));
}

/// A stream whose last event has routing of so many rows.
fn stream(rows: Option<u32>) -> String {
    let shape = RoutingShape {
        start: 0,
        rows: rows.unwrap_or(0),
        layers: 2,
        layer_axis: LayerAxis::Unknown,
        top_k: 2,
        dtype: RoutingDtype::U8,
    };
    let ids: Vec<u32> = (0..4 * shape.rows).collect();
    let routing = Routing::pack(shape, &ids).expect("four ids a row");
    let text = rows.map(|_| routing::encode(UpstreamKind::Vllm, &routing));
    let last = json!({"request_id": "r", "choices": [
        {"index": 0, "token_ids": [9], "finish_reason": "length", "logprobs": null, "routed_experts": text}]});
    let usage =
        json!({"request_id": "r", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}});
    format!("data: {last}\n\ndata: {usage}\n\ndata: [DONE]\n\n")
}

#[test]
fn a_stream_with_rows_for_all_tokens_but_the_last_is_the_proof() {
    let seen = |status, body: &str| TokenStreams::from_reply(status, body.as_bytes());
    let (has, lacks) = (Some(TokenStreams { routing: true, start: false }), Some(TokenStreams::MISSING));
    assert_eq!(seen(200, &stream(Some(3))), has);
    // One that it was asked to leave out.
    assert_eq!(seen(200, &stream(Some(2))), Some(TokenStreams { routing: true, start: true }));
    for rows in [None, Some(1), Some(4)] {
        assert_eq!(seen(200, &stream(rows)), lacks, "{rows:?}");
    }
    // It is not there, or forbidden without `--enable-scale-out`; a gateway that answers everything.
    for status in [401, 403, 404, 405, 501] {
        assert_eq!(seen(status, ""), lacks, "{status}");
    }
    assert_eq!(seen(200, "{}"), lacks);
    for (status, body) in [
        (503, ""),
        (400, "{}"),
        (200, "data: {\"error\":{\"message\":\"m\"}}\n\ndata: [DONE]\n\n"),
        (200, "data: x\n\n"),
        // It was given up.
        (200, "data: {\"choices\":[{\"index\":0,\"token_ids\":[9]}]}\n\ndata: [DONE]\n\n"),
        (200, "data: {\"choices\":[{\"index\":0,\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n"),
    ] {
        assert_eq!(seen(status, body), None, "{status} {body}");
    }
}

#[test]
fn the_probe_is_one_streamed_token() {
    let body: Value = serde_json::from_slice(&probe_body("m\"", 0).expect("a body")).expect("JSON");
    assert_eq!((&body["model"], &body["stream"]), (&json!("m\""), &json!(true)));
    assert_eq!(body["sampling_params"]["max_tokens"], 1);
    assert_eq!(body["sampling_params"][START], 1);
    let second: Value = serde_json::from_slice(&probe_body("m", 1).expect("a body")).expect("JSON");
    assert_eq!(second["sampling_params"].get(START), None);
    assert_eq!(probe_body("m", 2), None);
}
