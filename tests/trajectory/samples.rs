//! What is trained of lineages, as the config says, and where the rest goes.

use std::collections::BTreeMap;
use std::sync::Arc;

use lego::config::{AuxKind, Samples, SideKind, TrainedLineages};
use lego::record::{Call, CallKind, WeightSpan};
use lego::trajectory::{Built, lineages, samples};
use proptest::prelude::*;

use crate::calls::call;
use crate::chat::{Agent, Says, Session, says};

fn build(calls: &[Arc<Call>], policy: &Samples) -> Built {
    let built = samples(&lineages(calls), None, policy);
    built.check(calls).expect("every token in one bucket");
    built
}

fn buckets(built: &Built) -> BTreeMap<String, u64> {
    let mut buckets = BTreeMap::new();
    for entry in &built.ledger {
        *buckets.entry(entry.disposition.bucket()).or_default() += entry.tokens;
    }
    buckets
}

fn made(prompt: &[u32], completion: &[u32], at: i64) -> Arc<Call> {
    let mut one = call("s", prompt, completion);
    one.received_at += at;
    Arc::new(one)
}

/// An agent that is broken off once, with a sub-agent and a title.
fn session() -> Session {
    let mut session = Session::default();
    let mut title = Agent::new("Give a title.", "Repair the parser");
    title.tools = serde_json::json!([]);
    title.ask(&mut session, &says("Parser"));
    let mut main = Agent::new("Use the tools.", "Repair the parser");
    let tool = Some(("agent".to_owned(), r#"{"prompt": "List all of the files"}"#.to_owned()));
    main.ask(&mut session, &Says { tool, ..says("I ask.") });
    main.result("it runs");
    let mut sub = Agent::new("You are a sub-agent.", "List all of the files");
    sub.ask(&mut session, &says("There are two files, and each has a test."));
    main.ask(&mut session, &says("I wait for it, and go on."));
    main.user("Yes");
    main.system.push_str(" It is late.");
    main.ask(&mut session, &says("Done."));
    session
}

fn lengths(session: &Session, at: &[usize]) -> u64 {
    at.iter().map(|at| session.calls[*at].completion_token_ids.as_ref().expect("ids").len() as u64).sum()
}

#[test]
fn lineages_are_trained_as_the_config_says() {
    let session = session();
    let build = |policy: &Samples| build(&session.calls, policy);
    let all = build(&Samples::default());
    assert_eq!(all.samples.len(), 4);
    assert_eq!(buckets(&all), BTreeMap::from([("trained".to_owned(), lengths(&session, &[0, 1, 2, 3, 4]))]));

    let main = build(&Samples { lineages: TrainedLineages::Main, ..Samples::default() });
    assert_eq!(main.samples.iter().map(|sample| sample.lineage_id).collect::<Vec<_>>(), [1, 3]);
    let expected = [
        ("trained".to_owned(), lengths(&session, &[1, 3, 4])),
        ("dropped: not the main agent's".to_owned(), lengths(&session, &[0, 2])),
    ];
    assert_eq!(buckets(&main), BTreeMap::from(expected));

    let longest = build(&Samples { lineages: TrainedLineages::Longest, ..Samples::default() });
    assert_eq!(longest.samples.iter().map(|sample| sample.lineage_id).collect::<Vec<_>>(), [1]);
    let expected = [
        ("trained".to_owned(), lengths(&session, &[1, 3])),
        ("dropped: not in the longest lineage".to_owned(), lengths(&session, &[0, 2, 4])),
    ];
    assert_eq!(buckets(&longest), BTreeMap::from(expected));

    for (kind, at) in [(SideKind::SubAgent, 2), (SideKind::Side, 0)] {
        let some = build(&Samples { leave_out: vec![kind], ..Samples::default() });
        assert_eq!(some.samples.len(), 3);
        assert_eq!(buckets(&some)["aux_call"], lengths(&session, &[at]), "{kind:?}");
    }
}

#[test]
fn a_compaction_in_the_agents_own_conversation_can_be_left_out_and_stays_context() {
    let (mut session, mut main) = (Session::default(), Agent::new("Use the tools.", "Repair the parser"));
    main.ask(&mut session, &says("I have read the parser and found the reason."));
    main.user("Sum up.");
    let summary =
        "The parser was read, and the reason for the failing tests was found in its third function.";
    main.ask(&mut session, &says(summary));
    main.messages = vec![serde_json::json!({"role": "user", "content": summary})];
    main.ask(&mut session, &says("I repair it."));
    let some =
        build(&session.calls, &Samples { leave_out: vec![SideKind::Compaction], ..Samples::default() });
    assert_eq!(some.samples.len(), 2);
    assert_eq!(buckets(&some)["aux_call"], lengths(&session, &[1]));
    assert_eq!(buckets(&some)["trained"], lengths(&session, &[0, 2]));
}

#[test]
fn what_is_behind_the_window_is_cut_off_on_the_right_and_counted() {
    let calls = [
        made(&[1, 2], &[3, 4], 0),
        made(&[1, 2, 3, 4, 9], &[5, 6, 7], 1),
        made(&[1, 2, 3, 4, 9, 5, 6, 7, 9], &[8], 2),
    ];
    let cut = |max_tokens: usize| {
        let built = build(&calls, &Samples { max_tokens, ..Samples::default() });
        let buckets = buckets(&built);
        let of = |name: &str| buckets.get(name).copied().unwrap_or(0);
        let tokens: Vec<Vec<u32>> = built.samples.iter().map(|sample| sample.token_ids.clone()).collect();
        (tokens, of("trained"), of("over_window"))
    };
    assert_eq!(cut(0), (vec![vec![1, 2, 3, 4, 9, 5, 6, 7, 9, 8]], 6, 0));
    assert_eq!(cut(10), cut(0));
    assert_eq!(
        cut(9),
        (vec![vec![1, 2, 3, 4, 9, 5, 6, 7]], 5, 1),
        "context behind the last token is left out"
    );
    assert_eq!(cut(7), (vec![vec![1, 2, 3, 4, 9, 5, 6]], 4, 2));
    assert_eq!(cut(5), (vec![vec![1, 2, 3, 4]], 2, 4));
    assert_eq!(cut(3), (vec![vec![1, 2, 3]], 1, 5));
    assert_eq!(cut(2), (vec![], 0, 6));
}

#[test]
fn the_longest_is_the_longest_within_the_window() {
    let long = made(&[1; 20], &[2; 8], 0);
    let short = made(&[3], &[4; 5], 1);
    let calls = [long, short];
    let policy =
        |max_tokens| Samples { lineages: TrainedLineages::Longest, max_tokens, ..Samples::default() };
    assert_eq!(build(&calls, &policy(0)).samples[0].lineage_id, 0);
    let fitted = build(&calls, &policy(22));
    assert_eq!(fitted.samples[0].lineage_id, 1);
    assert_eq!(buckets(&fitted)["dropped: not in the longest lineage"], 8);
}

#[test]
fn a_version_and_a_temperature_that_is_cut_with_its_token() {
    let mut one = call("s", &[1], &[2, 3, 4]);
    let span = |version: &str, start, end| WeightSpan { version: version.to_owned(), start, end };
    one.weight_spans = Some(vec![span("7", 0, 1), span("8", 1, 3)]);
    let built = build(&[Arc::new(one)], &Samples { max_tokens: 3, ..Samples::default() });
    assert_eq!(built.samples[0].weight_version, [None, Some(7), Some(8)]);
    assert_eq!(built.samples[0].temperature, [None, Some(1.0), Some(1.0)]);
}

#[test]
fn calls_of_another_kind_are_lineages_and_never_trained() {
    let mut judge = call("s", &[1, 2, 3, 4, 9], &[5]);
    (judge.kind, judge.received_at) = (CallKind::Judge, judge.received_at + 1);
    let calls = [made(&[1, 2], &[3, 4], 0), Arc::new(judge), made(&[1, 2, 3, 4, 8], &[6], 2)];
    let found = lineages(&calls);
    assert_eq!(found.lineages.iter().map(|lineage| lineage.calls.len()).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(
        buckets(&build(&calls, &Samples::default())),
        BTreeMap::from([("aux_call".to_owned(), 1), ("trained".to_owned(), 3)])
    );
}

/// A call that was captured as `aux`, whose record says this against it besides.
fn aside(prompt: &[u32], completion: &[u32], at: i64, more: &[&str]) -> Arc<Call> {
    let mut one = Arc::unwrap_or_clone(made(prompt, completion, at));
    (one.kind, one.trainable) = (CallKind::Aux, false);
    let reasons = ["kind_aux"].iter().chain(more);
    one.not_trainable_reasons = reasons.map(|reason| (*reason).to_owned()).collect();
    Arc::new(one)
}

#[test]
fn side_calls_are_taken_in_if_nothing_but_their_kind_speaks_against_them() {
    let version = |call: &Arc<Call>, label: &str| {
        let mut call = Call::clone(call);
        call.weight_spans.iter_mut().flatten().for_each(|span| span.version = label.to_owned());
        Arc::new(call)
    };
    let mut silent = Call::clone(&aside(&[5], &[1; 16], 5, &[]));
    silent.not_trainable_reasons.clear();
    let mut judge = Call::clone(&aside(&[6], &[1; 32], 6, &[]));
    (judge.kind, judge.not_trainable_reasons) = (CallKind::Judge, vec!["kind_judge".to_owned()]);
    let mut no_usage = Call::clone(&aside(&[7], &[1; 64], 7, &[]));
    no_usage.usage = None;
    let mut no_prompt = Call::clone(&aside(&[8], &[1; 128], 8, &[]));
    no_prompt.prompt_token_ids = None;
    let calls = [
        aside(&[1], &[1; 1], 0, &[]),
        made(&[2], &[1; 2], 1),
        aside(&[3], &[1; 4], 2, &["greedy_sampling", "aux_route"]),
        version(&aside(&[4], &[1; 8], 4, &[]), "default"),
        Arc::new(silent),
        Arc::new(judge),
        Arc::new(no_usage),
        Arc::new(no_prompt),
        // A retry, and one that is continued.
        aside(&[9], &[1; 256], 9, &[]),
        aside(&[9], &[2; 512], 10, &[]),
        aside(&[&[9_u32][..], &[1; 256], &[3]].concat(), &[1; 1024], 11, &[]),
    ];
    let plain = BTreeMap::from([("aux_call".to_owned(), 2045), ("trained".to_owned(), 2)]);
    assert_eq!(buckets(&build(&calls, &Samples::default())), plain);
    // Nothing says that a reply of theirs stands for a history.
    let compactions = Samples { take_in: vec![AuxKind::Compaction], ..Samples::default() };
    assert_eq!(buckets(&build(&calls, &compactions)), plain);
    let sides = Samples { take_in: vec![AuxKind::Side], ..Samples::default() };
    let expected = [
        ("trained", 1 + 2 + 256 + 1024),
        ("superseded", 512),
        ("aux_call", 32),
        ("usage_unknown", 64),
        ("dropped: greedy_sampling, aux_route", 4),
        ("dropped: the weight version of a token is not known", 8),
        ("dropped: not trainable", 16),
        ("dropped: no prompt ids", 128),
    ];
    let expected: BTreeMap<String, u64> =
        expected.iter().map(|(name, tokens)| ((*name).to_owned(), *tokens)).collect();
    assert_eq!(buckets(&build(&calls, &sides)), expected);
}

fn policy() -> impl Strategy<Value = Samples> {
    let lineages =
        prop::sample::select(vec![TrainedLineages::All, TrainedLineages::Main, TrainedLineages::Longest]);
    let kinds = vec![SideKind::SubAgent, SideKind::Side, SideKind::Compaction, SideKind::Other];
    let leave_out = prop::sample::subsequence(kinds, 0..=4);
    let take_in = prop::sample::subsequence(vec![AuxKind::Side, AuxKind::Compaction], 0..=2);
    (lineages, 0..40_usize, leave_out, take_in).prop_map(|(lineages, max_tokens, leave_out, take_in)| {
        Samples { lineages, max_tokens, leave_out, take_in }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_policy_loses_a_token_or_trains_more_than_all_do(
        calls in prop::collection::vec(
            (prop::collection::vec(0..3_u32, 1..9), prop::collection::vec(0..3_u32, 1..5), 0..4), 0..9),
        policy in policy(),
    ) {
        let call = |((prompt, completion, kind), at): (&(Vec<u32>, Vec<u32>, i32), i64)| match kind {
            0 => aside(prompt, completion, at, &[]),
            _ => made(prompt, completion, at),
        };
        let calls: Vec<Arc<Call>> = calls.iter().zip(0..).map(call).collect();
        let all = build(&calls, &Samples { take_in: policy.take_in.clone(), ..Samples::default() });
        let some = build(&calls, &policy);
        let sum = |built: &Built| built.ledger.iter().map(|entry| entry.tokens).sum::<u64>();
        prop_assert_eq!(sum(&all), sum(&some));
        for sample in &some.samples {
            prop_assert!(policy.max_tokens == 0 || sample.token_ids.len() <= policy.max_tokens);
            // It is the beginning of the one that is trained without bounds.
            let whole = all.samples.iter().find(|whole| whole.lineage_id == sample.lineage_id);
            let whole = whole.expect("trained as well");
            prop_assert!(whole.token_ids.starts_with(&sample.token_ids));
            prop_assert!(whole.loss_mask.starts_with(&sample.loss_mask));
            prop_assert!(whole.logprobs.starts_with(&sample.logprobs));
            prop_assert_eq!(sample.loss_mask.last(), Some(&true));
        }
    }
}
