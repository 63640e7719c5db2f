//! Calls that are refused before their request is read: too long a body, or no room for it. They have a record like
//! others, without the request.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::response::Response;
use http::HeaderMap;

use super::failures::Failed;
use super::recorder::Records;
use super::session::Session;
use super::tape::Turn;
use super::{Inner, Shared, failures, identify, reply, store, verdict, whole};
use crate::protocol::error::ApiError;
use crate::record::{Call, CallId, CallStatus, ClientApi, Parties, UpstreamKind};

/// Records that a call is refused, and says so.
pub(super) async fn refused(
    (id, received): (CallId, Instant),
    api: ClientApi,
    shared: &Shared,
    path_session: Option<&str>,
    headers: &HeaderMap,
    error: &ApiError,
) -> Response {
    let inner = &shared.inner;
    let failed = Failed { status: "refused", http_status: error.status, reason: error.code };
    failures::tell(inner, Some(failed));
    metrics::counter!("lego_proxy_refused_total", "code" => error.code).increment(1);
    // What names no session that is open is nobody's call.
    let session = identify::session_of(inner, &shared.door, path_session, headers, None);
    let session = session.ok().filter(|session| !session.closed().is_cancelled());
    let call = session.as_ref().and_then(|session| call((id, received), api, inner, session, headers, error));
    let Some((session, call)) = session.zip(call) else {
        return reply::error(api, error);
    };
    inner.measures.in_flight.increment(1.0);
    inner.measures.ended(CallStatus::Aborted, received.elapsed());
    let tokens = (session.token(), inner.running.token());
    let records = Records { calls: vec![call], missing: None, success: None };
    // In a task of its own, so that it goes on if the client leaves meanwhile.
    let append = store::append(Arc::clone(inner), session, tokens, records, None, Turn::default());
    let response = match tokio::spawn(append).await {
        Ok(Err(sink)) => reply::error(api, &whole::sink_error(&sink)),
        // One that panicked is told in the log.
        Ok(Ok(())) | Err(_) => reply::error(api, error),
    };
    reply::with_call_id(response, id)
}

/// `None`: there is no upstream that it could have gone to.
fn call(
    (call_id, received): (CallId, Instant),
    client_api: ClientApi,
    inner: &Inner,
    session: &Session,
    headers: &HeaderMap,
    error: &ApiError,
) -> Option<Call> {
    // Its model is not known: nobody read it.
    let upstream_kind = inner.routes.needed().first()?.upstream.kind();
    let upstream_api = match client_api {
        ClientApi::AnthropicMessages if upstream_kind == UpstreamKind::Anthropic => client_api,
        ClientApi::AnthropicMessages | ClientApi::OpenaiResponses => ClientApi::OpenaiChat,
        _ => client_api,
    };
    let took = received.elapsed();
    let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(took);
    let micros = |time: Duration| time.as_micros();
    let (client_name, client_version) = identify::client_name(headers);
    let spec = &session.spec;
    let parties = Parties { client_api, upstream_kind, upstream_api };
    let received_at = i64::try_from(micros(began)).unwrap_or(i64::MAX);
    let mut call = Call {
        trial_id: spec.trial_id.clone(),
        task_id: spec.task_id.clone(),
        harness: spec.harness.clone().or(client_name),
        harness_version: client_version,
        harness_conversation_id: identify::conversation_id(headers),
        http_status: error.status,
        duration_us: u64::try_from(micros(took)).unwrap_or(u64::MAX),
        error: Some(error.message.clone()),
        ..Call::unanswered(call_id, spec.session_id.clone(), spec.kind, parties, received_at)
    };
    call.not_trainable_reasons = verdict::reasons(&call, 0, None, false);
    Some(call)
}
