//! Upstreams that speak Messages themselves.

use serde_json::json;

use super::super::Assembler;
use super::{events, fixture};

/// Feeds a stream; gives for each event its name and whether it must be held.
fn feed(stream: &[u8]) -> (Assembler, Vec<(String, bool)>) {
    let mut assembler = Assembler::default();
    let mut held = Vec::new();
    for (name, data) in events(stream) {
        let done = assembler.event(&name, &data).expect("an event");
        held.push((name, done.must_hold));
    }
    (assembler, held)
}

#[test]
fn the_vendors_stream_is_read_and_its_end_is_held() {
    let (assembler, held) = feed(&fixture("wire/anthropic_stream.sse"));
    let reply = assembler.reply();
    let choice = &reply.choices[&0];
    assert_eq!((choice.reasoning.as_str(), choice.text.as_str()), ("\nOkay.\n", "Hello! 🎉"));
    assert_eq!(choice.finish_reason.as_deref(), Some("end_turn"));
    assert_eq!(reply.id.as_deref(), Some("msg_01ToyAAAA"));
    assert_eq!(reply.model.as_deref(), Some("toy-moe-8x"));
    let usage = reply.usage.expect("usage");
    assert_eq!((usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens), (12, Some(4), 13));
    let held: Vec<_> = held.into_iter().filter(|(_, must_hold)| *must_hold).collect();
    assert_eq!(held, [("message_delta".to_owned(), true)]);
}

#[test]
fn a_tools_end_is_held_and_its_arguments_are_exact() {
    let (assembler, held) = feed(&fixture("wire/anthropic_tools_stream.sse"));
    let held: Vec<_> =
        held.iter().filter(|(_, must_hold)| *must_hold).map(|(name, _)| name.as_str()).collect();
    assert_eq!(held, ["content_block_stop", "content_block_stop", "message_delta"]);
    let choice = &assembler.reply().choices[&0];
    let calls: Vec<_> = choice
        .tool_calls
        .iter()
        .map(|call| (call.id.as_str(), call.name.as_str(), call.arguments.as_str()))
        .collect();
    assert_eq!(
        calls,
        [
            ("toolu_01ToyShell", "shell", "{\"command\": \"ls -la\"}"),
            ("toolu_01ToyRead", "read_file", "{\"path\": \"README.md\"}")
        ]
    );
    assert_eq!(choice.finish_reason.as_deref(), Some("tool_use"));
}

#[test]
fn a07_an_error_in_the_stream_is_seen_and_no_usage_is_made_up() {
    let mut assembler = Assembler::default();
    let mut last = None;
    for (name, data) in events(&fixture("wire/anthropic_stream_error.sse")) {
        last = Some(assembler.event(&name, &data).expect("an event"));
    }
    let last = last.expect("events");
    assert!(last.fed.has_error && last.is_end && !last.fed.has_finish && !last.must_hold);
    let reply = assembler.into_reply();
    assert_eq!(reply.error.as_deref(), Some("overloaded_error: Overloaded"));
    assert_eq!(reply.choices[&0].text, "Hel");
    assert_eq!((reply.usage, reply.choices[&0].finish_reason.as_deref()), (None, None));
}

#[test]
fn recorded_streams_and_bodies_of_one_answer_read_the_same() {
    let (streamed, _) = feed(&fixture("harness/claude-code/turn2.response.sse"));
    let mut whole = Assembler::default();
    whole.body(&fixture("harness/claude-code/status_404_fallback/turn2.response.json")).expect("body");
    let (first, _) = feed(&fixture("harness/claude-code/turn1.response.sse"));
    let (a, b) = (&first.reply().choices[&0], &whole.reply().choices[&0]);
    assert_eq!((&a.text, &a.reasoning, &a.finish_reason), (&b.text, &b.reasoning, &b.finish_reason));
    assert_eq!(a.tool_calls[0].name, b.tool_calls[0].name);
    // Bytes, not values: the body of the recording is pretty-printed.
    assert_eq!(a.tool_calls[0].arguments, r#"{"command":  "echo 'hello  l\u00e9go' > hello.txt && ls"}"#);
    assert_eq!(
        super::json_object(&a.tool_calls[0].arguments),
        super::json_object(&b.tool_calls[0].arguments)
    );
    assert_eq!(streamed.reply().choices[&0].finish_reason.as_deref(), Some("tool_use"));
}

#[test]
fn extra_fields_in_every_event_do_no_harm() {
    let (assembler, held) =
        feed(&fixture("harness/claude-code/parallel_tools_extra_fields/turn1.response.sse"));
    assert_eq!(assembler.reply().choices[&0].tool_calls.len(), 2);
    assert_eq!(held.iter().filter(|(_, must_hold)| *must_hold).count(), 3);
}

#[test]
fn an_input_that_comes_at_once_is_kept_and_an_error_body_is_an_error() {
    let mut assembler = Assembler::default();
    let start = br#"{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"x","name":"f","input":{"a": 1}}}"#;
    assembler.event("content_block_start", start).expect("event");
    let done = assembler.event("content_block_stop", br#"{"index":0}"#).expect("event");
    assert!(done.must_hold);
    assert_eq!(assembler.reply().choices[&0].tool_calls[0].arguments, "{\"a\": 1}");

    let mut assembler = Assembler::default();
    let body = json!({"type": "error", "error": {"type": "api_error", "message": "no"}, "request_id": null});
    let done = assembler.body(body.to_string().as_bytes()).expect("body");
    assert!(done.fed.has_error && !done.fed.has_finish);
    assert_eq!(assembler.into_reply().error.as_deref(), Some("api_error: no"));
}

#[test]
fn a04_a_stream_that_was_cut_never_says_its_end() {
    let stream = fixture("wire/anthropic_tools_stream.sse");
    let all = events(&stream);
    for kept in 0..all.len() {
        let mut assembler = Assembler::default();
        let mut is_ended = false;
        for (name, data) in &all[..kept] {
            is_ended |= assembler.event(name, data).expect("an event").is_end;
        }
        assert!(!is_ended);
        let has_finish = assembler.reply().choices.values().any(|choice| choice.finish_reason.is_some());
        assert_eq!(has_finish, kept == all.len() - 1);
    }
}

#[test]
fn b14_cached_tokens_are_part_of_the_prompt_again() {
    let body = json!({"type": "message", "content": [], "stop_reason": "end_turn", "usage":
        {"input_tokens": 7, "cache_read_input_tokens": 9_990, "cache_creation_input_tokens": 3, "output_tokens": 2}});
    let mut assembler = Assembler::default();
    assembler.body(body.to_string().as_bytes()).expect("body");
    let usage = assembler.into_reply().usage.expect("usage");
    assert_eq!((usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens), (10_000, Some(9_990), 2));
}

#[test]
fn c07_numbers_that_are_not_json_do_not_stop_the_reading() {
    let mut assembler = Assembler::default();
    let event = br#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"},"logprob":-Infinity}"#;
    assembler.event("content_block_delta", event).expect("an event");
    assert_eq!(assembler.reply().choices[&0].text, "a");
    assert!(assembler.event("content_block_delta", b"{\"type\":").is_err());
    assert_eq!(assembler.reply().choices[&0].text, "a");
}
