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

use super::routed::{self, Version};

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
    /// Its last event has the routing, also if it gave the reply up.
    pub tells_rows: bool,
    /// It spoils its routing.
    pub spoils_rows: bool,
    /// After so many events it waits until it is let go on.
    pub holds_after: Option<usize>,
}

/// What differs between servers.
#[derive(Clone, Copy, Default)]
pub struct Server {
    pub is_sglang: bool,
    /// Its model has experts, and it was started so that it tells them.
    pub has_experts: bool,
    pub streams: Streams,
    pub bytes_per_write: Option<usize>,
}

/// vLLM's `/inference/v1/generate`.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub enum Streams {
    #[default]
    Missing,
    /// Without `--enable-scale-out`.
    Forbidden,
    /// There until it was probed.
    Gone,
    /// Its streams have no routing yet.
    Unrouted,
    /// Ids as text in log-probs; no event for a reply that it gave up.
    Older,
    Newer,
}

impl Streams {
    const fn is_there(self) -> bool {
        !matches!(self, Self::Missing | Self::Forbidden)
    }
}

/// How a stream ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Ends {
    Well,
    /// With `finish_reason` abort, after so many tokens.
    Aborted(usize),
    /// Not, after so many tokens: until its client is gone.
    Hanging(usize),
    /// With an error, after so many tokens.
    Error(usize),
    /// With its connection, after so many tokens.
    Cut(usize),
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
            tells_rows: true,
            spoils_rows: false,
            holds_after: None,
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
    server: Server,
    script: Mutex<VecDeque<Says>>,
    asked: Mutex<Vec<(String, Value)>>,
    probed: Mutex<Vec<(String, Value)>>,
    /// Answers begin once it is open.
    gate: watch::Sender<bool>,
    /// Streams that wait go on.
    goes_on: watch::Sender<bool>,
}

impl Engine {
    pub async fn start(is_sglang: bool) -> Self {
        Self::with(Server { is_sglang, ..Server::default() }).await
    }

    pub async fn with(server: Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let url = format!("http://{}/v1", listener.local_addr().expect("bound"));
        let shared = Arc::new(Shared {
            tokenizer: tokenizer(),
            server,
            script: Mutex::default(),
            asked: Mutex::default(),
            probed: Mutex::default(),
            gate: watch::Sender::new(true),
            goes_on: watch::Sender::new(false),
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

    /// Streams that wait go on.
    pub fn let_go_on(&self) {
        self.shared.goes_on.send_replace(true);
    }

    /// Paths and bodies of probes, in order.
    pub fn probed(&self) -> Vec<(String, Value)> {
        self.shared.probed.lock().expect("lock").clone()
    }

    /// Paths and bodies, in order.
    pub fn asked(&self) -> Vec<(String, Value)> {
        self.shared.asked.lock().expect("lock").clone()
    }
}

async fn answer(State(shared): State<Arc<Shared>>, uri: Uri, body: Bytes) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let path = uri.path().to_owned();
    let Server { is_sglang, has_experts, streams, .. } = shared.server;
    let is_generate = path == "/inference/v1/generate";
    let key = match () {
        () if is_sglang => "input_ids",
        () if is_generate => "token_ids",
        () => "prompt",
    };
    let is_probe = match path.as_str() {
        "/v1/chat/completions" => has_experts && body["max_tokens"] == 1,
        "/generate" => body["text"] == "hi",
        _ => is_generate && body[key] == json!([1, 2, 3]),
    };
    if is_generate && streams == Streams::Forbidden {
        return StatusCode::FORBIDDEN.into_response();
    }
    if is_probe && (!is_generate || streams.is_there()) {
        shared.probed.lock().expect("lock").push((path.clone(), body.clone()));
        let says = Says { finish_reason: "length", ..Says::from("") };
        return match path.as_str() {
            "/v1/chat/completions" => axum::Json(routed::chat_probe()).into_response(),
            "/generate" => axum::Json(generate(&[9], &says, &json!([8, 8]), false, has_experts)[0].clone())
                .into_response(),
            _ => stream(&shared, tokens_out(&[9], &says, &body, streams), &says),
        };
    }
    let is_known = match path.as_str() {
        "/generate" => is_sglang,
        "/inference/v1/generate" => streams.is_there() && streams != Streams::Gone,
        "/v1/completions" => !is_sglang,
        _ => false,
    };
    if !is_known {
        return StatusCode::NOT_FOUND.into_response();
    }
    let prompt = body[key].clone();
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
        Ends::Hanging(count) | Ends::Error(count) | Ends::Cut(count) => ids.truncate(count),
    }
    let is_stream = body["stream"] == true;
    let mut events = match () {
        () if is_sglang => {
            let tells = has_experts && body["return_routed_experts"] == true;
            generate(&ids, &says, &prompt, is_stream, tells)
        }
        () if is_generate => tokens_out(&ids, &says, &body, streams),
        () => completions(&ids, &says, &prompt, is_stream, has_experts),
    };
    if let Some(event) = says.loses.map(|at| &mut events[at]) {
        if is_sglang {
            // They name the ids too.
            event["meta_info"]["output_token_logprobs"] = Value::Null;
        }
        let of = if is_sglang { event } else { &mut event["choices"][0] };
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
    stream(&shared, events, &says)
}

/// Events, and how the stream of them ends.
fn stream(shared: &Arc<Shared>, events: Vec<Value>, says: &Says) -> Response {
    let mut events: Vec<String> = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    match says.ends {
        Ends::Hanging(_) | Ends::Cut(_) => {}
        Ends::Error(_) => {
            let error = json!({"error": {"message": "the engine is out of order", "type": "InternalServerError", "code": 500}});
            events.push(format!("data: {error}\n\ndata: [DONE]\n\n"));
        }
        Ends::Well | Ends::Aborted(_) => events.push("data: [DONE]\n\n".to_owned()),
    }
    let behind = events.split_off(says.holds_after.unwrap_or(events.len()).min(events.len()));
    let most = shared.server.bytes_per_write.unwrap_or(usize::MAX);
    let pieces = move |events: Vec<String>| {
        let bytes = events.concat().into_bytes();
        let pieces: Vec<Result<Bytes, std::io::Error>> =
            bytes.chunks(most).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
        futures_util::stream::iter(pieces)
    };
    let mut goes_on = shared.goes_on.subscribe();
    let waits = says.holds_after.is_some();
    let behind = futures_util::stream::once(async move {
        if waits {
            let _ = goes_on.wait_for(|goes_on| *goes_on).await;
        }
        pieces(behind)
    });
    let end = match says.ends {
        Ends::Hanging(_) => futures_util::stream::pending().left_stream(),
        Ends::Cut(_) => {
            let cut = Err(std::io::Error::other("cut by script"));
            futures_util::stream::iter([cut]).left_stream().right_stream()
        }
        _ => futures_util::stream::empty().right_stream().right_stream(),
    };
    let body = Body::from_stream(pieces(events).chain(behind.flatten()).chain(end));
    ([("content-type", "text/event-stream")], body).into_response()
}

/// How an engine tells the routing: from which row on.
enum Form {
    None,
    Npy(usize),
    Raw,
}

/// What the last event says of the routing.
fn rows(ids: &[u32], says: &Says, prompt: &Value, form: Form) -> Value {
    let (is_raw, start) = match form {
        Form::Npy(start) => (false, start),
        Form::Raw => (true, 0),
        Form::None => return Value::Null,
    };
    if !says.tells_rows {
        return Value::Null;
    }
    let version: Version = says.version.and_then(|version| version.parse().ok()).unwrap_or(0);
    let prompt: Vec<u32> = serde_json::from_value(prompt.clone()).expect("ids");
    let all = [prompt.as_slice(), ids].concat();
    let count = all.len() - 1 - usize::from(says.spoils_rows);
    let rows: Vec<[u8; 4]> = (start..count).map(|at| routed::row(version, at, all[at])).collect();
    if is_raw { routed::raw(&rows).into() } else { routed::npy(&rows).into() }
}

/// As vLLM's token endpoint tells a stream.
fn tokens_out(ids: &[u32], says: &Says, asked: &Value, streams: Streams) -> Vec<Value> {
    let prompt = &asked["token_ids"];
    let start = asked["sampling_params"]["routed_experts_prompt_start"].as_u64().unwrap_or(0) as usize;
    let form = match streams {
        Streams::Unrouted => Form::None,
        // It does not know the parameter.
        Streams::Older => Form::Npy(0),
        _ => Form::Npy(start),
    };
    let told = if says.misreads { json!([1]) } else { prompt.clone() };
    let is_older = streams == Streams::Older;
    let ends = matches!(says.ends, Ends::Well | Ends::Aborted(_));
    let entry = |id: &u32| {
        if is_older {
            let entry =
                json!({"token": format!("token_id:{id}"), "logprob": routed::logprob(*id), "bytes": null});
            let mut whole = entry.clone();
            whole["top_logprobs"] = json!([entry]);
            return whole;
        }
        let entry = json!({"token_id": id, "logprob": routed::logprob(*id), "rank": 1});
        let mut whole = entry.clone();
        whole["top_logprobs"] = json!([entry]);
        whole
    };
    let event = |ids: &[u32], is_last: bool| {
        let mut choice = json!({"index": 0, "finish_reason": null, "token_ids": ids, "routed_experts": null});
        choice["logprobs"] = json!({"content": ids.iter().map(entry).collect::<Vec<_>>()});
        if is_last {
            choice["finish_reason"] = says.finish_reason.into();
        }
        let mut event = json!({"request_id": "generate-tokens-c", "choices": [choice], "usage": null});
        if !is_older {
            event["output_mode"] = "tokens".into();
            event["choices"][0]["sampling_mask"] = Value::Null;
            event["choices"][0]["weight_versions"] = Value::Null;
        }
        event
    };
    let mut events: Vec<Value> = ids.iter().map(|id| event(&[*id], false)).collect();
    let is_aborted = matches!(says.ends, Ends::Aborted(_));
    // Its own event where no token came with it. Older releases have none for it.
    if is_aborted && !is_older {
        events.push(event(&[], true));
    }
    if let Some(last) = events.last_mut().filter(|_| ends && !(is_aborted && is_older)) {
        last["choices"][0]["finish_reason"] = says.finish_reason.into();
        last["choices"][0]["routed_experts"] = rows(ids, says, prompt, form);
        if !is_older && let Some(version) = says.version {
            last["choices"][0]["weight_versions"] =
                json!([{"version": version, "start": 0, "end": ids.len()}]);
        }
    }
    if !is_older && let Some(first) = events.first_mut() {
        first["prompt_token_ids"] = told.clone();
    }
    if ends {
        let usage = json!({"prompt_tokens": told.as_array().map_or(0, Vec::len), "completion_tokens": ids.len(), "total_tokens": 0});
        events.push(json!({"request_id": "generate-tokens-c", "choices": [], "usage": usage}));
    }
    events
}

fn completions(ids: &[u32], says: &Says, prompt: &Value, is_stream: bool, has_experts: bool) -> Vec<Value> {
    let told = if says.misreads { json!([1]) } else { prompt.clone() };
    let usage = json!({
        "prompt_tokens": told.as_array().map_or(0, Vec::len), "completion_tokens": ids.len(), "total_tokens": 0,
    });
    let versions = says.version.map(|version| json!([{"version": version, "start": 0, "end": ids.len()}]));
    let logprobs =
        |ids: &[u32]| json!({"token_logprobs": vec![-0.5; ids.len()], "tokens": vec!["x"; ids.len()]});
    if !is_stream {
        let mut choice = json!({
            "index": 0, "text": "not what is read", "finish_reason": says.finish_reason, "token_ids": ids,
            "prompt_token_ids": told, "logprobs": logprobs(ids), "weight_versions": versions,
        });
        choice["routed_experts"] =
            rows(ids, says, prompt, if has_experts { Form::Npy(0) } else { Form::None });
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
fn generate(ids: &[u32], says: &Says, prompt: &Value, is_stream: bool, tells: bool) -> Vec<Value> {
    let first = if is_stream { 1 } else { ids.len() };
    let event = |count: usize| {
        let logprobs: Vec<Value> = ids[..count].iter().map(|id| json!([-0.5, id, null])).collect();
        let is_last = count == ids.len() && !matches!(says.ends, Ends::Hanging(_));
        let finish = is_last.then(|| json!({"type": says.finish_reason}));
        let from = if says.is_incremental { count.saturating_sub(1) } else { 0 };
        let logprobs = &logprobs[from..];
        let mut event = json!({"text": "x".repeat(count - from), "output_ids": ids[from..count], "meta_info": {
            "id": "c", "finish_reason": finish, "prompt_tokens": prompt.as_array().map_or(0, Vec::len),
            "completion_tokens": count, "weight_version": says.version, "output_token_logprobs": logprobs,
        }});
        if is_last && tells {
            event["meta_info"]["routed_experts"] = rows(ids, says, prompt, Form::Raw);
        }
        event
    };
    (first..=ids.len()).map(event).collect()
}
