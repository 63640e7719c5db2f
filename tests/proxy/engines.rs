//! Engines other than a recent vLLM without routing: what is captured of them, what the client gets.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lego::proxy::ProxyOptions;
use lego::record::{Call, IdsSource, LayerAxis, LogprobSemantics, RoutingDtype, UpstreamKind, WeightSource};
use lego::upstream::Upstream;
use lego::upstream::routing::RoutingHint;
use serde_json::{Value, json};

use crate::mock::{Mock, Script};
use crate::setup::{Setup, post, request, spec, text, timeouts};

const SGLANG: &str = include_str!("../fixtures/wire/sglang_chat.json");

/// A NumPy file of `rows` rows, two layers, two experts.
fn npy(rows: usize) -> String {
    let header = format!("{{'descr': '<u2', 'fortran_order': False, 'shape': ({rows}, 2, 2), }}\n");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.as_bytes());
    file.extend((0..rows * 4).flat_map(|id| (id as u16 + 250).to_le_bytes()));
    STANDARD.encode(file)
}

fn with_routing(body: &str, routing: &str) -> Vec<u8> {
    let mut body: Value = serde_json::from_str(body).expect("JSON");
    for choice in body["choices"].as_array_mut().expect("choices") {
        choice["routed_experts"] = routing.into();
    }
    body.to_string().into_bytes()
}

/// One call of a training session that is not streamed; its record and the client's reply.
async fn train(upstream: impl Fn(&Mock) -> Upstream, script: Script) -> (Call, Value) {
    let mock = Mock::start(script).await;
    let setup = Setup::in_front_of(upstream(&mock), ProxyOptions::trainer("policy"), mock).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
    let reply = text(post(&url, &request(false)).await).await;
    let call = (*session.close().await.calls[0]).clone();
    (call, serde_json::from_slice(&reply).expect("JSON"))
}

fn of_kind(kind: UpstreamKind, hint: Option<RoutingHint>) -> impl Fn(&Mock) -> Upstream {
    move |mock| {
        let upstream = Upstream::http(&mock.url(), kind, None, timeouts()).expect("upstream");
        upstream.with_routing_hint(hint)
    }
}

#[tokio::test]
async fn c16_routing_of_every_position_but_the_last_is_in_the_record() {
    // Four tokens of the prompt and five sampled ones.
    let script = || Script { spoil_body: Some(|body| with_routing(&body, &npy(8))), ..Script::default() };
    let (call, reply) = train(of_kind(UpstreamKind::Vllm, Some(RoutingHint::default())), script()).await;
    assert_eq!(call.not_trainable_reasons, Vec::<String>::new());
    let routing = call.routing.expect("routing");
    let shape = *routing.shape();
    assert_eq!((shape.start, shape.rows, shape.layers, shape.top_k), (0, 8, 2, 2));
    assert_eq!((shape.dtype, shape.layer_axis), (RoutingDtype::U16, LayerAxis::Unknown));
    assert!(routing.ids().eq(250..282));
    // vLLM sends it in every whole reply: without lego the client would have got it too.
    assert_eq!(reply["choices"][0]["routed_experts"], npy(8));
    let (unwanted, _) = train(of_kind(UpstreamKind::Vllm, None), script()).await;
    assert_eq!((unwanted.routing, unwanted.trainable), (None, true));
}

#[tokio::test]
async fn c16_rows_of_earlier_turns_are_not_stored_again_and_a_trainer_has_them() {
    // Experts count up from 250, so that the rows of a longer context begin with those of a shorter one.
    let turn = |prompt: &[u32], completion: &[u32]| {
        let logprobs: Vec<Value> =
            completion.iter().map(|_| json!({"token": "x", "logprob": -0.5})).collect();
        let tokens = prompt.len() + completion.len();
        let body = json!({"id": "c", "object": "chat.completion", "created": 1, "model": "toy",
            "prompt_token_ids": prompt,
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop",
                "token_ids": completion, "logprobs": {"content": logprobs}, "routed_experts": npy(tokens - 1)}],
            "usage": {"prompt_tokens": prompt.len(), "completion_tokens": completion.len(), "total_tokens": tokens}});
        Script { body: Some(body.to_string().into_bytes()), ..Script::default() }
    };
    let mock = Mock::start(turn(&[1, 2, 3], &[4, 5])).await;
    let upstream = of_kind(UpstreamKind::Vllm, Some(RoutingHint::default()))(&mock);
    let setup = Setup::in_front_of(upstream, ProxyOptions::trainer("policy"), mock).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
    text(post(&url, &request(false)).await).await;
    setup.mock.set(turn(&[1, 2, 3, 4, 5, 6, 7], &[8]));
    text(post(&url, &request(false)).await).await;
    let stored = setup.sink.calls(2).await;
    let routing: Vec<_> = stored.iter().map(|call| call.routing.clone().expect("routing")).collect();
    assert_eq!((routing[0].shape().start, routing[0].shape().rows, routing[0].base()), (0, 4, None));
    // The turn before had no row for its last sampled token.
    assert_eq!((routing[1].shape().start, routing[1].shape().rows), (4, 3));
    assert_eq!(routing[1].base().map(|base| base.call_id), Some(stored[0].call_id));
    assert!(routing[1].ids().eq(266..278));
    assert!(
        stored.iter().all(|call| !call.not_trainable_reasons.iter().any(|why| why.starts_with("routing")))
    );
    let calls = session.close().await.calls;
    let whole: Vec<_> = calls.iter().map(|call| call.routing.clone().expect("routing")).collect();
    assert_eq!((whole[1].shape().rows, whole[1].base()), (7, None));
    assert!(whole[1].ids().eq(250..278));
}

#[tokio::test]
async fn c16_routing_that_is_not_of_these_tokens_is_not_stored_and_the_reply_passes() {
    let cases: [(fn(String) -> Vec<u8>, &str); 4] = [
        (|body| with_routing(&body, &npy(9)), "routing_rows_mismatch"),
        (|body| with_routing(&body, &npy(7)), "routing_rows_mismatch"),
        (|body| with_routing(&body, "AAAA"), "routing_unreadable"),
        (|body| with_routing(&body, "not base64"), "routing_unreadable"),
    ];
    for (spoil, reason) in cases {
        let script = Script { spoil_body: Some(spoil), ..Script::default() };
        let (call, reply) = train(of_kind(UpstreamKind::Vllm, Some(RoutingHint::default())), script).await;
        assert_eq!((call.routing, call.not_trainable_reasons), (None, vec![reason.to_owned()]));
        assert_eq!(call.completion_token_ids.expect("ids").len(), 5);
        assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn c16_routing_of_completions_is_of_each_choices_own_prompt() {
    // Two prompts of two and three tokens; one sampled token each. The ids of a prompt come with its choice.
    let choice = |index: u64, prompt: Value, rows: usize| {
        json!({"index": index, "text": "x", "finish_reason": "stop", "prompt_token_ids": prompt, "token_ids": [9],
            "logprobs": {"token_logprobs": [-0.5]}, "weight_versions": [{"version": "3", "start": 0, "end": 1}],
            "routed_experts": npy(rows)})
    };
    let body = json!({"id": "c", "object": "text_completion", "created": 1, "model": "toy",
        "choices": [choice(0, json!([1, 2]), 2), choice(1, json!([3, 4, 5]), 3)],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}});
    let mock = Mock::start(Script { body: Some(body.to_string().into_bytes()), ..Script::default() }).await;
    let upstream = of_kind(UpstreamKind::Vllm, Some(RoutingHint::default()))(&mock);
    let setup = Setup::in_front_of(upstream, ProxyOptions::trainer("policy"), mock).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/completions", setup.address);
    text(post(&url, &json!({"model": "toy", "prompt": [[1, 2], [3, 4, 5]]})).await).await;
    let calls = session.close().await.calls;
    let rows: Vec<_> = calls.iter().map(|call| call.routing.as_ref().map(|r| r.shape().rows)).collect();
    assert_eq!(rows, [Some(2), Some(3)]);
    assert!(!calls.iter().any(|call| call.not_trainable_reasons.contains(&"routing_without_ids".to_owned())));
}

#[tokio::test]
async fn spans_of_weights_that_nobody_labelled_do_not_beat_legos_own_clock() {
    let unlabelled =
        |body: String| body.replace("\"version\": \"3\"", "\"version\": \"default\"").into_bytes();
    let mock = Mock::start(Script { spoil_body: Some(unlabelled), ..Script::default() }).await;
    let upstream = of_kind(UpstreamKind::Vllm, None)(&mock);
    let setup = Setup::in_front_of(upstream, ProxyOptions::trainer("policy"), mock).await;
    setup.proxy.set_policy_version("7");
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
    text(post(&url, &request(false)).await).await;
    let call = session.close().await.calls[0].clone();
    assert_eq!(call.weight_source, WeightSource::LegoClock);
    assert_eq!(call.weight_spans.as_ref().expect("spans")[0].version, "7");
}

#[tokio::test]
async fn sglang_gives_ids_log_probs_weights_and_routing_in_a_body() {
    let script = Script { spoil_body: Some(|_| SGLANG.into()), ..Script::default() };
    let hint = RoutingHint { layers: Some(4), top_k: None };
    let (call, reply) = train(of_kind(UpstreamKind::Sglang, Some(hint)), script).await;
    assert_eq!(call.not_trainable_reasons, Vec::<String>::new());
    assert_eq!(call.prompt_token_ids.as_ref().expect("ids").len(), 12);
    assert_eq!(call.completion_token_ids, Some(vec![9707, 0, 220, 144_848, 144_849, 151_645]));
    assert_eq!(call.completion_ids_source, IdsSource::Engine);
    assert_eq!(call.logprob_semantics, LogprobSemantics::RawT1);
    assert_eq!(call.weight_source, WeightSource::ReplySpans);
    assert_eq!(call.weight_spans.expect("spans")[0].version, "step-42");
    let shape = *call.routing.expect("routing").shape();
    assert_eq!((shape.rows, shape.layers, shape.top_k), (17, 4, 2));
    assert_eq!((shape.dtype, shape.layer_axis), (RoutingDtype::U8, LayerAxis::AllHidden));
    let sent: Value = serde_json::from_str(call.upstream_request.expect("edited").get()).expect("JSON");
    for name in ["return_token_ids", "return_meta_info", "logprobs"] {
        assert_eq!(sent[name], true, "{name}");
    }
    let choice = reply["choices"][0].as_object().expect("choice");
    let names: Vec<&str> = choice.keys().map(String::as_str).collect();
    assert_eq!(names, ["index", "message", "logprobs", "finish_reason", "matched_stop"]);
    assert_eq!((&choice["logprobs"], &choice["matched_stop"]), (&Value::Null, &json!(151_645)));
}

#[tokio::test]
async fn old_vllm_gives_sampled_ids_as_text_and_none_of_the_prompt() {
    let strings = |body: String| {
        let mut body: Value = serde_json::from_str(&body).expect("JSON");
        for (index, entry) in
            body["choices"][0]["logprobs"]["content"].as_array_mut().expect("entries").iter_mut().enumerate()
        {
            entry["token"] = format!("token_id:{}", 1000 + index).into();
        }
        body.to_string().into_bytes()
    };
    let script = Script { gives_ids: false, spoil_body: Some(strings), ..Script::default() };
    let (call, _) = train(of_kind(UpstreamKind::Vllm, None), script).await;
    assert_eq!(call.completion_token_ids, Some(vec![1000, 1001, 1002, 1003, 1004]));
    assert_eq!(call.completion_ids_source, IdsSource::TokenIdStrings);
    assert_eq!(call.prompt_ids_source, IdsSource::Absent);
    assert_eq!(call.not_trainable_reasons, ["no_prompt_token_ids"]);
}

#[tokio::test]
async fn law_12_an_engines_hidden_defaults_never_decide_how_the_policy_samples() {
    // What the model's generation_config would fill in.
    let hidden =
        json!({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1});
    for kind in [UpstreamKind::Vllm, UpstreamKind::Sglang] {
        for stream in [false, true] {
            let setup = Setup::with(ProxyOptions::trainer("policy"), kind, Script::default()).await;
            let session = setup.proxy.open_session(spec("s1")).expect("open");
            let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
            let mut silent = request(stream);
            silent.as_object_mut().expect("object").remove("temperature");
            text(post(&url, &silent).await).await;
            let mut used = hidden.clone();
            let asked = setup.mock.asked()[0].json();
            for (name, value) in used.as_object_mut().expect("object") {
                if let Some(sent) = asked.get(name).filter(|sent| !sent.is_null()) {
                    *value = sent.clone();
                }
            }
            let neutral = json!({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0});
            assert_eq!(used, neutral, "{kind:?} {stream}");
            let call = session.close().await.calls[0].clone();
            assert_eq!(call.sampling_requested.temperature, None);
            assert_eq!((call.sampling_sent.temperature, call.sampling_sent.top_p), (Some(1.0), Some(1.0)));
        }
    }
}

#[tokio::test]
async fn c16_c20_completions_of_several_prompts_have_each_its_ids_and_routing() {
    let router = axum::Router::new().route(
        "/v1/completions",
        axum::routing::post(|| async {
            let choice = |index: u32, prompt: Value, ids: Value, logprobs: Value| {
                json!({"index": index, "text": "x", "finish_reason": "stop", "stop_reason": null, "token_ids": ids,
                    "logprobs": {"token_logprobs": logprobs}, "prompt_token_ids": prompt, "routed_experts": npy(2),
                    "weight_versions": [{"version": "s", "start": 0, "end": ids.as_array().expect("ids").len()}]})
            };
            let choices =
                [choice(0, json!([1, 2]), json!([7]), json!([-0.5])), choice(1, json!([3]), json!([8, 9]), json!([-0.5, -0.25]))];
            axum::Json(json!({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": choices,
                "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}}))
        }),
    );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let upstream = Upstream::http(&url, UpstreamKind::Vllm, None, timeouts()).expect("upstream");
    let mock = Mock::in_process(Script::default());
    let setup = Setup::in_front_of(upstream, ProxyOptions::trainer("policy"), mock).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/completions", setup.address);
    text(post(&url, &json!({"model": "m", "prompt": [[1, 2], [3]]})).await).await;
    let calls = session.close().await.calls;
    assert_eq!(calls.len(), 2);
    for call in calls {
        assert_eq!(call.not_trainable_reasons, Vec::<String>::new());
        assert_eq!(call.routing.as_ref().expect("routing").shape().rows, 2);
        let prompt: &[u32] = if call.choice_index == 0 { &[1, 2] } else { &[3] };
        assert_eq!(call.prompt_token_ids.as_deref(), Some(prompt));
    }
}
