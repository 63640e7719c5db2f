//! Upstreams that refuse what lego adds to requests, and upstreams that point elsewhere.

use std::sync::Arc;

use lego::proxy::{Mode, ProxyOptions, SessionSampling};
use lego::record::{CallKind, CallStatus, UpstreamKind};
use lego::upstream::Upstream;
use serde_json::{Value, json};

use crate::mock::{Mock, Script};
use crate::setup::{Setup, client, post, request, text, timeouts};

/// What a strict server knows nothing of.
const ADDED: &[&str] =
    &["return_token_ids", "return_weight_versions", "return_meta_info", "logprobs", "include_reasoning"];
/// The same of one that does not know how to tell the usage of a stream either.
const ALL_ADDED: &[&str] = &["return_token_ids", "return_weight_versions", "logprobs", "stream_options"];

/// Each protocol's route, with a request.
fn in_each_protocol(stream: bool) -> [(&'static str, Value); 4] {
    let hi = json!([{"role": "user", "content": "hi"}]);
    [
        ("chat/completions", json!({"model": "m", "stream": stream, "messages": hi})),
        ("completions", json!({"model": "m", "stream": stream, "prompt": "hi"})),
        ("messages", json!({"model": "m", "stream": stream, "max_tokens": 9, "messages": hi})),
        ("responses", json!({"model": "m", "stream": stream, "input": "hi"})),
    ]
}

async fn ask(setup: &Setup, route: &str, body: &Value) -> reqwest::Response {
    post(&format!("http://{}/v1/{route}", setup.address), body).await
}

#[tokio::test]
async fn c20_a_strict_server_is_asked_again_without_what_it_does_not_know() {
    for (kind, stream) in [
        (UpstreamKind::Vllm, false),
        (UpstreamKind::Vllm, true),
        (UpstreamKind::Sglang, false),
        (UpstreamKind::Sglang, true),
        (UpstreamKind::Openai, true),
    ] {
        for (route, body) in in_each_protocol(stream) {
            // SGLang's completions go to its native endpoint, which is asked in its own words.
            if kind == UpstreamKind::Sglang && route == "completions" {
                continue;
            }
            let script = Script { unknown: ADDED, gives_ids: false, ..Script::default() };
            let setup = Setup::with(ProxyOptions::stand_alone(), kind, script).await;
            for _ in 0..2 {
                let response = ask(&setup, route, &body).await;
                assert_eq!(response.status(), 200, "{kind:?} {route}");
                text(response).await;
            }
            // The first call is asked again; the second is asked without from the start.
            let calls = setup.sink.calls(3).await;
            let seen: Vec<_> =
                calls.iter().map(|call| (call.attempt, call.http_status, call.status)).collect();
            let (failed, ok) = (CallStatus::UpstreamError, CallStatus::Ok);
            assert_eq!(seen, [(1, 400, failed), (2, 200, ok), (1, 200, ok)], "{kind:?} {route}");
            assert_eq!(calls[1].retry_of, Some(calls[0].call_id));
            assert!(calls[0].error.as_ref().expect("why").contains("Unrecognized"));
            for call in &calls[1..] {
                let reasons = &call.not_trainable_reasons;
                assert!(reasons.contains(&"capture_refused_by_upstream".to_owned()), "{reasons:?}");
                assert!(!call.trainable && call.usage.is_some(), "{kind:?} {route}");
            }
        }
    }
}

#[tokio::test]
async fn c20_even_the_usage_of_a_stream_is_not_asked_of_who_does_not_know_it() {
    for (names_one, attempts) in [(false, 2), (true, 3)] {
        let script = Script { unknown: ALL_ADDED, names_one, gives_ids: false, ..Script::default() };
        let setup = Setup::with(ProxyOptions::stand_alone(), UpstreamKind::Vllm, script).await;
        for _ in 0..2 {
            let response = setup.post(&request(true)).await;
            assert_eq!(response.status(), 200);
            text(response).await;
        }
        let calls = setup.sink.calls(attempts + 1).await;
        let seen: Vec<_> = calls.iter().map(|call| call.http_status).collect();
        assert!(seen.iter().rev().take(2).all(|status| *status == 200), "{seen:?}");
        assert_eq!(setup.mock.asked().last().expect("asked").json().get("stream_options"), None);
    }
}

#[tokio::test]
async fn what_a_client_asks_for_itself_is_refused_to_it() {
    let script = Script { unknown: ADDED, ..Script::default() };
    let setup = Setup::with(ProxyOptions::stand_alone(), UpstreamKind::Vllm, script).await;
    let mut body = request(false);
    for name in ["return_token_ids", "return_weight_versions", "logprobs"] {
        body[name] = json!(true);
    }
    let response = setup.post(&body).await;
    assert_eq!(response.status(), 400);
    assert!(String::from_utf8_lossy(&text(response).await).contains("Unrecognized"));
    assert_eq!(setup.sink.calls(1).await[0].http_status, 400);
}

#[tokio::test]
async fn an_error_that_is_not_about_what_lego_adds_is_the_clients_and_whole() {
    let long = format!("{{\"error\":{{\"message\":\"bad tool {}\"}}}}", "x".repeat(300_000));
    let overflow = "{\"error\":{\"message\":\"maximum context length is 10 tokens\"}}".to_owned();
    for (kind, said) in [
        (UpstreamKind::Vllm, long.clone()),
        (UpstreamKind::Sglang, long),
        (UpstreamKind::Vllm, overflow.clone()),
        (UpstreamKind::Openai, overflow),
    ] {
        for status in [400, 422] {
            let script = Script { error: Some((status, said.clone())), ..Script::default() };
            let setup = Setup::with(ProxyOptions::stand_alone(), kind, script).await;
            let response = setup.post(&request(false)).await;
            assert_eq!(response.status(), status);
            assert_eq!(text(response).await, said);
            assert_eq!(setup.sink.calls(1).await.len(), 1);
            assert_eq!(setup.mock.asked().len(), 1);
        }
    }
}

#[tokio::test]
async fn c20_a_strict_server_is_not_probed_again_with_every_call() {
    let script = Script { unknown: ADDED, gives_ids: false, ..Script::default() };
    let mock = Mock::start(script).await;
    let upstream = Upstream::http(&mock.url(), UpstreamKind::Vllm, None, timeouts()).expect("upstream");
    let setup = Setup::as_told(upstream, ProxyOptions::stand_alone(), mock).await;
    for _ in 0..3 {
        text(setup.post(&request(false)).await).await;
    }
    let calls = setup.sink.calls(5).await;
    assert_eq!(calls.iter().filter(|call| call.kind == CallKind::Probe).count(), 1);
    assert_eq!(setup.mock.asked().len(), 5);
}

#[tokio::test]
async fn a_redirect_is_neither_followed_nor_passed_on() {
    let other = Mock::start(Script::default()).await;
    let place = format!("{}/v1/chat/completions", other.url());
    let with_secrets = place.replace("http://", "http://user:canary@") + "?sig=canary#canary";
    let location: &'static str = with_secrets.leak();
    for stream in [false, true] {
        for (route, body) in in_each_protocol(stream) {
            for status in [301, 302, 303, 307, 308] {
                let moved = (status, "moved", vec![("location", location)]);
                let script = Script { first_errors: vec![moved], ..Script::default() };
                let setup = Setup::retrying(ProxyOptions::stand_alone(), script).await;
                let response = ask(&setup, route, &body).await;
                assert_eq!(response.status(), 502, "{route} {status}");
                assert!(!response.headers().contains_key("location"));
                let error: Value = serde_json::from_slice(&text(response).await).expect("JSON");
                let said = error["error"]["message"].as_str().expect("text");
                assert!(said.contains(&other.url()) && said.contains("upstream_base_url"), "{said}");
                assert!(!said.contains("canary"), "{said}");
                match route {
                    "messages" => assert_eq!(
                        (&error["type"], &error["error"]["type"]),
                        (&json!("error"), &json!("api_error"))
                    ),
                    _ => assert_eq!(error["error"]["code"], "upstream_redirect", "{route}"),
                }
                let calls = setup.sink.calls(1).await;
                assert_eq!((calls[0].status, calls[0].http_status), (CallStatus::UpstreamError, 502));
                assert!(!calls[0].error.as_ref().expect("why").contains("canary"));
                assert_eq!(setup.mock.asked().len(), 1, "it is final");
            }
        }
    }
    assert_eq!(other.asked().len(), 0);
}

#[tokio::test]
async fn models_and_counts_follow_no_redirect_and_say_so_in_the_clients_protocol() {
    let moved = || async { axum::response::Redirect::temporary("https://elsewhere.example/v1/models") };
    let router = axum::Router::new().fallback(moved);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let upstream = Upstream::http(&url, UpstreamKind::Vllm, None, timeouts()).expect("upstream");
    let mock = Mock::in_process(Script::default());
    let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await;
    let models = |is_anthropic: bool| {
        let asked = client().get(format!("http://{}/v1/models", setup.address));
        if is_anthropic { asked.header("anthropic-version", "2023-06-01") } else { asked }
    };
    for (asked, is_anthropic) in [(models(false), false), (models(true), true)] {
        let response = asked.send().await.expect("an answer");
        assert_eq!(response.status(), 502);
        let error: Value = serde_json::from_slice(&text(response).await).expect("JSON");
        assert_eq!(error["type"] == "error", is_anthropic, "{error}");
        assert!(error["error"]["message"].as_str().expect("text").contains("https://elsewhere.example/v1"));
    }
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let response = ask(&setup, "messages/count_tokens", &body).await;
    assert_eq!(response.status(), 502);
    assert!(String::from_utf8_lossy(&text(response).await).contains("elsewhere.example"));
}

#[tokio::test]
async fn an_upstreams_error_about_its_models_is_told_in_the_clients_protocol() {
    let broken = || async { (http::StatusCode::NOT_FOUND, "{\"error\":{\"message\":\"no list\"}}") };
    for upstream in [
        Upstream::in_process(axum::Router::new().fallback(broken), timeouts()),
        Upstream::http("http://127.0.0.1:1", UpstreamKind::Vllm, None, timeouts()).expect("upstream"),
    ] {
        let mock = Mock::in_process(Script::default());
        let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await;
        for is_anthropic in [false, true] {
            let mut asked = client().get(format!("http://{}/v1/models", setup.address));
            if is_anthropic {
                asked = asked.header("anthropic-version", "2023-06-01");
            }
            let response = asked.send().await.expect("an answer");
            assert!(!response.status().is_success());
            let error: Value = serde_json::from_slice(&text(response).await).expect("JSON");
            assert_eq!(error["type"] == "error", is_anthropic, "{error}");
            assert!(error["error"]["message"].is_string());
        }
    }
}

#[tokio::test]
async fn b19_beginnings_of_names_are_answered_and_names_are_listed() {
    let map = [("claude-*", "local"), ("claude-opus-*", "large"), ("claude-x", "exact"), ("*", "rest")];
    let model_map = map.map(|(asked, model)| (asked.to_owned(), model.to_owned())).into();
    let mode = Mode::StandAlone { sampling: SessionSampling::PassThrough, model_map };
    let setup = Setup::with(ProxyOptions::new(mode), UpstreamKind::Vllm, Script::default()).await;
    let names = ["claude-sonnet-4", "claude-opus-4", "claude-x", "gpt-5"];
    for name in names {
        let mut body = request(false);
        body["model"] = name.into();
        let reply: Value = serde_json::from_slice(&text(setup.post(&body).await).await).expect("JSON");
        assert_eq!(reply["model"], name);
    }
    let asked: Vec<_> = setup.mock.asked().iter().map(|asked| asked.json()["model"].clone()).collect();
    assert_eq!(asked, ["local", "large", "exact", "rest"]);
    let calls = setup.sink.calls(4).await;
    assert_eq!(calls.iter().map(|call| call.model_requested.as_str()).collect::<Vec<_>>(), names);
    for is_anthropic in [false, true] {
        let mut request = client().get(format!("http://{}/v1/models", setup.address));
        if is_anthropic {
            request = request.header("anthropic-version", "2023-06-01");
        }
        let list: Value =
            serde_json::from_slice(&text(request.send().await.expect("an answer")).await).expect("JSON");
        let ids: Vec<_> = list["data"].as_array().expect("a list").iter().map(|model| &model["id"]).collect();
        assert_eq!(ids, ["claude-x", "toy"], "{list}");
        assert_eq!(list["data"][0].get("display_name").is_some(), is_anthropic);
    }
}

#[tokio::test]
async fn b19_a_routes_names_may_be_beginnings() {
    use lego::proxy::{Proxy, RouteOptions};
    use lego::record::CallSink;
    let (one, other) = (Mock::start(Script::default()).await, Mock::start(Script::default()).await);
    let to = |mock: &Mock| {
        Arc::new(Upstream::http(&mock.url(), UpstreamKind::Vllm, None, timeouts()).expect("upstream"))
    };
    let route = RouteOptions {
        models: vec!["claude-*".to_owned(), "named".to_owned()],
        upstream_model: Some("local".to_owned()),
        ..RouteOptions::new("route", to(&one))
    };
    let mut options = ProxyOptions::stand_alone();
    options.probes_upstream = false;
    let sink = crate::setup::MemorySink::new();
    let sink = Arc::clone(&sink) as Arc<dyn CallSink>;
    let proxy = Proxy::with_routes(options, sink, Some(to(&other)), vec![route]);
    let listener = lego::proxy::listen("127.0.0.1", 0, false).await.expect("loopback");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move { proxy.serve(listener).await });
    for name in ["claude-opus-4", "gpt-5"] {
        let mut body = request(false);
        body["model"] = name.into();
        text(post(&format!("http://{address}/v1/chat/completions"), &body).await).await;
    }
    assert_eq!(one.asked().iter().map(|asked| asked.json()["model"].clone()).collect::<Vec<_>>(), ["local"]);
    assert_eq!(
        other.asked().iter().map(|asked| asked.json()["model"].clone()).collect::<Vec<_>>(),
        ["gpt-5"]
    );
    let list =
        text(client().get(format!("http://{address}/v1/models")).send().await.expect("an answer")).await;
    let list: Value = serde_json::from_slice(&list).expect("JSON");
    let ids: Vec<_> = list["data"].as_array().expect("a list").iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["named", "toy"]);
}
