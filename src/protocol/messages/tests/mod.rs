//! What the tests of this protocol share.

mod assembler;
mod fixtures;
mod properties;
mod reply;
mod request;

use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde_json::Value;

use super::{Assembler, Writer, ids};
use crate::protocol::chat::{Choice, Reply};
use crate::protocol::sse;
use crate::protocol::translate::{Piece, ReplyNames, ReplyWriter};

fn fixture_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(fixture_path(name)).expect("fixture")
}

fn names() -> ReplyNames {
    let call_id = "01990000-aaaa-7bbb-8ccc-000000000001".to_owned();
    ReplyNames { call_id, model: "claude-asked".to_owned(), created: 1_796_000_000 }
}

/// Names and data of a stream's events.
fn events(stream: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut parser = sse::Parser::new();
    parser.push(stream);
    let mut events = Vec::new();
    while let Some(event) = parser.next_event() {
        if event.has_data() {
            events.push((event.name.clone(), event.data().to_vec()));
        }
    }
    assert!(parser.finish().is_none(), "whole events only");
    events
}

/// The data of a chat stream's events without `[DONE]`.
fn chunks(stream: &[u8]) -> Vec<Vec<u8>> {
    events(stream).into_iter().map(|(_, data)| data).filter(|data| data != b"[DONE]").collect()
}

fn chat_reply(chunks: &[Vec<u8>]) -> Reply {
    let mut reply = Reply::default();
    for chunk in chunks {
        reply.feed(chunk).expect("a chat chunk");
    }
    reply
}

/// What the writer makes of the chunks, a list of pieces for each, and one for the end.
fn write(chunks: &[Vec<u8>]) -> Vec<Vec<Piece>> {
    let mut writer = Writer::new(names());
    let mut steps = Vec::new();
    for chunk in chunks {
        let mut out = Vec::new();
        writer.chunk(chunk, &mut out).expect("a chat chunk");
        steps.push(out);
    }
    let mut out = Vec::new();
    writer.end(&mut out);
    steps.push(out);
    steps
}

fn joined(steps: &[Vec<Piece>]) -> Vec<u8> {
    let bytes = steps.iter().flatten().filter_map(|piece| match piece {
        Piece::Bytes(bytes) => Some(bytes.to_vec()),
        Piece::Barrier => None,
    });
    bytes.flatten().collect()
}

fn json(data: &[u8]) -> Value {
    serde_json::from_slice(data).expect("JSON")
}

/// Checks the shape of a written stream and gives its events. A stream that ends with an error may have an open
/// block.
fn checked(steps: &[Vec<Piece>]) -> Vec<Value> {
    let mut seen: Vec<Value> = Vec::new();
    let mut open: Option<(u64, Value)> = None;
    let mut next_index = 0;
    let mut said = 0;
    for pieces in steps {
        let mut is_barred = false;
        for piece in pieces {
            let Piece::Bytes(bytes) = piece else {
                is_barred = true;
                continue;
            };
            for (name, data) in events(bytes) {
                let event = json(&data);
                assert_eq!(event["type"], name.as_str());
                let is_first = seen.iter().all(|event| event["type"] == "ping");
                assert_eq!(
                    is_first,
                    name == "message_start" || name == "error" && seen.is_empty(),
                    "{seen:?}"
                );
                match name.as_str() {
                    "content_block_start" => {
                        assert!(open.is_none(), "blocks overlap");
                        assert_eq!(event["index"], next_index, "dense indexes");
                        open = Some((next_index, event["content_block"].clone()));
                        next_index += 1;
                        said = 0;
                    }
                    "content_block_delta" => {
                        let (index, block) = open.as_ref().expect("an open block");
                        assert_eq!(event["index"], *index);
                        let delta = &event["delta"];
                        let kind = match delta["type"].as_str().expect("type") {
                            "text_delta" => "text",
                            "thinking_delta" | "signature_delta" => "thinking",
                            "input_json_delta" => "tool_use",
                            other => panic!("{other}"),
                        };
                        assert_eq!(block["type"], kind);
                        let text = delta.as_object().expect("delta").values().nth(1).expect("text");
                        assert_ne!(text, "", "an empty delta");
                        said += 1;
                    }
                    "content_block_stop" => {
                        let (index, block) = open.take().expect("an open block");
                        assert_eq!(event["index"], index);
                        if block["type"] == "tool_use" {
                            assert!(is_barred, "a tool may be run before it is durable");
                            let id = block["id"].as_str().expect("id");
                            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
                            assert!(!id.is_empty() && id.chars().all(is_plain), "{id}");
                        } else {
                            assert!(said > 0 || index == 0, "an empty block");
                        }
                    }
                    "message_delta" => {
                        assert!(open.is_none() && next_index > 0);
                        assert!(is_barred, "the end comes before it is durable");
                    }
                    _ => {}
                }
                seen.push(event);
            }
        }
    }
    let last = seen.last().expect("events")["type"].clone();
    assert!(last == "message_stop" || last == "error", "{last}");
    assert_eq!(
        seen.iter().filter(|event| event["type"] == "message_delta").count() == 1,
        last == "message_stop"
    );
    seen
}

fn assemble(stream: &[u8]) -> Reply {
    let mut assembler = Assembler::default();
    for (name, data) in events(stream) {
        assembler.event(&name, &data).expect("an event");
    }
    assembler.into_reply()
}

/// The two choices say the same; `is_exact` asks for the argument bytes, else for their values.
fn assert_same(back: &Choice, chat: &Choice, is_exact: bool) {
    assert_eq!(back.text, chat.text);
    assert_eq!(back.reasoning, chat.reasoning);
    assert_eq!(back.tool_calls.len(), chat.tool_calls.len());
    for (back, chat) in back.tool_calls.iter().zip(&chat.tool_calls) {
        assert_eq!(back.name, chat.name);
        if !chat.id.is_empty() {
            assert!(back.id == chat.id || ids::to_upstream(back.id.clone()) == chat.id, "{back:?} {chat:?}");
        }
        if is_exact || json_object(&chat.arguments).is_none() {
            assert_eq!(back.arguments, chat.arguments);
        } else {
            assert_eq!(json_object(&back.arguments), json_object(&chat.arguments));
        }
    }
}

fn json_object(text: &str) -> Option<Value> {
    serde_json::from_str::<Value>(text).ok().filter(Value::is_object)
}

fn body(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}
