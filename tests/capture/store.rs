//! Writing and reading in one process.

use std::path::Path;
use std::sync::Arc;

use lego::capture::{CaptureError, Query, Reader, Writer, WriterOptions, column_names};
use lego::record::{Call, CallSink, ChoiceId, SinkError};

use crate::calls::{as_json, call, failed_call, routing};

pub fn read(dir: &Path, query: Query) -> Vec<Call> {
    let mut reader = Reader::open(dir, query).expect("readable");
    let calls = reader.by_ref().collect::<Result<_, _>>().expect("whole");
    assert_eq!(reader.skipped(), [] as [String; 0]);
    calls
}

pub fn sorted_json(calls: &[Call]) -> Vec<String> {
    let mut calls: Vec<String> = calls.iter().map(as_json).collect();
    calls.sort();
    calls
}

fn varied() -> Vec<Call> {
    let mut other_day = call("b", &[1, 2], &[3, 4, 5]);
    other_day.received_at += 86_400_000_000;
    other_day.completion_logprobs = Some(vec![Some(-0.1), None, Some(-0.0)]);
    other_day.sampling_requested.stop = Some(vec!["\n".to_owned(), String::new()]);
    other_day.sampling_requested.max_tokens = Some(u64::MAX);
    other_day.sampling_requested.seed = Some(i64::MIN);
    other_day.sampling_requested.logit_bias = Some(r#"{"1":2}"#.to_owned());
    let mut empty = call("b", &[u32::MAX, 0], &[]);
    empty.tool_calls = Some(vec![]);
    empty.not_trainable_reasons = vec!["empty".to_owned()];
    empty.retry_of = Some(other_day.call_id);
    empty.rejoined = 3;
    let mut routed = call("r", &[1, 2], &[3, 4]);
    routed.routing = Some(routing(0, 3, 0));
    routed.upstream_kind = lego::record::UpstreamKind::Anthropic;
    routed.completion_ids_source = lego::record::IdsSource::TokenIdStrings;
    let mut wide = call("r", &[1; 5], &[3, 4]);
    wide.routing = Some(routing(2, 4, 250));
    let mut widest = call("r", &[1], &[3]);
    widest.routing = Some(routing(0, 1, 65_534));
    let mut no_rows = call("r", &[1], &[]);
    no_rows.routing = Some(routing(0, 0, 0));
    vec![call("a", &[1], &[2]), failed_call("a"), other_day, empty, routed, wide, widest, no_rows]
}

#[tokio::test]
async fn every_field_comes_back_from_journal_and_parquet() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    let calls = varied();
    writer.append(calls[..1].to_vec()).await.expect("room");
    writer.append(calls[1..].to_vec()).await.expect("room");
    let wanted = sorted_json(&calls);
    assert_eq!(sorted_json(&read(dir.path(), Query::default())), wanted, "journal");
    let closed = writer.close().await;
    assert_eq!((closed.appends, closed.left_in_journal.len()), (2, 0));
    assert_eq!(writer.close().await, closed, "closing twice is harmless");
    assert_eq!(std::fs::read_dir(dir.path().join("journal")).expect("folder").count(), 0);
    assert_eq!(sorted_json(&read(dir.path(), Query::default())), wanted, "Parquet");
    for date in ["2026-11-29", "2026-11-30"] {
        assert!(dir.path().join(format!("date={date}")).is_dir(), "{date}");
    }
    let refused = writer.append(calls).await;
    assert!(matches!(refused, Err(SinkError::Closed { .. })), "{refused:?}");
}

#[tokio::test]
async fn routing_of_many_megabytes_a_call_is_stored_and_read_call_by_call() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    let rows = 1 << 20;
    for session in 0..3 {
        let mut large = call(&format!("s{session}"), &[1; 4], &[2]);
        large.routing = Some(routing(0, rows, 0));
        writer.append(vec![large]).await.expect("room");
    }
    let check = || {
        let calls = read(dir.path(), Query::session("s1".parse().expect("id")));
        let routing = calls[0].routing.as_ref().expect("routing");
        assert_eq!((calls.len(), routing.shape().rows, routing.data().len()), (1, rows, 16 << 20));
        assert!(routing.ids().eq(0..4 * rows));
        let lean = read(dir.path(), Query { without_routing: true, ..Query::default() });
        assert!(lean.len() == 3 && lean.iter().all(|call| call.routing.is_none() && call.response.is_some()));
    };
    check();
    writer.close().await;
    check();
}

#[tokio::test]
async fn rows_that_earlier_calls_have_are_put_back_and_missing_ones_are_told() {
    let dir = tempfile::tempdir().expect("folder");
    let base = |call: &Call| ChoiceId { call_id: call.call_id, choice_index: call.choice_index };
    // Each goes on from the one before it; the last one from the second, of which it shares one row.
    let mut calls = vec![call("a", &[1], &[2])];
    calls[0].routing = Some(routing(0, 3, 0));
    for (rows, shared) in [(6, 3), (9, 6), (7, 4)] {
        let on = calls[calls.len().min(2) - 1].clone();
        let mut next = call("a", &[1], &[2]);
        next.routing = Some(routing(0, rows, 0).without_first(shared, base(&on)));
        calls.push(next);
    }
    let mut lost = call("a", &[1], &[2]);
    lost.routing =
        calls[1].routing.clone().map(|routing| routing.based_on(Some(base(&call("a", &[1], &[2])))));
    let check = || {
        let expected = [3, 6, 9, 7].map(|rows| Some(routing(0, rows, 0)));
        for query in [Query::default(), Query::session("a".parse().expect("id"))] {
            let read = read(dir.path(), query);
            let found: Vec<_> = read.iter().take(4).map(|call| call.routing.clone()).collect();
            assert_eq!(found, expected);
            assert_eq!((read[4].routing.as_ref(), read[4].trainable), (None, false));
            assert_eq!(read[4].not_trainable_reasons, ["routing_base_missing"]);
        }
        for (call, expected) in calls.iter().zip(&expected) {
            let alone = read(dir.path(), Query { call_id: Some(call.call_id), ..Query::default() });
            assert_eq!((alone.len(), &alone[0].routing), (1, expected));
        }
    };
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    for call in calls.iter().chain([&lost]) {
        writer.append(vec![call.clone()]).await.expect("room");
    }
    check();
    writer.close().await;
    check();
}

#[tokio::test]
async fn log_prob_bits_survive() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    let bits = [0x0000_0001, 0x8000_0000, 0xbdcc_cccd, 0xff80_0000, 0x7fc0_0001, 0xc2c8_0001];
    let mut odd = call("a", &[1], &[0; 6]);
    odd.completion_logprobs = Some(bits.map(|bits| Some(f32::from_bits(bits))).to_vec());
    writer.append(vec![odd]).await.expect("room");
    let stored = || {
        let calls = read(dir.path(), Query::default());
        let values = calls[0].completion_logprobs.clone().expect("there");
        values.into_iter().map(|value| value.expect("no null").to_bits()).collect::<Vec<_>>()
    };
    assert_eq!(stored(), bits, "journal");
    writer.close().await;
    assert_eq!(stored(), bits, "Parquet");
}

#[tokio::test]
async fn filters_choose_sessions_trials_and_calls_in_journal_and_parquet() {
    let dir = tempfile::tempdir().expect("folder");
    let mut wanted = None;
    for round in 0..2 {
        let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
        for session in 0..40 {
            let one = call(&format!("s{session}"), &[1, round], &[2]);
            wanted = (session == 7).then_some(one.call_id).or(wanted);
            writer.append(vec![one]).await.expect("room");
        }
        let count = |query| read(dir.path(), query).len();
        let rounds = round as usize + 1;
        let check = || {
            assert_eq!(count(Query::session("s7".parse().expect("id"))), rounds);
            let trial_id = "trial-of-s39".parse().ok();
            assert_eq!(count(Query { trial_id, ..Query::default() }), rounds);
            assert_eq!(count(Query { call_id: wanted, ..Query::default() }), 1);
            assert_eq!(count(Query::session("nobody".parse().expect("id"))), 0);
            let lean = read(dir.path(), Query { without_bodies: true, ..Query::default() });
            assert_eq!(lean.len(), 40 * rounds);
            assert!(lean.iter().all(|call| call.response.is_none() && call.text.is_some()));
        };
        check();
        writer.close().await;
        check();
    }
}

#[tokio::test]
async fn a_second_writer_is_refused_with_the_first_ones_pid() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    let refused = Writer::open(dir.path(), WriterOptions::default());
    let Err(CaptureError::Locked { pid, .. }) = refused else { panic!("not refused") };
    assert_eq!(pid, std::process::id().to_string());
    writer.close().await;
    let again = Writer::open(dir.path(), WriterOptions::default()).expect("free again");
    again.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_appends_at_once_share_commits_and_rotate_without_loss() {
    let dir = tempfile::tempdir().expect("folder");
    let options = WriterOptions { segment_bytes: 64 << 10, ..WriterOptions::default() };
    let writer = Arc::new(Writer::open(dir.path(), options).expect("free folder"));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..64_u32 {
        let writer = Arc::clone(&writer);
        tasks.spawn(async move {
            for turn in 0..10 {
                let one = call(&format!("s{task}"), &[task, turn], &[1; 20]);
                writer.append(vec![one]).await.expect("room");
            }
        });
    }
    // Readers run beside the writer while segments become Parquet; they see each call at most once.
    while !tasks.is_empty() {
        let seen = read(dir.path(), Query::default());
        let ids: std::collections::HashSet<_> = seen.iter().map(|call| call.call_id).collect();
        assert_eq!(ids.len(), seen.len());
        tasks.join_next().await.expect("not empty").expect("no panic");
    }
    let closed = writer.close().await;
    assert_eq!(closed.appends, 640);
    assert!(closed.commits < 640, "{} commits", closed.commits);
    assert_eq!(read(dir.path(), Query::default()).len(), 640);
}

#[tokio::test]
async fn a_segment_grows_old_and_becomes_parquet_without_close() {
    let dir = tempfile::tempdir().expect("folder");
    let segment_age = std::time::Duration::from_millis(1);
    let options = WriterOptions { segment_age, ..WriterOptions::default() };
    let writer = Writer::open(dir.path(), options).expect("free folder");
    writer.append(vec![call("a", &[1], &[2])]).await.expect("room");
    while std::fs::read_dir(dir.path().join("journal")).expect("folder").count() > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(read(dir.path(), Query::default()).len(), 1);
    writer.close().await;
}

#[test]
fn a_folder_that_is_not_there_is_named() {
    let missing = Reader::open(&std::env::temp_dir().join("no such folder of captures"), Query::default());
    assert!(matches!(missing, Err(CaptureError::NoFolder { .. })));
}

#[test]
fn the_documentation_has_every_column() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/captures.md");
    let text = std::fs::read_to_string(path).expect("docs/captures.md");
    for column in column_names() {
        assert!(text.contains(&format!("| `{column}` |")), "docs/captures.md lacks {column}");
    }
}
