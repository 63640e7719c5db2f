//! What holds for any reply and any input.

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::{Assembler, count_reply, count_request, translate};
use super::{assemble, assert_same, chat_reply, checked, joined, names, write};
use crate::protocol::chat::Choice;
use crate::protocol::messages::Writer;
use crate::protocol::translate::ReplyWriter;

/// Something that a chunk says.
#[derive(Debug, Clone)]
enum Say {
    Text(String),
    Reasoning(String),
    /// A fragment of the call with this number.
    Call(usize),
}

fn say() -> impl Strategy<Value = Say> {
    prop_oneof![
        "[a-z \n\u{2028}é\u{1F389}\"\\\\]{0,6}".prop_map(Say::Text),
        "[a-z ]{0,6}".prop_map(Say::Reasoning),
        (0_usize..4).prop_map(Say::Call),
    ]
}

fn arguments() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        Just("{}".to_owned()),
        Just("{\"cut\":".to_owned()),
        "[a-z{}\"\\\\é]{0,20}".prop_map(|text| json!({"k": text, "n": {"a": [1, text.clone()]}}).to_string()),
        "[a-z]{0,5}".prop_map(|text| format!("{{\"a\":  \"{text}\" , \"b\":1.50}}")),
    ]
}

/// Chunks of a stream that says these things, with the calls' arguments cut by `cuts` and all said to the end.
fn stream(said: &[Say], arguments: &[String], cuts: &[usize]) -> Vec<Vec<u8>> {
    let mut sent = vec![0_usize; arguments.len()];
    let mut is_begun = vec![false; arguments.len()];
    let mut fragment = |call: usize, wanted: usize| {
        let text = &arguments[call];
        let mut end = (sent[call] + wanted).min(text.len());
        while !text.is_char_boundary(end) {
            end += 1;
        }
        let piece = &text[sent[call]..end];
        let delta = if is_begun[call] {
            json!({"index": call, "function": {"arguments": piece}})
        } else {
            json!({"index": call, "id": format!("functions.f{call}:{call}"), "type": "function",
                "function": {"name": format!("f{call}"), "arguments": piece}})
        };
        is_begun[call] = true;
        sent[call] = end;
        json!({"tool_calls": [delta]})
    };
    let mut deltas: Vec<Value> = vec![json!({"role": "assistant", "content": ""})];
    let mut used = Vec::new();
    for (index, say) in said.iter().enumerate() {
        deltas.push(match say {
            Say::Text(text) => json!({"content": text, "reasoning_content": null}),
            Say::Reasoning(text) => json!({"reasoning_content": text}),
            Say::Call(call) => {
                used.push(*call);
                fragment(*call, cuts[index % cuts.len()])
            }
        });
    }
    used.sort_unstable();
    used.dedup();
    for call in used {
        deltas.push(fragment(call, usize::MAX / 2));
    }
    let mut chunks: Vec<Vec<u8>> = deltas
        .into_iter()
        .map(|delta| json!({"choices": [{"index": 0, "delta": delta}]}).to_string().into_bytes())
        .collect();
    chunks.push(br#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#.to_vec());
    chunks
}

fn written(chunks: &[Vec<u8>]) -> Choice {
    let steps = write(chunks);
    checked(&steps);
    assemble(&joined(&steps)).choices[&0].clone()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_interleaving_assembles_to_what_the_chat_stream_says(
        said in prop::collection::vec(say(), 0..24),
        arguments in prop::collection::vec(arguments(), 4),
        cuts in prop::collection::vec(0_usize..12, 1..6),
    ) {
        let chunks = stream(&said, &arguments, &cuts);
        let chat = chat_reply(&chunks);
        assert_same(&written(&chunks), &chat.choices[&0], true);
    }

    #[test]
    fn how_deltas_are_cut_does_not_matter(
        text in "[a-z \n]{0,20}",
        reasoning in "[a-z ]{0,20}",
        arguments in prop::collection::vec(arguments(), 4),
        calls in 0_usize..4,
        cuts in prop::collection::vec(1_usize..9, 1..6),
        other_cuts in prop::collection::vec(1_usize..9, 1..6),
    ) {
        let cut = |cuts: &[usize]| {
            let mut said = Vec::new();
            let pieces = |text: &str, cuts: &[usize]| {
                let mut out = Vec::new();
                let mut rest = text;
                while !rest.is_empty() {
                    let (piece, after) = rest.split_at(cuts[out.len() % cuts.len()].min(rest.len()));
                    out.push(piece.to_owned());
                    rest = after;
                }
                out
            };
            said.extend(pieces(&reasoning, cuts).into_iter().map(Say::Reasoning));
            said.extend(pieces(&text, cuts).into_iter().map(Say::Text));
            for call in 0..calls {
                said.extend(vec![Say::Call(call); 1 + cuts.len()]);
            }
            written(&stream(&said, &arguments, cuts))
        };
        let (one, other) = (cut(&cuts), cut(&other_cuts));
        assert_same(&one, &other, true);
        prop_assert_eq!(one.finish_reason, other.finish_reason);
    }

    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..80), text in "[\\[\\]{}\":,a-z0-9 ]{0,80}") {
        for garbage in [bytes, text.into_bytes()] {
            let _ = translate(&Bytes::from(garbage.clone()), names()).map(|_| ());
            let _ = count_request(&Bytes::from(garbage.clone()));
            let _ = count_reply(&garbage);
            let mut writer = Writer::new(names());
            let mut out = Vec::new();
            let _ = writer.chunk(&garbage, &mut out);
            let _ = writer.body(&garbage);
            writer.end(&mut out);
            let mut assembler = Assembler::default();
            let _ = assembler.event("message_start", &garbage);
            let _ = assembler.body(&garbage);
        }
    }

    #[test]
    fn requests_of_odd_shapes_are_refused_or_translated(
        turns in prop::collection::vec((prop::sample::select(&WORDS[..3]), odd()), 1..4),
        system in odd(),
        tools in odd(),
    ) {
        let messages: Vec<Value> =
            turns.into_iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
        for (system, tools) in [(Value::Null, Value::Null), (system, tools)] {
            let request =
                json!({"model": "m", "max_tokens": 1, "messages": messages, "system": system, "tools": tools});
            match translate(&Bytes::from(request.to_string()), names()) {
                Ok(translation) => prop_assert!(super::json(&translation.chat)["messages"].is_array()),
                Err(error) => prop_assert_eq!(error.status, 400),
            }
        }
    }

    #[test]
    fn replies_of_odd_shapes_never_panic(odd in odd(), name in prop::sample::select(&WORDS[..])) {
        let data = odd.to_string();
        let mut assembler = Assembler::default();
        let _ = assembler.event(name, data.as_bytes());
        let _ = assembler.event(name, json!({"index": 0, "delta": odd, "content_block": odd}).to_string().as_bytes());
        let _ = assembler.event("content_block_stop", b"{}");
        let _ = assembler.body(data.as_bytes());
        let mut out = Vec::new();
        let mut writer = Writer::new(names());
        let _ = writer.chunk(json!({"choices": [{"delta": odd}]}).to_string().as_bytes(), &mut out);
        let _ = writer.chunk(json!({"choices": [{"delta": {"tool_calls": [odd]}}]}).to_string().as_bytes(), &mut out);
        writer.end(&mut out);
    }

    #[test]
    fn every_text_of_a_conversation_is_kept(
        turns in prop::collection::vec((any::<bool>(), prop::collection::vec(0_usize..5, 0..5)), 1..6),
    ) {
        let mut said = Vec::new();
        let mut messages = Vec::new();
        for (is_user, kinds) in turns {
            let blocks: Vec<Value> = kinds
                .into_iter()
                .map(|kind| {
                    let text = format!("text {}é", said.len());
                    said.push(text.clone());
                    match (is_user, kind) {
                        (_, 0 | 1) => json!({"type": "text", "text": text}),
                        (true, 2) => json!({"type": "tool_result", "tool_use_id": "x", "content": text}),
                        (true, 3) => json!({"type": "tool_result", "tool_use_id": "x", "content":
                            [{"type": "text", "text": text}, {"type": "text", "text": ""}]}),
                        (true, _) => json!({"type": "mid_conv_system", "content": text}),
                        (false, 2) => json!({"type": "thinking", "thinking": text, "signature": "s"}),
                        (false, _) => json!({"type": "tool_use", "id": "x", "name": "f", "input": {"k": text}}),
                    }
                })
                .collect();
            messages.push(json!({"role": if is_user { "user" } else { "assistant" }, "content": blocks}));
        }
        messages.push(json!({"role": "user", "content": "the end"}));
        let request = json!({"model": "m", "max_tokens": 1, "messages": messages});
        let translation = translate(&Bytes::from(request.to_string()), names());
        let chat = translation.map_err(|error| error.message).expect("a request").chat;
        let chat = String::from_utf8(chat.to_vec()).expect("text");
        for text in said {
            prop_assert_eq!(chat.matches(&text).count(), 1, "{}: {}", text, chat);
        }
    }
}

const NAMES: [&str; 18] = [
    "type",
    "role",
    "content",
    "text",
    "tool_use_id",
    "id",
    "name",
    "input",
    "source",
    "thinking",
    "index",
    "delta",
    "message",
    "input_schema",
    "arguments",
    "function",
    "partial_json",
    "stop_reason",
];
const WORDS: [&str; 12] = [
    "user",
    "assistant",
    "system",
    "text",
    "tool_use",
    "tool_result",
    "image",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_start",
];

/// Values with the protocol's names and words in any places.
fn odd() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-2_i64..3).prop_map(Value::from),
        prop::sample::select(&WORDS[..]).prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 48, 6, |inner| {
        let member = (prop::sample::select(&NAMES[..]), inner.clone());
        let kind = prop::sample::select(&WORDS[3..]);
        prop_oneof![
            prop::collection::vec(inner, 0..4).prop_map(Value::from),
            (kind, prop::collection::vec(member, 0..6)).prop_map(|(kind, members)| {
                let mut object = json!({"type": kind, "text": "x"});
                for (name, value) in members {
                    object[name] = value;
                }
                object
            }),
        ]
    })
}
