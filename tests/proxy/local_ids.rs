//! A gateway that gives no ids: what a local tokenizer fills in, what it leaves absent, and that none of it trains.

use std::path::Path;
use std::sync::Arc;

use lego::config::Samples;
use lego::proxy::{LocalTokenizer, ProxyOptions};
use lego::record::{Call, Disposition, IdsSource, UpstreamKind};
use lego::text::{ChatInput, ChatTemplate, Tokenizer, encode_chat};
use lego::trajectory::{lineages, samples};
use serde_json::{Value, json};

use crate::mock::{Part, Script, id_of};
use crate::setup::{Setup, post, request, spec, text};

const TEXT: &str = "def add(a, b):\n    return a + b  # 北京";

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/models/lego-tiny"))
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(folder()).expect("the bundled tokenizer")
}

fn prompt_ids(body: &Value) -> Vec<u32> {
    let template = ChatTemplate::load(folder()).expect("the bundled template");
    let messages = body["messages"].as_array().expect("messages");
    let input = ChatInput { messages, tools: None, add_generation_prompt: true, template_kwargs: None };
    encode_chat(&tokenizer(), &template, &input).expect("renders")
}

fn with_tokenizer(mut options: ProxyOptions) -> ProxyOptions {
    options.local_tokenizer = Some(Arc::new(LocalTokenizer::load(folder()).expect("loads")));
    options
}

/// What a gateway says: no ids anywhere.
fn reply(message: Value, prompt_tokens: usize, completion_tokens: usize) -> Value {
    json!({
        "id": "c", "object": "chat.completion", "created": 1, "model": "toy",
        "choices": [{"index": 0, "message": message, "logprobs": null, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": 0},
    })
}

fn said(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

/// The same as a stream of one write.
fn stream_of(reply: &Value) -> Vec<Part> {
    let mut delta = reply.clone();
    delta["object"] = "chat.completion.chunk".into();
    let choice = delta["choices"][0].as_object_mut().expect("choice");
    let message = choice.remove("message").expect("message");
    choice.insert("delta".to_owned(), message);
    vec![Part::Raw(format!("data: {delta}\n\ndata: [DONE]\n\n").into_bytes())]
}

/// One call with this reply, through a gateway.
async fn call(options: ProxyOptions, body: &Value, reply: &Value) -> Call {
    let script = Script {
        body: Some(reply.to_string().into_bytes()),
        parts: Some(stream_of(reply)),
        ..Script::default()
    };
    let setup = Setup::with(options, UpstreamKind::Openai, script).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
    text(post(&url, body).await).await;
    let mut calls = session.close().await.calls;
    assert_eq!(calls.len(), 1);
    Arc::unwrap_or_clone(calls.remove(0))
}

async fn asked(body: &Value, reply: &Value) -> Call {
    call(with_tokenizer(ProxyOptions::trainer("policy")), body, reply).await
}

fn has(call: &Call, reason: &str) -> bool {
    call.not_trainable_reasons.iter().any(|found| found == reason)
}

#[tokio::test]
async fn a_gateways_reply_gets_the_ids_of_its_text_marked_and_never_trained() {
    for stream in [false, true] {
        let body = request(stream);
        let (prompt, ids) = (prompt_ids(&body), tokenizer().encode_text(TEXT).expect("encodes"));
        let call = asked(&body, &reply(said(TEXT), prompt.len(), ids.len())).await;
        assert_eq!(call.completion_token_ids.as_ref(), Some(&ids), "{:?}", call.not_trainable_reasons);
        assert_eq!(call.completion_ids_source, IdsSource::LocalTokenizer);
        assert_eq!(call.prompt_token_ids.as_ref(), Some(&prompt));
        assert_eq!(call.prompt_ids_source, IdsSource::LocalTokenizer);
        assert_eq!(call.tokenizer_sha256.as_deref(), Some(tokenizer().sha256()));
        assert!(call.template_sha256.is_some());
        assert_eq!((call.completion_logprobs.as_ref(), call.weight_spans.as_ref()), (None, None));
        assert_eq!(tokenizer().decode(&ids, false), call.text.clone().expect("text"));
        assert!(!call.trainable && has(&call, "ids_from_local_tokenizer"));
        for reason in ["local_ids_usage_mismatch", "local_completion_ids_refused", "local_prompt_ids_refused"]
        {
            assert!(!has(&call, reason), "{reason}");
        }
        // What is not known to be sampled is no sample, and is in the account as usage without ids.
        assert_eq!(call.sampled_ids(), None);
        let mut call = call;
        // Whatever a record claims, ids of this source are no target.
        call.trainable = true;
        let calls = [Arc::new(call)];
        let built = samples(&lineages(&calls), None, &Samples::default());
        built.check(&calls).expect("every token in one bucket");
        assert!(built.samples.is_empty());
        let booked: Vec<_> =
            built.ledger.iter().map(|entry| (entry.disposition.clone(), entry.tokens)).collect();
        assert_eq!(booked, [(Disposition::NoIds, ids.len() as u64)]);
    }
}

#[tokio::test]
async fn a_count_that_differs_from_the_upstreams_is_told() {
    let body = request(false);
    let (prompt, ids) = (prompt_ids(&body), tokenizer().encode_text(TEXT).expect("encodes"));
    // The end token was sampled too; the prompt is not the one that this template renders.
    let call = asked(&body, &reply(said(TEXT), prompt.len() + 1, ids.len() + 1)).await;
    assert_eq!(call.completion_token_ids, Some(ids.clone()));
    assert!(has(&call, "local_ids_usage_mismatch") && has(&call, "local_prompt_ids_refused"));
    assert_eq!((call.prompt_token_ids, call.prompt_ids_source), (None, IdsSource::Absent));
    assert_eq!(
        (call.template_sha256, call.usage.expect("told").completion_tokens),
        (None, ids.len() as u64 + 1)
    );
}

#[tokio::test]
async fn what_has_no_one_form_stays_absent() {
    let body = request(false);
    let prompt = prompt_ids(&body).len();
    let tool = json!({"id": "t", "type": "function", "function": {"name": "ls", "arguments": "{}"}});
    let mut thinking = reply(said(TEXT), prompt, 9);
    thinking["usage"]["completion_tokens_details"] = json!({"reasoning_tokens": 4});
    let mut cut = reply(said(TEXT), prompt, 9);
    cut["choices"][0]["finish_reason"] = Value::Null;
    let absent = [
        ("a tool call", reply(json!({"role": "assistant", "content": "x", "tool_calls": [tool]}), prompt, 9)),
        (
            "reasoning",
            reply(json!({"role": "assistant", "content": "x", "reasoning_content": "so"}), prompt, 9),
        ),
        ("hidden reasoning", thinking),
        ("a refusal", reply(json!({"role": "assistant", "content": "x", "refusal": "no"}), prompt, 9)),
        ("no text", reply(said(""), prompt, 1)),
        ("half a character", reply(said("a\u{fffd}"), prompt, 2)),
        ("a control token's text", reply(said("<|im_end|>"), prompt, 1)),
    ];
    for (name, reply) in absent {
        let call = asked(&body, &reply).await;
        assert_eq!(
            (call.completion_token_ids.as_ref(), call.completion_ids_source),
            (None, IdsSource::Absent),
            "{name}"
        );
        assert!(has(&call, "local_completion_ids_refused"), "{name}: {:?}", call.not_trainable_reasons);
        assert_eq!(call.prompt_ids_source, IdsSource::LocalTokenizer, "{name}");
    }
    let call = asked(&body, &cut).await;
    assert_eq!((call.prompt_ids_source, call.completion_ids_source), (IdsSource::Absent, IdsSource::Absent));
    assert!(!has(&call, "ids_from_local_tokenizer") && !call.trainable);
    // A member that may be a part of the prompt.
    let mut shaped = request(false);
    shaped["documents"] = json!([{"text": "x"}]);
    let call = asked(&shaped, &reply(said(TEXT), prompt, 9)).await;
    assert_eq!(call.prompt_ids_source, IdsSource::Absent);
    assert!(has(&call, "local_prompt_ids_refused"));
}

#[tokio::test]
async fn without_the_key_nothing_is_filled_in_and_an_engines_ids_always_win() {
    let body = request(false);
    let call = call(ProxyOptions::trainer("policy"), &body, &reply(said(TEXT), 4, 9)).await;
    assert_eq!((call.completion_token_ids, call.completion_ids_source), (None, IdsSource::Absent));
    assert!(!call.not_trainable_reasons.iter().any(|reason| reason.contains("local")));

    for stream in [false, true] {
        let options = with_tokenizer(ProxyOptions::trainer("policy"));
        let setup = Setup::with(options, UpstreamKind::Vllm, Script::default()).await;
        let session = setup.proxy.open_session(spec("s1")).expect("open");
        let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
        text(post(&url, &request(stream)).await).await;
        let call = session.close().await.calls[0].clone();
        assert_eq!(call.completion_token_ids, Some((0..5).map(id_of).collect()));
        assert_eq!(call.completion_ids_source, IdsSource::Engine);
        assert_eq!(call.not_trainable_reasons, Vec::<String>::new());
    }
}

#[test]
fn a_folder_without_a_template_still_gives_the_texts_ids_and_a_broken_one_is_told() {
    let dir = tempfile::tempdir().expect("folder");
    let error = LocalTokenizer::load(dir.path()).expect_err("empty").to_string();
    assert!(error.contains("tokenizer.json"), "{error}");
    std::fs::copy(folder().join("tokenizer.json"), dir.path().join("tokenizer.json")).expect("copied");
    LocalTokenizer::load(dir.path()).expect("a tokenizer is enough");
    std::fs::write(dir.path().join("chat_template.jinja"), "{% for").expect("written");
    let error = LocalTokenizer::load(dir.path()).expect_err("broken").to_string();
    assert!(error.contains("chat_template.jinja"), "{error}");
}
