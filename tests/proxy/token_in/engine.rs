//! A token endpoint on loopback: answers each prompt of ids with the next scripted text, token by token, and remembers
//! what it was asked.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use bytes::Bytes;
use futures_util::StreamExt;
use lego::text::Tokenizer;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

pub fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/models/lego-tiny"))
}

pub fn tokenizer() -> Tokenizer {
    Tokenizer::load(folder()).expect("the bundled tokenizer")
}

/// One reply.
#[derive(Clone)]
pub struct Says {
    pub text: String,
    pub finish_reason: &'static str,
    /// What it says it read is not what it was sent.
    pub misreads: bool,
    pub ends: Ends,
    /// The weights that it says it has.
    pub version: Option<&'static str>,
    /// SGLang: each event has only what is new.
    pub is_incremental: bool,
    /// Each character is a token of its own: the same text in other ids.
    pub is_spelled: bool,
    /// The event of this token has its text and not its id.
    pub loses: Option<usize>,
    /// Its last event has text alone: some that was held back.
    pub flushes: bool,
    /// It answers with this status, and nothing else.
    pub refuses: Option<u16>,
}

/// How a stream ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Ends {
    Well,
    /// With `finish_reason` abort, after so many tokens.
    Aborted(usize),
    /// Not, after so many tokens: until its client is gone.
    Hanging(usize),
}

impl From<&str> for Says {
    /// Sampled to its end.
    fn from(text: &str) -> Self {
        Self {
            text: format!("{text}<|im_end|>"),
            finish_reason: "stop",
            misreads: false,
            ends: Ends::Well,
            version: Some("7"),
            is_incremental: false,
            is_spelled: false,
            loses: None,
            flushes: false,
            refuses: None,
        }
    }
}

#[derive(Clone)]
pub struct Engine {
    pub url: String,
    shared: Arc<Shared>,
}

struct Shared {
    tokenizer: Tokenizer,
    is_sglang: bool,
    script: Mutex<VecDeque<Says>>,
    asked: Mutex<Vec<(String, Value)>>,
    /// Answers begin once it is open.
    gate: watch::Sender<bool>,
}

impl Engine {
    pub async fn start(is_sglang: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let url = format!("http://{}/v1", listener.local_addr().expect("bound"));
        let shared = Arc::new(Shared {
            tokenizer: tokenizer(),
            is_sglang,
            script: Mutex::default(),
            asked: Mutex::default(),
            gate: watch::Sender::new(true),
        });
        let router = Router::new().fallback(any(answer)).with_state(Arc::clone(&shared));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, shared }
    }

    pub fn will_say(&self, says: impl Into<Says>) {
        self.shared.script.lock().expect("lock").push_back(says.into());
    }

    /// Answers begin from then on, or not before.
    pub fn set_open(&self, is_open: bool) {
        self.shared.gate.send_replace(is_open);
    }

    /// Paths and bodies, in order.
    pub fn asked(&self) -> Vec<(String, Value)> {
        self.shared.asked.lock().expect("lock").clone()
    }
}

async fn answer(State(shared): State<Arc<Shared>>, uri: Uri, body: Bytes) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let path = uri.path().to_owned();
    let is_known = if shared.is_sglang { path == "/generate" } else { path == "/v1/completions" };
    if !is_known {
        return StatusCode::NOT_FOUND.into_response();
    }
    let prompt = body[if shared.is_sglang { "input_ids" } else { "prompt" }].clone();
    shared.asked.lock().expect("lock").push((path, body.clone()));
    let Some(says) = shared.script.lock().expect("lock").pop_front() else {
        return (StatusCode::BAD_REQUEST, "the script is at its end").into_response();
    };
    let _ = shared.gate.subscribe().wait_for(|is_open| *is_open).await;
    if let Some(status) = says.refuses {
        return StatusCode::from_u16(status).expect("a status").into_response();
    }
    let encode = |text: &str| shared.tokenizer.encode(text).expect("encodes");
    let mut ids = match says.text.strip_suffix("<|im_end|>").filter(|_| says.is_spelled) {
        Some(text) => text
            .chars()
            .flat_map(|c| encode(c.encode_utf8(&mut [0; 4])))
            .chain(encode("<|im_end|>"))
            .collect(),
        None => encode(&says.text),
    };
    let mut says = says;
    match says.ends {
        Ends::Well => {}
        Ends::Aborted(count) => {
            ids.truncate(count);
            says.finish_reason = "abort";
        }
        Ends::Hanging(count) => ids.truncate(count),
    }
    let is_stream = body["stream"] == true;
    let mut events = match shared.is_sglang {
        true => generate(&ids, &says, &prompt, is_stream),
        false => completions(&ids, &says, &prompt, is_stream),
    };
    if let Some(event) = says.loses.map(|at| &mut events[at]) {
        if shared.is_sglang {
            // They name the ids too.
            event["meta_info"]["output_token_logprobs"] = Value::Null;
        }
        let of = if shared.is_sglang { event } else { &mut event["choices"][0] };
        for name in ["output_ids", "token_ids", "logprobs"] {
            of.as_object_mut().expect("an object").remove(name);
        }
    }
    if says.flushes {
        let at = ids.len() - 1;
        let mut last = events[at].clone();
        events[at]["choices"][0]["finish_reason"] = Value::Null;
        last["choices"][0]["token_ids"] = json!([]);
        last["choices"][0]["logprobs"] = Value::Null;
        events.insert(at + 1, last);
    }
    if !is_stream {
        return ([("content-type", "application/json")], events[0].to_string()).into_response();
    }
    let mut stream: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    if matches!(says.ends, Ends::Hanging(_)) {
        let first = futures_util::stream::iter([Ok::<_, std::convert::Infallible>(Bytes::from(stream))]);
        let body = Body::from_stream(first.chain(futures_util::stream::pending()));
        return ([("content-type", "text/event-stream")], body).into_response();
    }
    stream += "data: [DONE]\n\n";
    ([("content-type", "text/event-stream")], stream).into_response()
}

fn completions(ids: &[u32], says: &Says, prompt: &Value, is_stream: bool) -> Vec<Value> {
    let told = if says.misreads { json!([1]) } else { prompt.clone() };
    let usage = json!({
        "prompt_tokens": told.as_array().map_or(0, Vec::len), "completion_tokens": ids.len(), "total_tokens": 0,
    });
    let versions = says.version.map(|version| json!([{"version": version, "start": 0, "end": ids.len()}]));
    let logprobs =
        |ids: &[u32]| json!({"token_logprobs": vec![-0.5; ids.len()], "tokens": vec!["x"; ids.len()]});
    if !is_stream {
        let choice = json!({
            "index": 0, "text": "not what is read", "finish_reason": says.finish_reason, "token_ids": ids,
            "prompt_token_ids": told, "logprobs": logprobs(ids), "weight_versions": versions,
        });
        return vec![
            json!({"id": "c", "object": "text_completion", "model": "toy", "choices": [choice], "usage": usage}),
        ];
    }
    let mut events = Vec::new();
    for (index, id) in ids.iter().enumerate() {
        let is_last = index + 1 == ids.len() && !matches!(says.ends, Ends::Hanging(_));
        let mut choice = json!({"index": 0, "text": "x", "token_ids": [id], "logprobs": logprobs(&[*id])});
        choice["finish_reason"] = if is_last { says.finish_reason.into() } else { Value::Null };
        if index == 0 {
            choice["prompt_token_ids"] = told.clone();
        }
        if is_last {
            choice["weight_versions"] = json!(versions);
        }
        events.push(json!({"id": "c", "object": "text_completion", "model": "toy", "choices": [choice]}));
    }
    if ids.is_empty() {
        let choice = json!({"index": 0, "text": "", "token_ids": [], "finish_reason": says.finish_reason});
        events.push(json!({"id": "c", "object": "text_completion", "model": "toy", "choices": [choice]}));
    }
    if !matches!(says.ends, Ends::Hanging(_)) {
        events.push(
            json!({"id": "c", "object": "text_completion", "model": "toy", "choices": [], "usage": usage}),
        );
    }
    events
}

/// Each event tells everything so far, or only what is new.
fn generate(ids: &[u32], says: &Says, prompt: &Value, is_stream: bool) -> Vec<Value> {
    let first = if is_stream { 1 } else { ids.len() };
    let event = |count: usize| {
        let logprobs: Vec<Value> = ids[..count].iter().map(|id| json!([-0.5, id, null])).collect();
        let is_last = count == ids.len() && !matches!(says.ends, Ends::Hanging(_));
        let finish = is_last.then(|| json!({"type": says.finish_reason}));
        let from = if says.is_incremental { count.saturating_sub(1) } else { 0 };
        let logprobs = &logprobs[from..];
        json!({"text": "x".repeat(count - from), "output_ids": ids[from..count], "meta_info": {
            "id": "c", "finish_reason": finish, "prompt_tokens": prompt.as_array().map_or(0, Vec::len),
            "completion_tokens": count, "weight_version": says.version, "output_token_logprobs": logprobs,
        }})
    };
    (first..=ids.len()).map(event).collect()
}
