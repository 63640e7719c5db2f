//! Signs of life, and when a client's stream ends: by what reaches the client, not by what the upstream sends.

use std::time::Duration;

use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, UpstreamKind};
use serde_json::{Value, json};

use crate::raw::{Do, Raw, event, head};
use crate::setup::{PATIENCE, broken, post, request, text};
use crate::speech::{messages, responses};

const CHAT: &str = "v1/chat/completions";
const NO_OP: &str = "\"delta\":{},\"logprobs\":null,\"finish_reason\":null";

fn lively() -> ProxyOptions {
    let mut options = ProxyOptions::stand_alone();
    options.keep_alive = Some(Duration::from_millis(40));
    options.commit_wait = Duration::from_millis(40);
    options
}

fn chunk(delta: &Value, finish: Option<&str>) -> Do {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
    let chunk = json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]});
    event(&chunk.to_string())
}

fn hello() -> Do {
    chunk(&json!({"role": "assistant", "content": "Hello"}), None)
}

fn tool(index: u32, arguments: &str) -> Do {
    let function = json!({"name": "view", "arguments": arguments});
    let call = json!({"index": index, "id": format!("t{index}"), "type": "function", "function": function});
    chunk(&json!({"tool_calls": [call]}), None)
}

fn written(part: Do) -> String {
    match part {
        Do::Write(text) => text,
        _ => String::new(),
    }
}

async fn until(response: &mut reqwest::Response, seen: &mut String, is_there: impl Fn(&str) -> bool) {
    while !is_there(seen) {
        let piece = tokio::time::timeout(PATIENCE, response.chunk()).await;
        let piece = piece.unwrap_or_else(|_| panic!("nothing more after {seen}"));
        let piece = piece.expect("a piece").unwrap_or_else(|| panic!("an end after {seen}"));
        seen.push_str(&String::from_utf8_lossy(&piece));
    }
}

#[tokio::test]
async fn a09_what_does_not_reach_the_client_is_no_sign_of_life_for_it() {
    let comment = ": keep-alive\n\n".to_owned();
    let usage = json!({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}});
    let usage = written(event(&usage.to_string()));
    let empty = written(chunk(&json!({}), None));
    let more = {
        let call = json!({"index": 1, "function": {"arguments": " "}});
        written(chunk(&json!({"tool_calls": [call]}), None))
    };
    let of_messages = written(Do::Write(
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"a\",\"content\":[],\"usage\":{\"input_tokens\":1}}}\n\n".to_owned(),
    ));
    let text_completion = event(
        r#"{"id":"c","object":"text_completion","choices":[{"index":0,"text":"Hello","finish_reason":null}]}"#,
    );
    let completion = json!({"model": "m", "prompt": "p", "stream": true});
    let (vllm, anthropic) = (UpstreamKind::Vllm, UpstreamKind::Anthropic);
    let two = || vec![tool(0, "{"), tool(1, "{")];
    for (kind, route, body, begin, filler, no_op) in [
        (vllm, CHAT, request(true), vec![hello()], &comment, NO_OP),
        (vllm, CHAT, request(true), vec![hello()], &usage, NO_OP),
        (vllm, "v1/completions", completion, vec![text_completion], &comment, "\"text\":\"\""),
        (vllm, "v1/messages", messages(true), vec![hello()], &comment, "event: ping"),
        (vllm, "v1/messages", messages(true), vec![hello()], &empty, "event: ping"),
        (vllm, "v1/messages", messages(true), two(), &more, "event: ping"),
        (vllm, "v1/responses", responses(true), vec![hello()], &comment, "event: response.in_progress"),
        (vllm, "v1/responses", responses(true), two(), &more, "event: response.in_progress"),
        (anthropic, "v1/messages", messages(true), vec![Do::Write(of_messages)], &comment, "event: ping"),
    ] {
        let mut script = vec![head("text/event-stream")];
        script.extend(begin);
        script.push(Do::Repeat(filler.clone(), 1));
        let raw = Raw::start(lively(), kind, script).await;
        let mut response = post(&raw.url(route), &body).await;
        let mut seen = String::new();
        until(&mut response, &mut seen, |seen| seen.matches(no_op).count() >= 4).await;
        raw.step(1);
        broken(response).await;
        assert_eq!(raw.setup.sink.calls(1).await[0].status, CallStatus::Truncated, "{route}");
    }
}

#[tokio::test]
async fn a_reply_at_its_end_ends_for_its_client_whatever_the_upstream_does() {
    let chat = || {
        let mut script = vec![head("text/event-stream"), hello(), chunk(&json!({}), Some("stop"))];
        script.extend([event("[DONE]"), Do::Repeat(": still here\n\n".to_owned(), 1), Do::Stay]);
        script
    };
    let of_messages = ["message_start", "message_delta", "message_stop"].map(|name| {
        let data = json!({"type": name, "message": {"id": "a", "content": []}, "delta": {"stop_reason": "end_turn"}});
        Do::Write(format!("event: {name}\ndata: {data}\n\n"))
    });
    let native = || [vec![head("text/event-stream")], of_messages.to_vec(), vec![Do::Stay]].concat();
    let silent = || {
        let mut script = chat();
        script.remove(4);
        script
    };
    let (vllm, anthropic) = (UpstreamKind::Vllm, UpstreamKind::Anthropic);
    for (kind, route, body, script, end) in [
        (vllm, CHAT, request(true), silent(), "data: [DONE]\n\n"),
        (vllm, CHAT, request(true), chat(), ": still here\n\n"),
        (vllm, "v1/messages", messages(true), silent(), "data: {\"type\":\"message_stop\"}\n\n"),
        (vllm, "v1/responses", responses(true), silent(), "}\n\n"),
        (anthropic, "v1/messages", messages(true), native(), "}\n\n"),
    ] {
        let mut options = lively();
        options.max_in_flight = 1;
        options.admission_wait = PATIENCE;
        let raw = Raw::start(options, kind, script).await;
        for asked in 1..=2 {
            raw.step(0);
            let reply = text(post(&raw.url(route), &body).await).await;
            let reply = String::from_utf8_lossy(&reply).into_owned();
            assert!(reply.ends_with(end), "{route}: {reply}");
            assert!(!reply.contains(NO_OP), "{reply}");
            // Let go of, and so is its place.
            raw.step(1);
            raw.left(asked).await;
        }
        let calls = raw.setup.sink.calls(2).await;
        assert!(calls.iter().all(|call| call.status == CallStatus::Ok), "{route}: {:?}", calls[0].error);
    }
}

#[tokio::test]
async fn a_reply_without_its_terminator_is_waited_for_and_not_for_ever() {
    let finished = || {
        let mut script = vec![head("text/event-stream"), hello(), chunk(&json!({}), Some("stop"))];
        script.push(Do::Stay);
        script
    };
    let error = json!({"error": {"message": "engine died", "code": 500}});
    let failed = vec![head("text/event-stream"), hello(), event(&error.to_string()), Do::Stay];
    let cases = [
        (CHAT, request(true), finished(), CallStatus::Ok, "\"finish_reason\":\"stop\"}]}\n\n"),
        ("v1/messages", messages(true), finished(), CallStatus::Ok, "data: {\"type\":\"message_stop\"}\n\n"),
        (CHAT, request(true), failed, CallStatus::UpstreamError, "\"code\":500}}\n\n"),
    ];
    let cases = cases.map(|(route, body, script, status, end)| async move {
        let raw = Raw::start(lively(), UpstreamKind::Vllm, script).await;
        let reply = text(post(&raw.url(route), &body).await).await;
        let reply = String::from_utf8_lossy(&reply).into_owned();
        assert!(reply.ends_with(end) && !reply.contains(NO_OP), "{route}: {reply}");
        raw.left(1).await;
        assert_eq!(raw.setup.sink.calls(1).await[0].status, status, "{route}");
    });
    futures_util::future::join_all(cases).await;
}

fn whole() -> String {
    json!({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}]})
    .to_string()
}

#[tokio::test]
async fn a_body_that_is_late_behind_its_head_begins_with_spaces() {
    for (route, body, said) in [
        (CHAT, request(false), "/choices/0/message/content"),
        ("v1/messages", messages(false), "/content/0/text"),
        ("v1/responses", responses(false), "/output/0/content/0/text"),
    ] {
        for filler in [Do::Until(1), Do::Repeat(" ".to_owned(), 1)] {
            let script = vec![head("application/json"), filler, Do::Write(whole())];
            let raw = Raw::start(lively(), UpstreamKind::Vllm, script).await;
            let mut response = post(&raw.url(route), &body).await;
            assert_eq!(response.headers()["content-type"], "application/json");
            assert!(response.headers().contains_key("x-lego-call-id"));
            let mut seen = String::new();
            until(&mut response, &mut seen, |seen| seen.len() >= 3).await;
            assert!(seen.bytes().all(|byte| byte == b' '), "{seen}");
            assert_eq!(raw.setup.sink.count(), 0);
            raw.step(1);
            seen.push_str(&String::from_utf8_lossy(&text(response).await));
            let reply: Value = serde_json::from_str(&seen).expect("JSON");
            assert_eq!(reply.pointer(said), Some(&json!("Hello")), "{reply}");
            assert_eq!(raw.setup.sink.calls(1).await[0].status, CallStatus::Ok);
        }
    }
    // An error keeps its status; a success that turns out to be none has no clean end.
    let failed = "HTTP/1.1 503 Busy\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n";
    let script =
        vec![Do::Write(failed.to_owned()), Do::Repeat(" ".to_owned(), 1), Do::Write("{}".to_owned())];
    let raw = Raw::start(lively(), UpstreamKind::Vllm, script).await;
    let (url, body) = (raw.url(CHAT), request(false));
    let (response, ()) = tokio::join!(post(&url, &body), async { raw.step(1) });
    assert_eq!(response.status(), 503);
    let error = json!({"error": {"message": "engine died", "code": 500}}).to_string();
    let raw = Raw::start(
        lively(),
        UpstreamKind::Vllm,
        vec![head("application/json"), Do::Until(1), Do::Write(error)],
    )
    .await;
    let mut response = post(&raw.url("v1/messages"), &messages(false)).await;
    until(&mut response, &mut String::new(), |seen| !seen.is_empty()).await;
    raw.step(1);
    broken(response).await;
    assert_eq!(raw.setup.sink.calls(1).await[0].status, CallStatus::UpstreamError);
}
