//! Chat replies as Messages.

use serde_json::{Value, json};

use super::super::{error_body, error_status};
use super::{assemble, assert_same, chat_reply, checked, chunks, events, fixture, joined, names, write};
use crate::protocol::chat::Reply;
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::messages::{Assembler, Writer};
use crate::protocol::translate::{Piece, ReplyWriter};

fn chunk(choice: Value) -> Vec<u8> {
    json!({"id": "c", "model": "m", "choices": [choice]}).to_string().into_bytes()
}

fn delta(delta: Value) -> Vec<u8> {
    chunk(json!({"index": 0, "delta": delta, "finish_reason": null}))
}

fn finish(reason: &str) -> Vec<u8> {
    chunk(json!({"index": 0, "delta": {}, "finish_reason": reason}))
}

fn tool(index: u64, id: &str, name: &str, arguments: &str) -> Value {
    json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]})
}

fn more(index: u64, arguments: &str) -> Value {
    json!({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
}

/// Types of the events, blocks with their kinds.
fn outline(events: &[Value]) -> Vec<String> {
    let name = |event: &Value| {
        let kind = event["type"].as_str().expect("type");
        match kind {
            "content_block_start" => format!("+{}", event["content_block"]["type"].as_str().expect("kind")),
            "content_block_delta" => {
                let delta = event["delta"].as_object().expect("delta");
                delta.values().nth(1).and_then(Value::as_str).expect("text").to_owned()
            }
            "content_block_stop" => format!("-{}", event["index"]),
            "message_delta" => event["delta"]["stop_reason"].as_str().expect("reason").to_owned(),
            other => other.to_owned(),
        }
    };
    events.iter().map(name).collect()
}

#[test]
fn engine_streams_assemble_to_what_the_chat_stream_says() {
    for name in [
        "wire/vllm_chat_stream.sse",
        "wire/vllm_chat_tools_stream.sse",
        "wire/openai_chat_stream_nologprobs.sse",
        "wire/sglang_chat_stream_sglext.sse",
    ] {
        let chunks = chunks(&fixture(name));
        let chat = chat_reply(&chunks);
        let steps = write(&chunks);
        checked(&steps);
        let back = assemble(&joined(&steps));
        assert_same(&back.choices[&0], &chat.choices[&0], true);
        let (ours, theirs) = (back.usage.expect("usage"), chat.usage.expect("usage"));
        assert_eq!(ours.prompt_tokens, theirs.prompt_tokens, "{name}");
        assert_eq!(ours.completion_tokens, theirs.completion_tokens);
        let expected = if chat.choices[&0].tool_calls.is_empty() { "end_turn" } else { "tool_use" };
        assert_eq!(back.choices[&0].finish_reason.as_deref(), Some(expected));
        assert_eq!(back.model.as_deref(), Some("claude-asked"));
        assert_eq!(back.id.as_deref(), Some("msg_01990000-aaaa-7bbb-8ccc-000000000001"));
    }
}

#[test]
fn b06_no_first_fragment_is_lost_and_no_block_is_empty() {
    let steps = write(&[
        delta(json!({"role": "assistant", "content": ""})),
        delta(json!({"reasoning": "a"})),
        delta(json!({"content": "b"})),
        delta(tool(0, "x", "f", "{\"k\":")),
        chunk(json!({"index": 0, "delta": more(0, "1}"), "finish_reason": "tool_calls"})),
    ]);
    let signature = "bGVnbzp2MTowMTk5MDAwMC1hYWFhLTdiYmItOGNjYy0wMDAwMDAwMDAwMDE=";
    assert_eq!(
        outline(&checked(&steps)),
        [
            "message_start",
            "+thinking",
            "a",
            signature,
            "-0",
            "+text",
            "b",
            "-1",
            "+tool_use",
            "{\"k\":",
            "1}",
            "-2",
            "tool_use",
            "message_stop"
        ]
    );
    let steps = write(&[delta(tool(0, "x", "f", "{}")), finish("tool_calls")]);
    assert_eq!(
        outline(&checked(&steps)),
        ["message_start", "+tool_use", "{}", "-0", "tool_use", "message_stop"]
    );
}

#[test]
fn text_inside_calls_waits_and_interleaved_calls_are_put_in_a_row() {
    let steps = write(&[
        delta(tool(0, "x", "f", "{\"a\":")),
        delta(json!({"content": "hm"})),
        delta(tool(1, "functions.g:1", "g", "{\"b\":")),
        delta(more(0, "1}")),
        delta(more(1, "2}")),
        delta(json!({"content": "after"})),
        finish("tool_calls"),
    ]);
    let seen = checked(&steps);
    assert_eq!(
        outline(&seen),
        [
            "message_start",
            "+tool_use",
            "{\"a\":",
            "1}",
            "-0",
            "+text",
            "hm",
            "-1",
            "+tool_use",
            "{\"b\":",
            "2}",
            "-2",
            "+text",
            "after",
            "-3",
            "tool_use",
            "message_stop"
        ]
    );
    assert_eq!(seen[8]["content_block"]["id"], "lg-functions-2eg-3a1");
}

#[test]
fn a21_a_whole_call_is_closed_when_the_next_one_begins() {
    let steps =
        write(&[delta(tool(0, "x", "f", "{\"a\":1}")), delta(tool(1, "y", "g", "{}")), finish("tool_calls")]);
    assert_eq!(steps[1].len(), 2);
    assert_eq!(steps[1][0], Piece::Barrier);
    checked(&steps);
}

#[test]
fn what_follows_a_closed_call_is_refused_unless_it_is_white_space() {
    for (tail, is_fine) in [(" \n", true), ("x", false)] {
        let mut writer = Writer::new(names());
        let mut out = Vec::new();
        writer.chunk(&delta(tool(0, "x", "f", "{\"a\":1}")), &mut out).expect("chunk");
        writer.chunk(&delta(tool(1, "y", "g", "{}")), &mut out).expect("chunk");
        assert_eq!(writer.chunk(&delta(more(0, tail)), &mut out).is_ok(), is_fine);
    }
}

#[test]
fn a16_calls_are_told_apart_however_they_are_numbered() {
    let f = |name: &str, arguments: &str| json!({"name": name, "arguments": arguments});
    let shapes = [
        json!([
            {"index": 0, "id": "x", "function": f("f", "")}, {"index": 0, "function": {"arguments": "{\"a\":"}},
            {"index": 1, "id": "y", "function": f("g", "")}, {"index": 0, "function": {"arguments": "1}"}},
            {"index": 1, "function": {"arguments": "{\"b\":2}"}}
        ]),
        json!([
            {"id": "x", "function": f("f", "{\"a\":")}, {"function": {"arguments": "1}"}},
            {"id": "y", "function": f("g", "{\"b\":")}, {"function": {"arguments": "2}"}}
        ]),
        json!([
            {"index": 0, "id": "x", "function": f("f", "{\"a\":1}")},
            {"index": 0, "id": "y", "function": f("g", "{\"b\":2}")}
        ]),
        json!([{"index": 0, "function": f("f", "{\"a\":1}")}, {"index": 0, "function": f("g", "{\"b\":2}")}]),
        json!([
            {"index": 0, "id": "x", "function": f("f", "")},
            {"index": 0, "id": "", "function": {"name": "", "arguments": "{\"a\":1}"}},
            {"index": 1, "id": "y", "function": f("g", "")},
            {"index": 1, "id": " ", "function": {"name": null, "arguments": "{\"b\":2}"}}
        ]),
        json!([
            {"index": 0, "id": "x", "function": f("f", "{\"a\":1}")},
            {"index": 0, "id": "y", "function": f("g", "")}, {"index": 1, "function": {"arguments": "{\"b\":2}"}}
        ]),
        json!([
            {"index": 0, "id": "x", "function": f("f", "{\"a\":")}, {"index": 0, "id": "x", "function": f("f", "1}")},
            {"index": 1, "id": "y", "function": f("g", "{\"b\":")}, {"index": 1, "id": "y", "function": f("g", "2}")}
        ]),
        json!([
            {"index": 0, "function": f("f", "")}, {"index": 0, "id": "x", "function": {"arguments": "{\"a\":1}"}},
            {"index": 1, "function": f("g", "")}, {"index": 1, "id": "y", "function": {"arguments": "{\"b\":2}"}}
        ]),
    ];
    for shape in shapes {
        let mut chunks: Vec<_> = shape
            .as_array()
            .expect("list")
            .iter()
            .map(|fragment| delta(json!({"tool_calls": [fragment]})))
            .collect();
        chunks.push(finish("tool_calls"));
        let steps = write(&chunks);
        checked(&steps);
        let back = assemble(&joined(&steps));
        let calls: Vec<_> = back.choices[&0]
            .tool_calls
            .iter()
            .map(|call| (call.name.as_str(), call.arguments.as_str()))
            .collect();
        assert_eq!(calls, [("f", "{\"a\":1}"), ("g", "{\"b\":2}")], "{shape}");
    }
}

#[test]
fn b12_a_reply_of_nothing_is_one_empty_text_block() {
    let steps = write(&[delta(json!({"role": "assistant", "content": ""})), finish("stop")]);
    assert_eq!(outline(&checked(&steps)), ["message_start", "+text", "-0", "end_turn", "message_stop"]);
    let text =
        br#"{"choices":[{"index":0,"message":{"role":"assistant","content":null},"finish_reason":"stop"}]}"#;
    let body = Writer::new(names()).body(text).expect("body");
    assert_eq!(super::json(&body)["content"], json!([{"type": "text", "text": ""}]));
}

#[test]
fn a04_a07_an_abort_is_an_error_and_its_open_tool_stays_open() {
    let chunks_in = chunks(&fixture("wire/vllm_chat_stream_abort.sse"));
    let seen = checked(&write(&chunks_in));
    assert_eq!(outline(&seen), ["message_start", "+text", "Hello", "!", "error"]);
    let error = &seen.last().expect("error")["error"];
    assert_eq!(error["type"], "api_error");
    assert!(error["message"].as_str().expect("text").contains("aborted"));

    for chunks in [
        vec![delta(tool(0, "x", "f", "{\"a\":1}")), finish("abort")],
        vec![delta(tool(0, "x", "f", "{\"a\":1}"))],
        vec![],
    ] {
        let seen = outline(&checked(&write(&chunks)));
        assert_eq!(seen.last().map(String::as_str), Some("error"));
        assert!(!seen.contains(&"-0".to_owned()), "{seen:?}");
    }
    let text = br#"{"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"abort"}]}"#;
    let error = Writer::new(names()).body(text).expect_err("no end");
    assert!(error.to_string().contains("aborted"), "{error}");
}

#[test]
fn a06_a18_finish_reasons_and_usage_in_odd_places() {
    let last = r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}"#;
    let steps = write(&[
        br#"{"choices":[],"prompt_filter_results":[],"usage":null}"#.to_vec(),
        chunk(json!({"index": 0, "delta": {"content": "a"}, "finish_reason": ""})),
        chunk(json!({"index": 0, "delta": {"content": "b"}, "finish_reason": "length"})),
        chunk(json!({"index": 0, "delta": {}, "finish_reason": "length"})),
        last.as_bytes().to_vec(),
    ]);
    let seen = checked(&steps);
    assert_eq!(outline(&seen), ["message_start", "+text", "a", "b", "-0", "max_tokens", "message_stop"]);
    let usage = &seen[5]["usage"];
    assert_eq!((&usage["input_tokens"], &usage["cache_read_input_tokens"]), (&json!(5), &json!(4)));
    assert_eq!(usage["output_tokens"], 2);
}

#[test]
fn c07_numbers_that_are_not_json_do_not_stop_a_reply() {
    let text = br#"{"choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"logprob":-Infinity}]}}]}"#;
    let steps = write(&[text.to_vec(), finish("stop")]);
    assert_eq!(outline(&checked(&steps))[2], "a");
}

#[test]
fn a_matched_stop_string_is_named() {
    for key in ["stop_reason", "matched_stop"] {
        let end = chunk(json!({"index": 0, "delta": {"content": "a"}, "finish_reason": "stop", key: "END"}));
        let seen = checked(&write(&[end]));
        assert_eq!(seen[4]["delta"], json!({"stop_reason": "stop_sequence", "stop_sequence": "END"}));
        let end =
            chunk(json!({"index": 0, "delta": {"content": "a"}, "finish_reason": "stop", key: 151_645}));
        let seen = checked(&write(&[end]));
        assert_eq!(seen[4]["delta"], json!({"stop_reason": "end_turn", "stop_sequence": null}));
    }
}

#[test]
fn a09_keep_alives_are_pings_and_begin_the_reply() {
    let mut writer = Writer::new(names());
    let mut steps = vec![Vec::new(); 4];
    writer.keep_alive(&mut steps[0]);
    writer.chunk(&delta(json!({"content": "a"})), &mut steps[1]).expect("chunk");
    writer.keep_alive(&mut steps[1]);
    writer.chunk(&finish("stop"), &mut steps[2]).expect("chunk");
    writer.end(&mut steps[3]);
    let seen = checked(&steps);
    assert_eq!(
        outline(&seen),
        ["message_start", "ping", "+text", "a", "ping", "-0", "end_turn", "message_stop"]
    );
    assert_eq!(seen[0]["message"]["usage"]["input_tokens"], 0);
    let mut out = Vec::new();
    writer.keep_alive(&mut out);
    writer.end(&mut out);
    assert!(out.is_empty(), "nothing follows the end");
}

#[test]
fn a_refusal_that_stands_apart_is_said() {
    let steps = write(&[delta(json!({"refusal": "I will not."})), finish("stop")]);
    assert_eq!(outline(&checked(&steps))[1..5], ["+text", "I will not.", "-0", "refusal"]);
}

#[test]
fn a_body_gives_the_arguments_as_they_are() {
    let calls = json!([
        {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{\"a\":  1e2, \"b\": \"\\u00e9\"}"}},
        {"id": "y", "type": "function", "function": {"name": "g", "arguments": ""}},
        {"id": "", "type": "function", "function": {"name": "h", "arguments": "{\"cut\":"}},
        {"id": "z", "type": "function", "function": {"name": "i", "arguments": "[1]"}}
    ]);
    let chat = json!({
        "choices": [{"index": 0, "finish_reason": "tool_calls", "message":
            {"role": "assistant", "content": "x", "reasoning_content": "r", "tool_calls": calls}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
    });
    let body = Writer::new(names()).body(chat.to_string().as_bytes()).expect("body");
    let text = String::from_utf8(body.to_vec()).expect("text");
    assert!(text.contains(r#""input":{"a":  1e2, "b": "\u00e9"}"#), "{text}");
    let value = super::json(&body);
    let content = value["content"].as_array().expect("content");
    assert_eq!(content.len(), 6);
    assert_eq!(content[0]["thinking"], "r");
    assert_eq!(content[1], json!({"type": "text", "text": "x"}));
    assert_eq!(content[2]["id"], "lg-functions-2ef-3a0");
    assert_eq!(content[3]["input"], json!({}));
    assert_eq!(content[4]["input"], json!({"_raw": "{\"cut\":"}));
    assert_eq!(content[4]["id"], "toolu_01990000-aaaa-7bbb-8ccc-000000000001_2");
    assert_eq!(content[5]["input"], json!({"_raw": "[1]"}));
    assert_eq!((&value["stop_reason"], &value["stop_sequence"]), (&json!("tool_use"), &Value::Null));
    assert_eq!(value["usage"]["output_tokens"], 4);
}

#[test]
fn a_vllm_body_assembles_to_what_the_chat_body_says() {
    let text = fixture("wire/vllm_chat.json");
    let mut chat = Reply::default();
    chat.feed(&text).expect("body");
    let body = Writer::new(names()).body(&text).expect("body");
    let mut assembler = Assembler::default();
    let done = assembler.body(&body).expect("body");
    assert!(done.fed.has_finish && done.must_hold && done.is_end && !done.fed.has_error);
    let back = assembler.into_reply();
    assert_same(&back.choices[&0], &chat.choices[&0], true);
    assert_eq!(back.usage.map(|usage| usage.prompt_tokens), chat.usage.map(|usage| usage.prompt_tokens));
}

#[test]
fn b11_errors_have_the_clients_shape_and_type() {
    let cases = [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (402, "billing_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ];
    for (status, kind) in cases {
        let error = ApiError::new(status, ErrorType::Upstream, "x", "it said \"no\"\u{2028}");
        assert_eq!(error_status(&error), status);
        let body = super::json(&Writer::new(names()).error_body(&error));
        assert_eq!(body["type"], "error");
        assert_eq!(body["error"], json!({"type": kind, "message": "it said \"no\"\u{2028}"}));
        assert_eq!(body["request_id"], names().call_id);
        let stream = Writer::new(names()).error_event(&error);
        let (name, data) = events(&stream).remove(0);
        assert_eq!((name.as_str(), super::json(&data)), ("error", body));
    }
}

#[test]
fn a_prompt_that_does_not_fit_is_said_in_the_words_that_clients_know() {
    let error = ApiError::new(502, ErrorType::Upstream, "context_length_exceeded", "9 > 8 tokens");
    assert_eq!(error_status(&error), 400);
    let body = super::json(&error_body(&error, None));
    assert_eq!(
        body,
        json!({"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8 tokens"}})
    );
}

#[test]
fn what_is_no_chat_reply_is_refused() {
    let two = r#"{"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"},{"index":1,"message":{"content":"b"},"finish_reason":"stop"}]}"#;
    for text in ["", "{", "7", "{}", r#"{"choices":[]}"#, r#"{"choices":[{"message":{"content":7}}]}"#, two] {
        assert!(Writer::new(names()).body(text.as_bytes()).is_err(), "{text}");
    }
    let mut out = Vec::new();
    for text in ["", "{", "7", r#"{"choices":7}"#, r#"{"choices":[{"index":1,"delta":{"content":"b"}}]}"#] {
        assert!(Writer::new(names()).chunk(text.as_bytes(), &mut out).is_err(), "{text}");
    }
    assert!(out.is_empty());
}

#[test]
fn a_call_without_a_name_ends_in_an_error() {
    let nameless = json!({"tool_calls": [{"index": 0, "id": "x", "function": {"arguments": "{}"}}]});
    let seen = outline(&checked(&write(&[delta(nameless), finish("tool_calls")])));
    assert_eq!(seen, ["message_start", "error"]);
}

#[test]
fn the_ids_of_a_reply_are_repeatable() {
    let chunks_in = chunks(&fixture("wire/vllm_chat_stream.sse"));
    assert_eq!(joined(&write(&chunks_in)), joined(&write(&chunks_in)));
    assert_eq!(chat_reply(&chunks_in).choices.len(), 1);
}

#[test]
fn an_empty_reasoning_does_not_hide_the_other_name() {
    let text = r#"{"choices":[{"index":0,"delta":{"reasoning":"","reasoning_content":"hm","content":"a"},"finish_reason":"stop"}]}"#;
    let chunks = vec![text.as_bytes().to_vec()];
    let written = assemble(&joined(&write(&chunks)));
    assert_eq!(written.choices[&0].reasoning, "hm");
    assert_same(&written.choices[&0], &chat_reply(&chunks).choices[&0], true);
}
