//! What the tests share: a reader of response streams that checks their rules as it goes.

mod cases_reply;
mod cases_request;
mod fixtures;
mod passed;
mod properties;

use bytes::Bytes;
use serde_json::{Value, json};

use super::{Writer, open_call};
use crate::protocol::chat::{Choice, Reply};
use crate::protocol::error::ApiError;
use crate::protocol::sse;
use crate::protocol::translate::{Piece, ReplyNames, ReplyWriter};

fn names() -> ReplyNames {
    ReplyNames { call_id: "0199-aa".to_owned(), model: "asked-name".to_owned(), created: 1_796_000_000 }
}

fn names_of(call_id: &str) -> ReplyNames {
    ReplyNames { call_id: call_id.to_owned(), ..names() }
}

fn open(request: &Value) -> Result<(Value, Writer), ApiError> {
    let (chat, writer) = open_call(&Bytes::from(request.to_string()), names(), None)?;
    Ok((serde_json::from_slice(&chat).expect("chat is JSON"), writer))
}

fn chat_of(request: &Value) -> Value {
    open(request).map(|(chat, _)| chat).unwrap_or_else(|error| panic!("{}", error.message))
}

/// The chat messages of these items.
fn messages(items: Value) -> Value {
    chat_of(&json!({"model": "m", "input": items}))["messages"].clone()
}

fn refusal(request: &Value) -> String {
    let error = open(request).map(|(chat, _)| chat).expect_err("a refusal");
    assert_eq!(error.status, 400);
    error.message
}

fn writer(request: Value) -> Writer {
    open(&request).map(|(_, writer)| writer).unwrap_or_else(|error| panic!("{}", error.message))
}

fn plain() -> Writer {
    writer(json!({"model": "m", "input": "hi", "stream": true}))
}

fn fixture(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(path).expect("fixture")
}

/// The data of a chat stream's events, without the end mark.
fn chunks(name: &str) -> Vec<Bytes> {
    let mut parser = sse::Parser::new();
    parser.push(&fixture(name));
    let mut all = Vec::new();
    while let Some(event) = parser.next_event() {
        if event.has_data() && event.data() != "[DONE]" {
            all.push(event.data());
        }
    }
    all
}

/// A chunk with this delta.
fn delta(delta: Value) -> Bytes {
    Bytes::from(json!({"choices": [{"index": 0, "delta": delta}]}).to_string())
}

fn finish(reason: &str) -> Bytes {
    Bytes::from(json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}).to_string())
}

fn reply_of(chunks: &[Bytes]) -> Choice {
    let mut reply = Reply::default();
    for chunk in chunks {
        reply.feed(chunk).expect("readable");
    }
    reply.choices.remove(&0).unwrap_or_default()
}

/// Runs a whole stream.
fn run(writer: &mut Writer, chunks: &[Bytes]) -> Vec<Piece> {
    let mut out = Vec::new();
    for chunk in chunks {
        writer.chunk(chunk, &mut out).expect("readable");
    }
    writer.end(&mut out);
    out
}

/// What a client has of a stream.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    events: Vec<Value>,
    /// Items that are done.
    items: Vec<Value>,
    /// Joined deltas of each item.
    deltas: Vec<String>,
    /// The response of the last event.
    response: Value,
}

impl Seen {
    fn kinds(&self) -> Vec<&str> {
        self.events.iter().map(|event| event["type"].as_str().expect("type")).collect()
    }

    /// All texts of items of this type.
    fn text(&self, kind: &str, part: &str) -> String {
        let items = self.items.iter().filter(|item| item["type"] == kind);
        items
            .flat_map(|item| item["content"].as_array().expect("content"))
            .filter_map(|p| p[part].as_str())
            .collect()
    }

    /// Id, name and arguments of the function calls.
    fn calls(&self) -> Vec<(String, String, String)> {
        let text = |item: &Value, name: &str| item[name].as_str().expect(name).to_owned();
        let calls = self.items.iter().filter(|item| item["type"] == "function_call");
        calls.map(|item| (text(item, "call_id"), text(item, "name"), text(item, "arguments"))).collect()
    }
}

/// Reads pieces as a strict client does: numbers dense, `event:` lines right, items one after the other and whole,
/// barriers where they must be.
fn see(pieces: &[Piece]) -> Seen {
    let mut seen = Seen::default();
    let mut is_after_barrier = false;
    let mut open: Option<Value> = None;
    let mut ended = false;
    for piece in pieces {
        let Piece::Bytes(bytes) = piece else {
            is_after_barrier = true;
            continue;
        };
        let mut parser = sse::Parser::new();
        parser.push(bytes);
        while let Some(event) = parser.next_event() {
            let data: Value = serde_json::from_slice(&event.data()).expect("JSON");
            assert!(!ended, "nothing follows the end: {data}");
            assert_eq!(data["type"], event.name.as_str());
            assert_eq!(data["sequence_number"], seen.events.len());
            let kind = event.name.as_str();
            let (index, item) = (&data["output_index"], &data["item"]);
            match kind {
                "response.created" => assert!(seen.events.is_empty()),
                "response.output_item.added" => {
                    assert_eq!(open.replace(item.clone()), None, "an item begins within another");
                    assert_eq!(*index, seen.items.len());
                    assert_eq!(item["status"], "in_progress");
                    seen.deltas.push(String::new());
                }
                "response.output_item.done" => {
                    assert!(is_after_barrier, "done without a barrier");
                    let begun = open.take().expect("an item ends that never began");
                    assert_eq!(*index, seen.items.len());
                    for member in ["id", "type", "call_id", "name", "namespace"] {
                        assert_eq!(begun[member], item[member]);
                    }
                    seen.items.push(item.clone());
                }
                "response.completed" | "response.incomplete" => {
                    assert!(is_after_barrier, "the end without a barrier");
                    assert_eq!(open, None);
                    assert_eq!(data["response"]["output"], Value::from(seen.items.clone()));
                    ended = true;
                }
                "response.failed" => ended = true,
                "response.in_progress" => {}
                other => {
                    let open = open.as_ref().expect("outside an item");
                    assert_eq!(data["item_id"], open["id"]);
                    assert_eq!(*index, seen.items.len());
                    if let Some(delta) = data["delta"].as_str() {
                        assert!(!delta.is_empty());
                        seen.deltas.last_mut().expect("open").push_str(delta);
                    } else if let Some(text) = data["text"].as_str() {
                        assert_eq!(seen.deltas.last().expect("open"), text, "{other}");
                    }
                }
            }
            is_after_barrier = false;
            if !data["response"].is_null() {
                seen.response = data["response"].clone();
            }
            seen.events.push(data);
        }
        assert!(parser.finish().is_none(), "whole events only");
    }
    assert!(ended, "the stream has no end");
    let mut numbered = seen.events.iter().map(|event| event["type"].as_str());
    assert_eq!(numbered.next(), Some(Some("response.created")));
    assert_eq!(numbered.next(), Some(Some("response.in_progress")));
    seen
}
