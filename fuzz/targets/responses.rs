//! Responses as they are written from a chat reply.

use std::sync::LazyLock;

use bytes::Bytes;
use lego::protocol::chat::{Choice, Reply, destream};
use lego::protocol::error::{ApiError, ErrorType};
use lego::protocol::responses::{Writer, open_call};
use lego::protocol::translate::{Piece, ReplyWriter};
use serde_json::{Value, json};

use super::{data, hash, is_body, names, written};

static REQUEST: LazyLock<Bytes> = LazyLock::new(|| {
    let request = json!({"model": "m", "input": "hi", "stream": true, "include": ["reasoning.encrypted_content"],
    "tools": [
        {"type": "function", "name": "f"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "g"}]},
        {"type": "custom", "name": "apply_patch"},
        {"type": "local_shell"},
    ]});
    Bytes::from(request.to_string())
});

fn writer() -> Writer {
    let (_, writer) = open_call(&REQUEST, names(), None).unwrap_or_else(|error| panic!("{}", error.message));
    writer
}

/// A chat reply, whole or streamed, as a response: the stream is well formed whatever came, says what the chat reply
/// says, and is not completed where the reply has no end.
pub fn to_responses(input: &[u8]) {
    if is_body(input) {
        return whole(input);
    }
    let hash = hash(input);
    let mut writer = writer();
    let (mut out, mut reply, mut is_written) = (Vec::new(), Reply::default(), true);
    for (number, (_, data)) in data(input).iter().enumerate() {
        if hash >> (number % 64) & 1 == 1 {
            writer.keep_alive(&mut out);
        }
        let fed = reply.feed(data);
        is_written = !fed.is_ok_and(|fed| fed.has_error) && writer.chunk(data, &mut out).is_ok();
        if !is_written {
            break;
        }
    }
    // The upstream's stream is cut, or it is over.
    let is_cut = hash & 2 == 2;
    if is_written && !is_cut {
        writer.end(&mut out);
        writer.end(&mut out);
    } else {
        let error = ApiError::new(502, ErrorType::Upstream, "upstream_truncated", "it broke off");
        out.push(Piece::Bytes(writer.error_event(&error)));
        writer.end(&mut out);
    }
    let count = out.len();
    writer.keep_alive(&mut out);
    assert_eq!(out.len(), count, "nothing follows the end");
    let seen = checked(&out);
    assert!(!seen.is_whole || !is_cut && is_written, "no end after a cut");
    let nothing = Choice::default();
    let choice = reply.choices.get(&0).unwrap_or(&nothing);
    if seen.is_whole {
        assert!(choice.finish_reason.is_some(), "an end that the upstream did not tell");
        same(&seen.items, choice);
        assert_eq!(writer.items().map(|items| items.len()), Some(1 + seen.items.len()));
    } else {
        assert_eq!(writer.items(), None, "what failed is not gone on from");
    }
}

/// A whole body is written as it would be streamed.
fn whole(input: &[u8]) {
    let Ok(body) = writer().body(input) else { return };
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(body["object"], "response");
    let (Ok(events), Ok(value)) = (destream::events(input, true), serde_json::from_slice::<Value>(input))
    else {
        return;
    };
    let is_one = value["choices"].as_array().is_some_and(|choices| choices.len() == 1);
    let mut other = writer();
    let mut out = Vec::new();
    for event in events {
        if other.chunk(&event, &mut out).is_err() {
            return;
        }
    }
    other.end(&mut out);
    let seen = checked(&out);
    let calls = value["choices"][0]["message"]["tool_calls"].as_array();
    let is_numbered = calls.into_iter().flatten().any(|call| !call["index"].is_null());
    let is_plain = ["text", "delta"].iter().all(|name| value["choices"][0][*name].is_null());
    if is_one && is_plain && !is_numbered {
        assert_eq!(seen.status, body["status"]);
        // A stream that failed has shown a part of it.
        if seen.is_whole {
            assert_eq!(Value::from(seen.items), body["output"]);
        }
    }
}

/// What a client has of a stream.
struct Seen {
    items: Vec<Value>,
    status: Value,
    /// It ended as the upstream said, and did not fail.
    is_whole: bool,
}

/// Reads a written stream as a strict client does.
fn checked(pieces: &[Piece]) -> Seen {
    let (mut items, mut open, mut joined) = (Vec::<Value>::new(), None::<Value>, String::new());
    let (mut is_barred, mut is_over, mut is_whole, mut number) = (false, false, false, 0);
    let mut status = Value::Null;
    for piece in pieces {
        let Piece::Bytes(bytes) = piece else {
            is_barred = true;
            continue;
        };
        for event in written(bytes) {
            let value: Value = serde_json::from_slice(&event.data()).expect("JSON");
            assert!(!is_over, "nothing follows the end: {value}");
            assert_eq!(value["type"], event.name.as_str());
            assert_eq!(value["sequence_number"], number);
            match (number, event.name.as_str()) {
                (0, name) => assert_eq!(name, "response.created"),
                (1, name) => assert_eq!(name, "response.in_progress"),
                (_, name) => assert_ne!(name, "response.created"),
            }
            number += 1;
            let (index, item) = (&value["output_index"], &value["item"]);
            match event.name.as_str() {
                "response.created" | "response.in_progress" => {}
                "response.output_item.added" => {
                    assert_eq!(open.replace(item.clone()), None, "items overlap");
                    assert_eq!(*index, items.len(), "indexes have no gap");
                    joined.clear();
                }
                "response.output_item.done" => {
                    assert!(is_barred, "an item may be acted on before it is durable");
                    let begun = open.take().expect("an item that began");
                    assert_eq!(*index, items.len());
                    for member in ["id", "type", "call_id", "name", "namespace"] {
                        assert_eq!(begun[member], item[member]);
                    }
                    items.push(item.clone());
                }
                "response.completed" | "response.incomplete" => {
                    assert!(is_barred, "the end comes before it is durable");
                    assert_eq!(open, None);
                    assert_eq!(value["response"]["output"], Value::from(items.clone()));
                    (is_over, is_whole) = (true, true);
                }
                "response.failed" => is_over = true,
                _ => {
                    assert_eq!(value["item_id"], open.as_ref().expect("an open item")["id"]);
                    assert_eq!(*index, items.len());
                    if let Some(delta) = value["delta"].as_str() {
                        joined.push_str(delta);
                    } else if let Some(text) = value["text"].as_str() {
                        assert_eq!(joined, text);
                    }
                }
            }
            is_barred = false;
            if !value["response"].is_null() {
                status = value["response"]["status"].clone();
            }
        }
    }
    assert!(is_over, "the stream has no end");
    assert_eq!(is_whole, status == "completed" || status == "incomplete");
    Seen { items, status, is_whole }
}

/// The items say what the chat reply says.
fn same(items: &[Value], chat: &Choice) {
    let text = |kind: &str, part: &str| -> String {
        let of_kind = items.iter().filter(|item| item["type"] == kind);
        of_kind
            .flat_map(|item| item["content"].as_array().into_iter().flatten())
            .filter_map(|p| p[part].as_str())
            .collect()
    };
    assert_eq!(text("message", "text"), chat.text);
    assert_eq!(text("message", "refusal"), chat.refusal);
    assert_eq!(text("reasoning", "text"), chat.reasoning);
    let calls: Vec<&Value> = items
        .iter()
        .filter(|item| item["type"].as_str().is_some_and(|kind| kind.ends_with("_call")))
        .collect();
    assert_eq!(calls.len(), chat.tool_calls.len());
    for (item, call) in calls.iter().zip(&chat.tool_calls) {
        if let (Some(arguments), true) = (item["arguments"].as_str(), item["type"] == "function_call") {
            assert_eq!(arguments, call.arguments);
        }
    }
}
