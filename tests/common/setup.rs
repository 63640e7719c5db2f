//! A proxy on loopback in front of the mock, a store in memory, and a client.
#![allow(dead_code)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use lego::proxy::{Proxy, ProxyOptions, SessionSampling, SessionSpec};
use lego::record::{Call, CallKind, CallSink, SinkError, UpstreamKind};
use lego::upstream::{Timeouts, Upstream};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::mock::{Mock, Script};

/// Everything must happen well within this; a test that reaches it hangs.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A store in memory, with a gate before durability.
pub struct MemorySink {
    calls: watch::Sender<Vec<Call>>,
    pub drafts: watch::Sender<Vec<Call>>,
    pub gate: watch::Sender<bool>,
    pub entered: watch::Sender<usize>,
    pub is_durable: AtomicBool,
    pub is_broken: AtomicBool,
}

impl MemorySink {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            calls: watch::Sender::new(Vec::new()),
            drafts: watch::Sender::new(Vec::new()),
            gate: watch::Sender::new(true),
            entered: watch::Sender::new(0),
            is_durable: AtomicBool::new(false),
            is_broken: AtomicBool::new(false),
        })
    }

    /// Waits for `count` records.
    pub async fn calls(&self, count: usize) -> Vec<Call> {
        let mut receiver = self.calls.subscribe();
        let waiting = receiver.wait_for(|calls| calls.len() >= count);
        let calls =
            tokio::time::timeout(PATIENCE, waiting).await.expect("records in time").expect("open").clone();
        assert_eq!(calls.len(), count);
        calls
    }

    pub fn count(&self) -> usize {
        self.calls.borrow().len()
    }
}

#[async_trait]
impl CallSink for MemorySink {
    async fn append(&self, calls: Vec<Call>) -> Result<(), SinkError> {
        self.entered.send_modify(|n| *n += 1);
        self.gate.subscribe().wait_for(|open| *open).await.expect("gate");
        if self.is_broken.load(Ordering::SeqCst) {
            return Err(SinkError::Full { place: "memory".to_owned() });
        }
        self.is_durable.store(true, Ordering::SeqCst);
        self.calls.send_modify(|all| all.extend(calls));
        Ok(())
    }

    async fn draft(&self, calls: Vec<Call>) -> Result<(), SinkError> {
        self.entered.send_modify(|n| *n += 1);
        self.gate.subscribe().wait_for(|open| *open).await.expect("gate");
        if self.is_broken.load(Ordering::SeqCst) {
            return Err(SinkError::Full { place: "memory".to_owned() });
        }
        self.drafts.send_modify(|all| all.extend(calls));
        Ok(())
    }
}

/// A proxy on loopback.
pub struct Setup {
    pub mock: Mock,
    pub sink: Arc<MemorySink>,
    pub proxy: Proxy,
    pub address: SocketAddr,
}

impl Setup {
    pub async fn stand_alone(script: Script) -> Self {
        Self::with(ProxyOptions::stand_alone(), UpstreamKind::Vllm, script).await
    }

    pub async fn trainer(script: Script) -> Self {
        Self::with(ProxyOptions::trainer("policy"), UpstreamKind::Vllm, script).await
    }

    pub async fn with(options: ProxyOptions, kind: UpstreamKind, script: Script) -> Self {
        let mock = Mock::start(script).await;
        let key = Some("sk-real-canary");
        let upstream = Upstream::http(&mock.url(), kind, key, timeouts()).expect("upstream");
        Self::in_front_of(upstream, options, mock).await
    }

    /// Without retries, so that each request of a test is one call.
    pub async fn in_front_of(upstream: Upstream, mut options: ProxyOptions, mock: Mock) -> Self {
        options.retries.most = 0;
        options.probes_upstream = false;
        Self::as_told(upstream, options, mock).await
    }

    pub async fn retrying(mut options: ProxyOptions, script: Script) -> Self {
        options.probes_upstream = false;
        let mock = Mock::start(script).await;
        let upstream = Upstream::http(&mock.url(), UpstreamKind::Vllm, None, timeouts()).expect("upstream");
        Self::as_told(upstream, options, mock).await
    }

    pub async fn as_told(upstream: Upstream, options: ProxyOptions, mock: Mock) -> Self {
        let sink = MemorySink::new();
        let proxy = Proxy::new(options, Arc::clone(&sink) as Arc<dyn CallSink>, upstream);
        let listener = lego::proxy::listen("127.0.0.1", 0, false).await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        let served = proxy.clone();
        tokio::spawn(async move { served.serve(listener).await });
        Self { mock, sink, proxy, address }
    }

    pub fn url(&self) -> String {
        format!("http://{}/v1/chat/completions", self.address)
    }

    pub async fn post(&self, body: &Value) -> reqwest::Response {
        post(&self.url(), body).await
    }
}

pub fn timeouts() -> Timeouts {
    Timeouts { connect: Duration::from_secs(5), first_byte: PATIENCE, idle: PATIENCE }
}

pub fn client() -> reqwest::Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().no_proxy().build().expect("client")
}

pub async fn post(url: &str, body: &Value) -> reqwest::Response {
    let request = client().post(url).header("content-type", "application/json");
    let request = request.header("authorization", "Bearer sk-client-canary").body(body.to_string());
    tokio::time::timeout(PATIENCE, request.send()).await.expect("an answer in time").expect("an answer")
}

/// The body of a reply that ends as it should.
pub async fn text(response: reqwest::Response) -> Bytes {
    let (bytes, is_whole) = read(response).await;
    assert!(is_whole, "broken off after {}", String::from_utf8_lossy(&bytes));
    bytes
}

/// The body of a reply whose connection is broken off.
pub async fn broken(response: reqwest::Response) -> Bytes {
    let (bytes, is_whole) = read(response).await;
    assert!(!is_whole, "a clean end after {}", String::from_utf8_lossy(&bytes));
    bytes
}

/// The body of a reply, and whether it ended as it should.
pub async fn read(mut response: reqwest::Response) -> (Bytes, bool) {
    let mut bytes = Vec::new();
    loop {
        match tokio::time::timeout(PATIENCE, response.chunk()).await.expect("an end in time") {
            Ok(Some(piece)) => bytes.extend_from_slice(&piece),
            Ok(None) => return (bytes.into(), true),
            Err(_) => return (bytes.into(), false),
        }
    }
}

pub fn request(stream: bool) -> Value {
    json!({"model": "toy", "messages": [{"role": "user", "content": "hi 北京"}], "temperature": 0.7, "stream": stream})
}

pub fn spec(name: &str) -> SessionSpec {
    SessionSpec {
        session_id: name.parse().expect("id"),
        trial_id: Some("trial-1".parse().expect("id")),
        task_id: Some("task-1".parse().expect("id")),
        harness: Some("mini".to_owned()),
        kind: CallKind::Policy,
        sampling: SessionSampling::Pinned { temperature: 1.0, seed: 7 },
        policy_version: None,
        max_calls: None,
    }
}
