//! Responses of an upstream's own.

use serde_json::{Value, json};

use crate::protocol::chat::{Cut, Reply};
use crate::protocol::json;
use crate::protocol::responses::{Assembler, cut};
use crate::protocol::sse;

const STREAM: &str = include_str!("../../../../tests/fixtures/wire/responses_stream.sse");

fn read(stream: &str) -> Reply {
    let mut parser = sse::Parser::new();
    parser.push(stream.as_bytes());
    let mut assembler = Assembler::default();
    while let Some(event) = parser.next_event() {
        assembler.event(&event.name, &event.data()).expect("readable");
    }
    assembler.into_reply()
}

fn blocks(keeps: impl Fn(&str) -> bool) -> String {
    STREAM.split_inclusive("\n\n").filter(|block| keeps(block)).collect()
}

fn last() -> Value {
    let data = STREAM.rsplit_once("data: ").expect("data").1;
    serde_json::from_str(data.trim_end()).expect("JSON")
}

#[test]
fn servers_that_leave_events_out_are_read_the_same() {
    let whole = read(STREAM);
    let choice = &whole.choices[&0];
    assert_eq!((choice.text.as_str(), choice.reasoning.as_str()), ("I'll look now.", "\nOkay.\n"));
    assert_eq!(choice.finish_reason.as_deref(), Some("completed"));
    let calls: Vec<_> = choice.tool_calls.iter().map(|call| (call.id.as_str(), call.name.as_str())).collect();
    assert_eq!(calls, [("call_toy3", "shell"), ("call_toy4", "apply_patch")]);
    for other in [
        blocks(|block| !block.contains(".delta")),
        blocks(|block| !block.contains(".delta") && !block.contains("_text.done")),
        blocks(|block| !block.contains(".added")),
        blocks(|block| !block.contains("output_item.done")),
        blocks(|block| !block.contains("_text.done") && !block.contains("_part")),
        blocks(|block| block.contains("output_item.done") || block.contains(".completed")),
        blocks(|block| block.contains("response.created") || block.contains(".completed")),
        STREAM.lines().filter(|line| !line.starts_with("event:")).map(|line| format!("{line}\n")).collect(),
    ] {
        assert_eq!(read(&other), whole, "{other}");
    }
    let mut body = Assembler::default();
    let done = body.body(last()["response"].to_string().as_bytes()).expect("a response");
    assert!(done.fed.has_finish && done.must_hold && done.is_end);
    assert_eq!(body.into_reply(), whole);
}

#[test]
fn only_what_the_client_answers_is_a_tool_call_of_its_own() {
    let item = |item: Value| {
        let event = json!({"type": "response.output_item.done", "output_index": 0, "item": item});
        let mut assembler = Assembler::default();
        let done = assembler.event("", event.to_string().as_bytes()).expect("an event");
        assert!(done.must_hold && !done.is_end);
        let calls = assembler.into_reply().choices.remove(&0).unwrap_or_default().tool_calls;
        calls.into_iter().map(|call| (call.id, call.name, call.arguments)).next()
    };
    let call =
        |id: &str, name: &str, arguments: &str| Some((id.to_owned(), name.to_owned(), arguments.to_owned()));
    let shell = json!({"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "action": {"type": "exec", "command": ["ls"], "env": {}}});
    assert_eq!(item(shell), call("c", "local_shell", r#"{"type":"exec","command":["ls"],"env":{}}"#));
    let patch = json!({"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}});
    assert_eq!(item(patch), call("c", "apply_patch", r#"{"type":"delete_file","path":"a"}"#));
    let custom = json!({"type": "custom_tool_call", "id": "ctc_1", "call_id": "c", "name": "sql", "input": "select \"a\""});
    assert_eq!(item(custom), call("c", "sql", "select \"a\""));
    for hosted in [
        json!({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}}),
        json!({"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "output": "o", "server_label": "s"}),
        json!({"type": "tool_search_call", "call_id": null, "execution": "server", "arguments": {}}),
        json!({"type": "function_call_output", "call_id": "c", "output": "o"}),
        json!({"type": "reasoning", "summary": [], "encrypted_content": "x"}),
    ] {
        assert_eq!(item(hosted.clone()), None, "{hosted}");
    }
}

#[test]
fn what_lego_says_of_a_response_repeats_neither_prompt_nor_tools() {
    let mut assembler = Assembler::default();
    assert_eq!(assembler.in_progress(), None);
    let response = json!({"id": "r", "model": "m", "instructions": "long\nprompt", "tools": [{"type": "function"}], "status": "in_progress", "output": []});
    let created = json!({"type": "response.created", "sequence_number": 0, "response": response});
    assembler.event("", created.to_string().as_bytes()).expect("an event");
    let mut expected = response;
    (expected["instructions"], expected["tools"]) = (Value::Null, json!([]));
    let said: Value = serde_json::from_str(&assembler.in_progress().expect("begun")).expect("JSON");
    let in_progress = json!({"type": "response.in_progress", "sequence_number": 0, "response": expected});
    assert_eq!(said, in_progress);
    assembler.event("", last().to_string().as_bytes()).expect("an event");
    assert_eq!(assembler.in_progress(), None);
}

#[test]
fn only_the_responses_own_model_is_the_clients() {
    let wanted = Cut { model: Some("a\"b".to_owned()), ..Cut::default() };
    let applied = |text: &str| {
        let found = cut(text.as_bytes(), &wanted).expect("an object");
        String::from_utf8(json::apply(text.as_bytes(), &found.edits)).expect("text")
    };
    for (text, expected) in [
        (
            r#"{"model":"x","response": {"tools":[{"model":"y"}], "model" : "z" }}"#,
            r#"{"model":"x","response": {"tools":[{"model":"y"}], "model" : "a\"b" }}"#,
        ),
        (r#"{"model":"z","output":[{"model":"y"}]}"#, r#"{"model":"a\"b","output":[{"model":"y"}]}"#),
        (r#"{"response":null,"delta":"m"}"#, r#"{"response":null,"delta":"m"}"#),
    ] {
        assert_eq!(applied(text), expected);
    }
    assert!(cut(b"[]", &wanted).is_err());
}
