//! Errors as vLLM sends them: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::engine::EngineError;
use crate::text::TextError;

/// An error on its way to the client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
}

impl ApiError {
    /// 400: the request cannot be answered as it is.
    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message: message.into(), param: None }
    }

    /// 400 about one field.
    pub(super) fn bad_field(field: &str, message: impl Into<String>) -> Self {
        Self { param: Some(field.to_owned()), ..Self::bad_request(message) }
    }

    /// 404.
    pub(super) fn not_found(message: String) -> Self {
        Self { status: StatusCode::NOT_FOUND, message, param: None }
    }

    /// 500.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self { status: StatusCode::INTERNAL_SERVER_ERROR, message: message.into(), param: None }
    }

    /// The body.
    pub(super) fn body(&self) -> Value {
        let kind = match self.status {
            StatusCode::BAD_REQUEST => "BadRequestError",
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
            _ => "InternalServerError",
        };
        json!({"error": {
            "message": self.message, "type": kind, "param": self.param, "code": self.status.as_u16(),
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.body())).into_response()
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let status = match error {
            EngineError::QueueFull { .. } | EngineError::Ended => StatusCode::SERVICE_UNAVAILABLE,
            EngineError::Thread(_)
            | EngineError::Option { .. }
            | EngineError::Cache { .. }
            | EngineError::OtherArchitecture { .. } => StatusCode::INTERNAL_SERVER_ERROR,
            EngineError::PromptTooLong { .. }
            | EngineError::ContextExceeded { .. }
            | EngineError::EmptyPrompt
            | EngineError::TokenOutOfRange { .. }
            | EngineError::Sampling { .. } => StatusCode::BAD_REQUEST,
        };
        Self { status, message: error.to_string(), param: None }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        Self::bad_request(error.to_string())
    }
}
