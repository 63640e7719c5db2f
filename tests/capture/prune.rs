//! `lego capture prune`: old days go whole, unless something needs them or might.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{SystemTime, UNIX_EPOCH};

use lego::capture::{Query, Reader, Writer, WriterOptions, date_of};
use lego::record::{Call, CallId, CallSink, ChoiceId};
use serde_json::Value;

use crate::calls::{call, routing};
use crate::store::read;

const DAY_US: i64 = 86_400_000_000;

fn prune(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    command.args(["capture", "prune"]).arg(dir).args(arguments).output().expect("lego runs")
}

/// The days that are older than 30 days, and what became of each.
fn pruned(dir: &Path, arguments: &[&str], code: i32) -> Vec<Value> {
    let output = prune(dir, &[&["--older-than", "30d", "--json"], arguments].concat());
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// A call of so many days ago, with an id of then.
fn aged(days: i64) -> Call {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros() as i64;
    let mut call = call(&format!("s{days}"), &[1, 2], &[3, 4]);
    call.received_at = now - days * DAY_US;
    let seconds = (call.received_at / 1_000_000) as u64;
    let time = uuid::Timestamp::from_unix(uuid::NoContext, seconds, 0);
    call.call_id = CallId(uuid::Uuid::new_v7(time));
    call
}

fn base(call: &Call) -> ChoiceId {
    ChoiceId { call_id: call.call_id, choice_index: 0 }
}

async fn write(dir: &Path, calls: Vec<Call>) {
    let writer = Writer::open(dir, WriterOptions::default()).expect("free folder");
    writer.append(calls).await.expect("room");
    writer.close().await;
}

fn sessions(dir: &Path) -> Vec<String> {
    let mut sessions: Vec<String> =
        read(dir, Query::default()).iter().map(|call| call.session_id.to_string()).collect();
    sessions.sort();
    sessions
}

#[tokio::test]
async fn days_of_that_age_go_whole_and_a_dry_run_only_tells() {
    let dir = tempfile::tempdir().expect("folder");
    let calls: Vec<Call> = [40, 31, 30, 29, 0].map(aged).into();
    let date = date_of(calls[0].received_at);
    write(dir.path(), calls).await;
    let told = pruned(dir.path(), &["--dry-run"], 0);
    assert_eq!(told.len(), 2, "{told:?}");
    assert_eq!(
        (&told[0]["date"], &told[0]["is_removed"], &told[0]["files"]),
        (&date.clone().into(), &true.into(), &1.into())
    );
    assert_eq!(sessions(dir.path()).len(), 5, "only told");
    // As after a crash while a day was deleted.
    let half = dir.path().join(".pruned-date=2020-01-01");
    fs::create_dir(&half).expect("folder");
    fs::write(half.join("calls.parquet"), "half").expect("written");
    let output = prune(dir.path(), &["--older-than", "30d"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.starts_with(&format!("{date} removed: 1 file, ")), "{output:?}");
    assert_eq!(sessions(dir.path()), ["s0", "s29", "s30"]);
    assert!(!half.exists() && !dir.path().join(format!("date={date}")).exists());
    assert_eq!(pruned(dir.path(), &[], 0), [] as [Value; 0]);
    for bad in ["30", "d", "-1d", "30h"] {
        assert_eq!(prune(dir.path(), &["--older-than", bad]).status.code(), Some(2), "{bad}");
    }
}

#[tokio::test]
async fn a_day_that_calls_go_on_from_stays_and_so_does_what_it_goes_on_from() {
    let dir = tempfile::tempdir().expect("folder");
    let mut first = aged(60);
    first.routing = Some(routing(0, 1, 0));
    let mut second = aged(50);
    second.routing = Some(routing(0, 2, 0).without_first(1, base(&first)));
    let mut kept = aged(2);
    kept.routing = Some(routing(0, 3, 0).without_first(2, base(&second)));
    let mut unneeded = aged(55);
    unneeded.routing = Some(routing(0, 3, 0));
    for call in [&mut first, &mut second, &mut kept] {
        call.session_id = "one".parse().expect("id");
    }
    write(dir.path(), vec![first, second, unneeded, kept.clone(), aged(45)]).await;
    let told = pruned(dir.path(), &[], 0);
    let removed: Vec<bool> = told.iter().map(|day| day["is_removed"] == true).collect();
    assert_eq!(removed, [false, true, false, true], "{told:?}");
    let reason = told[2]["reason"].as_str().expect("why");
    assert!(reason.contains("go on from call"), "{reason}");
    assert_eq!(sessions(dir.path()), ["one"; 3]);
    let whole = read(dir.path(), Query { call_id: Some(kept.call_id), ..Query::default() });
    assert_eq!(whole[0].routing, Some(routing(0, 3, 0)), "the rows are still there");

    // Calls of the journal count as well.
    let other = tempfile::tempdir().expect("folder");
    let mut old = aged(60);
    old.routing = Some(routing(0, 2, 0));
    let old_base = base(&old);
    write(other.path(), vec![old]).await;
    let writer = Writer::open(other.path(), WriterOptions::default()).expect("free folder");
    let mut new = aged(0);
    new.routing = Some(routing(0, 3, 0).without_first(2, old_base));
    writer.append(vec![new]).await.expect("room");
    let told = pruned(other.path(), &[], 0);
    assert_eq!(told[0]["is_removed"], false, "{told:?}");
    writer.close().await;
}

#[tokio::test]
async fn nothing_goes_from_under_a_reader_or_a_writer_or_where_it_cannot_be_known() {
    let dir = tempfile::tempdir().expect("folder");
    let mut routed = aged(50);
    routed.routing = Some(routing(0, 3, 0));
    write(dir.path(), vec![aged(40), routed, aged(0)]).await;

    // One that was begun holds all days, until it is past them.
    let mut reader = Reader::open(dir.path(), Query::default()).expect("readable");
    assert!(reader.next().is_some());
    let told = pruned(dir.path(), &[], 1);
    assert!(told.iter().all(|day| day["is_refused"] == true), "{told:?}");
    assert!(told[1]["reason"].as_str().expect("why").contains("is being read"), "{told:?}");
    assert_eq!(reader.by_ref().filter(Result::is_ok).count(), 2, "nothing went from under it");
    assert_eq!(reader.skipped(), [] as [String; 0]);
    drop(reader);

    // A writer may go on from rows of any call that it made; others it does not need.
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    let told = pruned(dir.path(), &[], 1);
    let reason = told[0]["reason"].as_str().expect("why");
    assert!(reason.contains(&format!("process {} writes", std::process::id())), "{reason}");
    assert_eq!((&told[0]["is_refused"], &told[1]["is_removed"]), (&true.into(), &true.into()));
    writer.close().await;
    assert_eq!(sessions(dir.path()), ["s0", "s50"]);

    let old = dir.path().join(format!("date={}", date_of(aged(50).received_at)));
    fs::write(old.join("notes.txt"), "mine").expect("written");
    let told = pruned(dir.path(), &[], 1);
    assert!(told[0]["reason"].as_str().expect("why").contains("notes.txt"), "{told:?}");
    fs::remove_file(old.join("notes.txt")).expect("removed");

    // What a file needs that cannot be read nobody knows.
    let new = dir.path().join(format!("date={}", date_of(aged(0).received_at)));
    fs::write(new.join("calls-00000099-0011223344556677.parquet"), "broken").expect("written");
    let output = prune(dir.path(), &["--older-than", "30d"]);
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && words.contains("calls-00000099"), "{words}");
    assert!(words.contains("nothing is removed") && old.is_dir(), "{words}");
}

#[tokio::test]
async fn the_last_days_are_read_without_a_look_at_earlier_ones_which_may_go_meanwhile() {
    let dir = tempfile::tempdir().expect("folder");
    write(dir.path(), [40, 8, 7, 1, 0].map(aged).into()).await;
    let days = |ago: i64| (aged(ago).received_at / DAY_US) * DAY_US;
    let query = Query { since: Some(days(7)), ..Query::default() };
    let mut reader = Reader::open(dir.path(), query).expect("readable");
    let told = pruned(dir.path(), &[], 0);
    assert!(told.len() == 1 && told[0]["is_removed"] == true, "{told:?}");
    let read: Vec<String> = reader.by_ref().map(|call| call.expect("whole").session_id.to_string()).collect();
    assert_eq!(read, ["s7", "s1", "s0"]);
    assert_eq!(reader.skipped(), [] as [String; 0]);

    // A file of an earlier day is not even opened; what is still in the journal is as old as it is.
    let eighth = dir.path().join(format!("date={}", date_of(days(8))));
    fs::write(eighth.join("calls-00000099-0011223344556677.parquet"), "broken").expect("written");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    writer.append(vec![aged(9), aged(6)]).await.expect("room");
    let list = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
        let output = command
            .args(["capture", "ls", "--json", "--capture-dir"])
            .arg(dir.path())
            .args(arguments)
            .output();
        let output = output.expect("lego runs");
        let lines = String::from_utf8(output.stdout).expect("UTF-8");
        let sessions: Vec<String> = lines
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).expect("JSON")["session_id"].to_string())
            .collect();
        (output.status.code(), sessions.join(" "), String::from_utf8(output.stderr).expect("UTF-8"))
    };
    let (code, sessions, said) = list(&["--last", "7d"]);
    assert_eq!((code, sessions.as_str()), (Some(0), r#""s7" "s6" "s1" "s0""#), "{said}");
    assert!(!said.contains("left out"), "{said}");
    let (_, sessions, said) = list(&[]);
    assert!(
        sessions.contains("s8") && sessions.contains("s9") && said.contains("left out"),
        "{sessions} {said}"
    );
    assert_eq!(list(&["--last", "7d", "--session", "s8"]).1, "");
    assert_eq!(list(&["--last", "7d", "--session", "s6"]).1, r#""s6""#);
    for bad in ["7", "d", "-1d", "7h"] {
        assert_eq!(list(&["--last", bad]).0, Some(2), "{bad}");
    }
    writer.close().await;
}
