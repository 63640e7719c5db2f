//! Replies in OpenAI's chat and completions protocols: read, cut, and made into events.

use std::collections::BTreeSet;

use lego::protocol::chat::{Cut, Fed, Reply, Stream, Unasked, cut, destream};
use lego::protocol::json;
use serde_json::Value;

use super::{data, is_body, written};

/// A chat or completions reply, whole or streamed.
pub fn chat_reply(input: &[u8]) {
    let mut reply = Reply::default();
    if is_body(input) {
        feed(&mut reply, input);
        destreamed(input);
    } else {
        // What compares an event with the one before reads the same.
        let mut stream = Stream::default();
        for (_, data) in data(input) {
            let fed = feed(&mut reply, &data);
            assert_eq!(stream.feed(&data).ok(), fed);
            assert_eq!(*stream.reply(), reply);
        }
    }
    // Ids beside the choices are another list than the log-probs in them: the verdict compares the two.
    let is_apart = has(input, b"output_ids") || has(input, b"\\");
    for choice in reply.choices.values() {
        if let (Some(ids), Some(logprobs), false) = (&choice.token_ids, &choice.logprobs, is_apart) {
            assert!(logprobs.len() >= ids.len(), "an id without its place among the log-probs");
        }
        for value in choice.logprobs.iter().flatten().flatten() {
            assert!(value.is_finite() && *value <= 0.0);
        }
        assert_ne!(choice.finish_reason.as_deref(), Some(""));
    }
}

/// True if `part` is in `text`.
fn has(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

fn feed(reply: &mut Reply, data: &[u8]) -> Option<Fed> {
    let before = reply.clone();
    let fed = reply.feed(data);
    match &fed {
        Err(_) => assert_eq!(*reply, before, "what cannot be read adds nothing"),
        Ok(fed) => {
            assert!(!fed.has_error || reply.error.is_some());
            assert!(!fed.has_finish || reply.choices.values().any(|choice| choice.finish_reason.is_some()));
        }
    }
    for unasked in [Unasked::Absent, Unasked::Null] {
        let some = Some(unasked);
        let wanted = Cut {
            token_ids: some,
            prompt_token_ids: some,
            logprobs: Some(Unasked::Null),
            weight_versions: some,
            routed_experts: some,
            meta_info: Some(Unasked::Absent),
            sglext: true,
            empty_text: unasked == Unasked::Null,
            usage: true,
            reasoning: unasked == Unasked::Null,
            model: Some("asked \"name\"".to_owned()),
        };
        cut_out(data, &wanted);
    }
    if let Ok(nothing) = cut(data, &Cut::default()) {
        assert!(nothing.edits.is_empty(), "nothing asked, nothing cut");
    }
    fed.ok()
}

/// What is cut is gone, all else is as it was, and a second cut finds nothing.
fn cut_out(text: &[u8], wanted: &Cut) {
    let Ok(found) = cut(text, wanted) else { return };
    let mut end = 0;
    for edit in &found.edits {
        assert!(edit.span.start >= end, "edits ascend and are disjoint");
        end = edit.span.end;
    }
    let out = json::apply(text, &found.edits);
    let again = cut(&out, wanted).expect("still an object");
    assert!(again.edits.is_empty(), "a second cut finds {:?}", again.edits);
    if serde_json::from_slice::<Value>(text).is_ok() {
        assert!(serde_json::from_slice::<Value>(&out).is_ok(), "JSON stays JSON");
    }
    let (mut before, mut after) = (Reply::default(), Reply::default());
    if before.feed(text).is_err() {
        return;
    }
    after.feed(&out).expect("as readable as before");
    assert_eq!(before.choices.len(), after.choices.len());
    // Engines do not escape the names of members, and ids beside no choice are an event of their own.
    let is_plain = !has(text, b"\\") && !has(text, b"\"output_ids\"");
    for (index, choice) in &before.choices {
        let left = &after.choices[index];
        assert_eq!(
            (&left.text, &left.refusal, &left.tool_calls),
            (&choice.text, &choice.refusal, &choice.tool_calls)
        );
        assert_eq!(left.finish_reason, choice.finish_reason);
        if !wanted.reasoning {
            assert_eq!(left.reasoning, choice.reasoning);
        }
        if is_plain {
            let is_gone =
                left.token_ids.is_none() && left.logprobs.is_none() && left.routed_experts.is_none();
            assert!(is_gone && (!wanted.reasoning || left.reasoning.is_empty()), "{left:?}");
        }
    }
    if is_plain {
        assert!(after.prompt_token_ids.is_none() && after.usage.is_none());
    }
}

/// A body as events: assembled, they say what the body says.
fn destreamed(body: &[u8]) {
    let Ok(events) = destream::events(body, true) else { return };
    let stream = destream::to_stream(&events);
    let Ok(value) = serde_json::from_slice::<Value>(body) else { return };
    let (mut whole, mut streamed) = (Reply::default(), Reply::default());
    if whole.feed(body).is_err() {
        return;
    }
    let read = written(&stream);
    assert_eq!(read.len(), events.len() + 1);
    assert_eq!(read[events.len()].data(), "[DONE]");
    for (event, read) in events.iter().zip(&read) {
        assert_eq!(*event, read.data(), "an event is one line");
        streamed.feed(event).expect("an event of a readable body");
    }
    if !is_chat(&value) {
        return;
    }
    assert_eq!((&streamed.id, streamed.created, &streamed.model), (&whole.id, whole.created, &whole.model));
    assert_eq!(streamed.usage, whole.usage);
    assert_eq!(streamed.choices.len(), whole.choices.len());
    for (index, choice) in &whole.choices {
        let other = &streamed.choices[index];
        assert_eq!(
            (&other.text, &other.reasoning, &other.refusal),
            (&choice.text, &choice.reasoning, &choice.refusal)
        );
        assert_eq!(other.tool_calls, choice.tool_calls);
        assert_eq!(other.finish_reason, choice.finish_reason);
        assert_eq!((&other.token_ids, &other.logprobs), (&choice.token_ids, &choice.logprobs));
    }
}

/// True for a body as servers of chat write it: a choice is there once and has a message, a call has no number, and
/// nothing is said in a second place that events have not.
fn is_chat(body: &Value) -> bool {
    let Some(choices) = body["choices"].as_array() else { return false };
    let indexes: BTreeSet<u64> = choices.iter().map(|choice| choice["index"].as_u64().unwrap_or(0)).collect();
    let is_plain = |choice: &Value| {
        let elsewhere = ["text", "delta", "meta_info"];
        let calls = choice["message"]["tool_calls"].as_array();
        elsewhere.iter().all(|name| choice[*name].is_null())
            && calls.into_iter().flatten().all(|call| call["index"].is_null())
    };
    let elsewhere = ["error", "sglext", "output_ids", "input_ids"];
    indexes.len() == choices.len()
        && choices.iter().all(is_plain)
        && elsewhere.iter().all(|name| body[*name].is_null())
}
