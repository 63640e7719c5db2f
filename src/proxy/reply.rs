//! Responses that lego makes itself: the one place where an error becomes one.

use std::panic::AssertUnwindSafe;

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use futures_util::FutureExt as _;
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

/// True for a client of Anthropic's protocol: they say its version with every request.
pub(super) fn is_anthropic(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

/// The protocol that a request belongs to, for errors before it is read: by its path, and by its headers where the path
/// is in both.
pub(super) fn api_of(path: &str, headers: &HeaderMap) -> ClientApi {
    // By its end: a client whose base URL is wrong is told so in its own protocol.
    let ends = |route: &str| path.trim_end_matches('/').ends_with(route);
    if ends("/messages") || ends("/messages/count_tokens") {
        ClientApi::AnthropicMessages
    } else if ends("/responses") || path.contains("/responses/") {
        ClientApi::OpenaiResponses
    } else if ends("/generate") {
        ClientApi::SglangGenerate
    } else if ends("/completions") && !ends("/chat/completions") {
        ClientApi::OpenaiCompletions
    } else if is_anthropic(headers) && !ends("/chat/completions") {
        ClientApi::AnthropicMessages
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

/// Answers in the client's protocol where what is behind panics.
pub(super) async fn caught(request: Request, next: Next) -> Response {
    let api = api_of(request.uri().path(), request.headers());
    // What a handler shares with others is behind locks whose poison is seen to.
    match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(_) => {
            let message = "lego has a bug: this request's handler panicked; see its log";
            error(api, &ApiError::new(500, ErrorType::Server, "internal_error", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::middleware;
    use axum::routing::post;
    use tower::ServiceExt as _;

    use super::*;

    #[tokio::test]
    async fn a_panic_is_told_in_the_clients_protocol() {
        async fn broken() -> &'static str {
            panic!("a bug")
        }
        let router = Router::new().fallback(post(broken)).layer(middleware::from_fn(caught));
        for (path, is_messages) in [
            ("/v1/messages", true),
            ("/sessions/s/v1/messages", true),
            ("/v1/chat/completions", false),
            ("/v1/responses", false),
        ] {
            let request = Request::post(path).body(Body::empty()).expect("a request");
            let response = router.clone().oneshot(request).await.expect("an answer");
            assert_eq!(response.status(), 500);
            let body = axum::body::to_bytes(response.into_body(), 10_000).await.expect("a body");
            let body: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
            assert_eq!(body["type"] == "error", is_messages, "{path} {body}");
            assert!(body["error"]["message"].as_str().expect("text").contains("panicked"));
        }
    }

    #[test]
    fn a_route_of_both_protocols_answers_in_its_clients() {
        let headers = HeaderMap::from_iter([(
            HeaderName::from_static("anthropic-version"),
            HeaderValue::from_static("2023-06-01"),
        )]);
        assert_eq!(api_of("/v1/models", &headers), ClientApi::AnthropicMessages);
        assert_eq!(api_of("/v1/chat/completions", &headers), ClientApi::OpenaiChat);
        assert_eq!(api_of("/v1/models", &HeaderMap::new()), ClientApi::OpenaiChat);
    }
}
