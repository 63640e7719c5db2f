//! Clients that leave before their reply, and come back for it, or do not.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, UpstreamKind};
use serde_json::{Value, json};

use crate::mock::{Part, Script};
use crate::setup::{PATIENCE, Setup, client, post, request, spec, text};

/// The third event waits at the gate.
fn stalls(mut parts: Vec<Part>) -> Vec<Part> {
    parts.insert(3, Part::Gate);
    parts
}

fn stalling() -> Script {
    Script { spoil: Some(stalls), ..Script::default() }
}

fn silent() -> Script {
    Script { is_silent: true, ..Script::default() }
}

/// With a grace that no test waits for.
pub fn patient() -> ProxyOptions {
    let mut options = ProxyOptions::stand_alone();
    options.retry_grace = 10 * PATIENCE;
    options
}

async fn start(options: ProxyOptions, script: Script) -> Setup {
    Setup::with(options, UpstreamKind::Vllm, script).await
}

/// Reads a stream until it has said `needle`.
pub async fn until(response: &mut reqwest::Response, needle: &str) -> String {
    let mut seen = String::new();
    while !seen.contains(needle) {
        let piece = tokio::time::timeout(PATIENCE, response.chunk()).await.expect("in time");
        seen.push_str(&String::from_utf8_lossy(&piece.expect("piece").expect("more")));
    }
    seen
}

/// Waits until so many calls run without their clients.
pub async fn left(setup: &Setup, count: usize) {
    let waiting = async {
        while setup.proxy.calls_without_client() != count {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.expect("in time");
}

/// What a client without lego gets.
pub async fn direct(setup: &Setup, body: &Value) -> Bytes {
    text(post(&format!("{}/v1/chat/completions", setup.mock.url()), body).await).await
}

/// A call whose answer does not begin, and whose client leaves.
async fn leave_before_the_first_byte(setup: &Setup, body: Value) {
    let url = setup.url();
    let calling = tokio::spawn(async move { post(&url, &body).await });
    setup.mock.started(1).await;
    calling.abort();
    left(setup, 1).await;
}

#[tokio::test]
async fn a13_a_client_that_left_and_does_not_come_back_ends_the_upstreams_work() {
    for grace in [Duration::ZERO, Duration::from_millis(50)] {
        for window in ["mid-stream", "before the first token", "not streamed"] {
            let mut options = ProxyOptions::stand_alone();
            options.retry_grace = grace;
            let script = if window == "mid-stream" { stalling() } else { silent() };
            let setup = start(options, script).await;
            if window == "mid-stream" {
                let mut response = setup.post(&request(true)).await;
                until(&mut response, "北京").await;
            } else {
                let (url, stream) = (setup.url(), window == "before the first token");
                let calling = tokio::spawn(async move { post(&url, &request(stream)).await });
                setup.mock.started(1).await;
                calling.abort();
            }
            // The mock saw its peer close.
            setup.mock.aborted(1).await;
            let call = &setup.sink.calls(1).await[0];
            assert_eq!((call.status, call.rejoined), (CallStatus::ClientDisconnect, 0), "{window}");
            let why = call.error.as_deref().expect("why");
            let ran_on = why.contains("ran on for 50ms (proxy.retry_grace_ms), then it was cancelled");
            assert_eq!(ran_on, !grace.is_zero(), "{window}: {why}");
            let ids = call.completion_token_ids.as_ref().map(Vec::len);
            assert_eq!(ids, (window == "mid-stream").then_some(2), "what arrived is kept");
            assert!(!call.trainable);
            left(&setup, 0).await;
        }
    }
}

#[tokio::test]
async fn a_reply_that_ends_while_its_client_is_away_is_recorded_whole() {
    for stream in [true, false] {
        let mut options = ProxyOptions::stand_alone();
        options.retry_grace = Duration::from_secs(2);
        let setup = start(options, silent()).await;
        leave_before_the_first_byte(&setup, request(stream)).await;
        setup.mock.open_gate();
        let call = &setup.sink.calls(1).await[0];
        assert_eq!(call.status, CallStatus::ClientDisconnect);
        let why = call.error.as_deref().expect("why");
        assert!(why.contains("the reply was whole within 2s"), "{why}");
        assert_eq!(call.completion_token_ids.as_ref().expect("ids").len(), 5);
        assert_eq!(call.usage.expect("usage").completion_tokens, 5);
        assert_eq!(call.finish_reason.as_deref(), Some("stop"));
        assert!(!call.trainable, "nobody acted on it");
    }
}

#[tokio::test]
async fn a_client_that_comes_back_mid_stream_has_the_reply_from_its_first_event_live() {
    let setup = start(patient(), stalling()).await;
    let mut call_ids = Vec::new();
    let mut response = setup.post(&request(true)).await;
    // It may leave again.
    for round in 1..=2 {
        call_ids.push(response.headers()["x-lego-call-id"].clone());
        until(&mut response, "北京").await;
        drop(response);
        left(&setup, 1).await;
        response = setup.post(&request(true)).await;
        assert_eq!(setup.proxy.calls_without_client(), 0, "round {round}");
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    }
    call_ids.push(response.headers()["x-lego-call-id"].clone());
    // Live: what the upstream has not sent yet is not waited for.
    let mut seen = until(&mut response, "北京").await;
    setup.mock.open_gate();
    seen.push_str(&String::from_utf8_lossy(&text(response).await));
    assert_eq!(setup.mock.asked().len(), 1);
    let call = &setup.sink.calls(1).await[0];
    assert_eq!((call.status, call.rejoined), (CallStatus::Ok, 2));
    assert_eq!(call.completion_token_ids.as_ref().expect("ids").len(), 5);
    assert!(call_ids.iter().all(|id| id.to_str().expect("text") == call.call_id.to_string()));
    assert_eq!(seen, String::from_utf8_lossy(&direct(&setup, &request(true)).await));
}

#[tokio::test]
async fn a_client_that_comes_back_before_the_first_byte_has_the_one_reply() {
    for (stream, is_answered_first) in [(true, false), (true, true), (false, false), (false, true)] {
        let setup = start(patient(), silent()).await;
        leave_before_the_first_byte(&setup, request(stream)).await;
        if is_answered_first {
            setup.mock.open_gate();
        }
        let (url, body) = (setup.url(), request(stream));
        let again = tokio::spawn(async move { text(post(&url, &body).await).await });
        left(&setup, 0).await;
        setup.mock.open_gate();
        let reply = again.await.expect("joined");
        assert_eq!(setup.mock.asked().len(), 1, "stream {stream}");
        let call = &setup.sink.calls(1).await[0];
        assert_eq!((call.status, call.rejoined), (CallStatus::Ok, 1));
        assert_eq!(reply, direct(&setup, &request(stream)).await);
    }
}

#[tokio::test]
async fn a_client_may_leave_after_the_first_sign_of_life() {
    for stream in [true, false] {
        let mut options = patient();
        options.keep_alive = Some(Duration::from_millis(20));
        let setup = start(options, silent()).await;
        let mut response = setup.post(&request(stream)).await;
        response.chunk().await.expect("piece").expect("a sign of life");
        drop(response);
        left(&setup, 1).await;
        let response = setup.post(&request(stream)).await;
        assert_eq!(response.status(), 200);
        setup.mock.open_gate();
        let reply = text(response).await;
        let reply = String::from_utf8_lossy(&reply);
        let no_op = "\"delta\":{},\"logprobs\":null,\"finish_reason\":null";
        let said: String = reply.split_inclusive("\n\n").filter(|block| !block.contains(no_op)).collect();
        let expected = direct(&setup, &request(stream)).await;
        assert_eq!(said.trim_start(), String::from_utf8_lossy(&expected));
        assert_eq!(setup.mock.asked().len(), 2, "one of them is the direct one");
        assert_eq!(setup.sink.calls(1).await[0].rejoined, 1);
    }
}

#[tokio::test]
async fn a_reply_that_is_made_of_a_body_can_be_had_again() {
    let mut options = patient();
    options.relay = lego::config::Relay::Destreamed;
    options.keep_alive = Some(Duration::from_millis(20));
    let setup = start(options, silent()).await;
    let mut response = setup.post(&request(true)).await;
    response.chunk().await.expect("piece").expect("a sign of life");
    drop(response);
    left(&setup, 1).await;
    setup.mock.open_gate();
    let reply = text(setup.post(&request(true)).await).await;
    let reply = String::from_utf8_lossy(&reply);
    assert_eq!(reply.matches("Hello 北京🌍").count(), 1, "{reply}");
    assert!(reply.ends_with("data: [DONE]\n\n"), "{reply}");
    assert_eq!(setup.mock.asked().len(), 1);
    let call = &setup.sink.calls(1).await[0];
    assert_eq!((call.status, call.rejoined), (CallStatus::Ok, 1));
}

/// A stream's events without what is new in every reply.
pub fn without_ids(stream: &str) -> String {
    let id = |word: &str| {
        ["msg_", "resp_", "rs_", "fc_", "call_", "created"].iter().any(|prefix| word.contains(prefix))
    };
    stream.split('"').filter(|word| !id(word) && !word.starts_with(':')).collect::<Vec<_>>().join("\"")
}

#[tokio::test]
async fn a_client_of_another_protocol_comes_back_to_its_own_events() {
    let messages = json!({"model": "claude-x", "max_tokens": 64, "stream": true, "messages": [{"role": "user", "content": "hi"}]});
    let responses = json!({"model": "gpt-x", "stream": true, "store": false,
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]});
    for (route, body, first, last) in [
        ("messages", messages, "event: message_start", "event: message_stop"),
        ("responses", responses, "event: response.created", "event: response.completed"),
    ] {
        let setup = start(patient(), stalling()).await;
        let url = format!("http://{}/v1/{route}", setup.address);
        let mut response = post(&url, &body).await;
        until(&mut response, "北京").await;
        drop(response);
        left(&setup, 1).await;
        let response = post(&url, &body).await;
        setup.mock.open_gate();
        let again = text(response).await;
        let again = String::from_utf8_lossy(&again).into_owned();
        assert!(again.starts_with(first) && again.contains(last), "{again}");
        assert_eq!(again.matches(first).count(), 1);
        assert_eq!(setup.mock.asked().len(), 1);
        assert_eq!(setup.sink.calls(1).await[0].rejoined, 1);
        // As if it had never left.
        let undisturbed = text(post(&url, &body).await).await;
        assert_eq!(without_ids(&again), without_ids(&String::from_utf8_lossy(&undisturbed)));
        assert_eq!(setup.sink.calls(2).await[1].rejoined, 0);
    }
}

#[tokio::test]
async fn another_request_is_another_sample() {
    let setup = start(patient(), stalling()).await;
    let mut asked = 0;
    let mut ask = async |path: &str, header: Option<(&str, &str)>, body: Value, is_new: bool| {
        let mut call = client().post(format!("http://{}{path}", setup.address)).body(body.to_string());
        if let Some((name, value)) = header {
            call = call.header(name, value);
        }
        let mut response = call.send().await.expect("an answer");
        until(&mut response, "北京").await;
        drop(response);
        asked += usize::from(is_new);
        assert_eq!(setup.mock.asked().len(), asked, "{path} {header:?} {body}");
        left(&setup, asked).await;
    };
    let with = |name: &str, value: Value| {
        let mut body = request(true);
        body[name] = value;
        body
    };
    let chat = "/sessions/a/v1/chat/completions";
    ask(chat, None, request(true), true).await;
    ask("/sessions/b/v1/chat/completions", None, request(true), true).await;
    ask(chat, Some(("x-claude-code-agent-id", "sub")), request(true), true).await;
    ask(chat, None, with("messages", json!([{"role": "user", "content": "hi"}])), true).await;
    ask(chat, None, with("tools", json!([{"type": "function", "function": {"name": "f"}}])), true).await;
    ask(chat, None, with("temperature", json!(0.8)), true).await;
    ask(chat, None, with("model", json!("other")), true).await;
    // The same again, by another pen.
    let body = r#"{"stream":true, "user": "u", "temperature":0.7,"messages":[{"content":"hi 北京","role":"user"}],"model":"toy"}"#;
    ask(chat, None, serde_json::from_str(body).expect("JSON"), false).await;
}

#[tokio::test]
async fn two_live_connections_and_a_repeat_after_delivery_are_two_samples() {
    let setup = start(patient(), stalling()).await;
    let mut one = setup.post(&request(true)).await;
    let mut other = setup.post(&request(true)).await;
    until(&mut one, "北京").await;
    until(&mut other, "北京").await;
    assert_eq!(setup.mock.asked().len(), 2);
    setup.mock.open_gate();
    text(one).await;
    text(other).await;
    text(setup.post(&request(true)).await).await;
    text(setup.post(&request(false)).await).await;
    text(setup.post(&request(false)).await).await;
    assert_eq!(setup.mock.asked().len(), 5);
    let calls = setup.sink.calls(5).await;
    assert!(calls.iter().all(|call| call.status == CallStatus::Ok && call.rejoined == 0));
}

#[tokio::test]
async fn a_client_that_could_act_is_not_given_the_reply_again() {
    // It has the held event, and the stream goes on: only usage and terminator are missing.
    let late = |mut parts: Vec<Part>| {
        let at = parts.len() - 2;
        parts.insert(at, Part::Gate);
        parts
    };
    let mut options = patient();
    options.commit_wait = Duration::from_millis(20);
    let setup = start(options, Script { spoil: Some(late), ..Script::default() }).await;
    for asked in 1..=2 {
        let mut response = setup.post(&request(true)).await;
        until(&mut response, "\"finish_reason\":\"stop\"").await;
        drop(response);
        setup.mock.aborted(asked).await;
        assert_eq!(setup.mock.asked().len(), asked);
    }
    assert_eq!(setup.proxy.calls_without_client(), 0);
    assert!(setup.sink.calls(2).await.iter().all(|call| call.rejoined == 0));
}

/// Two tool calls, with a stop within the first and one behind it.
fn two_tools(_: Vec<Part>) -> Vec<Part> {
    let event = |delta: Value, reason: Value| {
        let choice = json!({"index": 0, "delta": delta, "finish_reason": reason, "token_ids": [1]});
        let chunk = json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
            "prompt_token_ids": [7], "choices": [choice]});
        Part::Event(chunk.to_string())
    };
    let begin = |index: u32| {
        let call = json!({"index": index, "id": format!("t{index}"), "type": "function",
            "function": {"name": "view", "arguments": "{\"n\": "}});
        event(json!({"tool_calls": [call]}), Value::Null)
    };
    let end = |index: u32| {
        event(json!({"tool_calls": [{"index": index, "function": {"arguments": "1}"}}]}), Value::Null)
    };
    let done = Part::Event("[DONE]".to_owned());
    vec![begin(0), Part::Gate, end(0), begin(1), end(1), event(json!({}), json!("tool_calls")), done]
}

#[tokio::test]
async fn a_finished_tool_call_of_an_unfinished_reply_is_acted_on_once() {
    let body = json!({"model": "claude-x", "max_tokens": 64, "stream": true, "messages": [{"role": "user", "content": "hi"}]});
    let setup = start(patient(), Script { spoil: Some(two_tools), ..Script::default() }).await;
    let url = format!("http://{}/v1/messages", setup.address);
    let mut response = post(&url, &body).await;
    until(&mut response, "tool_use").await;
    drop(response);
    left(&setup, 1).await;
    let mut response = post(&url, &body).await;
    setup.sink.gate.send_replace(false);
    setup.mock.open_gate();
    // The first tool call is whole; that it may be acted on is being made durable.
    setup.sink.entered.subscribe().wait_for(|n| *n > 0).await.expect("sink");
    drop(response);
    left(&setup, 1).await;
    response = post(&url, &body).await;
    setup.sink.gate.send_replace(true);
    let reply = text(response).await;
    let reply = String::from_utf8_lossy(&reply);
    assert_eq!(reply.matches("event: content_block_stop").count(), 2, "{reply}");
    assert_eq!(setup.mock.asked().len(), 1);
    assert_eq!(setup.sink.calls(1).await[0].rejoined, 2);

    // A client that had the end of the first one could act on it.
    let gated = |parts: Vec<Part>| {
        let mut parts = two_tools(parts);
        parts.remove(1);
        parts.insert(3, Part::Gate);
        parts
    };
    let setup = start(patient(), Script { spoil: Some(gated), ..Script::default() }).await;
    let url = format!("http://{}/v1/messages", setup.address);
    for asked in 1..=2 {
        let mut response = post(&url, &body).await;
        until(&mut response, "event: content_block_stop").await;
        drop(response);
        setup.mock.aborted(asked).await;
        assert_eq!(setup.mock.asked().len(), asked);
    }
    assert!(setup.sink.calls(2).await.iter().all(|call| call.rejoined == 0));
}

#[tokio::test]
async fn a_call_that_became_durable_too_late_for_its_client_is_replayed() {
    for stream in [true, false] {
        let setup = start(patient(), Script::default()).await;
        setup.sink.gate.send_replace(false);
        let (url, body) = (setup.url(), request(stream));
        let calling = tokio::spawn(async move { text(post(&url, &body).await).await });
        setup.sink.entered.subscribe().wait_for(|n| *n > 0).await.expect("sink");
        // Its record is being stored.
        calling.abort();
        left(&setup, 1).await;
        let (url, body) = (setup.url(), request(stream));
        let again = tokio::spawn(async move { text(post(&url, &body).await).await });
        left(&setup, 0).await;
        setup.sink.gate.send_replace(true);
        let reply = again.await.expect("joined");
        assert_eq!(setup.mock.asked().len(), 1);
        assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::Ok);
        assert!(setup.sink.is_durable.load(Ordering::SeqCst));
        assert_eq!(reply, direct(&setup, &request(stream)).await);
    }
}

#[tokio::test]
async fn a_call_that_failed_is_nothing_to_come_back_for() {
    let cut = |mut parts: Vec<Part>| {
        parts.truncate(3);
        parts.extend([Part::Gate, Part::Cut]);
        parts
    };
    let setup = start(patient(), Script { spoil: Some(cut), ..Script::default() }).await;
    let mut response = setup.post(&request(true)).await;
    until(&mut response, "北京").await;
    drop(response);
    left(&setup, 1).await;
    setup.mock.open_gate();
    let call = &setup.sink.calls(1).await[0];
    assert_eq!(call.status, CallStatus::Truncated);
    left(&setup, 0).await;
    setup.mock.set(Script::default());
    text(setup.post(&request(true)).await).await;
    assert_eq!(setup.mock.asked().len(), 2);
    assert_eq!(setup.sink.calls(2).await[1].rejoined, 0);
}

#[tokio::test]
async fn neither_a_sessions_end_nor_a_shutdown_waits_for_a_client_that_left() {
    let mut options = ProxyOptions::trainer("policy");
    options.retry_grace = 10 * PATIENCE;
    options.shutdown_grace = 10 * PATIENCE;
    for is_shutdown in [false, true] {
        let setup = start(options.clone(), stalling()).await;
        let session = setup.proxy.open_session(spec("s1")).expect("open");
        let mut response =
            post(&format!("http://{}/sessions/s1/v1/chat/completions", setup.address), &request(true)).await;
        until(&mut response, "北京").await;
        drop(response);
        left(&setup, 1).await;
        if is_shutdown {
            tokio::time::timeout(PATIENCE, setup.proxy.shutdown()).await.expect("in time");
        }
        let result = tokio::time::timeout(PATIENCE, session.close()).await.expect("in time");
        assert_eq!(result.calls.len(), 1);
        let call = &result.calls[0];
        assert_eq!(call.status, CallStatus::ClientDisconnect);
        assert!(call.error.as_ref().expect("why").ends_with("lego ended the call before it came back"));
        assert_eq!(result.upstream_failures, [] as [String; 0]);
        setup.mock.aborted(1).await;
    }
}
