//! A long trial of a code agent, made up.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use lego::record::{Call, CallId, JsonText};
use serde_json::json;

use crate::calls::call;

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

/// What each turn brings.
#[derive(Debug, Clone, Copy)]
pub struct Reply {
    /// Sampled tokens.
    pub tokens: usize,
    /// Bytes that the agent reads then, some four a token.
    pub bytes_read: usize,
}

/// The calls of a trial as a harness makes them and a vLLM that streams answers.
pub fn trial(session: &str, turns: usize, reply: Reply) -> Vec<Call> {
    let each = reply;
    let source = sources();
    // Each trial reads another part.
    let mut hasher = DefaultHasher::new();
    session.hash(&mut hasher);
    let mut at = hasher.finish() as usize % (source.len() / 2);
    let mut read = |bytes: usize| {
        if at + bytes > source.len() {
            at = 0;
        }
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
        let reply = read(4 * each.tokens);
        let completion = ids(reply);
        let mut call = call(session, &prompt, &completion);
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
        let result = read(each.bytes_read);
        messages.push(json!({"role": "assistant", "content": reply}));
        messages.push(json!({"role": "tool", "tool_call_id": format!("call_{turn}"), "content": result}));
        prompt.extend(completion);
        prompt.extend(ids(result));
    }
    calls
}
