//! `lego capture tail`: the newest calls, and those that follow.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use lego::capture::{Writer, WriterOptions};
use lego::record::{Call, CallSink, CallStatus};
use serde_json::Value;

use crate::calls::{call, failed_call};

fn tail(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    command.args(["capture", "tail"]).arg(dir).args(arguments);
    command
}

fn output(dir: &Path, arguments: &[&str]) -> String {
    let output = tail(dir, arguments).output().expect("lego runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The sessions of JSON lines.
fn sessions(text: &str) -> Vec<String> {
    let of = |line: &str| serde_json::from_str::<Value>(line).expect("JSON")["session_id"].clone();
    text.lines().map(|line| of(line).as_str().expect("text").to_owned()).collect()
}

fn numbered(number: i64) -> Call {
    let mut call = call(&format!("s{number}"), &[1, 2], &[3]);
    call.received_at += number * 1_000_000;
    call
}

#[tokio::test]
async fn the_newest_calls_come_oldest_first_whatever_they_lie_in() {
    let dir = tempfile::tempdir().expect("folder");
    let day = 86_400;
    // Two days in Parquet, written the other way round; the newest of the first day and the rest are in the journal.
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    for number in [day + 2, day + 1, 2, 1] {
        writer.append(vec![numbered(number)]).await.expect("room");
    }
    writer.close().await;
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    for number in [day + 3, 3] {
        writer.append(vec![numbered(number)]).await.expect("room");
    }
    let all = ["s1", "s2", "s3", "s86401", "s86402", "s86403"];
    for count in 0..=6 {
        let found = output(dir.path(), &["--json", "-n", &count.to_string()]);
        assert_eq!(sessions(&found), all[6 - count..], "{count}");
    }
    let found = output(dir.path(), &["--json", "--where", "received_at < '2026-11-30'", "-n", "2"]);
    assert_eq!(sessions(&found), ["s2", "s3"]);
    let text = output(dir.path(), &["-n", "1"]);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.len() == 2 && lines[0].starts_with("received (UTC)"), "{text}");
    assert!(lines[1].starts_with("2026-11-30 10:00:03") && lines[1].contains("s86403"), "{text}");
    writer.close().await;
}

struct Tail {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Tail {
    fn start(dir: &Path, arguments: &[&str]) -> Self {
        let mut child = tail(dir, &[&["-f", "--json"], arguments].concat())
            .stdout(Stdio::piped())
            .spawn()
            .expect("lego runs");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Self { child, lines }
    }

    /// The session of the next call; waits for it.
    fn next(&mut self) -> String {
        let line = self.lines.next().expect("it goes on").expect("UTF-8");
        sessions(&line).remove(0)
    }
}

#[tokio::test]
async fn what_is_captured_follows_once_while_segments_become_parquet() {
    let dir = tempfile::tempdir().expect("folder");
    // Each append fills a segment: most come and go between two looks.
    let options = WriterOptions { segment_bytes: 1, ..WriterOptions::default() };
    let writer = Writer::open(dir.path(), options).expect("free folder");
    writer.append(vec![numbered(0)]).await.expect("room");
    let mut tail = Tail::start(dir.path(), &[]);
    assert_eq!(tail.next(), "s0");
    for number in 1..40 {
        // Of two days, and so of two files.
        writer.append(vec![numbered(number), numbered(number + 86_400)]).await.expect("room");
    }
    writer.close().await;
    let mut seen: Vec<String> = (0..2 * 39).map(|_| tail.next()).collect();
    seen.sort();
    let mut all: Vec<String> = (1..40).flat_map(|n| [n, n + 86_400]).map(|n| format!("s{n}")).collect();
    all.sort();
    assert_eq!(seen, all);

    // Another writer, whose segment stays open.
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    writer.append(vec![numbered(50)]).await.expect("room");
    assert_eq!(tail.next(), "s50");
    writer.append(vec![numbered(51), failed_call("s52")]).await.expect("room");
    assert_eq!([tail.next(), tail.next()], ["s51", "s52"]);
    writer.close().await;

    let pid = tail.child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().expect("kill").success());
    assert_eq!(tail.child.wait().expect("ended").code(), Some(0), "a clean end");
    assert!(tail.lines.next().is_none(), "nothing came twice");
}

#[tokio::test]
async fn a_predicate_holds_for_what_follows_and_a_closed_pipe_ends_it() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    let mut tail = Tail::start(dir.path(), &["--where", "status != 'ok'"]);
    let mut failed = numbered(2);
    failed.status = CallStatus::Timeout;
    writer.append(vec![numbered(1), failed, numbered(3)]).await.expect("room");
    assert_eq!(tail.next(), "s2");
    // Nothing more is written, so that no write tells it.
    drop(tail.lines);
    assert_eq!(tail.child.wait().expect("ended").code(), Some(0));
    writer.close().await;
}

#[tokio::test]
async fn calls_behind_damaged_bytes_come_and_the_damage_is_told() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    for number in 0..4 {
        writer.append(vec![numbered(number)]).await.expect("room");
    }
    let journal = dir.path().join("journal");
    let segment = std::fs::read_dir(&journal).expect("folder").next().expect("one").expect("entry").path();
    let mut bytes = std::fs::read(&segment).expect("read");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&segment, &bytes).expect("written");
    let output = tail(dir.path(), &["--json"]).output().expect("lego runs");
    assert_eq!(sessions(&String::from_utf8_lossy(&output.stdout)).len(), 3);
    assert!(String::from_utf8_lossy(&output.stderr).contains("damaged bytes"), "{output:?}");
    drop(writer);
}
