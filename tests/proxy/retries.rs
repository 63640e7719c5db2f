//! Attempts upstream before the client has had a byte, and signs of life while it waits.

use std::time::Duration;

use lego::config::UpstreamResponses;
use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, UpstreamKind};
use lego::upstream::Upstream;
use serde_json::{Value, json};

use crate::mock::{Mock, Part, Script};
use crate::setup::{Setup, broken, post, request, spec, text, timeouts};

const BUSY: (u16, &str, Vec<(&str, &str)>) = (503, "busy", Vec::new());

#[tokio::test]
async fn a_failure_that_passes_is_not_the_clients_and_each_attempt_is_a_record() {
    for stream in [false, true] {
        let slow_down = (429, "{}", vec![("retry-after-ms", "1")]);
        let script = Script { first_errors: vec![(500, "oops", vec![]), slow_down], ..Script::default() };
        let setup = Setup::retrying(ProxyOptions::trainer("policy"), script).await;
        let session = setup.proxy.open_session(spec("s1")).expect("open");
        let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
        let response = post(&url, &request(stream)).await;
        assert_eq!(response.status(), 200);
        let call_id = response.headers()["x-lego-call-id"].to_str().expect("id").to_owned();
        text(response).await;
        let calls = setup.sink.calls(3).await;
        let seen: Vec<_> = calls.iter().map(|call| (call.attempt, call.status, call.http_status)).collect();
        let failed = CallStatus::UpstreamError;
        assert_eq!(seen, [(1, failed, 500), (2, failed, 429), (3, CallStatus::Ok, 200)]);
        let first = Some(calls[0].call_id);
        assert_eq!(calls.iter().map(|call| call.retry_of).collect::<Vec<_>>(), [None, first, first]);
        assert!(calls[0].error.as_ref().expect("why").contains("oops"));
        assert_eq!(calls[2].call_id.to_string(), call_id);
        assert!(calls[2].trainable && !calls[0].trainable);
        let seeds: Vec<Value> = setup.mock.asked().iter().map(|asked| asked.json()["seed"].clone()).collect();
        assert!(seeds.iter().all(|seed| *seed == seeds[0]), "{seeds:?}");
        assert_eq!(session.close().await.upstream_failures, [] as [String; 0]);
    }
}

/// What an upstream has no words for is none of its failures: as many retries are left.
#[tokio::test]
async fn asking_in_other_words_takes_none_of_the_retries() {
    let soon = || (503, "{}", vec![("retry-after-ms", "1")]);
    for stream in [false, true] {
        // Whatever the order: it does not know two additions, which it names one at a time.
        for first_errors in [vec![soon(), soon()], Vec::new()] {
            let fails_first = !first_errors.is_empty();
            let script = Script {
                unknown: &["return_token_ids", "stream_options"],
                names_one: true,
                first_errors,
                gives_ids: false,
                ..Script::default()
            };
            let setup = Setup::retrying(ProxyOptions::stand_alone(), script).await;
            let response = setup.post(&request(stream)).await;
            assert_eq!(response.status(), 200);
            text(response).await;
            let refused = if stream { 2 } else { 1 };
            let failed = if fails_first { 2 } else { 0 };
            let calls = setup.sink.calls(failed + refused + 1).await;
            let seen: Vec<_> = calls.iter().map(|call| (call.attempt, call.http_status)).collect();
            let told = [vec![503; failed], vec![400; refused], vec![200]].concat();
            assert_eq!(seen, (1..).zip(told).collect::<Vec<_>>());
        }
        // A refusal, and then as many failures as there are retries.
        let refusal = (400, r#"{"error":{"message":"unknown: return_token_ids"}}"#, vec![]);
        for (failures, status) in [(2, 200), (3, 503)] {
            let mut first_errors = vec![refusal.clone()];
            first_errors.resize_with(1 + failures, soon);
            let script = Script { first_errors, gives_ids: false, ..Script::default() };
            let setup = Setup::retrying(ProxyOptions::stand_alone(), script).await;
            let response = setup.post(&request(stream)).await;
            assert_eq!(response.status(), status);
            text(response).await;
            assert_eq!(setup.sink.calls(4).await.last().map(|call| call.http_status), Some(status));
        }
        // The route that it does not have, neither.
        let script = Script { first_errors: vec![soon(), soon()], ..Script::default() };
        let mock = Mock::start(script).await;
        let upstream = Upstream::http(&mock.url(), UpstreamKind::Openai, None, timeouts()).expect("upstream");
        let upstream = upstream.with_responses(UpstreamResponses::Auto);
        let mut options = ProxyOptions::stand_alone();
        options.probes_upstream = false;
        let setup = Setup::as_told(upstream, options, mock).await;
        let url = format!("http://{}/v1/responses", setup.address);
        let response = post(&url, &json!({"model": "m", "stream": stream, "input": "hi"})).await;
        assert_eq!(response.status(), 200);
        text(response).await;
        let calls = setup.sink.calls(4).await;
        assert_eq!(calls.iter().map(|call| call.http_status).collect::<Vec<_>>(), [404, 503, 503, 200]);
    }
}

#[tokio::test]
async fn what_does_not_pass_or_would_take_too_long_is_answered_at_once() {
    for (error, attempts) in [
        ((400, "{}", vec![]), 1),
        ((404, "{}", vec![]), 1),
        ((429, "{}", vec![("retry-after", "3600")]), 1),
        (BUSY, 2),
    ] {
        let status = error.0;
        let mut options = ProxyOptions::stand_alone();
        options.retries.most = 1;
        let script = Script { first_errors: vec![error.clone(); 5], ..Script::default() };
        let setup = Setup::retrying(options, script).await;
        let response = setup.post(&request(false)).await;
        assert_eq!(response.status(), status);
        if status == 429 {
            assert_eq!(response.headers()["retry-after"], "3600");
        }
        text(response).await;
        assert_eq!(setup.sink.calls(attempts).await.len(), attempts, "{status}");
    }
}

#[tokio::test]
async fn nothing_is_sent_again_once_the_client_has_a_byte() {
    let cut = |mut parts: Vec<Part>| {
        parts.truncate(3);
        parts.push(Part::Cut);
        parts
    };
    let script = Script { spoil: Some(cut), ..Script::default() };
    let setup = Setup::retrying(ProxyOptions::stand_alone(), script).await;
    broken(setup.post(&request(true)).await).await;
    assert_eq!(setup.sink.calls(1).await[0].attempt, 1);
    assert_eq!(setup.mock.asked().len(), 1);
}

#[tokio::test]
async fn a_body_that_takes_long_begins_with_spaces() {
    let mut options = ProxyOptions::stand_alone();
    options.keep_alive = Some(Duration::from_millis(20));
    let setup = Setup::retrying(options, Script { is_silent: true, ..Script::default() }).await;
    let mut response = setup.post(&request(false)).await;
    assert_eq!(response.status(), 200);
    let mut seen = Vec::new();
    while seen.len() < 3 {
        seen.extend_from_slice(&response.chunk().await.expect("piece").expect("more"));
    }
    assert!(seen.iter().all(|byte| *byte == b' '), "{seen:?}");
    setup.mock.open_gate();
    let rest = text(response).await;
    let reply: Value = serde_json::from_slice(&rest).expect("JSON after the spaces");
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    let calls = setup.sink.calls(1).await;
    assert_eq!((calls[0].status, calls[0].http_status), (CallStatus::Ok, 200));

    // An error after that is no success: the connection is broken off.
    let mut options = ProxyOptions::stand_alone();
    options.keep_alive = Some(Duration::from_millis(20));
    let script = Script { is_silent: true, error: Some((500, "{}".to_owned())), ..Script::default() };
    let setup = Setup::retrying(options, script).await;
    let response = setup.post(&request(false)).await;
    setup.mock.open_gate();
    broken(response).await;
    let calls = setup.sink.calls(1).await;
    assert_eq!((calls[0].status, calls[0].http_status), (CallStatus::UpstreamError, 500));
}

#[tokio::test]
async fn more_calls_than_fit_are_told_to_come_back() {
    let mut options = ProxyOptions::stand_alone();
    options.max_in_flight = 1;
    options.admission_wait = Duration::ZERO;
    let setup = Setup::retrying(options, Script { is_silent: true, ..Script::default() }).await;
    let url = setup.url();
    let first = tokio::spawn(async move { text(post(&url, &request(false)).await).await });
    setup.mock.started(1).await;
    let response = setup.post(&request(true)).await;
    assert_eq!(response.status(), 429);
    assert_eq!(response.headers()["retry-after"], "1");
    assert!(String::from_utf8_lossy(&text(response).await).contains("proxy.max_in_flight"));
    setup.mock.open_gate();
    first.await.expect("the first call ends");
    let calls = setup.sink.calls(2).await;
    assert_eq!((calls[0].status, calls[0].http_status), (CallStatus::Aborted, 429));
    assert_eq!(calls[1].status, CallStatus::Ok);
    assert_eq!(setup.mock.asked().len(), 1);
}

#[tokio::test]
async fn an_upstream_that_refuses_the_key_leads_to_its_variable() {
    let mut options = ProxyOptions::stand_alone();
    options.upstream_key_env = Some("POLICY_KEY".to_owned());
    let error = r#"{"error":{"message":"invalid key","type":"x","code":401}}"#;
    let script = Script { error: Some((401, error.to_owned())), ..Script::default() };
    let setup = Setup::retrying(options, script).await;
    let response = setup.post(&request(true)).await;
    assert_eq!(response.status(), 401);
    let text = String::from_utf8_lossy(&text(response).await).into_owned();
    assert!(text.contains("POLICY_KEY") && text.contains("invalid key"), "{text}");
}
