//! A whole chat reply as a Messages body.

use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::ids;
use super::stop::{MessageUsage, is_object, stop};
use super::view::View;
use crate::protocol::chat::add_fragment;
use crate::protocol::translate::{ReplyNames, Untranslatable};

#[derive(Serialize)]
struct Message<'a> {
    id: String,
    r#type: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<Block>,
    stop_reason: &'static str,
    stop_sequence: Option<String>,
    usage: Box<RawValue>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Prose {
    Thinking { thinking: String, signature: String },
    Text { text: String },
}

#[derive(Serialize)]
#[serde(untagged)]
enum Block {
    Prose(Prose),
    ToolUse { r#type: &'static str, id: String, name: String, input: Box<RawValue> },
}

/// The body: thinking, then text, then calls, since a chat reply has no other order.
pub(super) fn body(names: &ReplyNames, chat: &[u8]) -> Result<Bytes, Untranslatable> {
    let view = View::read(chat)?;
    let usage = MessageUsage::of(view.usage());
    let mut choices = view.into_choices().into_iter();
    let (Some(choice), None) = (choices.next(), choices.next()) else {
        return Err(Untranslatable("it has not exactly one choice".to_owned()));
    };
    let finish_reason = choice.finish_reason().map(str::to_owned);
    let matched = choice.matched().map(str::to_owned);
    let delta = choice.into_delta();
    let mut content = Vec::new();
    if !delta.reasoning().is_empty() {
        let signature = ids::signature(&names.call_id);
        let thinking = delta.reasoning().to_owned();
        content.push(Block::Prose(Prose::Thinking { thinking, signature }));
    }
    let is_refusal = !delta.refusal().is_empty();
    let text = [delta.text(), delta.refusal()].concat();
    if !text.is_empty() {
        content.push(Block::Prose(Prose::Text { text }));
    }
    let mut calls = Vec::new();
    for fragment in delta.tool_calls.unwrap_or_default() {
        add_fragment(&mut calls, fragment);
    }
    let stop =
        stop(finish_reason.as_deref(), matched.as_deref(), is_refusal, &calls).map_err(Untranslatable)?;
    for (index, call) in calls.into_iter().enumerate() {
        if call.name.is_empty() {
            return Err(Untranslatable("it has a tool call without a name".to_owned()));
        }
        let id =
            if call.id.is_empty() { ids::made_up(&names.call_id, index) } else { ids::to_client(&call.id) };
        let input = input(call.arguments)?;
        content.push(Block::ToolUse { r#type: "tool_use", id, name: call.name, input });
    }
    if content.is_empty() {
        content.push(Block::Prose(Prose::Text { text: String::new() }));
    }
    let message = Message {
        id: ids::message(&names.call_id),
        r#type: "message",
        role: "assistant",
        model: &names.model,
        content,
        stop_reason: stop.reason,
        stop_sequence: stop.sequence,
        usage: raw(usage.json())?,
    };
    serde_json::to_vec(&message).map(Bytes::from).map_err(|error| Untranslatable(error.to_string()))
}

/// A call's `input`: the argument bytes if they are an object, else the text under the name `_raw`, by which a reader
/// sees that the model did not write an object.
fn input(arguments: String) -> Result<Box<RawValue>, Untranslatable> {
    if arguments.trim().is_empty() {
        return raw("{}".to_owned());
    }
    if is_object(&arguments) {
        return raw(arguments);
    }
    raw(serde_json::json!({"_raw": Value::from(arguments)}).to_string())
}

fn raw(json: String) -> Result<Box<RawValue>, Untranslatable> {
    RawValue::from_string(json).map_err(|error| Untranslatable(error.to_string()))
}
