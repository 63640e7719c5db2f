//! Group B, requests: Messages and Responses in front of a chat upstream, and of a server of Messages.

use lego::config::{Relay, ReplayedReasoning};
use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, UpstreamKind};
use serde_json::{Value, json};

use crate::mock::Script;
use crate::setup::{Setup, client, post, text as whole};
use crate::speech::messages;
use crate::support::{chunk, done, finish, numbers, of_messages, stream, strict_events, text, url};

/// The chat messages that a client's Messages become.
async fn sent(conversation: Value) -> Vec<Value> {
    let setup = Setup::stand_alone(Script::default()).await;
    let mut body = messages(false);
    body.as_object_mut().expect("object").remove("system");
    body["messages"] = conversation;
    let response = post(&url(&setup, "messages"), &body).await;
    let status = response.status();
    let reply = whole(response).await;
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&reply));
    setup.mock.asked()[0].json()["messages"].as_array().expect("messages").clone()
}

fn result(id: &str, content: Value) -> Value {
    json!({"type": "tool_result", "tool_use_id": id, "content": content})
}

fn image() -> Value {
    json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}})
}

fn tool_use(id: &str) -> Value {
    json!({"type": "tool_use", "id": id, "name": "view", "input": {}})
}

#[tokio::test]
async fn b01_thinking_and_its_signature_come_back_whole_or_not_at_all() {
    // A turn of a chat upstream, said back by its client.
    let tool = json!({"tool_calls": [{"index": 0, "id": "t1", "type": "function", "function": {"name": "view", "arguments": "{\"path\" :\"a\"}"}}]});
    let parts = vec![chunk(json!({"reasoning": "so "}), None), chunk(json!({"reasoning": "be it"}), None)];
    let parts = parts.into_iter().chain([chunk(tool, None), finish("tool_calls"), done()]).collect();
    let setup = Setup::stand_alone(stream(parts)).await;
    let reply = whole(post(&url(&setup, "messages"), &messages(true)).await).await;
    let events = strict_events(&reply);
    let of = |name: &str, member: &str| {
        let deltas = events.iter().filter(|(event, _)| event == "content_block_delta");
        let parts = deltas.filter(|(_, data)| data["delta"]["type"] == name);
        parts.map(|(_, data)| data["delta"][member].as_str().expect("text")).collect::<String>()
    };
    let signature = of("signature_delta", "signature");
    assert!(!signature.is_empty());
    assert_eq!(of("thinking_delta", "thinking"), "so be it");
    let input = of("input_json_delta", "partial_json");
    assert_eq!(input, "{\"path\" :\"a\"}");
    let text = format!(
        r#"{{"model":"claude-x","max_tokens":64,"messages":[{{"role":"user","content":"look"}},{{"role":"assistant","content":[{{"type":"thinking","thinking":"so be it","signature":"{signature}"}},{{"type":"redacted_thinking","data":"c2VjcmV0"}},{{"type":"tool_use","id":"t1","name":"view","input":{input}}}]}},{{"role":"user","content":[{{"type":"tool_result","tool_use_id":"t1","content":"ok"}}]}}]}}"#
    );
    let send = |url: String, text: String| async move {
        client()
            .post(url)
            .header("content-type", "application/json")
            .body(text)
            .send()
            .await
            .expect("an answer")
    };
    assert_eq!(send(url(&setup, "messages"), text.clone()).await.status(), 200);
    let asked = &setup.mock.asked()[1];
    let turn = &asked.json()["messages"][1];
    assert_eq!(turn["reasoning_content"], "so be it");
    assert_eq!(turn["tool_calls"][0]["function"]["arguments"], "{\"path\" :\"a\"}");
    let upstream = String::from_utf8_lossy(&asked.body).into_owned();
    assert!(!upstream.contains(&signature) && !upstream.contains("c2VjcmV0"), "{upstream}");

    // A server of the vendor's own protocol gets the bytes that came, odd spaces and all.
    let text = text
        .replace("\"role\":\"user\"", "\"role\" : \"user\"")
        .replace(&signature, "EqQBCkgIARABGAIiQL8/+=");
    let setup = of_messages(Script { body: Some(b"{}".to_vec()), ..Script::default() }).await;
    assert_eq!(send(url(&setup, "messages"), text.clone()).await.status(), 200);
    assert_eq!(String::from_utf8_lossy(&setup.mock.asked()[0].body), text);
}

#[tokio::test]
async fn b02_thinking_is_never_what_the_assistant_said() {
    let said = json!([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "secret", "signature": "x"}, {"type": "text", "text": "hi"}, tool_use("a")]},
        {"role": "user", "content": [result("a", json!("r"))]}
    ]);
    let items = json!([
        {"type": "message", "role": "user", "content": "q"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "secret"}], "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "a", "name": "view", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "r"}
    ]);
    let (mut spoken, mut responded) = (messages(false), crate::speech::responses(false));
    spoken["messages"] = said;
    responded["input"] = items;
    for choice in [ReplayedReasoning::Keep, ReplayedReasoning::Drop] {
        let mut options = ProxyOptions::stand_alone();
        options.replayed_reasoning = choice;
        let setup = Setup::with(options, UpstreamKind::Vllm, Script::default()).await;
        for (route, body) in [("messages", &spoken), ("responses", &responded)] {
            assert_eq!(post(&url(&setup, route), body).await.status(), 200);
            let asked = setup.mock.asked().pop().expect("asked").json();
            let turns = asked["messages"].as_array().expect("messages");
            let turn = turns.iter().find(|turn| turn["role"] == "assistant").expect("a turn");
            assert_eq!(turn["content"], "hi");
            assert_eq!(turn["tool_calls"].as_array().expect("calls").len(), 1);
            let kept = (choice == ReplayedReasoning::Keep).then(|| json!("secret"));
            assert_eq!(turn.get("reasoning_content").cloned(), kept, "{route}");
            assert_eq!(asked.to_string().matches("secret").count(), usize::from(kept.is_some()), "{route}");
        }
        // What is counted is what would be sent.
        let count = format!("{}/count_tokens", url(&setup, "messages"));
        assert_eq!(post(&count, &spoken).await.status(), 200);
        assert_eq!(setup.mock.tokenized()[0]["messages"], setup.mock.asked()[0].json()["messages"]);
    }
}

#[tokio::test]
async fn b03_images_in_tool_results_stay_images() {
    let url = "data:image/png;base64,iVBORw0KGgo=";
    let note = |text: &str| json!({"type": "text", "text": text});
    for (content, expected, has_image) in [
        (json!("s"), "s", false),
        (json!([note("a")]), "a", false),
        (json!([image()]), "", true),
        (json!([note("a"), image()]), "a", true),
        (json!([]), "", false),
        (Value::Null, "", false),
    ] {
        for is_error in [false, true] {
            let mut block = result("a", content.clone());
            if content.is_null() {
                block.as_object_mut().expect("object").remove("content");
            }
            block["is_error"] = json!(is_error);
            let history = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": [tool_use("a")]},
                {"role": "user", "content": [block]}]);
            let turns = sent(history).await;
            let expected = if is_error { format!("Error: {expected}") } else { expected.to_owned() };
            assert_eq!(turns[2], json!({"role": "tool", "tool_call_id": "a", "content": expected}));
            let picture =
                json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]});
            assert_eq!(turns.get(3), has_image.then_some(&picture), "{content}");
        }
    }
}

#[tokio::test]
async fn b04_parallel_results_follow_their_calls_by_id() {
    let turns = sent(json!([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [tool_use("A"), tool_use("B"), tool_use("C")]},
        {"role": "user", "content": [result("C", json!("c")), {"type": "text", "text": "note"}, result("A", json!("a")),
            result("B", json!([{"type": "text", "text": "b"}, image()]))]}
    ]))
    .await;
    let outline: Vec<_> = turns[1..]
        .iter()
        .map(|turn| (turn["role"].as_str(), turn["tool_call_id"].as_str(), turn["content"].as_str()))
        .collect();
    let tool = |id, content| (Some("tool"), Some(id), Some(content));
    assert_eq!(
        outline,
        [
            (Some("assistant"), None, None),
            tool("C", "c"),
            tool("A", "a"),
            tool("B", "b"),
            (Some("user"), None, None)
        ]
    );
    let kinds: Vec<&Value> =
        turns[5]["content"].as_array().expect("parts").iter().map(|part| &part["type"]).collect();
    assert_eq!(kinds, ["text", "image_url"]);
}

#[tokio::test]
async fn b06_no_first_fragment_is_lost_where_the_kind_changes() {
    let role = || chunk(json!({"role": "assistant", "content": ""}), None);
    let tool = |arguments: &str| json!({"tool_calls": [{"index": 0, "id": "t", "type": "function", "function": {"name": "view", "arguments": arguments}}]});
    let last =
        chunk(json!({"tool_calls": [{"index": 0, "function": {"arguments": "\"a\"}"}}]}), Some("tool_calls"));
    let all = vec![
        role(),
        chunk(json!({"reasoning_content": "a"}), None),
        text("b"),
        chunk(tool("{\"path\":"), None),
        last,
        done(),
    ];
    let only = vec![chunk(tool("{}"), None), finish("tool_calls"), done()];
    for (parts, expected) in [
        (
            all,
            vec![
                "message_start",
                "+thinking",
                "a",
                "signature",
                "-0",
                "+text",
                "b",
                "-1",
                "+tool_use",
                "{\"path\":",
                "\"a\"}",
                "-2",
                "tool_use",
                "message_stop",
            ],
        ),
        (only, vec!["message_start", "+tool_use", "{}", "-0", "tool_use", "message_stop"]),
    ] {
        let setup = Setup::stand_alone(stream(parts)).await;
        let reply = whole(post(&url(&setup, "messages"), &messages(true)).await).await;
        let mut seen = Vec::new();
        let mut blocks = 0;
        for (name, data) in strict_events(&reply) {
            let delta = &data["delta"];
            seen.push(match name.as_str() {
                "content_block_start" => {
                    assert_eq!(data["index"], blocks);
                    blocks += 1;
                    format!("+{}", data["content_block"]["type"].as_str().expect("type"))
                }
                "content_block_delta" if delta["type"] == "signature_delta" => "signature".to_owned(),
                "content_block_delta" => ["thinking", "text", "partial_json"]
                    .iter()
                    .find_map(|name| delta[*name].as_str())
                    .expect("a fragment")
                    .to_owned(),
                "content_block_stop" => format!("-{}", data["index"]),
                "message_delta" => delta["stop_reason"].as_str().expect("reason").to_owned(),
                other => other.to_owned(),
            });
        }
        assert_eq!(seen, expected);
    }
}

#[tokio::test]
async fn b08_tokens_are_counted_of_the_same_prompt_and_hold_nothing_up() {
    let mut options = ProxyOptions::stand_alone();
    options.max_in_flight = 1;
    let setup =
        Setup::with(options, UpstreamKind::Vllm, Script { is_silent: true, ..Script::default() }).await;
    let real = {
        let url = url(&setup, "messages");
        tokio::spawn(async move { whole(post(&url, &messages(false)).await).await })
    };
    setup.mock.started(1).await;
    let mut counted = messages(false);
    counted.as_object_mut().expect("object").remove("max_tokens");
    let count = format!("{}/count_tokens?beta=true", url(&setup, "messages"));
    let mut counting = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let (count, counted) = (count.clone(), counted.clone());
        counting.spawn(async move {
            let response = post(&count, &counted).await;
            assert_eq!(response.status(), 200);
            assert_eq!(whole(response).await, &br#"{"input_tokens":17}"#[..]);
        });
    }
    while let Some(one) = counting.join_next().await {
        one.expect("counted");
    }
    setup.mock.open_gate();
    real.await.expect("the real call ends");
    // What the tokenizer was given is the prompt of the same request: system, tools and all.
    let asked = setup.mock.asked()[0].json();
    for tokenized in setup.mock.tokenized() {
        assert_eq!((&tokenized["messages"], &tokenized["tools"]), (&asked["messages"], &asked["tools"]));
    }
    assert_eq!((setup.mock.tokenized().len(), setup.sink.calls(1).await.len()), (50, 1));
}

#[tokio::test]
async fn b11_overload_reaches_the_client_with_its_status_and_its_hints() {
    let anthropic = r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#;
    let openai = r#"{"error":{"message":"slow down","type":"rate_limit","param":null,"code":null}}"#;
    let date = "Fri, 31 Dec 1999 23:59:59 GMT";
    for (status, retry_after, kind) in [
        (429, "2", "rate_limit_error"),
        (429, date, "rate_limit_error"),
        (529, "2", "overloaded_error"),
        (503, "2", "overloaded_error"),
    ] {
        let headers = vec![("retry-after", retry_after), ("x-should-retry", "true"), ("request-id", "req_1")];
        for (upstream, body, route) in [
            (UpstreamKind::Anthropic, anthropic, "messages"),
            (UpstreamKind::Vllm, openai, "chat/completions"),
            (UpstreamKind::Vllm, openai, "messages"),
            (UpstreamKind::Vllm, openai, "responses"),
        ] {
            let script = Script {
                error: Some((status, body.to_owned())),
                headers: headers.clone(),
                ..Script::default()
            };
            let setup = Setup::with(ProxyOptions::stand_alone(), upstream, script).await;
            let asked =
                crate::support::protocols().into_iter().find(|(name, _)| *name == route).expect("a route").1;
            let response = post(&url(&setup, route), &asked).await;
            assert_eq!(response.status(), status);
            for (name, value) in &headers {
                assert_eq!(response.headers()[*name], *value, "{route}");
            }
            let reply = whole(response).await;
            let is_same = upstream == UpstreamKind::Anthropic || route == "chat/completions";
            if is_same {
                assert_eq!(String::from_utf8_lossy(&reply), body);
            } else {
                let reply: Value = serde_json::from_slice(&reply).expect("JSON");
                assert!(reply["error"]["message"].as_str().expect("text").contains("slow down"), "{reply}");
                if route == "messages" {
                    assert_eq!((&reply["type"], &reply["error"]["type"]), (&json!("error"), &json!(kind)));
                }
            }
            let call = setup.sink.calls(1).await.remove(0);
            assert_eq!((call.status, call.http_status, call.attempt), (CallStatus::UpstreamError, status, 1));
        }
    }
    // A try of lego's own comes before the first byte, and shows.
    let busy = (529, anthropic, vec![("retry-after-ms", "1")]);
    let setup = Setup::retrying(
        ProxyOptions::stand_alone(),
        Script { first_errors: vec![busy], ..Script::default() },
    )
    .await;
    assert_eq!(post(&url(&setup, "messages"), &messages(true)).await.status(), 200);
    let calls = setup.sink.calls(2).await;
    let attempts: Vec<_> = calls.iter().map(|call| (call.attempt, call.http_status)).collect();
    assert_eq!(attempts, [(1, 529), (2, 200)]);
}

#[tokio::test]
async fn b12_nothing_empty_is_sent_and_nothing_is_made_up() {
    let part = |text: &str| json!([{"type": "text", "text": text}]);
    for (content, alone) in [
        (Some(Value::Null), ""),
        (Some(json!("")), ""),
        (Some(json!("  ")), "  "),
        (Some(json!([])), ""),
        (Some(part("")), ""),
        (None, ""),
    ] {
        for with_call in [false, true] {
            let mut turn = json!({"role": "assistant"});
            if let Some(content) = &content {
                turn["content"] = content.clone();
            }
            if with_call {
                let mut blocks = match &content {
                    Some(Value::Array(blocks)) => blocks.clone(),
                    Some(Value::String(said)) => part(said).as_array().expect("blocks").clone(),
                    _ => vec![],
                };
                blocks.push(tool_use("a"));
                turn["content"] = json!(blocks);
            }
            let last = if with_call { json!([result("a", json!("r"))]) } else { json!("go on") };
            let turns =
                sent(json!([{"role": "user", "content": "q"}, turn, {"role": "user", "content": last}]))
                    .await;
            let expected = if with_call && alone.is_empty() { Value::Null } else { json!(alone) };
            assert_eq!(turns[1]["content"], expected, "{content:?}");
            assert_eq!(turns[1].get("tool_calls").is_some(), with_call);
            assert!(!turns[1].to_string().contains("empty"));
        }
    }
    // The other way: a reply of nothing but a call.
    let mut options = ProxyOptions::stand_alone();
    options.relay = Relay::Destreamed;
    let body = json!({"id": "c", "object": "chat.completion", "created": 1, "model": "toy", "usage": numbers(4, 3),
        "choices": [{"index": 0, "finish_reason": "tool_calls", "logprobs": null, "message": {"role": "assistant", "content": null,
            "tool_calls": [{"id": "t", "type": "function", "function": {"name": "view", "arguments": "{}"}}]}}]});
    let script = Script { body: Some(body.to_string().into_bytes()), ..Script::default() };
    let setup = Setup::with(options, UpstreamKind::Vllm, script).await;
    let plain: Value =
        serde_json::from_slice(&whole(setup.post(&crate::setup::request(false)).await).await).expect("JSON");
    assert_eq!(plain["choices"][0]["message"]["content"], Value::Null);
    let reply = whole(post(&url(&setup, "messages"), &messages(true)).await).await;
    let starts = strict_events(&reply);
    let starts: Vec<_> = starts
        .iter()
        .filter(|(name, _)| name == "content_block_start")
        .map(|(_, data)| data["content_block"]["type"].clone())
        .collect();
    assert_eq!(starts, ["tool_use"]);
}
