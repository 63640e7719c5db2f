//! A model that knows two replies by heart, and how to ask it.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use axum::body::Body;
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use lego::engine::{Engine, EngineOptions};
use lego::kernels::{AdamW, Pool, adamw};
use lego::model::Model;
use lego::serve::{ServeState, router};
use lego::text::parsers::Forms;
use lego::text::{ChatInput, ChatTemplate, Tokenizer, encode_chat};
use serde_json::{Value, json};
use tower::ServiceExt as _;

pub const HELLO: &str = "Hello é 🎉!";
pub const CALLS: &str = "I'll look.\n<tool_call>\n{\"name\": \"shell\", \"arguments\": {\"command\": \"ls\"}}\n</tool_call>\n\
                     <tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\":\"a\"}}\n</tool_call>";

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub fn text_folder() -> std::path::PathBuf {
    root().join("tests/fixtures/text")
}

pub fn tools() -> Vec<Value> {
    ["shell", "read"]
        .iter()
        .map(|name| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}))
        .collect()
}

pub fn messages(text: &str) -> Vec<Value> {
    vec![json!({"role": "user", "content": text})]
}

/// The golden checkpoint, trained until greedy decoding gives [`HELLO`] to "hi", and [`CALLS`] to "go" with tools.
pub fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| Arc::new(memorise())).clone()
}

/// The golden checkpoint with room for the template's explanation of tools, which is long in bytes.
pub fn with_positions(positions: usize) -> Model {
    let source = root().join("tests/golden/qwen3_tiny");
    let folder = tempfile::tempdir().expect("folder");
    let config = std::fs::read(source.join("config.json")).expect("config");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["max_position_embeddings"] = json!(positions);
    std::fs::write(folder.path().join("config.json"), config.to_string()).expect("writes");
    let weights = "model.safetensors";
    std::fs::copy(source.join(weights), folder.path().join(weights)).expect("copies");
    Model::load(folder.path()).expect("the golden checkpoint")
}

pub fn memorise() -> Model {
    let mut model = with_positions(2048);
    let tokenizer = Tokenizer::load(&text_folder()).expect("tokenizer");
    let template = ChatTemplate::load(&text_folder()).expect("template");
    let tools = tools();
    let sequences: Vec<(usize, Vec<u32>)> = [("hi", None, HELLO), ("go", Some(&tools[..]), CALLS)]
        .into_iter()
        .map(|(text, tools, reply)| {
            let messages = messages(text);
            let input =
                ChatInput { messages: &messages, tools, add_generation_prompt: true, template_kwargs: None };
            let mut ids = encode_chat(&tokenizer, &template, &input).expect("encodes");
            let prompt = ids.len();
            ids.extend(tokenizer.encode(reply).expect("encodes"));
            ids.extend(tokenizer.eos_token_ids());
            (prompt, ids)
        })
        .collect();
    let ids: Vec<&[u32]> = sequences.iter().map(|(_, ids)| ids.as_slice()).collect();
    let pool = Pool::new(2);
    let mut gradients = model.gradients();
    let (mut m, mut v) = (vec![0.0; model.parameters().len()], vec![0.0; model.parameters().len()]);
    let options = AdamW { lr: 3e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 };
    for step in 1..=1500 {
        let pass = model.forward(&pool, &ids, 1.0).expect("runs");
        let least = sequences
            .iter()
            .enumerate()
            .flat_map(|(index, (prompt, _))| pass.log_probs(index)[prompt - 1..].to_vec())
            .fold(0.0f32, f32::min);
        if least > -0.05 {
            return model;
        }
        let weights: Vec<Vec<f32>> = sequences
            .iter()
            .map(|(prompt, ids)| (1..ids.len()).map(|at| if at >= *prompt { -0.02 } else { 0.0 }).collect())
            .collect();
        gradients.clear();
        model.backward(&pool, pass, &weights, &mut gradients).expect("runs");
        let total = gradients.total().to_vec();
        model.update(|parameters| adamw(parameters, &total, &mut m, &mut v, &options, step, 1.0));
    }
    panic!("the model did not learn two replies by heart");
}

pub fn state() -> ServeState {
    let model = model();
    let options = EngineOptions {
        max_batch: 4,
        cache_slots: 4,
        threads: 1,
        max_context: 1024,
        ..EngineOptions::for_model(&model)
    };
    let engine = Engine::start(model, options).expect("starts");
    let template = ChatTemplate::load(&text_folder()).expect("template");
    let forms = Forms::of_template(template.source());
    ServeState::new(
        engine,
        Arc::new(Tokenizer::load(&text_folder()).expect("tokenizer")),
        Arc::new(template),
        vec!["toy".to_owned(), "alias".to_owned()],
        forms,
    )
}

pub async fn post_to(state: &ServeState, path: &str, body: &Value) -> (StatusCode, String) {
    let request =
        Request::post(path).header("content-type", "application/json").body(Body::from(body.to_string()));
    let response = router(state.clone()).oneshot(request.expect("request")).await.expect("answers");
    let status = response.status();
    let bytes = response.into_body().collect().await.expect("body").to_bytes();
    (status, String::from_utf8(bytes.to_vec()).expect("UTF-8"))
}

pub async fn ask(state: &ServeState, path: &str, body: &Value) -> Value {
    let (status, text) = post_to(state, path, body).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    serde_json::from_str(&text).expect("JSON")
}

/// Data events of a stream; the terminator is checked and left out.
pub fn events(text: &str) -> Vec<Value> {
    let mut data: Vec<&str> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    assert_eq!(data.pop(), Some("[DONE]"));
    data.into_iter().map(|data| serde_json::from_str(data).expect("JSON")).collect()
}

pub async fn stream(state: &ServeState, path: &str, mut body: Value) -> Vec<Value> {
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let (status, text) = post_to(state, path, &body).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    events(&text)
}

pub fn fixture(name: &str) -> String {
    std::fs::read_to_string(root().join("tests/fixtures/wire").join(name)).expect("fixture")
}

pub fn keys(value: &Value) -> Vec<&str> {
    value.as_object().map(|fields| fields.keys().map(String::as_str).collect()).unwrap_or_default()
}

pub fn hello() -> Value {
    json!({"model": "toy", "messages": messages("hi"), "temperature": 0, "max_tokens": 60, "logprobs": true,
           "return_token_ids": true, "return_weight_versions": true})
}

pub fn calls() -> Value {
    json!({"model": "toy", "messages": messages("go"), "tools": tools(), "temperature": 0, "max_tokens": 150,
           "logprobs": true, "return_token_ids": true})
}

/// What a list of chunks is, as the keys of each part.
pub fn shape(event: &Value) -> Value {
    let choices: Vec<Value> = event["choices"]
        .as_array()
        .expect("choices")
        .iter()
        .map(|choice| json!({"keys": keys(choice), "delta": keys(&choice["delta"])}))
        .collect();
    json!({"keys": keys(event), "choices": choices})
}

pub fn fixture_shapes(name: &str) -> Vec<Value> {
    let without_comments: String = fixture(name)
        .split("\n\n")
        .filter(|event| !event.starts_with(':'))
        .map(|event| format!("{event}\n\n"))
        .collect();
    events(&without_comments).iter().map(shape).collect()
}

pub fn joined(chunks: &[Value], key: &str) -> Value {
    chunks.iter().filter_map(|chunk| chunk["choices"][0][key].as_array()).flatten().cloned().collect()
}

pub fn joined_logprobs(chunks: &[Value]) -> Value {
    chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect()
}
