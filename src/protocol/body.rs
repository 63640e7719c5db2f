//! A request's body: its bytes, of which a few members are read.

use bytes::Bytes;
use serde_json::Value;
use serde_json::value::RawValue;

use super::json::{self, Member};

/// Why a body is not a JSON object.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    #[error("the request body is not JSON: {0}")]
    NotJson(serde_json::Error),
    #[error("the request body is not a JSON object")]
    NotAnObject,
}

/// A JSON object as it came.
#[derive(Debug, Clone)]
pub struct Body {
    text: Bytes,
    members: Vec<Member>,
}

impl Body {
    /// Reads a body.
    ///
    /// # Errors
    /// [`BodyError`] if it is no JSON object.
    pub fn parse(text: Bytes) -> Result<Self, BodyError> {
        serde_json::from_slice::<&RawValue>(&text).map_err(BodyError::NotJson)?;
        let members = json::members(&text, 0).map_err(|_| BodyError::NotAnObject)?;
        Ok(Self { text, members })
    }

    /// The body as it came.
    #[must_use]
    pub const fn text(&self) -> &Bytes {
        &self.text
    }

    /// The text of a member's value.
    #[must_use]
    pub fn raw(&self, name: &str) -> Option<&[u8]> {
        json::find(&self.text, &self.members, name).map(|member| member.text(&self.text))
    }

    /// The value of a member; `None` if it is absent or null.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Value> {
        serde_json::from_slice::<Value>(self.raw(name)?).ok().filter(|value| !value.is_null())
    }

    /// True if the member is `true`.
    #[must_use]
    pub fn is_true(&self, name: &str) -> bool {
        self.raw(name) == Some(b"true")
    }

    /// `stream_options.include_usage` is true.
    #[must_use]
    pub fn asks_usage(&self) -> bool {
        self.get("stream_options").is_some_and(|options| options["include_usage"] == Value::Bool(true))
    }

    /// `response_format` or an engine's own members force a grammar on the tokens.
    #[must_use]
    pub fn has_grammar(&self) -> bool {
        let is_plain_text = match self.get("response_format") {
            None => true,
            Some(format) => format["type"] == "text",
        };
        let guides = [
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "regex",
            "ebnf",
        ];
        !is_plain_text || guides.iter().any(|name| self.get(name).is_some())
    }

    /// The body with members set (in place where the client sent them, else appended) and removed. All other
    /// bytes stay.
    ///
    /// # Errors
    /// [`json::ScanError`] cannot happen for a parsed body; it is passed on rather than hidden.
    pub fn edited(&self, set: &[(&str, String)], remove: &[&str]) -> Result<Bytes, json::ScanError> {
        json::set_members(&self.text, set, remove).map(Bytes::from)
    }
}
