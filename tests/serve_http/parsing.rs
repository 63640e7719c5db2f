//! Reasoning and tool calls, as the server was told to read them.

use axum::http::StatusCode;
use lego::text::ChatTemplate;
use lego::text::parsers::{Forms, ReasoningForm, ToolForm};
use serde_json::{Map, Value, json};

use crate::support::*;

fn why() -> Value {
    json!({"model": "toy", "messages": messages("why"), "temperature": 0, "max_tokens": 60, "logprobs": true,
           "return_token_ids": true, "return_weight_versions": true})
}

#[tokio::test]
async fn reasoning_is_apart_from_the_content_whole_and_streamed() {
    let state = state();
    let whole = ask(&state, "/v1/chat/completions", &why()).await;
    let choice = &whole["choices"][0];
    assert_eq!(
        (&choice["message"]["reasoning"], &choice["message"]["content"]),
        (&json!("Hm."), &json!("No."))
    );
    assert_eq!(choice["finish_reason"], "stop");

    let chunks = stream(&state, "/v1/chat/completions", why()).await;
    let text = |key: &str| -> String {
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][key].as_str()).collect()
    };
    assert_eq!((text("reasoning").as_str(), text("content").as_str()), ("Hm.", "No."));
    let shapes: Vec<Value> = fixture_shapes("vllm_chat_stream.sse").into_iter().map(without_delta).collect();
    assert!(chunks.iter().all(|chunk| shapes.contains(&without_delta(shape(chunk)))));
    // Markup has no text, but ids and log-probs.
    assert_eq!(joined(&chunks, "token_ids"), choice["token_ids"]);
    assert_eq!(joined_logprobs(&chunks), choice["logprobs"]["content"]);

    let state = state_with(template(), Forms { tools: Some(ToolForm::Hermes), reasoning: None });
    let reply = ask(&state, "/v1/chat/completions", &why()).await;
    let message = &reply["choices"][0]["message"];
    assert_eq!((&message["reasoning"], &message["content"]), (&Value::Null, &json!(THOUGHT)));
}

#[tokio::test]
async fn a_block_that_the_template_opened_is_reasoning() {
    let begin = "'<|im_start|>assistant\\n'";
    let source = template().source().replace(begin, "'<|im_start|>assistant\\n<think>\\n'");
    assert!(source.contains("<think>\\n' }}"), "the template was changed: {source}");
    let opening = ChatTemplate::from_source(&source, Map::new()).expect("parses");
    let state = state_with(opening, Forms { tools: None, reasoning: Some(ReasoningForm::Qwen3) });
    let reply = ask(&state, "/v1/chat/completions", &why()).await;
    let message = &reply["choices"][0]["message"];
    assert_eq!((&message["reasoning"], &message["content"]), (&json!("Hm."), &json!("No.")));
    let sampled = ask(&state, "/detokenize", &json!({"tokens": reply["choices"][0]["token_ids"]})).await;
    assert_eq!(sampled["prompt"], "Hm.\n</think>\n\nNo.<|im_end|>");
}

#[tokio::test]
async fn a_malformed_call_is_content() {
    // JSON is no call in Qwen3-Coder's form.
    let state = state_with(template(), Forms { tools: Some(ToolForm::Qwen3Coder), reasoning: None });
    let whole = ask(&state, "/v1/chat/completions", &calls()).await;
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["content"], CALLS);
    assert_eq!(choice["finish_reason"], "stop");
    assert!(choice["message"].get("tool_calls").is_none());
    let chunks = stream(&state, "/v1/chat/completions", calls()).await;
    let content: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(content, CALLS);
    assert_eq!(joined(&chunks, "token_ids"), choice["token_ids"]);
}

#[tokio::test]
async fn tools_without_a_form_are_refused() {
    let state = state_with(template(), Forms::default());
    let (status, text) = post_to(&state, "/v1/chat/completions", &calls()).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(text.contains("--tool-call-parser"), "{text}");
    let mut body = calls();
    body["tool_choice"] = json!("none");
    let reply = ask(&state, "/v1/chat/completions", &body).await;
    assert_eq!(reply["choices"][0]["message"]["content"], CALLS);
}
