use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::protocol::sse;

/// Feeds both readers, which have to say the same.
fn feed(stream: &mut Stream, reply: &mut Reply, event: &[u8]) {
    let (one, other) = (stream.feed(event), reply.feed(event));
    let text = String::from_utf8_lossy(event);
    assert_eq!(one.map_err(|error| error.to_string()), other.map_err(|error| error.to_string()), "{text}");
    assert_eq!(stream.reply(), reply, "{text}");
}

fn data(stream: &[u8]) -> Vec<Vec<u8>> {
    let mut parser = sse::Parser::new();
    parser.push(stream);
    let mut events = vec![];
    while let Some(event) = parser.next_event() {
        events.push(event.data().to_vec());
    }
    events
}

fn fixtures() -> Vec<(String, Vec<Vec<u8>>)> {
    let folder = format!("{}/tests/fixtures/wire", env!("CARGO_MANIFEST_DIR"));
    let files = std::fs::read_dir(folder).expect("fixtures").map(|file| file.expect("readable").path());
    let streams = files.filter(|path| path.extension().is_some_and(|extension| extension == "sse"));
    let name = |path: &std::path::Path| path.file_name().expect("a name").to_string_lossy().into_owned();
    let mut found: Vec<_> =
        streams.map(|path| (name(&path), data(&std::fs::read(&path).expect("readable")))).collect();
    found.sort();
    found
}

#[test]
fn streams_of_every_engine_read_the_same() {
    let mut used = 0;
    for (name, events) in fixtures() {
        let (mut stream, mut reply) = Default::default();
        events.iter().for_each(|event| feed(&mut stream, &mut reply, event));
        println!("{name}: {} of {} events", stream.used, events.len());
        used += stream.used;
    }
    assert!(used > 10, "{used}");
}

/// An event of vLLM's chat.
fn chunk(content: &str, more: &[(f32, u32)]) -> Value {
    let entries: Vec<Value> = more
        .iter()
        .map(|(logprob, _)| {
            let top = json!([{"token": content, "logprob": logprob, "bytes": [1, 2]}]);
            json!({"token": content, "logprob": logprob, "bytes": content.as_bytes(), "top_logprobs": top})
        })
        .collect();
    let ids: Vec<u32> = more.iter().map(|(_, id)| *id).collect();
    json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m",
        "choices": [{
            "index": 0, "delta": {"content": content, "tool_calls": []}, "logprobs": {"content": entries},
            "finish_reason": null, "stop_reason": null, "token_ids": ids,
        }],
        "usage": null,
    })
}

#[test]
fn tokens_texts_and_choices_that_change_are_all_that_is_read() {
    let (mut stream, mut reply) = Default::default();
    let texts = ["a", "", " \"q\\\" ", "\n\t\u{8}\u{c}\r/", "é🎉", "\\\\n", "end\\"];
    let mut events: Vec<Value> = vec![];
    for (at, text) in texts.iter().enumerate() {
        let one = (-0.5 - at as f32, at as u32);
        events.push(chunk(text, &[one]));
        events.push(chunk(text, &[one, (-1e-12, u32::MAX)]));
        let mut other = chunk(text, &[one]);
        other["choices"][0]["index"] = json!(at % 3);
        events.push(other);
    }
    events.iter().for_each(|event| feed(&mut stream, &mut reply, event.to_string().as_bytes()));
    assert_eq!((stream.made, stream.used as usize), (1, events.len() - 1));
    assert_eq!(reply.choices.len(), 3);
    assert_eq!(reply.choices[&0].text.matches("end\\").count(), 3);
}

#[test]
fn completions_and_reasoning_are_read_like_that_too() {
    for name in ["reasoning", "reasoning_content"] {
        let (mut stream, mut reply) = Default::default();
        for text in ["let", " me", " see"] {
            let event = json!({"choices": [{"delta": {"content": null, name: text}, "token_ids": [3]}]});
            feed(&mut stream, &mut reply, event.to_string().as_bytes());
        }
        assert_eq!((stream.used, stream.reply().choices[&0].reasoning.as_str()), (2, "let me see"));
    }
    let (mut stream, mut reply) = Default::default();
    for (text, logprob) in [("a", json!(-0.5)), ("b", json!(null)), ("c", json!(-9999.0))] {
        let logprobs = json!({"text_offset": [4], "token_logprobs": [logprob], "tokens": [text],
            "top_logprobs": [{text: logprob}]});
        let event = json!({"choices": [{"index": 0, "text": text, "logprobs": logprobs}]});
        feed(&mut stream, &mut reply, event.to_string().as_bytes());
    }
    assert_eq!((stream.used, &reply.choices[&0].logprobs), (2, &Some(vec![Some(-0.5), None, None])));
}

#[test]
fn arguments_of_tool_calls_are_read_like_that_too() {
    let (mut stream, mut reply) = Default::default();
    let event = |call: Value| json!({"choices": [{"delta": {"tool_calls": [call]}}]}).to_string();
    for index in [json!(0), json!(1), json!(null)] {
        let head = json!({"index": index, "id": format!("call_{index}"), "function": {"name": "f", "arguments": ""}});
        feed(&mut stream, &mut reply, event(head).as_bytes());
        for part in ["{\"a\": ", "\"\\n", "\"}"] {
            let tail = json!({"index": index, "function": {"arguments": part}});
            feed(&mut stream, &mut reply, event(tail).as_bytes());
        }
    }
    assert_eq!(stream.used, 7);
    let calls = &reply.choices[&0].tool_calls;
    assert!(calls.len() == 3 && calls.iter().all(|call| call.arguments == "{\"a\": \"\\n\"}"), "{calls:?}");
    for odd in [
        json!({"index": 0, "id": "call_0", "function": {"arguments": "x"}}),
        json!({"index": 0, "function": {"name": "g", "arguments": "x"}}),
        json!({"index": -1, "function": {"arguments": "x"}}),
        json!({"index": 0, "function": {"arguments": null}}),
        json!({"index": 0}),
    ] {
        feed(&mut stream, &mut reply, event(odd).as_bytes());
    }
    assert_eq!(stream.used, 7);
}

#[test]
fn what_says_more_is_not_compared() {
    let plain = chunk("a", &[(-0.5, 1)]);
    let set = |pointer: &str, value: Value| {
        let mut event = plain.clone();
        let (parent, name) = pointer.rsplit_once('/').expect("a path");
        event.pointer_mut(parent).expect("there")[name] = value;
        event.to_string()
    };
    let choice = |name: &str, value: Value| set(&format!("/choices/0/{name}"), value);
    let usage = json!({"prompt_tokens": 1, "completion_tokens": 2});
    let events = [
        choice("finish_reason", json!("stop")),
        choice("routed_experts", json!("AAAA")),
        choice("weight_versions", json!([{"version": "7", "start": 0, "end": 1}])),
        choice("meta_info", json!({"weight_version": "8"})),
        choice("prompt_token_ids", json!([1, 2])),
        choice("token_ids", json!([1.0])),
        choice("token_ids", json!([4_294_967_296_u64])),
        choice("response_token_ids", json!([1])),
        choice("stop_reason", json!("x")),
        choice("text", json!("and text")),
        choice("index", json!(65_536)),
        plain.to_string().replace("\"index\":0", &format!("\"index\":{}", "9".repeat(40))),
        choice("index", json!(-1)),
        set("/choices/0/delta/tool_calls", json!([{"index": 0, "function": {"arguments": "{"}}])),
        set("/choices/0/delta/refusal", json!("no")),
        set("/choices/0/logprobs/token_logprobs", json!([-7.0])),
        set("/choices/0/logprobs/content/0/token", json!("token_id:5")),
        set("/usage", usage),
        set("/error", json!("broken")),
        plain.to_string().replace("-0.5", "NaN"),
        plain.to_string().replace("-0.5", "-00.5"),
        plain.to_string().replace("\"a\"", "\"\\ud800\""),
        plain.to_string().replace("\"a\"", "\"\\u0061\""),
        plain.to_string().replace("\"a\"", "\"\u{1}\""),
        plain.to_string().replace("[97]", "[97,]"),
        plain.to_string().replace("[97]", "{\"a\" 1}"),
        format!("{plain}x"),
        plain.to_string()[..40].to_owned(),
    ];
    for event in &events {
        let (mut stream, mut reply) = Default::default();
        for _ in 0..2 {
            feed(&mut stream, &mut reply, plain.to_string().as_bytes());
        }
        assert_eq!(stream.used, 1);
        feed(&mut stream, &mut reply, event.as_bytes());
        assert_eq!(stream.used, 1, "{event}");
        // Nor is it what others are compared with.
        feed(&mut stream, &mut reply, plain.to_string().as_bytes());
        feed(&mut stream, &mut reply, event.as_bytes());
    }
}

#[test]
fn a_stream_whose_events_are_all_different_is_not_compared_for_ever() {
    let mut stream = Stream::default();
    for at in 0..100 {
        let event = json!({"id": at, "choices": [{"delta": {"content": "a"}, "seed": at}]});
        stream.feed(event.to_string().replace(&format!("\"id\":{at},"), "").as_bytes()).expect("readable");
    }
    assert_eq!((stream.made, stream.used), (TRIES, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn whatever_is_changed_in_an_event_both_readers_say_the_same(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0..3_usize, ".{0,3}|[\\[\\]{},:\"0-9eE.+\\\\ntu -]{0,3}"), 1..6),
    ) {
        let streams = fixtures();
        let (_, events) = &streams[which.index(streams.len())];
        let (mut stream, mut reply) = Default::default();
        for (event, (at, gone, with)) in events.iter().zip(changes.iter().cycle()) {
            feed(&mut stream, &mut reply, event);
            let at = at.index(event.len() + 1);
            let end = (at + gone).min(event.len());
            let changed = [&event[..at], with.as_bytes(), &event[end..]].concat();
            let (mut one, mut other) = (stream.clone(), reply.clone());
            feed(&mut one, &mut other, &changed);
            feed(&mut one, &mut other, event);
        }
    }
}
