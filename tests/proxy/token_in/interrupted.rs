//! Replies that their upstream gave up, or had to: they go on from the tokens that they have.

use lego::proxy::Proxy;
use lego::record::{Call, UpstreamKind};
use serde_json::{Value, json};
use tower::ServiceExt;

use super::engine::{Ends, Says, tokenizer};
use super::{chat, message, world};
use crate::setup::{broken, post};

/// Versions and their ends.
pub fn spans(call: &Call) -> Vec<(String, u32)> {
    call.weight_spans.iter().flatten().map(|span| (span.version.clone(), span.end)).collect()
}

#[tokio::test]
async fn a_reply_that_the_engine_gave_up_goes_on_from_its_tokens() {
    for (kind, is_incremental) in
        [(UpstreamKind::Vllm, false), (UpstreamKind::Sglang, false), (UpstreamKind::Sglang, true)]
    {
        let from = |text: &str| Says { is_incremental, ..Says::from(text) };
        let world = world(kind).await;
        let ids = tokenizer().encode("hello there, world<|im_end|>").expect("encodes");
        let part = |count: usize| tokenizer().decode(&ids[count..], false);
        world.engine.will_say(Says { ends: Ends::Aborted(3), ..from("hello there, world") });
        // Nothing of it at all.
        let empty = Says { text: part(3), ends: Ends::Aborted(0), version: Some("8"), ..from("") };
        if kind == UpstreamKind::Vllm {
            world.engine.will_say(empty);
        }
        world.engine.will_say(Says { text: part(3), ends: Ends::Aborted(2), version: Some("8"), ..from("") });
        world.engine.will_say(Says { text: part(5), version: Some("9"), ..from("") });
        let mut body = chat(json!([{"role": "user", "content": "go"}]), true);
        body["max_tokens"] = json!(40);
        let (said, finish) = message(&world.ask(&body).await, true);
        assert_eq!(
            (said["content"].as_str(), finish.as_str()),
            (Some("hello there, world"), Some("stop")),
            "{kind:?}"
        );
        let asked = world.engine.asked();
        let calls = world.calls().await;
        let call = &calls[0];
        assert_eq!(calls.len(), 1);
        assert!(call.trainable, "{kind:?} {:?}", call.not_trainable_reasons);
        assert_eq!(call.completion_token_ids.as_ref(), Some(&ids));
        assert_eq!(call.completion_logprobs.as_ref().map(Vec::len), Some(ids.len()));
        let end = ids.len() as u32;
        let told = [("7".to_owned(), 3), ("8".to_owned(), 5), ("9".to_owned(), end)];
        assert_eq!(spans(call), told, "{kind:?}");
        let usage = call.usage.expect("usage");
        let prompt = call.prompt_token_ids.clone().expect("prompt ids");
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (prompt.len() as u64, u64::from(end)));
        // Each segment was asked with all that was there, for as many tokens as were left, with numbers of its own.
        let (key, most, seed) = match kind {
            UpstreamKind::Sglang => ("input_ids", "max_new_tokens", "sampling_seed"),
            _ => ("prompt", "max_tokens", "seed"),
        };
        let last = &asked.last().expect("asked").1;
        assert_eq!(last[key], json!([prompt.as_slice(), &ids[..5]].concat()));
        let sampling = |body: &Value| {
            if kind == UpstreamKind::Sglang { body["sampling_params"].clone() } else { body.clone() }
        };
        assert_eq!(sampling(last)[most], 35);
        assert_ne!(sampling(last)[seed], sampling(&asked[0].1)[seed]);
    }
}

#[tokio::test]
async fn an_interrupted_reply_goes_on_behind_the_gate() {
    for (kind, told) in [
        (UpstreamKind::Vllm, true),
        (UpstreamKind::Vllm, false),
        (UpstreamKind::Sglang, true),
        (UpstreamKind::Sglang, false),
    ] {
        let world = world(kind).await;
        let ids = tokenizer().encode("hello there, world<|im_end|>").expect("encodes");
        let version = |label| if told { Some(label) } else { None };
        world.setup.proxy.set_policy_version("41");
        world.engine.will_say(Says {
            ends: Ends::Hanging(4),
            version: version("7"),
            ..Says::from("hello there, world")
        });
        world.engine.will_say(Says {
            text: tokenizer().decode(&ids[4..], false),
            version: version("8"),
            ..Says::from("")
        });
        let url = format!("http://{}/sessions/s1/v1/chat/completions", world.setup.address);
        let mut reply = post(&url, &chat(json!([{"role": "user", "content": "go"}]), true)).await;
        let before = tokenizer().decode(&ids[..3], false);
        let mut text = String::new();
        // All four tokens were relayed once the text of the third is there and the fourth's too.
        while !message_so_far(&text).starts_with(&tokenizer().decode(&ids[..4], false)) {
            text +=
                std::str::from_utf8(&reply.chunk().await.expect("goes on").expect("more")).expect("UTF-8");
        }
        assert!(message_so_far(&text).starts_with(&before));
        world.setup.proxy.interrupt();
        // As a trainer does: once no call is at the engine, it is given other weights.
        while gate(&world.setup.proxy).await["calls_waiting"] != 1 {
            tokio::task::yield_now().await;
        }
        world.setup.proxy.set_policy_version("42");
        world.setup.proxy.resume();
        while let Some(piece) = reply.chunk().await.expect("goes on") {
            text += std::str::from_utf8(&piece).expect("UTF-8");
        }
        assert_eq!(message(&text, true).0["content"], "hello there, world", "{kind:?}");
        let calls = world.calls().await;
        let call = &calls[0];
        assert_eq!(call.completion_token_ids.as_ref(), Some(&ids));
        // vLLM tells its weights at the end alone: those of the first segment lego's clock knows, which counts otherwise.
        let known = match (kind, told) {
            (UpstreamKind::Sglang, true) => Some(("7", "8")),
            (_, false) => Some(("41", "42")),
            _ => None,
        };
        let Some((first, second)) = known else {
            assert!(!call.trainable && spans(call).is_empty(), "{:?}", spans(call));
            continue;
        };
        assert_eq!(spans(call), [(first.to_owned(), 4), (second.to_owned(), ids.len() as u32)], "{kind:?}");
        assert!(call.trainable, "{:?}", call.not_trainable_reasons);
    }
}

/// What the admin listener says of the gate.
pub async fn gate(proxy: &Proxy) -> Value {
    let request = axum::http::Request::get("/admin/state")
        .header("authorization", "Bearer t")
        .header("host", "localhost");
    let request = request.body(axum::body::Body::empty()).expect("a request");
    let reply = proxy.admin_router("t").oneshot(request).await.expect("an answer");
    let body = axum::body::to_bytes(reply.into_body(), 9999).await.expect("a body");
    serde_json::from_slice(&body).expect("JSON")
}

/// The content that a stream has told so far.
pub fn message_so_far(text: &str) -> String {
    let whole = text.rfind("\n\n").map_or("", |end| &text[..end]);
    let chunks = whole.lines().filter_map(|line| line.strip_prefix("data: "));
    let parts = chunks.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    parts.filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned)).collect()
}

#[tokio::test]
async fn weights_of_a_part_that_nobody_knows_are_nobodys() {
    // The first part told, the second not; and the other way round. The clock counts otherwise.
    for (kind, first, second) in [
        (UpstreamKind::Vllm, Some("7"), None),
        (UpstreamKind::Vllm, None, Some("8")),
        (UpstreamKind::Sglang, Some("7"), None),
    ] {
        let world = world(kind).await;
        world.setup.proxy.set_policy_version("1");
        let ids = tokenizer().encode("hello there<|im_end|>").expect("encodes");
        world.engine.will_say(Says { ends: Ends::Aborted(3), version: first, ..Says::from("hello there") });
        let rest = tokenizer().decode(&ids[3..], false);
        world.engine.will_say(Says { text: rest, version: second, ..Says::from("") });
        world.ask(&chat(json!([{"role": "user", "content": "go"}]), true)).await;
        let calls = world.calls().await;
        assert_eq!(calls[0].completion_token_ids.as_ref(), Some(&ids));
        assert!(spans(&calls[0]).is_empty(), "{kind:?} {first:?} {:?}", spans(&calls[0]));
        assert!(!calls[0].trainable);
    }
}

#[tokio::test]
async fn an_engine_that_is_not_ready_yet_is_asked_again() {
    let world = world(UpstreamKind::Vllm).await;
    let ids = tokenizer().encode("hello there<|im_end|>").expect("encodes");
    world.engine.will_say(Says { ends: Ends::Aborted(3), ..Says::from("hello there") });
    world.engine.will_say(Says { refuses: Some(503), ..Says::from("") });
    world.engine.will_say(Says { text: tokenizer().decode(&ids[3..], false), ..Says::from("") });
    let (said, _) = message(&world.ask(&chat(json!([{"role": "user", "content": "go"}]), true)).await, true);
    assert_eq!(said["content"], "hello there");
    let calls = world.calls().await;
    assert!(calls[0].trainable, "{:?}", calls[0].not_trainable_reasons);
    assert_eq!(calls[0].completion_token_ids.as_ref(), Some(&ids));
}

#[tokio::test]
async fn a_part_that_went_on_from_another_prompt_ends_the_reply() {
    let world = world(UpstreamKind::Vllm).await;
    world.engine.will_say(Says { ends: Ends::Aborted(3), ..Says::from("hello there") });
    world.engine.will_say(Says { misreads: true, ..Says::from("else") });
    let url = format!("http://{}/sessions/s1/v1/chat/completions", world.setup.address);
    let reply = broken(post(&url, &chat(json!([{"role": "user", "content": "go"}]), true)).await).await;
    let reply = String::from_utf8_lossy(&reply);
    assert!(reply.contains("another prompt than it was sent") && !reply.contains("[DONE]"), "{reply}");
    let calls = world.calls().await;
    assert!(!calls[0].trainable);
    assert_eq!(calls[0].status, lego::record::CallStatus::UpstreamError);
}

#[tokio::test]
async fn a_call_whose_answer_has_not_begun_is_interrupted_too() {
    let world = world(UpstreamKind::Vllm).await;
    world.setup.proxy.set_policy_version("1");
    world.engine.set_open(false);
    for text in ["old", "new"] {
        world.engine.will_say(Says { version: None, ..Says::from(text) });
    }
    let url = format!("http://{}/sessions/s1/v1/chat/completions", world.setup.address);
    let asking = tokio::spawn(async move {
        let body = chat(json!([{"role": "user", "content": "go"}]), true);
        crate::setup::text(post(&url, &body).await).await
    });
    while world.engine.asked().is_empty() {
        tokio::task::yield_now().await;
    }
    world.setup.proxy.interrupt();
    world.engine.set_open(true);
    while gate(&world.setup.proxy).await["calls_waiting"] != 1 {
        tokio::task::yield_now().await;
    }
    world.setup.proxy.set_policy_version("2");
    world.setup.proxy.resume();
    let reply = asking.await.expect("an answer");
    assert_eq!(message(std::str::from_utf8(&reply).expect("UTF-8"), true).0["content"], "new");
    let calls = world.calls().await;
    assert_eq!(spans(&calls[0]).first().map(|span| span.0.as_str()), Some("2"));
}
