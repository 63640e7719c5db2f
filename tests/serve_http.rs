//! The serving routes: vLLM's shapes, key for key, over a model that knows two replies by heart.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use axum::body::Body;
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use lego::engine::{Engine, EngineOptions};
use lego::kernels::{AdamW, Pool, adamw};
use lego::model::Model;
use lego::serve::{ServeState, router};
use lego::text::{ChatInput, ChatTemplate, Tokenizer, encode_chat};
use serde_json::{Value, json};
use tower::ServiceExt as _;

const HELLO: &str = "Hello é 🎉!";
const CALLS: &str = "I'll look.\n<tool_call>\n{\"name\": \"shell\", \"arguments\": {\"command\": \"ls\"}}\n</tool_call>\n\
                     <tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\":\"a\"}}\n</tool_call>";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn text_folder() -> std::path::PathBuf {
    root().join("tests/fixtures/text")
}

fn tools() -> Vec<Value> {
    ["shell", "read"]
        .iter()
        .map(|name| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}))
        .collect()
}

fn messages(text: &str) -> Vec<Value> {
    vec![json!({"role": "user", "content": text})]
}

/// The golden checkpoint, trained until greedy decoding gives [`HELLO`] to "hi", and [`CALLS`] to "go" with tools.
fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| Arc::new(memorise())).clone()
}

fn memorise() -> Model {
    let mut model = Model::load(&root().join("tests/golden/qwen3_tiny")).expect("the golden checkpoint");
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
    for step in 1..=300 {
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

fn state() -> ServeState {
    let model = model();
    let options =
        EngineOptions { max_batch: 4, cache_slots: 4, threads: 1, ..EngineOptions::for_model(&model) };
    let engine = Engine::start(model, options).expect("starts");
    ServeState::new(
        engine,
        Arc::new(Tokenizer::load(&text_folder()).expect("tokenizer")),
        Arc::new(ChatTemplate::load(&text_folder()).expect("template")),
        vec!["toy".to_owned(), "alias".to_owned()],
    )
}

async fn post_to(state: &ServeState, path: &str, body: &Value) -> (StatusCode, String) {
    let request =
        Request::post(path).header("content-type", "application/json").body(Body::from(body.to_string()));
    let response = router(state.clone()).oneshot(request.expect("request")).await.expect("answers");
    let status = response.status();
    let bytes = response.into_body().collect().await.expect("body").to_bytes();
    (status, String::from_utf8(bytes.to_vec()).expect("UTF-8"))
}

async fn ask(state: &ServeState, path: &str, body: &Value) -> Value {
    let (status, text) = post_to(state, path, body).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    serde_json::from_str(&text).expect("JSON")
}

/// Data events of a stream; the terminator is checked and left out.
fn events(text: &str) -> Vec<Value> {
    let mut data: Vec<&str> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    assert_eq!(data.pop(), Some("[DONE]"));
    data.into_iter().map(|data| serde_json::from_str(data).expect("JSON")).collect()
}

async fn stream(state: &ServeState, path: &str, mut body: Value) -> Vec<Value> {
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let (status, text) = post_to(state, path, &body).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    events(&text)
}

fn fixture(name: &str) -> String {
    std::fs::read_to_string(root().join("tests/fixtures/wire").join(name)).expect("fixture")
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().map(|fields| fields.keys().map(String::as_str).collect()).unwrap_or_default()
}

fn hello() -> Value {
    json!({"model": "toy", "messages": messages("hi"), "temperature": 0, "max_tokens": 60, "logprobs": true,
           "return_token_ids": true, "return_weight_versions": true})
}

fn calls() -> Value {
    json!({"model": "toy", "messages": messages("go"), "tools": tools(), "temperature": 0, "max_tokens": 150,
           "logprobs": true, "return_token_ids": true})
}

#[tokio::test]
async fn a_whole_reply_has_vllms_keys_in_vllms_order() {
    let reply = ask(&state(), "/v1/chat/completions", &hello()).await;
    let expected: Value = serde_json::from_str(&fixture("vllm_chat.json")).expect("JSON");
    assert_eq!(keys(&reply), keys(&expected));
    let (choice, expected_choice) = (&reply["choices"][0], &expected["choices"][0]);
    assert_eq!(keys(&choice["message"]), keys(&expected_choice["message"]));
    assert_eq!(keys(choice), keys(expected_choice));
    assert_eq!(keys(&reply["usage"]), keys(&expected["usage"]));
    let (entry, expected_entry) =
        (&choice["logprobs"]["content"][0], &expected_choice["logprobs"]["content"][0]);
    assert_eq!(keys(entry), keys(expected_entry));
    for null in [
        "service_tier",
        "prompt_logprobs",
        "prompt_text",
        "kv_transfer_params",
        "ec_transfer_params",
        "metrics",
    ] {
        assert!(reply[null].is_null());
    }
    assert_eq!(choice["message"]["content"], HELLO);
    assert_eq!(choice["finish_reason"], "stop");
    assert!(choice["stop_reason"].is_null());
    let ids = choice["token_ids"].as_array().expect("ids");
    assert_eq!(ids.last(), Some(&json!(258)), "the end token is in the ids, not in the content");
    assert_eq!(ids.len(), choice["logprobs"]["content"].as_array().expect("log-probs").len());
    assert_eq!(reply["usage"]["completion_tokens"], ids.len());
    assert_eq!(reply["usage"]["prompt_tokens"], reply["prompt_token_ids"].as_array().expect("ids").len());
    assert_eq!(choice["weight_versions"], json!([{"version": "0", "start": 0, "end": ids.len()}]));
    let text: String = choice["logprobs"]["content"]
        .as_array()
        .expect("log-probs")
        .iter()
        .map(|entry| entry["token"].as_str().expect("text"))
        .collect();
    assert_eq!(text, format!("{HELLO}<|im_end|>"));
}

/// What a list of chunks is, as the keys of each part.
fn shape(event: &Value) -> Value {
    let choices: Vec<Value> = event["choices"]
        .as_array()
        .expect("choices")
        .iter()
        .map(|choice| json!({"keys": keys(choice), "delta": keys(&choice["delta"])}))
        .collect();
    json!({"keys": keys(event), "choices": choices})
}

fn fixture_shapes(name: &str) -> Vec<Value> {
    let without_comments: String = fixture(name)
        .split("\n\n")
        .filter(|event| !event.starts_with(':'))
        .map(|event| format!("{event}\n\n"))
        .collect();
    events(&without_comments).iter().map(shape).collect()
}

#[tokio::test]
async fn a_stream_has_vllms_events_in_vllms_order() {
    let state = state();
    let chunks = stream(&state, "/v1/chat/completions", hello()).await;
    let shapes = fixture_shapes("vllm_chat_stream.sse");
    let last = chunks.len() - 1;
    assert_eq!(shape(&chunks[0]), shapes[0]);
    // The fixture's model thinks first: its first chunk with content is the sixth.
    for chunk in &chunks[1..last - 1] {
        assert_eq!(shape(chunk), shapes[5]);
    }
    assert_eq!(shape(&chunks[last - 1]), shapes[shapes.len() - 2]);
    assert_eq!(shape(&chunks[last]), shapes[shapes.len() - 1]);
    assert!(chunks[0]["choices"][0]["logprobs"].is_null());

    let whole = ask(&state, "/v1/chat/completions", &hello()).await;
    assert_eq!(joined(&chunks, "token_ids"), whole["choices"][0]["token_ids"]);
    assert_eq!(joined_logprobs(&chunks), whole["choices"][0]["logprobs"]["content"]);
    assert_eq!(chunks[0]["prompt_token_ids"], whole["prompt_token_ids"]);
    let content: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(content, HELLO);
    assert_eq!(chunks[last]["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    let finished = chunks.iter().filter(|chunk| !chunk["choices"][0]["finish_reason"].is_null()).count();
    assert_eq!(finished, 1);
}

fn joined(chunks: &[Value], key: &str) -> Value {
    chunks.iter().filter_map(|chunk| chunk["choices"][0][key].as_array()).flatten().cloned().collect()
}

fn joined_logprobs(chunks: &[Value]) -> Value {
    chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect()
}

#[tokio::test]
async fn tool_calls_are_parsed_whole_and_streamed() {
    let state = state();
    let whole = ask(&state, "/v1/chat/completions", &calls()).await;
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "I'll look.");
    let found = choice["message"]["tool_calls"].as_array().expect("calls");
    assert_eq!(found.len(), 2);
    assert_eq!(found[0]["function"], json!({"name": "shell", "arguments": "{\"command\": \"ls\"}"}));
    assert_eq!(found[1]["function"]["arguments"], "{\"path\":\"a\"}");
    assert_eq!(keys(&found[0]), ["id", "type", "function"]);

    let chunks = stream(&state, "/v1/chat/completions", calls()).await;
    let shapes = fixture_shapes("vllm_chat_tools_stream.sse");
    assert!(chunks.iter().all(|chunk| shapes.contains(&shape(chunk))));
    assert_eq!(joined(&chunks, "token_ids"), choice["token_ids"]);
    let deltas: Vec<&Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array())
        .flatten()
        .collect();
    assert_eq!(deltas.len(), 2);
    for (index, (delta, call)) in deltas.iter().zip(found).enumerate() {
        assert_eq!(delta["index"], index);
        assert_eq!(delta["function"], call["function"]);
        assert!(delta["id"].as_str().expect("id").starts_with("chatcmpl-tool-"));
    }

    // The next turn continues the sampled ids.
    let mut next = calls();
    next["messages"].as_array_mut().expect("list").extend([
        json!({"role": "assistant", "content": choice["message"]["content"], "tool_calls": found}),
        json!({"role": "tool", "tool_call_id": found[0]["id"], "content": "a b"}),
    ]);
    let next = ask(&state, "/tokenize", &next).await;
    let mut expected = whole["prompt_token_ids"].as_array().expect("ids").clone();
    expected.extend(choice["token_ids"].as_array().expect("ids").clone());
    assert_eq!(next["tokens"].as_array().expect("ids")[..expected.len()], expected);

    let mut none = calls();
    none["tool_choice"] = json!("none");
    let reply = ask(&state, "/v1/chat/completions", &none).await;
    assert_eq!(reply["choices"][0]["message"]["content"], CALLS);
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn what_was_not_asked_for_is_not_sent() {
    let state = state();
    let body = json!({"messages": messages("hi"), "temperature": 0});
    let reply = ask(&state, "/v1/chat/completions", &body).await;
    assert_eq!(reply["model"], "toy");
    for (path, value) in [
        ("prompt_token_ids", &reply["prompt_token_ids"]),
        ("token_ids", &reply["choices"][0]["token_ids"]),
        ("logprobs", &reply["choices"][0]["logprobs"]),
        ("weight_versions", &reply["choices"][0]["weight_versions"]),
    ] {
        assert!(value.is_null(), "{path}");
    }
    let mut body = body;
    body["stream"] = json!(true);
    let (_, text) = post_to(&state, "/v1/chat/completions", &body).await;
    let chunks = events(&text);
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk.get("usage").is_none()
                && !chunk["choices"].as_array().expect("list").is_empty())
    );
}

#[tokio::test]
async fn stop_strings_cut_the_text_and_keep_the_ids() {
    let state = state();
    let mut body = hello();
    body["stop"] = json!(["🎉"]);
    let whole = ask(&state, "/v1/chat/completions", &body).await;
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["content"], "Hello é ");
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!("🎉")));
    let chunks = stream(&state, "/v1/chat/completions", body).await;
    assert_eq!(joined(&chunks, "token_ids"), choice["token_ids"]);
    let content: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(content, "Hello é ");
}

#[tokio::test]
async fn choices_have_seeds_of_their_own_and_repeat() {
    let state = state();
    let mut body = hello();
    body["temperature"] = json!(1.5);
    body["seed"] = json!(7);
    body["n"] = json!(3);
    let first = ask(&state, "/v1/chat/completions", &body).await;
    let again = ask(&state, "/v1/chat/completions", &body).await;
    assert_eq!(first["choices"], again["choices"]);
    let ids = |reply: &Value, index: usize| reply["choices"][index]["token_ids"].clone();
    assert!(ids(&first, 0) != ids(&first, 1) || ids(&first, 1) != ids(&first, 2));
    let mut single = body.clone();
    single["n"] = json!(1);
    let single = ask(&state, "/v1/chat/completions", &single).await;
    assert_eq!(ids(&single, 0), ids(&first, 0));
    let chunks = stream(&state, "/v1/chat/completions", body).await;
    for index in 0..3 {
        let streamed: Value = chunks
            .iter()
            .filter_map(|chunk| chunk["choices"].get(0))
            .filter(|choice| choice["index"] == index)
            .filter_map(|choice| choice["token_ids"].as_array())
            .flatten()
            .cloned()
            .collect();
        assert_eq!(streamed, ids(&first, index));
    }
}

#[tokio::test]
async fn top_logprobs_come_with_the_sampled_one() {
    let mut body = hello();
    body["top_logprobs"] = json!(3);
    let reply = ask(&state(), "/v1/chat/completions", &body).await;
    let entry = &reply["choices"][0]["logprobs"]["content"][0];
    let top = entry["top_logprobs"].as_array().expect("list");
    assert_eq!(top.len(), 3);
    // Greedy: the likeliest is the sampled one.
    assert_eq!(top[0]["logprob"], entry["logprob"]);
    assert_eq!(top[0]["token"], entry["token"]);
    assert_eq!(keys(&top[0]), ["token", "logprob", "bytes"]);
}

#[tokio::test]
async fn completions_take_ids_and_text() {
    let state = state();
    let chat = ask(&state, "/v1/chat/completions", &hello()).await;
    let prompt = &chat["prompt_token_ids"];
    let body = json!({"model": "alias", "prompt": prompt, "temperature": 0, "max_tokens": 60, "logprobs": 1,
        "return_token_ids": true});
    let reply = ask(&state, "/v1/completions", &body).await;
    assert_eq!(reply["object"], "text_completion");
    let choice = &reply["choices"][0];
    assert_eq!(choice["token_ids"], chat["choices"][0]["token_ids"]);
    assert_eq!(choice["prompt_token_ids"], *prompt);
    assert_eq!(choice["text"], HELLO);
    let logprobs = &choice["logprobs"];
    assert_eq!(keys(logprobs), ["text_offset", "token_logprobs", "tokens", "top_logprobs"]);
    assert_eq!(logprobs["token_logprobs"][0], chat["choices"][0]["logprobs"]["content"][0]["logprob"]);

    let chunks = stream(&state, "/v1/completions", body).await;
    assert_eq!(joined(&chunks, "token_ids"), choice["token_ids"]);
    assert_eq!(chunks[0]["choices"][0]["prompt_token_ids"], *prompt);
    assert!(chunks[1]["choices"][0].get("prompt_token_ids").is_none());

    let detokenized = ask(&state, "/detokenize", &json!({"tokens": prompt})).await;
    let by_text = json!({"prompt": [detokenized["prompt"], "x"], "temperature": 0});
    let reply = ask(&state, "/v1/completions", &by_text).await;
    assert_eq!(reply["choices"].as_array().expect("choices").len(), 2);
    assert!(HELLO.starts_with(reply["choices"][0]["text"].as_str().expect("text")));
}

#[tokio::test]
async fn errors_are_in_vllms_shape() {
    let state = state();
    let chat = |change: Value| {
        let mut body = hello();
        for (key, value) in change.as_object().expect("fields") {
            body[key] = value.clone();
        }
        body
    };
    for (body, status, expected) in [
        (chat(json!({"model": "gpt-4"})), 404, "The model `gpt-4` does not exist"),
        (chat(json!({"max_tokens": 512})), 400, "maximum context length is 512 tokens"),
        (
            chat(json!({"messages": messages(&"x".repeat(600))})),
            400,
            "Please reduce the length of the input messages",
        ),
        (chat(json!({"messages": []})), 400, "messages is empty"),
        (chat(json!({"messages": "x"})), 400, "messages"),
        (chat(json!({"frequency_penalty": 0.5})), 400, "frequency_penalty = 0.5 is not supported"),
        (chat(json!({"logit_bias": {"5": 1}})), 400, "logit_bias"),
        (chat(json!({"response_format": {"type": "json_object"}})), 400, "response_format"),
        (chat(json!({"tools": []})), 400, "tools is an empty list"),
        (chat(json!({"tool_choice": "required", "tools": tools()})), 400, "guided decoding"),
        (chat(json!({"temperature": -1})), 400, "temperature"),
        (chat(json!({"temperature": "hot"})), 400, "temperature"),
        (chat(json!({"top_logprobs": 21})), 400, "top_logprobs"),
        (chat(json!({"logprobs": false, "top_logprobs": 2})), 400, "`logprobs` must be set to true"),
        (chat(json!({"stream_options": {}})), 400, "stream=True"),
        (chat(json!({"n": 0})), 400, "n = 0"),
        (json!([]), 400, "not a JSON object"),
    ] {
        let (found, text) = post_to(&state, "/v1/chat/completions", &body).await;
        let reply: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(found.as_u16(), status, "{text}");
        assert_eq!(keys(&reply["error"]), ["message", "type", "param", "code"]);
        assert_eq!(reply["error"]["code"], status);
        assert!(reply["error"]["message"].as_str().expect("text").contains(expected), "{text}");
    }
    // Neutral and unknown fields do no harm.
    let body = chat(
        json!({"frequency_penalty": 0, "repetition_penalty": 1.0, "min_p": 0, "logit_bias": {}, "top_k": -1,
        "response_format": {"type": "text"}, "metadata": {"a": 1}, "user": "u", "parallel_tool_calls": true}),
    );
    ask(&state, "/v1/chat/completions", &body).await;
}

#[tokio::test]
async fn dropping_a_stream_ends_its_request() {
    let state = state();
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": true, "stream": true});
    let request = Request::post("/v1/completions").body(Body::from(body.to_string())).expect("request");
    let mut response = router(state.clone()).oneshot(request).await.expect("answers");
    assert!(response.body_mut().frame().await.is_some());
    drop(response);
    // Four at once fill the engine: all of them run only if the dropped one left.
    let all = (0..4).map(|seed| {
        let body = json!({"prompt": [4, 5], "max_tokens": 5, "seed": seed, "ignore_eos": true});
        let state = state.clone();
        async move { ask(&state, "/v1/completions", &body).await }
    });
    futures_util::future::join_all(all).await;
    assert_eq!(state.engine().stats().running, 0);
    assert!(state.engine().stats().sampled_tokens < 400 + 20);
}

#[tokio::test]
async fn the_small_routes_answer() {
    let state = state();
    let get = |path: &'static str| {
        let state = state.clone();
        async move {
            let request = Request::get(path).body(Body::empty()).expect("request");
            let response = router(state).oneshot(request).await.expect("answers");
            let status = response.status();
            (status, response.into_body().collect().await.expect("body").to_bytes())
        }
    };
    assert_eq!(get("/health").await.0, StatusCode::OK);
    assert_eq!(get("/ping").await.0, StatusCode::OK);
    assert_eq!(get("/version").await.0, StatusCode::OK);
    assert_eq!(get("/nothing").await.0, StatusCode::NOT_FOUND);
    let models: Value = serde_json::from_slice(&get("/v1/models").await.1).expect("JSON");
    assert_eq!(models["data"][1]["id"], "alias");
    assert_eq!(models["data"][0]["max_model_len"], 512);
    let tokens = ask(&state, "/tokenize", &json!({"prompt": "a<|im_end|>", "return_token_strs": true})).await;
    assert_eq!(
        tokens,
        json!({"count": 2, "max_model_len": 512, "tokens": [97, 258], "token_strs": ["a", "<|im_end|>"]})
    );
}
