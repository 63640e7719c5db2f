//! Replies to one prompt that say the same in other ids: the one that the client went on from is extended.

use std::sync::Arc;

use lego::config::TokenHistory;
use lego::proxy::{ProxyOptions, Renderer};
use lego::record::{Call, UpstreamKind};
use lego::text::parsers::ReasoningForm;
use lego::trajectory::lineages;
use serde_json::{Value, json};

use super::engine::{Says, folder};
use super::{World, all_ids, chat, message, world, world_of};
use crate::rejoin::left;
use crate::setup::{PATIENCE, post};
use crate::speech;

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// Asks each of these in turn, a call each, and gives all calls.
async fn go_on(world: World, histories: &[Value]) -> Vec<Arc<Call>> {
    for history in histories {
        world.engine.will_say("more");
        world.ask(&chat(history.clone(), true)).await;
    }
    world.calls().await
}

fn extends(call: &Call, other: &Call) -> bool {
    let prompt = call.prompt_token_ids.as_ref().expect("prompt ids");
    call.parent_call_id == Some(other.call_id) && prompt.starts_with(&all_ids(other))
}

#[tokio::test]
async fn what_the_client_sends_back_says_which_of_two_replies_it_has() {
    for stream in [true, false] {
        let world = world(UpstreamKind::Vllm).await;
        let mut said = Vec::new();
        for thought in ["one", "two"] {
            world.engine.will_say(format!("<think>\n{thought}\n</think>\n\nok").as_str());
            said.push(message(&world.ask(&chat(json!([user("go")]), stream)).await, stream).0);
        }
        let plain = json!({"role": "assistant", "content": "ok"});
        let apart = json!({"role": "assistant", "content": "ok", "reasoning_content": "one"});
        let histories = [&said[0], &said[1], &plain, &apart];
        let histories = histories.map(|reply| json!([user("go"), reply, user("go on")]));
        let calls = go_on(world, &histories).await;
        assert!(extends(&calls[2], &calls[0]) && extends(&calls[3], &calls[1]));
        // Without its thoughts it may be either: that of the call that was made last.
        assert!(extends(&calls[4], &calls[1]));
        assert!(extends(&calls[5], &calls[0]));
    }
}

#[tokio::test]
async fn the_same_bytes_are_those_of_the_call_that_was_made_last() {
    for kind in [UpstreamKind::Vllm, UpstreamKind::Sglang] {
        let world = world(kind).await;
        for is_spelled in [true, false, true] {
            world.engine.will_say(Says { is_spelled, ..Says::from("it is done") });
            world.ask(&chat(json!([user("go")]), true)).await;
        }
        let history = json!([user("go"), {"role": "assistant", "content": "it is done"}, user("go on")]);
        let calls = go_on(world, &[history.clone(), history]).await;
        assert_ne!(calls[0].completion_token_ids, calls[1].completion_token_ids);
        assert!(extends(&calls[3], &calls[2]) && extends(&calls[4], &calls[2]), "{kind:?}");
        // The others are retries of it.
        let found = lineages(&calls);
        assert_eq!(found.lineages.iter().map(|lineage| lineage.calls.len()).collect::<Vec<_>>(), [2]);
    }
}

#[tokio::test]
async fn thoughts_come_back_in_messages_too() {
    let renderer = Renderer::load(folder(), None, Some(ReasoningForm::Qwen3), TokenHistory::Sampled);
    let world = world_of(UpstreamKind::Vllm, renderer.expect("loads"), ProxyOptions::trainer("policy")).await;
    let mut body = json!({"model": "m", "max_tokens": 99, "messages": [user("go")],
        "thinking": {"type": "enabled", "budget_tokens": 50}});
    let mut replies = Vec::new();
    for thought in ["one", "two"] {
        world.engine.will_say(format!("<think>\n{thought}\n</think>\n\nok").as_str());
        let reply: Value = serde_json::from_str(&world.ask_at("messages", &body).await).expect("JSON");
        assert_eq!(reply["content"][0]["thinking"], thought, "{reply}");
        replies.push(reply["content"].clone());
    }
    for content in &replies {
        body["messages"] = json!([user("go"), {"role": "assistant", "content": content}, user("go on")]);
        world.engine.will_say("more");
        world.ask_at("messages", &body).await;
    }
    let calls = world.calls().await;
    assert!(extends(&calls[2], &calls[0]) && extends(&calls[3], &calls[1]));
}

#[tokio::test]
async fn thoughts_come_back_in_responses_too() {
    let renderer = Renderer::load(folder(), None, Some(ReasoningForm::Qwen3), TokenHistory::Sampled);
    let world = world_of(UpstreamKind::Vllm, renderer.expect("loads"), ProxyOptions::trainer("policy")).await;
    let mut body = json!({"model": "m", "stream": true, "input": [user("go")]});
    let mut outputs = Vec::new();
    for thought in ["one", "two"] {
        world.engine.will_say(format!("<think>\n{thought}\n</think>\n\nok").as_str());
        let events = speech::events(world.ask_at("responses", &body).await.as_bytes());
        let done = events.iter().find(|(name, _)| name == "response.completed").expect("completed");
        outputs.push(done.1["response"]["output"].as_array().expect("output").clone());
    }
    for output in &outputs {
        body["input"] = [vec![user("go")], output.clone(), vec![user("go on")]].concat().into();
        world.engine.will_say("more");
        world.ask_at("responses", &body).await;
    }
    let calls = world.calls().await;
    assert!(extends(&calls[2], &calls[0]) && extends(&calls[3], &calls[1]));
}

/// Its client leaves when the reply is whole and being stored, and asks for something else then.
#[tokio::test]
async fn a_reply_whose_client_left_does_not_take_the_place_of_one_that_was_given() {
    for stream in [true, false] {
        let renderer = Renderer::load(folder(), None, None, TokenHistory::Sampled).expect("loads");
        let mut options = ProxyOptions::trainer("policy");
        options.retry_grace = 10 * PATIENCE;
        let world = world_of(UpstreamKind::Vllm, renderer, options).await;
        let ask = chat(json!([user("go")]), stream);
        world.engine.will_say("it is done");
        let (said, _) = message(&world.ask(&ask).await, stream);
        world.engine.will_say(Says { is_spelled: true, ..Says::from("it is done") });
        world.setup.sink.gate.send_replace(false);
        let url = format!("http://{}/sessions/s1/v1/chat/completions", world.setup.address);
        let regenerated = tokio::spawn(async move { crate::setup::read(post(&url, &ask).await).await });
        let mut entered = world.setup.sink.entered.subscribe();
        let stored = tokio::time::timeout(PATIENCE, entered.wait_for(|count| *count == 2)).await;
        drop(stored.expect("in time").expect("open"));
        regenerated.abort();
        left(&world.setup, 1).await;
        world.setup.sink.gate.send_replace(true);
        world.setup.sink.calls(2).await;
        let calls = go_on(world, &[json!([user("go"), said, user("go on")])]).await;
        assert_ne!(calls[0].completion_token_ids, calls[1].completion_token_ids);
        assert!(extends(&calls[2], &calls[0]), "streamed: {stream}");
    }
}
