//! Small files are put together while a writer writes.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use lego::capture::{Follow, Query, Reader, Writer};
use lego::record::{Call, CallId, CallSink};

use crate::calls::call;
use crate::compact::{names, small_files};
use crate::crash::{self, OPTIONS};

/// The day of [`call`].
fn day(dir: &Path) -> PathBuf {
    dir.join("date=2026-11-29")
}

fn merged(dir: &Path) -> HashSet<String> {
    names(&day(dir)).into_iter().filter(|name| name.starts_with("merged-")).collect()
}

/// A file is in the making that is no segment's.
fn is_merging(dir: &Path) -> bool {
    let names = names(&dir.join("journal"));
    let is_segments = |name: &str| {
        let stem: Vec<&str> = name.splitn(3, '-').take(2).collect();
        names.contains(&format!("{}.journal", stem.join("-")))
    };
    names.iter().any(|name| name.ends_with("-2026-11-29.tmp") && !is_segments(name))
}

fn is_right(dir: &Path, command: &str) {
    let lego = Command::new(env!("CARGO_BIN_EXE_lego")).args(["capture", command]).arg(dir).output();
    let output = lego.expect("lego runs");
    assert!(output.status.success(), "{command}: {output:?}");
}

#[tokio::test]
async fn kill_9_while_files_are_merged_loses_nothing_acknowledged_and_doubles_nothing() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let mut acked: HashMap<CallId, usize> =
        small_files(dir, 4).await.into_iter().map(|call| (call.call_id, 1)).collect();
    let (mut made, mut merges) = (HashSet::new(), 0);
    for round in 0..8 {
        let before = merged(dir);
        // In the middle of it, or when the merged file has its name and what it replaces may still be there.
        let is_at: &dyn Fn() -> bool = match round % 2 {
            0 => &|| is_merging(dir),
            _ => &|| !merged(dir).is_subset(&before),
        };
        crash::kill_a_writer(dir, &mut acked, &mut |_| is_at());
        merges += usize::from(is_merging(dir));
        made.extend(merged(dir));
        crash::check(dir, &acked, &format!("round {round}, after the kill"));
    }
    assert!(merges > 0 && made.len() > 1, "killed in {merges} merges, {} were done", made.len());
    let writer = Writer::open(dir, OPTIONS()).expect("free folder");
    assert_eq!(writer.close().await.left_in_journal, [] as [String; 0]);
    assert_eq!(names(&dir.join("journal")), [] as [String; 0], "what was being merged is left, and gone");
    crash::check(dir, &acked, "after recovery");
    is_right(dir, "verify");
    is_right(dir, "ledger");
    is_right(dir, "compact");
    assert_eq!(names(&day(dir)).len(), 1);
    crash::check(dir, &acked, "all in one file");
}

#[test]
fn readers_see_every_call_once_while_a_writer_merges() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let writer = Writer::open(dir, OPTIONS()).expect("free folder");
    let (acked, is_over) = (Mutex::new(HashSet::new()), AtomicBool::new(false));
    let read = |when: &str| {
        let before: HashSet<CallId> = acked.lock().expect("whole").clone();
        let mut reader = Reader::open(dir, Query::default()).expect("readable");
        let calls: Vec<Call> = reader.by_ref().collect::<Result<_, _>>().expect("whole");
        assert_eq!(reader.skipped(), [] as [String; 0]);
        let found: HashSet<CallId> = calls.iter().map(|call| call.call_id).collect();
        assert_eq!(found.len(), calls.len(), "a call is there twice");
        assert!(found.is_superset(&before), "{when}: a call is not there");
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                let before = names(&day(dir));
                read("meanwhile");
                // Now and then nobody reads.
                while names(&day(dir)) == before && !is_over.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
            }
        });
        let mut made = HashSet::new();
        for number in 0..500 {
            let one = call(&format!("s{}", number % 5), &[number], &[number; 9]);
            let id = one.call_id;
            runtime.block_on(writer.append(vec![one])).expect("room");
            acked.lock().expect("whole").insert(id);
            made.extend(merged(dir));
        }
        // Until some that were merged are merged themselves.
        while merged(dir).is_superset(&made) {
            made.extend(merged(dir));
            std::thread::yield_now();
        }
        is_over.store(true, Ordering::SeqCst);
        assert!(reader.join().is_ok());
    });
    read("beside the writer");
    runtime.block_on(writer.close());
    read("closed");
    is_right(dir, "verify");
    is_right(dir, "ledger");
}

#[tokio::test]
async fn a_follower_that_began_after_a_merge_is_not_alarmed_by_the_next() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    small_files(dir, 4).await;
    is_right(dir, "compact");
    let first = merged(dir);
    let (_, mut follow) = Follow::open(dir, Query::default(), 0).expect("readable");
    let calls = small_files(dir, 4).await;
    let mut given = vec![];
    let mut look = |follow: &mut Follow| {
        follow.look(&mut |call: Call| given.push(call.call_id)).expect("readable");
        follow.warnings()
    };
    assert_eq!([look(&mut follow), look(&mut follow)].concat(), [] as [String; 0]);
    is_right(dir, "compact");
    assert!(merged(dir).is_disjoint(&first), "what was merged is merged again");
    assert_eq!([look(&mut follow), look(&mut follow)].concat(), [] as [String; 0]);
    let mut wanted: Vec<CallId> = calls.iter().map(|call| call.call_id).collect();
    given.sort();
    wanted.sort();
    assert_eq!(given, wanted);
}
