//! Recorded streams and requests.

use super::*;
use crate::protocol::chat::Request;
use std::borrow::Cow;

const STREAMS: [&str; 4] = [
    "wire/vllm_chat_stream.sse",
    "wire/vllm_chat_tools_stream.sse",
    "wire/openai_chat_stream_nologprobs.sse",
    "wire/sglang_chat_stream_sglext.sse",
];

/// Turns of one conversation each.
const CONVERSATIONS: [(&str, usize); 7] = [
    ("codex", 3),
    ("codex/builtin_provider_ws_426", 2),
    ("codex/known_model", 3),
    ("codex/parallel_tools_extra_fields", 2),
    ("codex/stream_cut_rst", 3),
    ("pi/responses_wire", 3),
    ("opencode/responses_wire", 3),
];

fn turn(conversation: &str, turn: usize) -> Bytes {
    Bytes::from(fixture(&format!("harness/{conversation}/turn{turn}.request.json")))
}

fn translated(body: &Bytes) -> (Bytes, Writer) {
    open_call(body, names(), None).unwrap_or_else(|error| panic!("{}", error.message))
}

#[test]
fn every_chat_stream_reads_the_same_on_the_other_side() {
    for name in STREAMS {
        let chunks = chunks(name);
        let reply = reply_of(&chunks);
        let seen = see(&run(&mut plain(), &chunks));
        assert_eq!(seen.text("message", "text"), reply.text, "{name}");
        assert_eq!(seen.text("reasoning", "text"), reply.reasoning, "{name}");
        let calls: Vec<_> = reply
            .tool_calls
            .iter()
            .map(|call| (call.id.clone(), call.name.clone(), call.arguments.clone()))
            .collect();
        assert_eq!(seen.calls(), calls, "{name}");
        assert_eq!(seen.response["status"], "completed");
        assert_eq!(seen.response["model"], "asked-name");
        assert!(!seen.response["usage"].is_null(), "{name}");
    }
}

#[test]
fn a_body_gives_the_items_of_the_stream() {
    let mut streamed = plain();
    let seen = see(&run(&mut streamed, &chunks("wire/vllm_chat_stream.sse")));
    let mut whole = plain();
    let body = whole.body(&fixture("wire/vllm_chat.json")).expect("body");
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(body, seen.response);
    assert_eq!(whole.items(), streamed.items());
}

#[test]
fn b21_the_events_have_the_order_and_the_members_of_the_recorded_stream() {
    let request = json!({
        "model": "m", "input": "hi", "stream": true,
        "tools": [{"type": "function", "name": "shell"}, {"type": "custom", "name": "apply_patch"}],
    });
    let patch = "*** Begin Patch\n*** End Patch\n";
    let arguments = json!({"input": patch}).to_string();
    let call = |index: u64, id: &str, name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        delta(json!({"tool_calls": [{"index": index, "id": id, "function": function}]}))
    };
    let more =
        |arguments: &str| delta(json!({"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}));
    let seen = see(&run(
        &mut writer(request),
        &[
            delta(json!({"role": "assistant", "content": ""})),
            delta(json!({"reasoning": "\nOkay"})),
            delta(json!({"reasoning": ".\n"})),
            delta(json!({"content": "I'll look"})),
            delta(json!({"content": " now."})),
            call(0, "call_toy3", "shell", "{\"command\": \""),
            more("ls -la"),
            more("\"}"),
            call(1, "call_toy4", "apply_patch", &arguments),
            finish("tool_calls"),
        ],
    ));
    let recorded: Vec<Value> = chunks("wire/responses_stream.sse")
        .iter()
        .map(|data| serde_json::from_slice(data).expect("JSON"))
        .collect();
    let kinds: Vec<&str> = recorded.iter().filter_map(|event| event["type"].as_str()).collect();
    assert_eq!(seen.kinds(), kinds);
    for (ours, theirs) in seen.events.iter().zip(&recorded) {
        same_shape(ours, theirs, "");
    }
}

/// Ours has every member of theirs, with equal texts; ids and the echo of the request may differ.
fn same_shape(ours: &Value, theirs: &Value, path: &str) {
    match theirs {
        Value::Object(members) => {
            for (name, value) in members {
                let ours = ours.get(name).unwrap_or_else(|| panic!("{path}.{name} is missing"));
                let is_own = ["id", "item_id", "response"].contains(&name.as_str());
                if is_own && value.is_object() {
                    let names = value.as_object().expect("object").keys();
                    names.for_each(|name| assert!(ours.get(name).is_some(), "{path}.{name} is missing"));
                } else if !is_own {
                    same_shape(ours, value, &format!("{path}.{name}"));
                }
            }
        }
        Value::Array(elements) => {
            for (ours, theirs) in ours.as_array().expect("list").iter().zip(elements) {
                same_shape(ours, theirs, path);
            }
        }
        _ => assert_eq!(ours, theirs, "{path}"),
    }
}

#[test]
fn b21_every_recorded_request_translates_and_keeps_all_text() {
    let mut count = 0;
    let side = "harness/opencode/responses_wire/side1.request.json";
    let mut bodies = vec![Bytes::from(fixture(side))];
    for (conversation, turns) in CONVERSATIONS {
        bodies.extend((1..=turns).map(|number| turn(conversation, number)));
    }
    for body in bodies {
        let request: Value = serde_json::from_slice(&body).expect("JSON");
        let (chat, _) = translated(&body);
        let read = Request::parse(chat.clone()).expect("a chat request");
        assert_eq!(read.model, request["model"]);
        assert!(read.is_stream && read.asks_usage);
        let chat: Value = serde_json::from_slice(&chat).expect("JSON");
        let mut said = String::new();
        strings(&chat["messages"], &mut |_, text| said.push_str(text));
        strings(&request["input"], &mut |name, text| {
            if ["text", "content", "output", "arguments", "call_id"].contains(&name) {
                assert!(said.contains(text), "{text:?} is lost");
                count += 1;
            }
        });
        tools_are_kept(&request, &chat);
    }
    assert!(count > 100);
}

fn strings(value: &Value, see: &mut impl FnMut(&str, &str)) {
    fn walk(name: &str, value: &Value, see: &mut impl FnMut(&str, &str)) {
        match value {
            Value::String(text) => see(name, text),
            Value::Array(elements) => elements.iter().for_each(|element| walk(name, element, see)),
            Value::Object(members) => members.iter().for_each(|(name, member)| walk(name, member, see)),
            _ => {}
        }
    }
    walk("", value, see);
}

fn tools_are_kept(request: &Value, chat: &Value) {
    let none = Vec::new();
    let mut expected = Vec::new();
    for tool in request["tools"].as_array().unwrap_or(&none) {
        match tool["type"].as_str() {
            Some("function") => expected.push((tool["name"].as_str().expect("name").to_owned(), tool)),
            Some("custom") => expected.push((tool["name"].as_str().expect("name").to_owned(), tool)),
            Some("namespace") => {
                for inner in tool["tools"].as_array().expect("tools") {
                    let name =
                        format!("{}__{}", tool["name"].as_str().unwrap(), inner["name"].as_str().unwrap());
                    expected.push((name, inner));
                }
            }
            Some("web_search" | "tool_search") => {}
            other => panic!("{other:?}"),
        }
    }
    let shown = chat["tools"].as_array().unwrap_or(&none);
    assert_eq!(shown.len(), expected.len());
    for (shown, (name, tool)) in shown.iter().zip(expected) {
        assert_eq!(shown["type"], "function");
        let function = &shown["function"];
        assert_eq!(function["name"], name);
        if tool["type"] == "custom" {
            let description = function["description"].as_str().expect("description");
            assert!(description.starts_with(tool["description"].as_str().expect("text")));
            assert!(description.ends_with(tool["format"]["definition"].as_str().expect("grammar")));
            assert_eq!(function["parameters"]["required"], json!(["input"]));
        } else {
            for member in ["description", "parameters", "strict"] {
                assert_eq!(function[member], tool[member], "{name}.{member}");
            }
        }
    }
}

#[test]
fn the_messages_of_a_turn_begin_with_those_of_the_turn_before() {
    for (conversation, turns) in CONVERSATIONS {
        let mut before: Vec<Vec<u8>> = Vec::new();
        for number in 1..=turns {
            let (chat, _) = translated(&turn(conversation, number));
            let request = Request::parse(chat).expect("a chat request");
            let messages: Vec<Vec<u8>> = request.messages().into_iter().map(Cow::into_owned).collect();
            assert!(messages.len() > before.len(), "{conversation} turn {number}");
            assert_eq!(messages[..before.len()], before, "{conversation} turn {number}");
            before = messages;
        }
    }
}

#[test]
fn one_reply_is_one_message() {
    let (chat, _) = translated(&turn("codex/parallel_tools_extra_fields", 2));
    let chat: Value = serde_json::from_slice(&chat).expect("JSON");
    let tail = &chat["messages"].as_array().expect("list")[4..];
    let roles: Vec<&str> = tail.iter().filter_map(|message| message["role"].as_str()).collect();
    assert_eq!(roles, ["assistant", "tool", "tool"]);
    assert_eq!(tail[0]["content"], "\n\nI'll run step 1 now.  \n");
    assert_eq!(tail[0]["reasoning_content"], "  The user wants step 1.\nI should use the shell tool.\n\n");
    let calls = tail[0]["tool_calls"].as_array().expect("calls");
    assert_eq!(calls.len(), 2);
    // The bytes that were sampled, with their odd spaces and escapes.
    assert_eq!(
        calls[0]["function"]["arguments"],
        "{\"cmd\":  \"echo 'hello  l\\u00e9go' > hello.txt && ls\"}"
    );
    assert_eq!(calls[1]["id"], tail[2]["tool_call_id"]);
}

#[test]
fn a_cut_reply_and_its_retry_are_two_messages() {
    let (chat, _) = translated(&turn("codex/stream_cut_rst", 3));
    let chat: Value = serde_json::from_slice(&chat).expect("JSON");
    let tail = &chat["messages"].as_array().expect("list")[4..];
    let roles: Vec<&str> = tail.iter().filter_map(|message| message["role"].as_str()).collect();
    assert_eq!(roles, ["assistant", "assistant", "tool"]);
    assert!(tail[0].get("tool_calls").is_none());
}
