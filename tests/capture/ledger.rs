//! `lego capture ledger`: where every sampled token went, and whether that adds up.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use lego::capture::{Writer, WriterOptions};
use lego::record::{Call, CallId, CallKind, CallSink, IdsSource, Usage};
use serde_json::{Value, json};

use crate::calls::{call, failed_call};

fn ledger(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    command.args(["capture", "ledger"]).arg(dir).args(arguments).output().expect("lego runs")
}

fn json_lines(dir: &Path, arguments: &[&str]) -> Vec<Value> {
    let output = ledger(dir, &[&["--json"], arguments].concat());
    let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let is_balanced = lines.last().unwrap_or_else(|| panic!("{output:?}"))["is_balanced"] == true;
    assert_eq!(output.status.code(), Some(i32::from(!is_balanced)), "{output:?}");
    lines
}

async fn write(dir: &Path, calls: Vec<Call>) {
    let writer = Writer::open(dir, WriterOptions::default()).expect("free folder");
    writer.append(calls).await.expect("room");
    writer.close().await;
}

fn usage(completion_tokens: u64, prompt_tokens: u64) -> Option<Usage> {
    Some(Usage { prompt_tokens, completion_tokens, ..Usage::default() })
}

#[tokio::test]
async fn every_token_is_in_one_bucket_by_session_trial_and_together() {
    let dir = tempfile::tempdir().expect("folder");
    let first = call("one", &[1], &[2, 3]);
    let retried = call("one", &[1, 2, 3, 4], &[5]);
    let mut again = call("one", &[1, 2, 3, 4], &[6, 7]);
    again.received_at += 1;
    again.retry_of = Some(retried.call_id);
    let mut judged = call("one", &[9], &[8, 8, 8]);
    judged.kind = CallKind::Judge;
    let mut no_usage = call("two", &[1], &[2; 5]);
    no_usage.usage = None;
    let mut no_ids = call("two", &[1, 1], &[]);
    (no_ids.completion_token_ids, no_ids.completion_ids_source) = (None, IdsSource::Absent);
    no_ids.usage = usage(11, 2);
    let mut unsure = call("two", &[1, 1, 1], &[4; 6]);
    (unsure.trainable, unsure.not_trainable_reasons) = (false, vec!["no_finish_reason".to_owned()]);
    let ids = [again.call_id.to_string()];
    write(dir.path(), vec![first, retried, again, judged, no_usage, no_ids, unsure, failed_call("three")])
        .await;

    let lines = json_lines(dir.path(), &["--by", "session"]);
    let of = |name: &str| {
        lines.iter().find(|line| line["session_id"] == name).unwrap_or_else(|| panic!("{name}: {lines:?}"))
    };
    assert_eq!(of("one")["buckets"], json!({"aux_call": 3, "in_sample": 4, "superseded": 1}));
    let two = json!({"dropped: no_finish_reason": 6, "no_ids": 11, "usage_unknown": 5});
    assert_eq!(of("two")["buckets"], two);
    assert_eq!((&of("two")["usage"], &of("two")["without_usage"]), (&17.into(), &5.into()));
    assert_eq!((&of("three")["calls"], &of("three")["buckets"]), (&1.into(), &json!({})));
    let total = &lines.last().expect("total")["total"];
    assert_eq!((&total["calls"], &total["booked"], &total["usage"]), (&8.into(), &30.into(), &25.into()));

    let trials = json_lines(dir.path(), &["--by", "trial"]);
    let names: Vec<&Value> = trials.iter().filter_map(|line| line.get("trial_id")).collect();
    assert_eq!(names, ["-", "trial-of-one", "trial-of-two"]);
    // What a call comes to depends on its whole session, whoever is asked for.
    let predicate = format!("call_id = '{}' or kind = 'judge'", ids[0]);
    let some = json_lines(dir.path(), &["--where", &predicate]);
    assert_eq!(some.last().expect("total")["total"]["buckets"], json!({"aux_call": 3, "in_sample": 2}));

    let output = ledger(dir.path(), &[]);
    let (text, words) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("8 calls, 30 tokens") && text.contains("\n  balanced: "), "{text}");
    assert!(text.contains("reported 25 tokens, and 5 ids of calls without usage"), "{text}");
    assert!(words.contains("belong to no run"), "{words}");
}

#[tokio::test]
async fn ids_beyond_the_usage_do_not_add_up_and_the_calls_are_named() {
    let dir = tempfile::tempdir().expect("folder");
    let mut wrong = call("one", &[1], &[2, 3, 4]);
    wrong.usage = usage(2, 1);
    let id = wrong.call_id.to_string();
    write(dir.path(), vec![wrong, call("two", &[1], &[2])]).await;
    let lines = json_lines(dir.path(), &[]);
    let offences: Vec<&Value> = lines.iter().filter_map(|line| line.get("offence")).collect();
    assert_eq!(offences.len(), 1, "{lines:?}");
    assert_eq!((&offences[0]["call_id"], &offences[0]["session_id"]), (&id.clone().into(), &"one".into()));
    let output = ledger(dir.path(), &[]);
    let (text, words) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(text.contains(&format!("call {id}: 3 tokens in buckets, 3 ids, a usage of 2")), "{text}");
    assert!(text.contains("NOT balanced") && words.contains("1 thing does not add up"), "{text}{words}");
    // Calls that are not asked for do not count.
    assert_eq!(json_lines(dir.path(), &["--where", "session_id = 'two'"]).len(), 1);
}

/// A run's folder with the files that its trainer writes.
struct Run(tempfile::TempDir);

impl Run {
    fn new() -> Self {
        let run = Self(tempfile::tempdir().expect("folder"));
        fs::write(run.0.path().join("run.json"), r#"{"incarnation": 1}"#).expect("written");
        run
    }

    fn events(&self, events: &[Value]) {
        let lines: String = events.iter().map(|event| format!("{event}\n")).collect();
        fs::write(self.0.path().join("events.jsonl"), lines + "{\"at\": \"half").expect("written");
    }

    fn result(&self, trial: &str, attempt: u32, purpose: &str) {
        let folder = self.0.path().join("trials").join(trial);
        fs::create_dir_all(&folder).expect("folder");
        let result =
            json!({"session_id": format!("{trial}.{attempt}"), "purpose": purpose, "attempt": attempt});
        fs::write(folder.join("result.json"), result.to_string()).expect("written");
    }
}

fn finished(trial: &str, version: u64, outcome: Value, sampled: u64) -> Value {
    json!({
        "at": "t", "event": "trial_finished", "trial_id": trial, "task_id": "t", "policy_version": version,
        "outcome": outcome, "reward": 1.0, "turns": 1, "sampled_tokens": sampled, "seconds": 1.0,
    })
}

fn started(incarnation: u32, resumed_at_step: Option<u64>) -> Value {
    json!({
        "at": "t", "event": "run_started", "version": "1", "seed": 1, "incarnation": incarnation,
        "resumed_at_step": resumed_at_step,
    })
}

fn step(step: u64, version: u64) -> Value {
    json!({"at": "t", "event": "step", "step": step, "policy_version": version, "loss": 1.0, "solve_rate": 1.0})
}

fn sampled(trial: &str, attempt: u32, tokens: usize) -> Call {
    let mut call = call(&format!("{trial}.{attempt}"), &[1], &vec![2; tokens]);
    call.call_id = CallId::now();
    call.trial_id = trial.parse().ok();
    call
}

#[tokio::test]
async fn what_the_trainer_did_is_read_from_the_run() {
    let run = Run::new();
    let calls = vec![
        sampled("kept", 1, 1),
        sampled("lost", 1, 2),
        sampled("again", 1, 4),
        sampled("unused", 1, 8),
        sampled("eval", 1, 16),
        sampled("broken", 1, 32),
        sampled("twice", 1, 64),
        sampled("twice", 2, 128),
        sampled("oom", 1, 256),
        sampled("running", 1, 512),
    ];
    write(&run.0.path().join("captures"), calls).await;
    let ended = |termination: &str| json!({"outcome": "valid", "termination": termination});
    let valid = || ended("completed");
    let invalid = json!({"outcome": "invalid", "failure": {"kind": "host_oom"}});
    let events = [
        started(0, None),
        finished("kept", 0, valid(), 1),
        step(1, 0),
        json!({"at": "t", "event": "of_a_newer_lego", "more": 1}),
        finished("lost", 1, valid(), 2),
        step(2, 1),
        // The second step was not in the checkpoint; its version is sampled again.
        started(1, Some(1)),
        finished("again", 1, valid(), 4),
        finished("twice", 1, valid(), 64 + 128),
        finished("broken", 1, invalid, 32),
        finished("oom", 1, ended("agent_oom"), 256),
        step(2, 1),
        finished("eval", 2, valid(), 16),
        finished("unused", 2, valid(), 8),
    ];
    run.events(&events);
    for (trial, attempt, purpose) in [
        ("kept", 1, "training"),
        ("lost", 1, "training"),
        ("again", 1, "training"),
        ("unused", 1, "training"),
        ("eval", 1, "evaluation"),
        ("broken", 1, "training"),
        ("twice", 2, "training"),
        ("oom", 1, "training"),
    ] {
        run.result(trial, attempt, purpose);
    }
    fs::write(run.0.path().join("config.resolved.toml"), "[sandbox]\nagent_oom = \"mask\"\n")
        .expect("written");
    let lines = json_lines(run.0.path(), &["--by", "trial"]);
    let buckets = json!({
        "dropped: evaluation": 16,
        "dropped: its trial has not ended": 512,
        "dropped: no step of the run was taken with it": 2 + 8,
        "infra_failure": 32 + 64,
        "masked: agent_oom": 256,
        "trained": 1 + 4 + 128,
    });
    assert_eq!(lines.last().expect("total")["total"]["buckets"], buckets);
    let twice = lines.iter().find(|line| line["trial_id"] == "twice").expect("listed");
    assert_eq!(twice["buckets"], json!({"infra_failure": 64, "trained": 128}));

    // The report, and the trainer's own count of each trial, are held against the captures.
    fs::create_dir(run.0.path().join("reports")).expect("folder");
    let report = |trained: u64| {
        let report = json!({"tokens": {"sampled": 1, "trained": trained}}).to_string();
        fs::write(run.0.path().join("reports/report.json"), report).expect("written");
    };
    report(133);
    assert_eq!(json_lines(run.0.path(), &[]).len(), 1);
    report(134);
    let lines = json_lines(run.0.path(), &[]);
    let told = lines[0]["offence"]["found"].as_str().expect("text");
    assert!(told.contains("134 tokens were trained, the captures hold 133"), "{told}");
    report(133);
    let mut changed = events;
    changed[1] = finished("kept", 0, valid(), 3);
    run.events(&changed);
    let lines = json_lines(run.0.path(), &[]);
    assert_eq!(lines[0]["offence"]["trial_id"], "kept");
    // What cannot be read is refused, and not left out.
    fs::remove_file(run.0.path().join("trials/eval/result.json")).expect("removed");
    let output = ledger(run.0.path(), &[]);
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && words.contains("trials/eval/result.json"), "{words}");
}

#[tokio::test]
async fn calls_that_cannot_be_read_are_no_balance() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    for _ in 0..3 {
        writer.append(vec![call("one", &[1], &[2, 3])]).await.expect("room");
    }
    let journal = dir.path().join("journal");
    let segment = fs::read_dir(&journal).expect("folder").next().expect("one").expect("entry").path();
    let whole = fs::read(&segment).expect("read");
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 1;
    fs::write(&segment, &damaged).expect("written");
    let output = ledger(dir.path(), &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.code() == Some(1) && text.contains("damaged bytes of the journal"), "{output:?}");
    // What a writer has not finished yet is no damage.
    fs::write(&segment, &whole[..whole.len() - 5]).expect("written");
    assert_eq!(json_lines(dir.path(), &[]).last().expect("a total")["is_balanced"], true);
    fs::write(&segment, &whole).expect("written");
    writer.close().await;
    let mut entries = fs::read_dir(dir.path()).expect("folder").map(|entry| entry.expect("entry").path());
    let day = entries.find(|path| path.to_string_lossy().contains("date=")).expect("a day");
    fs::write(day.join("calls-cut.parquet"), b"PAR1").expect("written");
    let lines = json_lines(dir.path(), &[]);
    assert_eq!(lines.last().expect("a total")["is_balanced"], false);
    assert!(
        lines
            .iter()
            .any(|line| line["offence"]["found"].as_str().is_some_and(|text| text.contains("calls-cut")))
    );
}
