//! `lego capture lineages`, and what `show` says where a lineage begins.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use lego::capture::{Writer, WriterOptions};
use lego::record::{Call, CallSink, JsonText};
use serde_json::{Value, json};

use crate::calls::{call, failed_call};

fn capture(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    command.arg("capture").args(arguments).output().expect("lego runs")
}

async fn write(dir: &Path, calls: Vec<Call>) {
    let writer = Writer::open(dir, WriterOptions::default()).expect("free folder");
    writer.append(calls).await.expect("room");
    writer.close().await;
}

fn asked(mut one: Call, at: i64, system: &str, more: &[Value], reply: &str) -> Call {
    let mut messages =
        vec![json!({"role": "system", "content": system}), json!({"role": "user", "content": "Repair it"})];
    messages.extend(more.iter().cloned());
    one.client_request = JsonText::new(json!({"messages": messages}).to_string()).ok();
    (one.text, one.tool_calls) = (Some(reply.to_owned()), None);
    one.received_at += at;
    one
}

/// A session whose system prompt changes, one that is never broken, and one without ids.
async fn captured() -> (tempfile::TempDir, [String; 3]) {
    let dir = tempfile::tempdir().expect("folder");
    let reply = "I have looked at it, and go on.";
    let history = [json!({"role": "assistant", "content": reply}), json!({"role": "user", "content": "Yes"})];
    let first = asked(call("one", &[1, 2, 3], &[4, 5]), 0, "Be brief.", &[], reply);
    let second = asked(call("one", &[1, 9, 3, 4, 5, 6], &[7]), 1, "Be long.", &history, "Done.");
    let third = asked(call("two", &[1, 2, 3], &[4]), 2, "Be brief.", &[], reply);
    let ids = [&first, &second, &third].map(|call| call.call_id.to_string());
    write(dir.path(), vec![second, first, third, failed_call("three")]).await;
    (dir, ids)
}

#[tokio::test]
async fn each_lineage_is_a_row_with_what_it_comes_from() {
    let (dir, [first, second, third]) = captured().await;
    let folder = dir.path().to_str().expect("UTF-8");
    let output = capture(&["lineages", folder, "--json"]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let broke = json!({"reason": "system_changed", "from_call_id": first, "token": 1, "message": 0});
    let row = |session: &str,
               lineage: u32,
               tokens: u32,
               sampled: u32,
               id: &str,
               parent: Value,
               broke: Value| {
        json!({"session_id": session, "lineage": lineage, "kind": "main", "calls": 1, "shared_calls": 0,
            "first_call_id": id, "last_call_id": id, "tokens": tokens, "sampled_tokens": sampled, "parent": parent,
            "break": broke})
    };
    let parent = json!({"call_id": first, "by": "history"});
    let expected = [
        row("one", 0, 5, 2, &first, Value::Null, Value::Null),
        row("one", 1, 7, 1, &second, parent, broke),
        row("two", 0, 4, 1, &third, Value::Null, Value::Null),
    ];
    assert_eq!(rows, expected);

    let output = capture(&["lineages", folder, "--session", "one"]);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(text.contains(&format!("{first} (history): system_changed at token 1, message 0")), "{text}");
    let some = capture(&["lineages", folder, "--where", "session_id = 'two'", "--json"]);
    assert_eq!(String::from_utf8_lossy(&some.stdout).lines().count(), 1);
}

#[tokio::test]
async fn show_tells_where_a_lineage_begins() {
    let (dir, [first, second, third]) = captured().await;
    let show = |id: &str| {
        let output = capture(&["show", id, "--capture-dir", dir.path().to_str().expect("UTF-8")]);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let told = format!(
        "══ lineage 1 · main · {first} (history): system_changed at token 1, message 0\n── call {second}"
    );
    for text in [show("one"), show(&second)] {
        assert!(text.contains(&told), "{text}");
    }
    assert!(show("one").contains(&format!("══ lineage 0 · main · -\n── call {first}")));
    assert!(!show(&third).contains("══"), "it has its session to itself");
}

#[tokio::test]
async fn what_is_not_there_is_said() {
    let (dir, _) = captured().await;
    let folder = dir.path().to_str().expect("UTF-8");
    for (arguments, code, words) in [
        (vec!["lineages", folder, "--session", "three"], 1, "no call of session three with token ids"),
        (
            vec!["lineages", folder, "--session", "one", "--where", "session_id = 'one'"],
            2,
            "do not go together",
        ),
        (vec!["lineages", "/nowhere/at-all"], 1, "/nowhere/at-all"),
        (vec!["lineages", folder, "--tokenizer", "/nowhere/at-all"], 1, "/nowhere/at-all"),
    ] {
        let output = capture(&arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(
            (output.status.code(), said.contains(words)),
            (Some(code), true),
            "{arguments:?}: {output:?}"
        );
    }
}

#[tokio::test]
async fn a_runs_ledger_takes_samples_as_its_config_says() {
    let run = tempfile::tempdir().expect("folder");
    let (dir, _) = captured().await;
    fs::rename(dir.path(), run.path().join("captures")).expect("moved");
    fs::write(run.path().join("run.json"), r#"{"incarnation": 1}"#).expect("written");
    let buckets = |samples: &str| {
        let config = format!("[training.samples]\n{samples}\n");
        fs::write(run.path().join("config.resolved.toml"), config).expect("written");
        let output = capture(&["ledger", run.path().to_str().expect("UTF-8"), "--json"]);
        let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
        let last = text.lines().last().unwrap_or_else(|| panic!("{output:?}"));
        serde_json::from_str::<Value>(last).expect("JSON")["total"]["buckets"].clone()
    };
    let trial = "dropped: its trial has not ended";
    assert_eq!(buckets(""), json!({trial: 4}));
    assert_eq!(buckets("max_tokens = 4"), json!({trial: 2, "over_window": 2}));
    assert_eq!(
        buckets("lineages = \"longest\""),
        json!({trial: 3, "dropped: not in the longest lineage": 1})
    );
    assert_eq!(buckets("lineages = \"main\""), json!({trial: 4}));
}
