//! Anthropic's Messages as a reply: an upstream's own, and what is written from a chat reply.

use std::collections::BTreeSet;

use lego::protocol::chat::{Choice, Reply, destream};
use lego::protocol::error::{ApiError, ErrorType};
use lego::protocol::messages::{Assembler, Writer, count_reply};
use lego::protocol::translate::{Piece, ReplyWriter};
use serde_json::{Value, json};

use super::{data, events, hash, is_body, names, pieces, written};

/// A Messages reply of an upstream, whole or streamed, and that of its `/tokenize`: read the same however it is split;
/// what was read, written as Messages again, reads the same.
pub fn messages_reply(input: &[u8]) {
    if let Ok(counted) = count_reply(input) {
        let counted: Value = serde_json::from_slice(&counted).expect("JSON");
        assert!(counted["input_tokens"].is_u64());
    }
    let reply = if is_body(input) {
        let mut assembler = Assembler::default();
        match assembler.body(input) {
            Err(_) => assert_eq!(*assembler.reply(), Reply::default(), "what cannot be read adds nothing"),
            Ok(done) => assert!(done.must_hold && done.is_end),
        }
        assembler.into_reply()
    } else {
        let reply = streamed(&[input]);
        assert_eq!(reply, streamed(&pieces(input)));
        reply
    };
    assert!(reply.choices.keys().all(|index| *index == 0), "Messages has one choice");
    if let Some(choice) = reply.choices.get(&0) {
        assert_ne!(choice.finish_reason.as_deref(), Some(""));
        written_again(choice);
    }
}

fn streamed(pieces: &[&[u8]]) -> Reply {
    let mut assembler = Assembler::default();
    for event in events(pieces).iter().filter(|event| event.has_data() && !event.is_unterminated) {
        let before = assembler.reply().clone();
        match assembler.event(&event.name, &event.data()) {
            Err(_) => assert_eq!(*assembler.reply(), before, "what cannot be read adds nothing"),
            Ok(done) => {
                assert!(!done.fed.has_error || assembler.reply().error.is_some() && done.is_end);
                assert!(!done.fed.has_finish || done.must_hold, "a client may act on the end");
            }
        }
    }
    assembler.into_reply()
}

fn written_again(choice: &Choice) {
    // Chat knows no call without a name, and no two with one id: such a part belongs to the call before it.
    let ids: BTreeSet<&str> =
        choice.tool_calls.iter().map(|call| call.id.trim()).filter(|id| !id.is_empty()).collect();
    let named = choice.tool_calls.iter().filter(|call| !call.name.is_empty());
    if named.count() != choice.tool_calls.len() || ids.len() != choice.tool_calls.len() {
        return;
    }
    let calls: Vec<Value> = choice
        .tool_calls
        .iter()
        .enumerate()
        .map(|(index, call)| {
            let function = json!({"name": call.name, "arguments": call.arguments});
            json!({"index": index, "id": call.id, "type": "function", "function": function})
        })
        .collect();
    let reason = if calls.is_empty() { "stop" } else { "tool_calls" };
    let delta = json!({"reasoning": choice.reasoning, "content": choice.text, "tool_calls": calls});
    let chunk = json!({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}).to_string();
    let mut writer = Writer::new(names());
    let mut out = Vec::new();
    writer.chunk(chunk.as_bytes(), &mut out).expect("a chunk");
    writer.end(&mut out);
    let seen = checked(&[out]);
    if seen.is_whole {
        same(&seen.choice, choice);
    }
}

/// A chat reply, whole or streamed, as Messages: the stream is well formed whatever came, says what the chat reply
/// says, and has no end where the reply has none.
pub fn to_messages(input: &[u8]) {
    if is_body(input) {
        return whole(input);
    }
    let hash = hash(input);
    let mut writer = Writer::new(names());
    let (mut steps, mut reply, mut is_read, mut is_written) = (Vec::new(), Reply::default(), true, true);
    for (number, (_, data)) in data(input).iter().enumerate() {
        let fed = reply.feed(data);
        if fed.as_ref().is_ok_and(|fed| fed.has_error) {
            is_written = false;
            break;
        }
        is_read &= fed.is_ok();
        let mut out = Vec::new();
        if hash >> (number % 64) & 1 == 1 {
            writer.keep_alive(&mut out);
            steps.push(std::mem::take(&mut out));
        }
        is_written = writer.chunk(data, &mut out).is_ok();
        steps.push(out);
        if !is_written {
            break;
        }
    }
    // The upstream's stream is cut, or it is over.
    let is_cut = hash & 2 == 2;
    let mut out = Vec::new();
    if is_written && !is_cut {
        writer.end(&mut out);
        writer.end(&mut out);
    } else {
        let error = ApiError::new(502, ErrorType::Upstream, "upstream_truncated", "it broke off");
        out.push(Piece::Bytes(writer.error_event(&error)));
        writer.end(&mut out);
    }
    let mut late = Vec::new();
    writer.keep_alive(&mut late);
    assert!(late.is_empty(), "nothing follows the end");
    steps.push(out);
    let seen = checked(&steps);
    let nothing = Choice::default();
    let choice = reply.choices.get(&0).unwrap_or(&nothing);
    assert!(!seen.is_whole || !is_cut && is_written, "no end after a cut");
    if seen.is_whole && is_read {
        assert!(choice.finish_reason.is_some(), "an end that the upstream did not tell");
        same(&seen.choice, choice);
    }
}

/// A whole body is written as it would be streamed.
fn whole(input: &[u8]) {
    let Ok(body) = Writer::new(names()).body(input) else { return };
    let message: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(
        (&message["type"], &message["role"], &message["model"]),
        (&json!("message"), &json!("assistant"), &json!("asked"))
    );
    let mut assembler = Assembler::default();
    assembler.body(&body).expect("a message");
    let body = assembler.into_reply();
    let (Ok(events), Ok(_)) = (destream::events(input, true), serde_json::from_slice::<Value>(input)) else {
        return;
    };
    let mut writer = Writer::new(names());
    let mut out = Vec::new();
    for event in events {
        if writer.chunk(&event, &mut out).is_err() {
            return;
        }
    }
    writer.end(&mut out);
    let seen = checked(&[out]);
    if seen.is_whole
        && serde_json::from_slice::<Value>(input)
            .is_ok_and(|input| input["choices"].as_array().is_some_and(|all| all.len() == 1))
    {
        let body = &body.choices[&0];
        assert_eq!(seen.choice.finish_reason, body.finish_reason);
        same(&seen.choice, body);
    }
}

/// What a client has of a stream.
struct Seen {
    choice: Choice,
    /// It has its end, and is no error.
    is_whole: bool,
}

/// Reads a written stream as a strict client does. The pieces of one step were written at once.
fn checked(steps: &[Vec<Piece>]) -> Seen {
    let mut assembler = Assembler::default();
    let mut kinds: Vec<String> = Vec::new();
    let mut open: Option<(u64, String)> = None;
    let mut next = 0;
    for pieces in steps {
        let mut is_barred = false;
        for piece in pieces {
            let Piece::Bytes(bytes) = piece else {
                is_barred = true;
                continue;
            };
            for event in written(bytes) {
                assert!(
                    !kinds.iter().any(|kind| kind == "message_stop" || kind == "error"),
                    "nothing follows the end"
                );
                let value: Value = serde_json::from_slice(&event.data()).expect("JSON");
                assert_eq!(value["type"], event.name.as_str());
                let is_first = kinds.iter().all(|kind| kind == "ping");
                let may_be_first = event.name == "message_start" || event.name == "error" && kinds.is_empty();
                assert_eq!(is_first, may_be_first, "{kinds:?} {value}");
                let index = value["index"].as_u64();
                match event.name.as_str() {
                    "content_block_start" => {
                        assert!(open.is_none(), "blocks overlap");
                        assert_eq!(index, Some(next), "indexes have no gap");
                        open =
                            Some((next, value["content_block"]["type"].as_str().expect("type").to_owned()));
                        next += 1;
                    }
                    "content_block_delta" => {
                        let (at, kind) = open.as_ref().expect("an open block");
                        assert_eq!(index, Some(*at));
                        let delta = value["delta"]["type"].as_str().expect("type");
                        let fits = match delta {
                            "text_delta" => kind == "text",
                            "thinking_delta" | "signature_delta" => kind == "thinking",
                            "input_json_delta" => kind == "tool_use",
                            _ => false,
                        };
                        assert!(fits, "{delta} in {kind}");
                    }
                    "content_block_stop" => {
                        let (at, kind) = open.take().expect("an open block");
                        assert_eq!(index, Some(at));
                        assert!(kind != "tool_use" || is_barred, "a tool may be run before it is durable");
                    }
                    "message_delta" => {
                        assert!(open.is_none() && next > 0 && is_barred);
                    }
                    "message_start" | "message_stop" | "ping" | "error" => {}
                    other => panic!("no event of the protocol: {other}"),
                }
                assembler.event(&event.name, &event.data()).expect("an event");
                kinds.push(event.name);
            }
        }
    }
    let count = |kind: &str| kinds.iter().filter(|other| *other == kind).count();
    let is_whole = count("message_stop") == 1;
    assert_eq!(count("message_delta"), usize::from(is_whole));
    assert_eq!(count("error"), usize::from(!is_whole), "{kinds:?}");
    let choice = assembler.into_reply().choices.remove(&0).unwrap_or_default();
    Seen { choice, is_whole }
}

/// The two say the same. White space after a call's arguments may be missing, and an `id` may be another.
fn same(seen: &Choice, chat: &Choice) {
    // A refusal is text in Messages.
    if chat.refusal.is_empty() {
        assert_eq!(seen.text, chat.text);
    } else {
        assert_eq!(seen.text.len(), chat.text.len() + chat.refusal.len());
    }
    assert_eq!(seen.reasoning, chat.reasoning);
    assert_eq!(seen.tool_calls.len(), chat.tool_calls.len());
    for (seen, chat) in seen.tool_calls.iter().zip(&chat.tool_calls) {
        assert_eq!(seen.name, chat.name);
        let value = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_else(|_| json!({}));
        assert!(
            seen.arguments.trim_end() == chat.arguments.trim_end()
                || value(&seen.arguments) == value(&chat.arguments),
            "{seen:?} {chat:?}"
        );
    }
}
