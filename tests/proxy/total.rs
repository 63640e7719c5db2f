//! The limit of a whole call's time (A12), which is apart from the limits of its waits.

use std::time::Duration;

use lego::proxy::ProxyOptions;
use lego::record::CallStatus;
use serde_json::{Value, json};

use crate::mock::{Part, Script};
use crate::setup::{Setup, broken, post, text};

fn requests(stream: bool) -> [(&'static str, Value); 3] {
    let chat = json!([{"role": "user", "content": "hi"}]);
    [
        ("chat/completions", json!({"model": "m", "stream": stream, "messages": chat})),
        ("messages", json!({"model": "m", "stream": stream, "max_tokens": 9, "messages": chat})),
        ("responses", json!({"model": "m", "stream": stream, "input": "hi"})),
    ]
}

async fn limited(script: Script, limit: Duration) -> Setup {
    let mut options = ProxyOptions::stand_alone();
    options.total_timeout = Some(limit);
    options.probes_upstream = false;
    Setup::retrying(options, script).await
}

#[tokio::test]
async fn a12_a_call_that_takes_too_long_before_its_reply_is_a_504_in_each_protocol() {
    for stream in [false, true] {
        for (route, body) in requests(stream) {
            let silent = Script { is_silent: true, ..Script::default() };
            let setup = limited(silent, Duration::from_millis(100)).await;
            let response = post(&format!("http://{}/v1/{route}", setup.address), &body).await;
            assert_eq!(response.status(), 504, "{route}");
            let error: Value = serde_json::from_slice(&text(response).await).expect("JSON");
            assert!(
                error["error"]["message"].as_str().expect("text").contains("total_timeout_secs"),
                "{error}"
            );
            let call = &setup.sink.calls(1).await[0];
            assert_eq!((call.status, call.http_status), (CallStatus::Timeout, 504));
            setup.mock.aborted(1).await;
        }
    }
}

#[tokio::test]
async fn a12_a_stream_that_takes_too_long_ends_with_its_protocols_error() {
    let stalls = |mut parts: Vec<Part>| {
        parts.insert(3, Part::Gate);
        parts
    };
    let ends = requests(true).map(|(route, body)| async move {
        let setup =
            limited(Script { spoil: Some(stalls), ..Script::default() }, Duration::from_secs(2)).await;
        let response = post(&format!("http://{}/v1/{route}", setup.address), &body).await;
        assert_eq!(response.status(), 200);
        let reply = String::from_utf8_lossy(&broken(response).await).into_owned();
        let event = match route {
            "messages" => "event: error\n",
            "responses" => "event: response.failed\n",
            _ => "data: {\"error\":",
        };
        assert!(reply.contains("北京") && reply.contains(event), "{reply}");
        assert!(reply.contains("total_timeout_secs"), "{reply}");
        let call = &setup.sink.calls(1).await[0];
        assert_eq!(call.status, CallStatus::Timeout);
        assert_eq!(call.completion_token_ids.as_ref().expect("what came").len(), 2);
        setup.mock.aborted(1).await;
    });
    futures_util::future::join_all(ends).await;
}

#[tokio::test]
async fn a12_the_limit_holds_over_all_attempts_and_after_signs_of_life() {
    // A pause between attempts that is longer than what is left.
    let busy = (503, "busy", vec![("retry-after", "30")]);
    let script = Script { first_errors: vec![busy], ..Script::default() };
    let setup = limited(script, Duration::from_millis(100)).await;
    let response = setup.post(&crate::setup::request(false)).await;
    assert_eq!(response.status(), 504);
    text(response).await;
    let calls = setup.sink.calls(2).await;
    let seen: Vec<_> = calls.iter().map(|call| (call.attempt, call.status)).collect();
    assert_eq!(seen, [(1, CallStatus::UpstreamError), (2, CallStatus::Timeout)]);
    assert_eq!(setup.mock.asked().len(), 1);

    for stream in [false, true] {
        let mut options = ProxyOptions::stand_alone();
        options.keep_alive = Some(Duration::from_millis(20));
        options.total_timeout = Some(Duration::from_millis(300));
        let setup = Setup::retrying(options, Script { is_silent: true, ..Script::default() }).await;
        broken(setup.post(&crate::setup::request(stream)).await).await;
        assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::Timeout);
    }
}
