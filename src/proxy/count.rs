//! `POST …/v1/messages/count_tokens`: answered by the upstream's tokenizer. No turn of a conversation, so no record.

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};

use super::{Inner, Shared, call, identify, reply, whole};
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::messages;
use crate::record::{ClientApi, UpstreamKind};
use crate::upstream::UpstreamReply;

/// The handler.
pub(super) async fn count_tokens(
    State(shared): State<Shared>,
    path: Option<Path<String>>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let session = path.as_ref().map(|Path(session)| session.as_str());
    match count(&shared, session, &headers, body).await {
        Ok(body) => {
            let mut response = reply::whole(StatusCode::OK, HeaderMap::new(), body);
            let json = HeaderValue::from_static("application/json");
            response.headers_mut().insert(header::CONTENT_TYPE, json);
            response
        }
        Err(error) => reply::error(ClientApi::AnthropicMessages, &error),
    }
}

async fn count(
    shared: &Shared,
    session: Option<&str>,
    headers: &HeaderMap,
    body: Body,
) -> Result<Bytes, ApiError> {
    let inner = &shared.inner;
    identify::must_be_open(inner, &shared.door, session, headers)?;
    let body = call::read_body(body, inner.options.max_body_bytes).await?;
    if inner.upstream.kind() == UpstreamKind::Anthropic {
        return ask(inner, "/messages/count_tokens", headers, body).await;
    }
    let asked = messages::count_request(&body)?;
    let told = ask(inner, "/../tokenize", headers, asked).await?;
    messages::count_reply(&told).map_err(|error| {
        ApiError::new(
            502,
            ErrorType::Upstream,
            "upstream_unreadable",
            format!("the count of tokens: {error}"),
        )
    })
}

async fn ask(inner: &Inner, route: &str, headers: &HeaderMap, body: Bytes) -> Result<Bytes, ApiError> {
    let sent = inner.upstream.send(Method::POST, route, None, headers, body).await;
    let UpstreamReply { status, body, .. } = sent.map_err(|error| whole::no_reply(&error).1)?;
    let piece_bytes = inner.options.stream_buffer_bytes;
    let text =
        whole::read(&inner.upstream, body, piece_bytes, &inner.abort).await.map_err(|bad| bad.error)?;
    if status.is_success() {
        Ok(text)
    } else {
        Err(whole::upstream_error(inner, status.as_u16(), &inner.upstream.without_key(text)))
    }
}
