//! A vLLM-shaped upstream on loopback: answers by script, breaks by script, remembers what it was asked.
#![allow(dead_code)]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

#[path = "mock_reply.rs"]
mod reply;

#[allow(unused_imports)]
pub use reply::{PROMPT_IDS, Part, Script, Style, events, id_of, whole};

/// A request that the mock got.
#[derive(Clone)]
pub struct Asked {
    pub body: Bytes,
    pub headers: HeaderMap,
    pub uri: Uri,
}

impl Asked {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("the proxy sends JSON")
    }
}

/// The running mock.
#[derive(Clone)]
pub struct Mock {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    script: Mutex<Script>,
    asked: Mutex<Vec<Asked>>,
    gate: watch::Sender<bool>,
    step: watch::Sender<usize>,
    /// Bytes of streams that were handed to the server.
    sent: AtomicUsize,
    tokenized: Mutex<Vec<Value>>,
    /// Replies that were dropped before their end.
    aborted: watch::Sender<usize>,
    /// Requests whose answer began.
    started: watch::Sender<usize>,
}

impl Mock {
    pub async fn start(script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        let mock = Self { address, shared: Self::shared(script) };
        let router = mock.router();
        tokio::spawn(async move { axum::serve(listener, router).await });
        mock
    }

    /// A mock without a listener, for use in the process.
    pub fn in_process(script: Script) -> Self {
        Self { address: ([127, 0, 0, 1], 0).into(), shared: Self::shared(script) }
    }

    fn shared(script: Script) -> Arc<Shared> {
        Arc::new(Shared {
            script: Mutex::new(script),
            asked: Mutex::default(),
            gate: watch::Sender::new(false),
            step: watch::Sender::new(0),
            sent: AtomicUsize::new(0),
            tokenized: Mutex::default(),
            aborted: watch::Sender::new(0),
            started: watch::Sender::new(0),
        })
    }

    pub fn router(&self) -> Router {
        Router::new()
            .route("/v1/chat/completions", post(chat))
            .route("/v1/messages", post(chat))
            .route("/v1/responses", post(response))
            .route("/v1/completions", post(chat))
            .route("/tokenize", post(tokenize))
            .route(
                "/v1/models",
                get(|| async { axum::Json(json!({"object": "list", "data": [{"id": "toy"}]})) }),
            )
            .layer(DefaultBodyLimit::disable())
            .with_state(Arc::clone(&self.shared))
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn set(&self, script: Script) {
        *self.shared.script.lock().expect("script") = script;
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.shared.asked.lock().expect("asked").clone()
    }

    pub fn open_gate(&self) {
        self.shared.gate.send_replace(true);
    }

    /// Lets streams go on up to the part that waits for a later step.
    pub fn step(&self, step: usize) {
        self.shared.step.send_replace(step);
    }

    /// Bytes of streams that were handed to the server so far.
    pub fn sent(&self) -> usize {
        self.shared.sent.load(Ordering::SeqCst)
    }

    /// What `/tokenize` was asked.
    pub fn tokenized(&self) -> Vec<Value> {
        self.shared.tokenized.lock().expect("tokenized").clone()
    }

    /// Waits until `count` replies were dropped before their end.
    pub async fn aborted(&self, count: usize) {
        self.shared.aborted.subscribe().wait_for(|n| *n >= count).await.expect("mock");
    }

    /// Waits until `count` requests came.
    pub async fn started(&self, count: usize) {
        self.shared.started.subscribe().wait_for(|n| *n >= count).await.expect("mock");
    }
}

/// Counts a reply that is dropped before its end.
struct Watched {
    shared: Arc<Shared>,
    is_over: bool,
}

impl Drop for Watched {
    fn drop(&mut self) {
        if !self.is_over {
            self.shared.aborted.send_modify(|n| *n += 1);
        }
    }
}

async fn tokenize(
    State(shared): State<Arc<Shared>>,
    axum::Json(asked): axum::Json<Value>,
) -> axum::Json<Value> {
    shared.tokenized.lock().expect("tokenized").push(asked);
    axum::Json(json!({"count": 17, "max_model_len": 99, "tokens": []}))
}

/// As of an upstream that speaks Responses, where the script says that this one does.
async fn response(
    state: State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if !state.script.lock().expect("script").has_responses {
        return StatusCode::NOT_FOUND.into_response();
    }
    chat(state, method, uri, headers, body).await
}

async fn chat(
    State(shared): State<Arc<Shared>>,
    _: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let number = {
        let mut asked = shared.asked.lock().expect("asked");
        asked.push(Asked { body: body.clone(), headers, uri });
        asked.len() - 1
    };
    shared.started.send_modify(|n| *n += 1);
    let script = shared.script.lock().expect("script").clone();
    let request: Value = serde_json::from_slice(&body).expect("the proxy sends JSON");
    let mut watched = Watched { shared: Arc::clone(&shared), is_over: false };
    if script.is_silent {
        let mut gate = shared.gate.subscribe();
        gate.wait_for(|open| *open).await.expect("mock");
    }
    if let Some((status, text, more)) = script.first_errors.get(number) {
        watched.is_over = true;
        let mut response = (StatusCode::from_u16(*status).expect("status"), *text).into_response();
        for (name, value) in more {
            response.headers_mut().insert(*name, value.parse().expect("header"));
        }
        return response;
    }
    let mut unknown: Vec<&str> =
        script.unknown.iter().copied().filter(|name| request.get(*name).is_some()).collect();
    unknown.truncate(if script.names_one { 1 } else { unknown.len() });
    let mut response = if let Some((status, text)) = script.error.clone() {
        (StatusCode::from_u16(status).expect("status"), text).into_response()
    } else if !unknown.is_empty() {
        let message = format!("Unrecognized request arguments supplied: {}", unknown.join(", "));
        (StatusCode::BAD_REQUEST, axum::Json(json!({"error": {"message": message, "type": "x"}})))
            .into_response()
    } else if script.refuses_logprobs && request.get("logprobs").is_some() {
        let error = json!({"error": {"message": "logprobs is not supported", "type": "x", "code": 400}});
        (StatusCode::BAD_REQUEST, axum::Json(error)).into_response()
    } else if request["stream"] == true {
        return stream(shared, watched, &script, &request);
    } else {
        let text = script.body.clone().unwrap_or_else(|| whole(&script, &request).into_bytes());
        let bytes = match script.spoil_body {
            Some(spoil) => spoil(String::from_utf8(text).expect("text")),
            None => text,
        };
        ([("content-type", "application/json")], bytes).into_response()
    };
    watched.is_over = true;
    for (name, value) in &script.headers {
        response.headers_mut().append(*name, value.parse().expect("header"));
    }
    response
}

fn stream(shared: Arc<Shared>, watched: Watched, script: &Script, request: &Value) -> Response {
    let own = || events(script, request).into_iter().map(Part::Event).collect();
    let mut parts: Vec<Part> = script.parts.clone().unwrap_or_else(own);
    if let Some(spoil) = script.spoil {
        parts = spoil(parts);
    }
    let (sender, receiver) = mpsc::channel::<Result<Bytes, std::io::Error>>(1);
    let bytes_per_write = script.bytes_per_write.unwrap_or(usize::MAX);
    let mut gate = shared.gate.subscribe();
    let mut steps = shared.step.subscribe();
    tokio::spawn(async move {
        // All of it, so that it is dropped with this task.
        let mut watched = watched;
        for part in parts {
            let bytes = match part {
                Part::Event(data) => format!("data: {data}\n\n").into_bytes(),
                Part::Raw(bytes) => bytes,
                Part::Gate => {
                    tokio::select! {
                        _ = gate.wait_for(|open| *open) => {}
                        () = sender.closed() => return,
                    }
                    continue;
                }
                Part::Until(step) => {
                    tokio::select! {
                        _ = steps.wait_for(|now| *now >= step) => {}
                        () = sender.closed() => return,
                    }
                    continue;
                }
                Part::Cut => {
                    watched.is_over = true;
                    let _ = sender.send(Err(std::io::Error::other("cut by script"))).await;
                    return;
                }
            };
            for piece in bytes.chunks(bytes_per_write.min(bytes.len().max(1))) {
                if sender.send(Ok(Bytes::copy_from_slice(piece))).await.is_err() {
                    return;
                }
                shared.sent.fetch_add(piece.len(), Ordering::SeqCst);
            }
        }
        watched.is_over = true;
    });
    let body = Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(receiver));
    let mut response = Response::new(body);
    response
        .headers_mut()
        .insert("content-type", "text/event-stream; charset=utf-8".parse().expect("header"));
    for (name, value) in &script.headers {
        response.headers_mut().append(*name, value.parse().expect("header"));
    }
    response
}
