//! `lego capture` as a user runs it.

use std::path::Path;
use std::process::{Command, Output};

use lego::capture::{Writer, WriterOptions};
use lego::record::{CallKind, CallSink, ClientApi, IdsSource, LogprobSemantics, UpstreamKind};

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

#[tokio::test]
async fn ls_tells_probes_apart_and_limits_and_a_run_folder_is_as_good_as_its_captures() {
    let run = tempfile::tempdir().expect("folder");
    let dir = run.path().join("captures");
    let writer = Writer::open(&dir, WriterOptions::default()).expect("free folder");
    let mut calls = vec![call("one", &[1, 2], &[3, 4]), call("one", &[9], &[8]), call("two", &[1], &[2])];
    calls[1].kind = CallKind::Probe;
    calls[2].received_at += 1_000_000;
    let mut local = call("two", &[5], &[6, 7]);
    local.received_at += 2_000_000;
    (local.trainable, local.completion_ids_source) = (false, IdsSource::LocalTokenizer);
    local.client_api = ClientApi::OpenaiResponses;
    local.client_request = Some(
        lego::record::JsonText::new(r#"{"instructions": "be brief", "input": "list it"}"#).expect("JSON"),
    );
    calls.push(local);
    writer.append(calls).await.expect("room");

    let listed = text(&lego(run.path(), &["ls"]));
    let one = listed.lines().find(|line| line.starts_with("one ")).expect("listed");
    assert_eq!(one.split_whitespace().collect::<Vec<_>>()[1..4], ["1", "2", "2"], "{listed}");
    assert!(listed.contains("2 sessions, 3 sampled tokens; 1 probe of lego's own"), "{listed}");
    let newest = text(&lego(run.path(), &["ls", "--limit", "1"]));
    assert!(newest.contains("1 session, 1 sampled token; the newest of 2"), "{newest}");
    assert!(!newest.contains("\none "), "{newest}");
    let probes = text(&lego(run.path(), &["ls", "--kind", "probe", "--json"]));
    let probes: Vec<serde_json::Value> =
        probes.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(probes.len(), 1);
    assert_eq!((&probes[0]["session_id"], &probes[0]["calls"]), (&"one".into(), &1.into()));
    assert_eq!(lego(run.path(), &["ls", "--kind", "nothing"]).status.code(), Some(2));

    let calls = text(&lego(run.path(), &["ls", "--session", "one", "--kind", "policy"]));
    assert!(calls.contains("policy") && !calls.contains("probe"), "{calls}");
    let calls = text(&lego(run.path(), &["ls", "--session", "two", "--limit", "1"]));
    assert!(calls.contains("~2") && calls.contains("ids of a local tokenizer"), "{calls}");
    assert!(calls.contains("the newest 1 of 2"), "{calls}");

    let shown = text(&lego(run.path(), &["show", "two"]));
    for part in ["[instructions] be brief", "[user] list it", "2 ids of the reply's text (local_tokenizer)"] {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    writer.close().await;
}

#[tokio::test]
async fn tokens_have_their_text_where_the_tokenizer_is_known() {
    let dir = tempfile::tempdir().expect("folder");
    let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/models/lego-tiny"));
    let tokenizer = lego::text::Tokenizer::load(model).expect("bundled");
    let (prompt, said) =
        (tokenizer.encode("<|im_start|>user\n").expect("ids"), tokenizer.encode("hi 京").expect("ids"));
    let captures = dir.path().join("captures");
    let writer = Writer::open(&captures, WriterOptions::default()).expect("free folder");
    let mut sampled = call("one", &prompt, &said);
    sampled.upstream_kind = UpstreamKind::Embedded;
    let mut foreign = call("other", &prompt, &said);
    foreign.upstream_kind = UpstreamKind::Embedded;
    foreign.tokenizer_sha256 = Some("0".repeat(64));
    writer.append(vec![sampled, foreign]).await.expect("room");
    writer.close().await;

    let plain = text(&lego(&captures, &["show", "one", "--tokens"]));
    assert!(plain.contains("prompt ids") && !plain.contains("prompt text"), "{plain}");
    let folder = model.to_str().expect("text");
    let with_text = text(&lego(&captures, &["show", "one", "--tokens", "--tokenizer", folder]));
    assert!(with_text.contains("prompt text \"<|im_start|>user\\n\""), "{with_text}");
    // The character is made of several tokens, none of which is text by itself.
    assert!(with_text.contains("b\"\\x"), "{with_text}");
    let other = text(&lego(&captures, &["show", "other", "--tokens", "--tokenizer", folder]));
    assert!(!other.contains("prompt text"), "{other}");
    // A run's folder says whose tokenizer it is.
    let resolved = format!("[proxy]\nmodel_path = {folder:?}\n");
    std::fs::write(dir.path().join("config.resolved.toml"), resolved).expect("written");
    let found = text(&lego(dir.path(), &["show", "one", "--tokens"]));
    assert!(found.contains("prompt text \"<|im_start|>user\\n\""), "{found}");
}

fn json(text: &str) -> Option<lego::record::JsonText> {
    lego::record::JsonText::new(text).ok()
}

#[tokio::test]
async fn show_says_what_was_sent_where_a_part_was_removed_and_what_is_not_known() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    let mut removed = call("one", &[1, 2], &[3, 4]);
    let asked = |system: &str| {
        json(&format!(
            r#"{{"messages": [{{"role":"system","content":"{system}"}},{{"role":"user","content":"hi"}}]}}"#
        ))
    };
    (removed.client_request, removed.upstream_request) =
        (asked("Today is 2026-11-30."), asked("Today is a day."));
    (removed.weight_spans, removed.completion_logprobs) = (None, Some(vec![Some(-0.5), None]));
    let mut no_ids = failed_call("two");
    no_ids.logprob_semantics = LogprobSemantics::RawT1;
    writer.append(vec![removed, no_ids]).await.expect("room");
    writer.close().await;
    let shown = text(&lego(dir.path(), &["show", "one", "--tokens"]));
    for part in [
        "[system] Today is 2026-11-30.\n[system, as it was sent] Today is a day.\n[user] hi\n[reply]",
        "weights unknown",
    ] {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    assert!(!shown.contains("null"), "{shown}");
    assert!(
        shown.lines().any(|line| line.split_whitespace().eq(["1", "4", "unknown", "unknown"])),
        "{shown}"
    );
    let shown = text(&lego(dir.path(), &["show", "two"]));
    assert!(shown.contains("log-prob unknown,") && !shown.contains("raw_t1"), "{shown}");
}

#[tokio::test]
async fn ls_says_of_a_session_why_its_calls_are_not_trainable() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    let mut calls =
        vec![call("good", &[1], &[2]), failed_call("bad"), failed_call("bad"), failed_call("worse")];
    calls[1].not_trainable_reasons.push("no_ids".to_owned());
    writer.append(calls).await.expect("room");
    writer.close().await;
    let listed = text(&lego(dir.path(), &["ls"]));
    let line = |name: &str| {
        let found = listed.lines().find(|line| line.starts_with(name));
        found.unwrap_or_else(|| panic!("{name} in {listed}")).to_owned()
    };
    assert!(line("session").ends_with("  why not trainable"), "{listed}");
    assert!(line("good").ends_with("  trial-of-good"), "{listed}");
    assert!(line("bad").ends_with("  upstream_error (2), 1 more"), "{listed}");
    assert!(line("worse").ends_with("  upstream_error (1)"), "{listed}");
    let of_bad = text(&lego(dir.path(), &["ls", "--json"]));
    let of_bad = of_bad.lines().find(|line| line.contains("\"bad\"")).expect("listed").to_owned();
    let of_bad: serde_json::Value = serde_json::from_str(&of_bad).expect("JSON");
    assert_eq!(of_bad["not_trainable_reasons"], serde_json::json!({"no_ids": 1, "upstream_error": 2}));
}

#[cfg(not(feature = "sql"))]
#[test]
fn sql_says_how_to_get_it() {
    let dir = tempfile::tempdir().expect("folder");
    let output = lego(dir.path(), &["sql", "SELECT 1"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{message}");
    assert!(message.contains("cargo build --release --features sql"), "{message}");
}
