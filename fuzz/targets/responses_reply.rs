//! OpenAI's Responses as an upstream's own reply.

use lego::protocol::chat::{Cut, Reply};
use lego::protocol::error::{ApiError, ErrorType};
use lego::protocol::json;
use lego::protocol::responses::{Assembler, cut};
use serde_json::Value;

use super::{data, events, is_body, names, pieces};

/// A response of an upstream, whole or streamed: read the same however it is split, and with what is known of it
/// forgotten on the way; it ends once; what lego says within it can be read, and says nothing of its own.
pub fn responses_reply(input: &[u8]) {
    let reply = if is_body(input) {
        named(input);
        let mut assembler = Assembler::default();
        match assembler.body(input) {
            Err(_) => assert_eq!(*assembler.reply(), Reply::default(), "what cannot be read adds nothing"),
            Ok(done) => assert!(done.must_hold && done.is_end),
        }
        assembler.into_reply()
    } else {
        let reply = streamed(&[input]);
        assert_eq!(reply, streamed(&pieces(input)));
        forgotten(input, &reply);
        reply
    };
    assert!(reply.choices.keys().all(|index| *index == 0), "Responses has one choice");
    if let Some(choice) = reply.choices.get(&0) {
        assert!(choice.token_ids.is_none() && choice.logprobs.is_none(), "ids are never made of texts");
        assert_ne!(choice.finish_reason.as_deref(), Some(""));
    }
}

fn streamed(pieces: &[&[u8]]) -> Reply {
    let mut assembler = Assembler::default();
    let mut is_over = false;
    for event in events(pieces).iter().filter(|event| event.has_data() && !event.is_unterminated) {
        let before = assembler.reply().clone();
        named(&event.data());
        match assembler.event(&event.name, &event.data()) {
            Err(_) => assert_eq!(*assembler.reply(), before, "what cannot be read adds nothing"),
            Ok(done) => {
                assert!(
                    !is_over || (*assembler.reply() == before && !done.is_end),
                    "nothing follows the end"
                );
                assert!(!done.fed.has_error || (assembler.reply().error.is_some() && done.is_end));
                let is_finished = assembler.reply().is_finished(1);
                assert!(!done.fed.has_finish || (done.must_hold && done.is_end && is_finished));
                is_over |= done.is_end;
            }
        }
        said(&assembler, is_over);
    }
    assembler.into_reply()
}

/// The events of lego's own, at any place of the stream.
fn said(assembler: &Assembler, is_over: bool) {
    let in_progress = assembler.in_progress();
    let error = ApiError::new(502, ErrorType::Upstream, "upstream_truncated", "it \"broke\"\noff");
    let failed = assembler.failed(&error, &names());
    assert!(!is_over || (in_progress.is_none() && failed.is_empty()), "nothing follows the end");
    assert!(is_over || failed.last().is_some_and(|(kind, _)| *kind == "response.failed"));
    let mut other = Assembler::default();
    let all = in_progress.into_iter().map(|data| ("response.in_progress", data)).chain(failed);
    for (kind, data) in all {
        assert!(!data.contains(['\n', '\r']), "an event is one line");
        let value: Value = serde_json::from_str(&data).expect("JSON");
        assert_eq!(value["type"], kind);
        assert!(value["sequence_number"].is_u64() && !value["response"].is_null());
        let done = other.event(kind, data.as_bytes()).expect("an event");
        assert_eq!(done.is_end, kind == "response.failed");
        assert!(!done.fed.has_finish);
    }
    assert_eq!(other.reply().error.is_some(), !is_over);
}

/// What is asked of a reply while it comes is the same, and nothing grows.
fn forgotten(input: &[u8], whole: &Reply) {
    let mut assembler = Assembler::default();
    for (name, data) in data(input) {
        let _ = assembler.event(&name, &data);
        assembler.forget();
        for choice in assembler.reply().choices.values() {
            assert_eq!(choice.text.capacity() + choice.reasoning.capacity() + choice.refusal.capacity(), 0);
        }
    }
    let short = assembler.into_reply();
    if data(input).len() < events(&[input]).len() {
        return;
    }
    assert_eq!((&short.id, &short.error, short.usage), (&whole.id, &whole.error, whole.usage));
    assert_eq!(short.is_finished(1), whole.is_finished(1));
}

/// The client's name for the model takes the place of the upstream's, and nothing else changes.
fn named(text: &[u8]) {
    let wanted = Cut { model: Some("asked \"name\"".to_owned()), ..Cut::default() };
    let Ok(found) = cut(text, &wanted) else { return };
    let out = json::apply(text, &found.edits);
    let again = cut(&out, &wanted).expect("still an object");
    assert!(again.edits.is_empty() && !found.is_dropped);
    assert!(cut(text, &Cut::default()).expect("an object").edits.is_empty(), "nothing asked, nothing cut");
    if let (Ok(before), Ok(mut after)) =
        (serde_json::from_slice::<Value>(text), serde_json::from_slice::<Value>(&out))
    {
        let inner = if before["response"].is_object() { &mut after["response"] } else { &mut after };
        let own = if before["response"].is_object() { &before["response"] } else { &before };
        if let Some(model) = inner.get_mut("model") {
            *model = own["model"].clone();
        }
        assert_eq!(before, after);
    }
}
