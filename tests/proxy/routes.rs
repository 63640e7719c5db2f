//! Several models behind one address: each call goes to its own upstream with its own key, within its own limits.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lego::proxy::{Mode, Proxy, ProxyOptions, RouteOptions, SessionSampling, SessionSpec};
use lego::record::{CallKind, CallSink, CallStatus, UpstreamKind, WeightSource};
use lego::upstream::Upstream;
use serde_json::{Value, json};

use crate::mock::{Asked, Mock, Script};
use crate::setup::{MemorySink, client, post, request, spec, text, timeouts};

/// A proxy in front of several mocks.
struct House {
    proxy: Proxy,
    sink: Arc<MemorySink>,
    address: SocketAddr,
}

impl House {
    async fn new(
        mut options: ProxyOptions,
        default: Option<Arc<Upstream>>,
        routes: Vec<RouteOptions>,
    ) -> Self {
        options.probes_upstream = false;
        Self::as_told(options, default, routes).await
    }

    async fn as_told(
        options: ProxyOptions,
        default: Option<Arc<Upstream>>,
        routes: Vec<RouteOptions>,
    ) -> Self {
        let sink = MemorySink::new();
        let proxy = Proxy::with_routes(options, Arc::clone(&sink) as Arc<dyn CallSink>, default, routes);
        let listener = lego::proxy::listen("127.0.0.1", 0, false).await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        let served = proxy.clone();
        tokio::spawn(async move { served.serve(listener).await });
        Self { proxy, sink, address }
    }

    async fn ask(&self, path: &str, body: &Value) -> reqwest::Response {
        post(&format!("http://{}{path}", self.address), body).await
    }

    async fn get(&self, path: &str, is_anthropic: bool) -> (u16, Value) {
        let mut request = client().get(format!("http://{}{path}", self.address));
        if is_anthropic {
            request = request.header("anthropic-version", "2023-06-01");
        }
        let response = request.send().await.expect("an answer");
        let status = response.status().as_u16();
        (status, serde_json::from_slice(&text(response).await).unwrap_or_default())
    }
}

fn to(mock: &Mock, key: Option<&str>) -> Arc<Upstream> {
    Arc::new(Upstream::http(&mock.url(), UpstreamKind::Vllm, key, timeouts()).expect("upstream"))
}

fn stand_alone() -> ProxyOptions {
    let mut options = ProxyOptions::stand_alone();
    options.retries.most = 0;
    options
}

/// The routes of the three protocols that have an error of their own, each with a request for `model`.
fn in_each_protocol(model: &str, stream: bool) -> [(&'static str, Value); 3] {
    [
        (
            "/v1/chat/completions",
            json!({"model": model, "stream": stream, "messages": [{"role": "user", "content": "hi"}]}),
        ),
        (
            "/v1/messages",
            json!({"model": model, "stream": stream, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}),
        ),
        ("/v1/responses", json!({"model": model, "stream": stream, "input": "hi"})),
    ]
}

fn named(model: &str) -> Value {
    let mut body = request(false);
    body["model"] = model.into();
    body
}

fn models(asked: &[Asked]) -> Vec<String> {
    asked.iter().map(|asked| asked.json()["model"].as_str().expect("a model").to_owned()).collect()
}

fn codes(list: &Value) -> Vec<&str> {
    list["data"].as_array().expect("a list").iter().map(|model| model["id"].as_str().expect("id")).collect()
}

#[tokio::test]
async fn each_model_is_answered_by_its_own_upstream_with_its_own_key() {
    let (student, judge) = (Mock::start(Script::default()).await, Mock::start(Script::default()).await);
    let routes = vec![
        RouteOptions {
            models: vec!["gpt-x".to_owned(), "claude-x".to_owned()],
            upstream_model: Some("student-7b".to_owned()),
            sampling: Some(SessionSampling::Pinned { temperature: 1.0, seed: 3 }),
            ..RouteOptions::new("student", to(&student, Some("sk-student-canary")))
        },
        RouteOptions {
            kind: Some(CallKind::Judge),
            ..RouteOptions::new("judge", to(&judge, Some("sk-judge-canary")))
        },
    ];
    let house = House::new(stand_alone(), None, routes).await;
    for stream in [false, true] {
        for model in ["gpt-x", "claude-x", "judge"] {
            for (path, body) in in_each_protocol(model, stream) {
                let response = house.ask(path, &body).await;
                assert_eq!(response.status(), 200, "{path} {model}");
                let reply = String::from_utf8_lossy(&text(response).await).into_owned();
                assert!(reply.contains(model) && !reply.contains("student-7b"), "{path} {reply}");
            }
        }
    }
    assert_eq!(models(&student.asked()), ["student-7b"; 12]);
    assert_eq!(models(&judge.asked()), ["judge"; 6]);
    for (mock, key) in [(&student, "student"), (&judge, "judge")] {
        for asked in mock.asked() {
            assert_eq!(asked.headers["authorization"], format!("Bearer sk-{key}-canary"));
            assert_eq!(
                format!("{:?}", asked.headers).matches("canary").count(),
                1,
                "no other's key, no client's"
            );
        }
    }
    let calls = house.sink.calls(18).await;
    for call in &calls {
        let is_judge = call.model_requested == "judge";
        assert_eq!(call.status, CallStatus::Ok);
        assert_eq!(call.kind, if is_judge { CallKind::Judge } else { CallKind::Unknown });
        assert_eq!(call.trainable, !is_judge, "{:?}", call.not_trainable_reasons);
        assert_eq!(call.not_trainable_reasons.contains(&"kind_judge".to_owned()), is_judge);
        assert_eq!(call.sampling_sent.temperature, (!is_judge).then_some(1.0));
    }
    let stored = serde_json::to_string(&calls).expect("JSON");
    assert!(!stored.contains("canary"), "a key is in a record");
}

#[tokio::test]
async fn a_model_that_nobody_serves_is_told_with_those_that_are() {
    let mock = Mock::start(Script::default()).await;
    let route = || RouteOptions::new("judge", to(&mock, None));
    let house = House::new(stand_alone(), None, vec![route()]).await;
    for (path, body) in in_each_protocol("nobody", true) {
        let response = house.ask(path, &body).await;
        assert_eq!(response.status(), 404, "{path}");
        let error: Value = serde_json::from_slice(&text(response).await).expect("JSON");
        let message = error["error"]["message"].as_str().expect("text");
        assert!(message.contains("nobody") && message.contains("judge"), "{message}");
        if path == "/v1/messages" {
            assert_eq!(error["error"]["type"], "not_found_error");
        } else {
            assert_eq!(error["error"]["code"], "model_not_found");
        }
    }
    let response = house.ask("/v1/chat/completions", &json!({"messages": []})).await;
    assert_eq!(response.status(), 400);
    assert_eq!((mock.asked().len(), house.sink.count()), (0, 0));

    // With a default they are its.
    let default = Mock::start(Script::default()).await;
    let house = House::new(stand_alone(), Some(to(&default, None)), vec![route()]).await;
    for model in ["nobody", "judge"] {
        text(house.ask("/v1/chat/completions", &named(model)).await).await;
    }
    assert_eq!(models(&default.asked()), ["nobody"]);
    assert_eq!(models(&mock.asked()), ["judge"]);
}

#[tokio::test]
async fn the_list_of_models_has_all_that_are_served_in_both_dialects() {
    let mock = Mock::start(Script::default()).await;
    let routes = || {
        let models = vec!["gpt-x".to_owned(), "toy".to_owned()];
        vec![
            RouteOptions { kind: Some(CallKind::Judge), ..RouteOptions::new("judge", to(&mock, None)) },
            RouteOptions { models, ..RouteOptions::new("student", to(&mock, None)) },
        ]
    };
    let house = House::new(stand_alone(), None, routes()).await;
    for path in ["/v1/models", "/sessions/s/v1/models"] {
        let (status, list) = house.get(path, false).await;
        assert_eq!((status, codes(&list)), (200, vec!["judge", "gpt-x", "toy"]));
        assert_eq!((&list["object"], &list["data"][0]["object"]), (&json!("list"), &json!("model")));
        let (_, list) = house.get(path, true).await;
        assert_eq!(codes(&list), ["judge", "gpt-x", "toy"]);
        assert_eq!((&list["data"][0]["type"], &list["last_id"]), (&json!("model"), &json!("toy")));
    }
    assert_eq!(house.get("/readyz", false).await.0, 200);
    // The default upstream's own list has `toy`, which a route has taken.
    let house = House::new(stand_alone(), Some(to(&mock, None)), routes()[..1].to_vec()).await;
    assert_eq!(codes(&house.get("/v1/models", false).await.1), ["judge", "toy"]);
    assert_eq!(codes(&house.get("/v1/models", true).await.1), ["judge", "toy"]);
    // Of a default that is down the routes are served all the same.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    drop(listener);
    let down = Arc::new(Upstream::http(&url, UpstreamKind::Vllm, None, timeouts()).expect("upstream"));
    let house = House::new(stand_alone(), Some(down), routes()).await;
    assert_eq!(codes(&house.get("/v1/models", false).await.1), ["judge", "gpt-x", "toy"]);
    assert_eq!(house.get("/readyz", false).await.0, 503);
}

#[tokio::test]
async fn more_requests_than_a_routes_rate_are_told_when_to_come_back_in_each_protocol() {
    let mock = Mock::start(Script::default()).await;
    let routes = vec![
        RouteOptions {
            requests_per_minute: Some(1),
            admission_wait: Some(Duration::ZERO),
            ..RouteOptions::new("slow", to(&mock, None))
        },
        RouteOptions::new("free", to(&mock, None)),
    ];
    let house = House::new(stand_alone(), None, routes).await;
    text(house.ask("/v1/chat/completions", &named("slow")).await).await;
    for stream in [false, true] {
        for (path, body) in in_each_protocol("slow", stream) {
            let response = house.ask(path, &body).await;
            assert_eq!(response.status(), 429, "{path}");
            let after: u64 =
                response.headers()["retry-after"].to_str().expect("text").parse().expect("seconds");
            assert!((1..=60).contains(&after), "{after}");
            assert!(response.headers().contains_key("x-lego-call-id"));
            let error: Value = serde_json::from_slice(&text(response).await).expect("JSON");
            let message = error["error"]["message"].as_str().expect("text");
            assert!(message.contains("proxy.routes.slow.requests_per_minute"), "{message}");
            if path == "/v1/messages" {
                assert_eq!(
                    (&error["type"], &error["error"]["type"]),
                    (&json!("error"), &json!("rate_limit_error"))
                );
            } else {
                assert_eq!(error["error"]["code"], "rate_limited");
            }
        }
    }
    assert_eq!(house.ask("/v1/chat/completions", &named("free")).await.status(), 200);
    assert_eq!(models(&mock.asked()), ["slow", "free"]);
    let calls = house.sink.calls(8).await;
    let refused: Vec<_> = calls.iter().filter(|call| call.http_status == 429).collect();
    assert_eq!(refused.len(), 6);
    for call in refused {
        assert_eq!((call.status, call.trainable), (CallStatus::Aborted, false));
        assert!(call.error.as_ref().expect("why").contains("requests_per_minute"));
        assert_eq!(call.completion_token_ids, None);
    }
}

#[tokio::test]
async fn a_retry_is_a_request_like_any_other() {
    let script =
        Script { first_errors: vec![(500, "oops", vec![("retry-after-ms", "1")])], ..Script::default() };
    let mock = Mock::start(script).await;
    let route = RouteOptions {
        requests_per_minute: Some(1),
        admission_wait: Some(Duration::ZERO),
        max_retries: Some(2),
        ..RouteOptions::new("slow", to(&mock, None))
    };
    let house = House::new(stand_alone(), None, vec![route]).await;
    let response = house.ask("/v1/chat/completions", &named("slow")).await;
    assert_eq!(response.status(), 429);
    text(response).await;
    assert_eq!(mock.asked().len(), 1);
    let calls = house.sink.calls(2).await;
    let seen: Vec<_> = calls.iter().map(|call| (call.attempt, call.status, call.http_status)).collect();
    assert_eq!(seen, [(1, CallStatus::UpstreamError, 500), (2, CallStatus::Aborted, 429)]);
    assert_eq!(calls[1].retry_of, Some(calls[0].call_id));
}

#[tokio::test]
async fn a_route_that_is_full_holds_no_other_up() {
    let (stuck, free) = (
        Mock::start(Script { is_silent: true, ..Script::default() }).await,
        Mock::start(Script::default()).await,
    );
    let routes = vec![
        RouteOptions {
            max_concurrent: Some(1),
            admission_wait: Some(Duration::ZERO),
            ..RouteOptions::new("stuck", to(&stuck, None))
        },
        RouteOptions::new("free", to(&free, None)),
    ];
    let house = House::new(stand_alone(), None, routes).await;
    let url = format!("http://{}/v1/chat/completions", house.address);
    let first = tokio::spawn(async move { text(post(&url, &named("stuck")).await).await });
    stuck.started(1).await;
    let response = house.ask("/v1/chat/completions", &named("stuck")).await;
    assert_eq!(response.status(), 429);
    assert_eq!(response.headers()["retry-after"], "1");
    assert!(String::from_utf8_lossy(&text(response).await).contains("proxy.routes.stuck.max_concurrent"));
    assert_eq!(house.ask("/v1/chat/completions", &named("free")).await.status(), 200);
    stuck.open_gate();
    first.await.expect("the first call ends");
    house.sink.calls(3).await;
    assert_eq!(house.ask("/v1/chat/completions", &named("stuck")).await.status(), 200);
    assert_eq!(stuck.asked().len(), 2);
}

#[tokio::test]
async fn a_trainers_sessions_get_the_policy_and_side_models_but_neither_judge_nor_teacher() {
    let script = || Script { gives_versions: false, ..Script::default() };
    let (policy, other) = (Mock::start(script()).await, Mock::start(script()).await);
    let of_kind =
        |name: &str, kind| RouteOptions { kind: Some(kind), ..RouteOptions::new(name, to(&other, None)) };
    let routes = vec![
        of_kind("small", CallKind::Aux),
        of_kind("judge", CallKind::Judge),
        of_kind("teacher", CallKind::Teacher),
        of_kind("copy", CallKind::Policy),
    ];
    let mut options = ProxyOptions::trainer("policy");
    options.retries.most = 0;
    let house = House::new(options, Some(to(&policy, None)), routes).await;
    house.proxy.set_policy_version("7");
    let session = house.proxy.open_session(spec("s1")).expect("open");
    for model in ["anything", "small", "judge", "teacher", "copy"] {
        text(house.ask("/sessions/s1/v1/chat/completions", &named(model)).await).await;
    }
    assert_eq!(models(&policy.asked()), ["policy"; 4]);
    assert_eq!(models(&other.asked()), ["small"]);
    assert_eq!(codes(&house.get("/sessions/s1/v1/models", false).await.1), ["small", "toy"]);
    let result = session.close().await;
    for call in &result.calls {
        let is_small = call.model_requested == "small";
        assert_eq!(call.kind, if is_small { CallKind::Aux } else { CallKind::Policy });
        // Another model's tokens are never the policy's to learn from, whatever side calls are taken in.
        assert_eq!(call.not_trainable_reasons.iter().any(|reason| reason == "aux_route"), is_small);
        assert_eq!(call.trainable, !is_small, "{:?}", call.not_trainable_reasons);
        // The weights' version is the policy's, and the sampling too.
        let source = if is_small { WeightSource::Unknown } else { WeightSource::LegoClock };
        assert_eq!(call.weight_source, source);
        assert_eq!(call.sampling_sent.temperature, Some(if is_small { 0.7 } else { 1.0 }));
    }
    // A session that the trainer opened for its judge reaches it.
    let judging = SessionSpec { kind: CallKind::Judge, ..spec("j1") };
    let session = house.proxy.open_session(judging).expect("open");
    for model in ["judge", "teacher"] {
        text(house.ask("/sessions/j1/v1/chat/completions", &named(model)).await).await;
    }
    assert_eq!(models(&other.asked()), ["small", "judge"]);
    assert!(session.close().await.calls.iter().all(|call| call.kind == CallKind::Judge && !call.trainable));
}

#[tokio::test]
async fn a_pause_holds_the_policys_calls_only() {
    let mock = Mock::start(Script::default()).await;
    let judge = RouteOptions { kind: Some(CallKind::Judge), ..RouteOptions::new("judge", to(&mock, None)) };
    let house = House::new(stand_alone(), Some(to(&mock, None)), vec![judge]).await;
    house.proxy.pause();
    let url = format!("http://{}/v1/chat/completions", house.address);
    let waiting = tokio::spawn(async move { text(post(&url, &named("policy")).await).await });
    text(house.ask("/v1/chat/completions", &named("judge")).await).await;
    assert_eq!(models(&mock.asked()), ["judge"]);
    house.proxy.resume();
    waiting.await.expect("it ends");
    assert_eq!(models(&mock.asked()), ["judge", "policy"]);
}

#[tokio::test]
async fn each_upstream_is_probed_once_and_aliases_share_theirs() {
    let (student, judge) = (Mock::start(Script::default()).await, Mock::start(Script::default()).await);
    let shared = to(&student, None);
    let routes = vec![
        RouteOptions::new("one", Arc::clone(&shared)),
        RouteOptions::new("two", shared),
        RouteOptions::new("judge", to(&judge, None)),
    ];
    let house = House::as_told(stand_alone(), None, routes).await;
    for model in ["one", "two", "judge", "one", "judge"] {
        text(house.ask("/v1/chat/completions", &named(model)).await).await;
    }
    assert_eq!(models(&student.asked()), ["one", "one", "two", "one"]);
    assert_eq!(models(&judge.asked()), ["judge"; 3]);
    let calls = house.sink.calls(7).await;
    assert_eq!(calls.iter().filter(|call| call.kind == CallKind::Probe).count(), 2);
}

#[tokio::test]
async fn a_refused_key_leads_to_the_routes_own_variable() {
    let script = Script { error: Some((401, "{}".to_owned())), ..Script::default() };
    let mock = Mock::start(script).await;
    let routes = vec![
        RouteOptions {
            upstream_key_env: Some("JUDGE_KEY".to_owned()),
            ..RouteOptions::new("judge", to(&mock, None))
        },
        RouteOptions::new("keyless", to(&mock, None)),
    ];
    let house = House::new(stand_alone(), None, routes).await;
    for (model, part) in [("judge", "JUDGE_KEY"), ("keyless", "proxy.routes.keyless.upstream_api_key_env")] {
        let reply = text(house.ask("/v1/chat/completions", &named(model)).await).await;
        assert!(String::from_utf8_lossy(&reply).contains(part), "{}", String::from_utf8_lossy(&reply));
    }
}

#[tokio::test]
async fn tokens_are_counted_for_the_upstreams_own_model() {
    let asked = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    let router = axum::Router::new().route(
        "/tokenize",
        axum::routing::post(move |axum::Json(body): axum::Json<Value>| {
            seen.lock().expect("asked").push(body["model"].clone());
            async { axum::Json(json!({"count": 17})) }
        }),
    );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let upstream = || Arc::new(Upstream::http(&url, UpstreamKind::Vllm, None, timeouts()).expect("upstream"));
    let route =
        RouteOptions { upstream_model: Some("real".to_owned()), ..RouteOptions::new("alias", upstream()) };
    let mapped = Mode::StandAlone {
        sampling: SessionSampling::PassThrough,
        model_map: [("claude-x".to_owned(), "mapped".to_owned())].into(),
    };
    let house = House::new(ProxyOptions::new(mapped), Some(upstream()), vec![route]).await;
    for model in ["alias", "claude-x", "other"] {
        let body = json!({"model": model, "messages": [{"role": "user", "content": "hi"}]});
        let reply = text(house.ask("/v1/messages/count_tokens", &body).await).await;
        assert_eq!(reply, r#"{"input_tokens":17}"#);
    }
    assert_eq!(*asked.lock().expect("asked"), [json!("real"), json!("mapped"), json!("other")]);
}

#[tokio::test]
async fn a_server_of_messages_behind_an_alias_does_not_give_its_own_name_away() {
    const STREAM: &str = concat!(
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"real\",\"content\":[],\"stop_reason\":null,\"usage\":{\"input_tokens\":1,\"output_tokens\":1}}}\n\n",
        "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":1}}\n\n",
        "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    );
    let router = axum::Router::new().route(
        "/v1/messages",
        axum::routing::post(|axum::Json(body): axum::Json<Value>| async move {
            assert_eq!(body["model"], "real");
            ([("content-type", "text/event-stream")], STREAM)
        }),
    );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let upstream = Upstream::http(&url, UpstreamKind::Anthropic, None, timeouts()).expect("upstream");
    let route = RouteOptions {
        models: vec!["alias".to_owned()],
        upstream_model: Some("real".to_owned()),
        ..RouteOptions::new("teacher", Arc::new(upstream))
    };
    let house = House::new(stand_alone(), None, vec![route]).await;
    let [_, (path, body), _] = in_each_protocol("alias", true);
    let reply = text(house.ask(path, &body).await).await;
    assert_eq!(String::from_utf8_lossy(&reply), STREAM.replace("\"real\"", "\"alias\""));
    let call = &house.sink.calls(1).await[0];
    assert_eq!((call.model_requested.as_str(), call.model_served.as_deref()), ("alias", Some("real")));
}

#[tokio::test]
async fn counts_of_tokens_are_among_a_routes_requests() {
    let mock = Mock::start(Script::default()).await;
    let route = RouteOptions {
        requests_per_minute: Some(1),
        admission_wait: Some(Duration::ZERO),
        ..RouteOptions::new("slow", to(&mock, None))
    };
    let house = House::new(stand_alone(), None, vec![route]).await;
    let body = json!({"model": "slow", "messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(house.ask("/v1/messages/count_tokens", &body).await.status(), 200);
    let response = house.ask("/v1/messages/count_tokens", &body).await;
    assert_eq!(response.status(), 429);
    let after: u64 = response.headers()["retry-after"].to_str().expect("text").parse().expect("seconds");
    assert!((2..=60).contains(&after), "{after}");
    let error: Value = serde_json::from_slice(&text(response).await).expect("JSON");
    assert_eq!(error["error"]["type"], "rate_limit_error");
    assert_eq!(mock.tokenized().len(), 1);
}
