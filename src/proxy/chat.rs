//! `POST …/v1/chat/completions`: from the request to the relay that answers it.

use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use bytes::Bytes;
use http::header::{self, HeaderMap};
use http::{Method, StatusCode, Uri};
use http_body_util::{BodyExt, LengthLimitError, Limited};

use super::recorder::Recorder;
use super::relay::Relay;
use super::{Inner, Shared, identify, reply, whole};
use crate::protocol::chat::Request;
use crate::protocol::error::{ApiError, ErrorType};
use crate::record::CallStatus;
use crate::upstream::dialect::{self, Prepared};
use crate::upstream::{self, UpstreamError, UpstreamReply};

/// The answer of an upstream, on its way.
pub(super) type Sending = Pin<Box<dyn Future<Output = Result<UpstreamReply, UpstreamError>> + Send>>;

/// The handler.
pub(super) async fn chat(
    State(shared): State<Shared>,
    path: Option<Path<String>>,
    uri: Uri,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let session = path.as_ref().map(|Path(session)| session.as_str());
    match serve(&shared, session, &uri, headers, body).await {
        Ok(response) => response,
        Err(error) => {
            metrics::counter!("lego_proxy_refused_total", "code" => error.code).increment(1);
            reply::error(&error)
        }
    }
}

async fn serve(
    shared: &Shared,
    path_session: Option<&str>,
    uri: &Uri,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let inner = &shared.inner;
    if inner.closing.is_cancelled() {
        let message = "the proxy is shutting down";
        return Err(ApiError::new(503, ErrorType::Server, "shutting_down", message));
    }
    let body = read_body(body, inner.options.max_body_bytes).await?;
    let request = Request::parse(body)
        .map_err(|error| ApiError::new(400, ErrorType::InvalidRequest, "bad_request", error.to_string()))?;
    let session = identify::session_of(inner, &shared.door, path_session, &headers, &request)?;
    // From here on the session's end waits for this call.
    let tokens = (session.token(), inner.running.token());
    let index = session.admit(&request, inner.options.history_rewrite_tolerance)?;
    let plan = session.plan(index);
    let prepare = |is_plain: bool| -> Result<Prepared, ApiError> {
        let (kind, model) = (inner.upstream.kind(), inner.options.upstream_model(&request.model));
        let prepared = if is_plain {
            dialect::prepare_plain(kind, plan, &request, model)
        } else {
            dialect::prepare(kind, inner.options.wanted, plan, &request, model)
        };
        prepared
            .map_err(|error| ApiError::new(400, ErrorType::InvalidRequest, "bad_request", error.to_string()))
    };
    let prepared = prepare(inner.upstream.refuses_additions())?;
    let slot = Arc::clone(&inner.slots)
        .acquire_owned()
        .await
        .map_err(|_| ApiError::new(503, ErrorType::Server, "shutting_down", "the proxy is shutting down"))?;
    let abort = session.closed();
    let mut recorder = Recorder::new(Arc::clone(inner), session, tokens, slot, request.clone(), prepared);
    recorder.conversation_id = identify::conversation_id(&headers);
    if inner.upstream.refuses_additions() {
        recorder.more_reasons.push("capture_refused_by_upstream".to_owned());
    }
    let mut sending = send(inner, uri, &headers, recorder.prepared.body.clone());
    let keep_alive = inner.options.keep_alive.filter(|_| request.is_stream);
    let first = tokio::select! {
        biased;
        () = abort.cancelled() => {
            let ended = whole::aborted();
            return Ok(whole::fail(recorder, ended.status, &ended.error).await);
        }
        first = &mut sending => Some(first),
        // The client has waited long enough for a sign of life: its stream begins before the upstream's.
        () = sleep(keep_alive) => None,
    };
    let Some(first) = first else {
        recorder.http_status = 200;
        let call_id = recorder.call_id;
        let relay = Relay::waiting(Arc::clone(inner), recorder, sending, abort);
        return Ok(reply::with_call_id(stream(HeaderMap::new(), relay), call_id));
    };
    let first = match first {
        // A gateway may refuse what lego adds for capture: the client still gets its reply.
        Ok(refused) if is_refusal(inner, refused.status) => {
            drop(refused);
            let plain = prepare(true)?;
            recorder.attempt = 2;
            recorder.more_reasons.push("capture_refused_by_upstream".to_owned());
            recorder.prepared = plain;
            let second = send(inner, uri, &headers, recorder.prepared.body.clone()).await;
            if second.as_ref().is_ok_and(|second| second.status.is_success()) {
                inner.upstream.set_refuses_additions();
            }
            second
        }
        first => first,
    };
    match first {
        Ok(received) => Ok(answer(inner, recorder, received, abort).await),
        Err(error) => {
            let (status, code, name) = if error.is_timeout() {
                (CallStatus::Timeout, 504, "upstream_timeout")
            } else {
                (CallStatus::UpstreamError, 502, "upstream_unreachable")
            };
            let error = ApiError::new(code, ErrorType::Upstream, name, error.to_string());
            Ok(whole::fail(recorder, status, &error).await)
        }
    }
}

async fn answer(
    inner: &Arc<Inner>,
    mut recorder: Recorder,
    received: UpstreamReply,
    abort: tokio_util::sync::CancellationToken,
) -> Response {
    let piece_bytes = inner.options.stream_buffer_bytes;
    if !is_stream(&received) {
        return whole::answer(recorder, &inner.upstream, received, piece_bytes, &abort).await;
    }
    recorder.http_status = received.status.as_u16();
    let call_id = recorder.call_id;
    let headers = upstream::forward_reply_headers(&received.headers);
    let relay = Relay::streaming(Arc::clone(inner), recorder, received.body, abort);
    reply::with_call_id(stream(headers, relay), call_id)
}

/// True for a success that is an event stream which can be read.
pub(super) fn is_stream(received: &UpstreamReply) -> bool {
    let content_type = received.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    received.status.is_success()
        && content_type.is_some_and(|value| value.starts_with("text/event-stream"))
        && !whole::is_compressed(&received.headers)
}

fn stream(mut headers: HeaderMap, relay: Relay) -> Response {
    reply::stream_headers(&mut headers);
    let pieces = futures_util::stream::unfold(relay, |mut relay| async move {
        let piece = relay.next().await?;
        Some((Ok::<Bytes, std::convert::Infallible>(piece), relay))
    });
    let mut response = Response::new(Body::from_stream(pieces));
    *response.status_mut() = StatusCode::OK;
    *response.headers_mut() = headers;
    response
}

/// Only gateways of which little is known are asked again: vLLM and the embedded engine ignore unknown keys.
fn is_refusal(inner: &Inner, status: StatusCode) -> bool {
    let is_bad_request = matches!(status.as_u16(), 400 | 422);
    let adds = inner.options.wanted.logprobs && !inner.upstream.refuses_additions();
    is_bad_request && adds && inner.upstream.kind() == crate::record::UpstreamKind::Openai
}

fn send(inner: &Arc<Inner>, uri: &Uri, headers: &HeaderMap, body: Bytes) -> Sending {
    let inner = Arc::clone(inner);
    let headers = headers.clone();
    let query = uri.query().map(str::to_owned);
    Box::pin(async move {
        let route = "/chat/completions";
        inner.upstream.send(Method::POST, route, query.as_deref(), &headers, body).await
    })
}

async fn sleep(duration: Option<std::time::Duration>) {
    match duration {
        Some(duration) => tokio::time::sleep(duration).await,
        None => std::future::pending().await,
    }
}

async fn read_body(body: Body, limit: usize) -> Result<Bytes, ApiError> {
    match Limited::new(body, limit).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => {
            let message = format!(
                "the request body is longer than {limit} bytes; raise proxy.max_body_bytes if it should pass"
            );
            Err(ApiError::new(413, ErrorType::InvalidRequest, "request_too_large", message))
        }
        Err(error) => {
            let message = format!("the request body broke off: {error}");
            Err(ApiError::new(400, ErrorType::InvalidRequest, "bad_request", message))
        }
    }
}
