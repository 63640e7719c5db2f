//! A whole completions reply as the events that a client which asked for a stream expects.

use bytes::Bytes;

use crate::protocol::json::{self, Edit, ScanError};

/// Data of the events of a stream that says what `body` says, without the final `[DONE]`: all choices in one event,
/// which has the form of a body, and the usage in one of its own if the client asked for it.
///
/// # Errors
/// [`ScanError`] if `body` is no completions reply.
pub fn events(body: &[u8], with_usage: bool) -> Result<Vec<Bytes>, ScanError> {
    let members = json::members(body, 0)?;
    let choices = json::find(body, &members, "choices").filter(|choices| body[choices.value.start] == b'[');
    let choices = choices.ok_or(ScanError { expected: "`choices`, an array", at: 0 })?;
    let mut edits = Vec::new();
    json::remove_members(&members, &mut edits, |member| member.is_named(body, "usage"));
    let mut events = vec![json::one_line(&json::apply(body, &edits))];
    let usage = json::find(body, &members, "usage").filter(|usage| usage.text(body) != b"null");
    if usage.is_some_and(|_| with_usage) {
        let none = Edit::replace(choices.value.clone(), b"[]".to_vec());
        events.push(json::one_line(&json::apply(body, &[none])));
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_one_event_and_its_usage_another() {
        let body = b"{\n \"id\": \"c\", \"choices\": [{\"text\": \"a  b\"}],\n \"usage\": {\"n\": 1}, \"model\": \"m\"}";
        let first = r#"{"id":"c","choices":[{"text":"a  b"}],"model":"m"}"#;
        let last = r#"{"id":"c","choices":[],"usage":{"n":1},"model":"m"}"#;
        assert_eq!(events(body, false).expect("a reply"), [first]);
        assert_eq!(events(body, true).expect("a reply"), [first, last]);
        assert!(events(b"{\"error\":{}}", true).is_err());
    }
}
