//! The fuzz targets: each takes any bytes and asserts what must hold of them. They draw nothing at random: where a
//! stream is split and what is asked follows from the bytes, so that an input always fails in the same way.

mod chat;
mod engines;
mod http;
mod journal;
mod messages;
pub mod replies;
mod requests;
mod responses;
mod responses_reply;
mod stream;

use lego::protocol::sse::{Event, Parser};
use lego::protocol::translate::ReplyNames;

pub use chat::chat_reply;
pub use engines::{routed_experts, sglang_generate};
pub use http::http_reply;
pub use journal::{journal_payload, splices};
pub use messages::{messages_reply, to_messages};
pub use replies::{
    reply_deepseek_v3, reply_deepseek_v31, reply_glm45, reply_hermes, reply_kimi_k2, reply_llama3_json,
    reply_mistral, reply_openai, reply_qwen3_coder,
};
pub use requests::{messages_request, openai_request, responses_request};
pub use responses::to_responses;
pub use responses_reply::responses_reply;
pub use stream::sse;

/// A target, and its name: that of its binary and of its folder of `fuzz/corpus`.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const ALL: [Target; 23] = [
    ("sse", sse),
    ("openai_request", openai_request),
    ("responses_request", responses_request),
    ("messages_request", messages_request),
    ("chat_reply", chat_reply),
    ("messages_reply", messages_reply),
    ("responses_reply", responses_reply),
    ("to_messages", to_messages),
    ("to_responses", to_responses),
    ("sglang_generate", sglang_generate),
    ("routed_experts", routed_experts),
    ("http_reply", http_reply),
    ("journal_payload", journal_payload),
    ("splices", splices),
    ("reply_hermes", reply_hermes),
    ("reply_qwen3_coder", reply_qwen3_coder),
    ("reply_llama3_json", reply_llama3_json),
    ("reply_mistral", reply_mistral),
    ("reply_deepseek_v3", reply_deepseek_v3),
    ("reply_deepseek_v31", reply_deepseek_v31),
    ("reply_kimi_k2", reply_kimi_k2),
    ("reply_glm45", reply_glm45),
    ("reply_openai", reply_openai),
];

/// A number that the bytes decide (FNV-1a).
fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The stream in up to four pieces.
fn pieces(stream: &[u8]) -> Vec<&[u8]> {
    let hash = hash(stream);
    let mut cuts: Vec<usize> =
        (0..3).map(|n| (hash >> (16 * n)) as usize % (stream.len() + 1)).chain([stream.len()]).collect();
    cuts.sort_unstable();
    let mut from = 0;
    cuts.into_iter().map(|cut| &stream[std::mem::replace(&mut from, cut)..cut]).collect()
}

/// The events of a stream that arrives in these pieces, the unterminated last one too.
fn events(pieces: &[&[u8]]) -> Vec<Event> {
    let mut parser = Parser::new();
    let mut events = Vec::new();
    for piece in pieces {
        parser.push(piece);
        while let Some(event) = parser.next_event() {
            events.push(event);
        }
    }
    events.extend(parser.finish());
    events
}

/// Names and data of a stream's whole events, without the end mark and what follows it.
fn data(stream: &[u8]) -> Vec<(String, Vec<u8>)> {
    let all = events(&[stream]).into_iter().filter(|event| event.has_data() && !event.is_unterminated);
    all.map(|event| (event.name.clone(), event.data().to_vec()))
        .take_while(|(_, data)| data != b"[DONE]")
        .collect()
}

/// The events of a stream that was written here: nothing of it may be unterminated.
fn written(stream: &[u8]) -> Vec<Event> {
    let events = events(&[stream]);
    for event in &events {
        assert!(!event.is_unterminated && event.has_data(), "whole events only: {event:?}");
    }
    events
}

fn names() -> ReplyNames {
    let call_id = "01990000-aaaa-7bbb-8ccc-000000000001".to_owned();
    ReplyNames { call_id, model: "asked".to_owned(), created: 1_796_000_000 }
}

/// True for a body; a stream's line cannot begin so and mean anything.
fn is_body(data: &[u8]) -> bool {
    matches!(data.trim_ascii_start().first(), Some(b'{' | b'['))
}
