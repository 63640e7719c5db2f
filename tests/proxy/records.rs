//! What is captured: ids, log-probs, versions, verdicts.

use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, IdsSource, LogprobSemantics, UpstreamKind, WeightSource};
use serde_json::{Value, json};

use crate::mock::{PROMPT_IDS, Part, Script, id_of};
use crate::setup::{Setup, post, request, spec, text};

fn ids(count: usize) -> Vec<u32> {
    (0..count).map(id_of).collect()
}

/// Runs one call in a training session and gives its records.
async fn train(script: Script, body: Value) -> Vec<lego::record::Call> {
    let setup = Setup::trainer(script).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
    text(post(&url, &body).await).await;
    let result = session.close().await;
    result.calls.iter().map(|call| (**call).clone()).collect()
}

#[tokio::test]
async fn c05_c09_c20_a_training_call_is_captured_whole_streamed_or_not() {
    for tokens_per_chunk in [1, 2, 4] {
        for stream in [false, true] {
            let script = Script { tokens_per_chunk, ..Script::default() };
            let calls = train(script, request(stream)).await;
            assert_eq!(calls.len(), 1);
            let call = &calls[0];
            assert_eq!(call.not_trainable_reasons, Vec::<String>::new());
            assert!(call.trainable);
            assert_eq!(call.status, CallStatus::Ok);
            assert_eq!(call.http_status, 200);
            assert_eq!(call.prompt_token_ids.as_deref(), Some(&PROMPT_IDS[..]));
            assert_eq!(call.prompt_ids_source, IdsSource::Engine);
            assert_eq!(call.completion_token_ids, Some(ids(5)));
            let logprobs = [-0.25, -1.5, -0.125, -2.0, -0.5].map(Some).to_vec();
            assert_eq!(call.completion_logprobs, Some(logprobs));
            assert_eq!(call.logprob_semantics, LogprobSemantics::RawT1);
            assert_eq!(call.text.as_deref(), Some("Hello 北京🌍"));
            assert_eq!(call.finish_reason.as_deref(), Some("stop"));
            let spans = call.weight_spans.clone().expect("spans");
            assert_eq!((spans[0].version.as_str(), spans[0].start, spans[0].end), ("3", 0, 5));
            assert_eq!(call.weight_source, WeightSource::ReplySpans);
            assert_eq!(call.session_id.as_str(), "s1");
            assert_eq!(call.trial_id.as_ref().expect("trial").as_str(), "trial-1");
            assert_eq!(call.harness.as_deref(), Some("mini"));
            assert_eq!(call.client_stream, stream);
            assert_eq!(call.sampling_requested.temperature, Some(0.7));
            assert_eq!(call.sampling_sent.temperature, Some(1.0));
            assert!(call.sampling_sent.seed.is_some());
            let sent: Value =
                serde_json::from_str(call.upstream_request.as_ref().expect("edited").get()).expect("JSON");
            assert_eq!(sent["top_p"], 1.0);
            let asked: Value =
                serde_json::from_str(call.client_request.as_ref().expect("kept").get()).expect("JSON");
            assert_eq!(asked, request(stream));
            let reply: Value =
                serde_json::from_str(call.response.as_ref().expect("kept").get()).expect("JSON");
            assert_eq!(reply.is_array(), stream);
        }
    }
}

#[tokio::test]
async fn c02_c03_tool_calls_keep_every_id_and_their_sampled_arguments() {
    let script = Script {
        tokens: vec![
            ("<tool_call>", -0.1),
            ("view", -0.2),
            ("{\"path\":", -0.3),
            ("  \"a\"}", -0.4),
            ("<|im_end|>", -0.5),
        ],
        has_tool_call: true,
        ..Script::default()
    };
    let calls = train(script, request(true)).await;
    let tools = calls[0].tool_calls.clone().expect("tools");
    assert_eq!((tools[0].name.as_str(), tools[0].arguments.as_str()), ("view", "{\"path\":  \"a\"}"));
    assert!(tools[0].arguments_valid_json);
    assert_eq!(calls[0].completion_token_ids, Some(ids(5)));
    assert!(calls[0].trainable);
}

#[tokio::test]
async fn several_choices_are_several_records_of_one_call() {
    for stream in [false, true] {
        let mut body = request(stream);
        body["n"] = json!(3);
        let calls = train(Script::default(), body).await;
        assert_eq!(calls.iter().map(|call| call.choice_index).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(calls.iter().all(|call| call.call_id == calls[0].call_id));
        assert!(calls.iter().all(|call| call.trainable), "{:?}", calls[0].not_trainable_reasons);
        assert!(calls.iter().all(|call| call.usage.expect("usage").completion_tokens == 15));
    }
}

#[tokio::test]
async fn seeds_come_from_the_session_and_the_index_of_the_call() {
    let mut runs = Vec::new();
    for _ in 0..2 {
        let setup = Setup::trainer(Script::default()).await;
        let _session = setup.proxy.open_session(spec("s1")).expect("open");
        let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
        for _ in 0..3 {
            text(post(&url, &request(false)).await).await;
        }
        runs.push(setup.mock.asked().iter().map(|asked| asked.json()["seed"].clone()).collect::<Vec<_>>());
    }
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0][0], runs[0][1]);
    assert_ne!(runs[0][1], runs[0][2]);
}

#[tokio::test]
async fn c01_c02_c08_c10_a_record_that_must_not_train_says_why() {
    let reason = |script: Script, body: Value, expected: &'static str| async move {
        let calls = train(script, body).await;
        let found = &calls[0].not_trainable_reasons;
        assert!(found.iter().any(|reason| reason == expected), "{expected}: {found:?}");
        assert!(!calls[0].trainable);
    };
    let default = Script::default;
    for stream in [false, true] {
        let body = || request(stream);
        reason(Script { usage_error: 3, ..default() }, body(), "ids_usage_mismatch").await;
        reason(Script { gives_ids: false, ..default() }, body(), "no_token_ids").await;
        reason(Script { gives_ids: false, ..default() }, body(), "no_prompt_token_ids").await;
        reason(Script { gives_versions: false, ..default() }, body(), "weight_version_unknown").await;
        let bad = vec![("a", -0.5), ("b", -9999.0)];
        reason(Script { tokens: bad, ..default() }, body(), "logprob_missing").await;
        let mut constrained = body();
        constrained["response_format"] = json!({"type": "json_object"});
        reason(default(), constrained, "constrained_decoding").await;
    }
    let no_usage = |mut parts: Vec<Part>| {
        parts.remove(parts.len() - 2);
        parts
    };
    reason(Script { spoil: Some(no_usage), ..default() }, request(true), "usage_unknown").await;
}

#[tokio::test]
async fn c07_log_probs_that_are_no_numbers_are_null_and_forwarded_as_they_came() {
    let spoil = |parts: Vec<Part>| {
        let change = |part| match part {
            Part::Event(data) => Part::Event(data.replace("-1.5", "-Infinity").replace("-0.125", "NaN")),
            part => part,
        };
        parts.into_iter().map(change).collect()
    };
    let setup = Setup::stand_alone(Script { spoil: Some(spoil), ..Script::default() }).await;
    let mut body = request(true);
    body["logprobs"] = json!(true);
    let reply = text(setup.post(&body).await).await;
    assert!(String::from_utf8_lossy(&reply).contains("-Infinity"));
    let calls = setup.sink.calls(1).await;
    let expected = vec![Some(-0.25), None, None, Some(-2.0), Some(-0.5)];
    assert_eq!(calls[0].completion_logprobs, Some(expected));
    assert!(calls[0].not_trainable_reasons.contains(&"logprob_missing".to_owned()));
}

#[tokio::test]
async fn legos_own_clock_labels_a_reply_without_versions_unless_it_moved() {
    let version = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(5));
    let gated = |mut parts: Vec<Part>| {
        parts.insert(2, Part::Gate);
        parts
    };
    for moves in [false, true] {
        let script = Script { gives_versions: false, spoil: Some(gated), ..Script::default() };
        let setup = Setup::trainer(script).await;
        let mut own = spec("s1");
        let clock = std::sync::Arc::clone(&version);
        own.policy_version = Some(std::sync::Arc::new(move || {
            lego::record::PolicyVersion(clock.load(std::sync::atomic::Ordering::SeqCst))
        }));
        let session = setup.proxy.open_session(own).expect("open");
        let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
        let body = request(true);
        let (reply, ()) = tokio::join!(async { text(post(&url, &body).await).await }, async {
            setup.mock.started(1).await;
            if moves {
                version.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            }
            setup.mock.open_gate();
        });
        assert!(!reply.is_empty());
        let result = session.close().await;
        assert_eq!(result.calls[0].trainable, !moves);
        let expected = if moves { WeightSource::Unknown } else { WeightSource::LegoClock };
        assert_eq!(result.calls[0].weight_source, expected);
    }
}

#[tokio::test]
async fn stand_alone_captures_pass_sampling_through_and_say_what_is_unknown() {
    let setup = Setup::stand_alone(Script::default()).await;
    text(setup.post(&request(false)).await).await;
    let calls = setup.sink.calls(1).await;
    assert_eq!(calls[0].sampling_sent, calls[0].sampling_requested);
    assert_eq!(calls[0].sampling_sent.temperature, Some(0.7));
    assert_eq!(calls[0].sampling_sent.top_p, None);
    assert_eq!(calls[0].logprob_semantics, LogprobSemantics::Unknown);
    assert!(!calls[0].trainable);
    assert!(calls[0].session_id.as_str().starts_with("derived-"));
}

#[tokio::test]
async fn c20_a_gateway_that_refuses_log_probs_is_asked_again_without() {
    let script = Script { refuses_logprobs: true, gives_ids: false, ..Script::default() };
    let setup = Setup::with(ProxyOptions::stand_alone(), UpstreamKind::Openai, script).await;
    for _ in 0..2 {
        let response = setup.post(&request(true)).await;
        assert_eq!(response.status(), 200);
        text(response).await;
    }
    // The first call is asked again; the second is asked without from the start.
    let calls = setup.sink.calls(3).await;
    let seen: Vec<_> = calls.iter().map(|call| (call.attempt, call.http_status)).collect();
    assert_eq!(seen, [(1, 400), (2, 200), (1, 200)]);
    assert_eq!(calls[1].retry_of, Some(calls[0].call_id));
    for call in &calls[1..] {
        let reasons = &call.not_trainable_reasons;
        assert!(reasons.contains(&"capture_refused_by_upstream".to_owned()), "{reasons:?}");
    }
    assert_eq!(setup.mock.asked().len(), 3);
}

#[tokio::test]
async fn g04_no_key_is_in_a_record_an_error_or_a_reply() {
    let errors: [Option<(u16, String)>; 3] = [
        None,
        Some((401, "{\"error\":{\"message\":\"bad key sk-real-canary\"}}".to_owned())),
        Some((500, "<html>sk-real-canary</html>".to_owned())),
    ];
    for (index, error) in errors.into_iter().enumerate() {
        for stream in [false, true] {
            let setup = Setup::stand_alone(Script { error: error.clone(), ..Script::default() }).await;
            let reply = text(setup.post(&request(stream)).await).await;
            let asked = &setup.mock.asked()[0];
            assert_eq!(asked.headers["authorization"], "Bearer sk-real-canary");
            assert!(!format!("{:?}", asked.headers).contains("sk-client-canary"));
            let calls = setup.sink.calls(1).await;
            let seen = format!(
                "{}{}",
                String::from_utf8_lossy(&reply),
                serde_json::to_string(&calls).expect("JSON")
            );
            assert!(!seen.contains("canary"), "{index} {seen}");
        }
    }
}

/// The record is made before the held event leaves: a reply that came at once had no time by then.
#[tokio::test]
async fn the_time_to_the_first_event_is_known_of_a_reply_that_comes_at_once() {
    for stream in [false, true] {
        let at_once = |script: &Script| crate::mock::events(script, &request(true));
        let whole: String =
            at_once(&Script::default()).iter().map(|event| format!("data: {event}\n\n")).collect();
        let parts = Some(vec![Part::Raw(whole.into_bytes())]);
        for script in [Script::default(), Script { parts, ..Script::default() }] {
            let call = train(script, request(stream)).await.remove(0);
            let ttft_us = call.ttft_us.expect("known");
            assert!(ttft_us <= call.duration_us, "{ttft_us} of {}", call.duration_us);
        }
        let refused = Script { error: Some((404, "{}".to_owned())), ..Script::default() };
        assert!(train(refused, request(stream)).await.remove(0).ttft_us.is_some());
    }
}

#[tokio::test]
async fn law_12_a_call_that_passes_through_with_a_shaped_distribution_is_not_trainable() {
    let mut body = request(false);
    for (name, value) in [("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0)] {
        body[name] = serde_json::json!(value);
    }
    body["top_k"] = serde_json::json!(-1);
    body["frequency_penalty"] = serde_json::json!(0);
    body["presence_penalty"] = serde_json::json!(0);
    let setup = Setup::stand_alone(Script::default()).await;
    text(setup.post(&body).await).await;
    body["bad_words"] = serde_json::json!(["no"]);
    text(setup.post(&body).await).await;
    let calls = setup.sink.calls(2).await;
    assert!(calls[0].trainable, "{:?}", calls[0].not_trainable_reasons);
    assert!(calls[1].not_trainable_reasons.contains(&"sampling_unknown_or_truncated".to_owned()));
    assert_eq!(calls[1].logprob_semantics, lego::record::LogprobSemantics::Unknown);
    assert_eq!(setup.mock.asked()[1].json()["bad_words"][0], "no", "it goes to the upstream as it came");
}
