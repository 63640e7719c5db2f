//! `lego capture compact`: what a dead writer left, and small files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use lego::capture::{Query, Reader, Writer, WriterOptions};
use lego::record::{Call, CallSink};
use serde_json::Value;

use crate::calls::call;
use crate::store::{read, sorted_json};

fn compact(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    command.args(["capture", "compact"]).arg(dir).args(arguments).output().expect("lego runs")
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

/// Names of all files of a folder of the store.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("entry").file_name().into_string().expect("text")).collect();
    names.sort();
    names
}

/// Several small files of each of two days.
pub async fn small_files(dir: &Path, count: u32) -> Vec<Call> {
    let mut all = vec![];
    for file in 0..count {
        let writer = Writer::open(dir, WriterOptions::default()).expect("free folder");
        for number in 0..4_u32 {
            let mut one = call(&format!("s{}", (file + number) % 3), &[file, number], &[1; 3]);
            one.received_at += i64::from(number % 2) * 86_400_000_000;
            all.push(one.clone());
            writer.append(vec![one]).await.expect("room");
        }
        writer.close().await;
    }
    all
}

#[tokio::test]
async fn small_files_of_a_day_become_one_and_every_call_stays() {
    let dir = tempfile::tempdir().expect("folder");
    let calls = small_files(dir.path(), 5).await;
    let days: Vec<PathBuf> =
        ["2026-11-29", "2026-11-30"].map(|day| dir.path().join(format!("date={day}"))).into();
    assert!(days.iter().all(|day| names(day).len() == 5));
    let told = text(&compact(dir.path(), &[]));
    assert!(told.starts_with("2026-11-29: 5 files, ") && told.contains(" to 1, "), "{told}");
    for day in &days {
        assert!(
            matches!(&names(day)[..], [name] if name.starts_with("merged-00000005-")),
            "{:?}",
            names(day)
        );
    }
    assert_eq!(sorted_json(&read(dir.path(), Query::default())), sorted_json(&calls));
    let of_one = calls.iter().filter(|call| call.session_id.as_str() == "s1").count();
    assert_eq!(read(dir.path(), Query::session("s1".parse().expect("id"))).len(), of_one);
    assert_eq!(text(&compact(dir.path(), &[])), "", "nothing is left to do");

    // What comes later is merged with it; a writer goes on as before.
    let more = small_files(dir.path(), 1).await;
    assert!(names(&days[0]).iter().any(|name| name.starts_with("calls-00000006-")), "{:?}", names(&days[0]));
    let lines = text(&compact(dir.path(), &["--json"]));
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!((&lines[0]["journal"]["appends"], lines.len()), (&0.into(), 3));
    assert_eq!((&lines[1]["files_before"], &lines[1]["files_after"]), (&2.into(), &1.into()));
    let wanted = sorted_json(&[calls, more].concat());
    assert_eq!(sorted_json(&read(dir.path(), Query::default())), wanted);
    let mut verify = Command::new(env!("CARGO_BIN_EXE_lego"));
    let verified = verify.args(["capture", "verify"]).arg(dir.path()).output().expect("lego runs");
    assert!(verified.status.success(), "{verified:?}");
}

#[tokio::test]
async fn what_a_dead_writer_left_becomes_parquet_and_a_living_one_is_named() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    let one = call("a", &[1], &[2]);
    writer.append(vec![one.clone()]).await.expect("room");
    let refused = compact(dir.path(), &[]);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1));
    assert!(words.contains(&format!("written by process {}: stop it", std::process::id())), "{words}");

    // As a writer leaves it that is killed while it writes.
    let dead = tempfile::tempdir().expect("folder");
    fs::create_dir(dead.path().join("journal")).expect("folder");
    let name = names(&dir.path().join("journal")).remove(0);
    let mut bytes = fs::read(dir.path().join("journal").join(&name)).expect("read");
    bytes.extend_from_slice(b"half a frame");
    fs::write(dead.path().join("journal").join(&name), bytes).expect("written");
    let told = text(&compact(dead.path(), &[]));
    assert!(told.contains("1 append made into Parquet; 12 bytes of a torn tail cut off"), "{told}");
    assert_eq!(names(&dead.path().join("journal")), [] as [String; 0]);
    assert_eq!(sorted_json(&read(dead.path(), Query::default())), sorted_json(&[one]));
    writer.close().await;

    let missing = compact(&dir.path().join("nowhere"), &[]);
    assert!(String::from_utf8_lossy(&missing.stderr).contains("is not a folder"), "{missing:?}");
    assert!(!dir.path().join("nowhere").exists());
}

#[tokio::test]
async fn killed_at_any_moment_it_loses_and_doubles_nothing() {
    let dir = tempfile::tempdir().expect("folder");
    let calls = small_files(dir.path(), 4).await;
    let wanted = sorted_json(&calls);
    let day = dir.path().join("date=2026-11-29");
    let journal = dir.path().join("journal");
    let is_at: [&dyn Fn() -> bool; 4] = [
        &|| !names(&journal).is_empty(),
        &|| names(&journal).iter().any(|name| name.ends_with("-2026-11-29.tmp")),
        &|| names(&day).iter().any(|name| name.starts_with("merged-")),
        &|| names(&day).len() == 1,
    ];
    for is_at in is_at {
        let mut child = Command::new(env!("CARGO_BIN_EXE_lego"))
            .args(["capture", "compact"])
            .arg(dir.path())
            .stdout(Stdio::null())
            .spawn()
            .expect("lego runs");
        while !is_at() && child.try_wait().expect("a child").is_none() {
            std::thread::yield_now();
        }
        child.kill().expect("killed");
        child.wait().expect("ended");
        assert_eq!(sorted_json(&read(dir.path(), Query::default())), wanted);
    }
    text(&compact(dir.path(), &[]));
    assert_eq!(sorted_json(&read(dir.path(), Query::default())), wanted);
    assert_eq!((names(&day).len(), names(&journal).len()), (1, 0));
}

#[tokio::test]
async fn readers_see_every_call_once_while_files_are_merged() {
    let dir = tempfile::tempdir().expect("folder");
    let mut wanted = sorted_json(&small_files(dir.path(), 6).await);
    let is_over = AtomicBool::new(false);
    for round in 0..3 {
        std::thread::scope(|scope| {
            let (path, wanted, is_over) = (dir.path(), &wanted, &is_over);
            is_over.store(false, Ordering::SeqCst);
            let reader = scope.spawn(move || {
                let mut times = 0;
                while !is_over.load(Ordering::SeqCst) || times == 0 {
                    let mut reader = Reader::open(path, Query::default()).expect("readable");
                    let calls: Vec<Call> = reader.by_ref().collect::<Result<_, _>>().expect("whole");
                    assert_eq!(reader.skipped(), [] as [String; 0], "round {round}");
                    assert_eq!(sorted_json(&calls), *wanted, "round {round}");
                    times += 1;
                }
            });
            // Readers may keep the files that were merged; then they go next time.
            let compacted = compact(path, &[]);
            is_over.store(true, Ordering::SeqCst);
            assert!(reader.join().is_ok());
            let words = String::from_utf8_lossy(&compacted.stderr).into_owned();
            assert!(compacted.status.success() || words.contains("until nobody reads the day"), "{words}");
        });
        wanted.extend(sorted_json(&small_files(dir.path(), 1).await));
        wanted.sort();
    }
    text(&compact(dir.path(), &[]));
    assert_eq!(names(&dir.path().join("date=2026-11-29")).len(), 1);
    assert_eq!(sorted_json(&read(dir.path(), Query::default())), wanted);
}
