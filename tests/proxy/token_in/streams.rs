//! vLLM's endpoint for tokens: streams with expert routing, live.

use lego::config::Samples;
use lego::proxy::{ProxyOptions, SessionSampling, SessionSpec};
use lego::record::{Call, CallKind, CallStatus, ClientApi, IdsSource, UpstreamKind};
use lego::trajectory::{lineages, samples};
use lego::upstream::Upstream;
use lego::upstream::routing::RoutingHint;
use serde_json::{Value, json};

use super::engine::{Ends, Engine, Says, Server, Streams, tokenizer};
use super::interrupted::message_so_far;
use super::{World, chat, message, renderer, routed};
use crate::mock::{Mock, Script};
use crate::rejoin::left;
use crate::setup::{PATIENCE, Setup, broken, post, read, spec, text, timeouts};

const TEXT: &str = "hello there, world";

/// A proxy that finds out what this server can give.
pub async fn world_of(server: Server) -> World {
    world_for(server, spec("s1")).await
}

async fn world_for(server: Server, spec: SessionSpec) -> World {
    let engine = Engine::with(server).await;
    let mut options = ProxyOptions::trainer("policy");
    options.renderer = Some(renderer());
    options.retries.most = 0;
    options.retry_grace = 10 * PATIENCE;
    let kind = if server.is_sglang { UpstreamKind::Sglang } else { UpstreamKind::Vllm };
    let upstream = Upstream::http(&engine.url, kind, None, timeouts()).expect("upstream");
    let upstream = upstream.with_routing_hint(Some(RoutingHint { layers: Some(2), top_k: None }));
    let setup = Setup::as_told(upstream, options, Mock::in_process(Script::default())).await;
    let session = setup.proxy.open_session(spec).expect("open");
    World { engine, setup, session }
}

pub const fn vllm(streams: Streams) -> Server {
    Server { is_sglang: false, has_experts: true, streams, bytes_per_write: None }
}

/// A user's question, streamed.
pub fn question() -> Value {
    chat(json!([{"role": "user", "content": "go"}]), true)
}

/// A stream up to where it has told this.
pub async fn until(reply: &mut reqwest::Response, content: &str) -> String {
    let mut told = String::new();
    while message_so_far(&told) != content {
        let piece = tokio::time::timeout(PATIENCE, reply.chunk()).await.expect("in time");
        told += std::str::from_utf8(&piece.expect("goes on").expect("more")).expect("UTF-8");
    }
    told
}

/// The version in each row of a call's routing, from its first row on; all else of the rows is that of their ids.
pub fn versions(call: &Call) -> Vec<routed::Version> {
    let routing = call.routing.as_ref().expect("routing");
    let shape = routing.shape();
    assert_eq!((shape.layers, shape.top_k), (2, 2));
    let ids = super::all_ids(call);
    assert_eq!((shape.start + shape.rows) as usize, ids.len() - 1, "the last token has no row");
    let rows: Vec<u32> = routing.ids().collect();
    let row = |(at, row): (usize, &[u32])| {
        let position = shape.start as usize + at;
        let version = routed::Version::try_from(row[0]).expect("small");
        assert_eq!(row, routed::row(version, position, ids[position]).map(u32::from), "position {position}");
        version
    };
    rows.chunks_exact(4).enumerate().map(row).collect()
}

fn is_exact(call: &Call, ids: &[u32]) {
    assert!(call.trainable, "{:?}", call.not_trainable_reasons);
    assert_eq!(call.completion_token_ids.as_deref(), Some(ids));
    let logprobs: Vec<Option<f32>> = ids.iter().map(|id| Some(routed::logprob(*id) as f32)).collect();
    assert_eq!(call.completion_logprobs.as_ref(), Some(&logprobs));
    let usage = call.usage.expect("usage");
    let prompt = call.prompt_token_ids.as_ref().expect("prompt ids");
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (prompt.len() as u64, ids.len() as u64));
}

#[tokio::test]
async fn a_stream_with_routing_is_live_and_all_that_it_said_is_recorded() {
    for streams in [Streams::Older, Streams::Newer] {
        for bytes_per_write in [None, Some(1)] {
            let world = world_of(Server { bytes_per_write, ..vllm(streams) }).await;
            world.setup.proxy.set_policy_version("7");
            let ids = tokenizer().encode(&format!("{TEXT}<|im_end|>")).expect("encodes");
            world.engine.will_say(Says { holds_after: Some(1), ..Says::from(TEXT) });
            let url = format!("http://{}/sessions/s1/v1/chat/completions", world.setup.address);
            let mut reply = post(&url, &question()).await;
            // The engine has said its first token, and says no other before the client has it.
            let mut said = until(&mut reply, &tokenizer().decode(&ids[..1], false)).await;
            world.engine.let_go_on();
            while let Some(piece) = reply.chunk().await.expect("goes on") {
                said += std::str::from_utf8(&piece).expect("UTF-8");
            }
            let (told, finish) = message(&said, true);
            assert_eq!((told["content"].as_str(), finish.as_str()), (Some(TEXT), Some("stop")));

            // The next turn finds out nothing anew.
            world.engine.will_say("done");
            let next = json!([{"role": "user", "content": "go"}, told, {"role": "user", "content": "more"}]);
            world.ask(&chat(next, true)).await;
            let probed: Vec<String> = world.engine.probed().into_iter().map(|(path, _)| path).collect();
            assert_eq!(probed, ["/v1/chat/completions", "/inference/v1/generate"]);
            let asked = world.engine.asked();
            let calls = world.calls().await;
            assert_eq!((asked.len(), calls.len()), (2, 2));
            for (call, (path, body)) in calls.iter().zip(&asked) {
                assert_eq!(
                    (path.as_str(), call.upstream_api),
                    ("/inference/v1/generate", ClientApi::VllmGenerate)
                );
                assert_eq!(body["token_ids"], json!(call.prompt_token_ids));
                let sampling = &body["sampling_params"];
                assert_eq!((&sampling["temperature"], &sampling["top_k"]), (&json!(1.0), &json!(-1)));
                assert_eq!(
                    (&sampling["logprobs"], sampling.get("max_tokens")),
                    (&json!(0), Some(&Value::Null))
                );
                // Both have it: the engine, or lego's clock.
                assert_eq!(call.weight_spans.as_ref().expect("spans")[0].version, "7");
                let source = if streams == Streams::Newer { IdsSource::Engine } else { IdsSource::SentByUs };
                assert_eq!(call.prompt_ids_source, source);
                assert!(versions(call).iter().all(|version| *version == 7));
            }
            is_exact(&calls[0], &ids);
            assert_eq!(calls[1].parent_call_id, Some(calls[0].call_id));
            // Of the second turn the rows that are held are not asked for, where the server leaves them out.
            let held = u32::try_from(super::all_ids(&calls[0]).len() - 1).expect("small");
            let start = if streams == Streams::Newer { held } else { 0 };
            let starts = calls.iter().map(|call| call.routing.as_ref().expect("routing").shape().start);
            assert_eq!(starts.collect::<Vec<_>>(), [0, start]);
            let asked_from =
                |at: usize| asked[at].1["sampling_params"]["routed_experts_prompt_start"].as_u64();
            let sent = (streams == Streams::Newer).then_some(u64::from(held));
            assert_eq!((asked_from(0), asked_from(1)), (None, sent));
            let built = samples(&lineages(&calls), None, &Samples::default());
            let experts = built.samples[0].routed_experts.clone().expect("routing");
            assert_eq!((built.samples.len(), built.differing_rows), (1, 0));
            assert!(experts.into_whole().is_some(), "no row lacks");
        }
    }
}

#[tokio::test]
async fn without_such_streams_the_reply_is_asked_for_whole_and_has_its_routing() {
    for streams in [Streams::Missing, Streams::Forbidden, Streams::Unrouted, Streams::Gone] {
        let world = world_of(vllm(streams)).await;
        for _ in 0..2 {
            world.engine.will_say(TEXT);
            let (told, _) = message(&world.ask(&question()).await, true);
            assert_eq!(told["content"], TEXT);
        }
        let asked = world.engine.asked();
        assert_eq!(asked.len(), 2);
        for (path, body) in &asked {
            assert_eq!((path.as_str(), &body["stream"]), ("/v1/completions", &json!(false)));
        }
        let calls = world.calls().await;
        let whole: Vec<_> = calls.iter().filter(|call| call.status == CallStatus::Ok).collect();
        // A server that had it when it was probed is asked first.
        assert_eq!((whole.len(), calls.len()), (2, if streams == Streams::Gone { 4 } else { 2 }));
        for call in whole {
            assert!(call.trainable, "{:?}", call.not_trainable_reasons);
            assert_eq!(call.upstream_api, ClientApi::OpenaiCompletions);
            assert_eq!(versions(call).first(), Some(&7));
        }
    }
}

#[tokio::test]
async fn the_probe_is_recorded_with_what_it_sampled() {
    let world = world_of(vllm(Streams::Newer)).await;
    world.engine.will_say(TEXT);
    world.ask(&question()).await;
    let records = world.setup.sink.calls(3).await;
    let probe =
        records.iter().find(|call| call.upstream_api == ClientApi::VllmGenerate).expect("first of the two");
    assert_eq!((probe.kind, probe.status, probe.client_stream), (CallKind::Probe, CallStatus::Ok, true));
    assert_eq!(probe.prompt_token_ids.as_deref(), Some(&[1, 2, 3][..]));
    assert_eq!((probe.completion_token_ids.as_deref(), probe.usage.is_some()), (Some(&[9][..]), true));
    let response: Value = serde_json::from_str(probe.response.as_ref().expect("kept").get()).expect("JSON");
    assert_eq!(response.as_array().map(Vec::len), Some(2), "its events");
}

#[tokio::test]
async fn a_model_without_experts_streams_completions() {
    let world = world_of(Server { has_experts: false, ..vllm(Streams::Newer) }).await;
    world.engine.will_say(TEXT);
    world.ask(&question()).await;
    let (path, body) = &world.engine.asked()[0];
    assert_eq!((path.as_str(), &body["stream"]), ("/v1/completions", &json!(true)));
    assert!(world.engine.probed().is_empty());
}

#[tokio::test]
async fn what_the_endpoint_would_do_otherwise_is_asked_of_completions() {
    let own = || SessionSpec { sampling: SessionSampling::PassThrough, ..spec("s1") };
    let in_full = json!({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "repetition_penalty": 1.0});
    for (spec, more, path) in [
        (spec("s1"), json!({"stop": ["zzz"]}), "/v1/completions"),
        (spec("s1"), json!({"n": 2}), "/v1/completions"),
        // What a client leaves out the model's generation_config says, and there alone.
        (own(), json!({"temperature": 1.0}), "/v1/completions"),
        (own(), in_full, "/inference/v1/generate"),
    ] {
        let world = world_for(vllm(Streams::Newer), spec).await;
        world.engine.will_say(TEXT);
        let mut body = question();
        body.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
        let url = format!("http://{}/sessions/s1/v1/chat/completions", world.setup.address);
        // Of two outputs this engine gives one.
        read(post(&url, &body).await).await;
        assert_eq!(world.engine.asked()[0].0, path, "{more}");
    }
}

#[tokio::test]
async fn a_stream_that_breaks_off_is_recorded_as_far_as_it_came() {
    let ids = tokenizer().encode(TEXT).expect("encodes");
    // Of a connection that broke nothing is said: clients try again.
    for (ends, bytes_per_write, status, says) in [
        (Ends::Error(3), None, CallStatus::UpstreamError, "out of order"),
        (Ends::Error(3), Some(1), CallStatus::UpstreamError, "out of order"),
        (Ends::Cut(3), None, CallStatus::Truncated, ""),
        (Ends::Cut(3), Some(1), CallStatus::Truncated, ""),
    ] {
        let world = world_of(Server { bytes_per_write, ..vllm(Streams::Newer) }).await;
        world.engine.will_say(Says { ends, holds_after: Some(3), ..Says::from(TEXT) });
        let url = format!("http://{}/sessions/s1/v1/chat/completions", world.setup.address);
        let mut response = post(&url, &question()).await;
        let mut reply = until(&mut response, &tokenizer().decode(&ids[..3], false)).await;
        world.engine.let_go_on();
        reply += std::str::from_utf8(&broken(response).await).expect("UTF-8");
        assert!(reply.contains(says) && !reply.contains("[DONE]"), "{reply}");
        assert_eq!(message_so_far(&reply), tokenizer().decode(&ids[..3], false));
        let calls = world.calls().await;
        assert_eq!((calls.len(), calls[0].status), (1, status));
        assert_eq!(calls[0].completion_token_ids.as_deref(), Some(&ids[..3]));
        assert!(!calls[0].trainable && calls[0].routing.is_none());
    }
}

#[tokio::test]
async fn a_client_that_comes_back_gets_the_stream_from_its_first_token() {
    let world = world_of(vllm(Streams::Newer)).await;
    let ids = tokenizer().encode(&format!("{TEXT}<|im_end|>")).expect("encodes");
    world.engine.will_say(Says { holds_after: Some(2), ..Says::from(TEXT) });
    let url = format!("http://{}/sessions/s1/v1/chat/completions", world.setup.address);
    let mut reply = post(&url, &question()).await;
    until(&mut reply, &tokenizer().decode(&ids[..2], false)).await;
    drop(reply);
    left(&world.setup, 1).await;
    let again = post(&url, &question()).await;
    world.engine.let_go_on();
    let said = text(again).await;
    assert_eq!(message(std::str::from_utf8(&said).expect("UTF-8"), true).0["content"], TEXT);
    assert_eq!(world.engine.asked().len(), 1);
    let calls = world.calls().await;
    assert_eq!((calls.len(), calls[0].rejoined), (1, 1));
    is_exact(&calls[0], &ids);
    assert!(versions(&calls[0]).iter().all(|version| *version == 7));
}

#[tokio::test]
async fn a_request_that_the_engine_refuses_is_refused() {
    for status in [400, 503] {
        let world = world_of(vllm(Streams::Newer)).await;
        world.engine.will_say(Says { refuses: Some(status), ..Says::from("") });
        let url = format!("http://{}/sessions/s1/v1/chat/completions", world.setup.address);
        assert_eq!(post(&url, &question()).await.status().as_u16(), status);
        assert_eq!(world.engine.asked().len(), 1, "it is asked once");
        let calls = world.calls().await;
        assert_eq!((calls.len(), calls[0].status), (1, CallStatus::UpstreamError));
    }
}

#[tokio::test]
async fn routing_that_is_not_that_of_the_ids_is_not_taken() {
    let world = world_of(vllm(Streams::Newer)).await;
    world.engine.will_say(Says { spoils_rows: true, ..Says::from(TEXT) });
    world.ask(&question()).await;
    let calls = world.calls().await;
    assert_eq!(
        (&calls[0].routing, calls[0].not_trainable_reasons.as_slice()),
        (&None, &["routing_rows_mismatch".to_owned()][..])
    );
}

#[tokio::test]
async fn clients_of_other_protocols_have_it_live_too() {
    let world = world_of(vllm(Streams::Newer)).await;
    world.engine.will_say(TEXT);
    let body = json!({"model": "m", "max_tokens": 99, "stream": true, "messages": [{"role": "user", "content": "go"}]});
    let url = format!("http://{}/sessions/s1/v1/messages", world.setup.address);
    let reply = text(post(&url, &body).await).await;
    assert!(String::from_utf8_lossy(&reply).contains("message_stop"));
    let (path, asked) = &world.engine.asked()[0];
    assert_eq!(
        (path.as_str(), &asked["sampling_params"]["max_tokens"]),
        ("/inference/v1/generate", &json!(99))
    );
    let calls = world.calls().await;
    assert_eq!(calls[0].client_api, ClientApi::AnthropicMessages);
    assert!(versions(&calls[0]).iter().all(|version| *version == 7));
}
