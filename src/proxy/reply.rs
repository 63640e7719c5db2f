//! Responses that lego makes itself: the one place where an error becomes one.

use std::any::Any;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::{HeaderName, StatusCode};

use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::messages;
use crate::record::{CallId, ClientApi};

/// Names the call in every reply.
pub(super) const CALL_ID: HeaderName = HeaderName::from_static("x-lego-call-id");

/// A response with a whole body.
pub(super) fn whole(status: StatusCode, headers: HeaderMap, body: Bytes) -> Response {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// An error in the client's protocol.
pub(super) fn error(api: ClientApi, error: &ApiError) -> Response {
    let code = match api {
        ClientApi::AnthropicMessages => messages::error_status(error),
        _ => error.status,
    };
    let status = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if error.status == 429 {
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    whole(status, headers, error_body(api, error))
}

/// The body of an error in the client's protocol.
pub(super) fn error_body(api: ClientApi, error: &ApiError) -> Bytes {
    match api {
        ClientApi::AnthropicMessages => messages::error_body(error, None),
        _ => error.body(),
    }
}

/// The protocol that a path belongs to, for errors before the request is read.
pub(super) fn api_of(path: &str) -> ClientApi {
    // By its end: a client whose base URL is wrong is told so in its own protocol.
    let ends = |route: &str| path.trim_end_matches('/').ends_with(route);
    if ends("/messages") || ends("/messages/count_tokens") {
        ClientApi::AnthropicMessages
    } else if ends("/responses") {
        ClientApi::OpenaiResponses
    } else if ends("/generate") {
        ClientApi::SglangGenerate
    } else if ends("/completions") && !ends("/chat/completions") {
        ClientApi::OpenaiCompletions
    } else {
        ClientApi::OpenaiChat
    }
}

/// Adds the call's id.
pub(super) fn with_call_id(mut response: Response, call_id: CallId) -> Response {
    if let Ok(value) = HeaderValue::from_str(&call_id.to_string()) {
        response.headers_mut().insert(CALL_ID, value);
    }
    response
}

/// Headers of a stream that nothing on the way may hold back.
pub(super) fn stream_headers(headers: &mut HeaderMap) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform"));
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
}

/// A handler panicked.
pub(super) fn panicked(_panic: Box<dyn Any + Send + 'static>) -> Response {
    let message = "lego has a bug: this request's handler panicked; see its log";
    error(ClientApi::OpenaiChat, &ApiError::new(500, ErrorType::Server, "internal_error", message))
}
