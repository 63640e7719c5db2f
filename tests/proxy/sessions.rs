//! Who a call belongs to, who may call, and what a trainer gets.

use std::time::Duration;

use lego::proxy::{ListenError, ProxyOptions, SessionSpec};
use lego::record::{CallStatus, UpstreamKind};
use lego::rollout::SessionFacts;
use serde_json::{Value, json};

use crate::mock::{Part, Script};
use crate::setup::{PATIENCE, Setup, broken, client, post, request, spec, text};

fn stalls(mut parts: Vec<Part>) -> Vec<Part> {
    parts.insert(3, Part::Gate);
    parts
}

async fn send(setup: &Setup, path: &str, headers: &[(&str, &str)]) -> reqwest::Response {
    let mut call = client().post(format!("http://{}{path}", setup.address)).body(request(false).to_string());
    for (name, value) in headers {
        call = call.header(*name, *value);
    }
    tokio::time::timeout(PATIENCE, call.send()).await.expect("in time").expect("an answer")
}

async fn code(response: reqwest::Response) -> String {
    let status = response.status().as_u16();
    let body: Value = serde_json::from_slice(&text(response).await).expect("OpenAI's shape");
    format!("{status} {}", body["error"]["code"].as_str().expect("code"))
}

#[tokio::test]
async fn a_trainers_proxy_serves_open_sessions_by_path_or_key_and_nobody_else() {
    let setup = Setup::trainer(Script::default()).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    assert!(setup.proxy.open_session(spec("s1")).is_err());
    let chat = "/v1/chat/completions";
    let bearer = format!("Bearer {}", session.api_key());
    assert_eq!(send(&setup, &format!("/sessions/s1{chat}"), &[]).await.status(), 200);
    assert_eq!(send(&setup, chat, &[("authorization", &bearer)]).await.status(), 200);
    assert_eq!(send(&setup, chat, &[("x-api-key", &session.api_key())]).await.status(), 200);
    assert_eq!(code(send(&setup, chat, &[]).await).await, "401 no_session");
    assert_eq!(code(send(&setup, chat, &[("x-session-id", "s1")]).await).await, "401 no_session");
    assert_eq!(
        code(send(&setup, chat, &[("authorization", "Bearer sk-lego-s1.guess")]).await).await,
        "401 no_session"
    );
    assert_eq!(code(send(&setup, &format!("/sessions/s2{chat}"), &[]).await).await, "404 no_such_session");
    let by_key = |key: &str| format!("/sessions/{key}{chat}");
    assert_eq!(send(&setup, &by_key(&session.api_key()), &[]).await.status(), 200);
    let guessed = code(send(&setup, &by_key("sk-lego-s1.guess"), &[]).await).await;
    assert_eq!(guessed, "404 no_such_session");
    let result = session.close().await;
    assert_eq!(result.calls.len(), 4);
    assert_eq!(code(send(&setup, &format!("/sessions/s1{chat}"), &[]).await).await, "404 no_such_session");
    assert_eq!(setup.mock.asked().len(), 4);
}

#[tokio::test]
async fn stand_alone_the_path_beats_the_key_which_beats_the_header_which_beats_a_derived_name() {
    let setup = Setup::stand_alone(Script::default()).await;
    let chat = "/v1/chat/completions";
    let key = ("authorization", "Bearer sk-lego-by.key.secret");
    let header = ("x-session-id", "by-header");
    for (path, headers, expected) in [
        ("/sessions/by-path/v1/chat/completions", vec![key, header], "by-path"),
        (chat, vec![key, header], "by.key"),
        (chat, vec![header], "by-header"),
        ("/sessions/sk-lego-by.key.secret/v1/chat/completions", vec![], "by.key"),
    ] {
        text(send(&setup, path, &headers).await).await;
        let calls = setup.sink.calls(setup.sink.count()).await;
        assert_eq!(calls.last().expect("record").session_id.as_str(), expected);
    }
    text(send(&setup, chat, &[("authorization", "Bearer anything")]).await).await;
    text(send(&setup, chat, &[]).await).await;
    let calls = setup.sink.calls(6).await;
    assert!(calls[4].session_id.as_str().starts_with("derived-"));
    assert_eq!(calls[4].session_id, calls[5].session_id);
    assert_eq!(calls[2].harness_conversation_id.as_deref(), Some("by-header"));
    assert_eq!(code(send(&setup, chat, &[("x-session-id", "a/b")]).await).await, "400 bad_session_id");
}

#[tokio::test]
async fn a_sessions_own_listener_serves_its_model_routes_and_nothing_else() {
    let setup = Setup::trainer(Script::default()).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let address = listener.local_addr().expect("bound");
    let proxy = setup.proxy.clone();
    let id = session.session_id().clone();
    let serving = tokio::spawn(async move { proxy.serve_session_listener(listener, &id).await });
    let get = |path: &str| client().get(format!("http://{address}{path}")).send();
    let chat = format!("http://{address}/v1/chat/completions");
    assert_eq!(post(&chat, &request(true)).await.status(), 200);
    assert_eq!(get("/v1/models").await.expect("answer").status(), 200);
    for path in ["/metrics", "/healthz", "/readyz", "/sessions/s1/v1/models", "/admin"] {
        assert_eq!(get(path).await.expect("answer").status(), 404, "{path}");
    }
    let result = session.close().await;
    assert_eq!(result.calls.len(), 1);
    // Closing the session ends its listener.
    tokio::time::timeout(PATIENCE, serving).await.expect("in time").expect("joined").expect("served");
    assert!(client().post(&chat).body("{}").send().await.is_err());
}

#[tokio::test]
async fn closing_a_session_ends_its_running_calls_and_waits_for_their_records() {
    let setup = Setup::trainer(Script { spoil: Some(stalls), ..Script::default() }).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
    let mut response = post(&url, &request(true)).await;
    let mut seen = String::new();
    while !seen.contains("北京") {
        seen.push_str(&String::from_utf8_lossy(&response.chunk().await.expect("piece").expect("more")));
    }
    let result = tokio::time::timeout(PATIENCE, session.close()).await.expect("in time");
    assert_eq!(result.calls.len(), 1);
    assert_eq!(result.calls[0].status, CallStatus::Aborted);
    assert_eq!(result.calls[0].completion_token_ids.as_ref().expect("ids").len(), 2);
    assert!(result.upstream_failures.is_empty());
    assert_eq!(SessionFacts::of(&result, false).policy_calls, 1, "the policy was at it");
    assert!(String::from_utf8_lossy(&broken(response).await).contains("call_aborted"));
    setup.mock.aborted(1).await;
}

#[tokio::test]
async fn the_turn_limit_tells_the_harness_to_end() {
    let setup = Setup::trainer(Script::default()).await;
    let limited = SessionSpec { max_calls: Some(2), ..spec("s1") };
    let session = setup.proxy.open_session(limited).expect("open");
    let path = "/sessions/s1/v1/chat/completions";
    assert_eq!(send(&setup, path, &[]).await.status(), 200);
    assert_eq!(send(&setup, path, &[]).await.status(), 200);
    assert_eq!(code(send(&setup, path, &[]).await).await, "400 max_turns_reached");
    let result = session.close().await;
    assert!(result.max_calls_hit);
    assert_eq!(result.calls.len(), 2);
}

#[tokio::test]
async fn a_session_that_ends_does_not_wait_for_calls_without_a_place() {
    let mut options = ProxyOptions::trainer("policy");
    options.max_in_flight = 1;
    options.admission_wait = 10 * PATIENCE;
    let setup =
        Setup::with(options, UpstreamKind::Vllm, Script { is_silent: true, ..Script::default() }).await;
    let [first, second] = ["s1", "s2"].map(|name| {
        let limited = SessionSpec { max_calls: Some(1), ..spec(name) };
        setup.proxy.open_session(limited).expect("open")
    });
    let path = |name: &str| format!("http://{}/sessions/{name}/v1/chat/completions", setup.address);
    let url = path("s1");
    let running = tokio::spawn(async move { post(&url, &request(false)).await.status() });
    setup.mock.started(1).await;
    // The second of them is over the limit once the first waits.
    let [one, other] = [path("s2"), path("s2")]
        .map(|url| Box::pin(async move { code(post(&url, &request(false)).await).await }));
    let (refused, waiting) = match futures_util::future::select(one, other).await {
        futures_util::future::Either::Left(pair) => pair,
        futures_util::future::Either::Right(pair) => pair,
    };
    assert_eq!(refused, "400 max_turns_reached");
    let result = tokio::time::timeout(PATIENCE, second.close()).await.expect("in time");
    assert_eq!(waiting.await, "403 session_closed");
    assert_eq!((result.calls[0].status, result.calls[0].http_status), (CallStatus::Aborted, 403));
    assert_eq!(SessionFacts::of(&result, false).policy_calls, 0, "it never came to the policy");
    drop(first.close().await);
    assert!(running.await.expect("the first call ends").is_server_error());
}

#[tokio::test]
async fn c13_a_rewritten_history_is_refused_where_it_is_not_tolerated() {
    let mut options = ProxyOptions::stand_alone();
    options.history_rewrite_tolerance = false;
    let setup = Setup::with(options, UpstreamKind::Vllm, Script::default()).await;
    let url = format!("http://{}/sessions/s/v1/chat/completions", setup.address);
    let ask = |messages: Value| {
        let url = url.clone();
        async move { post(&url, &json!({"model": "toy", "messages": messages})).await }
    };
    let user = |text: &str| json!({"role": "user", "content": text});
    let first = json!([user("a")]);
    let second = json!([{"content": "a", "role": "user"}, {"role": "assistant", "content": "x"}, user("b")]);
    assert_eq!(ask(first.clone()).await.status(), 200);
    assert_eq!(ask(second.clone()).await.status(), 200);
    assert_eq!(ask(second).await.status(), 200);
    let rewritten = json!([user("a"), {"role": "assistant", "content": "y"}, user("b"), user("c")]);
    assert_eq!(code(ask(rewritten).await).await, "409 history_rewritten");
    assert_eq!(code(ask(first).await).await, "409 history_rewritten");
}

#[tokio::test]
async fn foreign_hosts_and_origins_are_refused() {
    let setup = Setup::stand_alone(Script::default()).await;
    let chat = "/v1/chat/completions";
    for headers in [
        [("host", "evil.example"), ("x-a", "b")],
        [("host", "10.0.0.1:80"), ("x-a", "b")],
        [("host", "localhost"), ("origin", "https://evil.example")],
        [("host", "localhost"), ("origin", "null")],
    ] {
        assert_eq!(code(send(&setup, chat, &headers).await).await, "403 foreign_host");
    }
    for host in ["localhost:18080", "127.0.0.1", "[::1]:1"] {
        assert_eq!(send(&setup, chat, &[("host", host)]).await.status(), 200, "{host}");
    }
    let own = [("origin", "http://localhost:3000")];
    assert_eq!(send(&setup, chat, &own).await.status(), 200);
}

#[tokio::test]
async fn beyond_loopback_a_client_token_is_needed() {
    assert!(matches!(lego::proxy::listen("0.0.0.0", 0, false).await, Err(ListenError::NoToken { .. })));
    let mut options = ProxyOptions::stand_alone();
    options.client_token = Some("token".to_owned());
    let setup = Setup::with(options, UpstreamKind::Vllm, Script::default()).await;
    let chat = "/v1/chat/completions";
    assert_eq!(
        code(send(&setup, chat, &[("authorization", "Bearer wrong")]).await).await,
        "401 bad_client_token"
    );
    assert_eq!(
        code(send(&setup, "/sessions/x/v1/chat/completions", &[]).await).await,
        "401 bad_client_token"
    );
    assert_eq!(send(&setup, chat, &[("authorization", "Bearer token")]).await.status(), 200);
    assert!(!setup.mock.asked()[0].headers["authorization"].to_str().expect("text").contains("token"));
    let health = client().get(format!("http://{}/healthz", setup.address)).send().await.expect("answer");
    assert_eq!(health.status(), 200);
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let taken = lego::proxy::listen("127.0.0.1", 0, false).await.expect("free");
    let port = taken.local_addr().expect("bound").port();
    let error = lego::proxy::listen("127.0.0.1", port, false).await.expect_err("taken").to_string();
    assert!(error.contains(&port.to_string()) && error.contains("listen_port"), "{error}");
}

#[tokio::test]
async fn g03_bodies_up_to_the_limit_pass_and_longer_ones_are_told_so() {
    let mut options = ProxyOptions::stand_alone();
    options.max_body_bytes = 4 << 20;
    let setup = Setup::with(options, UpstreamKind::Vllm, Script::default()).await;
    let sized = |bytes: usize| {
        let mut body = request(false);
        body["messages"][0]["content"] = json!("x".repeat(bytes));
        body
    };
    assert_eq!(setup.post(&sized(3 << 20)).await.status(), 200);
    assert_eq!(code(setup.post(&sized(5 << 20)).await).await, "413 request_too_large");
}

#[tokio::test]
async fn what_is_not_served_says_what_is() {
    let mut options = ProxyOptions::stand_alone();
    options.render_metrics = Some(std::sync::Arc::new(|| "lego_up 1\n".to_owned()));
    let setup = Setup::with(options, UpstreamKind::Vllm, Script::default()).await;
    let get = |path: &str| client().get(format!("http://{}{path}", setup.address)).send();
    for path in ["/v1/v1/chat/completions", "/chat/completions", "//v1/chat/completions"] {
        let reply = text(send(&setup, path, &[]).await).await;
        assert!(String::from_utf8_lossy(&reply).contains("/v1"), "{path}");
    }
    assert_eq!(code(send(&setup, "/v1/chat/completions/x", &[]).await).await, "404 not_found");
    assert_eq!(code(post(&setup.url(), &json!({"messages": []})).await).await, "400 bad_request");
    assert_eq!(get("/readyz").await.expect("answer").status(), 200);
    let models = text(get("/v1/models").await.expect("answer")).await;
    assert!(String::from_utf8_lossy(&models).contains("toy"));
    assert_eq!(text(get("/metrics").await.expect("answer")).await, "lego_up 1\n");
}

#[tokio::test]
async fn g05_a_shutdown_lets_short_calls_end_and_ends_long_ones() {
    let mut options = ProxyOptions::stand_alone();
    options.shutdown_grace = Duration::from_millis(50);
    let script = Script { spoil: Some(stalls), ..Script::default() };
    let setup = Setup::with(options, UpstreamKind::Vllm, script).await;
    let mut response = setup.post(&request(true)).await;
    response.chunk().await.expect("piece").expect("begun");
    tokio::time::timeout(PATIENCE, setup.proxy.shutdown()).await.expect("in time");
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::Aborted);
    assert!(String::from_utf8_lossy(&broken(response).await).contains("call_aborted"));
    assert!(client().get(format!("http://{}/healthz", setup.address)).send().await.is_err());
}

#[tokio::test]
async fn g14_parallel_sessions_keep_their_calls_apart() {
    let setup = Setup::trainer(Script::default()).await;
    let mut running = tokio::task::JoinSet::new();
    for number in 0..50 {
        let name = format!("s{number}");
        let session = setup.proxy.open_session(spec(&name)).expect("open");
        let url = format!("http://{}/sessions/{name}/v1/chat/completions", setup.address);
        running.spawn(async move {
            for turn in 0..3 {
                let mut body = request(turn % 2 == 0);
                body["user"] = json!(name);
                text(post(&url, &body).await).await;
            }
            (name, session.close().await)
        });
    }
    while let Some(joined) = running.join_next().await {
        let (name, result) = joined.expect("joined");
        assert_eq!(result.calls.len(), 3);
        for call in &result.calls {
            assert_eq!(call.session_id.as_str(), name);
            assert!(
                call.client_request.as_ref().expect("kept").get().contains(&format!("\"user\":\"{name}\""))
            );
        }
    }
    assert_eq!(setup.sink.count(), 150);
}
