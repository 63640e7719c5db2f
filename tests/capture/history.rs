//! History is stored once: a long trial takes the room of what is new in each turn.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use lego::capture::{Query, Reader, Writer, WriterOptions};
use lego::record::{Call, CallId, CallSink, JsonText};
use serde_json::json;

use crate::calls::call;
use crate::python;

/// What a code agent reads: this repository's own source.
fn sources() -> String {
    let mut files = vec![];
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push(path);
            }
        }
    }
    files.sort();
    let text = |path| fs::read_to_string(path).expect("text");
    files.iter().map(text).collect::<String>().chars().filter(char::is_ascii).collect()
}

/// Ids of a text, one for some four characters: equal ones for equal pieces.
fn ids(text: &str) -> Vec<u32> {
    let id = |piece: &[u8]| {
        let mut hasher = DefaultHasher::new();
        piece.hash(&mut hasher);
        (hasher.finish() % 150_000) as u32
    };
    text.as_bytes().chunks(4).map(id).collect()
}

/// The calls of a trial as a harness makes them and a vLLM answers: `turns` of which each adds some 1,150 tokens.
fn trial(turns: usize) -> Vec<Call> {
    let source = sources();
    let mut at = 0;
    let mut read = |bytes: usize| {
        at += bytes;
        &source[at - bytes..at]
    };
    let mut messages = vec![
        json!({"role": "system", "content": read(12_000)}),
        json!({"role": "user", "content": read(4_000)}),
    ];
    let tools: Vec<_> = (0..8)
        .map(|n| json!({"type": "function", "function": {"name": format!("t{n}"), "description": read(900)}}))
        .collect();
    let mut prompt = ids(read(16_000));
    let mut calls = vec![];
    for turn in 0..turns {
        let reply = read(1_000);
        let completion = ids(reply);
        let mut call = call("trial", &prompt, &completion);
        call.call_id = CallId::now();
        call.received_at += turn as i64 * 1_000_000;
        let mut body = json!({"model": "policy", "messages": messages, "tools": tools, "stream": true, "temperature": 0.7});
        call.client_request = JsonText::new(body.to_string()).ok();
        body["temperature"] = json!(1.0);
        body["top_p"] = json!(1.0);
        body["return_token_ids"] = json!(true);
        body["logprobs"] = json!(true);
        call.upstream_request = JsonText::new(body.to_string()).ok();
        let pieces = reply.as_bytes().chunks(4).zip(&completion).enumerate();
        let events: Vec<_> = pieces.map(|(n, (piece, id))| {
            let text = String::from_utf8_lossy(piece);
            let logprob = -f64::from((turn as u32 * 7919 + n as u32 * 104_729) % 1_000_003) / 1_234_567.0;
            json!({"id": format!("chatcmpl-{turn}"), "object": "chat.completion.chunk", "created": 1_795_946_400, "model": "policy",
                "choices": [{"index": 0, "delta": {"content": text}, "logprobs": {"content": [{"token": text, "logprob": logprob, "bytes": piece, "top_logprobs": []}]},
                "finish_reason": null, "token_ids": [id]}]})
        }).collect();
        call.response = JsonText::new(json!(events).to_string()).ok();
        let logprobs =
            events.iter().map(|event| event["choices"][0]["logprobs"]["content"][0]["logprob"].as_f64());
        call.completion_logprobs =
            Some(logprobs.map(|logprob| logprob.map(|logprob| logprob as f32)).collect());
        calls.push(call);
        let result = read(3_700);
        messages.push(json!({"role": "assistant", "content": reply}));
        messages.push(json!({"role": "tool", "tool_call_id": format!("call_{turn}"), "content": result}));
        prompt.extend(completion);
        prompt.extend(ids(result));
    }
    calls
}

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
    let calls = trial(60);
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
    let mut calls = trial(8);
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
