//! Clients that speak the native protocol themselves: their bytes are the engine's.

use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, ClientApi, IdsSource, UpstreamKind, WeightSource};
use lego::upstream::Upstream;
use serde_json::{Value, json};

use super::server::{Routing, Server, Style, TEXTS, ids_of, logprob_of, sampled_ids};
use super::{Rig, event, until};
use crate::mock::{Mock, Script};
use crate::rejoin::left;
use crate::setup::{PATIENCE, Setup, post, spec, text, timeouts};

/// Requests, and the outputs of each.
fn requests(is_stream: bool) -> [(Value, usize); 6] {
    [
        (json!({"text": "ab é", "stream": is_stream}), 1),
        (json!({"input_ids": [5, 6], "sampling_params": {"temperature": 0.5}, "stream": is_stream}), 1),
        (json!({"text": ["ab", "c"], "sampling_params": [{"n": 1}, {"top_p": 0.5}], "stream": is_stream}), 2),
        (json!({"input_ids": [[5], [6, 7]], "sampling_params": {"n": 2}, "stream": is_stream}), 4),
        (json!({"text": "ab", "return_logprob": true, "top_logprobs_num": 1, "stream": is_stream}), 1),
        (
            json!({"text": "ab", "return_logprob": true, "return_prompt_token_ids": true, "return_routed_experts": true,
                "stream": is_stream}),
            1,
        ),
    ]
}

#[tokio::test]
async fn law_5_the_client_gets_the_bytes_of_a_direct_call_and_the_record_has_all() {
    for (is_stream, incremental) in [(false, false), (true, false), (true, true)] {
        for (body, outputs) in requests(is_stream) {
            let style = Style { incremental, routing: Routing::Gives, ..Style::default() };
            let rig = Rig::new(ProxyOptions::stand_alone(), style, true).await;
            let direct = text(post(&format!("{}/generate", rig.server.url), &body).await).await;
            let through = text(post(&rig.url("/generate"), &body).await).await;
            assert_eq!(String::from_utf8_lossy(&through), String::from_utf8_lossy(&direct), "{body}");
            let calls = rig.setup.sink.calls(outputs + 1).await;
            let is_call = |call: &&lego::record::Call| call.kind != lego::record::CallKind::Probe;
            for call in calls.iter().filter(is_call) {
                let ids = sampled_ids(call.choice_index as usize);
                assert_eq!(
                    (call.client_api, call.upstream_api),
                    (ClientApi::SglangGenerate, ClientApi::SglangGenerate)
                );
                assert_eq!((call.status, call.client_stream), (CallStatus::Ok, is_stream));
                let logprobs: Vec<Option<f32>> = ids.iter().map(|id| Some(logprob_of(*id) as f32)).collect();
                assert_eq!(call.completion_logprobs.as_ref(), Some(&logprobs), "{body}");
                assert_eq!(call.completion_token_ids.as_ref(), Some(&ids), "{body}");
                assert_eq!(call.text.as_deref(), Some(TEXTS.concat().as_str()));
                assert_eq!(call.weight_source, WeightSource::ReplySingle);
                assert!(call.routing.is_some() && call.prompt_token_ids.is_some(), "{body}");
                // Whoever asks for all of it is not touched.
                assert_eq!(call.upstream_request.is_none(), body["return_routed_experts"] == true);
            }
        }
    }
}

#[tokio::test]
async fn law_12_a_session_by_path_is_sampled_as_lego_says() {
    for is_stream in [false, true] {
        for (body, outputs) in requests(is_stream) {
            let rig = Rig::new(ProxyOptions::trainer("policy"), Style::default(), false).await;
            let session = rig.setup.proxy.open_session(spec("s1")).expect("open");
            assert_eq!(post(&rig.url("/generate"), &body).await.status(), 401, "no session is named");
            text(post(&rig.url("/sessions/s1/generate"), &body).await).await;
            let asked = &rig.server.asked("/generate")[0];
            let all = match &asked["sampling_params"] {
                Value::Array(all) => all.iter().map(|one| json!({"sampling_params": one})).collect(),
                _ => vec![asked.clone()],
            };
            let neutral = json!({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0});
            assert!(all.iter().all(|one| Server::sampled(one) == neutral), "{asked}");
            let calls = session.close().await.calls;
            assert_eq!(calls.len(), outputs);
            for call in calls {
                assert_eq!(call.not_trainable_reasons, Vec::<String>::new(), "{body}");
            }
        }
    }
}

#[tokio::test]
async fn ids_that_a_client_sent_are_its_prompts() {
    let rig = Rig::stand_alone(Style::default()).await;
    text(post(&rig.url("/generate"), &json!({"input_ids": [[5], [6, 7]]})).await).await;
    let mut calls = rig.setup.sink.calls(2).await;
    calls.sort_by_key(|call| call.choice_index);
    assert_eq!(calls[1].prompt_token_ids, Some(vec![6, 7]));
    assert_eq!(calls[1].prompt_ids_source, IdsSource::SentByUs);
    let rig = Rig::stand_alone(Style::default()).await;
    text(post(&rig.url("/generate"), &json!({"text": "abc", "stream": true})).await).await;
    let call = &rig.setup.sink.calls(1).await[0];
    assert_eq!((&call.prompt_token_ids, call.prompt_ids_source), (&Some(ids_of("abc")), IdsSource::Engine));
}

#[tokio::test]
async fn errors_pass_as_the_engine_writes_them() {
    let error = r#"{"error":{"message":"bad"}}"#;
    let rig = Rig::stand_alone(Style { error: Some((400, error.to_owned())), ..Style::default() }).await;
    let response = post(&rig.url("/generate"), &json!({"text": "abc"})).await;
    assert_eq!(response.status(), 400);
    assert_eq!(text(response).await, error);
    let script = vec![event("a", &[1], 1, json!({})), error.to_owned()];
    let rig = Rig::stand_alone(Style { script: Some(script), ..Style::default() }).await;
    let reply = text(post(&rig.url("/generate"), &json!({"text": "abc", "stream": true})).await).await;
    assert!(reply.ends_with(format!("data: {error}\n\ndata: [DONE]\n\n").as_bytes()));
    assert_eq!(rig.setup.sink.calls(1).await[0].status, CallStatus::UpstreamError);
    for (body, part) in
        [(json!({}), "`input_ids`"), (json!({"text": "a", "sampling_params": 1}), "sampling_params")]
    {
        let response = post(&rig.url("/generate"), &body).await;
        assert_eq!(response.status(), 400);
        assert!(String::from_utf8_lossy(&text(response).await).contains(part));
    }
}

#[tokio::test]
async fn other_upstreams_have_no_such_endpoint_and_say_so() {
    for kind in [UpstreamKind::Vllm, UpstreamKind::Openai, UpstreamKind::Anthropic] {
        let upstream = Upstream::http("http://127.0.0.1:9", kind, None, timeouts()).expect("upstream");
        let setup =
            Setup::in_front_of(upstream, ProxyOptions::stand_alone(), Mock::in_process(Script::default()))
                .await;
        let response = post(&format!("http://{}/generate", setup.address), &json!({"text": "a"})).await;
        assert_eq!(response.status(), 400, "{kind:?}");
        assert!(!text(response).await.is_empty());
        assert_eq!(setup.sink.count(), 0);
    }
}

#[tokio::test]
async fn a13_a_client_that_comes_back_reads_the_same_from_the_last_event_that_tells_all() {
    let mut options = ProxyOptions::stand_alone();
    options.retry_grace = 10 * PATIENCE;
    let rig = Rig::new(options, Style { waits: Some(3), ..Style::default() }, false).await;
    let body = json!({"input_ids": [5], "stream": true, "return_logprob": true});
    let mut response = post(&rig.url("/generate"), &body).await;
    until(&mut response, "é🎉").await;
    drop(response);
    left(&rig.setup, 1).await;
    let mut response = post(&rig.url("/generate"), &body).await;
    let begun = until(&mut response, "é🎉").await;
    rig.server.go_on();
    let all = [begun.as_bytes(), &text(response).await].concat();
    let direct = text(post(&format!("{}/generate", rig.server.url), &body).await).await;
    let last = |stream: &[u8]| {
        let stream = String::from_utf8_lossy(stream).into_owned();
        stream.split("\n\n").filter(|block| block.starts_with("data: {")).last().map(str::to_owned)
    };
    assert_eq!(last(&all), last(&direct));
    assert!(all.ends_with(b"data: [DONE]\n\n"));
    let call = &rig.setup.sink.calls(1).await[0];
    assert_eq!((call.rejoined, &call.completion_token_ids), (1, &Some(sampled_ids(0))));
}

#[tokio::test]
async fn a09_a_silent_engines_client_gets_comments() {
    let mut options = ProxyOptions::stand_alone();
    options.keep_alive = Some(std::time::Duration::from_millis(20));
    let rig = Rig::new(options, Style { waits: Some(0), ..Style::default() }, false).await;
    let mut response = post(&rig.url("/generate"), &json!({"input_ids": [5], "stream": true})).await;
    let first = until(&mut response, "\n\n").await;
    assert!(first.starts_with(": keep-alive\n\n"), "{first}");
    rig.server.go_on();
    assert!(text(response).await.ends_with(b"data: [DONE]\n\n"));
}
