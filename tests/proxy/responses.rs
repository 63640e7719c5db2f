//! Clients of Responses in front of an upstream that speaks it itself, and of one that may.

mod auto;

use std::collections::BTreeMap;
use std::time::Duration;

use lego::config::UpstreamResponses;
use lego::proxy::{Mode, ProxyOptions, SessionSampling};
use lego::record::{Call, CallStatus, ClientApi, UpstreamKind};
use lego::upstream::Upstream;
use serde_json::{Value, json};

use crate::mock::{Mock, Part, Script};
use crate::rejoin::{left, patient, until};
use crate::setup::{Setup, broken, client, post, text, timeouts};
use crate::speech::events;

const STREAM: &str = include_str!("../fixtures/wire/responses_stream.sse");

fn url(setup: &Setup) -> String {
    format!("http://{}/v1/responses", setup.address)
}

/// With what no chat upstream could be asked.
fn asked(stream: bool) -> Value {
    json!({
        "model": "toy-moe-8x", "stream": stream, "previous_response_id": "resp_theirs", "store": true,
        "input": [
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA\u{1F389}"},
            {"type": "item_reference", "id": "msg_1"},
            {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
        ],
        "tools": [{"type": "web_search"}, {"type": "mcp", "server_label": "s"}, {"type": "code_interpreter"}],
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    })
}

/// What a chat upstream can be asked too.
fn plain(stream: bool) -> Value {
    json!({"model": "toy", "stream": stream, "input": "hi", "store": false})
}

/// The response that the stream ends with, spaced as no printer does.
fn body() -> String {
    let (_, end) = events(STREAM.as_bytes()).pop().expect("an end");
    format!(" {}\n", serde_json::to_string_pretty(&end["response"]).expect("JSON"))
}

fn raw(stream: &str) -> Script {
    let parts = vec![Part::Raw(stream.as_bytes().to_vec())];
    Script { has_responses: true, parts: Some(parts), body: Some(body().into_bytes()), ..Script::default() }
}

/// The stream, which waits before the first event with this in it.
fn gated_at(needle: &str) -> Script {
    let at = STREAM.find(needle).expect("there");
    let at = STREAM[..at].rfind("event: ").expect("an event");
    let (head, tail) = STREAM.split_at(at);
    let part = |text: &str| Part::Raw(text.as_bytes().to_vec());
    Script { parts: Some(vec![part(head), Part::Gate, part(tail)]), ..raw("") }
}

async fn gateway(options: ProxyOptions, script: Script) -> Setup {
    let mock = Mock::start(script).await;
    let upstream = Upstream::http(&mock.url(), UpstreamKind::Openai, Some("sk-real-canary"), timeouts());
    Setup::in_front_of(upstream.expect("upstream").with_responses(UpstreamResponses::Auto), options, mock)
        .await
}

async fn told(choice: UpstreamResponses, kind: UpstreamKind, script: Script) -> Setup {
    let mock = Mock::start(script).await;
    let upstream = Upstream::http(&mock.url(), kind, Some("sk-real-canary"), timeouts()).expect("upstream");
    Setup::in_front_of(upstream.with_responses(choice), ProxyOptions::stand_alone(), mock).await
}

fn is_the_fixture(call: &Call) {
    assert_eq!(
        (call.client_api, call.upstream_api),
        (ClientApi::OpenaiResponses, ClientApi::OpenaiResponses)
    );
    assert_eq!(call.status, CallStatus::Ok);
    assert_eq!(call.text.as_deref(), Some("I'll look now."));
    assert_eq!(call.finish_reason.as_deref(), Some("completed"));
    assert_eq!(call.model_served.as_deref(), Some("toy-moe-8x"));
    let calls = call.tool_calls.as_ref().expect("tool calls");
    let calls: Vec<_> = calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect();
    let expected =
        [("shell", "{\"command\": \"ls -la\"}"), ("apply_patch", "*** Begin Patch\n*** End Patch\n")];
    assert_eq!(calls, expected);
    let usage = call.usage.expect("usage");
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (14, 42));
    assert_eq!((usage.cached_tokens, usage.reasoning_tokens), (Some(4), Some(4)));
    // There are no ids, and none are made of the text.
    assert!(call.completion_token_ids.is_none() && call.prompt_token_ids.is_none());
    assert!(!call.trainable && call.not_trainable_reasons.contains(&"no_token_ids".to_owned()));
}

#[tokio::test]
async fn requests_and_replies_pass_byte_for_byte() {
    for stream in [true, false] {
        let setup = gateway(ProxyOptions::stand_alone(), raw(STREAM)).await;
        let sent = format!(" {} ", serde_json::to_string_pretty(&asked(stream)).expect("JSON"));
        let send = |url: String| {
            let request = client().post(url).header("content-type", "application/json").body(sent.clone());
            async move { text(request.send().await.expect("an answer")).await }
        };
        let reply = send(url(&setup) + "?beta=1").await;
        let direct = send(format!("{}/v1/responses", setup.mock.url())).await;
        assert_eq!(String::from_utf8_lossy(&reply), String::from_utf8_lossy(&direct));
        assert_eq!(reply, if stream { STREAM.to_owned() } else { body() });
        let upstream = &setup.mock.asked()[0];
        assert_eq!(
            (&upstream.body[..], upstream.uri.to_string()),
            (sent.as_bytes(), "/v1/responses?beta=1".into())
        );
        assert_eq!(upstream.headers["authorization"], "Bearer sk-real-canary");
        let call = setup.sink.calls(1).await.remove(0);
        is_the_fixture(&call);
        assert_eq!((call.client_stream, call.upstream_request), (stream, None));
        assert_eq!(call.client_request.expect("kept").get(), sent.trim());
    }
}

#[tokio::test]
async fn an_upstream_without_the_route_is_asked_in_chat_and_that_is_remembered() {
    for stream in [true, false] {
        let setup = gateway(ProxyOptions::stand_alone(), Script::default()).await;
        for number in 1..=2 {
            let response = post(&url(&setup), &plain(stream)).await;
            assert_eq!(response.status(), 200);
            let reply = String::from_utf8_lossy(&text(response).await).into_owned();
            assert!(reply.contains("\"status\":\"completed\"") && reply.contains("🌍"), "{reply}");
            assert_eq!(setup.mock.asked().len(), number);
        }
        let calls = setup.sink.calls(3).await;
        let [missing, first, second] = &calls[..] else { panic!("three records") };
        assert_eq!((missing.status, missing.http_status), (CallStatus::UpstreamError, 404));
        assert_eq!(missing.upstream_api, ClientApi::OpenaiResponses);
        assert_eq!((first.attempt, first.retry_of), (2, Some(missing.call_id)));
        assert_eq!((second.attempt, second.retry_of), (1, None));
        for call in [first, second] {
            assert_eq!((call.status, call.upstream_api), (CallStatus::Ok, ClientApi::OpenaiChat));
        }
        // They are of one conversation, in whatever words the upstream was asked.
        assert_eq!((&missing.session_id, &first.session_id), (&second.session_id, &second.session_id));
        // What has no chat form is refused now, with its place.
        let refused = post(&url(&setup), &asked(stream)).await;
        assert_eq!(refused.status(), 400);
        assert!(String::from_utf8_lossy(&text(refused).await).contains("log-probs"));
    }
}

#[tokio::test]
async fn what_has_no_chat_form_is_refused_where_the_route_is_missing() {
    let setup = gateway(ProxyOptions::stand_alone(), Script::default()).await;
    let mut body = plain(true);
    body["previous_response_id"] = json!("resp_7");
    let response = post(&url(&setup), &body).await;
    assert_eq!(response.status(), 400);
    let reply = String::from_utf8_lossy(&text(response).await).into_owned();
    assert!(reply.contains("resp_7") && reply.contains("answered 404 to POST /v1/responses"), "{reply}");
    let call = setup.sink.calls(1).await.remove(0);
    assert_eq!((call.status, call.http_status), (CallStatus::UpstreamError, 400));
    assert!(setup.mock.asked().is_empty());
}

#[tokio::test]
async fn a_404_of_an_upstream_that_has_the_route_is_the_clients() {
    let not_found = r#"{"error":{"message":"no such response","type":"invalid_request_error","param":"previous_response_id","code":"not_found"}}"#;
    let setup = gateway(ProxyOptions::stand_alone(), raw(STREAM)).await;
    text(post(&url(&setup), &asked(true)).await).await;
    setup.mock.set(Script { error: Some((404, not_found.to_owned())), ..raw(STREAM) });
    let response = post(&url(&setup), &asked(true)).await;
    assert_eq!(response.status(), 404);
    assert_eq!(text(response).await, not_found);
    assert_eq!(setup.sink.calls(2).await[1].status, CallStatus::UpstreamError);
    // So is any, where the configuration says that it has it.
    let script = Script { error: Some((404, not_found.to_owned())), ..raw(STREAM) };
    let setup = told(UpstreamResponses::PassThrough, UpstreamKind::Openai, script).await;
    assert_eq!(text(post(&url(&setup), &plain(false)).await).await, not_found);
    assert_eq!(setup.mock.asked().len(), 1);
}

#[tokio::test]
async fn who_gives_ids_or_is_told_so_is_asked_in_chat() {
    for (kind, choice) in [
        (UpstreamKind::Vllm, UpstreamResponses::Auto),
        (UpstreamKind::Vllm, UpstreamResponses::PassThrough),
        (UpstreamKind::Openai, UpstreamResponses::Translate),
    ] {
        let setup = told(choice, kind, Script { has_responses: true, ..Script::default() }).await;
        text(post(&url(&setup), &plain(true)).await).await;
        assert_eq!(setup.mock.asked()[0].uri.path(), "/v1/chat/completions");
        let call = setup.sink.calls(1).await.remove(0);
        assert_eq!((call.status, call.upstream_api), (CallStatus::Ok, ClientApi::OpenaiChat));
        assert_eq!(call.completion_token_ids.is_some(), kind == UpstreamKind::Vllm);
    }
}

#[tokio::test]
async fn a_stream_that_breaks_off_ends_as_failed_and_with_no_half_event() {
    for (at, number) in [(0, None), (100, None), (STREAM.find("\" now.\"").expect("there"), Some(11))] {
        let parts = vec![Part::Raw(STREAM.as_bytes()[..at].to_vec()), Part::Cut];
        let setup = gateway(ProxyOptions::stand_alone(), Script { parts: Some(parts), ..raw("") }).await;
        let reply = broken(post(&url(&setup), &plain(true)).await).await;
        let whole = STREAM[..at].rfind("\n\n").map_or(0, |end| end + 2);
        let reply = String::from_utf8_lossy(&reply).into_owned();
        let (passed, own) = reply.split_at(whole);
        assert_eq!(passed, &STREAM[..whole]);
        let own = events(own.as_bytes());
        let (name, end) = own.last().expect("an end");
        assert_eq!((name.as_str(), &end["response"]["status"]), ("response.failed", &json!("failed")));
        assert_eq!(end["response"]["error"]["code"], "server_error");
        match number {
            Some(last) => {
                assert_eq!((own.len(), &end["sequence_number"]), (1, &json!(last + 1)));
                assert_eq!(end["response"]["id"], "resp_toy0001");
            }
            // It had not begun.
            None => {
                assert_eq!((own.len(), own[0].0.as_str()), (2, "response.created"));
                assert_eq!(own[0].1["response"]["model"], "toy");
            }
        }
        let call = setup.sink.calls(1).await.remove(0);
        assert_eq!((call.status, call.finish_reason), (CallStatus::Truncated, None));
    }
}

#[tokio::test]
async fn keep_alives_lie_between_events_and_keep_their_numbers() {
    let mut options = ProxyOptions::stand_alone();
    options.keep_alive = Some(Duration::from_millis(30));
    let setup = gateway(options, gated_at("\" now.\"")).await;
    let mut response = post(&url(&setup), &plain(true)).await;
    let own = "event: response.in_progress\ndata: {\"type\":\"response.in_progress\",\"sequence_number\":11,";
    let mut seen = String::new();
    while seen.matches(own).count() < 3 {
        let piece = response.chunk().await.expect("piece").expect("more");
        seen.push_str(&String::from_utf8_lossy(&piece));
    }
    setup.mock.open_gate();
    seen.push_str(&String::from_utf8_lossy(&text(response).await));
    let theirs: String = seen.split_inclusive("\n\n").filter(|block| !block.starts_with(own)).collect();
    assert_eq!(theirs, STREAM);
    let (_, event) =
        events(seen.as_bytes()).into_iter().find(|(_, event)| event["sequence_number"] == 11).expect("one");
    assert_eq!(event["type"], "response.output_text.delta");
    let kept = seen.split("\n\n").find(|block| block.starts_with(own)).expect("one");
    let kept: Value = serde_json::from_str(kept.split_once("data: ").expect("data").1).expect("JSON");
    assert_eq!(
        (&kept["response"]["id"], &kept["response"]["status"]),
        (&json!("resp_toy0001"), &json!("in_progress"))
    );
    is_the_fixture(&setup.sink.calls(1).await[0]);
    // Before the upstream's first event there is no event that says nothing.
    let mut options = ProxyOptions::stand_alone();
    options.keep_alive = Some(Duration::from_millis(30));
    let setup = gateway(options, Script { is_silent: true, ..raw(STREAM) }).await;
    let mut response = post(&url(&setup), &plain(true)).await;
    let mut seen = String::new();
    while seen.matches(": keep-alive\n\n").count() < 3 {
        let piece = response.chunk().await.expect("piece").expect("more");
        seen.push_str(&String::from_utf8_lossy(&piece));
    }
    setup.mock.open_gate();
    seen.push_str(&String::from_utf8_lossy(&text(response).await));
    assert_eq!(seen.replace(": keep-alive\n\n", ""), STREAM);
}

#[tokio::test]
async fn what_a_client_may_act_on_waits_for_the_store() {
    let setup = gateway(ProxyOptions::stand_alone(), gated_at("response.completed")).await;
    let mut entered = setup.sink.entered.subscribe();
    setup.sink.gate.send_replace(false);
    let mut response = post(&url(&setup), &plain(true)).await;
    // Each item that is done, before it is given.
    let (drafts, ()) = tokio::join!(
        async {
            until(&mut response, "\"sequence_number\":25").await;
            setup.sink.drafts.borrow().len()
        },
        async {
            entered.wait_for(|n| *n > 0).await.expect("sink");
            assert!(setup.sink.drafts.borrow().is_empty());
            setup.sink.gate.send_replace(true);
        }
    );
    assert_eq!((drafts, setup.sink.count()), (4, 0));
    // And the end.
    setup.sink.gate.send_replace(false);
    setup.mock.open_gate();
    let (records, ()) = tokio::join!(
        async {
            until(&mut response, "response.completed").await;
            setup.sink.count()
        },
        async {
            entered.wait_for(|n| *n > 4).await.expect("sink");
            setup.sink.gate.send_replace(true);
        }
    );
    assert_eq!(records, 1);
    text(response).await;
    is_the_fixture(&setup.sink.calls(1).await[0]);
}

#[tokio::test]
async fn the_asked_model_is_echoed_and_nothing_else_changes() {
    for stream in [true, false] {
        let model_map = BTreeMap::from([("alias \"x\"".to_owned(), "toy-moe-8x".to_owned())]);
        let mode = Mode::StandAlone { sampling: SessionSampling::PassThrough, model_map };
        let setup = gateway(ProxyOptions::new(mode), raw(STREAM)).await;
        let mut body = asked(stream);
        body["model"] = json!("alias \"x\"");
        let reply = String::from_utf8_lossy(&text(post(&url(&setup), &body).await).await).into_owned();
        let (name, alias) = ("\"toy-moe-8x\"", r#""alias \"x\"""#);
        assert_eq!(reply, if stream { STREAM.to_owned() } else { self::body() }.replace(name, alias));
        let upstream = String::from_utf8_lossy(&setup.mock.asked()[0].body).into_owned();
        assert_eq!(upstream, body.to_string().replace(alias, name));
        let call = setup.sink.calls(1).await.remove(0);
        assert_eq!((call.model_requested.as_str(), call.status), ("alias \"x\"", CallStatus::Ok));
    }
}

#[tokio::test]
async fn pinned_sampling_is_said_in_the_words_that_the_protocol_has() {
    let sampling = SessionSampling::Pinned { temperature: 1.0, seed: 7 };
    let mode = Mode::StandAlone { sampling, model_map: BTreeMap::new() };
    let setup = gateway(ProxyOptions::new(mode), raw(STREAM)).await;
    let mut body = asked(true);
    (body["temperature"], body["top_k"]) = (json!(0.3), json!(5));
    text(post(&url(&setup), &body).await).await;
    (body["temperature"], body["top_p"]) = (json!(1.0), json!(1.0));
    body.as_object_mut().expect("object").shift_remove("top_k");
    assert_eq!(setup.mock.asked()[0].json(), body);
    let call = setup.sink.calls(1).await.remove(0);
    assert_eq!((call.sampling_requested.temperature, call.sampling_sent.temperature), (Some(0.3), Some(1.0)));
    assert_eq!((call.sampling_sent.top_p, call.sampling_sent.seed), (Some(1.0), None));
}

#[tokio::test]
async fn the_upstreams_errors_are_the_clients() {
    let refused =
        r#"{"error":{"message":"no such tool","type":"invalid_request_error","param":"tools","code":"x"}}"#;
    let setup =
        gateway(ProxyOptions::stand_alone(), Script { error: Some((400, refused.to_owned())), ..raw("") })
            .await;
    let response = post(&url(&setup), &asked(true)).await;
    assert_eq!(response.status(), 400);
    assert_eq!(text(response).await, refused);
    // Nothing was added that it could have refused.
    assert_eq!((setup.mock.asked().len(), setup.sink.calls(1).await[0].http_status), (1, 400));

    let head = &STREAM[..STREAM.find("event: response.output_item.added").expect("there")];
    let failed = "event: response.failed\ndata: {\"type\":\"response.failed\",\"sequence_number\":2,\"response\":{\"id\":\"resp_toy0001\",\"status\":\"failed\",\"error\":{\"code\":\"rate_limit_exceeded\",\"message\":\"try again in 2s\"}}}\n\n";
    let error = "event: error\ndata: {\"type\":\"error\",\"code\":\"rate_limit_exceeded\",\"message\":\"try again in 2s\",\"sequence_number\":2}\n\n";
    for end in [failed, error] {
        let stream = format!("{head}{end}");
        let setup = gateway(ProxyOptions::stand_alone(), raw(&stream)).await;
        assert_eq!(text(post(&url(&setup), &asked(true)).await).await, stream);
        let call = setup.sink.calls(1).await.remove(0);
        assert_eq!(call.status, CallStatus::UpstreamError);
        assert_eq!(call.error.as_deref(), Some("rate_limit_exceeded: try again in 2s"));
    }
    let incomplete = STREAM
        .replace("response.completed", "response.incomplete")
        .replace("\"status\":\"completed\",\"background\"", "\"status\":\"incomplete\",\"background\"")
        .replace("\"incomplete_details\":null", "\"incomplete_details\":{\"reason\":\"max_output_tokens\"}");
    let setup = gateway(ProxyOptions::stand_alone(), raw(&incomplete)).await;
    assert_eq!(text(post(&url(&setup), &asked(true)).await).await, incomplete);
    let call = setup.sink.calls(1).await.remove(0);
    assert_eq!((call.status, call.finish_reason.as_deref()), (CallStatus::Ok, Some("max_output_tokens")));

    // What cannot be read passes all the same.
    let spoiled = STREAM.replace("\"delta\":\" now.\"", "\"delta\":\" now.");
    let setup = gateway(ProxyOptions::stand_alone(), raw(&spoiled)).await;
    assert_eq!(text(post(&url(&setup), &asked(true)).await).await, spoiled);
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::ParseError);
}

#[tokio::test]
async fn a_client_that_comes_back_has_the_same_response() {
    let setup = gateway(patient(), gated_at("response.output_item.done")).await;
    let mut response = post(&url(&setup), &asked(true)).await;
    until(&mut response, "response.content_part.done").await;
    drop(response);
    left(&setup, 1).await;
    let response = post(&url(&setup), &asked(true)).await;
    setup.mock.open_gate();
    assert_eq!(text(response).await, STREAM);
    let call = setup.sink.calls(1).await.remove(0);
    is_the_fixture(&call);
    assert_eq!((call.rejoined, setup.mock.asked().len()), (1, 1));
}

#[tokio::test]
async fn stored_responses_are_not_read_or_deleted_here_and_none_runs_in_the_background() {
    let setup = gateway(ProxyOptions::stand_alone(), raw(STREAM)).await;
    for method in ["GET", "DELETE", "POST"] {
        for path in ["resp_1", "resp_1/cancel", "resp_1/input_items", "compact"] {
            let method = method.parse().expect("a method");
            let request = client().request(method, format!("{}/{path}", url(&setup)));
            let response = request.send().await.expect("an answer");
            assert_eq!(response.status(), 404);
            let reply = String::from_utf8_lossy(&text(response).await).into_owned();
            assert!(reply.contains("stored are not read"), "{reply}");
        }
    }
    let mut body = asked(false);
    body["background"] = json!(true);
    let response = post(&url(&setup), &body).await;
    assert_eq!(response.status(), 400);
    let reply = String::from_utf8_lossy(&text(response).await).into_owned();
    assert!(reply.contains("background"), "{reply}");
    assert!(setup.mock.asked().is_empty());
}
