//! `lego capture` as a user runs it.

use std::path::Path;
use std::process::{Command, Output};

use lego::capture::{Writer, WriterOptions};
use lego::record::CallSink;

use crate::calls::{call, failed_call};

fn lego(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    command.arg("capture").args(arguments).arg("--capture-dir").arg(dir);
    command.output().expect("lego runs")
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

#[tokio::test]
async fn ls_and_show_tell_what_was_captured_while_the_writer_runs() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    let first = call("one", &[1, 2], &[3, 4]);
    let id = first.call_id.to_string();
    writer.append(vec![first, failed_call("two")]).await.expect("room");

    let listed = text(&lego(dir.path(), &["ls"]));
    assert!(listed.contains("2 sessions, 2 sampled tokens"), "{listed}");
    let lines = text(&lego(dir.path(), &["ls", "--json"]));
    let sessions: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let of = |name: &str| sessions.iter().find(|s| s["session_id"] == name).expect("listed");
    assert_eq!((&of("one")["completion_tokens"], &of("one")["trainable"]), (&2.into(), &1.into()));
    assert_eq!((&of("two")["failed"], &of("two")["trial_id"]), (&1.into(), &().into()));

    let calls = text(&lego(dir.path(), &["ls", "--session", "two"]));
    assert!(calls.contains("upstream_error"), "{calls}");
    let shown = text(&lego(dir.path(), &["show", "one", "--tokens"]));
    for part in ["[user] héllo", "edit({\"a\": 1,\"b\":2})", "prompt ids [1, 2]", "-0.5714286"] {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    let one = text(&lego(dir.path(), &["show", &id, "--json"]));
    let one: serde_json::Value = serde_json::from_str(&one).expect("JSON");
    assert_eq!(one["completion_token_ids"], serde_json::json!([3, 4]));

    let unknown = lego(dir.path(), &["show", "nobody"]);
    assert_eq!(unknown.status.code(), Some(1));
    let message = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(message.contains("no session or call nobody"), "{message}");
    writer.close().await;
}
