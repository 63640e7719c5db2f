//! Expert routing of replies in several parts: joined by position, each row that of the part that read it first.

use lego::record::Call;
use serde_json::json;

use super::engine::{Ends, Says, Server, Streams, tokenizer};
use super::interrupted::{gate, spans};
use super::streams::{question, until, versions, vllm, world_of};
use super::{World, message};
use crate::setup::post;

const TEXT: &str = "hello there, world";
const ENDS: [usize; 2] = [3, 5];

const SGLANG: Server =
    Server { is_sglang: true, has_experts: true, streams: Streams::Missing, bytes_per_write: None };

/// The ids of the whole reply.
fn ids() -> Vec<u32> {
    tokenizer().encode(&format!("{TEXT}<|im_end|>")).expect("encodes")
}

/// Its three parts, under the weights 7, 8 and 9, each of which tells its rows or does not.
fn parts(tells: [bool; 3], is_incremental: bool) -> [Says; 3] {
    let ids = ids();
    let from = |at: usize, ends, version, tells_rows| Says {
        text: tokenizer().decode(&ids[at..], false),
        ends,
        version: Some(version),
        tells_rows,
        is_incremental,
        ..Says::from("")
    };
    [
        from(0, Ends::Aborted(ENDS[0]), "7", tells[0]),
        from(ENDS[0], Ends::Aborted(ENDS[1] - ENDS[0]), "8", tells[1]),
        from(ENDS[1], Ends::Well, "9", tells[2]),
    ]
}

/// The reply in these parts.
async fn reply(world: World, parts: [Says; 3]) -> Call {
    world.setup.proxy.set_policy_version("1");
    parts.into_iter().for_each(|part| world.engine.will_say(part));
    let (said, finish) = message(&world.ask(&question()).await, true);
    assert_eq!((said["content"].as_str(), finish.as_str()), (Some(TEXT), Some("stop")));
    let mut calls = world.calls().await;
    assert_eq!(calls.len(), 1);
    let call = calls.remove(0);
    assert_eq!(call.completion_token_ids.as_ref(), Some(&ids()));
    (*call).clone()
}

/// The versions of the rows from `start` on, of a reply whose prompt has so many ids.
fn expected(prompt: usize, start: usize) -> Vec<u8> {
    let version = |at: usize| match at {
        at if at + 1 < prompt + ENDS[0] => 7,
        at if at + 1 < prompt + ENDS[1] => 8,
        _ => 9,
    };
    (start..prompt + ids().len() - 1).map(version).collect()
}

#[tokio::test]
async fn each_row_is_that_of_the_part_that_read_its_position_first() {
    for (server, is_incremental) in [(vllm(Streams::Newer), false), (SGLANG, false), (SGLANG, true)] {
        for bytes_per_write in [None, Some(1)] {
            let world = world_of(Server { bytes_per_write, ..server }).await;
            let call = reply(world, parts([true; 3], is_incremental)).await;
            assert!(call.trainable, "{:?}", call.not_trainable_reasons);
            let prompt = call.prompt_token_ids.as_ref().expect("ids").len();
            assert_eq!(versions(&call), expected(prompt, 0));
            let told = spans(&call).into_iter().map(|(version, end)| (version, end as usize));
            let expected = [("7", ENDS[0]), ("8", ENDS[1]), ("9", ids().len())];
            assert_eq!(told.collect::<Vec<_>>(), expected.map(|(version, end)| (version.to_owned(), end)));
        }
    }
}

#[tokio::test]
async fn rows_that_a_part_did_not_tell_are_nobodys() {
    for (server, is_incremental) in
        [(vllm(Streams::Newer), false), (vllm(Streams::Older), false), (SGLANG, false), (SGLANG, true)]
    {
        for tells in [[false, true, true], [true, false, true], [false, false, true]] {
            let call = reply(world_of(server).await, parts(tells, is_incremental)).await;
            assert!(call.trainable, "{:?}", call.not_trainable_reasons);
            let prompt = call.prompt_token_ids.as_ref().expect("ids").len();
            // Behind the tokens of the last part that did not tell, of which an older vLLM never hears.
            let is_older = server.streams == Streams::Older;
            let lost = if tells[1] && !is_older { ENDS[0] } else { ENDS[1] };
            let start = prompt + lost - 1;
            assert_eq!(call.routing.as_ref().expect("routing").shape().start as usize, start, "{tells:?}");
            assert_eq!(versions(&call), expected(prompt, start), "{tells:?}");
            assert!(call.routing.as_ref().expect("routing").base().is_none());
        }
        let call = reply(world_of(server).await, parts([true, true, false], is_incremental)).await;
        assert_eq!(call.routing, None, "those of the reply's end are nobody's");
    }
}

#[tokio::test]
async fn parts_of_a_later_turn_have_the_rows_that_are_not_held_yet() {
    for (tells, from) in
        [([true; 3], None), ([false, true, true], Some(ENDS[0])), ([true, false, true], Some(ENDS[1]))]
    {
        let world = world_of(vllm(Streams::Newer)).await;
        world.engine.will_say("hi");
        let (said, _) = message(&world.ask(&question()).await, true);
        parts(tells, false).into_iter().for_each(|part| world.engine.will_say(part));
        let mut next = question();
        let more = [said, json!({"role": "user", "content": "more"})];
        next["messages"].as_array_mut().expect("list").extend(more);
        world.ask(&next).await;
        // The next turn goes on from rows that are all there, or asks for all of them.
        world.engine.will_say("bye");
        let more = [json!({"role": "assistant", "content": TEXT}), json!({"role": "user", "content": "and"})];
        next["messages"].as_array_mut().expect("list").extend(more);
        world.ask(&next).await;
        let calls = world.calls().await;
        let starts: Vec<u32> =
            calls.iter().map(|call| call.routing.as_ref().expect("routing").shape().start).collect();
        let held = u32::try_from(super::all_ids(&calls[0]).len() - 1).expect("small");
        let prompt = calls[1].prompt_token_ids.as_ref().expect("ids").len();
        let start = from.map_or(held, |lost| u32::try_from(prompt + lost - 1).expect("small"));
        assert_eq!(versions(&calls[1]), expected(prompt, start as usize), "{tells:?}");
        let all = u32::try_from(super::all_ids(&calls[1]).len() - 1).expect("small");
        assert_eq!(starts, [0, start, if from.is_none() { all } else { 0 }], "{tells:?}");
        assert!(versions(&calls[2]).iter().all(|version| *version == 7));
    }
}

#[tokio::test]
async fn rows_of_another_number_are_not_taken_and_at_a_replys_own_end_speak_against_it() {
    for server in [vllm(Streams::Newer), SGLANG] {
        for spoiled in 0..3 {
            let mut parts = parts([true; 3], false);
            parts[spoiled].spoils_rows = true;
            let call = reply(world_of(server).await, parts).await;
            let Some(lost) = ENDS.get(spoiled) else {
                assert_eq!(call.routing, None);
                assert_eq!(call.not_trainable_reasons, ["routing_rows_mismatch"]);
                continue;
            };
            // An engine that gives up may have read more than it told.
            assert!(call.trainable, "{:?}", call.not_trainable_reasons);
            let prompt = call.prompt_token_ids.as_ref().expect("ids").len();
            assert_eq!(versions(&call), expected(prompt, prompt + lost - 1));
        }
    }
}

#[tokio::test]
async fn an_interrupted_part_takes_its_rows_with_it() {
    for server in [vllm(Streams::Newer), vllm(Streams::Older), SGLANG] {
        let world = world_of(server).await;
        world.setup.proxy.set_policy_version("7");
        let ids = ids();
        world.engine.will_say(Says { ends: Ends::Hanging(4), version: None, ..Says::from(TEXT) });
        let rest = tokenizer().decode(&ids[4..], false);
        world.engine.will_say(Says { text: rest, version: Some("8"), ..Says::from("") });
        let url = format!("http://{}/sessions/s1/v1/chat/completions", world.setup.address);
        let mut reply = post(&url, &question()).await;
        let mut said = until(&mut reply, &tokenizer().decode(&ids[..4], false)).await;
        world.setup.proxy.interrupt();
        while gate(&world.setup.proxy).await["calls_waiting"] != 1 {
            tokio::task::yield_now().await;
        }
        world.setup.proxy.set_policy_version("8");
        world.setup.proxy.resume();
        while let Some(piece) = reply.chunk().await.expect("goes on") {
            said += std::str::from_utf8(&piece).expect("UTF-8");
        }
        assert_eq!(message(&said, true).0["content"], TEXT);
        let asked = world.engine.asked();
        let calls = world.calls().await;
        let call = &calls[0];
        assert_eq!(call.completion_token_ids.as_ref(), Some(&ids));
        let prompt = call.prompt_token_ids.as_ref().expect("ids");
        assert_eq!(call.routing.as_ref().expect("routing").shape().start as usize, prompt.len() + 3);
        assert!(versions(call).iter().all(|version| *version == 8));
        // It goes on from all that it has.
        let key = if server.is_sglang { "input_ids" } else { "token_ids" };
        assert_eq!(asked[1].1[key], json!([prompt.as_slice(), &ids[..4]].concat()));
        assert_eq!(asked[0].0, asked[1].0);
        let seed = if server.is_sglang { "sampling_seed" } else { "seed" };
        assert_ne!(asked[0].1["sampling_params"][seed], asked[1].1["sampling_params"][seed]);
    }
}

#[tokio::test]
async fn a_reply_that_was_given_up_at_its_last_token_keeps_its_rows() {
    for (server, tells) in [(vllm(Streams::Newer), true), (vllm(Streams::Newer), false), (SGLANG, true)] {
        let world = world_of(server).await;
        let ids = ids();
        world.engine.will_say(Says { ends: Ends::Aborted(3), tells_rows: tells, ..Says::from(TEXT) });
        let mut body = question();
        body["max_tokens"] = json!(3);
        let (_, finish) = message(&world.ask(&body).await, true);
        assert_eq!(finish, "length");
        let calls = world.calls().await;
        assert_eq!(calls[0].completion_token_ids.as_deref(), Some(&ids[..3]));
        assert_eq!(calls[0].routing.is_some(), tells);
        assert!(!tells || versions(&calls[0]).iter().all(|version| *version == 7));
    }
}
