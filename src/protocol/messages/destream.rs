//! A whole message as the event sequence that a client which asked for a stream expects.
//!
//! Values are copied as text; the input of a tool call is one fragment with the bytes that the body has.

use bytes::Bytes;

use crate::protocol::json::{self, Edit, Member, ScanError};

/// The members of a kind of block that a stream sends in deltas, and the deltas' names. Other blocks come whole.
const STREAMED: [(&str, &[(&str, &str)]); 5] = [
    ("text", &[("text", "text_delta")]),
    ("thinking", &[("thinking", "thinking_delta"), ("signature", "signature_delta")]),
    ("tool_use", &[("input", "input_json_delta")]),
    ("server_tool_use", &[("input", "input_json_delta")]),
    ("mcp_tool_use", &[("input", "input_json_delta")]),
];

/// The events of a stream that says what `body` says.
///
/// # Errors
/// [`ScanError`] if `body` is no message.
pub fn destream(body: &[u8]) -> Result<Bytes, ScanError> {
    let top = json::members(body, 0)?;
    let content = json::find(body, &top, "content").filter(|content| body[content.value.start] == b'[');
    let content = content.ok_or(ScanError { expected: "`content`, an array", at: 0 })?;
    let told = |name| json::find(body, &top, name);
    let mut later = vec![Edit::replace(content.value.clone(), b"[]".to_vec())];
    for member in ["stop_reason", "stop_sequence"].into_iter().filter_map(told) {
        later.push(Edit::replace(member.value.clone(), b"null".to_vec()));
    }
    let mut out = Vec::new();
    event(&mut out, "message_start", &[("message", &edited(body, later))]);
    for (index, span) in json::elements(body, content.value.start)?.into_iter().enumerate() {
        block(&mut out, index, &body[span])?;
    }
    let value = |name| told(name).map_or(&b"null"[..], |member| member.text(body));
    let delta =
        [b"{\"stop_reason\":", value("stop_reason"), b",\"stop_sequence\":", value("stop_sequence"), b"}"];
    let delta = delta.concat();
    let mut end = vec![("delta", delta.as_slice())];
    if let Some(usage) = told("usage") {
        end.push(("usage", usage.text(body)));
    }
    event(&mut out, "message_delta", &end);
    event(&mut out, "message_stop", &[]);
    Ok(out.into())
}

fn block(out: &mut Vec<u8>, index: usize, block: &[u8]) -> Result<(), ScanError> {
    let members = json::members(block, 0)?;
    let kind = json::find(block, &members, "type").map(|kind| kind.text(block)).unwrap_or_default();
    let streamed = STREAMED.iter().find(|(name, _)| kind == format!("\"{name}\"").as_bytes());
    let parts = streamed.map(|(_, parts)| *parts).unwrap_or_default();
    let parts: Vec<(&str, &str, &Member)> = parts
        .iter()
        .filter_map(|(name, delta)| Some((*name, *delta, json::find(block, &members, name)?)))
        .collect();
    let start = |(name, _, member): &(&str, &str, &Member)| Edit::replace(member.value.clone(), empty(name));
    let index = index.to_string();
    let begun = edited(block, parts.iter().map(start).collect());
    event(out, "content_block_start", &[("index", index.as_bytes()), ("content_block", &begun)]);
    for (name, delta, member) in parts {
        let value = member.text(block);
        // An input of nothing is an input.
        if value == empty(name) && name != "input" {
            continue;
        }
        let fragment = serde_json::Value::from(String::from_utf8_lossy(value)).to_string();
        let (name, value) =
            if name == "input" { ("partial_json", fragment.as_bytes()) } else { (name, value) };
        let mut text = format!("{{\"type\":\"{delta}\",\"{name}\":").into_bytes();
        text.extend_from_slice(value);
        text.push(b'}');
        event(out, "content_block_delta", &[("index", index.as_bytes()), ("delta", &text)]);
    }
    event(out, "content_block_stop", &[("index", index.as_bytes())]);
    Ok(())
}

/// What a block has in the place of what comes in deltas.
fn empty(name: &str) -> &'static [u8] {
    if name == "input" { b"{}" } else { b"\"\"" }
}

fn edited(text: &[u8], mut edits: Vec<Edit>) -> Vec<u8> {
    edits.sort_by_key(|edit| edit.span.start);
    json::apply(text, &edits)
}

fn event(out: &mut Vec<u8>, name: &str, members: &[(&str, &[u8])]) {
    out.extend_from_slice(format!("event: {name}\ndata: {{\"type\":\"{name}\"").as_bytes());
    for (name, value) in members {
        out.extend_from_slice(format!(",\"{name}\":").as_bytes());
        json::push_compact(out, value);
    }
    out.extend_from_slice(b"}\n\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::messages::Assembler;
    use crate::protocol::sse::Parser;

    #[test]
    fn the_events_say_what_the_body_says() {
        let body = br#"{"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [
            {"type": "thinking", "thinking": "hm\u2028", "signature": "s"}, {"type": "text", "text": "a  \"b"},
            {"type": "tool_use", "id": "t", "name": "view", "input": {"path" : "a.py"}},
            {"type": "tool_use", "id": "u", "name": "ls", "input": {}}, {"type": "redacted_thinking", "data": "x"}],
            "stop_sequence": null, "stop_reason": "tool_use", "usage": {"input_tokens": 3, "output_tokens": 5}}"#;
        let (mut whole, mut streamed) = (Assembler::default(), Assembler::default());
        whole.body(body).expect("a message");
        let mut parser = Parser::new();
        parser.push(&destream(body).expect("a message"));
        let mut names = Vec::new();
        while let Some(event) = parser.next_event() {
            streamed.event(&event.name, &event.data()).expect("an event");
            names.push(event.name);
        }
        assert_eq!(streamed.reply(), whole.reply());
        assert_eq!(streamed.reply().choices[&0].tool_calls[0].arguments, r#"{"path" : "a.py"}"#);
        assert_eq!(
            (names[0].as_str(), names.last().expect("events").as_str()),
            ("message_start", "message_stop")
        );
        assert_eq!(names.iter().filter(|name| *name == "content_block_stop").count(), 5);
        assert_eq!(names.iter().filter(|name| *name == "content_block_delta").count(), 5);
        assert!(destream(b"{\"type\":\"error\"}").is_err());
    }
}
