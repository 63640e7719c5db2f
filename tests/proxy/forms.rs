//! What an upstream's 200 is: a stream, a body where a stream was asked for, an error, a reply that was given up.

use std::time::Duration;

use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, ClientApi, UpstreamKind};
use serde_json::{Value, json};

use crate::raw::{Do, Raw, event, head};
use crate::setup::{PATIENCE, post, read, request, text};
use crate::speech::{events, messages, responses};

const CHAT: &str = "v1/chat/completions";
const MESSAGES: &str = "v1/messages";
const RESPONSES: &str = "v1/responses";

fn chat_body(finish: &str) -> String {
    json!({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}})
    .to_string()
}

fn chat_stream(finish: &str) -> Vec<Do> {
    let chunk = |delta: Value, finish: Value| {
        let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
        event(&json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}).to_string())
    };
    vec![
        head("text/event-stream"),
        chunk(json!({"role": "assistant", "content": "Hello"}), Value::Null),
        chunk(json!({}), json!(finish)),
        event("[DONE]"),
    ]
}

#[tokio::test]
async fn a_body_where_a_stream_was_asked_for_becomes_the_clients_stream() {
    let completion = json!({"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [
        {"index": 0, "text": "Hello", "logprobs": null, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}});
    let message = json!({"id": "a", "type": "message", "role": "assistant", "model": "m", "content": [
        {"type": "text", "text": "Hello"}], "stop_reason": "end_turn", "stop_sequence": null, "usage": {"input_tokens": 1, "output_tokens": 2}});
    let native = json!({"text": "Hello", "output_ids": [1, 2], "meta_info": {"id": "n", "prompt_tokens": 1, "completion_tokens": 2,
        "finish_reason": {"type": "stop", "matched": 2}}});
    let prompt = json!({"model": "m", "prompt": [5], "stream": true});
    let generate = json!({"input_ids": [5], "stream": true});
    let (vllm, sglang, anthropic) = (UpstreamKind::Vllm, UpstreamKind::Sglang, UpstreamKind::Anthropic);
    let chat = chat_body("stop");
    let done = "data: [DONE]\n\n";
    for (kind, route, asked, body, end) in [
        (vllm, CHAT, request(true), &chat, done),
        (vllm, "v1/completions", prompt.clone(), &completion.to_string(), done),
        (vllm, MESSAGES, messages(true), &chat, "data: {\"type\":\"message_stop\"}\n\n"),
        (vllm, RESPONSES, responses(true), &chat, "}\n\n"),
        (anthropic, MESSAGES, messages(true), &message.to_string(), "data: {\"type\":\"message_stop\"}\n\n"),
        (sglang, "v1/completions", prompt, &native.to_string(), done),
        (sglang, "generate", generate, &native.to_string(), done),
    ] {
        for (content_type, is_late) in
            [("application/json", false), ("Application/JSON; charset=utf-8", true), ("", false), ("", true)]
        {
            let mut options = ProxyOptions::stand_alone();
            options.keep_alive = is_late.then_some(Duration::from_millis(20));
            let mut script = vec![head(content_type), Do::Write(format!(" \n{body}"))];
            if is_late {
                script.insert(0, Do::Until(1));
            }
            let raw = Raw::start(options, kind, script).await;
            let mut response = post(&raw.url(route), &asked).await;
            let about = format!("{kind:?} {route} {content_type:?} {is_late}");
            let told = response.headers()["content-type"].to_str().expect("text").to_owned();
            assert!(told.starts_with("text/event-stream"), "{about}: {told}");
            let mut reply = Vec::new();
            if is_late {
                reply.extend(response.chunk().await.expect("a piece").expect("a sign of life"));
                raw.step(1);
            }
            reply.extend(text(response).await);
            let reply = String::from_utf8_lossy(&reply).into_owned();
            assert!(reply.contains("Hello") && reply.ends_with(end), "{about}: {reply}");
            if end != done {
                assert!(
                    events(reply.as_bytes()).iter().all(|(name, data)| data["type"] == **name),
                    "{reply}"
                );
            }
            let call = &raw.setup.sink.calls(1).await[0];
            assert_eq!((call.status, call.text.as_deref()), (CallStatus::Ok, Some("Hello")), "{about}");
            assert_eq!(call.usage.expect("usage").completion_tokens, 2, "{about}");
        }
    }
}

#[tokio::test]
async fn a_response_that_is_no_stream_passes_as_it_is() {
    let body = json!({"id": "r", "object": "response", "status": "completed", "model": "m", "output": [
        {"type": "message", "id": "i", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "Hello", "annotations": []}]}],
        "usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}});
    let body = format!(" {body}\n");
    let script = vec![head("application/json"), Do::Write(body.clone())];
    let raw = Raw::start(ProxyOptions::stand_alone(), UpstreamKind::Openai, script).await;
    let response = post(&raw.url(RESPONSES), &responses(true)).await;
    assert_eq!(response.headers()["content-type"], "application/json");
    assert_eq!(text(response).await, body);
    let call = &raw.setup.sink.calls(1).await[0];
    assert_eq!((call.status, call.upstream_api), (CallStatus::Ok, ClientApi::OpenaiResponses));
    assert_eq!((call.text.as_deref(), call.trainable), (Some("Hello"), false));
}

#[tokio::test]
async fn g04_the_key_is_in_nothing_that_passes_unread() {
    let quoted = r#"data: {"error": {"message": "bad key sk-real-canary"}}"#;
    // Half an event, and an event behind the end of the reply.
    let begun = json!({"type": "message_start", "message": {"id": "a", "type": "message", "role": "assistant",
        "model": "m", "content": [], "stop_reason": null, "usage": {"input_tokens": 1, "output_tokens": 1}}});
    let half = vec![head("text/event-stream"), event(&begun.to_string()), Do::Write(quoted.to_owned())];
    let mut late = chat_stream("stop");
    late.extend([Do::Until(1), event(quoted.trim_start_matches("data: "))]);
    for (kind, route, asked, script, status) in [
        (UpstreamKind::Anthropic, MESSAGES, messages(true), half, CallStatus::Truncated),
        (UpstreamKind::Openai, CHAT, request(true), late, CallStatus::Ok),
    ] {
        let raw = Raw::start(ProxyOptions::stand_alone(), kind, script).await;
        let mut response = post(&raw.url(route), &asked).await;
        let mut reply = Vec::new();
        while let Ok(Some(piece)) = response.chunk().await {
            reply.extend_from_slice(&piece);
            if reply.ends_with(b"[DONE]\n\n") {
                raw.step(1);
            }
        }
        let reply = String::from_utf8_lossy(&reply);
        assert!(reply.contains("bad key") && !reply.contains("sk-real-canary"), "{status:?}: {reply}");
        assert_eq!(raw.setup.sink.calls(1).await[0].status, status);
    }
}

#[tokio::test]
async fn a_stream_is_one_by_its_media_type_or_else_by_its_first_bytes() {
    let data = r#"{"id":"c","choices":[{"index":0,"delta":{"content":"Hello"},"finish_reason":null}]}"#;
    for (content_type, before) in [
        ("Text/Event-Stream; charset=UTF-8", ""),
        ("TEXT/EVENT-STREAM", ""),
        ("", ""),
        ("", "event: message\n"),
        ("", "id: 1\n"),
        ("", "retry: 5\n"),
        ("", ": a comment\n\n"),
        ("", "\n\n"),
        ("", "\u{feff}"),
    ] {
        for is_late in [false, true] {
            for (route, body) in [(CHAT, request(true)), (MESSAGES, messages(true))] {
                let mut options = ProxyOptions::stand_alone();
                options.keep_alive = is_late.then_some(Duration::from_millis(20));
                let mut script = vec![head(content_type), Do::Write(format!("{before}data: {data}\n\n"))];
                // Its end is not there yet: what comes before it comes live.
                script.push(Do::Until(2));
                script.extend(chat_stream("stop").split_off(2));
                if is_late {
                    script.insert(0, Do::Until(1));
                }
                let raw = Raw::start(options, UpstreamKind::Vllm, script).await;
                let mut response = post(&raw.url(route), &body).await;
                let mut seen = String::new();
                while !seen.contains("Hello") {
                    let piece = tokio::time::timeout(PATIENCE, response.chunk()).await;
                    let piece = piece.unwrap_or_else(|_| panic!("{content_type:?} {before:?} is buffered"));
                    seen.push_str(&String::from_utf8_lossy(&piece.expect("a piece").expect("more")));
                    raw.step(1);
                }
                raw.step(2);
                text(response).await;
                let call = &raw.setup.sink.calls(1).await[0];
                assert_eq!((call.status, call.text.as_deref()), (CallStatus::Ok, Some("Hello")));
            }
        }
    }
}

#[tokio::test]
async fn an_error_told_in_a_200_is_an_error_in_every_protocol() {
    let error = json!({"error": {"message": "This model's maximum context length is 8 tokens", "code": 400}});
    for is_stream in [false, true] {
        for (route, body, said) in [
            (CHAT, request(is_stream), "maximum context length is 8 tokens"),
            (MESSAGES, messages(is_stream), "prompt is too long"),
            (RESPONSES, responses(is_stream), "context_length_exceeded"),
        ] {
            let script = vec![head("application/json"), Do::Write(error.to_string())];
            let raw = Raw::start(ProxyOptions::stand_alone(), UpstreamKind::Vllm, script).await;
            let response = post(&raw.url(route), &body).await;
            let status = response.status().as_u16();
            let (reply, is_whole) = read(response).await;
            let reply = String::from_utf8_lossy(&reply).into_owned();
            assert!(reply.contains(said), "{route}: {reply}");
            assert!(!reply.contains("could not be translated"), "{reply}");
            // In chat a body's bytes are the upstream's.
            let is_told = is_stream || route == CHAT;
            assert_eq!((status, is_whole), (if is_told { 200 } else { 400 }, !is_stream), "{route}: {reply}");
            let call = &raw.setup.sink.calls(1).await[0];
            assert_eq!((call.status, call.http_status), (CallStatus::UpstreamError, 200), "{route}");
            assert!(
                call.error.as_deref().is_some_and(|error| error.contains("8 tokens")),
                "{:?}",
                call.error
            );
        }
    }
}

#[tokio::test]
async fn a_reply_that_the_upstream_gave_up_is_no_success() {
    for finish in ["abort", "error"] {
        for is_stream in [false, true] {
            for (route, body) in [
                (CHAT, request(is_stream)),
                (MESSAGES, messages(is_stream)),
                (RESPONSES, responses(is_stream)),
            ] {
                let script = if is_stream {
                    chat_stream(finish)
                } else {
                    vec![head("application/json"), Do::Write(chat_body(finish))]
                };
                let own: Vec<Do> = script[1..].to_vec();
                let raw = Raw::start(ProxyOptions::stand_alone(), UpstreamKind::Vllm, script).await;
                let response = post(&raw.url(route), &body).await;
                let status = response.status().as_u16();
                let (reply, is_whole) = read(response).await;
                let reply = String::from_utf8_lossy(&reply).into_owned();
                if route == CHAT {
                    // The engine's bytes, and its word for it (law 5).
                    let own = own.into_iter().map(|part| match part {
                        Do::Write(text) => text,
                        _ => String::new(),
                    });
                    assert_eq!((reply, is_whole), (own.collect::<String>(), true));
                } else {
                    assert_eq!((status, is_whole), if is_stream { (200, false) } else { (502, true) });
                    assert!(reply.contains("gave this reply up"), "{route}: {reply}");
                    for end in ["message_stop", "stop_reason\":\"", "response.completed", "\"completed\""] {
                        assert!(!reply.contains(end), "{route}: {reply}");
                    }
                }
                let call = &raw.setup.sink.calls(1).await[0];
                assert_eq!(call.status, CallStatus::UpstreamError, "{route} {is_stream}");
                assert_eq!(
                    (call.finish_reason.as_deref(), call.text.as_deref()),
                    (Some(finish), Some("Hello"))
                );
                assert!(call.error.as_deref().is_some_and(|error| error.contains(finish)) && !call.trainable);
            }
        }
    }
}

#[tokio::test]
async fn a_choice_that_was_given_up_spoils_no_other() {
    let chunk = |index: u32, delta: Value, finish: Value| {
        let choice = json!({"index": index, "delta": delta, "finish_reason": finish});
        event(&json!({"id": "c", "model": "m", "choices": [choice]}).to_string())
    };
    for is_first in [false, true] {
        let (one, other) = if is_first { ("abort", "stop") } else { ("stop", "abort") };
        let mut options = ProxyOptions::stand_alone();
        options.commit_wait = Duration::from_millis(20);
        let script = vec![
            head("text/event-stream"),
            chunk(0, json!({"content": "a"}), Value::Null),
            chunk(1, json!({"content": "b"}), Value::Null),
            chunk(0, json!({}), json!(one)),
            // The first is committed before the second ends.
            Do::Until(1),
            chunk(1, json!({}), json!(other)),
            event("[DONE]"),
        ];
        let raw = Raw::start(options, UpstreamKind::Vllm, script).await;
        let mut body = request(true);
        body["n"] = json!(2);
        let response = post(&raw.url(CHAT), &body).await;
        let (_, ()) = tokio::join!(text(response), async {
            raw.setup.sink.calls(1).await;
            raw.step(1);
        });
        let calls = raw.setup.sink.calls(2).await;
        let ended: Vec<_> = calls.iter().map(|call| (call.choice_index, call.status)).collect();
        let status = |finish| if finish == "stop" { CallStatus::Ok } else { CallStatus::UpstreamError };
        assert_eq!(ended, [(0, status(one)), (1, status(other))]);
    }
}
