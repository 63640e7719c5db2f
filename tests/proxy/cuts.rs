//! Every reply of `tests/fixtures/wire`, from the upstream of every served protocol, sent in two writes at every byte
//! and broken off at every byte: the record and the client's bytes are right.
//!
//! Right means: a reply in two writes gives the bytes and the record of the reply in one. Of a reply that breaks off,
//! the record has exactly what the whole events before the break say, and says how it ended; the client has a prefix
//! of the whole reply's bytes, no end that is not the upstream's, and a connection that breaks. Where the break lies
//! after the finish reason, the reply is whole.
//!
//! By default every byte is for the fixtures of a protocol's own dialect; elsewhere it is every 97th byte and all
//! bytes around the ends of events. `LEGO_TEST_FULL=1` takes every byte everywhere.

use std::sync::{Arc, Mutex};

use lego::config::{Relay, UpstreamResponses};
use lego::record::{Call, CallStatus, UpstreamKind};
use serde_json::{Value, json};

mod fixtures;
mod oracle;
mod wire;

use fixtures::{ALL, reply};
use oracle::Case;
use wire::{Client, How, Reply, Rig};

/// Calls at a time.
const WORKERS: usize = 8;
const STRIDE: usize = 97;

/// A protocol that lego serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    Chat,
    Completions,
    Messages,
    Responses,
    /// SGLang's own.
    Generate,
}

/// The prompt of the fixtures of `/generate`.
const PROMPT: [u32; 12] = [151_644, 872, 198, 5001, 5002, 5003, 5004, 151_645, 198, 151_644, 77_091, 198];

impl Api {
    /// Those that every engine that speaks chat answers.
    const ALL: [Self; 4] = [Self::Chat, Self::Completions, Self::Messages, Self::Responses];

    const fn route(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Messages => "/v1/messages",
            Self::Responses => "/v1/responses",
            Self::Generate => "/generate",
        }
    }

    fn request(self, is_stream: bool) -> Value {
        let mut body = match self {
            Self::Chat => json!({"model": "toy-moe-8x", "messages": [{"role": "user", "content": "hi"}]}),
            Self::Completions => json!({"model": "toy-moe-8x", "prompt": "hi"}),
            Self::Messages => {
                json!({"model": "toy-moe-8x", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]})
            }
            Self::Responses => json!({"model": "toy-moe-8x", "input": "hi", "store": false}),
            Self::Generate => json!({"input_ids": PROMPT}),
        };
        body["stream"] = is_stream.into();
        body
    }

    /// To an SGLang server, with the ids of the prompt.
    fn of_ids(self, is_stream: bool) -> Value {
        let mut body = self.request(is_stream);
        if self == Self::Completions {
            body["prompt"] = json!(PROMPT);
        }
        body
    }

    /// A request that leaves lego nothing to add.
    fn asking_for_all(self) -> Value {
        let mut body = self.request(true);
        body["logprobs"] = if self == Self::Completions { json!(0) } else { json!(true) };
        body["return_token_ids"] = json!(true);
        body["return_weight_versions"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        body
    }
}

/// Which bytes are tried.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    EveryByte,
    Some,
}

fn points(body: &[u8], which: Where) -> Vec<usize> {
    if which == Where::EveryByte || std::env::var_os("LEGO_TEST_FULL").is_some() {
        return (0..=body.len()).collect();
    }
    let is_edge = |at: &usize| {
        let around = &body[at.saturating_sub(3)..body.len().min(at + 3)];
        around.windows(2).any(|pair| pair == b"\n\n")
    };
    (0..=body.len()).filter(|at| at % STRIDE == 0 || *at == body.len() || is_edge(at)).collect()
}

/// Sends the case's reply in each of these ways, and has each looked at.
async fn sweep(rig: &Arc<Rig>, case: Case, which: Where) {
    let case = Arc::new(case.with_baselines(rig).await);
    let mut all = Vec::new();
    for at in points(case.sent(), which) {
        all.extend([How::Split(at), How::Broken(at)]);
        if at % 3 == 0 {
            all.push(How::Ended(at));
        }
    }
    let all = Arc::new(Mutex::new(all.into_iter()));
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..WORKERS {
        let (rig, case, all) = (Arc::clone(rig), Arc::clone(&case), Arc::clone(&all));
        workers.spawn(async move {
            let mut client = Client::new(rig.proxy);
            loop {
                let Some(how) = all.lock().expect("a list").next() else { return };
                case.look_at(&rig, &mut client, how).await;
            }
        });
    }
    while let Some(ended) = workers.join_next().await {
        ended.expect("as it should be");
    }
}

async fn rig(kind: UpstreamKind, relay: Relay, names: &[&'static str]) -> Arc<Rig> {
    let replies = names.iter().map(|name| reply(name, kind)).collect();
    let is_own = names.iter().all(|name| name.starts_with("responses"));
    let responses = if is_own { UpstreamResponses::PassThrough } else { UpstreamResponses::Translate };
    Arc::new(Rig::new(kind, relay, responses, replies).await)
}

/// These fixtures of this dialect, streamed, in one protocol.
async fn streams(kind: UpstreamKind, api: Api, names: &[&'static str], which: Where) {
    let rig = rig(kind, Relay::Live, names).await;
    for (number, name) in names.iter().enumerate() {
        let case = Case::new(name, number, kind, api, api.request(true));
        sweep(&rig, case, which).await;
    }
}

#[test]
fn every_fixture_is_here() {
    let folder = format!("{}/tests/fixtures/wire", env!("CARGO_MANIFEST_DIR"));
    let names = std::fs::read_dir(folder).expect("folder").map(|file| file.expect("readable").file_name());
    for name in names.map(|name| name.into_string().expect("text")) {
        assert!(ALL.contains(&name.as_str()) || name == "sse_corner_cases.expected.json", "{name}");
    }
}

const VLLM: [&str; 4] = [
    "vllm_chat_stream.sse",
    "vllm_chat_tools_stream.sse",
    "vllm_chat_stream_abort.sse",
    "vllm_chat_stream_error.sse",
];

async fn vllm_in_chat(names: &[&'static str]) {
    let rig = rig(UpstreamKind::Vllm, Relay::Live, names).await;
    for (number, name) in names.iter().enumerate() {
        let n = if *name == "vllm_chat_two_choices.sse" { 2 } else { 1 };
        for (mut body, which) in
            [(Api::Chat.request(true), Where::EveryByte), (Api::Chat.asking_for_all(), Where::Some)]
        {
            body["n"] = json!(n);
            sweep(&rig, Case::new(name, number, UpstreamKind::Vllm, Api::Chat, body), which).await;
        }
    }
}

#[tokio::test]
async fn streams_of_vllm_in_chat() {
    vllm_in_chat(&[VLLM[0], VLLM[2], VLLM[3], "vllm_chat_two_choices.sse"]).await;
}

#[tokio::test]
async fn tools_of_vllm_in_chat() {
    vllm_in_chat(&[VLLM[1]]).await;
}

#[tokio::test]
async fn streams_of_vllm_in_messages() {
    streams(UpstreamKind::Vllm, Api::Messages, &VLLM, Where::Some).await;
}

#[tokio::test]
async fn streams_of_vllm_in_responses() {
    streams(UpstreamKind::Vllm, Api::Responses, &VLLM, Where::Some).await;
}

#[tokio::test]
async fn streams_of_vllm_in_completions() {
    let names = ["vllm_completions_stream.sse"];
    streams(UpstreamKind::Vllm, Api::Completions, &names, Where::EveryByte).await;
}

#[tokio::test]
async fn streams_of_sglang() {
    let names = ["sglang_chat_stream_sglext.sse"];
    streams(UpstreamKind::Sglang, Api::Chat, &names, Where::EveryByte).await;
    for api in [Api::Messages, Api::Responses] {
        streams(UpstreamKind::Sglang, api, &names, Where::Some).await;
    }
}

const NATIVE: [&str; 2] = ["sglang_generate_stream.sse", "sglang_generate_stream_incremental.sse"];

#[tokio::test]
async fn streams_of_sglangs_native_endpoint_in_completions() {
    let rig = rig(UpstreamKind::Sglang, Relay::Auto, &NATIVE).await;
    for (number, name) in NATIVE.iter().enumerate() {
        let mut asking = Api::Completions.of_ids(true);
        asking["stream_options"] = json!({"include_usage": true});
        asking["return_token_ids"] = json!(true);
        asking["logprobs"] = json!(0);
        for (body, which) in [(Api::Completions.of_ids(true), Where::EveryByte), (asking, Where::Some)] {
            sweep(&rig, Case::new(name, number, UpstreamKind::Sglang, Api::Completions, body), which).await;
        }
    }
}

#[tokio::test]
async fn streams_of_sglangs_native_endpoint_in_its_own_protocol() {
    let rig = rig(UpstreamKind::Sglang, Relay::Auto, &NATIVE).await;
    for (number, name) in NATIVE.iter().enumerate() {
        let mut asking = Api::Generate.of_ids(true);
        asking["return_logprob"] = json!(true);
        for (body, which) in [(Api::Generate.of_ids(true), Where::EveryByte), (asking, Where::Some)] {
            sweep(&rig, Case::new(name, number, UpstreamKind::Sglang, Api::Generate, body), which).await;
        }
    }
}

#[tokio::test]
async fn bodies_of_sglangs_native_endpoint() {
    let name = "sglang_generate.json";
    let rig = rig(UpstreamKind::Sglang, Relay::Auto, &[name]).await;
    for api in [Api::Completions, Api::Generate] {
        sweep(&rig, Case::new(name, 0, UpstreamKind::Sglang, api, api.of_ids(false)), Where::EveryByte).await;
    }
}

#[tokio::test]
async fn every_other_fixture_from_sglangs_native_endpoint() {
    let rig = rig(UpstreamKind::Sglang, Relay::Auto, &ALL).await;
    for api in [Api::Completions, Api::Generate] {
        for (number, name) in ALL.iter().enumerate().filter(|(_, name)| !name.starts_with("sglang_generate"))
        {
            let mut body = api.of_ids(name.ends_with(".sse"));
            if api == Api::Generate {
                // Nothing is left for lego to add.
                body["return_logprob"] = json!(true);
            }
            let case = Case::new(name, number, UpstreamKind::Sglang, api, body).foreign();
            sweep(&rig, case, Where::Some).await;
        }
    }
}

#[tokio::test]
async fn streams_of_a_gateway() {
    let names = ["openai_chat_stream_nologprobs.sse"];
    streams(UpstreamKind::Openai, Api::Chat, &names, Where::EveryByte).await;
    for api in [Api::Messages, Api::Responses] {
        streams(UpstreamKind::Openai, api, &names, Where::Some).await;
    }
}

#[tokio::test]
async fn streams_of_a_server_of_messages() {
    let names = ["anthropic_stream.sse", "anthropic_stream_error.sse", "anthropic_tools_stream.sse"];
    streams(UpstreamKind::Anthropic, Api::Messages, &names, Where::EveryByte).await;
}

#[tokio::test]
async fn streams_of_a_server_of_responses() {
    streams(UpstreamKind::Openai, Api::Responses, &["responses_stream.sse"], Where::EveryByte).await;
}

#[tokio::test]
async fn bodies_in_every_protocol() {
    let all = [
        (UpstreamKind::Vllm, "vllm_chat.json", Api::Chat),
        (UpstreamKind::Vllm, "vllm_chat_routed.json", Api::Chat),
        (UpstreamKind::Sglang, "sglang_chat.json", Api::Chat),
        (UpstreamKind::Vllm, "vllm_chat.json", Api::Messages),
        (UpstreamKind::Vllm, "vllm_chat.json", Api::Responses),
        (UpstreamKind::Vllm, "vllm_completions.json", Api::Completions),
        (UpstreamKind::Openai, "responses.json", Api::Responses),
    ];
    for (kind, name, api) in all {
        let rig = rig(kind, Relay::Live, &[name]).await;
        sweep(&rig, Case::new(name, 0, kind, api, api.request(false)), Where::Some).await;
    }
}

#[tokio::test]
async fn bodies_that_become_streams() {
    for (kind, name) in
        [(UpstreamKind::Vllm, "vllm_chat_routed.json"), (UpstreamKind::Sglang, "sglang_chat.json")]
    {
        let rig = rig(kind, Relay::Destreamed, &[name]).await;
        for api in [Api::Chat, Api::Messages, Api::Responses] {
            sweep(&rig, Case::new(name, 0, kind, api, api.request(true)), Where::Some).await;
        }
    }
}

/// A reply that is none of its route's dialect: it is relayed as what it is, or refused, whatever the cut.
#[tokio::test]
async fn every_fixture_where_it_does_not_belong() {
    let rig = rig(UpstreamKind::Vllm, Relay::Live, &ALL).await;
    for api in Api::ALL {
        let own = if api == Api::Completions { "vllm_completions" } else { "vllm_chat" };
        for (number, name) in ALL.iter().enumerate() {
            if !name.starts_with(own) {
                let is_stream = name.ends_with(".sse");
                let is_chat = matches!(api, Api::Chat | Api::Completions);
                let body = if is_stream && is_chat { api.asking_for_all() } else { api.request(is_stream) };
                let case = Case::new(name, number, UpstreamKind::Vllm, api, body).foreign();
                sweep(&rig, case, Where::Some).await;
            }
        }
    }
}

#[tokio::test]
async fn answers_that_are_errors() {
    let own = r#"{"error":{"message":"This model's maximum context length is 8 tokens","type":"BadRequestError","param":null,"code":400}}"#;
    let anthropic = r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#;
    for (kind, apis) in [
        (UpstreamKind::Vllm, &Api::ALL[..]),
        (UpstreamKind::Anthropic, &[Api::Messages][..]),
        (UpstreamKind::Openai, &[Api::Responses][..]),
        (UpstreamKind::Sglang, &[Api::Completions, Api::Generate][..]),
    ] {
        let error =
            |status, text: &str| Reply { status, is_stream: false, body: text.into(), plain: text.into() };
        let replies = vec![error(400, own), error(529, anthropic), error(503, "<html>busy</html>")];
        let responses = UpstreamResponses::PassThrough;
        let rig = Arc::new(Rig::new(kind, Relay::Live, responses, replies.clone()).await);
        for api in apis {
            for (number, reply) in replies.iter().enumerate() {
                for is_stream in [false, true] {
                    let is_native = kind == UpstreamKind::Sglang;
                    let body = if is_native { api.of_ids(is_stream) } else { api.request(is_stream) };
                    let case = Case::of(reply.clone(), number, kind, *api, body);
                    sweep(&rig, case, Where::EveryByte).await;
                }
            }
        }
    }
}

/// The two writes do arrive apart: at the end of each event the client has what came before it, in a piece of its own.
#[tokio::test]
async fn a_reply_in_two_writes_is_read_in_two() {
    let name = "openai_chat_stream_nologprobs.sse";
    let rig = rig(UpstreamKind::Openai, Relay::Live, &[name]).await;
    let body = fixtures::bytes(name);
    let mut client = Client::new(rig.proxy);
    let request = Api::Chat.asking_for_all().to_string();
    let events = fixtures::events(&body);
    let finish = events.iter().position(|(event, _)| event["choices"][0]["finish_reason"].is_string());
    for (_, end) in &events[..finish.expect("a finish reason")] {
        let answer = client.call(Api::Chat.route(), &request, 0, How::Split(*end)).await;
        assert_eq!(answer.body, body);
        assert!(answer.ends.contains(end), "{end} is not among {:?}", answer.ends);
    }
}

/// A choice that had its end before the others broke off is whole.
#[tokio::test]
async fn a_choice_that_ended_before_the_break_is_whole() {
    let name = "vllm_chat_two_choices.sse";
    let rig = rig(UpstreamKind::Vllm, Relay::Live, &[name]).await;
    let body = fixtures::bytes(name);
    let (_, end) = fixtures::events(&body)[5];
    let mut request = Api::Chat.request(true);
    request["n"] = json!(2);
    let mut client = Client::new(rig.proxy);
    let answer = client.call(Api::Chat.route(), &request.to_string(), 0, How::Broken(end)).await;
    assert!(!answer.is_whole);
    let calls: Vec<Call> = rig.store.take(&answer.call_id);
    let ended: Vec<_> = calls.iter().map(|call| (call.status, call.finish_reason.as_deref())).collect();
    assert_eq!(ended, [(CallStatus::Ok, Some("stop")), (CallStatus::Truncated, None)]);
}
