use std::convert::Infallible;

use super::*;
use crate::record::{CallId, LayerAxis, RoutingDtype, SharedIds, example};

const ROWS: Parts = Parts { ids: false, bodies: false, routing: true };
/// Bytes of what is remembered of a call with one row.
const PIECE_BYTES: usize = size_of::<Piece>() + 2;

/// The calls of a session, of which each adds a row to those of the one before it.
fn session(name: &str, turns: u32) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::new();
    for turn in 0..turns {
        let ids: Vec<u32> = (0..2 * (turn + 1)).collect();
        let shape = RoutingShape {
            start: 0,
            rows: turn + 1,
            layers: 1,
            layer_axis: LayerAxis::MoeOnly,
            top_k: 2,
            dtype: RoutingDtype::U8,
        };
        let whole = Routing::pack(shape, &ids).expect("two a row");
        let mut call = example::call(serde_json::json!({"upstream_kind": "vllm"}));
        (call.call_id, call.session_id) = (CallId::now(), name.parse().expect("an id"));
        call.routing = Some(match calls.last() {
            Some(before) => whole.without_first(turn, before.choice()),
            None => whole,
        });
        calls.push(call);
    }
    calls
}

/// Joins these calls of a store, in this order; gives how often a session was read again.
fn joined(
    joiner: &mut Joiner,
    store: &[Vec<Call>],
    order: impl IntoIterator<Item = (usize, usize)>,
) -> usize {
    let mut reads = 0;
    for (session, turn) in order {
        let mut call = store[session][turn].clone();
        let read = |of: &Call, give: &mut dyn FnMut(&Call)| {
            reads += 1;
            store.iter().flatten().filter(|call| call.session_id == of.session_id).for_each(give);
            Ok::<_, Infallible>(())
        };
        joiner.join(&mut call, read).expect("infallible");
        let routing = call.routing.expect("all rows");
        assert_eq!((routing.shape().start, routing.shape().rows as usize), (0, turn + 1));
        assert!(routing.ids().eq(0..2 * (turn as u32 + 1)));
        let counted: usize = joiner.sessions.values().map(|seen| seen.bytes).sum();
        let held = joiner.sessions.values().flat_map(|seen| seen.pieces.values());
        let held: usize = held.map(|piece| piece.bytes).sum();
        assert_eq!((joiner.bytes, counted), (held, held));
        assert!(held <= joiner.most_bytes.max((turn + 1) * PIECE_BYTES), "{held}");
    }
    reads
}

fn small(rows: usize) -> Joiner {
    Joiner { most_bytes: rows * PIECE_BYTES, ..Joiner::new(ROWS) }
}

#[test]
fn a_session_that_follows_others_is_never_read_again() {
    let store: Vec<_> = ["a", "b", "c"].map(|name| session(name, 20)).into();
    let one_by_one = (0..3).flat_map(|session| (0..20).map(move |turn| (session, turn)));
    assert_eq!(joined(&mut small(21), &store, one_by_one), 0);
    let interleaved = (0..20).flat_map(|turn| (0..3).map(move |session| (session, turn)));
    assert_eq!(joined(&mut small(60), &store, interleaved), 0);
}

#[test]
fn a_call_whose_session_was_forgotten_reads_it_once() {
    let store: Vec<_> = ["a", "b", "c"].map(|name| session(name, 20)).into();
    let interleaved = (0..20).flat_map(|turn| (0..3).map(move |session| (session, turn)));
    let reads = joined(&mut small(10), &store, interleaved);
    assert!(reads > 0 && reads <= 3 * 19, "{reads}");
    // One call alone reads its session once, however long the chain.
    assert_eq!(joined(&mut small(10), &store, [(1, 19), (1, 18), (1, 17)]), 1);
}

#[test]
fn what_the_last_call_of_a_large_session_needed_stays() {
    let store = vec![session("a", 50)];
    assert_eq!(joined(&mut small(5), &store, (0..50).map(|turn| (0, turn))), 0);
    // Also after it was read again, which gives the rows of all its calls.
    assert_eq!(joined(&mut small(5), &store, (10..50).map(|turn| (0, turn))), 1);
}

#[test]
fn a_base_that_is_gone_is_looked_for_once() {
    let mut calls = session("a", 5);
    calls.remove(1);
    let (mut joiner, mut reads) = (Joiner::new(ROWS), 0);
    for (at, call) in calls.clone().iter_mut().enumerate() {
        let read = |_: &Call, give: &mut dyn FnMut(&Call)| {
            reads += 1;
            calls.iter().for_each(give);
            Ok::<_, Infallible>(())
        };
        joiner.join(call, read).expect("infallible");
        assert_eq!(call.routing.is_some(), at == 0);
        assert_eq!(call.not_trainable_reasons.contains(&"routing_base_missing".to_owned()), at > 0);
    }
    assert_eq!(reads, 1);
}

/// Words that say what a text is about.
fn words(seed: u64, count: usize) -> String {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ["run", "tests", "naïve", "𝄞", "\\n", "file.rs", "0x7f", "the", "of"][(state >> 40) as usize % 9]
    };
    (0..count).map(|_| next()).collect::<Vec<_>>().join(" ")
}

/// A conversation that grows, forks and is rewritten, as a harness sends it and as lego asks for it.
fn conversation(seed: u64, turns: usize) -> Vec<Call> {
    let message = |text: &str| format!("{{\"role\":\"user\",\"content\":\"{text}\"}}");
    let mut messages = vec![message(&words(seed, 800))];
    let mut ids: Vec<u32> = (0..900).map(|id| id * 7 + seed as u32).collect();
    let mut calls = vec![];
    for turn in 0..turns {
        messages.push(message(&words(seed * 1000 + turn as u64, 60 + 90 * (turn % 3))));
        match turn % 7 {
            3 => messages[0] = message(&format!("{turn} {}", words(seed, 800))),
            5 => messages.truncate(messages.len().div_ceil(2)),
            _ => {}
        }
        if turn % 5 == 4 {
            ids.truncate(700);
        }
        ids.extend((0..150).map(|id| id * 11 + turn as u32));
        let tools = words(seed + 5, 400);
        let body = format!("{{\"messages\":[{}],\"stream\":true,\"tools\":[\"{tools}\"]", messages.join(","));
        let mut call = example::call(serde_json::json!({
            "session_id": format!("s{seed}"), "prompt_token_ids": ids, "completion_token_ids": [1, 2, 3],
            "prompt_ids_source": "engine", "completion_ids_source": "engine",
        }));
        call.call_id = CallId::now();
        call.client_request = JsonText::new(format!("{body}}}")).ok();
        call.upstream_request = match seed % 3 {
            0 => None,
            1 => JsonText::new(format!("{{\"model\":\"x{turn}\",{},\"logprobs\":true}}", &body[1..])).ok(),
            // Made of the client's, and not by adding to it.
            _ => JsonText::new(format!("[\"{}\"]", body.replace('"', "'").replace(' ', "  "))).ok(),
        };
        call.response = JsonText::new(format!("[\"{}\"]", words(seed + turn as u64, 300))).ok();
        ids.extend([1, 2, 3]);
        calls.push(call.clone());
        if turn % 4 == 1 {
            let completion_token_ids = (turn % 8 == 1).then(|| vec![9]);
            calls.push(Call { choice_index: 1, completion_token_ids, ..call });
        }
    }
    calls
}

/// Gives all calls of a store.
fn all_of(store: &[Call]) -> impl FnOnce(&Call, &mut dyn FnMut(&Call)) -> Result<(), Infallible> {
    |_, give| {
        store.iter().for_each(give);
        Ok(())
    }
}

fn json(call: &Call) -> String {
    serde_json::to_string(call).expect("JSON")
}

#[test]
fn what_is_left_out_is_a_small_part_and_comes_back_in_any_order() {
    let held = crate::capture::history::Held::default();
    for seed in 1..7 {
        let whole = conversation(seed, 40);
        let mut stored = vec![];
        // The choices of one call are appended together.
        for call in whole.chunk_by(|a, b| a.call_id == b.call_id) {
            let mut together = call.to_vec();
            held.hold(held.shorten(&mut together));
            stored.extend(together);
        }
        let size = |call: &Call| {
            let bodies = [&call.client_request, &call.upstream_request, &call.response].into_iter().flatten();
            4 * call.prompt_token_ids.as_ref().map_or(0, Vec::len)
                + bodies.map(|body| body.bytes().len()).sum::<usize>()
        };
        let bytes = |calls: &[Call]| calls.iter().map(size).sum::<usize>();
        let (before, after) = (bytes(&whole), bytes(&stored));
        assert!(after * 3 < before, "{seed}: {after} of {before}");
        let repeated = stored.iter().filter(|call| call.choice_index == 1);
        repeated.for_each(|call| assert_eq!(size(call), 0));
        let all = Parts { ids: true, bodies: true, routing: true };
        let order = (0..stored.len()).map(|at| at * 37 % stored.len());
        for most_bytes in [MAX_BYTES, 20_000] {
            for order in [(0..stored.len()).collect::<Vec<_>>(), order.clone().collect()] {
                let mut joiner = Joiner { most_bytes, ..Joiner::new(all) };
                for at in order {
                    let mut call = stored[at].clone();
                    let with_bodies = joiner.with_bodies(&call, all_of(&stored));
                    let is_whole = joiner.join(&mut call, all_of(&stored));
                    assert_eq!(is_whole, Ok(true));
                    assert_eq!(json(&call), json(&whole[at]));
                    let Ok(with_bodies) = with_bodies;
                    assert_eq!(with_bodies.client_request, call.client_request);
                    assert_eq!(with_bodies.prompt_tokens(), stored[at].prompt_tokens());
                    assert_eq!(stored[at].prompt_tokens(), whole[at].prompt_tokens());
                }
            }
        }
    }
}

#[test]
fn what_does_not_give_the_same_again_is_missing() {
    let held = crate::capture::history::Held::default();
    let whole = conversation(1, 2);
    let mut stored = vec![];
    for call in &whole {
        let mut one = [call.clone()];
        held.hold(held.shorten(&mut one));
        stored.extend(one);
    }
    let last = stored.len() - 1;
    let is_changed = |change: &dyn Fn(&mut Call)| {
        let mut store = stored.clone();
        change(&mut store[0]);
        let mut joiner = Joiner::new(Parts { ids: true, bodies: true, routing: true });
        let mut call = store[last].clone();
        let is_whole = joiner.join(&mut call, all_of(&store));
        let says = call.not_trainable_reasons.contains(&"history_base_missing".to_owned());
        assert_eq!(is_whole, Ok(!says));
        (call.prompt_token_ids.is_none(), call.client_request.is_none())
    };
    assert_eq!(is_changed(&|_| {}), (false, false));
    let other_id = |call: &mut Call| call.prompt_token_ids.as_mut().expect("ids")[3] += 1;
    assert_eq!(is_changed(&other_id), (true, false));
    assert_eq!(is_changed(&|call| call.prompt_token_ids = None), (true, false));
    let other_text = |call: &mut Call| {
        let text = call.client_request.take().expect("a body");
        call.client_request = Some(JsonText::of_read(text.get().replacen("run", "ran", 1)));
    };
    assert_eq!(is_changed(&other_text), (false, true));
    assert_eq!(is_changed(&|call| call.client_request = None), (false, true));
    assert_eq!(is_changed(&|call| call.call_id = CallId::now()), (true, true));
}

#[test]
fn a_call_of_another_day_or_session_is_no_base() {
    let held = crate::capture::history::Held::default();
    let whole = conversation(1, 2);
    held.hold(held.shorten(&mut [whole[0].clone()]));
    let is_based = |change: &dyn Fn(&mut Call)| {
        let mut call = [whole[1].clone()];
        change(&mut call[0]);
        held.shorten(&mut call);
        call[0].shared.as_ref().is_some_and(|shared| shared.base.is_some())
    };
    assert!(is_based(&|_| {}));
    assert!(!is_based(&|call| call.received_at += 86_400_000_000));
    assert!(!is_based(&|call| call.session_id = "other".parse().expect("an id")));
}

#[test]
fn a_long_conversation_begins_anew_now_and_then() {
    let held = crate::capture::history::Held::default();
    let first = conversation(1, 1).remove(0);
    let (mut ids, mut words) = (first.prompt_token_ids.clone().expect("ids"), words(9, 300));
    let mut stored = vec![];
    for turn in 0..600_u32 {
        ids.extend((0..80).map(|id| id + turn));
        words.push_str(&format!(" and then {turn} {}", "x".repeat(100)));
        let mut call = [first.clone()];
        call[0].call_id = CallId::now();
        call[0].prompt_token_ids = Some(ids.clone());
        call[0].client_request = JsonText::new(format!("[\"{words}\"]")).ok();
        held.hold(held.shorten(&mut call));
        let [call] = call;
        stored.push(call);
    }
    let whole = stored.iter().filter(|call| call.shared.as_ref().is_none_or(|shared| shared.base.is_none()));
    assert_eq!(whole.count(), 3);
    let mut joiner = Joiner::new(Parts { ids: true, bodies: true, routing: true });
    let mut last = stored[599].clone();
    assert_eq!(joiner.join(&mut last, all_of(&stored)), Ok(true));
    assert_eq!(last.prompt_token_ids, Some(ids));
    assert_eq!(last.client_request, JsonText::new(format!("[\"{words}\"]")).ok());
}

#[test]
fn choices_that_are_appended_apart_go_on_from_each_other() {
    let held = crate::capture::history::Held::default();
    let mut stored = vec![];
    let mut whole = vec![];
    for seed in 1..4 {
        let call = conversation(seed, 1).remove(0);
        let choice = |choice_index| Call { choice_index, completion_token_ids: None, ..call.clone() };
        // As a call of three choices whose first ended early, or whose second did.
        let appends =
            [[vec![choice(0)], vec![choice(1), choice(2)]], [vec![choice(2), choice(1)], vec![choice(0)]]];
        for mut append in appends.into_iter().nth(seed as usize % 2).expect("two") {
            whole.extend(append.clone());
            held.hold(held.shorten(&mut append));
            stored.extend(append);
            // Another call of the session comes between them.
            let mut between = conversation(seed, 1);
            whole.extend(between.clone());
            held.hold(held.shorten(&mut between));
            stored.extend(between);
        }
    }
    let shares = |call: &&Call| call.shared.as_ref().is_some_and(|shared| shared.response.is_some());
    assert_eq!(stored.iter().filter(shares).count(), 3);
    for step in [1, 2, 5, 7] {
        let mut joiner = Joiner::new(Parts { ids: true, bodies: true, routing: true });
        for at in (0..stored.len()).map(|at| at * step % stored.len()) {
            let mut call = stored[at].clone();
            assert_eq!(joiner.join(&mut call, all_of(&stored)), Ok(true));
            assert_eq!(json(&call), json(&whole[at]));
        }
    }
}

#[test]
fn bodies_that_only_a_filter_looks_at_are_forgotten_too() {
    let mut joiner =
        Joiner { most_bytes: 100_000, ..Joiner::new(Parts { ids: false, bodies: true, routing: false }) };
    for session in 0..100 {
        let mut call = conversation(1, 1).remove(0);
        call.session_id = format!("s{session}").parse().expect("an id");
        joiner.with_bodies(&call, all_of(&[])).expect("whole");
        assert!(joiner.bytes <= 100_000, "{}", joiner.bytes);
    }
}

/// Numbers that are no secret.
fn numbers(mut state: u64) -> impl FnMut(u32) -> u32 {
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % below
    }
}

#[test]
fn splices_of_any_numbers_are_missing_and_never_something_else() {
    let mut next = numbers(7);
    for round in 0..4_000 {
        let body = |bytes: u32| JsonText::new(format!("\"{}\"", "x".repeat(bytes as usize))).ok();
        let mut base = example::call(serde_json::json!({}));
        (base.call_id, base.prompt_token_ids) = (CallId::now(), Some((0..next(40)).collect()));
        (base.client_request, base.upstream_request) = (body(next(300)), body(next(300)));
        let mut call = Call { call_id: CallId::now(), ..base.clone() };
        let edges = [0, 1, 2, 100, 300, u32::MAX - 1, u32::MAX];
        let mut number = || if next(3) == 0 { edges[next(7) as usize] } else { next(320) };
        let mut splice = |source| {
            let parts = (0..number() % 4).map(|_| Part { at: number(), from: number(), length: number() });
            let parts = parts.collect();
            Some(Splice { source, length: number(), crc32c: number(), parts })
        };
        let shared = Shared {
            // Also of itself, of one that is nowhere, and of none.
            base: [Some(base.choice()), Some(call.choice()), None][round % 3],
            client_request: splice(SpliceSource::Base),
            upstream_request: splice([SpliceSource::Base, SpliceSource::ClientRequest][round % 2]),
            response: splice(SpliceSource::Base),
            ids: Some(SharedIds { count: number(), crc32c: number() }),
        };
        call.shared = Some(Box::new(shared));
        let stored = call.clone();
        let mut joiner = Joiner::new(Parts { ids: true, bodies: true, routing: true });
        let read = |_: &Call, give: &mut dyn FnMut(&Call)| {
            give(&base);
            give(&stored);
            Ok::<_, Infallible>(())
        };
        assert!(!joiner.join(&mut call, read).expect("infallible"), "{stored:?}");
        assert!(!call.trainable && call.not_trainable_reasons.contains(&"history_base_missing".to_owned()));
        let bodies = [&call.client_request, &call.upstream_request, &call.response];
        assert!(bodies.iter().all(|body| body.is_none()) && call.prompt_token_ids.is_none(), "{stored:?}");
    }
}
