//! The probe of an upstream: run when the first call needs it, at most once at a time, kept once it told something.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method};
use tokio::sync::{Mutex, OnceCell};
use tokio::time::Instant;

use super::capabilities::{Capabilities, PROBES, probe_body};
use super::native::{self, Native};
use super::transport::{Upstream, UpstreamReply};
use super::vllm_generate::{self, TokenStreams};

/// Longest wait for all probes of one round: a call that needs them goes on with what is assumed.
const PROBE_LIMIT: Duration = Duration::from_secs(30);
/// After a round that ended by that limit, calls do not wait for another one this long: the upstream is busy.
const PAUSE: Duration = Duration::from_secs(300);
/// Longest reply to a probe.
const MAX_REPLY_BYTES: usize = 16 << 20;
/// Most bytes taken from the connection at a time.
const PIECE_BYTES: usize = 1 << 16;

/// A probe and what came back, for the capture (kind `probe`). No key is in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeExchange {
    pub request: Bytes,
    /// `None`: no answer began.
    pub status: Option<u16>,
    /// What came of the body.
    pub reply: Bytes,
    /// What went wrong on the way.
    pub error: Option<String>,
}

/// What was found out, and who is at it.
#[derive(Debug)]
pub(super) struct ProbeState<T> {
    found: OnceCell<T>,
    /// Held while a round runs; no round before this time.
    running: Mutex<Option<Instant>>,
    /// Rounds that ended, whatever came of them.
    rounds: AtomicU64,
    limit: Duration,
}

impl<T> Default for ProbeState<T> {
    fn default() -> Self {
        let (found, running, rounds) = (OnceCell::new(), Mutex::new(None), AtomicU64::new(0));
        Self { found, running, rounds, limit: PROBE_LIMIT }
    }
}

/// How something is found out.
struct Question<'a, T> {
    route: &'static str,
    /// What stands until it is known.
    assumed: T,
    /// The body of the probe number so and so.
    body: &'a (dyn Fn(usize) -> Option<Bytes> + Sync),
    /// What a reply with this status shows.
    read: &'a (dyn Fn(u16, &[u8]) -> Option<T> + Sync),
    /// Logs what was found.
    tell: &'a (dyn Fn(&T) + Sync),
}

impl Upstream {
    /// What this upstream can give, if that is known or not to be found out.
    #[must_use]
    pub fn known_capabilities(&self) -> Option<Capabilities> {
        let is_probed = probe_body(self.kind(), "", 0).is_some();
        match self.probe_state().found.get() {
            None if is_probed => None,
            None => Some(Capabilities::assumed(self.kind())),
            Some(found) => Some(*found),
        }
    }

    /// What this upstream can give. The first call that asks runs the probe, with `model` as the model's name, and
    /// gets the exchanges to record; calls that ask meanwhile wait for it. A probe that says nothing (the upstream
    /// is down, or refuses it) is run again by the next call, or some minutes later if it was not answered in time; until
    /// then the answer is what is assumed of the kind. A probe that runs ends with `stop`.
    pub async fn capabilities(
        &self,
        model: &str,
        stop: impl Future<Output = ()>,
    ) -> (Capabilities, Vec<ProbeExchange>) {
        if let Some(known) = self.known_capabilities() {
            return (known, Vec::new());
        }
        let kind = self.kind();
        let question = Question {
            route: "/chat/completions",
            assumed: Capabilities::assumed(kind),
            body: &|attempt| probe_body(kind, model, attempt),
            read: &|status, body| Capabilities::from_reply(kind, status, body),
            tell: &|found| {
                tracing::info!(
                    upstream = %self.name(),
                    token_ids = found.ids.as_str(),
                    ids_in_streams = found.streams_ids,
                    expert_routing = found.routing,
                    "what the upstream can give"
                );
            },
        };
        self.find_out(self.probe_state(), question, stop).await
    }

    /// What SGLang's native endpoint gives, if that is known.
    #[must_use]
    pub fn known_native(&self) -> Option<Native> {
        self.native_state().found.get().copied()
    }

    /// A call was told that there is no native endpoint, which is known from now on.
    pub fn set_without_native(&self) {
        // What a probe saw is kept: the server is another one by now, and calls find that out one by one.
        if self.native_state().found.set(Native::MISSING).is_ok() {
            tracing::info!(upstream = %self.name(), "it has no POST /generate: completions go to its own");
        }
    }

    /// What SGLang's native endpoint gives; found out as [`Upstream::capabilities`] are.
    pub async fn native(&self, stop: impl Future<Output = ()>) -> (Native, Vec<ProbeExchange>) {
        let question = Question {
            route: native::ROUTE,
            assumed: Native::ASSUMED,
            body: &native::probe_body,
            read: &Native::from_reply,
            tell: &|found| {
                tracing::info!(
                    upstream = %self.name(),
                    is_there = found.is_there,
                    prompt_ids = found.prompt_ids,
                    expert_routing = found.routing,
                    "what the upstream's POST /generate can give"
                );
            },
        };
        self.find_out(self.native_state(), question, stop).await
    }

    /// What streams of vLLM's token endpoint give, if that is known.
    #[must_use]
    pub fn known_streams(&self) -> Option<TokenStreams> {
        self.streams_state().found.get().copied()
    }

    /// What streams of vLLM's token endpoint give; found out as [`Upstream::capabilities`] are.
    pub async fn streams(
        &self,
        model: &str,
        stop: impl Future<Output = ()>,
    ) -> (TokenStreams, Vec<ProbeExchange>) {
        let question = Question {
            route: vllm_generate::ROUTE,
            assumed: TokenStreams::MISSING,
            body: &|attempt| vllm_generate::probe_body(model, attempt),
            read: &TokenStreams::from_reply,
            tell: &|found| {
                let what = match found.routing {
                    true => "streams of the upstream's POST /inference/v1/generate have the expert routing",
                    false => {
                        "streams of the upstream's POST /inference/v1/generate have no expert routing, or it is not \
                         served (vLLM 0.30 and later: start it with --enable-scale-out): replies are asked for whole"
                    }
                };
                tracing::info!(upstream = %self.name(), leaves_out_rows = found.start, "{what}");
            },
        };
        self.find_out(self.streams_state(), question, stop).await
    }

    async fn find_out<T: Copy + Send + Sync>(
        &self,
        state: &ProbeState<T>,
        question: Question<'_, T>,
        stop: impl Future<Output = ()>,
    ) -> (T, Vec<ProbeExchange>) {
        if let Some(found) = state.found.get() {
            return (*found, Vec::new());
        }
        let assumed = question.assumed;
        let before = state.rounds.load(Ordering::Acquire);
        let mut not_before = state.running.lock().await;
        let is_paused = not_before.is_some_and(|time| Instant::now() < time);
        if is_paused || state.rounds.load(Ordering::Acquire) != before || state.found.initialized() {
            return (state.found.get().copied().unwrap_or(assumed), Vec::new());
        }
        let mut exchanges = Vec::new();
        let found = tokio::select! {
            found = self.probe(&question, &mut exchanges) => found,
            () = tokio::time::sleep(state.limit) => {
                *not_before = Instant::now().checked_add(PAUSE);
                None
            }
            () = stop => None,
        };
        state.rounds.fetch_add(1, Ordering::Release);
        match found {
            Some(found) => {
                (question.tell)(&found);
                // Nobody else is in here.
                let _ = state.found.set(found);
                (found, exchanges)
            }
            None => (assumed, exchanges),
        }
    }

    /// Asks for less until a reply says something.
    async fn probe<T>(&self, question: &Question<'_, T>, exchanges: &mut Vec<ProbeExchange>) -> Option<T> {
        for attempt in 0..PROBES {
            let request = (question.body)(attempt)?;
            exchanges.push(ProbeExchange {
                request: request.clone(),
                status: None,
                reply: Bytes::new(),
                error: Some("it was not answered in time".to_owned()),
            });
            let exchange = self.exchange_probe(question.route, request).await;
            let status = exchange.status;
            let found = (question.read)(status.unwrap_or(0), &exchange.reply);
            if let Some(last) = exchanges.last_mut() {
                *last = exchange;
            }
            if found.is_some() || !matches!(status, Some(400 | 422)) {
                return found;
            }
        }
        None
    }

    async fn exchange_probe(&self, route: &str, request: Bytes) -> ProbeExchange {
        let headers = HeaderMap::new();
        let sent = self.send(Method::POST, route, None, &headers, request.clone()).await;
        let UpstreamReply { status, mut body, .. } = match sent {
            Ok(reply) => reply,
            Err(error) => {
                let error = Some(error.to_string());
                return ProbeExchange { request, status: None, reply: Bytes::new(), error };
            }
        };
        let mut reply = BytesMut::new();
        let mut error = None;
        while let Some(piece) = body.next(PIECE_BYTES).await {
            match piece {
                Ok(piece) => reply.extend_from_slice(&piece),
                Err(broken) => error = Some(broken.to_string()),
            }
            if reply.len() > MAX_REPLY_BYTES {
                error = Some(format!("the reply is longer than {MAX_REPLY_BYTES} bytes"));
            }
            if error.is_some() {
                break;
            }
        }
        let reply = self.without_key(reply.freeze());
        ProbeExchange { request, status: Some(status.as_u16()), reply, error }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use axum::Router;
    use axum::routing::post;
    use serde_json::Value;

    use super::*;
    use crate::record::UpstreamKind;
    use crate::upstream::{IdsChannel, Timeouts};

    /// A server that answers the probes with these in turn, the last one for ever.
    async fn server(answers: Vec<(u16, String)>) -> (String, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&asked);
        let router = Router::new().route(
            "/v1/chat/completions",
            post(move || {
                let number = counter.fetch_add(1, Ordering::SeqCst);
                let (status, body) = answers[number.min(answers.len() - 1)].clone();
                async move { (http::StatusCode::from_u16(status).expect("status"), body) }
            }),
        );
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        tokio::spawn(async move { axum::serve(listener, router).await });
        (url, asked)
    }

    fn upstream(url: &str, kind: UpstreamKind) -> Upstream {
        Upstream::http(url, kind, Some("sk-canary"), Timeouts::default()).expect("upstream")
    }

    fn fixture(name: &str) -> String {
        let path = format!("{}/tests/fixtures/wire/{name}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).expect("fixture")
    }

    #[tokio::test]
    async fn many_calls_at_once_share_one_probe_and_one_of_them_records_it() {
        let (url, asked) = server(vec![(200, fixture("vllm_chat_routed.json"))]).await;
        let upstream = Arc::new(upstream(&url, UpstreamKind::Vllm));
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let upstream = Arc::clone(&upstream);
            calls.spawn(async move { upstream.capabilities("toy", std::future::pending()).await });
        }
        let answers = calls.join_all().await;
        assert!(answers.iter().all(|(found, _)| found.is_probed && found.routing));
        let recorded: Vec<&ProbeExchange> = answers.iter().flat_map(|(_, exchanges)| exchanges).collect();
        assert_eq!((recorded.len(), recorded[0].status), (1, Some(200)));
        let request: Value = serde_json::from_slice(&recorded[0].request).expect("JSON");
        assert_eq!(request["model"], "toy");
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn an_upstream_that_fails_is_probed_again_by_the_next_call() {
        let answers = vec![
            (503, "busy, sk-canary".to_owned()),
            (200, "no JSON".to_owned()),
            (200, fixture("vllm_chat.json")),
        ];
        let (url, asked) = server(answers).await;
        let upstream = upstream(&url, UpstreamKind::Vllm);
        for number in 0..2 {
            let (found, exchanges) = upstream.capabilities("toy", std::future::pending()).await;
            assert_eq!(found, Capabilities::assumed(UpstreamKind::Vllm));
            assert_eq!(exchanges.len(), 1, "{number}");
            assert!(!String::from_utf8_lossy(&exchanges[0].reply).contains("canary"));
        }
        assert!(upstream.capabilities("toy", std::future::pending()).await.0.is_probed);
        assert!(upstream.capabilities("toy", std::future::pending()).await.1.is_empty());
        assert_eq!(asked.load(Ordering::SeqCst), 3);
    }

    #[tokio::test]
    async fn an_upstream_that_is_down_is_no_error() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        drop(listener);
        let (found, exchanges) =
            upstream(&url, UpstreamKind::Sglang).capabilities("toy", std::future::pending()).await;
        assert_eq!(found, Capabilities::assumed(UpstreamKind::Sglang));
        assert_eq!((exchanges.len(), exchanges[0].status), (1, None));
        assert!(exchanges[0].error.as_ref().expect("why").contains("cannot be reached"));
    }

    #[tokio::test]
    async fn a_server_that_refuses_routing_is_asked_again_without() {
        let dense = fixture("sglang_chat.json").replace("\"sglext\"", "\"x\"");
        let (url, _) = server(vec![(400, "{}".to_owned()), (200, dense)]).await;
        let (found, exchanges) =
            upstream(&url, UpstreamKind::Sglang).capabilities("toy", std::future::pending()).await;
        assert_eq!((found.ids, found.routing), (IdsChannel::TokenIds, false));
        assert_eq!(exchanges.iter().map(|e| e.status).collect::<Vec<_>>(), [Some(400), Some(200)]);
    }

    #[tokio::test]
    async fn calls_do_not_wait_again_for_a_probe_that_was_not_answered_in_time() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let mut upstream = upstream(&url, UpstreamKind::Vllm);
        upstream.probe_state_mut().limit = Duration::from_millis(1);
        let (found, exchanges) = upstream.capabilities("toy", std::future::pending()).await;
        assert!(!found.is_probed);
        assert_eq!(exchanges[0].error.as_deref(), Some("it was not answered in time"));
        let (found, exchanges) = upstream.capabilities("toy", std::future::pending()).await;
        assert_eq!((found.is_probed, exchanges.len()), (false, 0));
    }

    #[tokio::test]
    async fn kinds_without_releases_to_tell_apart_are_not_probed() {
        for kind in [UpstreamKind::Openai, UpstreamKind::Anthropic] {
            let (found, exchanges) =
                upstream("http://127.0.0.1:1", kind).capabilities("toy", std::future::pending()).await;
            assert_eq!((found, exchanges), (Capabilities::assumed(kind), Vec::new()));
        }
    }
}
