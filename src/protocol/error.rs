//! The error body that clients of OpenAI's protocols understand, in one place.

use bytes::Bytes;
use serde_json::{Value, json};

/// Kinds of error, as OpenAI's `type` field names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorType {
    InvalidRequest,
    Authentication,
    NotFound,
    Conflict,
    /// lego or its store failed.
    Server,
    /// The upstream failed.
    Upstream,
}

impl ErrorType {
    /// The name on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request_error",
            Self::Authentication => "authentication_error",
            Self::NotFound => "not_found_error",
            Self::Conflict => "conflict_error",
            Self::Server => "server_error",
            Self::Upstream => "upstream_error",
        }
    }
}

/// An error for a client of the chat protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    pub status: u16,
    pub kind: ErrorType,
    /// For programs: stable, lower case.
    pub code: &'static str,
    /// For people: names the thing and the remedy.
    pub message: String,
}

impl ApiError {
    /// An error with this HTTP status.
    pub fn new(status: u16, kind: ErrorType, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, code, message: message.into() }
    }

    /// What an upstream's error says: the answer with this status, or the event of a stream that had begun.
    ///
    /// A prompt that is too long gets code `context_length_exceeded`, by which each protocol tells its clients not to
    /// try again: engines say so in words only.
    #[must_use]
    pub fn from_upstream(status: u16, body: &[u8], upstream: &str) -> Self {
        let value: Value = serde_json::from_slice(body).unwrap_or_default();
        let error = value.get("error").filter(|error| !error.is_null()).unwrap_or(&value);
        let said = error["message"].as_str().or_else(|| error.as_str()).map(str::to_owned);
        let said = said.unwrap_or_else(|| String::from_utf8_lossy(body).trim().chars().take(500).collect());
        let is_too_long = matches!(status, 400 | 413 | 422 | 502)
            && (error["code"] == "context_length_exceeded" || is_context_overflow(&said));
        let (kind, code) = match status {
            _ if is_too_long => (ErrorType::InvalidRequest, "context_length_exceeded"),
            400 | 413 | 422 => (ErrorType::InvalidRequest, "bad_request"),
            401 | 403 => (ErrorType::Authentication, "upstream_refused_key"),
            404 => (ErrorType::NotFound, "not_found"),
            429 => (ErrorType::Upstream, "rate_limit_exceeded"),
            _ => (ErrorType::Upstream, "upstream_error"),
        };
        let status = if is_too_long { 400 } else { status };
        Self::new(status, kind, code, format!("the upstream at {upstream} answered {status}: {said}"))
    }

    /// True if clients of OpenAI's protocols can read an error's body.
    #[must_use]
    pub fn is_openai(body: &[u8]) -> bool {
        serde_json::from_slice::<Value>(body)
            .is_ok_and(|value| value.get("error").is_some_and(|error| !error.is_null()))
    }

    /// `{"error":{message,type,param,code}}`.
    #[must_use]
    pub fn body(&self) -> Bytes {
        let body = json!({"error": {
            "message": self.message,
            "type": self.kind.as_str(),
            "param": null,
            "code": self.code,
        }});
        Bytes::from(body.to_string())
    }

    /// The body as an event of a stream that has already begun.
    #[must_use]
    pub fn event(&self) -> Bytes {
        let mut event = b"data: ".to_vec();
        event.extend_from_slice(&self.body());
        event.extend_from_slice(b"\n\n");
        Bytes::from(event)
    }
}

/// The ways in which vLLM, SGLang, OpenAI, Anthropic and llama.cpp say that a prompt is too long.
fn is_context_overflow(message: &str) -> bool {
    let message = message.to_lowercase();
    let says = |part: &str| message.contains(part);
    says("context length")
        || says("context window")
        || says("prompt is too long")
        || says("max_model_len")
        || says("maximum model length")
        || says("exceeds the available context")
        || (says("longer than") && says("context"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_that_is_too_long_is_told_apart() {
        let said = r#"{"error":{"message":"This model's maximum context length is 4096 tokens. However, you requested 5000","type":"BadRequestError","code":400}}"#;
        let error = ApiError::from_upstream(400, said.as_bytes(), "u");
        assert_eq!((error.code, error.status), ("context_length_exceeded", 400));
        assert!(error.message.contains("4096 tokens"), "{}", error.message);
        let flat = br#"{"object":"error","message":"The input (9 tokens) is longer than the model's context length","code":400}"#;
        assert_eq!(ApiError::from_upstream(400, flat, "u").code, "context_length_exceeded");
        assert_eq!(ApiError::from_upstream(400, b"{\"error\":\"bad tool\"}", "u").code, "bad_request");
        assert_eq!(ApiError::from_upstream(500, said.as_bytes(), "u").code, "upstream_error");
        assert_eq!(
            ApiError::from_upstream(429, b"<html>", "u").message,
            "the upstream at u answered 429: <html>"
        );
    }
}
