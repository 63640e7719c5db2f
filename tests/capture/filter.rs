//! Predicates: what is pushed down to the files leaves exactly what filtering all calls leaves.

use std::path::Path;

use lego::capture::{Filter, Query, Reader, Writer, WriterOptions, column_names};
use lego::record::{Call, CallKind, CallSink, CallStatus};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::calls::{as_json, call, failed_call, routing};
use crate::store::sorted_json;

/// Days, files and the journal; each session in few of the files.
async fn store(dir: &Path) {
    for file in 0..6_u32 {
        let writer = Writer::open(dir, WriterOptions::default()).expect("free folder");
        for number in 0..4 {
            let session = format!("s{}", file / 2 * 4 + number);
            let mut one = call(&session, &vec![1; number as usize], &vec![2; (file + number) as usize % 3]);
            one.received_at += i64::from(file) * 43_200_000_000 + i64::from(number) * 1_000_000;
            one.status = CallStatus::ALL[(file + number) as usize % 3];
            one.kind = if number == 3 { CallKind::Judge } else { CallKind::Policy };
            one.harness = (number % 2 == 0).then(|| format!("h%{file}"));
            one.trial_id = one.trial_id.filter(|_| file % 2 == 0);
            one.sampling_sent.temperature = [None, Some(0.5), Some(1.0)][(file % 3) as usize];
            one.routing = (number == 1).then(|| routing(0, file, 0));
            one.ttft_us = (number != 2).then_some(u64::from(file));
            writer.append(vec![one, failed_call(&format!("f{file}"))]).await.expect("room");
        }
        // What the last one wrote is left in the journal.
        if file < 5 {
            writer.close().await;
        }
    }
}

/// A predicate, of tests with values that are and that are not in the store.
fn predicate() -> impl Strategy<Value = String> {
    let text = prop_oneof![
        (0..14_u32).prop_map(|n| format!("session_id OP 's{n}'")),
        (0..7_u32).prop_map(|n| format!("session_id OP 'f{n}'")),
        (0..14_u32).prop_map(|n| format!("trial_id OP 'trial-of-s{n}'")),
        (0..7_u32).prop_map(|n| format!("harness OP 'h%{n}'")),
        Just("error OP 'connection refused'".to_owned()),
        (27..33_u32).prop_map(|day| format!("received_at OP '2026-11-{:02} 10:00'", day.min(30))),
        (0..3_u32).prop_map(|hour| format!("received_at OP '2026-12-01 0{hour}:00:01'")),
        (28..31_u32).prop_map(|day| format!("date OP '2026-11-{day}'")),
        (0..4_u32).prop_map(|n| format!("prompt_tokens OP {n}")),
        (0..3_u32).prop_map(|n| format!("completion_tokens OP {n}")),
        (0..6_u32).prop_map(|n| format!("ttft_us OP {n}")),
        (0..6_u32).prop_map(|n| format!("routing_rows OP {n}")),
        Just("sampling_sent.temperature OP 0.5".to_owned()),
    ];
    let op = prop::sample::select(vec!["=", "!=", "<", "<=", ">", ">="]);
    let compared = (text, op).prop_map(|(test, op)| test.replace("OP", op));
    let others = prop::sample::select(vec![
        "status = 'ok'",
        "status in ('truncated', 'timeout')",
        "kind != 'policy'",
        "trainable = true",
        "session_id in ('s1', 's5', 'nobody')",
        "session_id not in ('s1', 's2', 's3', 's4', 's5', 's6')",
        "trial_id in ('trial-of-s0', 'trial-of-s9')",
        "session_id like 's1%'",
        "session_id like '_1'",
        "trial_id not like 'trial-of-s%'",
        "harness like 'h\\%4'",
        "trial_id is null",
        "trial_id is not null",
        "received_at is null",
        "routing is not null",
        "client_request like '%héllo%'",
        "not_trainable_reasons like '%upstream_error%'",
        "top_logprobs is null",
        "base_len > 3",
    ]);
    let leaf = prop_oneof![3 => compared, 2 => others.prop_map(str::to_owned)];
    leaf.prop_recursive(4, 24, 3, |inner| {
        prop_oneof![
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("({a}) and ({b})")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{a} or {b}")),
            inner.prop_map(|a| format!("not ({a})")),
        ]
    })
}

#[tokio::test]
async fn what_is_pushed_down_leaves_what_filtering_all_leaves() {
    let dir = tempfile::tempdir().expect("folder");
    store(dir.path()).await;
    let read = |query: Query| -> Vec<Call> {
        Reader::open(dir.path(), query).expect("readable").collect::<Result<_, _>>().expect("whole")
    };
    let all = read(Query::default());
    assert_eq!(all.len(), 6 * 8);
    let mut runner = TestRunner::new_with_rng(
        Config { cases: 100, failure_persistence: None, ..Config::default() },
        TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]),
    );
    let (mut some, mut none) = (0, 0);
    let tested = runner.run(&predicate(), |text| {
        let filter: Filter = text.parse().map_err(|error| TestCaseError::fail(format!("{text}: {error}")))?;
        let wanted: Vec<Call> = all.iter().filter(|call| filter.matches(call)).cloned().collect();
        let found = read(Query { filter: Some(filter.clone()), ..Query::default() });
        prop_assert_eq!(sorted_json(&found), sorted_json(&wanted), "{}", &text);
        // What is not asked for is not needed to decide, or is read and taken away again.
        let lean =
            Query { filter: Some(filter), without_bodies: true, without_routing: true, ..Query::default() };
        let lean = read(lean);
        prop_assert!(lean.iter().all(|call| call.response.is_none() && call.routing.is_none()));
        prop_assert_eq!(lean.len(), wanted.len(), "{}", &text);
        Ok(())
    });
    tested.expect("equal");
    let mut count = |text: &str, expected: usize| {
        let filter: Filter = text.parse().expect(text);
        let found = all.iter().filter(|call| filter.matches(call)).count();
        assert_eq!(found, expected, "{text}");
        if found == 0 { none += 1 } else { some += 1 }
    };
    // Counted by hand, so that both sides are not wrong together.
    count("session_id like 'f%'", 24);
    count("trial_id is null", 24 + 12);
    count("trial_id is null and session_id like 's%'", 12);
    count("not trial_id = 'trial-of-s0'", 11);
    count("kind = 'judge'", 6);
    count("routing_rows > 2", 3);
    count("ttft_us is null or ttft_us < 2", 24 + 6 + 6);
    count("date = '2026-11-29' and prompt_tokens = 3", 2);
    count("http_status = 502 and trainable = true", 0);
    count("base_call_id is not null or not prompt_logprobs is null", 0);
    assert_eq!((some, none), (8, 2));
}

#[test]
fn every_column_of_the_files_can_be_named() {
    for column in column_names() {
        // Sampling parameters are named one by one.
        let name = if column.starts_with("sampling_") && column != "sampling_mask" {
            format!("{column}.seed")
        } else {
            column
        };
        let parsed = format!("{name} is not null").parse::<Filter>();
        assert!(parsed.is_ok(), "{name}: {parsed:?}");
    }
    let one = call("a", &[1], &[2]);
    let text = format!("call_id = '{}'", one.call_id.to_string().to_uppercase());
    assert!(text.parse::<Filter>().expect("an id").matches(&one), "{}", as_json(&one));
}
