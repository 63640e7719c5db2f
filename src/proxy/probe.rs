//! The records of what the upstream was asked to find out what it can give.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;

use super::Inner;
use super::received::Received;
use super::session::Session;
use crate::record::{
    Call, CallId, CallKind, CallStatus, ClientApi, IdsSource, JsonText, Parties, UpstreamKind, Usage,
};
use crate::upstream::vllm_generate::{self, TokenStreams};
use crate::upstream::{Capabilities, Native, ProbeExchange, Upstream};

/// Finds out what an upstream can give, and stores what it was asked. Ends early with the proxy.
pub(super) async fn run(
    inner: Arc<Inner>,
    upstream: Arc<Upstream>,
    session: Arc<Session>,
    model: String,
) -> Capabilities {
    let (capabilities, probes) = upstream.capabilities(&model, inner.abort.cancelled()).await;
    record(&inner, (upstream.kind(), ClientApi::OpenaiChat), &session, &model, probes).await;
    capabilities
}

/// The same of SGLang's native endpoint.
pub(super) async fn run_native(
    inner: Arc<Inner>,
    upstream: Arc<Upstream>,
    session: Arc<Session>,
    model: String,
) -> Native {
    let (native, probes) = upstream.native(inner.abort.cancelled()).await;
    record(&inner, (upstream.kind(), ClientApi::SglangGenerate), &session, &model, probes).await;
    native
}

/// The same of the streams of vLLM's token endpoint.
pub(super) async fn run_streams(
    inner: Arc<Inner>,
    upstream: Arc<Upstream>,
    session: Arc<Session>,
    model: String,
) -> TokenStreams {
    let (streams, probes) = upstream.streams(&model, inner.abort.cancelled()).await;
    record(&inner, (upstream.kind(), ClientApi::VllmGenerate), &session, &model, probes).await;
    streams
}

/// Stores the probes in the session of the call that needed them. They are lego's own: a trainer does not get them.
async fn record(
    inner: &Arc<Inner>,
    (kind, api): (UpstreamKind, ClientApi),
    session: &Session,
    model: &str,
    probes: Vec<ProbeExchange>,
) {
    if probes.is_empty() {
        return;
    }
    let calls = probes.into_iter().map(|probe| call((kind, api), session, model, probe)).collect();
    if let Err(error) = inner.sink.append(calls).await {
        tracing::error!(%error, "a probe could not be captured");
    }
}

fn call(
    (kind, api): (UpstreamKind, ClientApi),
    session: &Session,
    model: &str,
    probe: ProbeExchange,
) -> Call {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let raw = |bytes: &Bytes| JsonText::of_bytes(bytes).ok();
    // Its tokens were sampled like any others, and are accounted for.
    let mut reply = Received::new(api, 1);
    let is_stream = api == ClientApi::VllmGenerate;
    let parts = if is_stream { vllm_generate::events(&probe.reply) } else { vec![probe.reply.clone()] };
    for part in &parts {
        if let Err(error) = reply.body(part) {
            tracing::debug!(%error, "the reply to a probe is none of its protocol");
        }
    }
    let mut reply = reply.into_reply();
    let prompt_token_ids = reply.prompt_ids_of(0, 1).map(<[u32]>::to_vec);
    let choice = reply.choices.remove(&0).unwrap_or_default();
    let source = |has_ids: bool| if has_ids { IdsSource::Engine } else { IdsSource::Absent };
    let is_ok = probe.error.is_none() && probe.status.is_some_and(|status| (200..300).contains(&status));
    let parties = Parties { client_api: api, upstream_kind: kind, upstream_api: api };
    let received_at = i64::try_from(since_epoch.as_micros()).unwrap_or(i64::MAX);
    let session_id = session.spec.session_id.clone();
    Call {
        http_status: probe.status.unwrap_or(0),
        model_requested: model.to_owned(),
        model_served: reply.model,
        upstream_request: raw(&probe.request),
        response: if is_stream { raw(&list(&parts)) } else { raw(&probe.reply) },
        client_stream: is_stream,
        prompt_ids_source: source(prompt_token_ids.is_some()),
        prompt_token_ids,
        completion_ids_source: source(choice.token_ids.is_some()),
        completion_token_ids: choice.token_ids,
        completion_logprobs: choice.logprobs,
        text: Some(choice.text),
        finish_reason: choice.finish_reason,
        usage: reply.usage.map(|usage| Usage {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            cached_tokens: usage.cached_tokens,
            reasoning_tokens: usage.reasoning_tokens,
        }),
        status: if is_ok { CallStatus::Ok } else { CallStatus::UpstreamError },
        error: probe.error,
        not_trainable_reasons: vec!["kind_probe".to_owned()],
        ..Call::unanswered(CallId::now(), session_id, CallKind::Probe, parties, received_at)
    }
}

/// The array of a stream's events.
fn list(events: &[Bytes]) -> Bytes {
    let events: Vec<&[u8]> = events.iter().map(Bytes::as_ref).collect();
    [b"[", events.join(&b","[..]).as_slice(), b"]"].concat().into()
}
