//! The action of a local shell call and the arguments of the function that stands for it.
//!
//! An action is the arguments with `"type":"exec"`, and with an empty `env`, which the protocol wants. On the way
//! back these, and the nulls that clients add, are taken out as spans: the arguments are the bytes that were sampled
//! where the client kept them.

use serde_json::Value;

use crate::protocol::json::{self, Member};

/// The arguments for an action; `None` if it is no object.
pub(super) fn arguments(action: &str) -> Option<String> {
    let text = action.as_bytes();
    let members = json::members(text, 0).ok()?;
    let mut edits = Vec::new();
    let is_ours = |member: &Member| {
        let value = member.text(text);
        let is_empty = value.starts_with(b"{") && json::members(value, 0).is_ok_and(|inner| inner.is_empty());
        member.is_named(text, "type") || value == b"null" || (member.is_named(text, "env") && is_empty)
    };
    json::remove_members(&members, &mut edits, is_ours);
    String::from_utf8(json::apply(text, &edits)).ok()
}

/// The action for a call's arguments; `None` if they do not say what to run.
pub(super) fn action(arguments: &str) -> Option<String> {
    let parsed: Value = serde_json::from_str(arguments).ok()?;
    let command = parsed.get("command")?.as_array()?;
    if command.is_empty() || !command.iter().all(Value::is_string) {
        return None;
    }
    let mut set = vec![("type", "\"exec\"".to_owned())];
    if !parsed.get("env").is_some_and(Value::is_object) {
        set.push(("env", "{}".to_owned()));
    }
    let action = json::set_members(arguments.trim().as_bytes(), &set, &[]).ok()?;
    String::from_utf8(action).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_come_back_as_they_were_sampled() {
        for sampled in
            [r#"{"command": ["ls", "-la"]}"#, r#"{"command":["ls"],  "timeout_ms": 5, "env": {"A": "b"}}"#]
        {
            let action = action(sampled).expect("action");
            let parsed: Value = serde_json::from_str(&action).expect("JSON");
            assert_eq!(parsed["type"], "exec");
            assert!(parsed["env"].is_object());
            assert_eq!(arguments(&action).as_deref(), Some(sampled));
        }
        assert_eq!(
            arguments(r#"{"type":"exec","command":["a"],"user":null,"env":{ }}"#).unwrap(),
            r#"{"command":["a"]}"#
        );
    }

    #[test]
    fn what_cannot_be_run_is_no_action() {
        for arguments in ["", "[]", "{}", r#"{"command":"ls"}"#, r#"{"command":[]}"#, r#"{"command":["ls"]"#]
        {
            assert_eq!(action(arguments), None);
        }
    }
}
