//! A model call: from the request over its attempts upstream to the relay that answers it.

mod admission;
mod again;
pub(super) mod answer;
mod found;
mod native;
mod responses;
mod tokens;

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::{MethodRouter, post};
use bytes::Bytes;
use http::header::{self, HeaderMap};
use http::{Method, StatusCode, Uri};

use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::Instrument as _;

use self::answer::Form;
use super::body::Taken;
use super::face::{self, Face, Incoming};
use super::failures::Failed;
use super::limits::{Places, Refused};
use super::recorder::{Recorder, Wire};
use super::rejoin::{self, Attendance};
use super::routes::Route;
use super::session::Session;
use super::stop::Stop;
use super::token_in::Rendered;
use super::token_in::segments::{self, Asking};
use super::{Inner, Shared, failures, identify, reply, store, unread, verdict, whole};
use crate::config::Relay as RelayChoice;
use crate::protocol::chat::Request;
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::json;
use crate::record::{CallId, CallKind, CallStatus, ClientApi};
use crate::upstream::dialect::{self, Approach, Prepared, SamplingPlan, Wanted};
use crate::upstream::vllm_generate;
use crate::upstream::{self, Additions, Capabilities, UpstreamError, UpstreamReply};

/// The answer of an upstream, on its way.
pub(super) type Sending = Pin<Box<dyn Future<Output = Result<UpstreamReply, UpstreamError>> + Send>>;

/// The handler of a model call in this protocol.
pub(super) fn route(api: ClientApi) -> MethodRouter<Shared> {
    post(move |state: State<Shared>, path: Option<Path<String>>, uri: Uri, headers: HeaderMap, body: Body| {
        handle(api, state, path, uri, headers, body)
    })
}

async fn handle(
    api: ClientApi,
    State(shared): State<Shared>,
    path: Option<Path<String>>,
    uri: Uri,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let session = path.as_ref().map(|Path(session)| session.as_str());
    // The first attempt's call has the same id.
    let request = (CallId::now(), Instant::now());
    let span = tracing::info_span!("call", request_id = %request.0, api = api.as_str());
    let served = async {
        match serve(request, api, &shared, session, &uri, headers, body).await {
            Ok(response) => response,
            Err(error) => {
                let failed = Failed { status: "refused", http_status: error.status, reason: error.code };
                failures::tell(&shared.inner, Some(failed));
                metrics::counter!("lego_proxy_refused_total", "code" => error.code).increment(1);
                reply::error(api, &error)
            }
        }
    };
    served.instrument(span).await
}

async fn serve(
    (id, received): (CallId, Instant),
    api: ClientApi,
    shared: &Shared,
    path_session: Option<&str>,
    uri: &Uri,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let inner = &shared.inner;
    let closing = || ApiError::new(503, ErrorType::Server, "shutting_down", "the proxy is shutting down");
    if inner.closing.is_cancelled() {
        return Err(closing());
    }
    let headers = identify::without_token(inner, headers);
    let Taken { body, held } = match inner.bodies.take(&headers, body).await {
        Ok(taken) => taken,
        Err(error) if matches!(error.status, 413 | 429) => {
            return Ok(unread::refused((id, received), api, shared, path_session, &headers, &error).await);
        }
        Err(error) => return Err(error),
    };
    // The body may have waited long for its room.
    if inner.closing.is_cancelled() {
        return Err(closing());
    }
    let route = {
        let trainers = identify::trainers(inner, &shared.door, path_session, &headers)?;
        inner.routes.find(inner, api, face::asked_model(&body).as_deref(), trainers.as_deref())?
    };
    let incoming = Incoming::read(inner, &route, api, body)?;
    let session = identify::session_of(inner, &shared.door, path_session, &headers, Some(&incoming))?;
    // From here on the session's end waits for this call.
    let tokens = (session.token(), inner.running.token());
    let conversation_id = identify::conversation_id(&headers);
    let incoming = match rejoin::rejoin(&session, incoming, conversation_id.as_deref()).await {
        Ok(answer) => return answer,
        Err(incoming) => incoming,
    };
    // What could not be recorded is not sampled.
    inner.sink.admits().map_err(|error| store::refused(&session, &error))?;
    // What a judge or a teacher is asked is no turn of the session's conversation.
    let tolerates_rewrites = inner.options.history_rewrite_tolerance
        || !route.is_policy()
        // What goes on from a response rewrites nothing.
        || incoming.says_no_history();
    let index = session.admit(incoming.as_said(), &inner.options.volatile, tolerates_rewrites)?;
    let plan = route.plan(&session, index);
    let (mut places, refused) = match admission::admitted(inner, &session, &route).await {
        Ok(places) => (places, None),
        Err(refused) => (Places::default(), Some(refused)),
    };
    places._body = held;
    let abort = Stop::new(session.closed(), route.total_timeout);
    let is_last = identify::is_last(inner, &shared.door, &headers);
    let attendance = Attendance::new(inner, &session, &incoming, conversation_id, abort.clone(), is_last);
    let Incoming { body, request, mut face, .. } = incoming;
    native::speak_as_known(&route, &mut face);
    let call = Call {
        id,
        received,
        inner: Arc::clone(inner),
        abort,
        route,
        attendance: Arc::clone(&attendance),
        session,
        tokens,
        slot: Arc::new(places),
        plan,
        body,
        request,
        prompt_ids: None,
        rendered: None,
        uri: uri.clone(),
        headers,
    };
    match refused {
        None => rejoin::answered(attendance, Box::pin(call.run(face))).await,
        Some(refused) => {
            let attempt = Attempt::first(Additions::All);
            call.refused(&attempt, &face, &refused).await
        }
    }
}

/// One request of a client, over all its attempts upstream.
struct Call {
    /// Of the first attempt.
    id: CallId,
    received: Instant,
    inner: Arc<Inner>,
    session: Arc<Session>,
    tokens: (TaskTrackerToken, TaskTrackerToken),
    slot: Arc<Places>,
    route: Arc<Route>,
    plan: SamplingPlan,
    /// As the client sent it.
    body: Bytes,
    request: Request,
    /// The ids of its prompts by the upstream's tokenizer, as JSON.
    prompt_ids: Option<Vec<u8>>,
    /// The upstream is asked with tokens.
    rendered: Option<Arc<Rendered>>,
    uri: Uri,
    headers: HeaderMap,
    attendance: Arc<Attendance>,
    abort: Stop,
}

/// One try upstream.
struct Attempt {
    number: u16,
    /// How many of those before it were followed by another because their failure passes by itself: what the
    /// configuration limits. One that was put in other words is none of them.
    retries: u16,
    first: Option<CallId>,
    /// Less than all of them where the upstream refused some.
    additions: Additions,
}

impl Attempt {
    const fn first(additions: Additions) -> Self {
        Self { number: 1, retries: 0, first: None, additions }
    }
}

/// How another try differs from the one before.
enum Again {
    /// The same, after this pause: one of the call's retries.
    After(Duration),
    /// In other words, at once.
    With(Additions),
}

impl Call {
    async fn run(mut self, mut face: Face) -> Result<Response, ApiError> {
        self.render(&mut face).await;
        let capabilities = if face.upstream_api == ClientApi::SglangGenerate {
            self.native(&mut face).await
        } else {
            self.capabilities(&face).await
        };
        self.stream_routing(&mut face, capabilities).await;
        let additions = self.begins_with(&face);
        let mut attempt = Attempt::first(additions);
        loop {
            if attempt.number > 1 {
                let turn = tokio::select! {
                    biased;
                    // The attempt's record says so.
                    _ = self.abort.cancelled() => Ok(()),
                    turn = self.turn() => turn,
                };
                if let Err(refused) = turn {
                    return self.refused(&attempt, &face, &refused).await;
                }
            }
            let recorder = self.recorder(&attempt, &face, capabilities)?;
            if attempt.number == 1 {
                self.inner.measures.added_to_request.record(self.received.elapsed());
            }
            let mut sending = self.send(&face, &recorder);
            let mut first = tokio::select! {
                biased;
                ended = self.abort.cancelled() => {
                    return Ok(whole::fail(recorder, &face, ended.status, &ended.error).await);
                }
                first = &mut sending => first,
                // The client has waited long enough for a sign of life: its reply begins before the upstream's.
                () = answer::sleep(self.inner.options.keep_alive) => {
                    return Ok(self.answer_early(recorder, face, sending));
                }
            };
            let again =
                if self.lacks_streams(&mut face, &first) || self.lacks_tokens(&mut face, &mut first).await {
                    Some(Again::With(attempt.additions))
                } else if self.lacks_responses(&face, &first) {
                    match self.in_chat(&mut face, &first) {
                        Ok(additions) => Some(Again::With(additions)),
                        Err(error) => {
                            return Ok(whole::fail(recorder, &face, CallStatus::UpstreamError, &error).await);
                        }
                    }
                } else {
                    self.again(&attempt, &mut face, &recorder, &mut first).await
                };
            // Without what was added the reply would have no ids to be read from.
            if matches!(&again, Some(Again::With(additions)) if *additions != Additions::All)
                && self.rendered.is_some()
            {
                self.leave_tokens(&mut face);
            }
            let Some(again) = again else {
                self.learn_of_responses(&face, &first);
                let is_success = first.as_ref().is_ok_and(|reply| reply.status.is_success());
                if attempt.additions != Additions::All && is_success {
                    self.route.upstream.set_additions(self.upstream_model(), attempt.additions);
                }
                return Ok(self.answer(recorder, face, first).await);
            };
            let call_id = recorder.call_id;
            if let Err(error) = self.give_up(recorder, first).await {
                return Ok(reply::with_call_id(face.error(&whole::sink_error(&error)), call_id));
            }
            self.inner.measures.retries.increment(1);
            attempt.number = attempt.number.saturating_add(1);
            attempt.first = attempt.first.or(Some(call_id));
            match again {
                Again::With(additions) => attempt.additions = additions,
                Again::After(pause) => {
                    attempt.retries = attempt.retries.saturating_add(1);
                    tokio::select! {
                        // The next attempt's record says so.
                        _ = self.abort.cancelled() => {}
                        () = tokio::time::sleep(pause) => {}
                    }
                }
            }
        }
    }

    /// Records that an attempt found no place, and says so.
    async fn refused(&self, attempt: &Attempt, face: &Face, refused: &Refused) -> Result<Response, ApiError> {
        metrics::counter!("lego_proxy_refused_total", "code" => refused.code).increment(1);
        let capabilities = Capabilities::assumed(self.route.upstream.kind());
        let recorder = self.recorder(attempt, face, capabilities)?;
        let mut response = whole::fail(recorder, face, CallStatus::Aborted, &refused.error()).await;
        if response.status() == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(header::RETRY_AFTER, refused.retry_after());
        }
        Ok(response)
    }

    /// The upstream's name for the model.
    /// What the call is for.
    fn kind(&self) -> CallKind {
        let known = self.route.kind.unwrap_or(self.session.spec.kind);
        identify::kind(known, &self.headers, &self.request)
    }

    fn upstream_model(&self) -> &str {
        let asked = &self.request.model;
        self.route.upstream_model(&self.inner.options, asked).unwrap_or(asked)
    }

    fn prepared(
        &self,
        attempt: &Attempt,
        face: &Face,
        capabilities: Capabilities,
    ) -> Result<Prepared, json::ScanError> {
        if let Some(rendered) = &self.rendered {
            return self.prepared_with_tokens(rendered, face, capabilities);
        }
        if face.upstream_api == ClientApi::SglangGenerate {
            return self.prepared_natively(face, capabilities);
        }
        let inner = &self.inner;
        let model = self.route.upstream_model(&inner.options, &self.request.model);
        let is_chat = face.upstream_api == ClientApi::OpenaiChat;
        let approach = Approach {
            capabilities,
            routing: self.route.upstream.routing_hint().is_some() && is_chat,
            usage: attempt.additions != Additions::Nothing,
            relay: if is_chat { inner.options.relay } else { RelayChoice::Live },
        };
        let wanted = match attempt.additions {
            Additions::All => self.route.wanted,
            Additions::Usage | Additions::Nothing => Wanted { token_ids: false, logprobs: false },
        };
        dialect::prepare(approach, wanted, self.plan, &self.request, model)
    }

    fn recorder(
        &self,
        attempt: &Attempt,
        face: &Face,
        capabilities: Capabilities,
    ) -> Result<Recorder, ApiError> {
        let prepared = self.prepared(attempt, face, capabilities).map_err(|error| {
            ApiError::new(400, ErrorType::InvalidRequest, "bad_request", error.to_string())
        })?;
        let mut recorder = Recorder::new(
            Arc::clone(&self.attendance),
            self.tokens.clone(),
            Arc::clone(&self.slot),
            Wire {
                client_api: face.api,
                client_body: self.body.clone(),
                upstream_api: face.upstream_api,
                route: Arc::clone(&self.route),
                rendered: self.rendered.clone(),
            },
            self.request.clone(),
            prepared,
        );
        if attempt.first.is_none() {
            recorder.call_id = self.id;
            recorder.came_at(self.received);
        }
        recorder.attempt = attempt.number;
        recorder.retry_of = attempt.first;
        recorder.conversation_id = self.attendance.conversation_id.clone();
        (recorder.client_name, recorder.client_version) = identify::client_name(&self.headers);
        recorder.kind = self.kind();
        if self.route.kind == Some(CallKind::Aux) {
            recorder.more_reasons.push(verdict::AUX_ROUTE.to_owned());
        }
        if attempt.additions != Additions::All {
            recorder.more_reasons.push("capture_refused_by_upstream".to_owned());
        }
        // Where the parameters say so by themselves, so does the verdict.
        if recorder.prepared.is_shaped && dialect::is_untruncated(&recorder.prepared.sampling_sent) {
            recorder.more_reasons.push("sampling_unknown_or_truncated".to_owned());
        }
        Ok(recorder)
    }

    fn send(&self, face: &Face, recorder: &Recorder) -> Sending {
        let (inner, session) = (Arc::clone(&self.inner), Arc::clone(&self.session));
        let route = Arc::clone(&self.route);
        let (body, version_at_start) =
            (recorder.prepared.body.clone(), Arc::clone(&recorder.version_at_start));
        let headers = self.headers.clone();
        // What it says is said in the client's protocol.
        let query = self.uri.query().filter(|_| face.writer.is_none()).map(str::to_owned);
        let api = face.upstream_api;
        let rendered = recorder.rendered().cloned();
        Box::pin(async move {
            let mut interrupts = inner.gate.interrupts();
            let path = match api {
                ClientApi::OpenaiCompletions => "/completions",
                ClientApi::AnthropicMessages => "/messages",
                ClientApi::OpenaiResponses => "/responses",
                ClientApi::SglangGenerate => upstream::NATIVE_ROUTE,
                ClientApi::VllmGenerate => vllm_generate::ROUTE,
                _ => "/chat/completions",
            };
            if route.is_policy() {
                inner.gate.passed().await;
            }
            // Behind the gate: the weights may have changed while the call waited at it.
            interrupts.mark_unchanged();
            let version = route.version_now(&inner, &session);
            let _ = version_at_start.set(version.clone());
            let first = body.clone();
            let reply = route.upstream.send(Method::POST, path, query.as_deref(), &headers, body).await?;
            let Some(rendered) = rendered.filter(|_| Form::of(&reply) == Form::Stream) else {
                return Ok(reply);
            };
            let asking = Asking {
                inner,
                session,
                route,
                rendered,
                path,
                headers,
                body: first,
                version_at_start: version,
                interrupts,
            };
            Ok(segments::joined(asking, reply, api))
        })
    }
}
