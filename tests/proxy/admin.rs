//! What a trainer outside of the process controls, and how sessions end.

use lego::proxy::{Mode, ProxyOptions, SessionSampling};
use lego::record::{CallKind, CallStatus, WeightSource};
use serde_json::{Value, json};

use crate::mock::Script;
use crate::setup::{Setup, client, post, request, spec, text};

async fn admin(setup: &Setup) -> String {
    let listener = lego::proxy::listen("127.0.0.1", 0, true).await.expect("loopback");
    let address = listener.local_addr().expect("bound");
    let proxy = setup.proxy.clone();
    tokio::spawn(async move { proxy.serve_admin(listener, "admin-canary").await });
    format!("http://{address}/admin")
}

async fn tell(url: &str, body: Value) -> Value {
    let request = client().post(url).bearer_auth("admin-canary").header("content-type", "application/json");
    let response = request.body(body.to_string()).send().await.expect("an answer");
    assert_eq!(response.status(), 200);
    serde_json::from_slice(&text(response).await).expect("JSON")
}

#[tokio::test]
async fn a_pause_holds_new_calls_back_and_versions_are_told() {
    let pinned = SessionSampling::Pinned { temperature: 1.0, seed: 1 };
    let options = ProxyOptions::new(Mode::StandAlone { sampling: pinned, model_map: Default::default() });
    let script = Script { gives_versions: false, ..Script::default() };
    let setup = Setup::with(options, lego::record::UpstreamKind::Vllm, script).await;
    let url = admin(&setup).await;
    assert_eq!(tell(&format!("{url}/policy-version"), json!({"version": 7})).await["policy_version"], "7");
    assert_eq!(tell(&format!("{url}/pause"), json!({})).await["is_paused"], true);
    let calling = {
        let url = setup.url();
        tokio::spawn(async move { text(post(&url, &request(true)).await).await })
    };
    // It is in, and not at the upstream.
    loop {
        let response =
            client().get(format!("{url}/state")).bearer_auth("admin-canary").send().await.expect("answer");
        let state: Value = serde_json::from_slice(&text(response).await).expect("JSON");
        if state["calls_in_flight"] == 1 {
            break;
        }
    }
    assert_eq!(setup.mock.asked().len(), 0);
    assert_eq!(tell(&format!("{url}/resume"), json!({})).await["is_paused"], false);
    calling.await.expect("the call ends");
    let call = &setup.sink.calls(1).await[0];
    assert_eq!((call.status, call.weight_source), (CallStatus::Ok, WeightSource::LegoClock));
    assert_eq!(call.weight_spans.as_ref().expect("spans")[0].version, "7");
    assert!(call.trainable, "{:?}", call.not_trainable_reasons);

    for (key, expected) in [("wrong", 401), ("", 401)] {
        let response = client().post(format!("{url}/pause")).bearer_auth(key).send().await.expect("answer");
        assert_eq!(response.status(), expected);
    }
    // Not on the public listener.
    let public = format!("http://{}/admin/pause", setup.address);
    assert_eq!(client().post(public).bearer_auth("admin-canary").send().await.expect("answer").status(), 404);
}

#[tokio::test]
async fn an_ended_session_takes_no_more_calls() {
    let setup = Setup::stand_alone(Script::default()).await;
    let call = |path: &str| format!("http://{}/sessions/{path}", setup.address);
    assert_eq!(post(&call("a/v1/chat/completions"), &request(false)).await.status(), 200);
    assert_eq!(post(&call("a/end"), &json!({})).await.status(), 200);
    let late = post(&call("a/v1/chat/completions"), &request(false)).await;
    assert_eq!(late.status(), 409);
    assert!(String::from_utf8_lossy(&text(late).await).contains("session_ended"));
    // A client may say so with its last call.
    let last = client().post(setup.url()).header("x-session-id", "b").header("x-session-done", "1");
    let last = last.header("content-type", "application/json").body(request(false).to_string());
    assert_eq!(last.send().await.expect("answer").status(), 200);
    assert_eq!(post(&call("b/v1/chat/completions"), &request(false)).await.status(), 409);
    assert_eq!(setup.sink.count(), 2);
}

#[tokio::test]
async fn a_program_in_a_sandbox_can_neither_end_its_session_nor_reach_another_nor_the_admin() {
    let setup = Setup::trainer(Script::default()).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let _other = setup.proxy.open_session(spec("s2")).expect("open");
    let listener = lego::proxy::listen("127.0.0.1", 0, false).await.expect("loopback");
    let inside = listener.local_addr().expect("bound");
    let proxy = setup.proxy.clone();
    let id = session.session_id().clone();
    tokio::spawn(async move { proxy.serve_session_listener(listener, &id).await });
    for path in ["/admin/pause", "/sessions/s2/v1/chat/completions", "/sessions/s1/end", "/metrics"] {
        let response = post(&format!("http://{inside}{path}"), &request(false)).await;
        assert_eq!(response.status(), 404, "{path}");
    }
    let url = format!("http://{inside}/v1/chat/completions");
    for _ in 0..2 {
        let forged = client().post(&url).header("x-session-done", "1").header("x-session-id", "s2");
        let forged = forged.header("content-type", "application/json").body(request(false).to_string());
        assert_eq!(forged.send().await.expect("answer").status(), 200);
    }
    assert_eq!(post(&format!("http://{}/sessions/s1/end", setup.address), &json!({})).await.status(), 403);
    let calls = session.close().await.calls;
    assert_eq!(calls.len(), 2);
    assert!(calls.iter().all(|call| call.session_id.as_str() == "s1"));
}

#[tokio::test]
async fn side_calls_are_told_from_the_policys() {
    let setup = Setup::trainer(Script::default()).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let agent = "claude-cli/2.1.332 (external, sdk-cli)";
    for (user_agent, tools, most, expected) in [
        (agent, tools.clone(), 99, CallKind::Policy),
        (agent, json!([]), 99, CallKind::Aux),
        (agent, tools, 1, CallKind::Aux),
        ("terminus", json!([]), 99, CallKind::Policy),
    ] {
        let mut body = request(false);
        body["tools"] = tools;
        body["max_tokens"] = json!(most);
        let asked =
            client().post(&url).header("user-agent", user_agent).header("x-claude-code-session-id", "c1");
        let asked = asked.header("x-claude-code-agent-id", "sub").header("content-type", "application/json");
        text(asked.body(body.to_string()).send().await.expect("answer")).await;
        let calls = setup.sink.count();
        let call = setup.sink.calls(calls).await.pop().expect("a call");
        assert_eq!(call.kind, expected, "{user_agent} {body}");
        assert_eq!(call.trainable, expected == CallKind::Policy, "{:?}", call.not_trainable_reasons);
        assert_eq!(call.harness_conversation_id.as_deref(), Some("c1/sub"));
        assert_eq!(call.harness.as_deref(), Some("mini"), "the trainer knows its harness");
        let version = (user_agent == agent).then_some("2.1.332");
        assert_eq!(call.harness_version.as_deref(), version);
    }
    session.close().await;
}
