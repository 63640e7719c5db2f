//! History is stored once: a long trial takes the room of what is new in each turn.

use std::fs;
use std::path::Path;

use lego::capture::{Query, Reader, Writer, WriterOptions};
use lego::record::{Call, CallId, CallSink, JsonText};
use serde_json::json;

use crate::calls::call;
use crate::python;
use crate::trial::{self, Reply};

fn size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry"));
    entries
        .map(|entry| {
            if entry.path().is_dir() { size(&entry.path()) } else { entry.metadata().expect("a file").len() }
        })
        .sum()
}

fn json(call: &Call) -> String {
    serde_json::to_string(call).expect("JSON")
}

#[tokio::test]
async fn a_trial_of_sixty_turns_takes_a_megabyte() {
    let calls = trial::trial("trial", 60, Reply { tokens: 250, bytes_read: 3_700 });
    let summed: usize = calls.iter().map(|call| call.prompt_token_ids.as_ref().expect("ids").len()).sum();
    assert!((2_300_000..2_500_000).contains(&summed), "{summed}");
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    let mut sizes = vec![];
    for call in &calls {
        writer.append(vec![call.clone()]).await.expect("room");
        sizes.push(size(dir.path()));
    }
    let check = || {
        let read: Vec<Call> = Reader::open(dir.path(), Query::default())
            .expect("readable")
            .collect::<Result<_, _>>()
            .expect("whole");
        assert_eq!(read.len(), calls.len());
        for (read, wanted) in read.iter().zip(&calls) {
            assert_eq!(json(read), json(wanted));
        }
    };
    check();
    writer.close().await;
    check();
    let parquet = size(dir.path());
    println!("{} {} {} {parquet}", sizes[0], sizes[29], sizes[59]);
    assert!(sizes[59] <= 1_000_000, "journal: {}", sizes[59]);
    assert!(parquet <= 1_000_000, "Parquet: {parquet}");
    // Linear in turns.
    let (first, second) = (sizes[29] - sizes[0], sizes[59] - sizes[29]);
    assert!(second * 10 < first * 12, "{first} {second}");
}

#[tokio::test]
async fn the_documented_view_gives_whole_calls_in_duckdb() {
    let python = python::venv(&["duckdb"]);
    let dir = tempfile::tempdir().expect("folder");
    let mut calls = trial::trial("trial", 8, Reply { tokens: 250, bytes_read: 3_700 });
    // A branch, a call that lego asked for in words of its own, and one with two choices; with more than ASCII.
    let emoji = |call: &mut Call, body: &str| {
        let words = "naïve 𝄞 \\n ".repeat(200);
        call.client_request = JsonText::new(format!("{{\"a\":\"{words}{body}\"}}")).ok();
        call.upstream_request = JsonText::new(format!("[\"{}{body}\"]", words.replace(' ', "  "))).ok();
        call.response = JsonText::new(format!("[\"{words}\"]")).ok();
        (call.call_id, call.session_id) = (CallId::now(), "other".parse().expect("an id"));
    };
    for body in ["é", "é and more"] {
        let mut call = call("other", &[7; 500], &[1, 2]);
        emoji(&mut call, body);
        calls.push(call);
    }
    let second = Call { choice_index: 1, completion_token_ids: None, ..calls[9].clone() };
    calls.push(second);
    for file in [&calls[..4], &calls[4..]] {
        let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
        for together in file.chunk_by(|a, b| a.call_id == b.call_id) {
            writer.append(together.to_vec()).await.expect("room");
        }
        writer.close().await;
    }
    let text = |body: &Option<JsonText>| body.as_ref().map(|body| body.get().to_owned());
    let expected = calls.iter().map(|call| {
        let call = json!({
            "call_id": call.call_id, "choice_index": call.choice_index, "prompt_token_ids": call.prompt_token_ids,
            "client_request": text(&call.client_request), "upstream_request": text(&call.upstream_request),
            "response": text(&call.response),
        });
        format!("{call}\n")
    });
    let file = dir.path().join("expected.jsonl");
    fs::write(&file, expected.collect::<String>()).expect("written");
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/captures.md");
    let paths = [&docs, dir.path(), &file].map(|path: &Path| path.to_str().expect("text"));
    assert_eq!(python::script(&python, "history_view.py", &paths).trim(), calls.len().to_string());
}
