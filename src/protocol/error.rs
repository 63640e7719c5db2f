//! The error body that clients of OpenAI's protocols understand, in one place.

use bytes::Bytes;
use serde_json::json;

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
