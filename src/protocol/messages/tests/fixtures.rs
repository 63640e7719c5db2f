//! What real harnesses sent.

use std::path::Path;

use bytes::Bytes;
use serde_json::Value;

use super::super::{count_request, translate};
use super::{assemble, fixture, fixture_path, json, json_object, names};
use crate::protocol::chat;

/// The recorded files under `harness` whose name ends so, in order.
fn recorded(ending: &str) -> Vec<String> {
    fn collect(folder: &Path, ending: &str, out: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).expect("folder") {
            let path = entry.expect("entry").path();
            if path.is_dir() {
                collect(&path, ending, out);
            } else if path.to_str().is_some_and(|path| path.ends_with(ending)) {
                let inside = path.strip_prefix(fixture_path("")).expect("a fixture");
                out.push(inside.to_str().expect("name").to_owned());
            }
        }
    }
    let mut out = Vec::new();
    for folder in [
        "harness/claude-code",
        "harness/pi/anthropic_wire",
        "harness/opencode/anthropic_wire",
        "harness/anthropic-python",
    ] {
        collect(&fixture_path(folder), ending, &mut out);
    }
    out.sort();
    out
}

fn chat_of(name: &str) -> Value {
    let body = Bytes::from(fixture(name));
    let chat = translate(&body, names()).map_err(|error| error.message).expect(name).chat;
    chat::Request::parse(chat.clone()).expect("a chat request");
    json(&chat)
}

/// Every text that a model should see, from a request's system, messages and tools.
fn texts(request: &Value) -> Vec<String> {
    fn content(value: &Value, out: &mut Vec<String>) {
        match value {
            Value::String(text) => out.push(text.clone()),
            Value::Array(blocks) => {
                for block in blocks {
                    for key in ["text", "thinking", "tool_name", "name", "tool_use_id", "id"] {
                        out.extend(block[key].as_str().map(str::to_owned));
                    }
                    if block["input"].is_object() {
                        out.push(block["input"].to_string());
                    }
                    content(&block["content"], out);
                }
            }
            _ => {}
        }
    }
    let mut out = Vec::new();
    content(&request["system"], &mut out);
    for message in request["messages"].as_array().expect("messages") {
        content(&message["content"], &mut out);
    }
    for tool in request["tools"].as_array().into_iter().flatten() {
        for key in ["name", "description"] {
            out.extend(tool[key].as_str().map(str::to_owned));
        }
        out.push(tool["input_schema"].to_string());
    }
    out
}

/// The same of a chat request, joined. Arguments are parsed, as recordings are pretty-printed.
fn chat_text(chat: &Value) -> String {
    fn walk(value: &Value, out: &mut String) {
        match value {
            Value::String(text) => {
                match json_object(text) {
                    Some(object) => out.push_str(&object.to_string()),
                    None => out.push_str(text),
                }
                out.push('\u{0}');
            }
            Value::Array(list) => list.iter().for_each(|value| walk(value, out)),
            Value::Object(members) => {
                for (name, value) in members {
                    if name == "parameters" {
                        out.push_str(&value.to_string());
                    }
                    walk(value, out);
                }
            }
            _ => {}
        }
    }
    let mut out = String::new();
    walk(&chat["messages"], &mut out);
    walk(&chat["tools"], &mut out);
    out
}

#[test]
fn every_recorded_request_translates_and_keeps_all_text() {
    let names = recorded(".request.json");
    assert!(names.len() > 30, "{}", names.len());
    for name in names {
        let request = json(&fixture(&name));
        let chat = chat_of(&name);
        let said = chat_text(&chat);
        for text in texts(&request) {
            assert!(said.contains(&text), "{name}: {text:.200}");
        }
        let tools = |value: &Value| value["tools"].as_array().map_or(0, Vec::len);
        assert_eq!(tools(&chat), tools(&request), "{name}");
        let count =
            json(&count_request(&Bytes::from(fixture(&name))).map_err(|error| error.message).expect("count"));
        assert_eq!((&count["messages"], &count["tools"]), (&chat["messages"], &chat["tools"]));
        if let Some(user_id) = request["metadata"]["user_id"].as_str() {
            assert!(!chat.to_string().contains(user_id));
        }
    }
}

#[test]
fn chat_messages_of_a_turn_begin_with_those_of_the_turn_before() {
    for folder in [
        "harness/claude-code",
        "harness/pi/anthropic_wire",
        "harness/opencode/anthropic_wire",
        "harness/anthropic-python",
    ] {
        let turns: Vec<Value> = (1..=3)
            .map(|turn| chat_of(&format!("{folder}/turn{turn}.request.json"))["messages"].clone())
            .collect();
        for pair in turns.windows(2) {
            let (before, after) = (pair[0].as_array().expect("list"), pair[1].as_array().expect("list"));
            assert!(after.len() > before.len(), "{folder}");
            assert_eq!(&after[..before.len()], &before[..], "{folder}");
        }
    }
}

#[test]
fn the_replayed_turn_is_the_reply_that_was_sent() {
    let reply = assemble(&fixture("harness/claude-code/turn1.response.sse"));
    let choice = &reply.choices[&0];
    let next = chat_of("harness/claude-code/turn2.request.json");
    let messages = next["messages"].as_array().expect("list");
    let replayed = messages.iter().find(|message| message["role"] == "assistant").expect("an assistant turn");
    assert_eq!(replayed["content"], choice.text);
    assert_eq!(replayed["reasoning_content"], choice.reasoning);
    assert_eq!(replayed["tool_calls"][0]["id"], choice.tool_calls[0].id);
    let arguments = replayed["tool_calls"][0]["function"]["arguments"].as_str().expect("arguments");
    assert_eq!(json_object(arguments), json_object(&choice.tool_calls[0].arguments));
}

#[test]
fn every_recorded_stream_is_read() {
    let names = recorded(".response.sse");
    assert!(names.len() > 20, "{}", names.len());
    for name in names {
        // Cut recordings end inside an event; the rest of them is read all the same.
        let mut stream = fixture(&name);
        if let Some(end) = stream.windows(2).rposition(|pair| pair == b"\n\n") {
            stream.truncate(end + 2);
        }
        let reply = assemble(&stream);
        let choice = &reply.choices[&0];
        assert!(reply.id.is_some(), "{name}");
        if choice.finish_reason.is_some() {
            assert!(reply.usage.is_some(), "{name}");
            assert!(choice.tool_calls.iter().all(|call| json_object(&call.arguments).is_some()), "{name}");
        }
    }
}
