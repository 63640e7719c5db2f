//! SGLang's native endpoint: behind `/v1/completions`, whose clients get all that it tells exactly recorded.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lego::proxy::ProxyOptions;
use lego::record::{
    Call, CallKind, CallStatus, ClientApi, IdsSource, LogprobSemantics, UpstreamKind, WeightSource,
};
use lego::upstream::Upstream;
use lego::upstream::routing::RoutingHint;
use serde_json::{Value, json};

use crate::mock::{Mock, Script};
use crate::rejoin::left;
use crate::setup::{PATIENCE, Setup, post, spec, text, timeouts};

mod faults;
mod long;
mod own;
mod server;
mod without;

use server::{Routing, Server, Style, TEXTS, ids_of, logprob_of, sampled_ids};

/// A proxy in front of such a server.
struct Rig {
    setup: Setup,
    server: Server,
}

impl Rig {
    async fn new(mut options: ProxyOptions, style: Style, probes: bool) -> Self {
        options.retries.most = 0;
        options.probes_upstream = probes;
        let server = Server::start(style).await;
        let upstream = Upstream::http(&server.url, UpstreamKind::Sglang, None, timeouts()).expect("upstream");
        let upstream = upstream.with_routing_hint(Some(RoutingHint { layers: Some(2), top_k: None }));
        let setup = Setup::as_told(upstream, options, Mock::in_process(Script::default())).await;
        Self { setup, server }
    }

    async fn stand_alone(style: Style) -> Self {
        Self::new(ProxyOptions::stand_alone(), style, false).await
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.setup.address)
    }

    async fn complete(&self, body: &Value) -> reqwest::Response {
        post(&self.url("/v1/completions"), body).await
    }
}

/// One completions call of a training session: its records, the client's reply, and the rig.
async fn train(style: Style, body: &Value) -> (Vec<Arc<Call>>, Vec<u8>, Rig) {
    let rig = Rig::new(ProxyOptions::trainer("policy"), style, false).await;
    let session = rig.setup.proxy.open_session(spec("s1")).expect("open");
    let response = post(&rig.url("/sessions/s1/v1/completions"), body).await;
    assert_eq!(response.status(), 200);
    let reply = text(response).await.to_vec();
    let mut calls = session.close().await.calls;
    calls.sort_by_key(|call| call.choice_index);
    (calls, reply, rig)
}

/// The chunks of a stream, which ends as it should.
fn chunks(stream: &[u8]) -> Vec<Value> {
    let stream = std::str::from_utf8(stream).expect("text");
    let blocks: Vec<&str> = stream.split_terminator("\n\n").collect();
    assert_eq!(blocks.last(), Some(&"data: [DONE]"), "{stream}");
    let data =
        |block: &&str| serde_json::from_str(block.strip_prefix("data: ").expect("data")).expect("JSON");
    blocks[..blocks.len() - 1].iter().map(data).collect()
}

/// A choice as a client puts it together.
#[derive(Debug, Default, PartialEq)]
struct Said {
    text: String,
    finish: Option<String>,
}

/// The choices of a reply, streamed or not.
fn said(reply: &[u8], is_stream: bool) -> Vec<Said> {
    let parts = if is_stream { chunks(reply) } else { vec![serde_json::from_slice(reply).expect("JSON")] };
    let mut all: Vec<Said> = Vec::new();
    for part in parts {
        assert_eq!(part["object"], "text_completion");
        assert_eq!(part["model"], "toy");
        for choice in part["choices"].as_array().expect("choices") {
            let index = choice["index"].as_u64().expect("an index") as usize;
            all.resize_with(all.len().max(index + 1), Said::default);
            assert_eq!(all[index].finish, None, "nothing follows the finish reason");
            all[index].text.push_str(choice["text"].as_str().expect("text"));
            all[index].finish = choice["finish_reason"].as_str().map(str::to_owned);
            assert!(choice["logprobs"].is_null() && choice.get("token_ids").is_none(), "{choice}");
        }
    }
    all
}

fn is_exact(call: &Call, prompt: &[u32]) {
    let ids = sampled_ids(call.choice_index as usize);
    let logprobs: Vec<Option<f32>> = ids.iter().map(|id| Some(logprob_of(*id) as f32)).collect();
    assert_eq!(call.not_trainable_reasons, Vec::<String>::new());
    assert_eq!(call.status, CallStatus::Ok);
    assert_eq!(
        (call.client_api, call.upstream_api),
        (ClientApi::OpenaiCompletions, ClientApi::SglangGenerate)
    );
    assert_eq!(call.prompt_token_ids.as_deref(), Some(prompt));
    assert_eq!(call.completion_token_ids.as_ref(), Some(&ids));
    assert_eq!(call.completion_ids_source, IdsSource::Engine);
    assert_eq!(call.completion_logprobs.as_ref(), Some(&logprobs));
    assert_eq!(call.logprob_semantics, LogprobSemantics::RawT1);
    assert_eq!(call.text.as_deref(), Some(TEXTS.concat().as_str()));
    assert_eq!(call.finish_reason.as_deref(), Some("stop"));
    assert_eq!(call.weight_source, WeightSource::ReplySingle);
    assert_eq!(call.weight_spans.as_ref().expect("spans")[0].version, "step-7");
    assert!(call.client_request.is_some() && call.upstream_request.is_some() && call.response.is_some());
}

#[tokio::test]
async fn law_12_every_form_of_a_prompt_is_sampled_as_lego_says_and_recorded_exactly() {
    let (a, b) = (ids_of("ab é"), ids_of("c"));
    let prompts: [(Value, Vec<&[u32]>); 6] = [
        (json!("ab é"), vec![&a]),
        (json!(["ab é"]), vec![&a]),
        (json!(a), vec![&a]),
        (json!([a]), vec![&a]),
        (json!(["ab é", "c"]), vec![&a, &b]),
        (json!([a, b]), vec![&a, &b]),
    ];
    for (prompt, expected) in prompts {
        for n in [1, 2] {
            for (is_stream, incremental) in [(false, false), (true, false), (true, true)] {
                let body = json!({"model": "toy", "prompt": prompt, "n": n, "stream": is_stream, "max_tokens": 9,
                    "temperature": 0.3, "top_p": 0.5});
                let (calls, reply, rig) = train(Style { incremental, ..Style::default() }, &body).await;
                let about = format!("{body} {incremental}");
                let asked = rig.server.asked("/generate");
                assert_eq!(asked.len(), 1, "{about}");
                let neutral = json!({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0});
                assert_eq!(Server::sampled(&asked[0]), neutral, "{about}");
                assert_eq!(asked[0]["sampling_params"]["max_new_tokens"], 9);
                assert_eq!(calls.len(), expected.len() * n, "{about}");
                for call in &calls {
                    is_exact(call, expected[call.choice_index as usize / n]);
                    assert_eq!(call.sampling_requested.temperature, Some(0.3));
                    assert_eq!(call.sampling_sent.temperature, Some(1.0));
                    assert_eq!(call.client_stream, is_stream);
                }
                let said = said(&reply, is_stream);
                assert_eq!(said.len(), calls.len(), "{about}");
                for said in said {
                    assert_eq!(
                        (said.text, said.finish.as_deref()),
                        (TEXTS.concat(), Some("stop")),
                        "{about}"
                    );
                }
            }
        }
    }
}

#[tokio::test]
async fn prompt_ids_are_the_engines_or_those_that_it_was_sent() {
    let ids = ids_of("abc");
    for (prompt, is_stream, style, source, tokenizes) in [
        (json!("abc"), false, Style::default(), IdsSource::Engine, false),
        // A stream would have them in every event.
        (json!("abc"), true, Style::default(), IdsSource::SentByUs, true),
        (json!("abc"), true, Style { has_tokenizer: false, ..Style::default() }, IdsSource::Engine, true),
        (json!(ids), true, Style::default(), IdsSource::SentByUs, false),
        (json!(ids), false, Style::default(), IdsSource::SentByUs, false),
    ] {
        let body = json!({"model": "toy", "prompt": prompt, "stream": is_stream});
        let (calls, _, rig) = train(style, &body).await;
        is_exact(&calls[0], &ids);
        assert_eq!(calls[0].prompt_ids_source, source, "{body}");
        assert_eq!(rig.server.asked("/tokenize").len(), usize::from(tokenizes), "{body}");
    }
    // Nobody tells them: recorded, and not trained.
    let old = Style { has_tokenizer: false, tells_prompt: false, ..Style::default() };
    let (calls, _, _) = train(old.clone(), &json!({"model": "toy", "prompt": "abc"})).await;
    assert_eq!((calls[0].prompt_ids_source, &calls[0].prompt_token_ids), (IdsSource::Absent, &None));
    assert_eq!(calls[0].not_trainable_reasons, ["no_prompt_token_ids"]);
    // An older release with a tokenizer is found out by the probe.
    let rig = Rig::new(ProxyOptions::stand_alone(), Style { has_tokenizer: true, ..old }, true).await;
    text(rig.complete(&json!({"model": "toy", "prompt": "abc"})).await).await;
    let call = rig.setup.sink.calls(2).await.pop().expect("the call after the probe");
    assert_eq!((call.prompt_token_ids, call.prompt_ids_source), (Some(ids), IdsSource::SentByUs));
}

#[tokio::test]
async fn a_client_that_asks_gets_log_probs_and_ids_in_the_protocols_own_form() {
    for (is_stream, incremental) in [(false, false), (true, false), (true, true)] {
        let body = json!({"model": "toy", "prompt": "abc", "logprobs": 2, "return_token_ids": true, "stream": is_stream,
            "stream_options": {"include_usage": true}});
        let (_, reply, _) = train(Style { incremental, ..Style::default() }, &body).await;
        let parts =
            if is_stream { chunks(&reply) } else { vec![serde_json::from_slice(&reply).expect("JSON")] };
        let joined = |path: &[&str]| -> Vec<Value> {
            let choices = parts.iter().filter_map(|part| part["choices"].get(0));
            let list = |choice: &Value| path.iter().fold(choice.clone(), |value, name| value[*name].clone());
            choices.flat_map(|choice| list(choice).as_array().cloned().unwrap_or_default()).collect()
        };
        let ids = sampled_ids(0);
        assert_eq!(joined(&["token_ids"]), ids.iter().map(|id| json!(id)).collect::<Vec<_>>());
        assert_eq!(joined(&["prompt_token_ids"]), [json!(97), json!(98), json!(99)]);
        let values: Vec<Value> = ids.iter().map(|id| json!(logprob_of(*id))).collect();
        assert_eq!(joined(&["logprobs", "token_logprobs"]), values);
        assert_eq!(joined(&["logprobs", "tokens"]), TEXTS.map(Value::from));
        assert_eq!(
            joined(&["logprobs", "top_logprobs"])[2],
            json!({"é🎉": logprob_of(ids[2]), "other": -5.5})
        );
        let usage = parts.iter().find_map(|part| part.get("usage").filter(|usage| !usage.is_null()));
        let usage = usage.expect("usage");
        assert_eq!((&usage["prompt_tokens"], &usage["total_tokens"]), (&json!(3), &json!(7)));
    }
}

#[tokio::test]
async fn both_forms_of_the_stream_give_the_client_the_same_and_the_record_all_of_it() {
    let body = json!({"model": "toy", "prompt": [[5], [6, 7]], "n": 2, "stream": true});
    let (mut seen, fixed) = (Vec::new(), lego::record::CallId::now());
    for incremental in [false, true] {
        let (calls, reply, _) = train(Style { incremental, ..Style::default() }, &body).await;
        let kept: Vec<Value> =
            serde_json::from_str(calls[0].response.as_ref().expect("kept").get()).expect("JSON");
        // What a later event says again is not kept twice.
        assert_eq!(kept.len(), if incremental { 16 } else { 4 });
        let mut chunks = chunks(&reply);
        chunks.iter_mut().for_each(|chunk| drop(chunk.as_object_mut().expect("object").remove("created")));
        let record = |call: &Arc<Call>| {
            let mut call = (**call).clone();
            (call.received_at, call.ttft_us, call.duration_us, call.response) = (0, None, 0, None);
            call.call_id = fixed;
            serde_json::to_string(&call).expect("JSON")
        };
        seen.push((chunks, calls.iter().map(record).collect::<Vec<_>>()));
    }
    assert_eq!(seen[0], seen[1]);
}

/// Reads a stream until it has said `needle`.
async fn until(response: &mut reqwest::Response, needle: &str) -> String {
    let mut seen = String::new();
    while !seen.contains(needle) {
        let piece = tokio::time::timeout(PATIENCE, response.chunk()).await.expect("in time");
        seen.push_str(&String::from_utf8_lossy(&piece.expect("piece").expect("more")));
    }
    seen
}

#[tokio::test]
async fn tokens_reach_the_client_before_the_next_ones_are_sampled() {
    for incremental in [false, true] {
        let rig = Rig::stand_alone(Style { incremental, waits: Some(1), ..Style::default() }).await;
        let mut response = rig.complete(&json!({"model": "toy", "prompt": [5], "stream": true})).await;
        let begun = until(&mut response, "\"text\":\"H\"").await;
        rig.server.go_on();
        let rest = text(response).await;
        let all = [begun.as_bytes(), &rest].concat();
        assert_eq!(said(&all, true)[0].text, TEXTS.concat());
    }
}

#[tokio::test]
async fn law_4_the_finish_reason_waits_for_the_store() {
    for is_stream in [false, true] {
        let rig = Rig::stand_alone(Style::default()).await;
        rig.setup.sink.gate.send_replace(false);
        let mut entered = rig.setup.sink.entered.subscribe();
        let reading = async {
            let mut response =
                rig.complete(&json!({"model": "toy", "prompt": [5], "stream": is_stream})).await;
            let needle = if is_stream { "\"finish_reason\":\"stop\"" } else { "{" };
            until(&mut response, needle).await;
            rig.setup.sink.is_durable.load(Ordering::SeqCst)
        };
        let (was_durable, ()) = tokio::join!(reading, async {
            entered.wait_for(|n| *n > 0).await.expect("sink");
            rig.setup.sink.gate.send_replace(true);
        });
        assert!(was_durable);
    }
}

fn event(text: &str, ids: &[u32], total: usize, more: Value) -> String {
    let pairs: Vec<Value> = ids.iter().map(|id| json!([-0.5, id, null])).collect();
    let mut meta = json!({"id": "r", "prompt_tokens": 1, "completion_tokens": total, "finish_reason": null,
        "output_token_logprobs": pairs});
    meta.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
    json!({"text": text, "output_ids": ids, "meta_info": meta}).to_string()
}

#[tokio::test]
async fn a_server_without_the_endpoint_and_what_only_its_own_can_do_go_to_its_own_completions() {
    let rig =
        Rig::new(ProxyOptions::stand_alone(), Style { has_generate: false, ..Style::default() }, true).await;
    for is_stream in [true, false] {
        let reply =
            text(rig.complete(&json!({"model": "toy", "prompt": "abc", "stream": is_stream})).await).await;
        assert_eq!(said(&reply, is_stream)[0].text, "own");
    }
    let calls = rig.setup.sink.calls(3).await;
    let seen: Vec<_> = calls.iter().map(|call| (call.kind, call.upstream_api, call.http_status)).collect();
    let own = (CallKind::Unknown, ClientApi::OpenaiCompletions, 200);
    assert_eq!(seen, [(CallKind::Probe, ClientApi::SglangGenerate, 404), own, own]);
    assert_eq!((rig.server.probes(), rig.server.asked("/v1/completions").len()), (1, 2));

    let rig = Rig::stand_alone(Style::default()).await;
    let echo = json!({"model": "toy", "prompt": "abc", "echo": true});
    assert_eq!(said(&text(rig.complete(&echo).await).await, false)[0].text, "own");
    assert_eq!(rig.server.asked("/v1/completions")[0]["echo"], true);
    assert!(rig.server.asked("/generate").is_empty());
}

#[tokio::test]
async fn c16_routing_is_captured_where_the_server_gives_it_and_asked_for_nowhere_else() {
    for (routing, probes) in [(Routing::Gives, 1), (Routing::Ignores, 1), (Routing::Refuses, 2)] {
        for is_stream in [false, true] {
            let style = Style { routing, ..Style::default() };
            let rig = Rig::new(ProxyOptions::trainer("policy"), style, true).await;
            let session = rig.setup.proxy.open_session(spec("s1")).expect("open");
            let body = json!({"model": "toy", "prompt": [[5], [6, 7]], "stream": is_stream});
            let reply = text(post(&rig.url("/sessions/s1/v1/completions"), &body).await).await;
            assert!(!String::from_utf8_lossy(&reply).contains("routed_experts"));
            assert_eq!(rig.server.probes(), probes);
            let asked = &rig.server.asked("/generate")[0];
            assert_eq!(asked["return_routed_experts"] == true, routing == Routing::Gives);
            for call in session.close().await.calls {
                is_exact(&call, if call.choice_index == 0 { &[5] } else { &[6, 7] });
                let rows = call.routing.as_ref().map(|routing| routing.shape().rows);
                let expected = call.prompt_token_ids.as_ref().expect("ids").len() as u32 + 3;
                assert_eq!(rows, (routing == Routing::Gives).then_some(expected));
                if let Some(routing) = &call.routing {
                    assert_eq!((routing.shape().layers, routing.shape().top_k), (2, 2));
                    assert!(routing.ids().eq((0..expected * 4).map(|at| at % 8)));
                }
            }
        }
    }
}

#[tokio::test]
async fn fixtures_of_both_streams_are_read_whole() {
    let streams = [
        include_str!("../fixtures/wire/sglang_generate_stream.sse"),
        include_str!("../fixtures/wire/sglang_generate_stream_incremental.sse"),
    ];
    for (number, stream) in streams.into_iter().enumerate() {
        let data =
            stream.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
        let script = Some(data.map(str::to_owned).collect());
        let body = json!({"model": "toy", "prompt": (0..12).collect::<Vec<u32>>(), "stream": true});
        let (calls, reply, _) = train(Style { script, ..Style::default() }, &body).await;
        let call = &calls[0];
        assert_eq!(said(&reply, true), [Said { text: "Hello! 🎉".into(), finish: Some("stop".into()) }]);
        assert_eq!(call.completion_token_ids, Some(vec![9707, 0, 220, 144_848, 144_849, 151_645]));
        let first = call.completion_logprobs.as_ref().expect("log-probs")[0].expect("a value");
        assert_eq!(first.to_bits(), (-0.216_000_005_602_836_6_f64 as f32).to_bits());
        let source = if number == 0 { WeightSource::ReplySpans } else { WeightSource::ReplySingle };
        assert_eq!(call.weight_source, source);
        let spans = call.weight_spans.as_ref().expect("spans");
        assert_eq!((spans[0].version.as_str(), spans[0].start, spans[0].end), ("step-42", 0, 6));
        let shape = *call.routing.as_ref().expect("routing").shape();
        assert_eq!((shape.rows, shape.layers, shape.top_k), (17, 2, 4));
        assert_eq!(call.not_trainable_reasons, Vec::<String>::new());
    }
}

#[tokio::test]
async fn a13_a_client_that_comes_back_has_the_stream_from_its_first_token_on() {
    for incremental in [false, true] {
        let mut options = ProxyOptions::stand_alone();
        options.retry_grace = 10 * PATIENCE;
        let style = Style { incremental, waits: Some(3), ..Style::default() };
        let rig = Rig::new(options, style, false).await;
        let body = json!({"model": "toy", "prompt": [5], "stream": true});
        let mut response = rig.complete(&body).await;
        until(&mut response, "é🎉").await;
        drop(response);
        left(&rig.setup, 1).await;
        let mut response = rig.complete(&body).await;
        let begun = until(&mut response, "é🎉").await;
        rig.server.go_on();
        let all = [begun.as_bytes(), &text(response).await].concat();
        assert_eq!(said(&all, true), [Said { text: TEXTS.concat(), finish: Some("stop".into()) }]);
        assert_eq!(rig.server.asked("/generate").len(), 1);
        let call = &rig.setup.sink.calls(1).await[0];
        assert_eq!((call.status, call.rejoined), (CallStatus::Ok, 1));
        assert_eq!(call.completion_token_ids, Some(sampled_ids(0)));
    }
}

/// A09: what is sent while the upstream is silent is of the client's protocol.
#[tokio::test]
async fn a09_keep_alives_of_completions_are_empty_chunks_of_completions() {
    for kind in [UpstreamKind::Sglang, UpstreamKind::Vllm] {
        let server = Server::start(Style { waits: Some(0), ..Style::default() }).await;
        let upstream = Upstream::http(&server.url, kind, None, timeouts()).expect("upstream");
        let mut options = ProxyOptions::stand_alone();
        options.keep_alive = Some(Duration::from_millis(20));
        let setup = Setup::in_front_of(upstream, options, Mock::in_process(Script::default())).await;
        let body = json!({"model": "toy", "prompt": [5], "stream": true});
        let mut response = post(&format!("http://{}/v1/completions", setup.address), &body).await;
        let first = until(&mut response, "\n\n").await;
        let chunk: Value =
            serde_json::from_str(first.strip_prefix("data: ").expect("data").trim()).expect("JSON");
        assert_eq!((&chunk["object"], &chunk["choices"][0]["text"]), (&json!("text_completion"), &json!("")));
        assert!(chunk["choices"][0].get("delta").is_none());
        server.go_on();
        let all = [first.as_bytes(), &text(response).await].concat();
        let said = said(&all, true);
        let expected = if kind == UpstreamKind::Sglang { TEXTS.concat() } else { "own".to_owned() };
        assert_eq!((said[0].text.as_str(), said[0].finish.as_deref()), (expected.as_str(), Some("stop")));
    }
}
