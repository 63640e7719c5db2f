//! A chat request as lego needs it: a few members are read, all others stay bytes.

use std::borrow::Cow;

use bytes::Bytes;
use serde_json::Value;

use crate::protocol::body::{Body, BodyError};
use crate::protocol::{completions, generate, json};

/// Why a body is not a chat request.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error("the request body has no `model` string")]
    NoModel,
    #[error("the request body has no `messages` array")]
    NoMessages,
}

/// A chat request: its bytes, and what lego reads of them.
#[derive(Debug, Clone)]
pub struct Request {
    body: Body,
    /// It is a completions request.
    pub is_completion: bool,
    /// It is one of Responses, for an upstream that speaks that.
    pub is_response: bool,
    /// Name of the model that the client asks for.
    pub model: String,
    pub is_stream: bool,
    /// Number of choices asked for.
    pub n: u64,
    /// Those of them that share a prompt.
    pub n_each: u64,
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
        let body = Body::parse(body)?;
        if !body.raw("messages").is_some_and(|messages| messages.starts_with(b"[")) {
            return Err(RequestError::NoMessages);
        }
        let Some(Value::String(model)) = body.get("model") else {
            return Err(RequestError::NoModel);
        };
        let leaves_tools_open = match body.get("tool_choice") {
            None => true,
            Some(choice) => choice == "auto" || choice == "none",
        };
        let n = body.get("n").and_then(|n| n.as_u64()).unwrap_or(1);
        Ok(Self {
            is_completion: false,
            is_response: false,
            model,
            is_stream: body.is_true("stream"),
            n,
            n_each: n,
            asks_usage: body.asks_usage(),
            asks_token_ids: body.is_true("return_token_ids"),
            asks_logprobs: body.is_true("logprobs"),
            asks_weight_versions: body.is_true("return_weight_versions"),
            refuses_reasoning: body.raw("include_reasoning") == Some(b"false"),
            is_constrained: !leaves_tools_open || body.has_grammar(),
            body,
        })
    }

    /// A completions request, which has a prompt in the place of messages. Its choices are those of all its prompts.
    #[must_use]
    pub fn from_completions(request: &completions::Request) -> Self {
        Self {
            body: request.object().clone(),
            is_completion: true,
            is_response: false,
            model: request.model.clone(),
            is_stream: request.is_stream,
            n: request.choices(),
            n_each: request.n,
            asks_usage: request.asks_usage,
            asks_token_ids: request.asks_token_ids,
            asks_logprobs: request.asks_logprobs,
            asks_weight_versions: request.asks_weight_versions,
            refuses_reasoning: false,
            // With `echo` the log-probs begin with the prompt's: they are not the sampled tokens' alone.
            is_constrained: request.is_constrained || request.asks_echo,
        }
    }

    /// A request of SGLang's native protocol. It need not name a model: one server has one.
    #[must_use]
    pub fn from_generate(request: &generate::Request) -> Self {
        Self {
            body: request.object().clone(),
            is_completion: true,
            is_response: false,
            model: request.model.clone().unwrap_or_default(),
            is_stream: request.is_stream,
            n: request.choices(),
            n_each: request.n,
            // Every event has it.
            asks_usage: true,
            asks_token_ids: true,
            asks_logprobs: request.asks_logprobs,
            asks_weight_versions: true,
            refuses_reasoning: false,
            is_constrained: request.is_constrained,
        }
    }

    /// A request of Responses for an upstream that speaks it itself: whether it is a right one is for that to say.
    ///
    /// # Errors
    /// [`RequestError`] if it is no JSON object that names a model.
    pub fn from_responses(body: Bytes) -> Result<Self, RequestError> {
        let body = Body::parse(body)?;
        let Some(Value::String(model)) = body.get("model") else {
            return Err(RequestError::NoModel);
        };
        let leaves_tools_open =
            body.get("tool_choice").is_none_or(|choice| choice == "auto" || choice == "none");
        let format = body.get("text").map_or(Value::Null, |text| text["format"]["type"].clone());
        Ok(Self {
            is_completion: false,
            is_response: true,
            model,
            is_stream: body.is_true("stream"),
            n: 1,
            n_each: 1,
            // The last event always has it.
            asks_usage: true,
            asks_token_ids: false,
            asks_logprobs: false,
            asks_weight_versions: false,
            refuses_reasoning: false,
            is_constrained: !leaves_tools_open || !(format.is_null() || format == "text"),
            body,
        })
    }

    /// The body as it came.
    #[must_use]
    pub const fn body(&self) -> &Bytes {
        self.body.text()
    }

    /// The body, to be read further.
    #[must_use]
    pub(crate) const fn object(&self) -> &Body {
        &self.body
    }

    /// The value of a top-level member; `None` if it is absent or null.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Value> {
        self.body.get(name)
    }

    /// True if the body has the member, null or not.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.body.raw(name).is_some()
    }

    /// The texts of the messages, in order. Of a request of Responses they are its items, behind its instructions.
    #[must_use]
    pub fn messages(&self) -> Vec<Cow<'_, [u8]>> {
        if self.is_response {
            return self.items();
        }
        let Some(messages) = self.body.raw("messages") else {
            return Vec::new();
        };
        let spans = json::elements(messages, 0).unwrap_or_default();
        spans.into_iter().map(|span| Cow::Borrowed(&messages[span])).collect()
    }

    fn items(&self) -> Vec<Cow<'_, [u8]>> {
        let said = |role: &str, text: &[u8]| {
            let head = format!("{{\"role\":\"{role}\",\"content\":");
            Cow::Owned([head.as_bytes(), text, b"}"].concat())
        };
        let instructions = self.body.raw("instructions").filter(|text| text.starts_with(b"\""));
        let mut items: Vec<Cow<'_, [u8]>> =
            instructions.map(|text| said("system", text)).into_iter().collect();
        let input = self.body.raw("input").unwrap_or(b"null");
        match json::elements(input, 0) {
            Ok(spans) => items.extend(spans.into_iter().map(|span| Cow::Borrowed(&input[span]))),
            Err(_) => items.push(said("user", input)),
        }
        items
    }

    /// The body with members set and removed: [`Body::edited`].
    ///
    /// # Errors
    /// As of [`Body::edited`].
    pub fn edited(&self, set: &[(&str, String)], remove: &[&str]) -> Result<Bytes, json::ScanError> {
        self.body.edited(set, remove)
    }
}

/// A chat request whose system messages behind the first message are said by the user: templates that take a system
/// message only at the beginning refuse others. The conversation's prefix stays what it was from turn to turn.
///
/// # Errors
/// [`json::ScanError`] if the body is no JSON object with a list of messages.
pub fn inline_system_as_user(body: &Bytes) -> Result<Bytes, json::ScanError> {
    let members = json::members(body, 0)?;
    let Some(messages) = json::find(body, &members, "messages") else {
        return Ok(body.clone());
    };
    let mut edits = Vec::new();
    for message in json::elements(body, messages.value.start)?.into_iter().skip(1) {
        let fields = json::members(body, message.start)?;
        let role = json::find(body, &fields, "role").filter(|role| role.text(body) == b"\"system\"");
        if let Some(role) = role {
            edits.push(json::Edit { span: role.value.clone(), with: b"\"user\"".as_slice().into() });
        }
    }
    Ok(if edits.is_empty() { body.clone() } else { Bytes::from(json::apply(body, &edits)) })
}

/// A chat request whose earlier turns have no reasoning, for servers that refuse it.
///
/// # Errors
/// [`json::ScanError`] if the body is no JSON object with a list of messages.
pub fn without_reasoning(body: &Bytes) -> Result<Bytes, json::ScanError> {
    let members = json::members(body, 0)?;
    let Some(messages) = json::find(body, &members, "messages") else {
        return Ok(body.clone());
    };
    let mut edits = Vec::new();
    for message in json::elements(body, messages.value.start)? {
        let fields = json::members(body, message.start)?;
        json::remove_members(&fields, &mut edits, |field| {
            ["reasoning_content", "reasoning"].iter().any(|name| field.is_named(body, name))
        });
    }
    Ok(if edits.is_empty() { body.clone() } else { Bytes::from(json::apply(body, &edits)) })
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
    fn bodies_that_are_no_chat_request_are_refused_with_the_reason() {
        let reason = |text: &'static str| {
            Request::parse(Bytes::from_static(text.as_bytes())).map(|_| ()).unwrap_err().to_string()
        };
        assert!(reason("{").contains("not JSON"));
        assert!(reason("[]").contains("not a JSON object"));
        assert!(reason(r#"{"messages":[]}"#).contains("`model`"));
        assert!(reason(r#"{"model":"m"}"#).contains("`messages`"));
    }

    #[test]
    fn only_system_messages_behind_the_first_message_change_their_role() {
        let body = Bytes::from_static(
            br#"{"messages": [{"role":"system","content":"a"}, {"content":"system","role": "system"},{"role":"user","content":"b"}],"model":"m"}"#,
        );
        let edited = inline_system_as_user(&body).expect("an object");
        let expected = br#"{"messages": [{"role":"system","content":"a"}, {"content":"system","role": "user"},{"role":"user","content":"b"}],"model":"m"}"#;
        assert_eq!(edited, expected.as_slice());
        let plain = Bytes::from_static(br#"{"messages":[{"role":"system","content":"a"}]}"#);
        assert_eq!(inline_system_as_user(&plain).expect("an object"), plain);
        for broken in ["", "[]", r#"{"messages":3}"#, r#"{"messages":[3,4]}"#] {
            assert!(inline_system_as_user(&Bytes::from_static(broken.as_bytes())).is_err(), "{broken}");
        }
    }

    #[test]
    fn reasoning_is_taken_out_of_every_turn_and_of_nothing_else() {
        let body = Bytes::from_static(
            br#"{"model":"m","messages":[{"role":"assistant","reasoning_content":"r","content":"reasoning"},{"reasoning":"r","role": "assistant"}],"reasoning":1}"#,
        );
        let expected = br#"{"model":"m","messages":[{"role":"assistant","content":"reasoning"},{"role": "assistant"}],"reasoning":1}"#;
        assert_eq!(without_reasoning(&body).expect("an object"), expected.as_slice());
        let plain = Bytes::from_static(br#"{"messages":[{"role":"user","content":"a"}]}"#);
        assert_eq!(without_reasoning(&plain).expect("an object"), plain);
    }
}
