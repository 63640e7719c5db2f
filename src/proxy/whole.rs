//! Replies that are not streams: read to their end, recorded, then sent (the held event is the last byte).

use axum::response::Response;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header};
use tokio_util::sync::CancellationToken;

use super::recorder::Recorder;
use super::reply;
use crate::protocol::chat;
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::json;
use crate::record::CallStatus;
use crate::upstream::{self, Upstream, UpstreamBody, UpstreamReply};

/// Longest body that is taken from an upstream.
const MAX_BODY_BYTES: usize = 256 * 1024 * 1024;

/// Why a body did not come to its end.
pub(super) struct BadBody {
    pub(super) status: CallStatus,
    pub(super) error: ApiError,
}

/// Reads a body to its end.
pub(super) async fn read(
    upstream: &Upstream,
    mut body: UpstreamBody,
    piece_bytes: usize,
    abort: &CancellationToken,
) -> Result<Bytes, BadBody> {
    let idle = upstream.timeouts().idle;
    let mut text = BytesMut::new();
    loop {
        let piece = tokio::select! {
            biased;
            () = abort.cancelled() => return Err(aborted()),
            piece = tokio::time::timeout(idle, body.next(piece_bytes)) => piece,
        };
        let bad = |status, code: u16, name, message: String| BadBody {
            status,
            error: ApiError::new(code, ErrorType::Upstream, name, message),
        };
        match piece {
            Err(_) => {
                let message = format!("the upstream sent nothing for {idle:?} within its reply");
                return Err(bad(CallStatus::Timeout, 504, "upstream_timeout", message));
            }
            Ok(None) => return Ok(text.freeze()),
            Ok(Some(Err(error))) => {
                let message = error.to_string();
                return Err(bad(CallStatus::Truncated, 502, "upstream_truncated", message));
            }
            Ok(Some(Ok(piece))) => text.extend_from_slice(&piece),
        }
        if text.len() > MAX_BODY_BYTES {
            let message = "the upstream's reply is longer than 256 MiB".to_owned();
            return Err(bad(CallStatus::UpstreamError, 502, "upstream_oversize", message));
        }
    }
}

/// The error of a call that lego ends.
pub(super) fn aborted() -> BadBody {
    let message = "lego ended this call: its session was closed or the proxy is shutting down";
    BadBody {
        status: CallStatus::Aborted,
        error: ApiError::new(503, ErrorType::Server, "call_aborted", message),
    }
}

/// Records a call that ends in an error of lego's own making and answers with it.
pub(super) async fn fail(mut recorder: Recorder, status: CallStatus, error: &ApiError) -> Response {
    recorder.http_status = error.status;
    let call_id = recorder.call_id;
    let response = match recorder.commit(status, Some(error.message.clone())).await {
        Ok(()) => reply::error(error),
        Err(sink) => reply::error(&sink_error(&sink)),
    };
    reply::with_call_id(response, call_id)
}

/// The error of a call that could not be made durable.
pub(super) fn sink_error(error: &crate::record::SinkError) -> ApiError {
    let message = format!("lego could not store this call, so it must not count: {error}");
    ApiError::new(503, ErrorType::Server, "capture_failed", message)
}

/// Answers with a reply that is not a stream.
pub(super) async fn answer(
    mut recorder: Recorder,
    upstream: &Upstream,
    received: UpstreamReply,
    piece_bytes: usize,
    abort: &CancellationToken,
) -> Response {
    let UpstreamReply { status, headers, body } = received;
    let text = match read(upstream, body, piece_bytes, abort).await {
        Ok(text) => text,
        Err(bad) => return fail(recorder, bad.status, &bad.error).await,
    };
    let call_id = recorder.call_id;
    recorder.http_status = status.as_u16();
    recorder.first_byte();
    let is_compressed = is_compressed(&headers);
    let mut out_headers = upstream::forward_reply_headers(&headers);
    let mut out = text.clone();
    let (call_status, error) = if status.is_success() && !is_compressed {
        recorder.body(&text);
        let wanted = &recorder.prepared.cut;
        if !wanted.is_nothing() {
            match chat::cut(&text, wanted) {
                Ok(cut) if cut.edits.is_empty() => {}
                Ok(cut) => out = Bytes::from(json::apply(&text, &cut.edits)),
                Err(error) => recorder.unreadable(error.to_string()),
            }
        }
        recorder.outcome()
    } else if status.is_success() {
        let why = "the upstream compressed its reply although it was asked not to".to_owned();
        (CallStatus::ParseError, Some(why))
    } else {
        let clean = upstream.without_key(text);
        recorder.error_body(&clean);
        let (body, message) = in_openai_shape(status, &clean, upstream);
        if body != clean {
            out_headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
            out_headers.remove(header::CONTENT_ENCODING);
        }
        out = body;
        (CallStatus::UpstreamError, Some(message))
    };
    let response = match recorder.commit(call_status, error).await {
        Ok(()) => reply::whole(status, out_headers, out),
        Err(error) => reply::error(&sink_error(&error)),
    };
    reply::with_call_id(response, call_id)
}

/// An upstream's error: as it is when clients of the protocol can read it, else wrapped. With its message.
pub(super) fn in_openai_shape(status: StatusCode, body: &Bytes, upstream: &Upstream) -> (Bytes, String) {
    if let Ok(value) = serde_json::from_slice::<serde_json::Value>(body)
        && let Some(error) = value.get("error").filter(|error| !error.is_null())
    {
        let message = error["message"].as_str().or_else(|| error.as_str());
        let message = message.map_or_else(|| error.to_string(), str::to_owned);
        return (body.clone(), format!("the upstream answered {status}: {message}"));
    }
    let text = String::from_utf8_lossy(body);
    let text: String = text.trim().chars().take(500).collect();
    let message = format!("the upstream at {} answered {status}: {text}", upstream.name());
    let error = ApiError::new(status.as_u16(), ErrorType::Upstream, "upstream_error", message);
    (error.body(), error.message)
}

/// True if the body cannot be read as it is.
pub(super) fn is_compressed(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity")
}
