//! Text that comes without its ids.

use lego::record::{CallStatus, UpstreamKind};
use serde_json::json;

use super::engine::{Says, tokenizer};
use super::{World, chat, message, world};
use crate::setup::{post, read};

/// A stream that is broken off, as far as it came.
async fn broken_off(world: &World, route: &str) -> String {
    let go = json!([{"role": "user", "content": "go"}]);
    let body = match route {
        "responses" => json!({"model": "m", "stream": true, "input": go}),
        "messages" => json!({"model": "m", "stream": true, "max_tokens": 99, "messages": go}),
        _ => chat(go, true),
    };
    let url = format!("http://{}/sessions/s1/v1/{route}", world.setup.address);
    let (bytes, is_whole) = read(post(&url, &body).await).await;
    let told = String::from_utf8(bytes.to_vec()).expect("UTF-8");
    assert!(!is_whole, "{route}: a clean end after {told}");
    told
}

#[tokio::test]
async fn text_without_ids_is_never_left_out_silently() {
    let ids = tokenizer().encode("it is done<|im_end|>").expect("encodes").len();
    for kind in [UpstreamKind::Vllm, UpstreamKind::Sglang] {
        for (route, end) in [
            ("chat/completions", "[DONE]"),
            ("messages", "message_stop"),
            ("responses", "response.completed"),
        ] {
            for at in [1, ids - 2] {
                let world = world(kind).await;
                let says = Says { loses: Some(at), is_incremental: true, ..Says::from("it is done") };
                world.engine.will_say(says);
                let told = broken_off(&world, route).await;
                let why = match (kind, at) {
                    // It may have been the form of events that repeat everything.
                    (UpstreamKind::Sglang, 1) => "does not go on where it was: its ids changed",
                    _ => "a part of it has no token ids, which the token-in relay",
                };
                assert!(told.contains(why), "{told}");
                assert!(!told.contains(end), "{kind:?} {told}");
                // What came of it is recorded, and no history to go on from.
                world.engine.will_say("again");
                let history = json!([{"role": "user", "content": "go"},
                    {"role": "assistant", "content": "it is done"}, {"role": "user", "content": "more"}]);
                world.ask(&chat(history, true)).await;
                let calls = world.calls().await;
                assert_eq!(calls[0].status, CallStatus::ParseError, "{kind:?} {route} {at}");
                assert!(!calls[0].trainable && calls[1].parent_call_id.is_none());
            }
        }
    }
}

#[tokio::test]
async fn the_last_part_may_be_text_alone_if_the_ids_are_all_there() {
    let ids = tokenizer().encode("it is done<|im_end|>").expect("encodes").len();
    let lost = world(UpstreamKind::Vllm).await;
    lost.engine.will_say(Says { loses: Some(ids - 1), ..Says::from("it is done") });
    let told = broken_off(&lost, "chat/completions").await;
    assert!(told.contains("its last part has no token ids"), "{told}");

    let world = world(UpstreamKind::Vllm).await;
    world.engine.will_say(Says { flushes: true, ..Says::from("it is done") });
    let reply = world.ask(&chat(json!([{"role": "user", "content": "go"}]), true)).await;
    assert_eq!(message(&reply, true).0["content"], "it is done");
    let calls = world.calls().await;
    assert!(calls[0].trainable, "{:?}", calls[0].not_trainable_reasons);
}
