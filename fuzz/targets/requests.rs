//! Request bodies: what passes keeps its bytes, what is translated is a chat request.

use std::borrow::Cow;

use bytes::Bytes;
use lego::protocol::chat::{self, inline_system_as_user};
use lego::protocol::error::ApiError;
use lego::protocol::json::{self, Edit};
use lego::protocol::{completions, messages, responses};
use serde_json::Value;

use super::names;

/// Chat and completions: read, and edited in place.
pub fn openai_request(data: &[u8]) {
    let body = Bytes::copy_from_slice(data);
    if let Ok(request) = completions::Request::parse(body.clone()) {
        assert_eq!(request.body(), data);
        assert!(!request.prompts.is_empty());
        for choice in 0..=u16::MAX {
            let is_asked = u64::from(choice) < request.choices();
            assert_eq!(request.prompt_of(choice).is_some(), is_asked, "choice {choice}");
            if !is_asked || choice > 40 {
                break;
            }
        }
        let as_chat = chat::Request::from_completions(&request);
        assert_eq!((as_chat.n, as_chat.body()), (request.choices(), request.body()));
        edits(data, &|set, remove| request.edited(set, remove).expect("an object"));
    }
    if let Ok(request) = chat::Request::parse(body.clone()) {
        assert_eq!(request.body(), data);
        for message in request.messages() {
            serde_json::from_slice::<Value>(&message).map_or_else(is_beyond_reach, |_| ());
        }
        edits(data, &|set, remove| request.edited(set, remove).expect("an object"));
        if let Ok(inlined) = inline_system_as_user(&body) {
            let again = inline_system_as_user(&inlined).expect("as before");
            assert_eq!(again, inlined, "inlining is done once");
            let inlined = chat::Request::parse(inlined).expect("a request");
            assert_eq!(inlined.messages().len(), request.messages().len());
        }
    }
}

/// JSON that a `Value` cannot hold although it is JSON: too deep, or a number beyond an `f64`.
fn is_beyond_reach(error: serde_json::Error) {
    let message = error.to_string();
    let is_known = ["recursion limit", "number out of range", "surrogate", "hex escape"];
    assert!(is_known.iter().any(|part| message.contains(part)), "{message}");
}

/// Edits change what they name and nothing else, and are done once.
fn edits(data: &[u8], edited: &dyn Fn(&[(&str, String)], &[&str]) -> Bytes) {
    assert_eq!(edited(&[], &[]), data);
    let set = [("seed", "7".to_owned()), ("logprobs", "true".to_owned())];
    let after = edited(&set, &["logit_bias", "stop"]);
    let Ok(mut expected) = serde_json::from_slice::<Value>(data) else { return };
    let members = expected.as_object_mut().expect("an object");
    for name in ["logit_bias", "stop"] {
        members.shift_remove(name);
    }
    members.insert("seed".to_owned(), Value::from(7));
    members.insert("logprobs".to_owned(), Value::from(true));
    assert_eq!(serde_json::from_slice::<Value>(&after).expect("JSON"), expected);
    let again = json::set_members(&after, &set, &["logit_bias", "stop"]).expect("an object");
    assert_eq!(again, after);
}

/// The messages of a translated request, as they are written.
fn translated(chat: &Bytes) -> Vec<Vec<u8>> {
    let request = chat::Request::parse(chat.clone()).expect("a chat request");
    request.messages().into_iter().map(Cow::into_owned).collect()
}

fn refused(error: &ApiError) {
    assert_eq!(error.status, 400, "{}", error.message);
    assert!(!error.message.is_empty());
}

/// The body with one more turn of the user; all that was there keeps its bytes.
fn with_turn(data: &[u8], list: &str) -> Option<Bytes> {
    let members = json::members(data, 0).ok()?;
    let turns = json::find(data, &members, list)?.value.clone();
    let comma = if json::elements(data, turns.start).ok()?.is_empty() { "" } else { "," };
    let turn = format!(r#"{comma}{{"role":"user","content":"and one more"}}"#);
    let at = turns.end - 1;
    Some(Bytes::from(json::apply(data, &[Edit::replace(at..at, turn.into_bytes())])))
}

/// Messages and `count_tokens`: refused with a reason, or a chat request whose messages stay when a turn is added.
pub fn messages_request(data: &[u8]) {
    let body = Bytes::copy_from_slice(data);
    let counted = messages::count_request(&body);
    match messages::translate(&body, names()) {
        Err(error) => refused(&error),
        Ok(translation) => {
            let before = translated(&translation.chat);
            let counted =
                counted.unwrap_or_else(|error| panic!("counted as it is called: {}", error.message));
            let members = json::members(&counted, 0).expect("an object");
            let messages = json::find(&counted, &members, "messages").expect("messages").value.start;
            let spans = json::elements(&counted, messages).expect("a list");
            let same = spans.into_iter().map(|span| counted[span].to_vec()).eq(before.iter().cloned());
            assert!(same, "the same prompt is counted");
            if let Some(Ok(longer)) =
                with_turn(data, "messages").map(|body| messages::translate(&body, names()))
            {
                extends(&before, &translated(&longer.chat));
            }
        }
    }
}

/// Responses: refused with a reason, or a chat request whose messages stay when a turn is added; and as it passes.
pub fn responses_request(data: &[u8]) {
    let body = Bytes::copy_from_slice(data);
    if let Ok(request) = chat::Request::from_responses(body.clone()) {
        assert_eq!(request.body(), data);
        let before = request.messages();
        for message in &before {
            serde_json::from_slice::<Value>(message).map_or_else(is_beyond_reach, |_| ());
        }
        edits(data, &|set, remove| request.edited(set, remove).expect("an object"));
        if let Some(Ok(longer)) = with_turn(data, "input").map(chat::Request::from_responses) {
            assert_eq!(longer.messages()[..before.len()], before[..], "all that was said stays");
        }
    }
    for earlier in [None, Some([Bytes::from_static(br#"{"role":"user","content":"before"}"#)])] {
        let earlier = earlier.as_ref().map(<[Bytes; 1]>::as_slice);
        match responses::translate(&body, names(), earlier) {
            Err(error) => refused(&error),
            Ok(translation) => {
                let before = translated(&translation.chat);
                let longer = with_turn(data, "input");
                if let Some(Ok(longer)) = longer.map(|body| responses::translate(&body, names(), earlier)) {
                    extends(&before, &translated(&longer.chat));
                }
            }
        }
    }
}

/// All messages of the shorter conversation begin the longer one. Where its last one is the user's, as the added one
/// is, the two may be one.
fn extends(before: &[Vec<u8>], after: &[Vec<u8>]) {
    let has =
        |message: &[u8], part: &str| message.windows(part.len()).any(|window| window == part.as_bytes());
    let last = before.last().filter(|_| after.len() == before.len());
    let is_joined = last.is_some_and(|message| has(message, r#""role":"user""#));
    let kept = before.len() - usize::from(is_joined);
    assert!(after.len() > kept, "the added turn is there");
    assert!(
        before[..kept] == after[..kept],
        "{:?} {:?}",
        before.concat().escape_ascii(),
        after.concat().escape_ascii()
    );
    assert!(has(&after[after.len() - 1], "and one more"));
}
