//! What a client of completions gets of aborts, errors and streams that are none.

use lego::record::{CallStatus, ClientApi};
use serde_json::{Value, json};

use super::server::Style;
use super::{Rig, Said, event, said};
use crate::setup::{broken, text};

#[tokio::test]
async fn an_abort_is_told_as_one_and_its_repeated_id_is_no_token() {
    let abort = json!({"finish_reason": {"type": "abort", "message": "paused", "status_code": 503, "err_type": null}});
    let script =
        vec![event("a", &[1], 1, json!({})), event("b", &[2], 2, json!({})), event("", &[2], 2, abort)];
    let rig = Rig::stand_alone(Style { script: Some(script), ..Style::default() }).await;
    let reply = text(rig.complete(&json!({"model": "toy", "prompt": [5], "stream": true})).await).await;
    assert_eq!(said(&reply, true), [Said { text: "ab".into(), finish: Some("abort".into()) }]);
    let call = &rig.setup.sink.calls(1).await[0];
    assert_eq!(call.completion_token_ids, Some(vec![1, 2]));
    assert_eq!((call.status, call.error.as_deref()), (CallStatus::UpstreamError, Some("paused")));
    assert_eq!(call.finish_reason.as_deref(), Some("abort"));
    assert!(!call.trainable);
}

#[tokio::test]
async fn a07_an_error_in_the_stream_is_the_clients_error_and_never_a_clean_end() {
    let error = json!({"error": {"message": "out of memory", "type": "invalid_request_error", "code": 400, "retryable": false}});
    let script = vec![event("a", &[1], 1, json!({})), error.to_string()];
    let rig = Rig::stand_alone(Style { script: Some(script), ..Style::default() }).await;
    let reply = broken(rig.complete(&json!({"model": "toy", "prompt": [5], "stream": true})).await).await;
    let reply = String::from_utf8_lossy(&reply).into_owned();
    assert!(reply.contains("\"text\":\"a\"") && reply.contains("data: {\"error\":"), "{reply}");
    assert!(reply.contains("out of memory") && !reply.contains("[DONE]"), "{reply}");
    let call = &rig.setup.sink.calls(1).await[0];
    assert_eq!((call.status, &call.completion_token_ids), (CallStatus::UpstreamError, &Some(vec![1])));
}

#[tokio::test]
async fn a_stream_that_contradicts_itself_ends_with_an_error_and_is_never_trained() {
    let scripts: [Vec<String>; 3] = [
        vec![event("a", &[1], 1, json!({})), event("ab", &[2, 3], 2, json!({}))],
        vec![event("a", &[1], 1, json!({})), event("abc", &[1, 2], 4, json!({}))],
        vec![event("a", &[1], 1, json!({})), "oops".to_owned()],
    ];
    for script in scripts {
        let rig = Rig::stand_alone(Style { script: Some(script), ..Style::default() }).await;
        let reply = broken(rig.complete(&json!({"model": "toy", "prompt": [5], "stream": true})).await).await;
        assert!(String::from_utf8_lossy(&reply).contains("data: {\"error\":"));
        let call = &rig.setup.sink.calls(1).await[0];
        assert_eq!((call.status, &call.completion_token_ids), (CallStatus::ParseError, &Some(vec![1])));
        assert!(!call.trainable);
    }
}

#[tokio::test]
async fn errors_have_the_protocols_shape() {
    let too_long = r#"{"error":{"message":"The input (9 tokens) is longer than the model's context length (8 tokens)."}}"#;
    for (status, body, told, code) in [
        (400, too_long, 400, "context_length_exceeded"),
        (400, r#"{"error":{"message":"bad"}}"#, 400, "bad_request"),
        (500, "<html>", 500, "upstream_error"),
    ] {
        for is_stream in [false, true] {
            let style = Style { error: Some((status, body.to_owned())), ..Style::default() };
            let rig = Rig::stand_alone(style).await;
            let response = rig.complete(&json!({"model": "toy", "prompt": [5], "stream": is_stream})).await;
            assert_eq!(response.status(), told);
            let error: Value = serde_json::from_slice(&text(response).await).expect("JSON");
            assert_eq!(error["error"]["code"], code, "{error}");
            assert!(error["error"]["message"].as_str().is_some_and(|message| !message.is_empty()));
            let call = &rig.setup.sink.calls(1).await[0];
            assert_eq!(
                (call.status, call.upstream_api),
                (CallStatus::UpstreamError, ClientApi::SglangGenerate)
            );
        }
    }
    // What is no reply of this endpoint is no success.
    let rig =
        Rig::stand_alone(Style { error: Some((200, r#"{"choices":[]}"#.to_owned())), ..Style::default() })
            .await;
    assert_eq!(rig.complete(&json!({"model": "toy", "prompt": [5]})).await.status(), 502);
    assert!(!rig.setup.sink.calls(1).await[0].trainable);
}
