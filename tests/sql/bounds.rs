//! Large values, little memory, damage.

use std::fs;

use super::{CallSink, Writer, WriterOptions, failure, rows, sql};
use crate::calls::call;

#[tokio::test]
async fn a_long_prompt_comes_whole() {
    let dir = tempfile::tempdir().expect("folder");
    let prompt: Vec<u32> = (0..200_000).map(|n: u32| n.wrapping_mul(2_654_435_761)).collect();
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    writer.append(vec![call("long", &prompt, &[1])]).await.expect("room");
    let check = |answer: &serde_json::Value| {
        let ids: Vec<u32> = serde_json::from_value(answer["prompt_token_ids"].clone()).expect("ids");
        assert!(ids == prompt);
    };
    check(&rows(dir.path(), "SELECT prompt_token_ids FROM calls")[0]);
    writer.close().await;
    check(&rows(dir.path(), "SELECT prompt_token_ids FROM calls")[0]);
    let sum =
        "SELECT count(*) AS n, sum(id) AS total FROM (SELECT unnest(prompt_token_ids) AS id FROM calls)";
    let total: u64 = prompt.iter().map(|&id| u64::from(id)).sum();
    assert_eq!(rows(dir.path(), sum), [serde_json::json!({"n": 200_000, "total": total})]);
    let table = sql(dir.path(), "SELECT prompt_token_ids FROM calls", &[]);
    assert!(
        table.stdout.len() < 200 && String::from_utf8_lossy(&table.stderr).contains("1 value is cut short"),
        "{table:?}"
    );
}

#[tokio::test]
async fn what_does_not_fit_into_memory_is_refused_or_spilled() {
    let (dir, spill) = (tempfile::tempdir().expect("folder"), tempfile::tempdir().expect("folder"));
    let prompt: Vec<u32> = (0..20_000).collect();
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    for _ in 0..60 {
        writer.append((0..10).map(|_| call("one", &prompt, &[1])).collect()).await.expect("room");
    }
    writer.close().await;
    let query = "SELECT call_id, prompt_token_ids FROM calls ORDER BY call_id DESC";
    let (code, message) = failure(dir.path(), query, &["--memory-mb", "32", "--json"]);
    assert!(code == 1 && message.contains("--memory-mb") && message.contains("--spill"), "{message}");
    let spilled = ["--memory-mb", "32", "--json", "--spill", spill.path().to_str().expect("UTF-8")];
    let spilled = sql(dir.path(), query, &spilled);
    assert!(spilled.status.success(), "{spilled:?}");
    assert!(spilled.stdout == sql(dir.path(), query, &["--json"]).stdout);
    assert_eq!(fs::read_dir(spill.path()).expect("folder").count(), 0);
}

#[tokio::test]
async fn what_was_left_out_is_told_behind_the_answer() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    for session in ["first", "second", "third"] {
        writer.append(vec![call(session, &[1; 1000], &[2])]).await.expect("room");
    }
    let segment =
        fs::read_dir(dir.path().join("journal")).expect("folder").next().expect("one").expect("entry").path();
    let mut bytes = fs::read(&segment).expect("segment");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&segment, &bytes).expect("written");
    fs::create_dir(dir.path().join("date=2026-11-28")).expect("room");
    fs::write(dir.path().join("date=2026-11-28/calls-0.parquet"), b"PAR1 no").expect("written");
    let output = sql(dir.path(), "SELECT session_id FROM calls ORDER BY 1", &["--json"]);
    let (text, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(text, "{\"session_id\":\"first\"}\n{\"session_id\":\"third\"}\n");
    assert_eq!(output.status.code(), Some(1));
    for what in ["damaged bytes of the journal", "calls-0.parquet", "calls may be missing in this answer"] {
        assert!(told.contains(what), "{told}");
    }
    // Of two passes each thing is told once.
    let twice = sql(dir.path(), "SELECT a.session_id FROM calls a JOIN calls b USING (call_id)", &[]);
    let told = String::from_utf8_lossy(&twice.stderr).matches("left out").count();
    assert_eq!(told, 2, "{twice:?}");
    drop(writer);
}
