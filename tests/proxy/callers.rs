//! What clients bring along: names of the proxy, secrets, many headers, bodies that are no plain JSON.

use lego::proxy::ProxyOptions;
use lego::record::UpstreamKind;
use lego::upstream::Upstream;
use serde_json::{Value, json};

use crate::mock::{Mock, Script};
use crate::setup::{PATIENCE, Setup, client, request, spec, text, timeouts};

const TOKEN: &str = "token-canary-1";

async fn with_token() -> Setup {
    let mut options = ProxyOptions::stand_alone();
    options.client_token = Some(TOKEN.to_owned());
    Setup::with(options, UpstreamKind::Vllm, Script::default()).await
}

async fn send(url: &str, headers: &[(&str, &str)], body: impl Into<reqwest::Body>) -> reqwest::Response {
    let mut call = client().post(url).body(body);
    for (name, value) in headers {
        call = call.header(*name, *value);
    }
    tokio::time::timeout(PATIENCE, call.send()).await.expect("in time").expect("an answer")
}

fn bearer(key: &str) -> String {
    format!("Bearer {key}")
}

#[tokio::test]
async fn who_has_the_client_token_calls_the_proxy_by_any_name() {
    let setup = with_token().await;
    let key = bearer(TOKEN);
    for (name, value) in [
        ("host", "host.docker.internal:29110"),
        ("host", "lego:29110"),
        ("host", "myhost.local"),
        ("origin", "app://-"),
    ] {
        let headers = [(name, value), ("authorization", &key)];
        assert_eq!(send(&setup.url(), &headers, request(false).to_string()).await.status(), 200, "{value}");
        // A web page gets no further without it.
        let refused = send(&setup.url(), &[(name, value)], request(false).to_string()).await;
        assert_eq!(refused.status(), 401, "{value}");
    }
    assert_eq!(setup.mock.asked().len(), 4);
    // The listener of a sandbox asks for no token, and the admin's has one of its own.
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let listener = lego::proxy::listen("127.0.0.1", 0, false).await.expect("loopback");
    let inside = format!("http://{}/v1/chat/completions", listener.local_addr().expect("bound"));
    let (proxy, id) = (setup.proxy.clone(), session.session_id().clone());
    tokio::spawn(async move { proxy.serve_session_listener(listener, &id).await });
    let admin = lego::proxy::listen("127.0.0.1", 0, false).await.expect("loopback");
    let pause = format!("http://{}/admin/pause", admin.local_addr().expect("bound"));
    let proxy = setup.proxy.clone();
    tokio::spawn(async move { proxy.serve_admin(admin, TOKEN).await });
    for url in [inside, pause] {
        let refused = send(&url, &[("host", "lego:1"), ("authorization", &key)], "{}").await;
        assert_eq!(refused.status(), 403, "{url}");
    }
}

#[tokio::test]
async fn g04_no_secret_of_a_client_goes_upstream_or_into_a_record() {
    let setup = with_token().await;
    let key = bearer(TOKEN);
    let url = format!("{}?api-key=canary&token=canary&access_token=canary&beta=true", setup.url());
    let session_key = "sk-lego-s1.canary";
    let with_id = format!("conversation {session_key}");
    let headers = [
        ("authorization", key.as_str()),
        ("x-auth-token", "canary"),
        ("x-litellm-api-key", "canary"),
        ("ocp-apim-subscription-key", "canary"),
        ("session_id", session_key),
        ("x-claude-code-session-id", &with_id),
        ("x-affinity", TOKEN),
        ("x-whatever", &key),
        ("x-request-id", "r1"),
    ];
    let response = send(&url, &headers, request(false).to_string()).await;
    assert_eq!(response.status(), 200);
    let asked = &setup.mock.asked()[0];
    let sent = format!("{:?} {}", asked.headers, asked.uri).replace("sk-real-canary", "");
    assert!(!sent.contains("canary") && sent.contains("beta=true") && sent.contains("r1"), "{sent}");
    let record = serde_json::to_string(&setup.sink.calls(1).await).expect("JSON");
    assert!(!record.contains("canary"), "{record}");
}

#[tokio::test]
async fn a_client_may_send_many_headers() {
    let mock = Mock::in_process(Script::default());
    let upstream = Upstream::in_process(mock.router(), timeouts());
    let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await;
    let names: Vec<String> = (0..200).map(|number| format!("x-many-{number}")).collect();
    let headers: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "1")).collect();
    assert_eq!(send(&setup.url(), &headers, request(false).to_string()).await.status(), 200);
    assert_eq!(setup.mock.asked()[0].headers.get("x-many-199").expect("the last one"), "1");
}

#[tokio::test]
async fn a_body_that_is_no_plain_json_is_refused_with_what_it_is() {
    let setup = Setup::stand_alone(Script::default()).await;
    let body = request(false).to_string();
    for (route, is_messages) in [
        ("chat/completions", false),
        ("completions", false),
        ("responses", false),
        ("messages", true),
        ("messages/count_tokens", true),
    ] {
        let url = format!("http://{}/v1/{route}", setup.address);
        let response = send(&url, &[("content-encoding", "gzip")], &b"\x1f\x8b\x08..."[..]).await;
        assert_eq!(response.status(), 415, "{route}");
        let error: Value = serde_json::from_slice(&text(response).await).expect("JSON");
        assert_eq!(error["type"] == "error", is_messages, "{error}");
        assert!(
            error["error"]["message"].as_str().expect("text").contains("Content-Encoding: gzip"),
            "{error}"
        );
        let utf_16: Vec<u8> = body.encode_utf16().flat_map(u16::to_le_bytes).collect();
        for (mark, rest) in [(&b"\xef\xbb\xbf"[..], body.as_bytes()), (b"\xff\xfe", &utf_16)] {
            let response = send(&url, &[], [mark, rest].concat()).await;
            assert_eq!(response.status(), 400, "{route}");
            let error: Value = serde_json::from_slice(&text(response).await).expect("JSON");
            assert!(error["error"]["message"].as_str().expect("text").contains("byte order mark"), "{error}");
        }
    }
    assert_eq!(setup.mock.asked().len(), 0);
    assert_eq!(send(&setup.url(), &[("content-encoding", "identity")], body).await.status(), 200);
    assert!(!setup.mock.asked()[0].headers.contains_key("content-encoding"));
    assert_eq!(json!(setup.sink.calls(1).await.len()), 1);
}
