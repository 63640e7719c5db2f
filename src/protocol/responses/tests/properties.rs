//! Random replies, conversations and garbage.

use proptest::prelude::*;
use proptest::test_runner::Config;

use super::*;

/// A step of a reply.
#[derive(Debug, Clone)]
enum Say {
    Reasoning(String),
    Text(String),
    Refusal(String),
    /// Arguments of call number `n`; its head comes with the first.
    Call(usize, String),
}

fn say() -> impl Strategy<Value = Say> {
    let text = "[ab\"\\\\{}\n \u{e9}\u{1F389}\u{2028}]{1,6}";
    prop_oneof![
        2 => text.prop_map(Say::Reasoning),
        2 => text.prop_map(Say::Text),
        1 => text.prop_map(Say::Refusal),
        4 => (0..3_usize, text).prop_map(|(call, arguments)| Say::Call(call, arguments)),
    ]
}

fn tools() -> Value {
    json!([
        {"type": "function", "name": "f0"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f1"}]},
        {"type": "function", "name": "f2"},
    ])
}

const SHOWN: [&str; 3] = ["f0", "ns__f1", "f2"];

fn fragment(call: usize, arguments: &str, is_head: bool) -> Bytes {
    let fragment = if is_head {
        json!({"index": call, "id": format!("call-{call}"), "type": "function",
               "function": {"name": SHOWN[call], "arguments": arguments}})
    } else {
        json!({"index": call, "function": {"arguments": arguments}})
    };
    delta(json!({"tool_calls": [fragment]}))
}

/// The steps as chunks; each text cut into pieces of at most `size` characters.
fn chunks_of(steps: &[Say], size: usize) -> Vec<Bytes> {
    let mut begun = [false; 3];
    let mut out = vec![delta(json!({"role": "assistant", "content": ""}))];
    for step in steps {
        let (Say::Reasoning(text) | Say::Text(text) | Say::Refusal(text) | Say::Call(_, text)) = step;
        let characters: Vec<char> = text.chars().collect();
        for piece in characters.chunks(size) {
            let piece: String = piece.iter().collect();
            out.push(match step {
                Say::Reasoning(_) => delta(json!({"reasoning_content": piece})),
                Say::Text(_) => delta(json!({"content": piece})),
                Say::Refusal(_) => delta(json!({"refusal": piece})),
                Say::Call(call, _) => fragment(*call, &piece, !std::mem::replace(&mut begun[*call], true)),
            });
        }
    }
    out.push(finish(if begun.contains(&true) { "tool_calls" } else { "stop" }));
    out
}

fn with_tools() -> Writer {
    writer(json!({"model": "m", "input": "hi", "stream": true, "tools": tools()}))
}

/// Any JSON over the words of the protocol.
fn words() -> impl Strategy<Value = Value> {
    let key = prop::sample::select(vec![
        "type",
        "role",
        "content",
        "text",
        "input",
        "tools",
        "name",
        "id",
        "call_id",
        "output",
        "arguments",
        "action",
        "command",
        "summary",
        "choices",
        "delta",
        "tool_calls",
        "function",
        "index",
        "finish_reason",
        "namespace",
        "format",
        "tool_choice",
        "instructions",
        "message",
        "usage",
        "encrypted_content",
    ]);
    let word = prop::sample::select(vec![
        "message",
        "user",
        "assistant",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom",
        "custom_tool_call",
        "local_shell_call",
        "local_shell",
        "namespace",
        "function",
        "input_text",
        "input_image",
        "stop",
        "length",
        "item_reference",
        "a",
        "",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i8>().prop_map(Value::from),
        word.prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..6).prop_map(|members| {
                Value::Object(members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
            }),
        ]
    })
}

proptest! {
    #![proptest_config(Config { cases: 200, failure_persistence: None, ..Config::default() })]

    #[test]
    fn a_stream_reads_as_the_capture_has_it_whatever_its_chunks(
        steps in prop::collection::vec(say(), 0..12),
        size in 1..4_usize,
        waits in prop::collection::vec(any::<bool>(), 80),
    ) {
        let whole = chunks_of(&steps, usize::MAX);
        let pieces = chunks_of(&steps, size);
        let reply = reply_of(&whole);
        prop_assert_eq!(&reply, &reply_of(&pieces));

        let seen = see(&run(&mut with_tools(), &whole));
        prop_assert_eq!(seen.text("message", "text"), reply.text.clone());
        prop_assert_eq!(seen.text("message", "refusal"), reply.refusal.clone());
        prop_assert_eq!(seen.text("reasoning", "text"), reply.reasoning.clone());
        let expected: Vec<_> = reply
            .tool_calls
            .iter()
            .map(|call| {
                let name = call.name.trim_start_matches("ns__").to_owned();
                (call.id.clone(), name, call.arguments.clone())
            })
            .collect();
        prop_assert_eq!(seen.calls(), expected);
        for (item, deltas) in seen.items.iter().zip(&seen.deltas) {
            if let Some(arguments) = item["arguments"].as_str() {
                prop_assert_eq!(deltas, arguments);
                prop_assert_eq!(item["namespace"].as_str(), (item["name"] == "f1").then_some("ns"));
            }
        }

        let mut waiting = with_tools();
        let mut out = Vec::new();
        for (chunk, waits) in pieces.iter().zip(waits.iter().chain(std::iter::repeat(&false))) {
            if *waits {
                waiting.keep_alive(&mut out);
            }
            waiting.chunk(chunk, &mut out).unwrap();
        }
        waiting.end(&mut out);
        prop_assert_eq!(see(&out).response, seen.response);
    }

    #[test]
    fn a_reply_comes_back_as_one_message_and_the_history_stays(
        turns in prop::collection::vec(prop::collection::vec(say(), 1..8), 1..4),
        keeps_ids in any::<bool>(),
    ) {
        let mut input = vec![json!({"role": "developer", "content": "be good"}), json!({"role": "user", "content": "hi"})];
        let mut before: Vec<Value> = Vec::new();
        for (number, steps) in turns.iter().enumerate() {
            let request = json!({"model": "m", "input": input, "tools": tools(), "stream": true});
            let (chat, mut writer) =
                open_call(&Bytes::from(request.to_string()), names_of(&format!("call-{number}")), None).unwrap();
            let chat: Value = serde_json::from_slice(&chat).unwrap();
            let messages = chat["messages"].as_array().unwrap().clone();
            prop_assert_eq!(&messages[..before.len()], &before[..]);
            before = messages;

            let chunks = chunks_of(steps, usize::MAX);
            let reply = reply_of(&chunks);
            let seen = see(&run(&mut writer, &chunks));
            let mut expected = json!({"role": "assistant", "content": null});
            if !reply.text.is_empty() || reply.tool_calls.is_empty() {
                expected["content"] = Value::from(reply.text.clone());
            }
            if !reply.reasoning.is_empty() {
                expected["reasoning_content"] = Value::from(reply.reasoning.clone());
            }
            if !reply.tool_calls.is_empty() {
                let call = |call: &crate::protocol::chat::ToolCall| json!({
                    "id": call.id, "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                });
                expected["tool_calls"] = reply.tool_calls.iter().map(call).collect();
            }
            let mut items = seen.items;
            if !keeps_ids {
                items.iter_mut().for_each(|item| {
                    item.as_object_mut().unwrap().shift_remove("id");
                });
            }
            // Without ids, what a reply said in several pieces cannot be told from several replies.
            let is_one_piece = keeps_ids || is_in_order(steps);
            input.extend(items);
            for call in &reply.tool_calls {
                input.push(json!({"type": "function_call_output", "call_id": call.id, "output": "ok\n"}));
            }
            input.push(json!({"role": "user", "content": "go on"}));
            if is_one_piece && reply.refusal.is_empty() {
                before.push(expected);
            }
        }
    }

    #[test]
    fn nothing_breaks_on_garbage(
        bytes in prop::collection::vec(any::<u8>(), 0..64),
        request in words(),
        input in words(),
        more in words(),
    ) {
        let garbage = Bytes::from(bytes);
        let _ = open_call(&garbage, names(), None);
        let _ = open_call(&Bytes::from(request.to_string()), names(), None);
        let earlier = [Bytes::from(more.to_string()), garbage.clone()];
        let body = json!({"model": "m", "input": input, "tools": more, "previous_response_id": "r"});
        for earlier in [None, Some(&earlier[..1]), Some(&earlier[..])] {
            let _ = open_call(&Bytes::from(body.to_string()), names(), earlier);
        }
        let _ = open_call(&Bytes::from(json!({"model": "m", "input": [input]}).to_string()), names(), None);
        let mut writer = plain();
        let mut out = Vec::new();
        let _ = writer.chunk(&garbage, &mut out);
        let _ = writer.chunk(request.to_string().as_bytes(), &mut out);
        let chunk = json!({"choices": [{"index": 0, "delta": more, "finish_reason": input}]});
        let _ = writer.chunk(chunk.to_string().as_bytes(), &mut out);
        writer.end(&mut out);
        see(&out);
        let _ = plain().body(&garbage);
        let _ = plain().body(json!({"choices": [{"message": more}]}).to_string().as_bytes());
    }
}

/// Reasoning, then text, then calls, each once.
fn is_in_order(steps: &[Say]) -> bool {
    let rank = |step: &Say| match step {
        Say::Reasoning(_) => 0,
        Say::Text(_) | Say::Refusal(_) => 1,
        Say::Call(..) => 2,
    };
    steps.iter().map(rank).is_sorted()
}
