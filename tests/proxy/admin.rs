//! What a trainer outside of the process controls, and how sessions end.

use lego::proxy::{Mode, ProxyOptions, SessionSampling};
use lego::record::{CallKind, CallStatus, WeightSource};
use serde_json::{Value, json};

use crate::mock::Script;
use crate::setup::{PATIENCE, Setup, client, post, request, spec, text};

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
    // As `curl -d` sends it, and with no content type at all.
    for content_type in [Some("application/x-www-form-urlencoded"), None] {
        let told = client().post(format!("{url}/policy-version")).bearer_auth("admin-canary");
        let told = content_type.into_iter().fold(told, |told, name| told.header("content-type", name));
        let answer = told.body(r#"{"version": "step-7"}"#).send().await.expect("answer");
        assert_eq!(answer.status(), 200, "{content_type:?}");
        let said: Value = serde_json::from_slice(&text(answer).await).expect("JSON");
        assert_eq!(said["policy_version"], "step-7");
    }
    assert_eq!(tell(&format!("{url}/pause"), json!({})).await["is_paused"], true);
    let calling = {
        let url = setup.url();
        tokio::spawn(async move { text(post(&url, &request(true)).await).await })
    };
    // It is in, and not at the upstream: nothing is in flight that a change of the weights would disturb.
    loop {
        let response =
            client().get(format!("{url}/state")).bearer_auth("admin-canary").send().await.expect("answer");
        let state: Value = serde_json::from_slice(&text(response).await).expect("JSON");
        if state["calls_waiting"] == 1 {
            assert_eq!(state["calls_in_flight"], 0);
            break;
        }
    }
    assert_eq!(setup.mock.asked().len(), 0);
    // It is sampled by the weights that there are when it is sent.
    tell(&format!("{url}/policy-version"), json!({"version": 8})).await;
    assert_eq!(tell(&format!("{url}/resume"), json!({})).await["is_paused"], false);
    calling.await.expect("the call ends");
    let call = &setup.sink.calls(1).await[0];
    assert_eq!((call.status, call.weight_source), (CallStatus::Ok, WeightSource::LegoClock));
    assert_eq!(call.weight_spans.as_ref().expect("spans")[0].version, "8");
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
async fn a_sandboxs_own_door_leads_to_its_own_session_whatever_is_sent_through_it() {
    let setup = Setup::trainer(Script::default()).await;
    let admin = admin(&setup).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let other = setup.proxy.open_session(spec("s2")).expect("open");
    let listener = lego::proxy::listen("127.0.0.1", 0, false).await.expect("loopback");
    let inside = listener.local_addr().expect("bound");
    let (proxy, id) = (setup.proxy.clone(), session.session_id().clone());
    tokio::spawn(async move { proxy.serve_session_listener(listener, &id).await });
    let stolen = other.api_key();
    // Spellings of what is not there.
    for path in [
        "/admin",
        "/admin/state",
        "/admin/policy-version",
        "//admin/pause",
        "/v1/../admin/pause",
        "/v1/%2e%2e/admin/pause",
        "/sessions/s2/v1/messages",
        "/sessions/s2/v1/models",
        "/sessions/s2/end",
        "/v1/../sessions/s2/v1/chat/completions",
        "/v1/sessions/s2/v1/chat/completions",
    ] {
        for key in ["", "admin-canary", &stolen] {
            let asked = client().post(format!("http://{inside}{path}")).bearer_auth(key);
            let asked = asked.header("content-type", "application/json").body(request(false).to_string());
            assert_eq!(asked.send().await.expect("answer").status(), 404, "{path} with {key:?}");
        }
    }
    // Neither the key of another session nor a header that names one leads there, and none of them ends anything.
    let url = format!("http://{inside}/v1/chat/completions");
    for (name, value) in [
        ("authorization", format!("Bearer {stolen}")),
        ("x-api-key", stolen.clone()),
        ("x-session-id", "s2".to_owned()),
        ("x-session-done", "1".to_owned()),
        ("x-session-done", "true".to_owned()),
        ("x-litellm-session-id", "s2".to_owned()),
    ] {
        let asked = client().post(&url).header(name, value).header("content-type", "application/json");
        let answer = asked.body(request(false).to_string()).send().await.expect("answer");
        assert_eq!(answer.status(), 200, "{name}");
    }
    // On the public listener a trainer's session can't be ended by who has its key either.
    let public = client().post(setup.url()).bearer_auth(&stolen).header("x-session-done", "1");
    let public = public.header("content-type", "application/json").body(request(false).to_string());
    for _ in 0..2 {
        let answer = public.try_clone().expect("a body in memory").send().await.expect("answer");
        assert_eq!(answer.status(), 200);
    }
    assert_eq!(tell(&format!("{admin}/resume"), json!({})).await["policy_version"], Value::Null);
    assert_eq!(session.close().await.calls.len(), 6);
    assert_eq!(other.close().await.calls.len(), 2);
}

#[tokio::test]
async fn a_client_ends_its_own_session_and_no_other() {
    let setup = Setup::stand_alone(Script::default()).await;
    let url = |session: &str| format!("http://{}/sessions/{session}/v1/chat/completions", setup.address);
    for session in ["a", "b"] {
        text(post(&url(session), &request(false)).await).await;
    }
    // The path names the session, whatever else does.
    let forged = client().post(url("a")).header("x-session-done", "1").header("x-session-id", "b");
    let forged = forged.bearer_auth("sk-lego-b.secret").header("content-type", "application/json");
    assert_eq!(forged.body(request(false).to_string()).send().await.expect("answer").status(), 200);
    assert_eq!(post(&url("a"), &request(false)).await.status(), 409);
    assert_eq!(post(&url("b"), &request(false)).await.status(), 200);
}

#[tokio::test]
async fn an_idle_session_ends_by_itself_and_late_calls_are_refused() {
    let mut options = ProxyOptions::stand_alone();
    options.session_idle = Some(std::time::Duration::from_millis(1));
    let setup = Setup::with(options, lego::record::UpstreamKind::Vllm, Script::default()).await;
    let url = format!("http://{}/sessions/a/v1/chat/completions", setup.address);
    let mut status = post(&url, &request(false)).await.status();
    assert_eq!(status, 200);
    // Each call that comes in time keeps it open.
    while status == 200 {
        status = post(&url, &request(false)).await.status();
    }
    assert_eq!(status, 409);
    let late = text(post(&url, &request(false)).await).await;
    assert!(String::from_utf8_lossy(&late).contains("session_ended"));
    // A name that nobody chose may be used again.
    for _ in 0..3 {
        assert_eq!(setup.post(&request(false)).await.status(), 200);
    }
}

/// The headers by which a harness tells its conversation, as it sends them.
const OPENCODE: [(&str, &str); 3] = [
    ("user-agent", "opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14"),
    ("x-session-affinity", "ses_00000000000000000000000001"),
    ("x-session-id", "ses_00000000000000000000000001"),
];
const TERMINUS: [(&str, &str); 3] =
    [("user-agent", "AsyncOpenAI/Python 3.57.0"), ("x-my-session", "sess-123"), ("x-session-id", "sess-123")];

async fn ask(url: &str, headers: &[(&str, &str)], body: &Value) -> Value {
    let mut call = client().post(url).header("content-type", "application/json").bearer_auth("placeholder");
    for (name, value) in headers {
        call = call.header(*name, *value);
    }
    let response = call.body(body.to_string()).send().await.expect("answer");
    assert_eq!(response.status(), 200);
    serde_json::from_slice(&text(response).await).expect("JSON")
}

#[tokio::test]
async fn opencodes_own_header_names_its_session_stand_alone_and_never_a_trainers() {
    let title = request(false);
    let mut turn = request(false);
    turn["tools"] = json!([{"type": "function", "function": {"name": "bash", "parameters": {}}}]);
    let conversation = Some("ses_00000000000000000000000001");

    let setup = Setup::stand_alone(Script::default()).await;
    for body in [&title, &turn] {
        ask(&setup.url(), &OPENCODE, body).await;
    }
    let calls = setup.sink.calls(2).await;
    assert_eq!((calls[0].kind, calls[1].kind), (CallKind::Aux, CallKind::Unknown));
    for call in &calls {
        assert_eq!(Some(call.session_id.as_str()), conversation);
        assert_eq!(call.harness_conversation_id.as_deref(), conversation);
        assert_eq!(call.harness.as_deref(), Some("opencode"));
        assert_eq!(call.harness_version.as_deref(), Some("1.18.33"));
    }

    let setup = Setup::trainer(Script::default()).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let hostile = setup.proxy.open_session(spec("ses_00000000000000000000000001")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
    for body in [&title, &turn] {
        ask(&url, &OPENCODE, body).await;
    }
    let calls = session.close().await.calls;
    assert_eq!((calls[0].kind, calls[1].kind), (CallKind::Aux, CallKind::Policy));
    assert!(calls.iter().all(|call| call.harness_conversation_id.as_deref() == conversation));
    assert_eq!(hostile.close().await.calls.len(), 0);
}

#[tokio::test]
async fn terminus_2_names_its_session_and_gets_the_ids_that_it_asks_for() {
    let mut body = request(false);
    for (name, value) in
        [("logprobs", json!(true)), ("return_token_ids", json!(true)), ("session_id", json!("sess-123"))]
    {
        body[name] = value;
    }
    let setup = Setup::stand_alone(Script::default()).await;
    let reply = ask(&setup.url(), &TERMINUS, &body).await;
    assert_eq!(reply["prompt_token_ids"].as_array().expect("ids").len(), 4);
    assert_eq!(reply["choices"][0]["token_ids"].as_array().expect("ids").len(), 5);
    assert_eq!(reply["choices"][0]["logprobs"]["content"].as_array().expect("log-probs").len(), 5);
    assert_eq!(setup.mock.asked()[0].json()["session_id"], "sess-123");
    let call = &setup.sink.calls(1).await[0];
    assert_eq!(call.session_id.as_str(), "sess-123");
    assert_eq!(call.harness_conversation_id.as_deref(), Some("sess-123"));
    assert_eq!(call.harness.as_deref(), Some("AsyncOpenAI/Python"));
    assert_eq!(call.harness_version.as_deref(), Some("3.57.0"));
    assert_eq!(call.completion_token_ids.as_ref().expect("ids").len(), 5);

    let setup = Setup::trainer(Script::default()).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    ask(&format!("http://{}/sessions/s1/v1/chat/completions", setup.address), &TERMINUS, &body).await;
    let calls = session.close().await.calls;
    assert_eq!(calls[0].session_id.as_str(), "s1");
    assert_eq!(calls[0].harness_conversation_id.as_deref(), Some("sess-123"));
    assert!(calls[0].trainable, "{:?}", calls[0].not_trainable_reasons);
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

#[tokio::test]
async fn a_last_call_that_fails_does_not_end_its_session() {
    let script = Script { first_errors: vec![(503, "busy", vec![])], ..Script::default() };
    let setup = Setup::stand_alone(script).await;
    let last = |stream: bool| {
        let asked = client().post(setup.url()).header("x-session-id", "a").header("x-session-done", "1");
        asked.header("content-type", "application/json").body(request(stream).to_string()).send()
    };
    assert_eq!(last(false).await.expect("answer").status(), 503);
    let again = last(true).await.expect("answer");
    assert_eq!(again.status(), 200, "its client tries again");
    text(again).await;
    let late = loop {
        let late = last(false).await.expect("answer");
        // The end of a stream may be read before its connection has let go of the call.
        if late.status() != 200 {
            break late;
        }
    };
    assert_eq!(late.status(), 409);
}

#[tokio::test]
async fn a_last_call_that_is_given_up_while_it_is_stored_ends_its_session() {
    for stream in [false, true] {
        let mut options = ProxyOptions::stand_alone();
        options.retry_grace = std::time::Duration::ZERO;
        let setup = Setup::with(options, lego::record::UpstreamKind::Vllm, Script::default()).await;
        let asked = client().post(setup.url()).header("x-session-id", "a").header("x-session-done", "1");
        let asked = asked.header("content-type", "application/json").body(request(stream).to_string());
        setup.sink.gate.send_replace(false);
        let calling = tokio::spawn(async move { text(asked.send().await.expect("answer")).await });
        let mut entered = setup.sink.entered.subscribe();
        entered.wait_for(|times| *times == 1).await.expect("a store");
        calling.abort();
        assert!(calling.await.is_err());
        // lego has seen that it left before the store is done.
        let open = client().post(setup.url()).header("x-session-id", "a").body(request(false).to_string());
        let open = open.header("content-type", "application/json");
        let state = format!("{}/state", admin(&setup).await);
        loop {
            let answer = client().get(&state).bearer_auth("admin-canary").send().await.expect("answer");
            let state: Value = serde_json::from_slice(&text(answer).await).expect("JSON");
            if state["calls_in_flight"] == 0 {
                break;
            }
        }
        setup.sink.gate.send_replace(true);
        let ended = async {
            while open.try_clone().expect("a body in memory").send().await.expect("answer").status() != 409 {}
        };
        tokio::time::timeout(PATIENCE, ended).await.expect("the session ends");
    }
}

#[tokio::test]
async fn a_sessions_key_given_as_its_name_is_recorded_without_the_secret() {
    let setup = Setup::stand_alone(Script::default()).await;
    for header in ["x-session-id", "session_id", "x-claude-code-session-id"] {
        let asked = client().post(setup.url()).header(header, "sk-lego-s1.canary-secret");
        let asked = asked.header("x-claude-code-agent-id", "sk-lego-s2.canary-secret");
        let asked = asked.header("content-type", "application/json").body(request(false).to_string());
        assert_eq!(asked.send().await.expect("answer").status(), 200);
    }
    for call in setup.sink.calls(3).await {
        assert_eq!(call.harness_conversation_id.as_deref(), Some("s1/s2"));
        assert!(!serde_json::to_string(&call).expect("JSON").contains("canary-secret"));
    }
}

#[tokio::test]
async fn sessions_that_share_a_pinned_seed_are_sampled_with_their_own() {
    let pinned = SessionSampling::Pinned { temperature: 1.0, seed: 7 };
    let options = ProxyOptions::new(Mode::StandAlone { sampling: pinned, model_map: Default::default() });
    let setup = Setup::with(options, lego::record::UpstreamKind::Vllm, Script::default()).await;
    for session in ["a", "b", "a"] {
        let url = format!("http://{}/sessions/{session}/v1/chat/completions", setup.address);
        text(post(&url, &request(false)).await).await;
    }
    let seeds: Vec<i64> =
        setup.mock.asked().iter().map(|asked| asked.json()["seed"].as_i64().expect("a seed")).collect();
    assert!(seeds[0] != seeds[1] && seeds[0] != seeds[2] && seeds[1] != seeds[2], "{seeds:?}");
}
