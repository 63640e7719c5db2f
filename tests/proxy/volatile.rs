//! Parts of prompts that change from call to call: ignored where calls are compared, sent unless told otherwise.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use lego::config;
use lego::proxy::{Mode, ProxyOptions, SessionSampling};
use lego::record::{Call, UpstreamKind};
use lego::upstream::Upstream;
use serde_json::{Value, json};

use crate::mock::{Mock, Script};
use crate::rejoin::left;
use crate::setup::{PATIENCE, Setup, post, text, timeouts};

fn options(volatile: Value) -> ProxyOptions {
    let proxy: config::Proxy = serde_json::from_value(json!({"volatile": volatile})).expect("a config");
    let mode = Mode::StandAlone { sampling: SessionSampling::PassThrough, model_map: Default::default() };
    ProxyOptions::from_config(&proxy, mode, None)
}

async fn setup(volatile: Value) -> Setup {
    Setup::with(options(volatile), UpstreamKind::Vllm, Script::default()).await
}

fn line(nonce: &str) -> String {
    format!("x-anthropic-billing-header: cc_version=2.1.332.d60; cc_entrypoint=cli; cch={nonce};")
}

/// What Claude Code sends, with its line in a block of its own or before the text.
fn messages(nonce: &str, is_block: bool) -> Value {
    let system = if is_block {
        json!([{"type": "text", "text": line(nonce)}, {"type": "text", "text": "be brief"}])
    } else {
        json!(format!("{}\nbe brief", line(nonce)))
    };
    json!({
        "model": "claude-x", "max_tokens": 9, "system": system,
        "messages": [{"role": "user", "content": format!("what is {}?", line("0000"))}]
    })
}

fn raw(request: Option<&lego::record::JsonText>) -> String {
    request.map(|request| request.get().to_owned()).unwrap_or_default()
}

async fn send(setup: &Setup, route: &str, body: &Value) {
    let response = post(&format!("http://{}/v1/{route}", setup.address), body).await;
    assert_eq!(response.status(), 200);
    text(response).await;
}

#[tokio::test]
async fn b10_with_the_billing_line_removed_prompts_are_equal_and_the_capture_has_both() {
    for is_block in [true, false] {
        let setup = setup(json!({"billing_header": "remove"})).await;
        let bodies = [messages("aaaa", is_block), messages("bbbb", is_block)];
        for body in &bodies {
            send(&setup, "messages", body).await;
        }
        let asked = setup.mock.asked();
        assert_eq!(asked[0].body, asked[1].body);
        let sent = asked[0].json();
        assert_eq!(sent["messages"][0], json!({"role": "system", "content": "be brief"}));
        assert_eq!(
            sent["messages"][1]["content"],
            format!("what is {}?", line("0000")),
            "the user's own words"
        );
        let calls: Vec<Call> = setup.sink.calls(2).await;
        for (call, body) in calls.iter().zip(&bodies) {
            assert_eq!(raw(call.client_request.as_ref()), body.to_string(), "as it came");
            let upstream = raw(call.upstream_request.as_ref());
            assert_eq!(upstream.as_bytes(), asked[0].body, "as it was sent");
            assert!(!upstream.contains("aaaa") && !upstream.contains("bbbb"));
        }
    }
}

#[tokio::test]
async fn b10_unless_told_the_line_is_sent_and_only_ignored_where_calls_are_compared() {
    for (action, is_same) in [(json!({}), true), (json!({"billing_header": "off"}), false)] {
        let setup = setup(action).await;
        for nonce in ["aaaa", "bbbb"] {
            send(&setup, "messages", &messages(nonce, true)).await;
        }
        for (asked, nonce) in setup.mock.asked().iter().zip(["aaaa", "bbbb"]) {
            let system = format!("{}be brief", line(nonce));
            assert_eq!(asked.json()["messages"][0]["content"], system);
        }
        let calls = setup.sink.calls(2).await;
        assert_eq!(calls[0].session_id == calls[1].session_id, is_same);
    }
}

#[tokio::test]
async fn b10_a_server_of_messages_gets_what_its_client_wrote() {
    let seen: Arc<Mutex<Vec<Bytes>>> = Arc::default();
    let bodies = Arc::clone(&seen);
    let router = axum::Router::new().route(
        "/v1/messages",
        axum::routing::post(move |body: Bytes| {
            bodies.lock().expect("bodies").push(body);
            async {
                axum::Json(json!({
                    "id": "m", "type": "message", "role": "assistant", "model": "claude-x", "stop_reason": "end_turn",
                    "content": [{"type": "text", "text": "a"}], "usage": {"input_tokens": 1, "output_tokens": 1}
                }))
            }
        }),
    );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let upstream = Upstream::http(&url, UpstreamKind::Anthropic, None, timeouts()).expect("upstream");
    let mock = Mock::in_process(Script::default());
    let setup = Setup::in_front_of(upstream, options(json!({"billing_header": "remove"})), mock).await;
    for nonce in ["aaaa", "bbbb"] {
        let body = messages(nonce, true);
        send(&setup, "messages", &body).await;
        assert_eq!(seen.lock().expect("bodies").last().expect("a body"), &body.to_string());
    }
    assert!(setup.sink.calls(2).await.iter().all(|call| call.upstream_request.is_none()));
}

#[tokio::test]
async fn rules_of_ones_own_apply_in_each_protocol() {
    let rules = json!({"rules": {
        "date": {"pattern": "Today is [0-9-]+", "role": "system", "action": "remove", "replacement": "Today is a day"},
        "left": {"pattern": "<left>[0-9]+</left>", "role": "user", "action": "remove"},
    }});
    let setup = setup(rules).await;
    let (system, user) = ("Today is 2026-11-29. Be brief.", "Today is 3<left>99</left>");
    send(&setup, "chat/completions", &json!({"model": "m", "messages": [{"role": "system", "content": system}, {"role": "user", "content": [{"type": "text", "text": user}]}]})).await;
    send(&setup, "messages", &json!({"model": "m", "max_tokens": 9, "system": system, "messages": [{"role": "user", "content": user}]})).await;
    send(&setup, "responses", &json!({"model": "m", "instructions": system, "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": user}]}]})).await;
    for asked in setup.mock.asked() {
        let sent = asked.json();
        assert_eq!(sent["messages"][0]["content"], "Today is a day. Be brief.");
        let text = &sent["messages"][1]["content"];
        assert_eq!(text.as_str().or_else(|| text[0]["text"].as_str()), Some("Today is 3"));
    }
    for call in setup.sink.calls(3).await {
        assert!(raw(call.client_request.as_ref()).contains("2026-11-29"));
        assert!(!raw(call.upstream_request.as_ref()).contains("2026-11-29"));
    }
}

#[tokio::test]
async fn c13_a_volatile_part_that_changed_is_no_rewritten_history() {
    let rules = json!({"rules": {"date": {"pattern": "Today is [0-9]+"}}});
    for (volatile, status) in [(rules, 200), (json!({}), 409)] {
        let mut options = options(volatile);
        options.history_rewrite_tolerance = false;
        let setup = Setup::with(options, UpstreamKind::Vllm, Script::default()).await;
        let url = format!("http://{}/sessions/s/v1/chat/completions", setup.address);
        let ask = |day: u8, said: &'static str| {
            let system = json!({"role": "system", "content": format!("Today is {day}.")});
            let mut messages = vec![system, json!({"role": "user", "content": "a"})];
            if !said.is_empty() {
                messages.push(json!({"role": "assistant", "content": said}));
            }
            let (url, body) = (url.clone(), json!({"model": "m", "messages": messages}));
            async move { post(&url, &body).await.status() }
        };
        assert_eq!(ask(1, "").await, 200);
        assert_eq!(ask(2, "x").await, status);
    }
}

/// Claude Code's own retry has another nonce.
#[tokio::test]
async fn a_client_that_comes_back_with_another_nonce_has_the_call_that_it_left() {
    for how in ["ignore", "remove"] {
        let mut options = options(json!({"billing_header": how}));
        options.retry_grace = 10 * PATIENCE;
        let script = Script { is_silent: true, ..Script::default() };
        let setup = Setup::with(options, UpstreamKind::Vllm, script).await;
        let url = format!("http://{}/v1/messages", setup.address);
        let calling = {
            let url = url.clone();
            tokio::spawn(async move { post(&url, &messages("aaaa", true)).await })
        };
        setup.mock.started(1).await;
        calling.abort();
        left(&setup, 1).await;
        let again = tokio::spawn(async move { text(post(&url, &messages("bbbb", true)).await).await });
        left(&setup, 0).await;
        setup.mock.open_gate();
        let reply: Value = serde_json::from_slice(&again.await.expect("a reply")).expect("JSON");
        assert_eq!(reply["type"], "message");
        assert_eq!(setup.mock.asked().len(), 1, "{how}");
        assert_eq!(setup.sink.calls(1).await[0].rejoined, 1);
    }
}
