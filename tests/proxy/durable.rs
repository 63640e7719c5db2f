//! Law 4: durable before done.

use std::sync::atomic::Ordering;
use std::time::Duration;

use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, UpstreamKind};
use serde_json::json;

use crate::mock::{Part, Script};
use crate::setup::{Setup, broken, request, spec, text};

/// Reads a reply and says whether the store had everything when the held part came.
async fn was_durable_first(setup: &Setup, stream: bool) -> bool {
    let mut response = setup.post(&request(stream)).await;
    let mut seen = Vec::new();
    while let Some(piece) = response.chunk().await.expect("piece") {
        seen.extend_from_slice(&piece);
        let text = String::from_utf8_lossy(&seen).into_owned();
        let may_act = if stream { text.contains("\"finish_reason\":\"stop\"") } else { !text.is_empty() };
        if may_act {
            return setup.sink.is_durable.load(Ordering::SeqCst);
        }
    }
    panic!("no end: {}", String::from_utf8_lossy(&seen));
}

#[tokio::test]
async fn the_held_event_leaves_after_the_record_is_durable() {
    for stream in [false, true] {
        let setup = Setup::stand_alone(Script::default()).await;
        setup.sink.gate.send_replace(false);
        let mut entered = setup.sink.entered.subscribe();
        let (was_durable, ()) = tokio::join!(was_durable_first(&setup, stream), async {
            entered.wait_for(|n| *n > 0).await.expect("sink");
            setup.sink.gate.send_replace(true);
        });
        assert!(was_durable);
    }
}

#[tokio::test]
async fn what_comes_before_the_held_event_is_not_held() {
    let gated = |mut parts: Vec<Part>| {
        parts.insert(3, Part::Gate);
        parts
    };
    let setup = Setup::stand_alone(Script { spoil: Some(gated), ..Script::default() }).await;
    let mut response = setup.post(&request(true)).await;
    let mut seen = String::new();
    while !seen.contains("北京") {
        let piece = response.chunk().await.expect("piece").expect("more");
        seen.push_str(&String::from_utf8_lossy(&piece));
    }
    setup.mock.open_gate();
    let rest = text(response).await;
    assert!(rest.ends_with(b"data: [DONE]\n\n"));
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::Ok);
}

#[tokio::test]
async fn usage_that_never_comes_is_waited_for_at_most_commit_wait() {
    let late = |mut parts: Vec<Part>| {
        let at = parts.len() - 2;
        parts.insert(at, Part::Gate);
        parts
    };
    let mut options = ProxyOptions::stand_alone();
    options.commit_wait = Duration::from_millis(50);
    let script = Script { spoil: Some(late), ..Script::default() };
    let setup = Setup::with(options, UpstreamKind::Vllm, script).await;
    let mut response = setup.post(&request(true)).await;
    let mut seen = String::new();
    while !seen.contains("\"finish_reason\":\"stop\"") {
        let piece = response.chunk().await.expect("piece").expect("more");
        seen.push_str(&String::from_utf8_lossy(&piece));
    }
    let calls = setup.sink.calls(1).await;
    assert_eq!(calls[0].status, CallStatus::Ok);
    assert_eq!(calls[0].usage, None);
    assert!(calls[0].not_trainable_reasons.contains(&"usage_unknown".to_owned()));
    setup.mock.open_gate();
    let rest = text(response).await;
    assert_eq!(rest, &b"data: [DONE]\n\n"[..]);
    assert_eq!(setup.sink.count(), 1);
}

#[tokio::test]
async fn a_choice_that_ends_early_is_committed_while_the_others_go_on() {
    let early = |parts: Vec<Part>| {
        // Choice 0 ends before choice 1 goes on.
        let mut first = Vec::new();
        let mut second = Vec::new();
        let mut rest = Vec::new();
        for part in parts {
            let Part::Event(data) = &part else { unreachable!("events only") };
            if data.contains("\"choices\":[{\"index\":0") {
                // As where each chunk has a usage: that of the call is known at its end.
                let usage = r#""usage":{"prompt_tokens":1,"completion_tokens":3}"#;
                assert!(!data.contains("usage"), "{data}");
                let data = format!("{},{usage}}}", data.strip_suffix('}').expect("an object"));
                first.push(Part::Event(data));
            } else if data.contains("\"choices\":[{\"index\":1") {
                second.push(part);
            } else {
                rest.push(part);
            }
        }
        first.push(Part::Gate);
        first.into_iter().chain(second).chain(rest).collect()
    };
    let mut options = ProxyOptions::stand_alone();
    options.commit_wait = Duration::from_millis(50);
    let script = Script { spoil: Some(early), ..Script::default() };
    let setup = Setup::with(options, UpstreamKind::Vllm, script).await;
    let mut body = request(true);
    body["n"] = json!(2);
    let response = setup.post(&body).await;
    let (reply, ()) = tokio::join!(text(response), async {
        let calls = setup.sink.calls(1).await;
        assert_eq!(calls[0].choice_index, 0);
        assert_eq!((calls[0].status, calls[0].usage), (CallStatus::Ok, None));
        setup.mock.open_gate();
    });
    assert!(reply.ends_with(b"data: [DONE]\n\n"));
    let calls = setup.sink.calls(2).await;
    assert_eq!(calls[1].choice_index, 1);
    assert_eq!(calls[1].usage.expect("usage").completion_tokens, 10);
}

#[tokio::test]
async fn a_store_that_fails_is_an_error_for_the_client_and_the_trainer() {
    for stream in [false, true] {
        let setup = Setup::trainer(Script::default()).await;
        setup.sink.is_broken.store(true, Ordering::SeqCst);
        let session = setup.proxy.open_session(spec("s1")).expect("open");
        let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
        let response = crate::setup::post(&url, &request(stream)).await;
        assert_eq!(response.status().as_u16(), if stream { 200 } else { 503 });
        let reply = if stream { broken(response).await } else { text(response).await };
        let reply = String::from_utf8_lossy(&reply).into_owned();
        assert!(reply.contains("capture_failed"), "{reply}");
        assert!(!reply.contains("\"finish_reason\":\"stop\""), "{reply}");
        let result = session.close().await;
        assert!(result.calls.is_empty());
        assert_eq!(result.upstream_failures.len(), 1);
    }
}

#[tokio::test]
async fn an_event_that_cannot_be_read_leaves_after_what_came_before_is_durable() {
    // A client reads what lego's typed view does not: arguments that are an object.
    let odd = |mut parts: Vec<Part>| {
        let last = parts.len() - 3;
        let Part::Event(event) = &parts[last] else { unreachable!("events only") };
        let mut event: serde_json::Value = serde_json::from_str(event).expect("JSON");
        assert_eq!(event["choices"][0]["finish_reason"], "stop");
        event["choices"][0]["delta"] = json!({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]});
        parts[last] = Part::Event(event.to_string());
        // Nothing that follows commits the call.
        parts.insert(last + 1, Part::Gate);
        parts
    };
    let setup = Setup::stand_alone(Script { spoil: Some(odd), ..Script::default() }).await;
    let mut response = setup.post(&request(true)).await;
    let mut seen = String::new();
    while !seen.contains("\"arguments\":{") {
        let piece = response.chunk().await.expect("piece").expect("more");
        seen.push_str(&String::from_utf8_lossy(&piece));
    }
    let drafts = setup.sink.drafts.borrow().clone();
    assert_eq!(drafts.len(), 1, "kept before the client could act");
    assert!(drafts[0].response.as_ref().expect("reply").get().contains("arguments"));
    setup.mock.open_gate();
    assert!(text(response).await.ends_with(b"data: [DONE]\n\n"));
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::ParseError);
}
