//! Expert routing of samples: rows by position, over turns, left-out rows, and two calls that differ.

use std::sync::Arc;

use lego::config::Samples;
use lego::record::{Call, Position, Routing, RoutingShape};
use lego::trajectory::{Built, lineages, samples};

use crate::calls::{call, routing};

fn turn(prompt: &[u32], completion: &[u32], at: i64, routing: Routing) -> Call {
    let mut one = call("s", prompt, completion);
    one.received_at += at;
    one.routing = Some(routing);
    one
}

fn build(calls: impl IntoIterator<Item = Call>) -> Built {
    let calls: Vec<Arc<Call>> = calls.into_iter().map(Arc::new).collect();
    let built = samples(&lineages(&calls), None, &Samples::default());
    built.check(&calls).expect("balanced");
    built
}

/// The first id of the row at each position.
fn firsts(built: &Built, sample: usize) -> Vec<Option<u8>> {
    let sample = &built.samples[sample];
    let experts = sample.routed_experts.as_ref().expect("routing");
    assert_eq!(experts.tokens(), sample.token_ids.len());
    let at = |position: usize| experts.row(Position::new(position)).map(|row| row[0]);
    (0..sample.token_ids.len()).map(at).collect()
}

#[test]
fn c16_turns_are_joined_without_gap_or_overlap_and_the_last_token_has_no_row() {
    // 4 tokens have 3 rows; of 7 tokens the second call has all 6, or the last 3.
    for start in [0, 3] {
        let first = turn(&[1, 2], &[3, 4], 0, routing(0, 3, 0));
        let second = turn(&[1, 2, 3, 4, 9], &[5, 6], 1, routing(start, 6 - start, start * 4));
        let built = build([second, first]);
        assert_eq!(firsts(&built, 0), [Some(0), Some(4), Some(8), Some(12), Some(16), Some(20), None]);
        assert_eq!((built.differing_rows, built.mixed_routing), (0, 0));
    }
}

#[test]
fn a_row_that_is_not_there_is_missing_and_not_zero() {
    let first = turn(&[1, 2], &[3, 4], 0, routing(0, 2, 40));
    let second = turn(&[1, 2, 3, 4, 9], &[5, 6], 1, routing(4, 2, 80));
    let built = build([first, second]);
    assert_eq!(firsts(&built, 0), [Some(40), Some(44), None, None, Some(80), Some(84), None]);
    let experts = built.samples[0].routed_experts.clone().expect("some");
    assert_eq!(experts.validity(), [true, true, false, false, true, true, false]);
    assert_eq!(experts.into_whole(), None);
}

#[test]
fn rows_of_a_later_call_never_stand_for_those_that_tokens_were_sampled_with() {
    let first = call("s", &[1, 2], &[3, 4]);
    let second = turn(&[1, 2, 3, 4, 9], &[5, 6], 1, routing(0, 6, 0));
    assert_eq!(firsts(&build([first, second]), 0), [None, None, None, Some(12), Some(16), Some(20), None]);
}

#[test]
fn rows_that_two_calls_have_otherwise_are_counted_and_the_first_ones_are_taken() {
    let first = || turn(&[1, 2], &[3, 4], 0, routing(0, 3, 0));
    let other = routing(1, 5, 100);
    let second = || turn(&[1, 2, 3, 4, 9], &[5, 6], 1, other.clone());
    for calls in [[first(), second()], [second(), first()]] {
        let built = build(calls);
        assert_eq!(firsts(&built, 0), [Some(0), Some(4), Some(8), Some(108), Some(112), Some(116), None]);
        assert_eq!(built.differing_rows, 2);
    }
}

#[test]
fn rows_that_were_left_out_are_found_where_they_are_and_no_others() {
    // The base is a retry that lost: its rows of the prompt are good for all that share it, those of its reply are not.
    let base = turn(&[1, 2], &[7, 7, 7], 0, routing(0, 4, 0));
    let rest = routing(0, 3, 0).without_first(2, base.choice());
    let first = turn(&[1, 2], &[3, 4], 1, rest);
    let second = turn(&[1, 2, 3, 4, 9], &[5], 2, routing(3, 2, 60));
    let built = build([base, first, second]);
    assert_eq!(built.samples.len(), 1);
    assert_eq!(firsts(&built, 0), [Some(0), Some(4), Some(8), Some(60), Some(64), None]);
    assert_eq!(built.differing_rows, 0);
}

#[test]
fn a_branch_and_what_is_behind_the_window_have_their_own_rows() {
    let first = turn(&[1, 2], &[3, 4], 0, routing(0, 3, 0));
    let second = turn(&[1, 2, 3, 4, 9], &[5], 1, routing(3, 2, 60));
    let branch = turn(&[1, 2, 3, 4, 8], &[6], 2, routing(3, 2, 80));
    let built = build([first.clone(), second, branch]);
    assert_eq!(firsts(&built, 0)[3..], [Some(60), Some(64), None]);
    assert_eq!(firsts(&built, 1), [Some(0), Some(4), Some(8), Some(80), Some(84), None]);
    let calls = [Arc::new(first)];
    let policy = Samples { max_tokens: 3, ..Samples::default() };
    assert_eq!(firsts(&samples(&lineages(&calls), None, &policy), 0), [Some(0), Some(4), None]);
}

#[test]
fn rows_of_two_models_make_no_routing() {
    let first = turn(&[1, 2], &[3, 4], 0, routing(0, 3, 0));
    let of = routing(0, 5, 0);
    let shape = RoutingShape { layers: 1, top_k: 4, ..*of.shape() };
    let other = Routing::new(shape, of.data().clone()).expect("as many bytes");
    let built = build([first, turn(&[1, 2, 3, 4, 9], &[5], 1, other)]);
    assert_eq!((built.samples.len(), built.mixed_routing), (1, 1));
    assert_eq!(built.samples[0].routed_experts, None);
    let none = build([call("s", &[1], &[2])]);
    assert_eq!((none.samples[0].routed_experts.clone(), none.mixed_routing), (None, 0));
}
