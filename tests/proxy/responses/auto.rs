//! What lego finds out about an upstream's Responses, what becomes of calls meanwhile, and which session those are of that
//! say nothing but what is new.

use lego::config::UpstreamResponses;
use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, ClientApi, UpstreamKind};
use serde_json::{Value, json};

use super::{STREAM, body, gateway, plain, raw, told, url};
use crate::mock::{Part, Script, events as chat_events};
use crate::rejoin::{left, patient, until};
use crate::setup::{Setup, client, post, text};

/// A chat stream, which waits after its second event.
fn chat() -> Vec<Part> {
    let asked = json!({"model": "toy", "stream": true});
    let mut parts: Vec<_> = chat_events(&Script::default(), &asked).into_iter().map(Part::Event).collect();
    parts.insert(2, Part::Until(1));
    parts
}

/// The first request waits at the gate, and is told then that there is no such route.
fn slow_to_say_no() -> Script {
    Script {
        has_responses: true,
        is_silent: true,
        first_errors: vec![(404, "{}", vec![])],
        parts: Some(chat()),
        ..Script::default()
    }
}

async fn is_one_call_in_chat(setup: &Setup) {
    assert_eq!(setup.mock.asked().len(), 2);
    let calls = setup.sink.calls(2).await;
    assert_eq!((calls[0].http_status, calls[0].upstream_api), (404, ClientApi::OpenaiResponses));
    let call = &calls[1];
    assert_eq!((call.status, call.upstream_api, call.rejoined), (CallStatus::Ok, ClientApi::OpenaiChat, 1));
    assert_eq!(call.retry_of, Some(calls[0].call_id));
}

/// Nothing is final while nobody is there, in whatever words the upstream is asked meanwhile.
#[tokio::test]
async fn a_client_that_left_before_the_route_was_found_missing_comes_back_to_its_call() {
    for stream in [true, false] {
        for comes_back_first in [true, false] {
            let setup = gateway(patient(), slow_to_say_no()).await;
            let place = url(&setup);
            let calling = tokio::spawn(async move { post(&place, &plain(stream)).await });
            setup.mock.started(1).await;
            calling.abort();
            left(&setup, 1).await;
            if !comes_back_first {
                setup.mock.open_gate();
                setup.mock.started(2).await;
            }
            let place = url(&setup);
            let calling = tokio::spawn(async move { post(&place, &plain(stream)).await });
            left(&setup, 0).await;
            setup.mock.open_gate();
            setup.mock.step(1);
            let reply = text(calling.await.expect("an answer")).await;
            let reply = String::from_utf8_lossy(&reply).into_owned();
            assert!(reply.contains("\"status\":\"completed\"") && reply.contains("🌍"), "{reply}");
            assert_eq!(reply.contains("response.created"), stream);
            is_one_call_in_chat(&setup).await;
        }
    }
}

/// By then it is known that the upstream has no such route: the same request is read otherwise, and is the same.
#[tokio::test]
async fn a_client_that_left_within_a_reply_in_chats_words_comes_back_to_it() {
    let setup = gateway(patient(), slow_to_say_no()).await;
    setup.mock.open_gate();
    let mut response = post(&url(&setup), &plain(true)).await;
    until(&mut response, "Hello").await;
    drop(response);
    left(&setup, 1).await;
    let response = post(&url(&setup), &plain(true)).await;
    setup.mock.step(1);
    let reply = String::from_utf8_lossy(&text(response).await).into_owned();
    assert!(reply.starts_with("event: response.created") && reply.contains("Hello"), "{reply}");
    assert!(reply.contains("\"status\":\"completed\"") && reply.contains("🌍"), "{reply}");
    is_one_call_in_chat(&setup).await;
}

#[tokio::test]
async fn only_a_response_shows_that_the_upstream_writes_them() {
    let completion = r#"{"id":"x","object":"chat.completion","choices":[]}"#;
    let chunk = format!("data: {completion}\n\ndata: [DONE]\n\n");
    for (answer, streams, shows) in [
        (raw(STREAM), true, true),
        (raw(""), false, true),
        // A login page, another protocol, an error that says 200.
        (Script { body: Some(b"<html></html>".to_vec()), ..raw("") }, false, false),
        (Script { body: Some(completion.into()), ..raw("") }, false, false),
        (Script { body: Some(br#"{"error":{"message":"no"}}"#.to_vec()), ..raw("") }, false, false),
        (raw(&chunk), true, false),
        (raw("event: error\ndata: {\"type\":\"error\",\"message\":\"no\"}\n\n"), true, false),
    ] {
        let setup = gateway(ProxyOptions::stand_alone(), answer).await;
        let response = post(&url(&setup), &plain(streams)).await;
        assert_eq!(response.status(), 200);
        crate::setup::read(response).await;
        setup.sink.calls(1).await;
        setup.mock.set(Script::default());
        // No such route: where it never showed that it has it, it is asked in chat.
        let status = post(&url(&setup), &plain(streams)).await.status();
        assert_eq!(status.as_u16(), if shows { 404 } else { 200 });
    }
}

async fn send(setup: &Setup, body: &Value, headers: &[(&'static str, &str)]) -> Value {
    let mut request = client().post(url(setup)).header("content-type", "application/json");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = request.body(body.to_string()).send().await.expect("an answer");
    assert_eq!(response.status(), 200);
    serde_json::from_slice(&text(response).await).expect("a response")
}

fn going_on(from: &Value, input: &str) -> Value {
    json!({"model": "toy", "input": input, "previous_response_id": from, "instructions": input})
}

#[tokio::test]
async fn a_call_that_goes_on_from_a_response_is_of_its_session() {
    let begins = json!({"model": "toy", "input": "begin"});
    let is_passed = Script { body: Some(body().into_bytes()), ..raw("") };
    for (kind, choice, script) in [
        (UpstreamKind::Openai, UpstreamResponses::Auto, is_passed),
        (UpstreamKind::Vllm, UpstreamResponses::Translate, Script::default()),
    ] {
        for name in [None, Some(("x-session-id", "mine"))] {
            let setup = told(choice, kind, script.clone()).await;
            let first = send(&setup, &begins, name.as_slice()).await;
            let second = send(&setup, &going_on(&first["id"], "more"), &[]).await;
            send(&setup, &going_on(&second["id"], "and more"), &[]).await;
            send(&setup, &going_on(&second["id"], "elsewhere"), &[("x-session-id", "other")]).await;
            let calls = setup.sink.calls(4).await;
            let sessions: Vec<_> = calls.iter().map(|call| call.session_id.as_str()).collect();
            assert_eq!(sessions[..3], [sessions[0]; 3]);
            assert_eq!((sessions[3], sessions[0].starts_with("derived-")), ("other", name.is_none()));
            if let Some((_, name)) = name {
                assert_eq!(sessions[0], name);
            }
        }
    }
}

#[tokio::test]
async fn a_call_that_goes_on_from_what_is_not_known_has_a_session_of_its_own() {
    let mut options = ProxyOptions::stand_alone();
    options.history_rewrite_tolerance = false;
    let setup = gateway(options, Script { body: Some(body().into_bytes()), ..raw("") }).await;
    send(&setup, &going_on(&json!("resp_of_another_proxy"), "a"), &[]).await;
    send(&setup, &going_on(&json!("resp_of_another_proxy"), "b"), &[]).await;
    // That one says all of its history, and this one goes on from it: it rewrites none.
    let named = ("x-session-id", "mine");
    let first = send(&setup, &plain(false), &[named, ("x-session-done", "1")]).await;
    // Its session was ended.
    send(&setup, &going_on(&first["id"], "c"), &[]).await;
    let again = send(&setup, &plain(false), &[("x-session-id", "new")]).await;
    send(&setup, &going_on(&again["id"], "d"), &[]).await;
    let calls = setup.sink.calls(6).await;
    let sessions: Vec<_> = calls.iter().map(|call| call.session_id.as_str()).collect();
    assert!([0, 1, 3].iter().all(|at| sessions[*at].starts_with("derived-")), "{sessions:?}");
    assert_ne!(sessions[0], sessions[1]);
    assert_eq!((sessions[2], sessions[4], sessions[5]), ("mine", "new", "new"));
}
