//! A chat request as lego needs it: a few members are read, all others stay bytes.

use bytes::Bytes;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::protocol::json::{self, Edit, Member};

/// Why a body is not a chat request.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error("the request body is not JSON: {0}")]
    NotJson(serde_json::Error),
    #[error("the request body is not a JSON object")]
    NotAnObject,
    #[error("the request body has no `model` string")]
    NoModel,
    #[error("the request body has no `messages` array")]
    NoMessages,
}

/// A chat request: its bytes, and what lego reads of them.
#[derive(Debug, Clone)]
pub struct Request {
    body: Bytes,
    members: Vec<Member>,
    /// Name of the model that the client asks for.
    pub model: String,
    pub is_stream: bool,
    /// Number of choices asked for.
    pub n: u64,
    /// `stream_options.include_usage` is true.
    pub asks_usage: bool,
    /// `return_token_ids` is true.
    pub asks_token_ids: bool,
    /// `logprobs` is true.
    pub asks_logprobs: bool,
    /// `return_weight_versions` is true.
    pub asks_weight_versions: bool,
    /// `include_reasoning` is false.
    pub refuses_reasoning: bool,
    /// Something else than the policy's own distribution decides tokens: a grammar, a forced tool.
    pub is_constrained: bool,
}

impl Request {
    /// Reads a body.
    ///
    /// # Errors
    /// [`RequestError`] says what is wrong with it.
    pub fn parse(body: Bytes) -> Result<Self, RequestError> {
        serde_json::from_slice::<&RawValue>(&body).map_err(RequestError::NotJson)?;
        let members = json::members(&body, 0).map_err(|_| RequestError::NotAnObject)?;
        let get = |name: &str| {
            json::find(&body, &members, name)
                .and_then(|member| serde_json::from_slice::<Value>(member.text(&body)).ok())
        };
        let is_true = |name: &str| get(name) == Some(Value::Bool(true));
        let has_messages = json::find(&body, &members, "messages")
            .is_some_and(|member| member.text(&body).starts_with(b"["));
        if !has_messages {
            return Err(RequestError::NoMessages);
        }
        let Some(Value::String(model)) = get("model") else {
            return Err(RequestError::NoModel);
        };
        let is_plain_text = match get("response_format") {
            None | Some(Value::Null) => true,
            Some(format) => format["type"] == "text",
        };
        let leaves_tools_open = match get("tool_choice") {
            None | Some(Value::Null) => true,
            Some(choice) => choice == "auto" || choice == "none",
        };
        let has_grammar = [
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "regex",
            "ebnf",
        ]
        .iter()
        .any(|name| get(name).is_some_and(|value| !value.is_null()));
        Ok(Self {
            model,
            is_stream: is_true("stream"),
            n: get("n").and_then(|n| n.as_u64()).unwrap_or(1),
            asks_usage: get("stream_options")
                .is_some_and(|options| options["include_usage"] == Value::Bool(true)),
            asks_token_ids: is_true("return_token_ids"),
            asks_logprobs: is_true("logprobs"),
            asks_weight_versions: is_true("return_weight_versions"),
            refuses_reasoning: get("include_reasoning") == Some(Value::Bool(false)),
            is_constrained: !is_plain_text || !leaves_tools_open || has_grammar,
            members,
            body,
        })
    }

    /// The body as it came.
    #[must_use]
    pub const fn body(&self) -> &Bytes {
        &self.body
    }

    /// The value of a top-level member; `None` if it is absent or null.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Value> {
        let member = json::find(&self.body, &self.members, name)?;
        serde_json::from_slice::<Value>(member.text(&self.body)).ok().filter(|v| !v.is_null())
    }

    /// True if the body has the member, null or not.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        json::find(&self.body, &self.members, name).is_some()
    }

    /// The texts of the messages, in order.
    #[must_use]
    pub fn messages(&self) -> Vec<&[u8]> {
        let Some(member) = json::find(&self.body, &self.members, "messages") else {
            return Vec::new();
        };
        let spans = json::elements(&self.body, member.value.start).unwrap_or_default();
        spans.into_iter().map(|span| &self.body[span]).collect()
    }

    /// The body with members set (in place where the client sent them, else appended) and removed. All other
    /// bytes stay.
    ///
    /// # Errors
    /// [`json::ScanError`] cannot happen for a parsed request; it is passed on rather than hidden.
    pub fn edited(&self, set: &[(&str, String)], remove: &[&str]) -> Result<Bytes, json::ScanError> {
        set_members(&self.body, set, remove).map(Bytes::from)
    }
}

/// An object's text with members set and removed.
///
/// # Errors
/// [`json::ScanError`] if `text` is not an object.
pub fn set_members(text: &[u8], set: &[(&str, String)], remove: &[&str]) -> Result<Vec<u8>, json::ScanError> {
    let members = json::members(text, 0)?;
    let is_removed = |member: &Member| remove.iter().any(|name| member.is_named(text, name));
    let mut edits = Vec::new();
    json::remove_members(&members, &mut edits, is_removed);
    let mut appended = String::new();
    let mut keeps_any = members.iter().any(|member| !is_removed(member));
    for (name, value) in set {
        let mut is_present = false;
        for member in members.iter().filter(|member| member.is_named(text, name)) {
            is_present = true;
            if member.text(text) != value.as_bytes() {
                edits.push(Edit::replace(member.value.clone(), value.clone().into_bytes()));
            }
        }
        if !is_present {
            if keeps_any {
                appended.push(',');
            }
            keeps_any = true;
            appended.push_str(&Value::from(*name).to_string());
            appended.push(':');
            appended.push_str(value);
        }
    }
    if !appended.is_empty() {
        let last = members.last().map_or(json::skip_space(text, 0) + 1, |member| member.value.end);
        edits.push(Edit::replace(last..last, appended.into_bytes()));
    }
    edits.sort_by_key(|edit| (edit.span.start, edit.span.end));
    Ok(json::apply(text, &edits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_keys_and_their_order_stay_as_the_client_sent_them() {
        let text = br#"{ "model": "m", "temperature": 0.70, "big": 12345678901234567890123, "logit_bias": {"1":2}, "messages": [] }"#;
        let request = Request::parse(Bytes::from_static(text)).expect("request");
        let body = request
            .edited(&[("temperature", "1.0".into()), ("seed", "7".into())], &["logit_bias"])
            .expect("object");
        assert_eq!(
            body,
            &br#"{ "model": "m", "temperature": 1.0, "big": 12345678901234567890123, "messages": [],"seed":7 }"#[..]
        );
    }

    #[test]
    fn a_removed_last_member_and_an_appended_one_do_not_collide() {
        let cases: [(&[u8], &str); 4] = [
            (br#"{"a":1,"x":2}"#, r#"{"a":1,"k":0}"#),
            (br#"{"x":2}"#, r#"{"k":0}"#),
            (br"{}", r#"{"k":0}"#),
            (br#"{"k":1,"x":2,"k":3}"#, r#"{"k":0,"k":0}"#),
        ];
        for (text, expected) in cases {
            let out = set_members(text, &[("k", "0".into())], &["x"]).expect("object");
            assert_eq!(String::from_utf8(out).expect("text"), expected);
        }
    }

    #[test]
    fn bodies_that_are_no_chat_request_are_refused_with_the_reason() {
        let reason = |text: &'static str| {
            Request::parse(Bytes::from_static(text.as_bytes())).map(|_| ()).unwrap_err().to_string()
        };
        assert!(reason("{").contains("not JSON"));
        assert!(reason("[]").contains("not a JSON object"));
        assert!(reason(r#"{"messages":[]}"#).contains("`model`"));
        assert!(reason(r#"{"model":"m"}"#).contains("`messages`"));
    }
}
