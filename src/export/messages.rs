//! What a call was asked and what it answered, as messages of OpenAI's chat.

use bytes::Bytes;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::protocol::chat::Reply;
use crate::protocol::translate::ReplyNames;
use crate::protocol::{messages, responses};
use crate::record::{Call, CallKind, CallStatus, ClientApi};

/// The conversation that a call goes on.
#[derive(Debug)]
pub(super) struct Asked {
    pub messages: Vec<Value>,
    pub tools: Option<Vec<Value>>,
}

/// What the model was given, as far as it was given messages.
///
/// # Errors
/// Why there are none.
pub(super) fn asked(call: &Call) -> Result<Asked, &'static str> {
    let body = chat_body(call)?;
    let mut body: Value = serde_json::from_slice(&body).map_err(|_| "its request is no JSON")?;
    let Value::Array(messages) = body["messages"].take() else { return Err("its request has no messages") };
    if messages.is_empty() {
        return Err("its request has no messages");
    }
    let tools = match body["tools"].take() {
        Value::Array(tools) if !tools.is_empty() => Some(tools),
        _ => None,
    };
    Ok(Asked { messages, tools })
}

/// The request as a chat body: as it was sent, or else what lego makes of the harness's own protocol.
fn chat_body(call: &Call) -> Result<Bytes, &'static str> {
    let own = call.client_request.as_ref().ok_or("its request was not kept")?.bytes();
    if call.upstream_api == ClientApi::OpenaiChat {
        return Ok(call.upstream_request.as_ref().map_or(own, |body| body.bytes()).clone());
    }
    let names =
        || ReplyNames { call_id: call.call_id.to_string(), model: call.model_requested.clone(), created: 0 };
    let translated = match call.client_api {
        ClientApi::OpenaiChat => return Ok(own.clone()),
        ClientApi::AnthropicMessages => messages::translate(own, names()),
        ClientApi::OpenaiResponses => responses::translate(own, names(), None),
        _ => return Err("its prompt is no conversation"),
    };
    translated.map(|translation| translation.chat).map_err(|_| "its request cannot be said in chat's form")
}

/// Why nobody should learn from the call's reply; `None`: it is whole.
pub(super) fn defect(call: &Call) -> Option<String> {
    if !matches!(call.kind, CallKind::Policy | CallKind::Unknown) {
        return Some(format!("kind {}", call.kind.as_str()));
    }
    if call.status != CallStatus::Ok {
        return Some(format!("status {}", call.status.as_str()));
    }
    match call.finish_reason.as_deref() {
        None => return Some("no finish_reason".to_owned()),
        Some("length") => return Some("reply was cut off (length)".to_owned()),
        Some(_) => {}
    }
    let has_text = call.text.as_ref().is_some_and(|text| !text.is_empty());
    let has_tools = call.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty());
    (!has_text && !has_tools).then(|| "empty reply".to_owned())
}

/// The reply, as it was sampled: arguments of tools are the sampled text.
pub(super) fn reply(call: &Call) -> Value {
    let mut message = Map::new();
    message.insert("role".to_owned(), "assistant".into());
    message.insert("content".to_owned(), call.text.as_deref().filter(|text| !text.is_empty()).into());
    if let Some(reasoning) = reasoning(call) {
        message.insert("reasoning_content".to_owned(), reasoning.into());
    }
    let tools = call.tool_calls.iter().flatten().map(|tool| {
        let function = json!({"name": tool.name, "arguments": tool.arguments});
        json!({"id": tool.id, "type": "function", "function": function})
    });
    let tools: Vec<Value> = tools.collect();
    if !tools.is_empty() {
        message.insert("tool_calls".to_owned(), tools.into());
    }
    Value::Object(message)
}

/// What the model thought, where its reply tells that apart.
fn reasoning(call: &Call) -> Option<String> {
    let response = call.response.as_ref().filter(|_| call.upstream_api == ClientApi::OpenaiChat)?.get();
    let events: Vec<&RawValue> = match response.starts_with('[') {
        true => serde_json::from_str(response).ok()?,
        false => vec![serde_json::from_str(response).ok()?],
    };
    let mut reply = Reply::default();
    for event in events {
        // Not all events are chunks.
        let _ = reply.feed(event.get().as_bytes());
    }
    reply.choices.remove(&call.choice_index).map(|choice| choice.reasoning).filter(|text| !text.is_empty())
}

/// Whether a message that a harness sent back is the reply `sampled`: the same text, and the same calls of tools with the
/// same arguments in the same order. Their ids may be others: a translated protocol has ids of its own.
pub(super) fn is_same_reply(sent: &Value, sampled: &Value) -> bool {
    text(&sent["content"]).ok() == text(&sampled["content"]).ok() && same_tools(sent, sampled)
}

fn same_tools(sent: &Value, sampled: &Value) -> bool {
    let calls = |message: &Value| message["tool_calls"].as_array().cloned().unwrap_or_default();
    let (sent, sampled) = (calls(sent), calls(sampled));
    sent.len() == sampled.len()
        && sent.iter().zip(&sampled).all(|(sent, sampled)| {
            let (sent, sampled) = (&sent["function"], &sampled["function"]);
            sent["name"] == sampled["name"] && arguments(sent) == arguments(sampled)
        })
}

/// Arguments of a tool as a value, or as text where they are no JSON.
pub(super) fn arguments(function: &Value) -> Value {
    let arguments = &function["arguments"];
    let read = arguments.as_str().and_then(|text| serde_json::from_str(text).ok());
    read.unwrap_or_else(|| arguments.clone())
}

/// A content that is text alone; nothing is an empty one.
///
/// # Errors
/// It has something else.
pub(super) fn text(content: &Value) -> Result<String, &'static str> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let texts = parts.iter().map(|part| match part["type"].as_str() {
                Some("text") => part["text"].as_str().ok_or("content that is not text"),
                _ => Err("content that is not text"),
            });
            Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        _ => Err("content that is not text"),
    }
}
