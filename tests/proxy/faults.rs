//! Upstreams that break and clients that leave: the client gets an honest end, the record says what happened.

use std::time::Duration;

use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, UpstreamKind};
use lego::upstream::{Timeouts, Upstream};
use serde_json::Value;

use crate::mock::{Mock, Part, Script};
use crate::setup::{PATIENCE, Setup, broken, post, request, spec, text};

fn error_of(bytes: &[u8]) -> Value {
    let text = String::from_utf8_lossy(bytes);
    let json = text.rsplit("data: ").next().unwrap_or_default();
    let value: Value = serde_json::from_str(json.trim()).unwrap_or_else(|_| panic!("no error in {text}"));
    assert!(value["error"]["message"].is_string(), "{text}");
    value["error"].clone()
}

async fn ends_as(script: Script, stream: bool, http: u16, status: CallStatus) -> (Value, lego::record::Call) {
    let setup = Setup::stand_alone(script).await;
    let response = setup.post(&request(stream)).await;
    assert_eq!(response.status().as_u16(), http);
    let reply = if http == 200 { broken(response).await } else { text(response).await };
    let calls = setup.sink.calls(1).await;
    assert_eq!(calls[0].status, status);
    assert!(!calls[0].trainable);
    (error_of(&reply), calls[0].clone())
}

#[tokio::test]
async fn an_upstreams_error_keeps_its_status_and_gets_openais_shape() {
    for stream in [false, true] {
        let html = Script { error: Some((503, "<html>busy</html>".to_owned())), ..Script::default() };
        let (error, call) = ends_as(html, stream, 503, CallStatus::UpstreamError).await;
        assert!(error["message"].as_str().expect("text").contains("busy"));
        assert_eq!(call.http_status, 503);
        assert!(call.error.expect("why").contains("503"));
        let own = r#"{"error": {"message": "too long", "type": "BadRequestError", "code": 400}}"#;
        let json = Script { error: Some((400, own.to_owned())), ..Script::default() };
        let (error, _) = ends_as(json, stream, 400, CallStatus::UpstreamError).await;
        assert_eq!(error["type"], "BadRequestError");
    }
}

#[tokio::test]
async fn only_broken_machinery_is_evidence_against_the_upstream() {
    for (status, is_broken) in
        [(400, false), (413, false), (422, false), (401, true), (429, true), (500, true)]
    {
        let script = Script { error: Some((status, "{}".to_owned())), ..Script::default() };
        let setup = Setup::trainer(script).await;
        let session = setup.proxy.open_session(spec("s1")).expect("open");
        let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
        text(post(&url, &request(true)).await).await;
        let result = session.close().await;
        assert_eq!(result.upstream_failures.len(), usize::from(is_broken), "{status}");
        assert_eq!(result.calls.len(), 1);
    }
}

#[tokio::test]
async fn an_upstream_that_is_down_is_a_502() {
    let mock = Mock::in_process(Script::default());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    drop(listener);
    let upstream = Upstream::http(&url, UpstreamKind::Vllm, None, Timeouts::default()).expect("upstream");
    let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await;
    for stream in [false, true] {
        let response = setup.post(&request(stream)).await;
        assert_eq!(response.status(), 502);
        let error = error_of(&text(response).await);
        assert!(error["message"].as_str().expect("text").contains("upstream_base_url"), "{error}");
    }
    assert!(setup.sink.calls(2).await.iter().all(|call| call.status == CallStatus::UpstreamError));
}

#[tokio::test]
async fn a04_a_stream_that_is_cut_is_no_success() {
    let close = |mut parts: Vec<Part>| {
        parts.truncate(3);
        parts
    };
    let cut = |mut parts: Vec<Part>| {
        parts.truncate(3);
        parts.push(Part::Cut);
        parts
    };
    let done = |mut parts: Vec<Part>| {
        let last = parts.len() - 1;
        parts.drain(3..last);
        parts
    };
    let spoils: [fn(Vec<Part>) -> Vec<Part>; 2] = [close, cut];
    for spoil in spoils {
        let setup = Setup::stand_alone(Script { spoil: Some(spoil), ..Script::default() }).await;
        // As the engine's: the connection breaks, and nothing is said that the engine did not say.
        let reply = broken(setup.post(&request(true)).await).await;
        assert!(!String::from_utf8_lossy(&reply).contains("error"), "{}", String::from_utf8_lossy(&reply));
        let call = setup.sink.calls(1).await.remove(0);
        assert_eq!(call.status, CallStatus::Truncated);
        assert!(!call.trainable);
        assert_eq!(call.completion_token_ids.expect("what arrived").len(), 2);
        assert_eq!(call.finish_reason, None);
    }
    // A terminator without a finish reason: the client sees what it would have seen, the record is no success.
    let setup = Setup::stand_alone(Script { spoil: Some(done), ..Script::default() }).await;
    assert!(text(setup.post(&request(true)).await).await.ends_with(b"data: [DONE]\n\n"));
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::Truncated);
}

#[tokio::test]
async fn a04_a_finished_reply_stays_one_if_its_terminator_is_missing() {
    let cut = |mut parts: Vec<Part>| {
        parts.truncate(parts.len() - 2);
        parts.push(Part::Cut);
        parts
    };
    let setup = Setup::stand_alone(Script { spoil: Some(cut), ..Script::default() }).await;
    let reply = text(setup.post(&request(true)).await).await;
    assert!(String::from_utf8_lossy(&reply).contains("\"finish_reason\":\"stop\""));
    let calls = setup.sink.calls(1).await;
    assert_eq!(calls[0].status, CallStatus::Ok);
    assert!(calls[0].not_trainable_reasons.contains(&"usage_unknown".to_owned()));
}

#[tokio::test]
async fn a07_an_error_inside_a_stream_passes_and_is_recorded() {
    let broken = |mut parts: Vec<Part>| {
        parts.truncate(3);
        let error =
            r#"{"error":{"message":"engine died","type":"InternalServerError","param":null,"code":500}}"#;
        parts.push(Part::Event(error.to_owned()));
        parts.push(Part::Event("[DONE]".to_owned()));
        parts
    };
    let setup = Setup::stand_alone(Script { spoil: Some(broken), ..Script::default() }).await;
    let reply = text(setup.post(&request(true)).await).await;
    let expected = "data: {\"error\":{\"message\":\"engine died\",\"type\":\"InternalServerError\",\"param\":null,\"code\":500}}\n\ndata: [DONE]\n\n";
    assert!(String::from_utf8_lossy(&reply).ends_with(expected));
    let calls = setup.sink.calls(1).await;
    assert_eq!(calls[0].status, CallStatus::UpstreamError);
    assert_eq!(calls[0].error.as_deref(), Some("engine died"));
    assert_eq!(calls[0].completion_token_ids.as_ref().expect("ids").len(), 2);
}

/// A server that answers each connection's one request with these bytes and closes it at once.
async fn writes_and_closes(reply: String) -> (Setup, tokio::task::JoinHandle<()>) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let serving = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut asked = Vec::new();
            // The request's JSON ends so, and nothing of it must be unread: its close would be a reset.
            while !asked.ends_with(b"}") {
                stream.read_buf(&mut asked).await.expect("a request");
            }
            stream.write_all(reply.as_bytes()).await.expect("written");
        }
    });
    let upstream =
        Upstream::http(&url, UpstreamKind::Vllm, None, crate::setup::timeouts()).expect("upstream");
    let mock = Mock::in_process(Script::default());
    (Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await, serving)
}

#[tokio::test]
async fn a04_a_reply_that_is_cut_with_its_last_bytes_is_no_success() {
    // A body of 5,000 bytes of which 3,000 come.
    let body = format!("{{\"choices\": [{{\"message\": {{\"content\": \"{}", "x".repeat(2960));
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n";
    let (setup, serving) = writes_and_closes(format!("{head}{body}")).await;
    let response = setup.post(&request(false)).await;
    assert_eq!(response.status(), 502);
    error_of(&text(response).await);
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::Truncated);
    serving.abort();

    // A stream with an event that nobody can read: all that says that it was cut is its connection.
    let event = "data: {\"choices\": oops\n\n";
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let (setup, serving) = writes_and_closes(format!("{head}{:x}\r\n{event}\r\n", event.len())).await;
    assert_eq!(broken(setup.post(&request(true)).await).await, event);
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::ParseError);
    serving.abort();
}

#[tokio::test]
async fn garbage_reaches_the_client_and_the_record_says_parse_error() {
    let garbage = |mut parts: Vec<Part>| {
        parts.insert(2, Part::Raw(b"data: {\"choices\": oops\n\n".to_vec()));
        parts
    };
    let setup = Setup::stand_alone(Script { spoil: Some(garbage), ..Script::default() }).await;
    let reply = text(setup.post(&request(true)).await).await;
    assert!(String::from_utf8_lossy(&reply).contains("oops"));
    assert!(reply.ends_with(b"data: [DONE]\n\n"));
    let calls = setup.sink.calls(1).await;
    assert_eq!(calls[0].status, CallStatus::ParseError);
    assert!(calls[0].not_trainable_reasons.contains(&"status_parse_error".to_owned()));

    let setup = Setup::stand_alone(Script {
        spoil_body: Some(|_| b"\xff\x00 no JSON".to_vec()),
        ..Script::default()
    })
    .await;
    let response = setup.post(&request(false)).await;
    assert_eq!(response.status(), 200);
    assert_eq!(text(response).await, &b"\xff\x00 no JSON"[..]);
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::ParseError);
}

#[tokio::test]
async fn a14_a_reply_compressed_in_an_unknown_way_passes_as_it_is_and_does_not_count_as_read() {
    let script = Script { headers: vec![("content-encoding", "compress")], ..Script::default() };
    let setup = Setup::stand_alone(script).await;
    let response = setup.post(&request(true)).await;
    assert_eq!(response.headers()["content-encoding"], "compress");
    text(response).await;
    assert_eq!(setup.mock.asked()[0].headers["accept-encoding"], "identity");
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::ParseError);
}

#[tokio::test]
async fn a15_a_very_large_event_is_forwarded_and_captured() {
    let large = |parts: Vec<Part>| {
        let grow = |part| match part {
            Part::Event(data) => Part::Event(data.replace("Hello", &"x".repeat(8 << 20))),
            part => part,
        };
        parts.into_iter().map(grow).collect()
    };
    let setup = Setup::stand_alone(Script { spoil: Some(large), ..Script::default() }).await;
    let reply = text(setup.post(&request(true)).await).await;
    assert!(reply.len() > 8 << 20);
    let calls = setup.sink.calls(1).await;
    assert_eq!(calls[0].status, CallStatus::Ok);
    assert_eq!(calls[0].completion_token_ids.as_ref().expect("ids").len(), 5);
}

async fn with_timeouts(script: Script, first_byte: Duration, idle: Duration) -> Setup {
    let mock = Mock::start(script).await;
    let timeouts = Timeouts { connect: PATIENCE, first_byte, idle };
    let upstream = Upstream::http(&mock.url(), UpstreamKind::Vllm, None, timeouts).expect("upstream");
    Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await
}

#[tokio::test]
async fn a12_each_wait_has_its_own_limit() {
    let short = Duration::from_millis(100);
    let silent = Script { is_silent: true, ..Script::default() };
    let setup = with_timeouts(silent, short, PATIENCE).await;
    for stream in [false, true] {
        let response = setup.post(&request(stream)).await;
        assert_eq!(response.status(), 504);
        error_of(&text(response).await);
    }
    assert!(setup.sink.calls(2).await.iter().all(|call| call.status == CallStatus::Timeout));

    let stalls = |mut parts: Vec<Part>| {
        parts.insert(3, Part::Gate);
        parts
    };
    let setup = with_timeouts(Script { spoil: Some(stalls), ..Script::default() }, PATIENCE, short).await;
    let reply = broken(setup.post(&request(true)).await).await;
    assert!(!String::from_utf8_lossy(&reply).contains("error"), "{}", String::from_utf8_lossy(&reply));
    let calls = setup.sink.calls(1).await;
    assert_eq!(calls[0].status, CallStatus::Timeout);
    assert_eq!(calls[0].completion_token_ids.as_ref().expect("ids").len(), 2);
    setup.mock.aborted(1).await;
}

#[tokio::test]
async fn a09_no_op_events_come_only_while_the_upstream_is_silent() {
    let stalls = |mut parts: Vec<Part>| {
        parts.insert(3, Part::Gate);
        parts
    };
    let scripts = [
        Script { spoil: Some(stalls), ..Script::default() },
        Script { is_silent: true, ..Script::default() },
    ];
    for script in scripts {
        let mut options = ProxyOptions::stand_alone();
        options.keep_alive = Some(Duration::from_millis(30));
        let setup = Setup::with(options, UpstreamKind::Vllm, script).await;
        let mut response = setup.post(&request(true)).await;
        assert_eq!(response.headers()["x-accel-buffering"], "no");
        let mut seen = String::new();
        let no_op = "\"delta\":{},\"logprobs\":null,\"finish_reason\":null";
        while seen.matches(no_op).count() < 3 {
            let piece = response.chunk().await.expect("piece").expect("more");
            seen.push_str(&String::from_utf8_lossy(&piece));
        }
        setup.mock.open_gate();
        let rest = text(response).await;
        seen.push_str(&String::from_utf8_lossy(&rest));
        // Every event is JSON with choices: nothing that a decoder could choke on.
        for block in seen.split("\n\n").filter(|block| !block.is_empty() && *block != "data: [DONE]") {
            let event: Value =
                serde_json::from_str(block.strip_prefix("data: ").expect("data")).expect("JSON");
            assert!(event["choices"].is_array() && event["id"].is_string());
        }
        let without: String = seen.split_inclusive("\n\n").filter(|block| !block.contains(no_op)).collect();
        let direct =
            text(post(&format!("{}/v1/chat/completions", setup.mock.url()), &request(true)).await).await;
        assert_eq!(without, String::from_utf8_lossy(&direct));
        let calls = setup.sink.calls(1).await;
        assert_eq!(calls[0].status, CallStatus::Ok);
        assert!(!calls[0].response.as_ref().expect("reply").get().contains("chatcmpl-0"));
    }
}

#[tokio::test]
async fn an_upstream_that_fails_after_keep_alives_began_ends_with_an_error_event() {
    let mut options = ProxyOptions::stand_alone();
    options.keep_alive = Some(Duration::from_millis(30));
    let script = Script {
        is_silent: true,
        error: Some((500, "{\"error\":{\"message\":\"late\"}}".to_owned())),
        ..Script::default()
    };
    let setup = Setup::with(options, UpstreamKind::Vllm, script).await;
    let response = setup.post(&request(true)).await;
    assert_eq!(response.status(), 200);
    setup.mock.open_gate();
    let error = error_of(&broken(response).await);
    assert!(error["message"].as_str().expect("text").contains("late"));
    let calls = setup.sink.calls(1).await;
    assert_eq!((calls[0].status, calls[0].http_status), (CallStatus::UpstreamError, 500));
}
