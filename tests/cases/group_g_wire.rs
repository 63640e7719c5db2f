//! Group G, on the wire: addresses, URLs, bodies, headers, labels, sessions.

use std::net::SocketAddr;

use lego::proxy::{ListenError, ProxyOptions};
use lego::record::{CallKind, CallStatus, UpstreamKind};
use lego::upstream::{BaseUrl, Upstream};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::mock::{Mock, Script};
use crate::setup::{PATIENCE, Setup, client, post, request, text as whole, timeouts};
use crate::speech::messages;
use crate::support::{Counters, protocols, sampled, session, trained, url};

#[tokio::test]
async fn g02_every_spelling_of_a_base_url_ends_at_the_same_route() {
    for (base, root) in [
        ("http://h", "http://h/v1"),
        ("http://h/", "http://h/v1"),
        ("http://h/v1", "http://h/v1"),
        ("http://h/v1/", "http://h/v1"),
        ("http://h/prefix", "http://h/prefix/v1"),
        ("http://h/prefix/v1/", "http://h/prefix/v1"),
        ("http://h/api/v4", "http://h/api/v4"),
        ("http://h/api/paas/v4/", "http://h/api/paas/v4"),
        ("http://h/v1/messages", "http://h/v1"),
        ("http://h/v1/chat/completions", "http://h/v1"),
    ] {
        for route in ["/chat/completions", "/messages", "/completions", "/models"] {
            let joined = BaseUrl::parse(base).expect(base).join(route, Some("beta=true")).expect("a URL");
            assert_eq!(joined.to_string(), format!("{root}{route}?beta=true"), "{base}");
        }
        // What the start prints.
        let upstream = Upstream::http(base, UpstreamKind::Vllm, None, timeouts()).expect("an upstream");
        assert_eq!(upstream.name(), root);
    }
    // Through the proxy: the query stays, and a client whose own base is wrong is told.
    let mock = Mock::start(Script { body: Some(b"{}".to_vec()), ..Script::default() }).await;
    for (kind, route, body) in [
        (UpstreamKind::Vllm, "chat/completions", request(false)),
        (UpstreamKind::Anthropic, "messages", messages(false)),
    ] {
        for base in ["", "/", "/v1", "/v1/", "/v1/messages"] {
            let upstream = Upstream::http(&(mock.url() + base), kind, None, timeouts()).expect("an upstream");
            let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock.clone()).await;
            assert_eq!(post(&(url(&setup, route) + "?beta=true"), &body).await.status(), 200);
            let asked = mock.asked().pop().expect("asked");
            assert_eq!(asked.uri, *format!("/v1/{route}?beta=true"));
            for wrong in [format!("/v1/v1/{route}"), format!("//v1/{route}"), format!("/{route}")] {
                let response = post(&format!("http://{}{wrong}", setup.address), &body).await;
                assert_eq!(response.status(), 404);
                let told: Value = serde_json::from_slice(&whole(response).await).expect("JSON");
                assert_eq!(told["type"] == "error", kind == UpstreamKind::Anthropic);
                assert!(told["error"]["message"].as_str().expect("text").contains("/v1"), "{told}");
            }
        }
    }
}

#[tokio::test]
async fn g03_bodies_pass_up_to_the_limit_and_beyond_it_are_told_so() {
    const MIB: usize = 1 << 20;
    let counters = Counters::new();
    assert_eq!(ProxyOptions::stand_alone().max_body_bytes, 64 * MIB);
    let sized = |mut body: Value, bytes: usize| {
        let field = if body.get("input").is_some() { "input" } else { "messages" };
        body[field][0]["content"] = json!("");
        let room = bytes - body.to_string().len();
        body[field][0]["content"] = json!("x".repeat(room));
        assert_eq!(body.to_string().len(), bytes);
        body
    };
    let setup = Setup::stand_alone(Script::default()).await;
    for bytes in [19 * MIB / 10, 21 * MIB / 10, 31 * MIB, 33 * MIB, 64 * MIB] {
        assert_eq!(setup.post(&sized(request(false), bytes)).await.status(), 200, "{bytes}");
    }
    assert_eq!(setup.mock.asked().len(), 5);
    let mut options = ProxyOptions::stand_alone();
    options.max_body_bytes = MIB;
    let setup = Setup::with(options, UpstreamKind::Vllm, Script::default()).await;
    for (route, body) in protocols() {
        let body = sized(body, 3 * MIB).to_string();
        let told = reqwest::Body::from(body.clone());
        // Without a length: in pieces of whatever size.
        let pieces: Vec<_> =
            body.as_bytes().chunks(100_000).map(|piece| Ok::<_, std::io::Error>(piece.to_vec())).collect();
        let untold = reqwest::Body::wrap_stream(tokio_stream::iter(pieces));
        for sent in [told, untold] {
            let sent =
                client().post(url(&setup, route)).header("content-type", "application/json").body(sent);
            let response = sent.header("x-session-id", "long").send().await.expect("an answer");
            assert_eq!(response.status(), 413);
            let call_id = response.headers()["x-lego-call-id"].to_str().expect("an id").to_owned();
            let reply: Value = serde_json::from_slice(&whole(response).await).expect("JSON");
            let expected = if route == "messages" { "request_too_large" } else { "invalid_request_error" };
            assert_eq!(reply["error"]["type"], expected);
            let message = reply["error"]["message"].as_str().expect("text");
            for part in [(3 * MIB).to_string(), MIB.to_string(), "proxy.max_body_bytes".to_owned()] {
                assert!(message.contains(&part), "{part} in {message}");
            }
            let call = setup.sink.calls(setup.sink.count().max(1)).await.pop().expect("a record");
            assert_eq!((call.call_id.to_string(), call.session_id.as_str()), (call_id, "long"));
            assert_eq!((call.status, call.http_status), (CallStatus::Aborted, 413));
            assert_eq!((call.error.as_deref(), call.client_request), (Some(message), None));
            assert!(!call.trainable && call.usage.is_none() && call.upstream_request.is_none());
        }
    }
    assert_eq!((setup.mock.asked().len(), setup.sink.count()), (0, 6));
    assert_eq!(counters.get("lego_proxy_refused_total{code=\"request_too_large\"}"), 6.0);
    assert_eq!(counters.get("lego_proxy_calls_total{status=\"aborted\"}"), 6.0);
    assert_eq!(counters.get("lego_proxy_calls_in_flight"), 0.0);
}

#[tokio::test]
async fn g07_labels_do_not_grow_with_what_clients_say() {
    let counters = Counters::new();
    let setup = Setup::stand_alone(Script::default()).await;
    let series = || counters.page().lines().filter(|line| !line.starts_with('#') && !line.is_empty()).count();
    let flood = |from: usize| {
        let setup = &setup;
        async move {
            for number in from..from + 100 {
                let mut body = request(number % 2 == 0);
                body["model"] = match number % 4 {
                    0 => json!(format!("flood-{number}")),
                    1 => json!(format!("flood-\"{number}\"\n{{le=\"1\"}}")),
                    2 => json!(format!("flood-{number}").repeat(200)),
                    _ => json!(format!("flood-\u{fffd}\u{0}{number}")),
                };
                let session = format!("http://{}/sessions/flood-{number}/v1/chat/completions", setup.address);
                whole(post(&session, &body).await).await;
                let nowhere = format!("http://{}/v1/flood-{number}/%ff", setup.address);
                assert_eq!(post(&nowhere, &body).await.status(), 404);
                assert_eq!(
                    post(&setup.url(), &json!({"model": format!("flood-{number}")})).await.status(),
                    400
                );
            }
        }
    };
    flood(0).await;
    let before = series();
    flood(100).await;
    assert_eq!(series(), before);
    // Every status, reason and bucket is there from the start.
    assert!(before < 500, "{before} series");
    let page = counters.page();
    assert!(!page.contains("flood"), "{page}");
    for line in page.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (_, value) = line.rsplit_once(' ').expect("a series and a value");
        assert!(value.parse::<f64>().is_ok_and(f64::is_finite), "{line}");
    }
    assert_eq!(counters.get("lego_proxy_calls_total{status=\"ok\"}"), 200.0);
    assert_eq!(counters.get("lego_proxy_calls_in_flight"), 0.0);
}

#[tokio::test]
async fn g09_each_address_is_reached_as_it_is_named() {
    let has_ipv6 = TcpListener::bind("[::1]:0").await.is_ok();
    let ipv6 = ["::1", "[::1]"].into_iter().filter(|_| has_ipv6);
    for host in ["127.0.0.1", "localhost"].into_iter().chain(ipv6) {
        let listener = lego::proxy::listen(host, 0, false).await.expect(host);
        let address = listener.local_addr().expect("bound");
        assert!(address.ip().is_loopback(), "{host}");
        let mock = Mock::in_process(Script::default());
        let upstream = Upstream::in_process(mock.router(), timeouts());
        let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await;
        let proxy = setup.proxy.clone();
        tokio::spawn(async move { proxy.serve(listener).await });
        assert_eq!(
            post(&format!("http://{address}/v1/chat/completions"), &request(false)).await.status(),
            200
        );
    }
    // Beyond loopback only with a token, and then from every side.
    let refused = lego::proxy::listen("0.0.0.0", 0, false).await.expect_err("no token");
    assert!(matches!(refused, ListenError::NoToken { .. }), "{refused}");
    assert!(refused.to_string().contains("proxy.client_token_env"), "{refused}");
    let everywhere = lego::proxy::listen("0.0.0.0", 0, true).await.expect("listening");
    let port = everywhere.local_addr().expect("bound").port();
    assert!(TcpStream::connect(("127.0.0.1", port)).await.is_ok());

    // An upstream called localhost is found on whichever of its two addresses it listens.
    let mock = Mock::start(Script::default()).await;
    let mut ports = vec![mock.address.port()];
    if has_ipv6 {
        let listener = TcpListener::bind("[::1]:0").await.expect("loopback");
        ports.push(listener.local_addr().expect("bound").port());
        let router = mock.router();
        tokio::spawn(async move { axum::serve(listener, router).await });
    }
    for port in ports {
        let upstream = format!("http://localhost:{port}");
        let upstream = Upstream::http(&upstream, UpstreamKind::Vllm, None, timeouts()).expect("an upstream");
        let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock.clone()).await;
        assert_eq!(setup.post(&request(true)).await.status(), 200, "{port}");
    }
}

/// Sends bytes as they are and gives the whole answer.
async fn send(address: SocketAddr, bytes: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("connected");
    stream.write_all(bytes.as_bytes()).await.expect("sent");
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("in time").expect("read");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn g11_headers_of_one_connection_stay_and_end_to_end_ones_pass() {
    let script = Script {
        headers: vec![
            ("x-request-id", "r-9"),
            ("x-multi", "a"),
            ("x-multi", "b"),
            ("keep-alive", "timeout=5"),
            ("connection", "x-secret"),
            ("x-secret", "1"),
        ],
        ..Script::default()
    };
    let setup = Setup::stand_alone(script).await;
    let body = request(false).to_string();
    let (first, second) = body.split_at(10);
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:1\r\nConnection: x-foo, close\r\nX-Foo: 1\r\n\
        Keep-Alive: timeout=5\r\nTE: trailers\r\nTrailer: x-t\r\nUpgrade: h2c\r\nProxy-Authorization: Basic canary\r\nExpect: 100-continue\r\n\
        Content-Type: application/json\r\nX-Multi: a\r\nX-Multi: b\r\nanthropic-version: 2023-06-01\r\nanthropic-beta: one\r\n\
        anthropic-beta: two\r\nx-request-id: r-1\r\nUser-Agent: harness/1\r\n";
    let chunked = format!(
        "{head}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\n\r\n",
        first.len(),
        second.len()
    );
    let answer = send(setup.address, &chunked).await;
    assert!(answer.contains("HTTP/1.1 200 OK"), "{answer}");
    let asked = setup.mock.asked().remove(0);
    assert_eq!(
        asked.body.len(),
        asked.headers["content-length"].to_str().expect("number").parse::<usize>().expect("number")
    );
    let names = [
        "connection",
        "x-foo",
        "keep-alive",
        "te",
        "trailer",
        "upgrade",
        "proxy-authorization",
        "expect",
        "transfer-encoding",
    ];
    for name in names {
        assert!(!asked.headers.contains_key(name), "{name}");
    }
    assert_eq!(asked.headers["host"], setup.mock.address.to_string());
    assert_eq!(
        (&asked.headers["x-request-id"], &asked.headers["user-agent"]),
        (&"r-1".parse().expect("value"), &"harness/1".parse().expect("value"))
    );
    assert_eq!(asked.headers["anthropic-version"], "2023-06-01");
    let all = |name: &str| {
        asked
            .headers
            .get_all(name)
            .iter()
            .map(|value| value.to_str().expect("text").to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (all("x-multi"), all("anthropic-beta")),
        (vec!["a".to_owned(), "b".to_owned()], vec!["one".to_owned(), "two".to_owned()])
    );
    let told = answer.to_lowercase();
    assert!(
        told.contains("x-request-id: r-9")
            && told.contains("x-multi: a\r\n")
            && told.contains("x-multi: b\r\n"),
        "{answer}"
    );
    assert!(!told.contains("timeout=5") && !told.contains("x-secret"), "{answer}");

    // A length that is not the body's, or two of them, never reach the upstream.
    let plain = head.replace("Expect: 100-continue\r\n", "");
    for lengths in [
        "Content-Length: 5\r\nContent-Length: 7\r\n".to_owned(),
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n".to_owned(),
    ] {
        let before = setup.mock.asked().len();
        let sent = format!("{plain}{lengths}\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
        let answer = send(setup.address, &sent).await;
        for asked in &setup.mock.asked()[before..] {
            assert_eq!(asked.headers.get_all("content-length").iter().count(), 1);
            assert_eq!(asked.headers["content-length"], asked.body.len().to_string());
            assert!(asked.json()["messages"].is_array());
        }
        assert!(answer.starts_with("HTTP/1.1 "), "{answer}");
    }
}

#[tokio::test]
async fn g14_a_parent_and_its_sub_agents_are_three_lineages_of_one_session() {
    let turn = |prompt: &[u32], id: u32| (sampled(prompt, &[("x", &[id], &["-0.5"])], "stop"), request(true));
    let (_, calls) = session(vec![
        turn(&[1, 2], 3),
        turn(&[10, 2], 4),
        turn(&[20, 2], 5),
        turn(&[1, 2, 3, 9], 6),
        turn(&[20, 2, 5, 9], 7),
        turn(&[10, 2, 4, 9], 8),
        turn(&[1, 2, 3, 9, 6, 9], 11),
    ])
    .await;
    let built = trained(&calls);
    let mut samples: Vec<&[u32]> = built.samples.iter().map(|sample| &sample.token_ids[..]).collect();
    samples.sort_unstable();
    assert_eq!(samples, [&[1, 2, 3, 9, 6, 9, 11][..], &[10, 2, 4, 9, 8], &[20, 2, 5, 9, 7]]);
}

#[tokio::test]
async fn g14_side_calls_retries_and_unnamed_sessions_are_told_apart() {
    // A retry is one turn with two attempts.
    let busy = (503, "busy", vec![("retry-after-ms", "1")]);
    let script = Script { first_errors: vec![busy], ..Script::default() };
    let setup = Setup::retrying(ProxyOptions::trainer("policy"), script).await;
    let open = setup.proxy.open_session(crate::setup::spec("s1")).expect("open");
    let path = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
    whole(post(&path, &request(true)).await).await;
    // A title, asked for by a harness that sends its tools with each call of an agent.
    let title = client()
        .post(&path)
        .header("user-agent", "claude-cli/2.1")
        .header("content-type", "application/json");
    let mut body = request(false);
    body["model"] = json!("claude-haiku");
    whole(title.body(body.to_string()).send().await.expect("an answer")).await;
    let calls: Vec<_> = open.close().await.calls.iter().map(|call| (**call).clone()).collect();
    let seen: Vec<_> = calls.iter().map(|call| (call.attempt, call.status, call.kind)).collect();
    assert_eq!(
        seen,
        [
            (1, CallStatus::UpstreamError, CallKind::Policy),
            (2, CallStatus::Ok, CallKind::Policy),
            (1, CallStatus::Ok, CallKind::Aux)
        ]
    );
    assert_eq!(calls[1].retry_of, Some(calls[0].call_id));
    let built = trained(&calls);
    assert_eq!(built.samples.len(), 1);
    assert_eq!(built.samples[0].call_spans[0].choice, calls[1].choice());

    // Nobody named a session: calls that begin alike share one, whose name says that it was derived.
    let setup = Setup::stand_alone(Script::default()).await;
    let mut other = request(false);
    other["messages"][0]["content"] = json!("another beginning");
    let mut next = request(false);
    next["messages"] = json!([request(false)["messages"][0], {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]);
    for body in [request(false), other, next] {
        whole(setup.post(&body).await).await;
    }
    let calls = setup.sink.calls(3).await;
    let name = |at: usize| calls[at].session_id.as_str();
    assert!((0..3).all(|at| name(at).starts_with("derived-")));
    assert_eq!(name(0), name(2));
    assert_ne!(name(0), name(1));
}

/// A drain before new weights waits for calls in flight: one that is held back is none.
#[tokio::test]
async fn calls_that_wait_are_told_apart_from_those_at_the_upstream() {
    let counters = Counters::new();
    let is = async |series: &str, value: f64| {
        let reached = async {
            while counters.get(series) != value {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, reached)
            .await
            .unwrap_or_else(|_| panic!("{series}: {}", counters.page()));
    };
    let mut options = ProxyOptions::stand_alone();
    options.max_in_flight = 1;
    let script = Script { is_silent: true, ..Script::default() };
    let setup = Setup::with(options, UpstreamKind::Vllm, script).await;
    let call = || {
        let url = setup.url();
        tokio::spawn(async move { whole(post(&url, &request(false)).await).await })
    };
    const PAUSED: &str = "lego_proxy_calls_waiting{reason=\"pause\"}";
    const PLACE: &str = "lego_proxy_calls_waiting{reason=\"place\"}";
    const IN_FLIGHT: &str = "lego_proxy_calls_in_flight";
    setup.proxy.pause();
    let first = call();
    is(PAUSED, 1.0).await;
    let second = call();
    is(PLACE, 1.0).await;
    assert_eq!(counters.get(IN_FLIGHT), 0.0);
    setup.proxy.resume();
    setup.mock.started(1).await;
    is(PAUSED, 0.0).await;
    assert_eq!((counters.get(IN_FLIGHT), counters.get(PLACE)), (1.0, 1.0));
    setup.mock.open_gate();
    first.await.expect("a reply");
    second.await.expect("a reply");
    for series in [PAUSED, PLACE, IN_FLIGHT] {
        is(series, 0.0).await;
    }
}
