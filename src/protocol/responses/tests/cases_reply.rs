//! Replies: failures that others met, by their ids, and the rules of the protocol.

use super::*;
use crate::protocol::error::ErrorType;

fn call(index: u64, id: &str, name: &str, arguments: &str) -> Bytes {
    let function = json!({"name": name, "arguments": arguments});
    delta(json!({"tool_calls": [{"index": index, "id": id, "function": function}]}))
}

fn arguments(index: u64, arguments: &str) -> Bytes {
    delta(json!({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}))
}

fn with_tools(tools: Value) -> Writer {
    writer(json!({"model": "m", "input": "hi", "stream": true, "tools": tools}))
}

fn failed(out: Vec<Piece>, last: Bytes) -> Seen {
    let mut pieces = out;
    pieces.push(Piece::Bytes(last));
    see(&pieces)
}

#[test]
fn a01_no_character_is_lost_and_no_line_end_is_made() {
    let text = "北京 🌍 “x”\u{2028}\u{2029}\u{85}\r\n\t\0";
    let chunks: Vec<Bytes> = text.chars().map(|c| delta(json!({"content": c.to_string()}))).collect();
    let chunks = [&chunks[..], &[finish("stop")]].concat();
    let pieces = run(&mut plain(), &chunks);
    assert_eq!(see(&pieces).text("message", "text"), text);
    for piece in pieces {
        let Piece::Bytes(bytes) = piece else { continue };
        let raw = String::from_utf8(bytes.to_vec()).expect("UTF-8");
        assert!(!raw.contains(['\u{2028}', '\u{2029}', '\u{85}', '\r', '\0']));
    }
}

#[test]
fn a04_a_stream_without_a_finish_reason_is_never_completed() {
    let seen = see(&run(&mut plain(), &[delta(json!({"content": "half"})), call(0, "c", "f", "{\"a\"")]));
    assert_eq!(seen.events.last().expect("end")["type"], "response.failed");
    assert_eq!(seen.response["status"], "failed");
    assert_eq!(seen.response["error"]["code"], "server_error");
    // The call was not whole, so it is not done: no client may run it.
    assert!(seen.calls().is_empty());
    assert_eq!(seen.response["output"].as_array().expect("list").len(), 1);

    let seen = see(&run(&mut plain(), &[]));
    assert_eq!(seen.response["status"], "failed");
}

#[test]
fn a04_an_abort_never_ends_clean() {
    for reason in ["abort", "error"] {
        let mut aborted = plain();
        let seen = see(&run(&mut aborted, &[call(0, "c", "f", "{}"), finish(reason)]));
        assert_eq!(seen.kinds().last(), Some(&"response.failed"));
        assert!(seen.items.is_empty());
        assert_eq!(aborted.items(), None);
        let body = json!({"choices": [{"message": {"content": "a"}, "finish_reason": reason}]}).to_string();
        let body: Value =
            serde_json::from_slice(&plain().body(body.as_bytes()).expect("body")).expect("JSON");
        assert_eq!(body["status"], "failed");
    }
}

#[test]
fn a06_usage_counts_wherever_it_comes() {
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 2});
    let last = json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage});
    let shapes: [&[Value]; 4] = [
        &[json!({"choices": [], "usage": usage})],
        &[json!({"usage": usage})],
        &[json!({"choices": [], "prompt_filter_results": []}), json!({"choices": [], "usage": usage})],
        &[],
    ];
    for shape in shapes {
        let end = if shape.is_empty() { Bytes::from(last.to_string()) } else { finish("stop") };
        let mut chunks =
            vec![Bytes::from(r#"{"choices":[],"usage":null}"#), delta(json!({"content": "a"})), end];
        chunks.extend(shape.iter().map(|chunk| Bytes::from(chunk.to_string())));
        let seen = see(&run(&mut plain(), &chunks));
        assert_eq!(seen.response["usage"]["input_tokens"], 3);
        assert_eq!(seen.response["usage"]["total_tokens"], 5);
    }
    assert_eq!(see(&run(&mut plain(), &[finish("stop")])).response["usage"], Value::Null);
}

#[test]
fn a07_an_error_in_the_stream_ends_it_as_failed() {
    let mut broken = plain();
    let mut out = Vec::new();
    broken.chunk(&delta(json!({"content": "text with the word error"})), &mut out).expect("readable");
    let usage = br#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":1},"error":null}"#;
    broken.chunk(usage, &mut out).expect("readable");
    let error = ApiError::new(502, ErrorType::Upstream, "upstream_error", "overloaded");
    let last = broken.error_event(&error);
    let seen = failed(out, last);
    assert_eq!(seen.response["error"], json!({"code": "server_error", "message": "overloaded"}));
    assert_eq!(seen.response["usage"]["input_tokens"], 7);
    assert!(seen.items.is_empty());

    // Nothing follows it.
    let mut out = Vec::new();
    broken.chunk(&finish("stop"), &mut out).expect("ignored");
    broken.keep_alive(&mut out);
    broken.end(&mut out);
    assert_eq!(out, []);
    assert_eq!(broken.error_event(&error), Bytes::new());
    assert_eq!(broken.items(), None);
}

#[test]
fn a07_b11_codes_say_whether_to_try_again() {
    let cases = [
        (429, "rate_limited", "slow down", "rate_limit_exceeded"),
        (429, "insufficient_quota", "pay", "insufficient_quota"),
        (400, "400", "This model's maximum context length is 4096 tokens.", "context_length_exceeded"),
        (502, "context_length_exceeded", "too long", "context_length_exceeded"),
        (400, "400", "bad", "invalid_prompt"),
        (503, "upstream_error", "busy", "server_error"),
    ];
    for (status, name, message, expected) in cases {
        let mut writer = plain();
        let error = ApiError::new(status, ErrorType::Upstream, name, message);
        let seen = failed(Vec::new(), writer.error_event(&error));
        assert_eq!(seen.response["error"]["code"], expected);
        let body: Value = serde_json::from_slice(&writer.error_body(&error)).expect("JSON");
        assert_eq!(body["error"]["message"], message);
    }
}

#[test]
fn a09_keep_alives_are_events_of_the_protocol_and_change_nothing() {
    let mut waiting = plain();
    let mut out = Vec::new();
    waiting.keep_alive(&mut out);
    waiting.keep_alive(&mut out);
    waiting.chunk(&delta(json!({"content": "a"})), &mut out).expect("readable");
    waiting.keep_alive(&mut out);
    waiting.chunk(&finish("stop"), &mut out).expect("readable");
    waiting.end(&mut out);
    let seen = see(&out);
    let kinds: Vec<&str> = seen.kinds().into_iter().filter(|kind| !kind.contains("output")).collect();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.in_progress",
            "response.content_part.added",
            "response.in_progress",
            "response.content_part.done",
            "response.completed"
        ]
    );
    assert_eq!(seen.text("message", "text"), "a");
}

#[test]
fn a15_a_large_text_passes_whole() {
    let text = "x\n".repeat(1 << 20);
    let seen = see(&run(&mut plain(), &[delta(json!({"content": text})), finish("stop")]));
    assert!(seen.text("message", "text") == text);
}

#[test]
fn a16_calls_with_poor_ids_and_indexes_stay_apart() {
    let head = |id: Value, index: Value, name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        delta(json!({"tool_calls": [{"index": index, "id": id, "function": function}]}))
    };
    let shapes: [Vec<Bytes>; 4] = [
        vec![
            head(json!("x"), Value::Null, "f", "{\"a\":1}"),
            head(json!("y"), Value::Null, "g", "{\"b\":2}"),
        ],
        vec![head(json!("x"), json!(0), "f", "{\"a\":1}"), head(json!("y"), json!(0), "g", "{\"b\":2}")],
        vec![head(json!(""), json!(0), "f", "{\"a\":1}"), head(Value::Null, json!(0), "g", "{\"b\":2}")],
        vec![
            call(0, "x", "f", "{\"a\":"),
            call(1, "y", "g", "{"),
            arguments(0, "1}"),
            arguments(1, "\"b\":2}"),
        ],
    ];
    for shape in shapes {
        let seen = see(&run(&mut plain(), &[&shape[..], &[finish("tool_calls")]].concat()));
        let calls: Vec<_> = seen.calls().into_iter().map(|(_, name, arguments)| (name, arguments)).collect();
        let expected = [("f", "{\"a\":1}"), ("g", "{\"b\":2}")];
        assert_eq!(calls, expected.map(|(name, arguments)| (name.to_owned(), arguments.to_owned())));
        let ids: std::collections::BTreeSet<String> = seen.calls().into_iter().map(|(id, ..)| id).collect();
        assert_eq!(ids.len(), 2, "each call has an id of its own");
        assert!(!ids.contains(""));
    }
}

#[test]
fn a16_an_id_that_comes_late_does_not_rename_a_call() {
    let head = delta(json!({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}));
    let seen = see(&run(&mut plain(), &[head, call(0, "late", "", "{}"), finish("tool_calls")]));
    assert_eq!(seen.calls().len(), 1);
    assert_ne!(seen.calls()[0].0, "");
    // A head without a name waits for it.
    let nameless = delta(json!({"tool_calls": [{"index": 0, "id": "x", "function": {"arguments": "{"}}]}));
    let seen = see(&run(&mut plain(), &[nameless, call(0, "x", "f", "}"), finish("tool_calls")]));
    assert_eq!(seen.calls(), [("x".to_owned(), "f".to_owned(), "{}".to_owned())]);
}

#[test]
fn a18_one_end_whatever_the_finish_reasons() {
    let empty = Bytes::from(r#"{"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":""}]}"#);
    let both = Bytes::from(r#"{"choices":[{"index":0,"delta":{"content":"c"},"finish_reason":"length"}]}"#);
    let mut once = plain();
    let mut out = run(&mut once, &[delta(json!({"content": "a"})), empty, both.clone(), finish("length")]);
    once.end(&mut out);
    let seen = see(&out);
    assert_eq!(seen.text("message", "text"), "abc");
    assert_eq!(seen.response["status"], "incomplete");
    assert_eq!(seen.response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(seen.items[0]["status"], "incomplete");
    let cut = [call(0, "x", "f", "{}"), call(1, "y", "g", "{\"a"), finish("length")];
    let seen = see(&run(&mut plain(), &cut));
    let states: Vec<_> = seen.items.iter().map(|item| item["status"].clone()).collect();
    assert_eq!(states, ["completed", "incomplete"]);
    let seen = see(&run(&mut plain(), &[finish("content_filter")]));
    assert_eq!(seen.response["incomplete_details"], json!({"reason": "content_filter"}));
}

#[test]
fn b06_nothing_is_lost_where_the_kind_changes() {
    let last = r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]},"finish_reason":"tool_calls"}]}"#;
    let chunks = [
        delta(json!({"reasoning": "a", "content": ""})),
        delta(json!({"content": "b", "reasoning": ""})),
        call(0, "x", "f", "{\"a\":"),
        Bytes::from(last),
    ];
    let seen = see(&run(&mut plain(), &chunks));
    let kinds: Vec<&str> = seen.items.iter().filter_map(|item| item["type"].as_str()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(seen.deltas, ["a", "b", "{\"a\":1}"]);
    let seen = see(&run(&mut plain(), &[call(0, "x", "f", "{}"), finish("tool_calls")]));
    assert_eq!(seen.items.len(), 1);
}

#[test]
fn text_after_a_call_waits_for_it_and_is_kept() {
    let chunks = [
        delta(json!({"content": "one"})),
        call(0, "x", "f", "{\"a\":"),
        delta(json!({"content": "\n", "reasoning": "hm"})),
        arguments(0, "1}"),
        finish("tool_calls"),
    ];
    let seen = see(&run(&mut plain(), &chunks));
    let kinds: Vec<&str> = seen.items.iter().filter_map(|item| item["type"].as_str()).collect();
    assert_eq!(kinds, ["message", "function_call", "reasoning", "message"]);
    assert_eq!(seen.text("message", "text"), "one\n");
}

#[test]
fn b12_an_empty_reply_is_one_empty_message() {
    let seen = see(&run(&mut plain(), &[delta(json!({"role": "assistant", "content": ""})), finish("stop")]));
    assert_eq!((seen.items.len(), seen.items[0]["content"][0]["text"].as_str()), (1, Some("")));
    assert_eq!(seen.response["output"].as_array(), Some(&seen.items));
    let body = br#"{"choices":[{"finish_reason":"stop","message":{"content":null}}]}"#;
    let body: Value = serde_json::from_slice(&plain().body(body).expect("body")).expect("JSON");
    assert_eq!(body["output"][0]["content"][0]["text"], "");
    let tool_only = json!({"choices": [{"finish_reason": "tool_calls", "message": {"content": null, "tool_calls": [
        {"id": "x", "function": {"name": "f", "arguments": "{}"}}]}}]});
    let body = plain().body(tool_only.to_string().as_bytes()).expect("body");
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(body["output"].as_array().expect("list").len(), 1);
    assert_eq!(body["output"][0]["type"], "function_call");
}

#[test]
fn b14_input_tokens_hold_the_cached_ones() {
    let usage = json!({"prompt_tokens": 10_000, "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 9_993}, "completion_tokens_details": {"reasoning_tokens": 4}});
    let chunk = Bytes::from(json!({"choices": [], "usage": usage}).to_string());
    let seen = see(&run(&mut plain(), &[finish("stop"), chunk]));
    let expected = json!({"input_tokens": 10_000,
        "input_tokens_details": {"cached_tokens": 9_993, "cache_write_tokens": 0},
        "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 4}, "total_tokens": 10_005});
    assert_eq!(seen.response["usage"], expected);
}

#[test]
fn custom_tools_get_their_input_unwrapped() {
    let tools = json!([{"type": "custom", "name": "patch"}, {"type": "namespace", "name": "functions",
        "tools": [{"type": "custom", "name": "exec"}]}]);
    let input = "*** Begin\n\"é\"\n";
    let wrapped = json!({"input": input}).to_string();
    let (head, tail) = wrapped.split_at(17);
    for (sent, expected) in [([head, tail], input.to_owned()), (["*** Be", "gin"], "*** Begin".to_owned())] {
        let chunks = [call(0, "x", "patch", sent[0]), arguments(0, sent[1]), finish("tool_calls")];
        let seen = see(&run(&mut with_tools(tools.clone()), &chunks));
        assert_eq!(seen.items[0]["type"], "custom_tool_call");
        assert_eq!(seen.items[0]["input"], expected);
        assert_eq!(seen.deltas[0], expected);
    }
    // Cut off: the client must not take the half for the whole.
    let cut = r#"{"input":"*** Begin"#;
    let seen = see(&run(&mut with_tools(tools.clone()), &[call(0, "x", "exec", cut), finish("length")]));
    assert_eq!(seen.items[0]["input"], cut);
    assert_eq!(seen.items[0]["status"], "incomplete");
    assert_eq!(seen.items[0]["namespace"], "functions");
}

#[test]
fn a_local_shell_call_has_an_action_or_is_a_plain_call() {
    let tools = json!([{"type": "local_shell"}]);
    let good =
        [call(0, "x", "local_shell", "{\"command\": [\"l"), arguments(0, "s\"]}"), finish("tool_calls")];
    let seen = see(&run(&mut with_tools(tools.clone()), &good));
    assert_eq!(seen.items[0]["type"], "local_shell_call");
    assert_eq!(seen.items[0]["action"], json!({"command": ["ls"], "type": "exec", "env": {}}));
    let bad = [call(0, "x", "local_shell", "{\"command\": \"ls\"}"), finish("tool_calls")];
    let seen = see(&run(&mut with_tools(tools), &bad));
    assert_eq!(
        seen.calls(),
        [("x".to_owned(), "local_shell".to_owned(), "{\"command\": \"ls\"}".to_owned())]
    );
}

#[test]
fn reasoning_is_named_after_its_call_when_the_client_asks() {
    let request = json!({"model": "m", "input": "hi", "include": ["reasoning.encrypted_content"]});
    let chunks = [delta(json!({"reasoning": "hm"})), finish("stop")];
    let seen = see(&run(&mut writer(request), &chunks));
    let value = seen.items[0]["encrypted_content"].as_str().expect("a value");
    assert!(value.contains(&names().call_id));
    let seen = see(&run(&mut plain(), &chunks));
    assert_eq!(seen.items[0]["encrypted_content"], Value::Null);
}

#[test]
fn b19_the_response_says_back_what_was_asked() {
    let body = r#"{ "model": "other", "input": "hi", "instructions": "Be\ngood.", "temperature": 0.50,
        "tools": [ { "type": "function",
            "name": "f", "parameters": {"x": 1.0} } ], "metadata": {"k": "v"}, "store": false, "max_output_tokens": 9,
        "reasoning": {"effort": "low"}, "stream": true }"#;
    let (_, mut writer) = open_call(&Bytes::from(body), names(), None).expect("a request");
    let pieces = run(&mut writer, &[delta(json!({"content": "a"})), finish("stop")]);
    let seen = see(&pieces);
    let request: Value = serde_json::from_str(body).expect("JSON");
    for name in
        ["instructions", "temperature", "tools", "metadata", "store", "max_output_tokens", "reasoning"]
    {
        assert_eq!(seen.response[name], request[name], "{name}");
    }
    assert_eq!(seen.response["model"], "asked-name");
    assert_eq!(seen.response["id"], "resp_0199-aa");
    assert_eq!(seen.response["created_at"], 1_796_000_000);
    assert_eq!(seen.response["top_p"], Value::Null);
    assert_eq!(seen.response["tool_choice"], "auto");
}

#[test]
fn b20_every_event_is_named_and_is_one_line_of_data() {
    let request = "{\"model\":\"m\",\n \"input\":\"hi\", \"metadata\": {\n\"a\": \"b\"}}";
    let (_, mut writer) = open_call(&Bytes::from(request), names(), None).expect("a request");
    for piece in run(&mut writer, &chunks("wire/vllm_chat_tools_stream.sse")) {
        let Piece::Bytes(bytes) = piece else { continue };
        let text = String::from_utf8(bytes.to_vec()).expect("UTF-8");
        for block in text.strip_suffix("\n\n").expect("whole events").split("\n\n") {
            let (name, data) = block.split_once('\n').expect("two lines");
            let data = data.strip_prefix("data: ").expect("data");
            let kind = serde_json::from_str::<Value>(data).expect("JSON")["type"].clone();
            assert_eq!(name.strip_prefix("event: "), kind.as_str());
            assert!(!data.contains('\n'));
        }
    }
}

#[test]
fn c05_c09_chunks_without_text_and_half_characters_give_no_events() {
    let chunks = chunks("wire/vllm_chat_stream.sse");
    let seen = see(&run(&mut plain(), &chunks));
    assert_eq!(seen.text("message", "text"), "\n\nHello! 🎉");
    assert_eq!(seen.text("reasoning", "text"), "\nOkay.\n");
    let deltas = seen.kinds().into_iter().filter(|kind| kind.ends_with(".delta")).count();
    assert_eq!(deltas, 6);
}

#[test]
fn the_store_gets_input_and_output() {
    let earlier = [Bytes::from(r#"{"role":"user","content":"one"}"#)];
    let body = json!({"model": "m", "input": "two", "previous_response_id": "resp_x"});
    let (chat, mut writer) =
        open_call(&Bytes::from(body.to_string()), names(), Some(&earlier)).expect("a request");
    let chat: Value = serde_json::from_slice(&chat).expect("JSON");
    assert_eq!(
        chat["messages"],
        json!([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    );
    assert_eq!(writer.items(), None);
    run(&mut writer, &[delta(json!({"content": "three"})), finish("stop")]);
    let items = writer.items().expect("finished");
    assert_eq!(items.len(), 3);
    let body = json!({"model": "m", "input": "four", "previous_response_id": "resp_0199-aa"});
    let (chat, _) = open_call(&Bytes::from(body.to_string()), names(), Some(&items)).expect("a request");
    let chat: Value = serde_json::from_slice(&chat).expect("JSON");
    let said: Vec<_> =
        chat["messages"].as_array().expect("list").iter().map(|m| m["content"].clone()).collect();
    assert_eq!(said, ["one", "two", "three", "four"]);
}

#[test]
fn what_is_no_chat_reply_is_an_error_and_not_a_panic() {
    for body in ["", "[]", "{}", r#"{"choices":[]}"#, r#"{"error":{"message":"no"}}"#] {
        assert!(plain().body(body.as_bytes()).is_err(), "{body}");
    }
    let mut out = Vec::new();
    assert!(plain().chunk(b"{\"choices\":1}", &mut out).is_err());
    assert_eq!(out, []);
}
