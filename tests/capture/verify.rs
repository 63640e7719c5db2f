//! `lego capture verify`: each kind of damage is planted, and found.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lego::capture::{Writer, WriterOptions};
use lego::record::{
    Call, CallId, CallKind, CallSink, CallStatus, ChoiceId, IdsSource, LogprobSemantics, Usage, WeightSpan,
};
use serde_json::Value;

use crate::calls::{call, failed_call, routing};

fn verify(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    command.args(["capture", "verify"]).arg(dir).args(arguments).output().expect("lego runs")
}

/// What is found, and what was looked at; the exit code fits.
fn findings(dir: &Path, arguments: &[&str]) -> (Vec<Value>, Value) {
    let output = verify(dir, &[&["--json"], arguments].concat());
    let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let mut last = lines.pop().unwrap_or_else(|| panic!("{output:?}"));
    assert_eq!(output.status.code(), Some(i32::from(!lines.is_empty())), "{output:?}");
    (lines, last["verified"].take())
}

fn invariants(findings: &[Value]) -> Vec<&str> {
    findings.iter().map(|finding| finding["invariant"].as_str().expect("text")).collect()
}

fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = vec![];
    for entry in fs::read_dir(dir).expect("folder") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Calls that are odd, and say so: nothing is wrong with their records.
fn sound() -> Vec<Call> {
    let mut first = call("sound", &[1, 2], &[3]);
    first.routing = Some(routing(0, 2, 0));
    let base = ChoiceId { call_id: first.call_id, choice_index: 0 };
    let mut second = call("sound", &[1, 2, 3], &[4, 5]);
    second.routing = Some(routing(0, 4, 0).without_first(2, base));
    second.retry_of = Some(first.call_id);
    let odd = |reason: &str, change: fn(&mut Call)| {
        let mut odd = call("odd", &[1], &[2, 3]);
        (odd.trainable, odd.not_trainable_reasons) = (false, vec![reason.to_owned()]);
        change(&mut odd);
        odd
    };
    let mut choices = vec![call("choices", &[1], &[2, 3]), call("choices", &[1], &[4])];
    choices[1].choice_index = 1;
    choices[1].call_id = choices[0].call_id;
    for choice in &mut choices {
        choice.usage = Some(Usage { prompt_tokens: 1, completion_tokens: 3, ..Usage::default() });
    }
    let mut calls = vec![
        first,
        second,
        failed_call("failed"),
        odd("logprobs_length_mismatch", |c| c.completion_logprobs = Some(vec![Some(-1.0)])),
        odd("weight_spans_broken", |c| c.weight_spans = Some(vec![])),
        odd("ids_usage_mismatch", |c| c.usage.as_mut().expect("usage").completion_tokens = 7),
        odd("prompt_ids_usage_mismatch", |c| c.usage.as_mut().expect("usage").prompt_tokens = 7),
        odd("no_finish_reason", |c| c.finish_reason = None),
        odd("kind_probe", |c| {
            c.kind = CallKind::Probe;
            c.usage.as_mut().expect("usage").completion_tokens = 1;
        }),
        odd("ids_from_local_tokenizer", |c| {
            (c.completion_ids_source, c.completion_logprobs) = (IdsSource::LocalTokenizer, None);
            (c.weight_spans, c.usage.as_mut().expect("usage").completion_tokens) = (None, 9);
        }),
    ];
    calls.extend(choices);
    calls
}

/// Calls with one thing wrong each.
fn wrong() -> Vec<(&'static str, Call)> {
    let plant = |invariant: &'static str, change: &dyn Fn(&mut Call)| {
        let mut wrong = call(invariant, &[1, 2], &[3, 4]);
        change(&mut wrong);
        (invariant, wrong)
    };
    let span = |start, end| WeightSpan { version: "1".to_owned(), start, end };
    let silent = |call: &mut Call, change: &dyn Fn(&mut Call)| {
        (call.trainable, call.not_trainable_reasons) = (false, vec!["another".to_owned()]);
        change(call);
    };
    let nowhere = ChoiceId { call_id: CallId::now(), choice_index: 0 };
    vec![
        plant("schema_version", &|c| c.schema_version = 99),
        plant("ids_source", &|c| silent(c, &|c| c.prompt_ids_source = IdsSource::Absent)),
        plant("logprobs_length", &|c| c.completion_logprobs = Some(vec![Some(-1.0); 3])),
        plant("logprob_value", &|c| c.completion_logprobs = Some(vec![Some(-1.0), Some(0.5)])),
        plant("logprob_value", &|c| c.completion_logprobs = Some(vec![Some(f32::NEG_INFINITY), Some(-0.5)])),
        plant("weight_spans", &|c| c.weight_spans = Some(vec![span(0, 1)])),
        plant("weight_spans", &|c| c.weight_spans = Some(vec![span(0, 1), span(0, 2)])),
        plant("routing_rows", &|c| c.routing = Some(routing(0, 2, 0))),
        plant("routing_rows", &|c| {
            c.routing = Some(routing(0, 3, 0));
            silent(c, &|c| c.prompt_token_ids = None);
            c.prompt_ids_source = IdsSource::Absent;
        }),
        plant("routing_base", &|c| c.routing = Some(routing(2, 1, 0).based_on(Some(nowhere)))),
        plant("status", &|c| c.http_status = 500),
        plant("status", &|c| c.error = Some("broke".to_owned())),
        plant("finish_reason", &|c| silent(c, &|c| c.finish_reason = None)),
        plant("finish_reason", &|c| c.finish_reason = Some("abort".to_owned())),
        plant("tool_arguments", &|c| c.tool_calls.as_mut().expect("one")[0].arguments_valid_json = false),
        plant("trainable_reasons", &|c| c.trainable = false),
        plant("trainable_reasons", &|c| c.not_trainable_reasons = vec!["no_logprobs".to_owned()]),
        plant("trainable", &|c| c.completion_logprobs = None),
        plant("trainable", &|c| c.completion_logprobs = Some(vec![Some(-1.0), None])),
        plant("trainable", &|c| c.status = CallStatus::Truncated),
        plant("trainable", &|c| c.kind = CallKind::Judge),
        plant("trainable", &|c| c.logprob_semantics = LogprobSemantics::Unknown),
        plant("trainable", &|c| c.usage = None),
        plant("retry_of", &|c| c.retry_of = Some(CallId::now())),
        plant("retry_of", &|c| c.retry_of = Some(c.call_id)),
        plant("parent_call_id", &|c| c.parent_call_id = Some(CallId::now())),
        plant("completion_usage", &|c| c.usage.as_mut().expect("usage").completion_tokens = 3),
        plant("prompt_usage", &|c| c.usage.as_mut().expect("usage").prompt_tokens = 3),
    ]
}

#[tokio::test]
async fn each_invariant_is_looked_at_in_journal_and_parquet_and_nothing_else_is_found() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    writer.append(sound()).await.expect("room");
    let (found, verified) = findings(dir.path(), &[]);
    assert_eq!((found, &verified["segments"]), (vec![], &1.into()), "{verified}");
    assert_eq!(verified["writer"], std::process::id().to_string());

    let wrong = wrong();
    // Each is written in an append of its own; one comes twice, from which a writer keeps nobody.
    let twice = call("once", &[1], &[2]);
    for (_, call) in &wrong {
        writer.append(vec![call.clone()]).await.expect("room");
    }
    writer.append(vec![twice.clone()]).await.expect("room");
    let mut wanted: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (invariant, call) in &wrong {
        wanted.entry(call.call_id.to_string()).or_default().push(invariant);
    }
    let check = |wanted: &BTreeMap<String, Vec<&str>>| {
        let (found, verified) = findings(dir.path(), &[]);
        let mut told: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for finding in &found {
            let id = finding["call_id"].as_str().unwrap_or_else(|| panic!("{finding}"));
            told.entry(id.to_owned()).or_default().push(finding["invariant"].as_str().expect("text"));
        }
        assert_eq!(told, *wanted);
        assert_eq!(verified["findings"], found.len());
    };
    check(&wanted);
    writer.append(vec![twice.clone()]).await.expect("room");
    wanted.entry(twice.call_id.to_string()).or_default().push("once");
    check(&wanted);
    // Of a segment a call is taken into Parquet once.
    writer.close().await;
    wanted.remove(&twice.call_id.to_string());
    check(&wanted);

    let (found, verified) = findings(dir.path(), &["--where", "session_id in ('trainable', 'once')"]);
    assert_eq!(verified["records"], wrong.iter().filter(|(name, _)| *name == "trainable").count() + 1);
    assert!(!found.is_empty() && invariants(&found).iter().all(|name| *name == "trainable"), "{found:?}");

    let output = verify(dir.path(), &[]);
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let id = wrong[3].1.call_id;
    assert!(stdout.contains(&format!("call {id} choice 0: logprob_value: log-prob 1 is 0.5")), "{stdout}");
    assert!(stdout.lines().all(|line| line.contains(".parquet: ")), "{stdout}");
    assert!(stderr.contains("findings in ") && stderr.contains("Parquet file"), "{stderr}");
}

#[tokio::test]
async fn a_call_in_two_files_is_found() {
    let dir = tempfile::tempdir().expect("folder");
    let twice = call("a", &[1], &[2]);
    for _ in 0..2 {
        let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
        writer.append(vec![twice.clone()]).await.expect("room");
        writer.close().await;
    }
    let (found, _) = findings(dir.path(), &[]);
    assert_eq!(invariants(&found), ["once"]);
    assert_eq!(found[0]["call_id"], twice.call_id.to_string());
}

#[tokio::test]
async fn a_flipped_bit_anywhere_in_a_parquet_file_is_found() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    writer.append(sound()).await.expect("room");
    writer.close().await;
    assert_eq!(findings(dir.path(), &[]).0, [] as [Value; 0]);
    let file = &files(dir.path(), "parquet")[0];
    let whole = fs::read(file).expect("read");
    // Behind the sum's bytes lies an index of pages, which nobody reads, and the footer.
    let text = String::from_utf8_lossy(&whole).into_owned();
    let sum = text
        .split("lego.crc32c")
        .nth(1)
        .expect("a checksum")
        .trim_start_matches(|c: char| !c.is_ascii_digit());
    let summed: usize = sum.split(':').next().expect("bytes").parse().expect("a number");
    assert!(summed > 4 << 10, "{summed} of {}", whole.len());
    for at in (0..summed).step_by(summed / 12).chain([summed - 1]) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        fs::write(file, &damaged).expect("written");
        let (found, _) = findings(dir.path(), &[]);
        assert!(invariants(&found).contains(&"parquet_checksum"), "byte {at} of {summed}: {found:?}");
        assert_eq!(found[0]["file"], file.to_str().expect("text"));
    }
    fs::write(file, &whole[..whole.len() - 3]).expect("written");
    assert_eq!(invariants(&findings(dir.path(), &[]).0)[0], "parquet_footer");
    // In the place of another day.
    fs::write(file, &whole).expect("written");
    let other = dir.path().join("date=2026-11-28");
    fs::create_dir(&other).expect("folder");
    fs::rename(file, other.join(file.file_name().expect("name"))).expect("moved");
    let (found, verified) = findings(dir.path(), &[]);
    assert_eq!(invariants(&found), vec!["day"; sound().len()]);
    assert_eq!(verified["records"], found.len());
}

#[tokio::test]
async fn damage_and_torn_tails_of_the_journal_are_found_unless_the_writer_is_at_it() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    let ids: Vec<CallId> = {
        let calls: Vec<Call> = (0..3).map(|_| call("a", &[1], &[2])).collect();
        for call in &calls {
            writer.append(vec![call.clone()]).await.expect("room");
        }
        calls.iter().map(|call| call.call_id).collect()
    };
    let segment = files(&dir.path().join("journal"), "journal").remove(0);
    let whole = fs::read(&segment).expect("read");
    let copy = tempfile::tempdir().expect("folder");
    let (journal, name) = (copy.path().join("journal"), segment.file_name().expect("name"));
    fs::create_dir(&journal).expect("folder");
    let frames = |bytes: &[u8]| fs::write(journal.join(name), bytes).expect("written");

    // Nobody writes there: what is no whole frame was left by a writer that died.
    frames(&whole[..whole.len() - 5]);
    let (found, verified) = findings(copy.path(), &[]);
    assert_eq!((invariants(&found), &verified["records"]), (vec!["journal_torn_tail"], &2.into()));
    assert!(found[0]["found"].as_str().expect("text").contains("lego capture compact"), "{found:?}");

    let mut damaged = whole.clone();
    let middle = whole.len() / 2;
    damaged[middle] ^= 1;
    frames(&damaged);
    let (found, verified) = findings(copy.path(), &[]);
    assert_eq!((invariants(&found), &verified["records"]), (vec!["journal_checksum"], &2.into()));

    let mut damaged = whole.clone();
    damaged[3] ^= 1;
    frames(&damaged);
    assert_eq!(invariants(&findings(copy.path(), &[]).0), ["journal_header"]);
    // The same of drafts, whose calls are no records.
    let drafts = copy.path().join("drafts/journal");
    fs::create_dir_all(&drafts).expect("folder");
    frames(&whole);
    for (bytes, invariant) in [(&whole[..whole.len() - 5], "journal_torn_tail"), (&damaged, "journal_header")]
    {
        fs::write(drafts.join(name), bytes).expect("written");
        let (found, verified) = findings(copy.path(), &[]);
        assert_eq!((invariants(&found), &verified["records"]), (vec![invariant], &3.into()));
    }
    fs::remove_dir_all(&drafts).expect("removed");
    fs::rename(journal.join(name), journal.join("00000009-0011223344556677.damaged")).expect("renamed");
    assert_eq!(invariants(&findings(copy.path(), &[]).0), ["journal_set_aside"]);

    // The same bytes at the end of the segment that a living writer has open.
    let mut file = fs::OpenOptions::new().append(true).open(&segment).expect("open");
    std::io::Write::write_all(&mut file, &whole[20..60]).expect("written");
    let (found, verified) = findings(dir.path(), &[]);
    assert_eq!((found.len(), &verified["open_bytes"], &verified["records"]), (0, &40.into(), &3.into()));
    // Its damage in front of whole frames is no half write.
    let mut damaged = whole.clone();
    damaged[middle] ^= 1;
    fs::write(&segment, &damaged).expect("written");
    let (found, _) = findings(dir.path(), &[]);
    assert_eq!(invariants(&found), ["journal_checksum"]);
    assert_eq!(ids.len(), 3);
    drop(writer);
}

#[tokio::test]
async fn a_predicate_that_cannot_be_meant_is_bad_usage() {
    let dir = tempfile::tempdir().expect("folder");
    for (predicate, part) in [
        ("sesion_id = 'a'", "session_id"),
        ("status = 'okay'", "ok, truncated"),
        ("completion_tokens > 'many'", "a whole number"),
        ("status = 'ok' and", "a column is to stand here"),
    ] {
        let output = verify(dir.path(), &["--where", predicate]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(part) && stderr.contains("at character"), "{stderr}");
    }
    let missing = verify(&dir.path().join("nowhere"), &[]);
    assert_eq!(missing.status.code(), Some(1));
}
