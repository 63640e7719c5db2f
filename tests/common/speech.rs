//! What clients of each protocol say, and how they read an answer.
#![allow(dead_code)]

use eventsource_stream::Eventsource as _;
use futures_util::{FutureExt as _, StreamExt as _};
use serde_json::{Value, json};

pub fn messages(stream: bool) -> Value {
    json!({
        "model": "claude-x", "max_tokens": 64, "stream": stream, "system": [{"type": "text", "text": "be brief"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}]}],
        "tools": [{"name": "view", "description": "d", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}],
        "metadata": {"user_id": "u"}
    })
}

pub fn responses(stream: bool) -> Value {
    json!({
        "model": "gpt-x", "stream": stream, "store": false, "instructions": "be brief",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}]}],
        "tools": [{"type": "function", "name": "view", "parameters": {"type": "object"}, "strict": false}],
        "parallel_tool_calls": true, "include": ["reasoning.encrypted_content"]
    })
}

/// (name, data) of every event, as a parser that is not lego's reads them.
pub fn events(stream: &[u8]) -> Vec<(String, Value)> {
    let pieces = futures_util::stream::iter([Ok::<_, std::convert::Infallible>(stream)]);
    let events = pieces.eventsource().map(|event| {
        let event = event.expect("an event");
        // Without a name, an event is a message.
        let name = if event.event == "message" { String::new() } else { event.event };
        (name, serde_json::from_str(&event.data).expect("JSON"))
    });
    events.collect::<Vec<_>>().now_or_never().expect("all bytes are there")
}
