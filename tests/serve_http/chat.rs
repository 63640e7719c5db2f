//! Chat completions.

use serde_json::{Value, json};

use crate::support::*;

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
    let shapes: Vec<Value> = shapes.into_iter().map(without_delta).collect();
    assert!(chunks.iter().all(|chunk| shapes.contains(&without_delta(shape(chunk)))));
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
    // Hot enough to leave what the model knows by heart.
    body["temperature"] = json!(5);
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
