//! Group C, the capturing side: ids, log-probs, and what may be trained on.

use lego::capture::{Query, Reader, Writer, WriterOptions};
use lego::proxy::{ProxyOptions, SessionSampling};
use lego::record::{Call, CallSink as _, Disposition, IdsSource, LogprobSemantics, UpstreamKind};
use lego::upstream::Upstream;
use serde_json::{Value, json};

use crate::mock::{Mock, Part, Script};
use crate::setup::{Setup, post, request, spec, text as whole, timeouts};
use crate::support::{
    Counters, Frame, done, finish, numbers, raw, sampled, session, stream, text, trained, usage,
};

async fn one(script: Script) -> Call {
    session(vec![(script, request(true))]).await.1.remove(0)
}

fn says(call: &Call, reason: &str) -> bool {
    !call.trainable && call.not_trainable_reasons.iter().any(|said| said == reason)
}

/// The ids that are trained, of each sample.
fn targets(calls: &[Call]) -> Vec<Vec<u32>> {
    let of = |sample: &lego::record::Sample| {
        let tokens = sample.token_ids.iter().zip(&sample.loss_mask);
        tokens.filter(|(_, is_target)| **is_target).map(|(id, _)| *id).collect()
    };
    trained(calls).samples.iter().map(of).collect()
}

#[tokio::test]
async fn c01_the_sampled_ids_are_kept_however_the_text_would_be_encoded() {
    // "haha" sampled as ha, ha, and a stop; an encoder would give the one token 8.
    let call = one(sampled(
        &[1, 2],
        &[("ha", &[7], &["-0.5"]), ("ha", &[7], &["-0.25"]), ("", &[2], &["-0.1"])],
        "stop",
    ))
    .await;
    assert_eq!(call.text.as_deref(), Some("haha"));
    assert_eq!(call.completion_token_ids.as_deref(), Some(&[7, 7, 2][..]));
    assert_eq!(call.completion_ids_source, IdsSource::Engine);
    assert_eq!(trained(std::slice::from_ref(&call)).samples[0].token_ids, [1, 2, 7, 7, 2]);
    assert_eq!(targets(&[call]), [[7, 7, 2]]);
    // Without ids there are none, and nothing is trained.
    let call = one(stream(vec![text("haha"), finish("stop"), usage(2, 3), done()])).await;
    assert_eq!((call.completion_ids_source, call.completion_token_ids.clone()), (IdsSource::Absent, None));
    assert!(says(&call, "no_token_ids"));
    assert_eq!(trained(&[call]).samples, []);
}

#[tokio::test]
async fn c02_ids_that_do_not_sum_to_the_usage_are_never_trained() {
    let ids: Vec<u32> = (0..17).collect();
    let logprobs = ["-0.5"; 17];
    let frames: [Frame<'_>; 1] = [("", &ids, &logprobs)];
    for (counted, is_right) in [(20, false), (17, true)] {
        let mut script = sampled(&[1, 2], &frames, "tool_calls");
        let parts = script.parts.as_mut().expect("parts");
        let at = parts.len() - 2;
        parts[at] = usage(2, counted);
        let call = one(script).await;
        assert_eq!(call.completion_token_ids.as_ref().expect("ids").len(), 17);
        assert_eq!(call.usage.expect("usage").completion_tokens, counted);
        assert_eq!((call.trainable, says(&call, "ids_usage_mismatch")), (is_right, !is_right));
        assert_eq!(trained(&[call]).samples.len(), usize::from(is_right));
    }
}

#[tokio::test]
async fn c03_log_probs_stay_at_their_tokens_wherever_they_are_missing() {
    // None on the frames of reasoning and tools.
    let frames: [Frame<'_>; 4] =
        [("", &[5, 6], &[]), ("a", &[7], &["-0.5"]), ("", &[8], &[]), ("b", &[9], &["-0.25"])];
    let call = one(sampled(&[1], &frames, "stop")).await;
    assert_eq!(call.completion_logprobs, Some(vec![None, None, Some(-0.5), None, Some(-0.25)]));
    assert!(says(&call, "logprob_missing"));
    // Frames with log-probs and no text, and one that has nothing else and comes last.
    let only = |logprob: &str, reason: Option<&str>| {
        let logprobs =
            json!({"content": [{"token": "t", "logprob": logprob.parse::<f64>().expect("number")}]});
        crate::support::choice(
            json!({"index": 0, "delta": {}, "logprobs": logprobs, "finish_reason": reason}),
        )
    };
    let parts = vec![
        only("-0.5", None),
        text("a"),
        only("-0.25", Some("stop")),
        only("-0.125", None),
        usage(1, 3),
        done(),
    ];
    let call = one(stream(parts)).await;
    assert_eq!(call.completion_logprobs, Some(vec![Some(-0.5), Some(-0.25), Some(-0.125)]));
    // A value too many is nobody's: no id gets another's.
    let mut script = sampled(&[1], &[("a", &[7], &["-0.5"]), ("b", &[8], &[])], "stop");
    let parts = script.parts.as_mut().expect("parts");
    parts.insert(parts.len() - 2, only("-0.125", None));
    let call = one(script).await;
    assert_eq!(call.completion_logprobs, Some(vec![Some(-0.5), None, Some(-0.125)]));
    assert!(says(&call, "logprobs_length_mismatch"));
}

#[tokio::test]
async fn c05_tokens_are_counted_by_their_ids_and_not_by_chunks() {
    let frames: [Frame<'_>; 5] = [
        ("", &[], &[]),
        ("a", &[5], &["-0.5"]),
        ("bcde", &[6, 7, 8, 9], &["-0.1", "-0.2", "-0.3", "-0.4"]),
        ("", &[10], &["-0.6"]),
        ("é", &[11], &["-0.7"]),
    ];
    let call = one(sampled(&[1], &frames, "stop")).await;
    assert_eq!(call.completion_token_ids.as_deref(), Some(&[5, 6, 7, 8, 9, 10, 11][..]));
    let logprobs = [-0.5, -0.1, -0.2, -0.3, -0.4, -0.6, -0.7].map(Some).to_vec();
    assert_eq!(call.completion_logprobs, Some(logprobs));
    assert_eq!(call.text.as_deref(), Some("abcdeé"));
    assert!(call.trainable, "{:?}", call.not_trainable_reasons);
}

#[tokio::test]
async fn c07_what_is_no_log_prob_is_null_and_passes_as_it_came() {
    let counters = Counters::new();
    for bad in ["-Infinity", "NaN", "null", "-9999.0", "-1e9", "1e999"] {
        let mut asked = request(true);
        for name in ["logprobs", "return_token_ids", "return_weight_versions"] {
            asked[name] = json!(true);
        }
        asked["stream_options"] = json!({"include_usage": true});
        let script =
            sampled(&[1], &[("a", &[5], &["-0.5"]), ("b", &[6], &[bad]), ("c", &[7], &["-0.25"])], "stop");
        let parts = script.parts.clone().expect("parts");
        assert!(String::from_utf8_lossy(&raw(&parts)).contains(&format!("\"logprob\":{bad},")));
        let setup = Setup::trainer(script).await;
        let open = setup.proxy.open_session(spec("s1")).expect("open");
        let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
        let reply = whole(post(&url, &asked).await).await;
        let own = String::from_utf8_lossy(&reply).replace("\"policy\"", "\"toy\"");
        assert_eq!(own, String::from_utf8_lossy(&raw(&parts)), "{bad}");
        // The same in a body.
        let body = format!(
            r#"{{"id":"c","object":"chat.completion","created":1,"model":"toy","prompt_token_ids":[1],"choices":[{{"index":0,"message":{{"role":"assistant","content":"abc"}},"logprobs":{{"content":[{{"logprob":-0.5}},{{"logprob":{bad}}},{{"logprob":-0.25}}]}},"finish_reason":"stop","token_ids":[5,6,7]}}],"usage":{}}}"#,
            numbers(1, 3)
        );
        setup.mock.set(Script { body: Some(body.clone().into_bytes()), ..Script::default() });
        asked["stream"] = json!(false);
        asked.as_object_mut().expect("object").remove("stream_options");
        assert_eq!(String::from_utf8_lossy(&whole(post(&url, &asked).await).await), body, "{bad}");
        let calls: Vec<Call> = open.close().await.calls.iter().map(|call| (**call).clone()).collect();
        assert_eq!(calls.len(), 2);
        for call in &calls {
            assert_eq!(call.completion_logprobs, Some(vec![Some(-0.5), None, Some(-0.25)]), "{bad}");
            assert!(says(call, "logprob_missing"), "{bad}: {:?}", call.not_trainable_reasons);
        }
        assert_eq!(trained(&calls).samples, []);
    }
    let page = counters.page();
    assert!(page.contains("lego_proxy_calls_total") && !page.contains("NaN"), "{page}");
}

#[tokio::test]
async fn c08_a_null_among_log_probs_survives_the_store_and_is_trained_by_nobody() {
    let good = sampled(&[1], &[("a", &[5], &["-0.1"])], "stop");
    let bad = sampled(
        &[1, 5, 9],
        &[("a", &[6], &["-0.1"]), ("b", &[7], &["null"]), ("c", &[8], &["-0.2"])],
        "stop",
    );
    let (_, calls) = session(vec![(good, request(true)), (bad, request(true))]).await;
    let folder = tempfile::tempdir().expect("temporary folder");
    let writer = Writer::open(folder.path(), WriterOptions::default()).expect("opened");
    writer.append(calls).await.expect("stored");
    assert_eq!(writer.close().await.left_in_journal, [] as [String; 0]);
    let files = std::fs::read_dir(folder.path()).expect("folder").count();
    assert!(files > 0);
    let reader = Reader::open(folder.path(), Query::default()).expect("readable");
    let calls: Vec<Call> = reader.collect::<Result<_, _>>().expect("whole");
    assert_eq!(calls[1].completion_logprobs, Some(vec![Some(-0.1), None, Some(-0.2)]));
    // One rule: the call is context, its tokens are booked as dropped, and the rest trains with finite numbers.
    let built = trained(&calls);
    assert_eq!(targets(&calls), [[5]]);
    assert!(built.samples[0].logprobs.iter().flatten().all(|logprob| logprob.is_finite()));
    let dropped = built.ledger.iter().find(|entry| entry.call_id == calls[1].call_id).expect("booked");
    assert_eq!(dropped.tokens, 3);
    assert!(
        matches!(&dropped.disposition, Disposition::Dropped(why) if why.contains("logprob")),
        "{dropped:?}"
    );
}

#[tokio::test]
async fn c09_half_characters_are_tokens_and_the_text_is_the_messages() {
    let whole_bytes = [json!([240, 159]), json!([140]), json!([141])];
    let replaced = [json!([239, 191, 189]), json!([239, 191, 189]), json!([239, 191, 189])];
    for bytes in [whole_bytes, replaced, [Value::Null, Value::Null, Value::Null]] {
        let mut script =
            sampled(&[1], &[("", &[5], &["-0.5"]), ("", &[6], &["-0.5"]), ("🌍", &[7], &["-0.5"])], "stop");
        for (part, bytes) in script.parts.as_mut().expect("parts")[1..4].iter_mut().zip(&bytes) {
            let Part::Event(data) = part else { unreachable!("events only") };
            *data = data
                .replace("\"token\":\"t\"", "\"token\":\"\u{fffd}\"")
                .replace("\"bytes\":[116]", &format!("\"bytes\":{bytes}"));
        }
        let call = one(script).await;
        assert_eq!(call.text.as_deref(), Some("🌍"));
        assert_eq!(call.completion_token_ids.as_deref(), Some(&[5, 6, 7][..]));
        assert!(call.trainable, "{:?}", call.not_trainable_reasons);
        let kept: Vec<Value> = serde_json::from_str(call.response.expect("reply").get()).expect("list");
        for (event, bytes) in kept[1..4].iter().zip(&bytes) {
            assert_eq!(&event["choices"][0]["logprobs"]["content"][0]["bytes"], bytes);
        }
    }
}

#[tokio::test]
async fn c10_each_log_prob_says_of_which_distribution_it_is() {
    // (temperature, top_p), and what the kind of engine gives for it.
    let of = |kind: UpstreamKind, temperature: f64, top_p: f64| match kind {
        _ if temperature == 1.0 && top_p == 1.0 => LogprobSemantics::RawT1,
        UpstreamKind::Embedded => LogprobSemantics::RawT1,
        UpstreamKind::Sglang => LogprobSemantics::TempScaled,
        _ => LogprobSemantics::Unknown,
    };
    for kind in [UpstreamKind::Embedded, UpstreamKind::Vllm, UpstreamKind::Sglang] {
        for (temperature, top_p) in [(1.0, 1.0), (0.6, 1.0), (0.6, 0.9)] {
            let mock = Mock::start(Script::default()).await;
            let upstream = match kind {
                UpstreamKind::Embedded => Upstream::in_process(mock.router(), timeouts()),
                kind => Upstream::http(&mock.url(), kind, None, timeouts()).expect("upstream"),
            };
            let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await;
            let mut body = request(false);
            for (name, value) in [
                ("temperature", json!(temperature)),
                ("top_p", json!(top_p)),
                ("top_k", json!(-1)),
                ("min_p", json!(0.0)),
                ("repetition_penalty", json!(1.0)),
                ("frequency_penalty", json!(0.0)),
                ("presence_penalty", json!(0.0)),
            ] {
                body[name] = value;
            }
            whole(setup.post(&body).await).await;
            let call = setup.sink.calls(1).await.remove(0);
            assert_eq!(
                (call.sampling_sent.temperature, call.sampling_sent.top_p),
                (Some(temperature), Some(top_p))
            );
            let semantics = of(kind, temperature, top_p);
            assert_eq!(call.logprob_semantics, semantics, "{kind:?} {temperature} {top_p}");
            let reason = match (semantics, temperature, top_p) {
                (_, _, top_p) if top_p < 1.0 => Some("sampling_unknown_or_truncated"),
                (LogprobSemantics::Unknown, ..) => Some("logprob_semantics_unknown"),
                (LogprobSemantics::RawT1, temperature, _) if temperature < 1.0 => {
                    Some("raw_logprobs_at_other_temperature")
                }
                _ => None,
            };
            let doubts: Vec<&String> = call
                .not_trainable_reasons
                .iter()
                .filter(|said| said.contains("sampling") || said.contains("logprob"))
                .collect();
            assert_eq!(doubts, reason.iter().collect::<Vec<_>>(), "{kind:?} {temperature} {top_p}");
        }
    }
    // A session whose temperature lego pins to another one is as strict.
    let setup = Setup::trainer(Script::default()).await;
    let mut own = spec("s1");
    own.sampling = SessionSampling::Pinned { temperature: 0.6, seed: 7 };
    let open = setup.proxy.open_session(own).expect("open");
    whole(post(&format!("http://{}/sessions/s1/v1/chat/completions", setup.address), &request(true)).await)
        .await;
    let call = (*open.close().await.calls[0]).clone();
    assert!(says(&call, "logprob_semantics_unknown"), "{:?}", call.not_trainable_reasons);
}

#[tokio::test]
async fn c12_a_sampled_stop_token_is_part_of_the_answer() {
    for (last, reason) in [(2, "stop"), (3, "stop"), (9, "length")] {
        let call = one(sampled(&[1], &[("a", &[5], &["-0.5"]), ("", &[last], &["-0.25"])], reason)).await;
        assert_eq!(call.completion_logprobs, Some(vec![Some(-0.5), Some(-0.25)]));
        assert_eq!(targets(&[call]), [[5, last]]);
    }
    // A stop token whose log-prob did not come has none, in a stream and in a body.
    let call =
        one(sampled(&[1], &[("a", &[5], &["-0.5"]), ("b", &[6], &["-0.25"]), ("", &[2], &[])], "stop")).await;
    let body = json!({"id": "c", "object": "chat.completion", "created": 1, "model": "toy", "prompt_token_ids": [1], "usage": numbers(1, 3),
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop", "token_ids": [5, 6, 2],
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}}]});
    let script = Script { body: Some(body.to_string().into_bytes()), ..Script::default() };
    let (_, calls) = session(vec![(script, request(false))]).await;
    for call in [&call, &calls[0]] {
        assert_eq!(call.completion_token_ids.as_deref(), Some(&[5, 6, 2][..]));
        assert_eq!(call.completion_logprobs, Some(vec![Some(-0.5), Some(-0.25), None]));
        assert!(says(call, "logprob_missing"));
    }
}
