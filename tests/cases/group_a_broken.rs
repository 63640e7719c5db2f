//! Group A, what breaks: cuts, errors in streams, waits, events that are too large.

use std::time::Duration;

use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, UpstreamKind};
use lego::upstream::{Timeouts, Upstream};
use serde_json::{Value, json};

use crate::mock::{Mock, Part, Script};
use crate::setup::{Setup, broken, post, request, text as whole, timeouts};
use crate::speech;
use crate::support::{
    Counters, choice, chunk, done, finish, of_messages, protocols, raw, stream, text, trained, url, usage,
};

const ANTHROPIC: &str = include_str!("../fixtures/wire/anthropic_stream.sse");

#[tokio::test]
async fn a04_a_stream_without_its_end_is_no_success_for_anybody() {
    let counters = Counters::new();
    let cut: Vec<Part> = (0..5)
        .map(|id| {
            let logprobs = json!({"content": [{"token": "a", "logprob": -0.5}]});
            choice(json!({"index": 0, "delta": {"content": "a"}, "logprobs": logprobs, "finish_reason": null, "token_ids": [id]}))
        })
        .collect();
    let made_up = ["\"stop\"", "end_turn", "message_stop", "response.completed", "[DONE]"];
    for (number, (route, body)) in protocols().into_iter().enumerate() {
        let setup = Setup::stand_alone(stream(cut.clone())).await;
        let reply = broken(post(&url(&setup, route), &body).await).await;
        let reply = String::from_utf8_lossy(&reply).into_owned();
        assert!(made_up.iter().all(|end| !reply.contains(end)), "{reply}");
        let calls = setup.sink.calls(1).await;
        let call = &calls[0];
        assert_eq!((call.status, call.trainable), (CallStatus::Truncated, false));
        assert_eq!((call.finish_reason.as_deref(), call.text.as_deref()), (None, Some("aaaaa")));
        assert!(call.not_trainable_reasons.contains(&"status_truncated".to_owned()));
        assert_eq!(trained(&calls).samples, [], "a trainer skips it");
        let failures = counters.get("lego_proxy_calls_total{status=\"truncated\"}");
        assert_eq!(failures, (number + 1) as f64);
    }
    // The same of a server of Messages.
    let cut = &ANTHROPIC[..ANTHROPIC.find("event: message_delta").expect("its end")];
    let setup = of_messages(stream(vec![Part::Raw(cut.as_bytes().to_vec())])).await;
    let reply = broken(post(&url(&setup, "messages"), &speech::messages(true)).await).await;
    assert_eq!(String::from_utf8_lossy(&reply), cut, "nothing is made up");
    let call = setup.sink.calls(1).await.remove(0);
    assert_eq!((call.status, call.text.as_deref()), (CallStatus::Truncated, Some("Hello! 🎉")));
}

#[tokio::test]
async fn a07_an_error_inside_a_success_is_no_success() {
    let counters = Counters::new();
    let error = r#"{"error":{"message":"Overloaded","type":"overloaded_error","code":529}}"#;
    for name in ["", "event: error\n"] {
        let event = Part::Raw(format!("{name}data: {error}\n\n").into_bytes());
        let parts = vec![text("one "), text("two"), usage(4, 2), event, done()];
        let setup = Setup::stand_alone(stream(parts.clone())).await;
        let mut body = request(true);
        body["stream_options"] = json!({"include_usage": true});
        assert_eq!(whole(setup.post(&body).await).await, raw(&parts), "untouched");
        let call = setup.sink.calls(1).await.remove(0);
        assert_eq!((call.status, call.error.as_deref()), (CallStatus::UpstreamError, Some("Overloaded")));
        assert_eq!(call.text.as_deref(), Some("one two"));
        assert_eq!(call.usage.expect("usage").completion_tokens, 2, "what was known stays");
        assert!(call.response.expect("reply").get().contains("overloaded_error"));
    }
    assert_eq!(counters.get("lego_proxy_calls_total{status=\"upstream_error\"}"), 2.0);

    // Clients of other protocols are told in theirs.
    for (route, body) in &protocols()[1..] {
        let setup = Setup::stand_alone(stream(vec![text("one"), Part::Event(error.to_owned())])).await;
        let reply = broken(post(&url(&setup, route), body).await).await;
        let reply = String::from_utf8_lossy(&reply).into_owned();
        let name = if *route == "messages" { "event: error" } else { "event: response.failed" };
        assert!(reply.contains(name) && reply.contains("Overloaded"), "{reply}");
    }
    const FAILED: &str = include_str!("../fixtures/wire/anthropic_stream_error.sse");
    let setup = of_messages(stream(vec![Part::Raw(FAILED.as_bytes().to_vec())])).await;
    let response = post(&url(&setup, "messages"), &speech::messages(true)).await;
    let mut reply = Vec::new();
    let mut response = response;
    while let Ok(Some(piece)) = response.chunk().await {
        reply.extend_from_slice(&piece);
    }
    assert_eq!(String::from_utf8_lossy(&reply), FAILED);
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::UpstreamError);

    // What only looks like one.
    let Part::Event(innocent) = text("the error: {\"error\": 1}") else { unreachable!("an event") };
    let mut event: Value = serde_json::from_str(&innocent).expect("JSON");
    event["error"] = Value::Null;
    let parts = vec![Part::Event(event.to_string()), finish("stop"), done()];
    let setup = Setup::stand_alone(stream(parts)).await;
    whole(setup.post(&request(true)).await).await;
    let call = setup.sink.calls(1).await.remove(0);
    assert_eq!((call.status, call.error), (CallStatus::Ok, None));

    // Nothing but an error: the upstream's words, in a stream that had begun.
    let parts = vec![Part::Event(error.to_owned()), done()];
    let setup = Setup::stand_alone(stream(parts.clone())).await;
    assert_eq!(whole(setup.post(&request(true)).await).await, raw(&parts));
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::UpstreamError);
}

async fn with_limits(upstream: &str, mock: Mock, limits: Timeouts) -> Setup {
    let upstream = Upstream::http(upstream, UpstreamKind::Vllm, None, limits).expect("upstream");
    Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await
}

#[tokio::test]
async fn a12_silence_has_a_limit_at_each_place() {
    let short = Duration::from_millis(100);
    let patient = timeouts();
    // Taken, and nothing said.
    let mock = Mock::start(Script { is_silent: true, ..Script::default() }).await;
    let setup = with_limits(&mock.url(), mock, Timeouts { first_byte: short, ..patient }).await;
    for (number, stream) in [true, false].into_iter().enumerate() {
        assert_eq!(setup.post(&request(stream)).await.status(), 504);
        assert_eq!(setup.sink.calls(number + 1).await[number].status, CallStatus::Timeout);
    }
    // A head, and then nothing; or a part of the answer, and then nothing.
    for (start, expected) in [(vec![], ""), (vec![text("so "), text("far")], "so far")] {
        let parts = start.into_iter().chain([Part::Gate]).collect();
        let mock = Mock::start(stream(parts)).await;
        let setup = with_limits(&mock.url(), mock, Timeouts { idle: short, ..patient }).await;
        let response = setup.post(&request(true)).await;
        assert_eq!(response.status(), 200);
        broken(response).await;
        let call = setup.sink.calls(1).await.remove(0);
        assert_eq!((call.status, call.trainable), (CallStatus::Timeout, false));
        assert_eq!(call.text.unwrap_or_default(), expected);
        setup.mock.aborted(1).await;
    }
    // Nobody takes the connection: the queue of a listener that accepts none is full.
    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("bound");
    let listener = socket.listen(1).expect("listening");
    let address = listener.local_addr().expect("bound");
    let mut queued = Vec::new();
    while let Ok(Ok(one)) = tokio::time::timeout(short, tokio::net::TcpStream::connect(address)).await {
        queued.push(one);
    }
    let mock = Mock::in_process(Script::default());
    let limits = Timeouts { connect: short, ..patient };
    let setup = with_limits(&format!("http://{address}"), mock, limits).await;
    let response = setup.post(&request(true)).await;
    assert_eq!(response.status(), 502);
    let reply = String::from_utf8_lossy(&whole(response).await).into_owned();
    assert!(reply.contains("no connection within 100ms"), "{reply}");
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::UpstreamError);
}

#[tokio::test]
async fn a15_an_event_of_many_megabytes_is_forwarded_and_captured() {
    let large = "x".repeat(8 << 20);
    let parts = vec![text(&large), text("more"), finish("stop"), done()];
    let setup = Setup::stand_alone(stream(parts.clone())).await;
    assert!(whole(setup.post(&request(true)).await).await == raw(&parts));
    let call = setup.sink.calls(1).await.remove(0);
    assert_eq!(call.status, CallStatus::Ok);
    assert!(call.text.expect("text") == format!("{large}more"));
}

#[tokio::test]
async fn a15_an_event_beyond_the_cap_is_forwarded_and_its_call_is_no_success() {
    let parts = vec![text("before"), text(&"x".repeat(65 << 20)), usage(4, 2), finish("stop"), done()];
    let setup = Setup::stand_alone(stream(parts.clone())).await;
    let mut body = request(true);
    body["stream_options"] = json!({"include_usage": true});
    assert!(whole(setup.post(&body).await).await == raw(&parts));
    let call = setup.sink.calls(1).await.remove(0);
    assert_eq!((call.status, call.trainable), (CallStatus::ParseError, false));
    assert!(call.not_trainable_reasons.contains(&"oversize".to_owned()), "{:?}", call.not_trainable_reasons);
    assert_eq!(call.text.as_deref(), Some("before"));
    assert_eq!(call.usage, None, "unknown, and not 0");
}

#[tokio::test]
async fn a18_finish_reasons_come_twice_empty_or_with_text_and_usage_comes_last() {
    let role = || chunk(json!({"role": "assistant", "content": ""}), None);
    let tool = json!({"tool_calls": [{"index": 0, "id": "t", "type": "function", "function": {"name": "view", "arguments": "{}"}}]});
    let streams = [
        (vec![role(), text("all of it"), finish("stop"), finish("stop")], "stop"),
        (
            vec![
                chunk(json!({"content": "all "}), Some("")),
                chunk(json!({"content": "of it"}), Some("")),
                chunk(tool, Some("")),
                finish("tool_calls"),
            ],
            "tool_calls",
        ),
        (vec![role(), text("all of "), chunk(json!({"content": "it"}), Some("length"))], "length"),
    ];
    for (parts, reason) in streams {
        let parts: Vec<Part> = parts.into_iter().chain([usage(4, 3), done()]).collect();
        for (route, body) in protocols() {
            let setup = Setup::stand_alone(stream(parts.clone())).await;
            let reply = whole(post(&url(&setup, route), &body).await).await;
            let (content, said, ends) = crate::support::read(route, &reply);
            assert_eq!((content.as_str(), ends), ("all of it", 1), "{route} {reason}");
            let expected = match (route, reason) {
                ("chat/completions", reason) => reason,
                ("messages", "stop") => "end_turn",
                ("messages", "tool_calls") => "tool_use",
                ("messages", _) => "max_tokens",
                (_, "length") => "incomplete",
                _ => "completed",
            };
            assert_eq!(said, expected, "{route}");
            let call = setup.sink.calls(1).await.remove(0);
            assert_eq!((call.status, call.finish_reason.as_deref()), (CallStatus::Ok, Some(reason)));
            assert_eq!(call.text.as_deref(), Some("all of it"));
            assert_eq!(call.usage.expect("usage").completion_tokens, 3);
        }
    }
}
