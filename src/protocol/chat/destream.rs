//! A whole chat reply as the event sequence that a client which asked for a stream expects.
//!
//! The input is what is left of the body after the cut, so that what is in it is the client's. Values are copied as
//! text: tool arguments, log-probs and token texts keep their bytes. White space between values goes (an event is one
//! line), and the line ends that JSON lets stand in strings are escaped, since some clients split at them.
//!
//! Invariant: assembling the events gives the reply that assembling the body gives.

use bytes::Bytes;

use crate::protocol::json::{self, Member, ScanError};

/// The body is not a chat reply that events could be made of.
#[derive(Debug, thiserror::Error)]
pub enum DestreamError {
    #[error("the upstream's reply could not be read: {0}")]
    Scan(#[from] ScanError),
    #[error("the upstream's reply has no choices")]
    NoChoices,
    #[error("a choice of the upstream's reply has no message")]
    NoMessage,
}

/// A body's members, by name.
struct Object<'a> {
    text: &'a [u8],
    members: Vec<Member>,
}

impl<'a> Object<'a> {
    fn at(text: &'a [u8], at: usize) -> Result<Self, ScanError> {
        Ok(Self { text, members: json::members(text, at)? })
    }

    /// The member's value; `None` if it is absent or null.
    fn get(&self, name: &str) -> Option<&'a [u8]> {
        let member = json::find(self.text, &self.members, name)?;
        Some(member.text(self.text)).filter(|value| *value != b"null")
    }

    /// Where the member's value begins, if it is a `bracket`.
    fn container(&self, name: &str, bracket: u8) -> Option<usize> {
        let at = json::find(self.text, &self.members, name)?.value.start;
        (self.text.get(at) == Some(&bracket)).then_some(at)
    }
}

/// Data of the events of a stream that says what `body` says, without the final `[DONE]`. `with_usage`: the client
/// asked for usage, which comes in an event of its own.
///
/// For each choice: its role; its reasoning, its text and each tool call as one delta; its finish reason. Log-probs
/// and token ids, if they are in the body, come with the first delta after the role; ids of the prompt with the role.
///
/// # Errors
/// [`DestreamError`] if `body` is no chat reply.
pub fn events(body: &[u8], with_usage: bool) -> Result<Vec<Bytes>, DestreamError> {
    let top = Object::at(body, 0)?;
    let choices = top.container("choices", b'[').ok_or(DestreamError::NoChoices)?;
    let choices = json::elements(body, choices)?;
    if choices.is_empty() {
        return Err(DestreamError::NoChoices);
    }
    let mut head = Writer::default();
    head.text("{");
    for name in ["id", "object", "created", "model", "service_tier", "system_fingerprint"] {
        match (name, top.get(name)) {
            ("object", _) => head.member(name, b"\"chat.completion.chunk\""),
            (_, Some(value)) => head.member(name, value),
            (_, None) => {}
        }
    }
    let mut events = Vec::new();
    let mut rest = Vec::new();
    for choice in choices {
        let choice = Object::at(body, choice.start)?;
        let message = choice.container("message", b'{').ok_or(DestreamError::NoMessage)?;
        let message = Object::at(body, message)?;
        let prompt_ids = top.get("prompt_token_ids").or_else(|| choice.get("prompt_token_ids"));
        events.push(role(&head, &choice, &message, prompt_ids));
        deltas(&head, &choice, &message, &mut rest)?;
    }
    events.append(&mut rest);
    if let Some(usage) = top.get("usage").filter(|_| with_usage) {
        let mut event = head.clone();
        event.member("choices", b"[]");
        event.member("usage", usage);
        event.text("}");
        events.push(event.finish());
    }
    Ok(events)
}

/// Events as they go to the client, the final `[DONE]` after them.
#[must_use]
pub fn to_stream(events: &[Bytes]) -> Bytes {
    let mut out = Vec::with_capacity(events.iter().map(|event| event.len() + 8).sum::<usize>() + 14);
    for event in events {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(event);
        out.extend_from_slice(b"\n\n");
    }
    out.extend_from_slice(b"data: [DONE]\n\n");
    out.into()
}

/// The event that opens a choice.
fn role(head: &Writer, choice: &Object<'_>, message: &Object<'_>, prompt_ids: Option<&[u8]>) -> Bytes {
    let mut delta = Writer::default();
    delta.text("{");
    delta.member("role", message.get("role").unwrap_or(b"\"assistant\""));
    delta.member("content", b"\"\"");
    delta.text("}");
    let mut event = open(head, choice, &delta);
    event.member("logprobs", b"null");
    event.member("finish_reason", b"null");
    event.text("}]");
    if let Some(ids) = prompt_ids {
        event.member("prompt_token_ids", ids);
    }
    event.text("}");
    event.finish()
}

/// What a choice says, and how it ends.
fn deltas(
    head: &Writer,
    choice: &Object<'_>,
    message: &Object<'_>,
    events: &mut Vec<Bytes>,
) -> Result<(), DestreamError> {
    let mut parts: Vec<Writer> = Vec::new();
    let mut part = |members: &[(&str, &[u8])]| {
        let mut delta = Writer::default();
        delta.text("{");
        for (name, value) in members {
            delta.member(name, value);
        }
        delta.text("}");
        parts.push(delta);
    };
    // Releases of vLLM that know both names send both.
    let reasoning: Vec<(&str, &[u8])> = ["reasoning", "reasoning_content"]
        .into_iter()
        .filter_map(|name| Some((name, message.get(name).filter(|text| *text != b"\"\"")?)))
        .collect();
    if !reasoning.is_empty() {
        part(&reasoning);
    }
    for name in ["content", "refusal", "function_call", "audio", "annotations", "reasoning_details"] {
        if let Some(value) = message.get(name).filter(|value| !matches!(*value, b"\"\"" | b"[]")) {
            part(&[(name, value)]);
        }
    }
    if let Some(at) = message.container("tool_calls", b'[') {
        for (index, call) in json::elements(message.text, at)?.into_iter().enumerate() {
            let call = Object::at(message.text, call.start)?;
            let mut list = Writer::default();
            list.text("[{");
            list.member("index", index.to_string().as_bytes());
            for member in &call.members {
                if !member.is_named(call.text, "index") {
                    list.raw_member(&call.text[member.key.clone()], member.text(call.text));
                }
            }
            list.text("}]");
            part(&[("tool_calls", &list.finish())]);
        }
    }
    let finish = choice.get("finish_reason").filter(|reason| *reason != b"\"\"");
    let mut logprobs = choice.get("logprobs");
    let mut token_ids = choice.get("token_ids").or_else(|| choice.get("response_token_ids"));
    // The end is an event of its own; a body without a finish reason ends without one.
    let has_rest = logprobs.is_some() || token_ids.is_some();
    let is_silent = parts.is_empty() && has_rest && finish.is_none();
    if finish.is_some() || is_silent {
        let mut empty = Writer::default();
        empty.text("{}");
        parts.push(empty);
    }
    let count = parts.len();
    for (number, delta) in parts.into_iter().enumerate() {
        let end = finish.filter(|_| number + 1 == count);
        let mut event = open(head, choice, &delta);
        event.member("logprobs", logprobs.take().unwrap_or(b"null"));
        event.member("finish_reason", end.unwrap_or(b"null"));
        if end.is_some() {
            for name in ["stop_reason", "matched_stop", "weight_versions"] {
                if let Some(value) = choice.get(name) {
                    event.member(name, value);
                }
            }
        }
        if let Some(ids) = token_ids.take() {
            event.member("token_ids", ids);
        }
        event.text("}]}");
        events.push(event.finish());
    }
    Ok(())
}

/// An event up to the delta of its one choice, which is left open.
fn open(head: &Writer, choice: &Object<'_>, delta: &Writer) -> Writer {
    let mut event = head.clone();
    event.text(",\"choices\":[{");
    event.member("index", choice.get("index").unwrap_or(b"0"));
    event.member("delta", &delta.out);
    event
}

/// JSON text being written.
#[derive(Clone, Default)]
struct Writer {
    out: Vec<u8>,
}

impl Writer {
    fn text(&mut self, text: &str) {
        self.out.extend_from_slice(text.as_bytes());
    }

    /// A member of the object that is open. `name` needs no escapes.
    fn member(&mut self, name: &str, value: &[u8]) {
        self.raw_member(format!("\"{name}\"").as_bytes(), value);
    }

    fn raw_member(&mut self, key: &[u8], value: &[u8]) {
        if self.out.last() != Some(&b'{') {
            self.out.push(b',');
        }
        self.out.extend_from_slice(key);
        self.out.push(b':');
        json::push_compact(&mut self.out, value);
    }

    fn finish(self) -> Bytes {
        self.out.into()
    }
}

#[cfg(test)]
#[path = "destream_tests.rs"]
mod tests;
