//! Completions, errors, aborts and the small routes.

use axum::body::Body;
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use lego::serve::router;
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::support::*;

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
        (chat(json!({"max_tokens": 1024})), 400, "maximum context length is 1024 tokens"),
        (
            chat(json!({"messages": messages(&"x".repeat(1200))})),
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
    assert_eq!(models["data"][0]["max_model_len"], 1024);
    let tokens = ask(&state, "/tokenize", &json!({"prompt": "a<|im_end|>", "return_token_strs": true})).await;
    assert_eq!(
        tokens,
        json!({"count": 2, "max_model_len": 1024, "tokens": [97, 258], "token_strs": ["a", "<|im_end|>"]})
    );
}
