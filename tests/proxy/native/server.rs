//! An SGLang server as far as `/generate` goes, with sampling defaults of its own that nobody sees.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tokio::sync::watch;

/// What a server does about expert routing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Routing {
    Gives,
    Ignores,
    Refuses,
}

/// What kind of server it is.
#[derive(Clone)]
pub struct Style {
    pub incremental: bool,
    pub has_generate: bool,
    pub has_tokenizer: bool,
    /// It knows `return_prompt_token_ids`.
    pub tells_prompt: bool,
    pub routing: Routing,
    /// The event of a stream that waits for [`Server::go_on`]; 0: the reply's head does.
    pub waits: Option<usize>,
    /// Data of a stream's events in the place of its own.
    pub script: Option<Vec<String>>,
    pub error: Option<(u16, String)>,
}

impl Default for Style {
    fn default() -> Self {
        Self {
            incremental: false,
            has_generate: true,
            has_tokenizer: true,
            tells_prompt: true,
            routing: Routing::Ignores,
            waits: None,
            script: None,
            error: None,
        }
    }
}

/// The running server.
pub struct Server {
    pub url: String,
    shared: Arc<Shared>,
}

struct Shared {
    style: Style,
    asked: Mutex<Vec<(String, Value)>>,
    go_on: watch::Sender<bool>,
}

impl Server {
    pub async fn start(style: Style) -> Self {
        let shared = Arc::new(Shared { style, asked: Mutex::default(), go_on: watch::Sender::new(false) });
        let router = Router::new().fallback(answer).with_state(Arc::clone(&shared));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, shared }
    }

    /// What a route was asked, without probes.
    pub fn asked(&self, route: &str) -> Vec<Value> {
        let asked = self.shared.asked.lock().expect("asked");
        let is_it = |(path, body): &&(String, Value)| path == route && body["text"] != "hi";
        asked.iter().filter(is_it).map(|(_, body)| body.clone()).collect()
    }

    pub fn probes(&self) -> usize {
        self.shared.asked.lock().expect("asked").iter().filter(|(_, body)| body["text"] == "hi").count()
    }

    pub fn go_on(&self) {
        self.shared.go_on.send_replace(true);
    }

    /// How the tokens of a request were sampled: what it leaves out is filled in.
    pub fn sampled(asked: &Value) -> Value {
        let hidden =
            json!({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1});
        let mut used = hidden;
        for (name, value) in used.as_object_mut().expect("object") {
            let sent = &asked["sampling_params"][name.as_str()];
            if !sent.is_null() {
                *value = sent.clone();
            }
        }
        used
    }
}

/// The token ids of a text.
pub fn ids_of(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// What is sampled for an output: texts and ids.
pub const TEXTS: [&str; 4] = ["H", "", "é🎉", ""];

pub fn sampled_ids(index: usize) -> Vec<u32> {
    (0..4).map(|at| 1000 + 10 * index as u32 + at).collect()
}

pub fn logprob_of(id: u32) -> f64 {
    -f64::from(id % 8 + 1) / 8.0
}

async fn answer(State(shared): State<Arc<Shared>>, uri: Uri, body: Bytes) -> Response {
    let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
    shared.asked.lock().expect("asked").push((uri.path().to_owned(), asked.clone()));
    let style = &shared.style;
    let is_probe = asked["text"] == "hi";
    let waits = style.waits == Some(0) && !is_probe && uri.path() != "/tokenize";
    if waits {
        shared.go_on.subscribe().wait_for(|on| *on).await.expect("a test");
    }
    match uri.path() {
        "/generate" if style.has_generate => {}
        "/tokenize" if style.has_tokenizer => return axum::Json(tokens(&asked)).into_response(),
        "/v1/completions" => return own_completions(&asked),
        _ => return (StatusCode::NOT_FOUND, axum::Json(json!({"detail": "Not Found"}))).into_response(),
    }
    if let Some((status, text)) = style.error.clone().filter(|_| !is_probe) {
        return (StatusCode::from_u16(status).expect("status"), text).into_response();
    }
    let wants_routing = asked["return_routed_experts"] == true;
    if wants_routing && style.routing == Routing::Refuses {
        let error =
            json!({"error": {"message": "the server was not started with --enable-return-routed-experts"}});
        return (StatusCode::BAD_REQUEST, axum::Json(error)).into_response();
    }
    let outputs = outputs(&asked);
    if asked["stream"] == true { stream(&shared, &asked, &outputs) } else { whole(style, &asked, &outputs) }
}

/// The prompts of a request, and whether it is a batch.
fn prompts(asked: &Value) -> (Vec<Vec<u32>>, bool) {
    let ids = |list: &Value| -> Vec<u32> {
        list.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    match (&asked["text"], &asked["input_ids"]) {
        (Value::String(text), _) => (vec![ids_of(text)], false),
        (Value::Array(texts), _) => {
            (texts.iter().map(|text| ids_of(text.as_str().expect("text"))).collect(), true)
        }
        (_, Value::Array(list)) if list[0].is_array() => (list.iter().map(ids).collect(), true),
        (_, list) => (vec![ids(list)], false),
    }
}

/// The prompt of each output.
fn outputs(asked: &Value) -> Vec<Vec<u32>> {
    let sampling = &asked["sampling_params"];
    let first = sampling.get(0).unwrap_or(sampling);
    let n = first["n"].as_u64().unwrap_or(1) as usize;
    prompts(asked).0.into_iter().flat_map(|prompt| vec![prompt; n]).collect()
}

fn tokens(asked: &Value) -> Value {
    let tokens = match &asked["prompt"] {
        Value::Array(texts) => texts.iter().map(|text| json!(ids_of(text.as_str().expect("text")))).collect(),
        text => json!(ids_of(text.as_str().expect("text"))),
    };
    json!({"tokens": tokens, "count": 1, "max_model_len": 4096})
}

/// An output up to its token number `end`, from `start` on.
fn output(
    style: &Style,
    asked: &Value,
    (index, prompt): (usize, &Vec<u32>),
    start: usize,
    end: usize,
) -> Value {
    let ids = sampled_ids(index);
    let is_last = end == ids.len();
    let mut output = json!({"text": TEXTS[start..end].concat(), "output_ids": ids[start..end]});
    if asked["return_prompt_token_ids"] == true && style.tells_prompt {
        output["prompt_token_ids"] = json!(prompt);
    }
    let reason = if is_last { json!({"type": "stop", "matched": ids[end - 1]}) } else { Value::Null };
    let mut meta = json!({"id": format!("r{index}"), "finish_reason": reason, "prompt_tokens": prompt.len(),
        "weight_version": "step-7"});
    if asked["return_logprob"] == true {
        let text =
            |at: usize| if asked["return_text_in_logprobs"] == true { json!(TEXTS[at]) } else { Value::Null };
        let pair = |at: usize| json!([logprob_of(ids[at]), ids[at], text(at)]);
        meta["input_token_logprobs"] = json!([]);
        meta["output_token_logprobs"] = (start..end).map(pair).collect();
        meta["output_token_logprobs_length"] = end.into();
        if asked["top_logprobs_num"].as_u64().unwrap_or(0) > 0 {
            meta["input_top_logprobs"] = json!([]);
            let other = |at: usize| json!([pair(at), [-5.5, 7, "other"]]);
            meta["output_top_logprobs"] = (start..end).map(other).collect();
        }
    }
    meta["completion_tokens"] = end.into();
    meta["cached_tokens"] = 1.into();
    if is_last && asked["return_routed_experts"] == true && style.routing == Routing::Gives {
        // Two layers, two experts.
        let rows = prompt.len() + ids.len() - 1;
        let bytes: Vec<u8> = (0..rows as i32 * 4).flat_map(|at| (at % 8).to_le_bytes()).collect();
        meta["routed_experts"] = STANDARD.encode(bytes).into();
    }
    output["meta_info"] = meta;
    output
}

fn whole(style: &Style, asked: &Value, outputs: &[Vec<u32>]) -> Response {
    let all: Vec<Value> =
        outputs.iter().enumerate().map(|one| output(style, asked, one, 0, TEXTS.len())).collect();
    let is_batch = prompts(asked).1 || all.len() > 1;
    axum::Json(if is_batch { Value::from(all) } else { all[0].clone() }).into_response()
}

fn stream(shared: &Arc<Shared>, asked: &Value, outputs: &[Vec<u32>]) -> Response {
    let style = &shared.style;
    let is_batch = prompts(asked).1 || outputs.len() > 1;
    let mut events = Vec::new();
    for end in 1..=TEXTS.len() {
        for one in outputs.iter().enumerate() {
            let start = if style.incremental { end - 1 } else { 0 };
            let mut event = output(style, asked, one, start, end);
            if is_batch {
                event["index"] = one.0.into();
            }
            events.push(event.to_string());
        }
    }
    let mut events = style.script.clone().unwrap_or(events);
    events.push("[DONE]".to_owned());
    let (go_on, waits) = (shared.go_on.subscribe(), style.waits);
    let blocks = events.into_iter().map(|data| Bytes::from(format!("data: {data}\n\n"))).enumerate();
    let body = futures_util::stream::unfold((blocks, go_on), move |(mut blocks, mut go_on)| async move {
        let (number, block) = blocks.next()?;
        if waits == Some(number) {
            go_on.wait_for(|on| *on).await.expect("a test");
        }
        Some((Ok::<_, std::io::Error>(block), (blocks, go_on)))
    });
    ([("content-type", "text/event-stream")], Body::from_stream(body)).into_response()
}

/// The server's own endpoint of completions.
fn own_completions(asked: &Value) -> Response {
    let choice =
        json!({"index": 0, "text": "own", "logprobs": null, "finish_reason": "stop", "matched_stop": null});
    let mut reply = json!({"id": "own", "object": "text_completion", "created": 1, "model": asked["model"], "choices": [choice]});
    if asked["stream"] == true {
        return ([("content-type", "text/event-stream")], format!("data: {reply}\n\ndata: [DONE]\n\n"))
            .into_response();
    }
    reply["usage"] = json!({"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2});
    axum::Json(reply).into_response()
}
