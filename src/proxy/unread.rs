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
use crate::record::{
    Call, CallId, CallStatus, ClientApi, IdsSource, LogprobSemantics, SCHEMA_VERSION, Sampling, UpstreamKind,
    WeightSource,
};

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
    let stored = store::append(Arc::clone(inner), session, tokens, records, None, Turn::default()).await;
    let response = match stored {
        Ok(()) => reply::error(api, error),
        Err(sink) => reply::error(api, &whole::sink_error(&sink)),
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
    let mut call = Call {
        schema_version: SCHEMA_VERSION,
        call_id,
        choice_index: 0,
        session_id: spec.session_id.clone(),
        trial_id: spec.trial_id.clone(),
        task_id: spec.task_id.clone(),
        parent_call_id: None,
        attempt: 1,
        retry_of: None,
        rejoined: 0,
        kind: spec.kind,
        harness: spec.harness.clone().or(client_name),
        harness_version: client_version,
        harness_conversation_id: identify::conversation_id(headers),
        http_status: error.status,
        tokenizer_sha256: None,
        template_sha256: None,
        client_api,
        client_stream: false,
        upstream_kind,
        upstream_api,
        model_requested: String::new(),
        model_served: None,
        received_at: i64::try_from(micros(began)).unwrap_or(i64::MAX),
        ttft_us: None,
        duration_us: u64::try_from(micros(took)).unwrap_or(u64::MAX),
        client_request: None,
        upstream_request: None,
        response: None,
        prompt_token_ids: None,
        prompt_ids_source: IdsSource::Absent,
        completion_token_ids: None,
        completion_ids_source: IdsSource::Absent,
        completion_logprobs: None,
        logprob_semantics: LogprobSemantics::Unknown,
        sampling_requested: Sampling::default(),
        sampling_sent: Sampling::default(),
        weight_spans: None,
        weight_source: WeightSource::Unknown,
        routing: None,
        text: None,
        tool_calls: None,
        finish_reason: None,
        usage: None,
        status: CallStatus::Aborted,
        error: Some(error.message.clone()),
        trainable: false,
        not_trainable_reasons: Vec::new(),
    };
    call.not_trainable_reasons = verdict::reasons(&call, 0, None, false);
    Some(call)
}
