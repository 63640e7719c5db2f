//! Errors in the shape that Messages clients understand.

use bytes::Bytes;
use serde_json::json;

use super::events;
use crate::protocol::error::ApiError;

/// Code of an error that says that the prompt does not fit into the model's window.
const TOO_LONG_CODE: &str = "context_length_exceeded";
/// Clients find out by this beginning that they must compact the conversation.
const TOO_LONG: &str = "prompt is too long";

/// The HTTP status to answer with. A prompt that does not fit is always 400, whatever the upstream said.
#[must_use]
pub fn error_status(error: &ApiError) -> u16 {
    if error.code == TOO_LONG_CODE { 400 } else { error.status }
}

/// `{"type":"error","error":{type,message},"request_id"}`. `call_id` is the call's, `None` if it never got one.
#[must_use]
pub fn error_body(error: &ApiError, call_id: Option<&str>) -> Bytes {
    let mut body = json!({
        "type": "error",
        "error": {"type": error_type(error_status(error)), "message": message(error)},
    });
    if let Some(call_id) = call_id {
        body["request_id"] = call_id.into();
    }
    Bytes::from(body.to_string())
}

/// The same as an event of a stream that has already begun.
#[must_use]
pub fn error_event(error: &ApiError, call_id: Option<&str>) -> Bytes {
    let body = error_body(error, call_id);
    let mut event = b"event: error\ndata: ".to_vec();
    events::push_line_safe(&mut event, &body);
    event.extend_from_slice(b"\n\n");
    Bytes::from(event)
}

/// The vendor's name for a status; what it has no name for goes by its class.
#[must_use]
pub const fn error_type(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        408 | 504 => "timeout_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        400..500 => "invalid_request_error",
        _ => "api_error",
    }
}

fn message(error: &ApiError) -> String {
    if error.code == TOO_LONG_CODE && !error.message.starts_with(TOO_LONG) {
        return format!("{TOO_LONG}: {}", error.message);
    }
    error.message.clone()
}
