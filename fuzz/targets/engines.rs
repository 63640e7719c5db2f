//! What engines send beside the chat protocol: SGLang's `/generate`, and expert routing.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use lego::protocol::chat::Reply;
use lego::protocol::completions::Request;
use lego::protocol::translate::{Piece, ReplyWriter};
use lego::record::{Routing, UpstreamKind};
use lego::upstream::routing::{RoutingHint, decode};
use lego::upstream::sglang_completions::CompletionsWriter;
use lego::upstream::sglang_generate::GenerateReply;
use serde_json::{Value, json};

use super::{data, hash, is_body, names, written};

/// SGLang's native reply, whole or streamed: ids and log-probs stay side by side, ids never change, and a reply that
/// is written down again reads the same in both forms of its stream.
pub fn sglang_generate(input: &[u8]) {
    let mut reply = GenerateReply::default();
    if is_body(input) {
        // A part may have been added before the bad one.
        let _ = reply.feed(input);
        check(reply.reply());
    } else {
        for (_, data) in data(input) {
            let before = reply.clone();
            let fed = reply.feed(&data);
            check(reply.reply());
            for (index, choice) in &before.reply().choices {
                let now = reply.reply().choices[index].token_ids.as_deref().unwrap_or_default();
                let then = choice.token_ids.as_deref().unwrap_or_default();
                assert!(now.starts_with(then), "ids that were sampled stay");
            }
            if fed.is_err() {
                return;
            }
        }
    }
    written_again(reply.reply());
    as_completions(input);
}

/// A client of completions is told what the reader read: each choice's text and ids once and in order, and an end only
/// where there is one.
fn as_completions(input: &[u8]) {
    let asked = json!({"model": "asked", "prompt": "a", "n": 2, "logprobs": 1, "return_token_ids": true});
    let request = Request::parse(Bytes::from(asked.to_string())).expect("a request");
    let mut writer = CompletionsWriter::new(&request, names());
    if is_body(input) {
        if let Ok(body) = writer.body(input) {
            let body: Value = serde_json::from_slice(&body).expect("JSON");
            let choices = body["choices"].as_array().expect("choices");
            assert!(choices.iter().all(|choice| choice["finish_reason"].is_string()));
        }
        return;
    }
    let mut reply = GenerateReply::of_prompts(2);
    let mut out = Vec::new();
    for (_, data) in data(input) {
        let is_read = reply.feed(&data).is_ok_and(|fed| !fed.has_error);
        let is_written = writer.chunk(&data, &mut out).is_ok();
        if !is_read || !is_written {
            return;
        }
    }
    writer.end(&mut out);
    let bytes = |piece| match piece {
        Piece::Bytes(bytes) => bytes,
        Piece::Barrier => Bytes::new(),
    };
    let stream: Vec<u8> = out.into_iter().map(bytes).collect::<Vec<Bytes>>().concat();
    let is_finished = reply.reply().is_finished(2);
    assert_eq!(stream.ends_with(b"data: [DONE]\n\n"), is_finished);
    let mut told: std::collections::BTreeMap<u16, (String, Vec<u32>)> = std::collections::BTreeMap::new();
    for event in written(&stream) {
        let Ok(chunk) = serde_json::from_slice::<Value>(&event.data()) else {
            assert_eq!(event.data(), "[DONE]");
            continue;
        };
        for choice in chunk["choices"].as_array().into_iter().flatten() {
            let known = told.entry(choice["index"].as_u64().expect("an index") as u16).or_default();
            known.0.push_str(choice["text"].as_str().expect("text"));
            let ids = choice["token_ids"].as_array().into_iter().flatten();
            known.1.extend(ids.map(|id| id.as_u64().expect("an id") as u32));
        }
    }
    for (index, choice) in &reply.reply().choices {
        let (text, ids) = told.remove(index).unwrap_or_default();
        // A stop string that was told in part is not taken back.
        assert!(text.starts_with(&choice.text));
        assert_eq!(ids, choice.token_ids.clone().unwrap_or_default());
    }
    assert!(told.is_empty());
}

fn check(reply: &Reply) {
    for choice in reply.choices.values() {
        let ids = choice.token_ids.as_ref().map(Vec::len);
        if let (Some(ids), Some(logprobs)) = (ids, &choice.logprobs) {
            assert_eq!(ids, logprobs.len());
        }
        for value in choice.logprobs.iter().flatten().flatten() {
            assert!(value.is_finite() && *value <= 0.0);
        }
    }
}

/// The first choice as a server would stream it, in both forms.
fn written_again(reply: &Reply) {
    let Some(choice) = reply.choices.get(&0) else { return };
    let (Some(ids), Some(logprobs)) = (&choice.token_ids, &choice.logprobs) else { return };
    if ids.len() < 2 || ids.len() > 4096 {
        return;
    }
    let mut ends: Vec<usize> =
        (1..3).map(|n| 1 + (hash(choice.text.as_bytes()) >> (8 * n)) as usize % ids.len()).collect();
    ends.push(ids.len());
    ends.sort_unstable();
    ends.dedup();
    for is_cumulative in [true, false] {
        let mut again = GenerateReply::default();
        let mut from = 0;
        for end in &ends {
            let start = if is_cumulative { 0 } else { from };
            let pairs: Vec<Value> = (start..*end).map(|at| json!([logprobs[at], ids[at], null])).collect();
            let text = if start == 0 { "a" } else { "" };
            let event = json!({"text": text, "output_ids": ids[start..*end],
                "meta_info": {"prompt_tokens": 3, "completion_tokens": end, "output_token_logprobs": pairs}});
            again.feed(event.to_string().as_bytes()).expect("as a server writes it");
            from = *end;
        }
        let read = &again.reply().choices[&0];
        assert_eq!((&read.token_ids, &read.logprobs), (&choice.token_ids, &choice.logprobs));
        assert_eq!(read.text, "a");
    }
}

/// Expert routing in both engines' forms: the rows that were asked for and no others, and written down again the same.
pub fn routed_experts(input: &[u8]) {
    let encoded = STANDARD.encode(input);
    let mut texts = vec![encoded.as_str()];
    texts.extend(std::str::from_utf8(input).ok());
    let hash = hash(input);
    for text in texts {
        for kind in [UpstreamKind::Vllm, UpstreamKind::Sglang, UpstreamKind::Embedded, UpstreamKind::Openai] {
            // What the file says of itself, and other numbers of rows.
            let rows =
                (0..5).chain([hash % 64, input.len() as u64 / 8, input.len() as u64 / 16, shape(input)]);
            for rows in rows {
                for hint in [
                    RoutingHint { layers: None, top_k: None },
                    RoutingHint { layers: Some(1 + (hash >> 8) as u32 % 4), top_k: None },
                    RoutingHint { layers: None, top_k: Some(1 + (hash >> 16) as u32 % 4) },
                ] {
                    let start = (hash >> 24) % 5;
                    if let Ok(routing) = decode(kind, hint, text, start, rows) {
                        assert_eq!(u64::from(routing.shape().rows), rows);
                        assert_eq!(u64::from(routing.shape().start), start);
                        checked(&routing, hint, kind);
                    }
                }
            }
        }
    }
}

/// The first number of a `.npy` header's shape.
fn shape(input: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(&input[..input.len().min(128)]).into_owned();
    let digits = text.split_once('(').map_or("", |(_, after)| after);
    digits.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap_or(0)
}

fn checked(routing: &Routing, hint: RoutingHint, kind: UpstreamKind) {
    let shape = *routing.shape();
    let ids: Vec<u32> = routing.ids().collect();
    assert_eq!(Some(ids.len()), shape.ids());
    assert_eq!(routing.data().len(), ids.len() * shape.dtype.bytes());
    if kind == UpstreamKind::Sglang {
        assert!(hint.layers.is_none_or(|layers| layers == shape.layers));
        assert!(hint.top_k.is_none_or(|top_k| top_k == shape.top_k));
    }
    assert_eq!(Routing::pack(shape, &ids).expect("fits").ids().collect::<Vec<_>>(), ids);
    let text = serde_json::to_string(routing).expect("JSON");
    assert_eq!(&serde_json::from_str::<Routing>(&text).expect("a routing"), routing);
    let raw: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let told = RoutingHint { layers: Some(shape.layers), top_k: Some(shape.top_k) };
    if shape.layers > 0 && shape.top_k > 0 && shape.rows > 0 {
        let (start, rows) = (u64::from(shape.start), u64::from(shape.rows));
        let again = decode(UpstreamKind::Sglang, told, &STANDARD.encode(raw), start, rows)
            .expect("as SGLang sends it");
        assert_eq!(again.ids().collect::<Vec<_>>(), ids);
    }
}
