use super::*;
use crate::protocol::chat::{Cut, Reply, Unasked, cut};
use crate::protocol::sse;
use proptest::prelude::*;
use serde_json::{Value, json};

fn read(parts: &[Bytes]) -> Reply {
    let mut reply = Reply::default();
    for part in parts {
        reply.feed(part).expect("readable");
    }
    reply
}

fn same(body: &[u8]) -> Vec<Value> {
    let events = events(body, true).expect("a chat reply");
    assert_eq!(read(&events), read(&[Bytes::copy_from_slice(body)]), "{}", String::from_utf8_lossy(body));
    // What goes over the wire is the same again.
    let mut parser = sse::Parser::new();
    parser.push(&to_stream(&events));
    let mut parsed = Vec::new();
    while let Some(event) = parser.next_event() {
        parsed.push(event.data());
    }
    assert_eq!(parsed.pop().expect("an end"), "[DONE]");
    assert_eq!(parsed, events);
    events.iter().map(|event| serde_json::from_slice(event).unwrap_or_default()).collect()
}

fn fixture(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/fixtures/wire/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(path).expect("fixture")
}

fn deltas_of(events: &[Value]) -> Vec<&Value> {
    events.iter().filter_map(|event| event["choices"].get(0)).map(|choice| &choice["delta"]).collect()
}

#[test]
fn engines_bodies_become_their_streams() {
    // What lego leaves of a routed body: the client's stream has no place for routing.
    let routed = fixture("vllm_chat_routed.json");
    let all = Cut { routed_experts: Some(Unasked::Null), ..Cut::default() };
    let edits = cut(&routed, &all).expect("body").edits;
    for body in [fixture("vllm_chat.json"), json::apply(&routed, &edits)] {
        let events = same(&body);
        let expected = [
            json!({"role": "assistant", "content": ""}),
            json!({"reasoning": "\nOkay.\n"}),
            json!({"content": "\n\nHello! 🎉"}),
            json!({}),
        ];
        assert_eq!(deltas_of(&events), expected.iter().collect::<Vec<_>>());
        let head = |event: &Value| ["id", "object", "created", "model"].map(|name| event[name].clone());
        assert!(events.iter().all(|event| head(event) == head(&events[0])));
        assert_eq!(events[0]["object"], "chat.completion.chunk");
        assert_eq!(events[0]["prompt_token_ids"].as_array().expect("ids").len(), 12);
        assert_eq!(events[1]["choices"][0]["token_ids"].as_array().expect("ids").len(), 13);
        assert_eq!(events[1]["choices"][0]["logprobs"]["content"].as_array().expect("list").len(), 13);
        let finish: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["finish_reason"]).collect();
        assert_eq!(finish, [&Value::Null, &Value::Null, &Value::Null, &json!("stop"), &Value::Null]);
        assert_eq!(events[4]["choices"], json!([]));
        assert_eq!(events[4]["usage"]["completion_tokens"], 13);
    }
}

#[test]
fn a_client_that_asked_for_nothing_gets_nothing_but_the_answer() {
    let body = fixture("sglang_chat.json");
    let all = Cut {
        token_ids: Some(Unasked::Absent),
        prompt_token_ids: Some(Unasked::Absent),
        logprobs: Some(Unasked::Null),
        sglext: true,
        ..Cut::default()
    };
    let left = json::apply(&body, &cut(&body, &all).expect("body").edits);
    let events = events(&left, false).expect("a chat reply");
    let text = String::from_utf8(to_stream(&events).to_vec()).expect("text");
    for name in ["token_ids", "sglext", "usage", "metadata", "logprob\"", "meta_info"] {
        assert!(!text.contains(name), "{name}: {text}");
    }
    let expected = concat!(
        r#"data: {"id":"6c1f0b7e9a5d4e2f","object":"chat.completion.chunk","created":1796000000,"model":"toy-moe-8x","#,
        r#""choices":[{"index":0,"delta":{"content":"Hello! 🎉"},"logprobs":null,"finish_reason":null}]}"#
    );
    assert_eq!(text.lines().nth(2), Some(expected));
}

#[test]
fn ids_under_sglangs_names_come_in_vllms_places() {
    let events = events(&fixture("sglang_chat.json"), false).expect("a chat reply");
    let first: Value = serde_json::from_slice(&events[0]).expect("JSON");
    let second: Value = serde_json::from_slice(&events[1]).expect("JSON");
    assert_eq!(first["prompt_token_ids"].as_array().expect("ids").len(), 12);
    assert_eq!(second["choices"][0]["token_ids"], json!([9707, 0, 220, 144_848, 144_849, 151_645]));
}

#[test]
fn tool_arguments_keep_their_bytes() {
    let body = br#"{"id":"x","choices":[{"index":0,"finish_reason":"tool_calls","message":{"content":null,"tool_calls":[
        {"id":"a","type":"function","function":{"name":"f","arguments":"{\"b\": 1.0,\n \"a\":\"\u00e9\"}"}},
        {"index":7,"id":"b","type":"function","function":{"name":"f","arguments":""}}]}}]}"#;
    let events = same(body);
    let calls: Vec<&Value> =
        deltas_of(&events).into_iter().filter_map(|delta| delta["tool_calls"].get(0)).collect();
    assert_eq!(calls.iter().map(|call| &call["index"]).collect::<Vec<_>>(), [&json!(0), &json!(1)]);
    assert_eq!(calls[0]["function"]["arguments"], "{\"b\": 1.0,\n \"a\":\"é\"}");
    let raw = super::events(body, false).expect("a chat reply");
    let raw = String::from_utf8(to_stream(&raw).to_vec()).expect("text");
    assert!(raw.contains(r#""arguments":"{\"b\": 1.0,\n \"a\":\"\u00e9\"}""#), "{raw}");
}

#[test]
fn c07_numbers_that_are_not_json_pass_as_they_came() {
    let body = br#"{"choices":[{"index":0,"finish_reason":"length","message":{"content":"x"},
        "logprobs":{"content":[{"token":"x","logprob":-Infinity},{"token":"","logprob":-1e-3}]}}]}"#;
    let parts = events(body, false).expect("a chat reply");
    assert_eq!(read(&parts), read(&[Bytes::from_static(body)]));
    assert!(String::from_utf8_lossy(&to_stream(&parts)).contains("-Infinity"));
}

#[test]
fn what_is_no_chat_reply_is_refused() {
    let reason = |body: &str| events(body.as_bytes(), true).expect_err(body).to_string();
    assert!(reason("[]").contains("could not be read"));
    assert!(reason("{}").contains("no choices"));
    assert!(reason(r#"{"choices":[]}"#).contains("no choices"));
    assert!(reason(r#"{"choices":null}"#).contains("no choices"));
    assert!(reason(r#"{"choices":[{"index":0}]}"#).contains("no message"));
    assert!(reason(r#"{"choices":[1]}"#).contains("could not be read"));
}

fn text() -> impl Strategy<Value = String> {
    "[ -~é\u{1F389}\\\\\"\n\r\u{85}\u{2028}]{0,12}"
}

fn optional<T: std::fmt::Debug>(strategy: impl Strategy<Value = T>) -> impl Strategy<Value = Option<T>> {
    prop::option::of(strategy)
}

prop_compose! {
    fn choice()(
        content in optional(text()),
        reasoning in optional(text()),
        reasoning_content in optional(text()),
        calls in prop::collection::vec((text(), text()), 0..3),
        ids in optional(prop::collection::vec(any::<u32>(), 0..4)),
        logprobs in optional(prop::collection::vec(optional(-20.0..0.0_f64), 0..4)),
        finish in optional("stop|length|tool_calls|"),
        stop in optional(any::<u32>()),
        versions in optional(text()),
    ) -> Value {
        let mut message = json!({"role": "assistant", "content": content});
        for (name, value) in [("reasoning", reasoning), ("reasoning_content", reasoning_content)] {
            if let Some(value) = value {
                message[name] = value.into();
            }
        }
        if !calls.is_empty() {
            let call = |(index, (name, arguments)): (usize, &(String, String))| json!({
                "id": format!("call-{index}"), "type": "function",
                "function": {"name": name, "arguments": arguments},
            });
            message["tool_calls"] = calls.iter().enumerate().map(call).collect();
        }
        let entry = |value: &Option<f64>| json!({"token": "t", "logprob": value, "top_logprobs": []});
        let logprobs = logprobs.map(|list| json!({"content": list.iter().map(entry).collect::<Vec<_>>()}));
        let mut choice = json!({"message": message, "logprobs": logprobs, "finish_reason": finish});
        if let Some(ids) = ids {
            choice["token_ids"] = ids.into();
        }
        // A body that does not say how it ended says nothing else about its end.
        if finish.is_some_and(|finish| !finish.is_empty()) {
            choice["stop_reason"] = json!(stop);
            if let Some(version) = versions {
                choice["weight_versions"] = json!([{"version": version, "start": 0, "end": 1}]);
            }
        }
        choice
    }
}

proptest! {
    #[test]
    fn events_and_body_are_read_as_the_same_reply(
        choices in prop::collection::vec(choice(), 1..4),
        head in (optional(text()), optional(any::<u64>()), optional(text())),
        prompt in optional(prop::collection::vec(any::<u32>(), 0..4)),
        usage in optional((any::<u32>(), any::<u32>())),
        is_pretty in any::<bool>(),
    ) {
        let mut choices = choices;
        for (index, choice) in choices.iter_mut().enumerate() {
            choice["index"] = json!(index);
        }
        let usage = usage.map(|(prompt, completion)| json!({"prompt_tokens": prompt, "completion_tokens": completion}));
        let body = json!({
            "id": head.0, "object": "chat.completion", "created": head.1, "model": head.2,
            "choices": choices, "usage": usage, "prompt_token_ids": prompt, "kv_transfer_params": null,
        });
        let body = if is_pretty { serde_json::to_vec_pretty(&body) } else { serde_json::to_vec(&body) };
        same(&body.expect("JSON"));
    }

    #[test]
    fn arbitrary_bytes_never_panic(body in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = events(&body, true);
    }

    #[test]
    fn arbitrary_json_never_panics(
        body in r#"\{"choices":\[\{"message":\{("content":(1|"a"|null|\[\])|"tool_calls":\[(1|\{\}|\{"index":2\})\])?\}(,"logprobs":(1|\[\]))?\}\]\}"#
    ) {
        let _ = events(body.as_bytes(), true);
    }
}
