//! Harnesses of other protocols in front of a chat upstream: their replies, live, and the records behind them.

use lego::protocol::chat::Reply;
use lego::protocol::messages::Assembler;
use lego::proxy::ProxyOptions;
use lego::record::{Call, CallStatus, ClientApi, UpstreamKind};
use lego::upstream::Upstream;
use serde_json::{Value, json};

use crate::mock::{Mock, Part, Script};
use crate::setup::{Setup, broken, post, spec, text, timeouts};
use crate::speech::{events, messages, responses};

const TOOL: [(&str, f64); 6] = [
    ("<tool_call>", -0.5),
    ("view", -0.25),
    ("{\"path\" :", -1.0),
    (" \"a.py\"}", -0.75),
    ("", -0.125),
    ("<|im_end|>", -0.5),
];

fn tool_script() -> Script {
    Script { tokens: TOOL.to_vec(), has_tool_call: true, ..Script::default() }
}

fn read_messages(stream: &[u8]) -> Reply {
    let mut assembler = Assembler::default();
    for (name, data) in events(stream) {
        assembler.event(&name, data.to_string().as_bytes()).expect("an event");
    }
    assembler.into_reply()
}

async fn train(route: &str, script: Script, body: Value) -> (bytes::Bytes, Vec<Call>) {
    let setup = Setup::trainer(script).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/{route}", setup.address);
    let response = post(&url, &body).await;
    assert_eq!(response.status(), 200);
    assert!(response.headers().contains_key("x-lego-call-id"));
    let reply = text(response).await;
    let calls = session.close().await.calls.iter().map(|call| (**call).clone()).collect();
    (reply, calls)
}

/// What must hold of the record, whatever the client's protocol.
fn is_trainable(calls: &[Call], api: ClientApi, sent: &Value) {
    assert_eq!(calls.len(), 1);
    let call = &calls[0];
    assert_eq!(call.not_trainable_reasons, [] as [String; 0]);
    assert_eq!((call.client_api, call.upstream_api), (api, ClientApi::OpenaiChat));
    assert_eq!(call.status, CallStatus::Ok);
    assert_eq!(call.completion_token_ids.as_ref().expect("ids").len(), TOOL.len());
    assert_eq!(call.completion_logprobs.as_ref().expect("log-probs").len(), TOOL.len());
    assert_eq!(call.usage.expect("usage").completion_tokens, TOOL.len() as u64);
    let client: Value =
        serde_json::from_str(call.client_request.as_ref().expect("request").get()).expect("JSON");
    assert_eq!(client, *sent, "the client's own words");
    let upstream: Value =
        serde_json::from_str(call.upstream_request.as_ref().expect("request").get()).expect("JSON");
    assert_eq!(upstream["temperature"], 1.0);
    assert_eq!(upstream["model"], "policy");
    assert_eq!(upstream["messages"][0], json!({"role": "system", "content": "be brief"}));
    assert_eq!(call.tool_calls.as_ref().expect("tool call")[0].arguments, "{\"path\" : \"a.py\"}");
}

#[tokio::test]
async fn a_messages_client_gets_its_events_and_the_trainer_its_tokens() {
    let sent = messages(true);
    let (reply, calls) = train("messages", tool_script(), sent.clone()).await;
    is_trainable(&calls, ClientApi::AnthropicMessages, &sent);
    let events = events(&reply);
    assert_eq!(events.first().expect("events").0, "message_start");
    assert_eq!(events[0].1["message"]["model"], "claude-x");
    assert_eq!(events.last().expect("events").0, "message_stop");
    let read = read_messages(&reply);
    let choice = &read.choices[&0];
    assert_eq!(choice.finish_reason.as_deref(), Some("tool_use"));
    assert_eq!(choice.tool_calls[0].arguments, "{\"path\" : \"a.py\"}");
    assert_eq!(read.usage.expect("usage").completion_tokens, TOOL.len() as u64);

    let sent = messages(false);
    let (reply, calls) = train("messages", tool_script(), sent.clone()).await;
    is_trainable(&calls, ClientApi::AnthropicMessages, &sent);
    let body: Value = serde_json::from_slice(&reply).expect("JSON");
    assert_eq!((&body["type"], &body["stop_reason"]), (&json!("message"), &json!("tool_use")));
    assert_eq!(body["content"][0]["input"], json!({"path": "a.py"}));
}

#[tokio::test]
async fn a_responses_client_gets_its_events_and_the_trainer_its_tokens() {
    let sent = responses(true);
    let (reply, calls) = train("responses", tool_script(), sent.clone()).await;
    is_trainable(&calls, ClientApi::OpenaiResponses, &sent);
    let events = events(&reply);
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..2], ["response.created", "response.in_progress"]);
    assert_eq!(names.last(), Some(&"response.completed"));
    for (number, (name, data)) in events.iter().enumerate() {
        assert_eq!(
            (data["type"].as_str(), data["sequence_number"].as_u64()),
            (Some(name.as_str()), Some(number as u64))
        );
    }
    let done = events.iter().find(|(name, _)| name == "response.output_item.done").expect("an item");
    assert_eq!(done.1["item"]["arguments"], "{\"path\" : \"a.py\"}");

    let sent = responses(false);
    let (reply, calls) = train("responses", tool_script(), sent.clone()).await;
    is_trainable(&calls, ClientApi::OpenaiResponses, &sent);
    let body: Value = serde_json::from_slice(&reply).expect("JSON");
    assert_eq!((&body["object"], &body["status"]), (&json!("response"), &json!("completed")));
    assert_eq!(body["output"][0]["type"], "function_call");
}

#[tokio::test]
async fn text_streams_live_in_every_protocol() {
    let stalls = |mut parts: Vec<Part>| {
        parts.insert(3, Part::Gate);
        parts
    };
    for (route, body) in [("messages", messages(true)), ("responses", responses(true))] {
        let setup = Setup::stand_alone(Script { spoil: Some(stalls), ..Script::default() }).await;
        let url = format!("http://{}/v1/{route}", setup.address);
        let mut response = post(&url, &body).await;
        let mut seen = String::new();
        while !seen.contains("北京") {
            let piece = response.chunk().await.expect("piece").expect("more");
            seen.push_str(&String::from_utf8_lossy(&piece));
        }
        assert_eq!(setup.sink.count(), 0, "the call goes on");
        setup.mock.open_gate();
        text(response).await;
        assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::Ok);
    }
}

#[tokio::test]
async fn what_a_client_may_act_on_is_durable_first_in_every_protocol() {
    for (route, body, held) in [
        ("messages", messages(true), "message_delta"),
        ("responses", responses(true), "response.output_item.done"),
    ] {
        let setup = Setup::stand_alone(tool_script()).await;
        setup.sink.gate.send_replace(false);
        let url = format!("http://{}/v1/{route}", setup.address);
        let mut response = post(&url, &body).await;
        let mut seen = String::new();
        let mut entered = setup.sink.entered.subscribe();
        // Until the store is asked, then nothing more comes.
        loop {
            tokio::select! {
                piece = response.chunk() => seen.push_str(&String::from_utf8_lossy(&piece.expect("piece").expect("more"))),
                _ = entered.wait_for(|n| *n > 0) => break,
            }
        }
        assert!(!seen.contains(held), "{seen}");
        setup.sink.gate.send_replace(true);
        let rest = text(response).await;
        assert!(String::from_utf8_lossy(&rest).contains(held));
    }
}

#[tokio::test]
async fn a_reply_that_breaks_off_has_no_clean_end_in_any_protocol() {
    let cut = |mut parts: Vec<Part>| {
        parts.truncate(4);
        parts.push(Part::Cut);
        parts
    };
    // Clients of Messages try again when the connection breaks, and take an error event for final.
    for (route, body, error) in
        [("messages", messages(true), None), ("responses", responses(true), Some("event: response.failed"))]
    {
        let script = Script { spoil: Some(cut), ..tool_script() };
        let setup = Setup::stand_alone(script).await;
        let reply = broken(post(&format!("http://{}/v1/{route}", setup.address), &body).await).await;
        let reply = String::from_utf8_lossy(&reply).into_owned();
        assert!(!reply.contains("event: error"), "{reply}");
        assert!(error.is_none_or(|error| reply.contains(error)), "{reply}");
        assert!(!reply.contains("content_block_stop") && !reply.contains("output_item.done"), "{reply}");
        let call = &setup.sink.calls(1).await[0];
        assert_eq!(call.status, CallStatus::Truncated);
        assert_eq!(call.completion_token_ids.as_ref().expect("what arrived").len(), 3);
    }
}

#[tokio::test]
async fn errors_come_in_the_clients_shape_and_too_long_prompts_are_not_retried() {
    let too_long = r#"{"error":{"message":"This model's maximum context length is 8 tokens","type":"BadRequestError","code":400}}"#;
    let setup =
        Setup::stand_alone(Script { error: Some((400, too_long.to_owned())), ..Script::default() }).await;
    for stream in [false, true] {
        let response = post(&format!("http://{}/v1/messages", setup.address), &messages(stream)).await;
        assert_eq!(response.status(), 400);
        let body: Value = serde_json::from_slice(&text(response).await).expect("JSON");
        assert_eq!(
            (&body["type"], &body["error"]["type"]),
            (&json!("error"), &json!("invalid_request_error"))
        );
        assert!(body["error"]["message"].as_str().expect("text").starts_with("prompt is too long"), "{body}");
        let response = post(&format!("http://{}/v1/responses", setup.address), &responses(stream)).await;
        assert_eq!(response.status(), 400);
        let body: Value = serde_json::from_slice(&text(response).await).expect("JSON");
        assert_eq!(body["error"]["code"], "context_length_exceeded");
    }
    let response = post(&format!("http://{}/v1/messages", setup.address), &json!({"model": "m"})).await;
    assert_eq!(response.status(), 400);
    let body: Value = serde_json::from_slice(&text(response).await).expect("JSON");
    assert_eq!(body["error"]["type"], "invalid_request_error");
    let missing = post(&format!("http://{}/v1/v1/messages", setup.address), &messages(false)).await;
    assert_eq!(missing.status(), 404);
    let body: Value = serde_json::from_slice(&text(missing).await).expect("JSON");
    assert_eq!(body["error"]["type"], "not_found_error");
}

#[tokio::test]
async fn a_response_can_be_gone_on_from() {
    let setup = Setup::stand_alone(Script::default()).await;
    let url = format!("http://{}/v1/responses", setup.address);
    for stream in [false, true] {
        let mut first = responses(stream);
        first["store"] = json!(true);
        let reply = text(post(&url, &first).await).await;
        let response = if stream {
            events(&reply).last().expect("events").1["response"].clone()
        } else {
            serde_json::from_slice(&reply).expect("JSON")
        };
        let next = json!({"model": "gpt-x", "previous_response_id": response["id"], "input": "go on"});
        let asked = setup.mock.asked().len();
        assert_eq!(post(&url, &next).await.status(), 200);
        let messages = setup.mock.asked()[asked].json()["messages"].clone();
        let roles: Vec<&str> =
            messages.as_array().expect("list").iter().map(|m| m["role"].as_str().expect("role")).collect();
        assert_eq!(roles, ["user", "assistant", "user"], "{messages}");
        assert_eq!(messages[1]["content"], "Hello 北京🌍");
    }
    let unknown = json!({"model": "gpt-x", "previous_response_id": "resp_none", "input": "go on"});
    let response = post(&url, &unknown).await;
    assert_eq!(response.status(), 400);
    assert!(String::from_utf8_lossy(&text(response).await).contains("resp_none"));
    let client = crate::setup::client();
    assert_eq!(client.get(&url).send().await.expect("an answer").status(), 426);
}

#[tokio::test]
async fn system_messages_within_a_conversation_can_be_said_by_the_user() {
    for (choice, expected) in [
        (lego::config::InlineSystem::Keep, ["system", "system", "user"]),
        (lego::config::InlineSystem::User, ["system", "user", "user"]),
    ] {
        let mut options = ProxyOptions::stand_alone();
        options.inline_system = choice;
        let setup = Setup::with(options, UpstreamKind::Vllm, Script::default()).await;
        let mut body = messages(false);
        body["messages"] = json!([{"role": "system", "content": "env"}, {"role": "user", "content": "look"}]);
        assert_eq!(post(&format!("http://{}/v1/messages", setup.address), &body).await.status(), 200);
        let asked = setup.mock.asked()[0].json();
        let roles: Vec<&str> = asked["messages"]
            .as_array()
            .expect("list")
            .iter()
            .map(|m| m["role"].as_str().expect("role"))
            .collect();
        assert_eq!(roles, expected, "{asked}");
    }
}

#[tokio::test]
async fn tokens_are_counted_by_the_upstream_and_are_no_calls() {
    let setup = Setup::stand_alone(Script::default()).await;
    let url = format!("http://{}/v1/messages/count_tokens?beta=true", setup.address);
    let mut body = messages(false);
    body.as_object_mut().expect("object").remove("max_tokens");
    let response = post(&url, &body).await;
    assert_eq!(response.status(), 200);
    let counted: Value = serde_json::from_slice(&text(response).await).expect("JSON");
    assert_eq!(counted, json!({"input_tokens": 17}));
    assert_eq!(setup.sink.count(), 0);
    // A trainer's proxy counts for its own sessions only.
    let setup = Setup::trainer(Script::default()).await;
    let response = post(&format!("http://{}/v1/messages/count_tokens", setup.address), &body).await;
    assert_eq!(response.status(), 401);
}

#[tokio::test]
async fn an_upstream_without_streams_of_ids_is_asked_for_a_body_and_the_client_has_its_stream() {
    let mut options = ProxyOptions::stand_alone();
    options.relay = lego::config::Relay::Destreamed;
    for (route, body) in [
        ("chat/completions", crate::setup::request(true)),
        ("messages", messages(true)),
        ("responses", responses(true)),
    ] {
        let setup = Setup::with(options.clone(), UpstreamKind::Vllm, tool_script()).await;
        let url = format!("http://{}/v1/{route}", setup.address);
        let reply = text(post(&url, &body).await).await;
        assert_eq!(setup.mock.asked()[0].json()["stream"], false);
        let call = &setup.sink.calls(1).await[0];
        assert_eq!((call.status, call.client_stream), (CallStatus::Ok, true));
        assert_eq!(call.completion_token_ids.as_ref().expect("ids").len(), TOOL.len());
        let reply = String::from_utf8_lossy(&reply).into_owned();
        assert!(reply.contains("{\\\"path\\\" : \\\"a.py\\\"}"), "{reply}");
        assert!(!reply.contains("token_ids"), "{reply}");
        match route {
            "chat/completions" => assert!(reply.ends_with("data: [DONE]\n\n"), "{reply}"),
            "messages" => assert_eq!(
                read_messages(reply.as_bytes()).choices[&0].finish_reason.as_deref(),
                Some("tool_use")
            ),
            _ => assert_eq!(events(reply.as_bytes()).last().expect("events").0, "response.completed"),
        }
    }
}

#[tokio::test]
async fn an_upstream_that_speaks_messages_is_passed_through_byte_for_byte() {
    const STREAM: &str = include_str!("../fixtures/wire/anthropic_tools_stream.sse");
    let router = axum::Router::new().route(
        "/v1/messages",
        axum::routing::post(|headers: axum::http::HeaderMap| async move {
            assert_eq!(headers["x-api-key"], "sk-real-canary");
            ([("content-type", "text/event-stream")], STREAM)
        }),
    );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let kind = UpstreamKind::Anthropic;
    let upstream = Upstream::http(&url, kind, Some("sk-real-canary"), timeouts()).expect("upstream");
    let mock = Mock::in_process(Script::default());
    let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await;
    // What has no chat form is for that upstream to take.
    let mut body = messages(true);
    body["tools"] = json!([{"type": "bash_20250124", "name": "bash"}]);
    let reply = text(post(&format!("http://{}/v1/messages", setup.address), &body).await).await;
    assert_eq!(String::from_utf8_lossy(&reply), STREAM);
    let call = &setup.sink.calls(1).await[0];
    assert_eq!((call.status, call.upstream_api), (CallStatus::Ok, ClientApi::AnthropicMessages));
    assert_eq!(call.finish_reason.as_deref(), Some("tool_use"));
    assert!(!call.tool_calls.as_ref().expect("tool calls").is_empty());
    assert!(!call.trainable);
    let refused = setup.post(&crate::setup::request(true)).await;
    assert_eq!(refused.status(), 400);
    assert!(String::from_utf8_lossy(&text(refused).await).contains("/v1/messages"));
}

#[tokio::test]
async fn completions_pass_with_their_ids_captured() {
    let router = axum::Router::new().route(
        "/v1/completions",
        axum::routing::post(|axum::Json(asked): axum::Json<Value>| async move {
            assert_eq!((&asked["return_token_ids"], &asked["logprobs"]), (&json!(true), &json!(0)));
            axum::Json(json!({
                "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m",
                "choices": [{"index": 0, "text": " b", "finish_reason": "length", "stop_reason": null,
                    "logprobs": {"text_offset": [0], "token_logprobs": [-0.5], "tokens": [" b"], "top_logprobs": [null]},
                    "token_ids": [7], "prompt_token_ids": [1, 2], "prompt_logprobs": null}],
                "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
            }))
        }),
    );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let upstream = Upstream::http(&url, UpstreamKind::Vllm, None, timeouts()).expect("upstream");
    let mock = Mock::in_process(Script::default());
    let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await;
    let sent = json!({"model": "m", "prompt": "a", "max_tokens": 1});
    let response = post(&format!("http://{}/v1/completions", setup.address), &sent).await;
    let reply: Value = serde_json::from_slice(&text(response).await).expect("JSON");
    assert_eq!(reply["choices"][0]["text"], " b");
    assert!(
        reply["choices"][0]["token_ids"].is_null() && reply["choices"][0]["logprobs"].is_null(),
        "{reply}"
    );
    let call = &setup.sink.calls(1).await[0];
    assert_eq!((call.status, call.client_api), (CallStatus::Ok, ClientApi::OpenaiCompletions));
    assert_eq!(call.prompt_token_ids, Some(vec![1, 2]));
    assert_eq!(call.completion_token_ids, Some(vec![7]));
    assert_eq!(call.completion_logprobs, Some(vec![Some(-0.5)]));
    assert_eq!(call.text.as_deref(), Some(" b"));
}
