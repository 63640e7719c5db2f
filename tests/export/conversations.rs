//! Conversations: which call goes on from which, and what its forms make of it.

use std::fs;

use lego::record::{Call, CallKind, CallStatus, CapturedToolCall, ClientApi};
use serde_json::{Value, json};

use crate::calls::call;
use crate::setup::{Exported, Run, body, sampled, write};

const ARGUMENTS: &str = r#"{"a": 1,"b":2}"#;

fn tool(id: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": "edit", "arguments": ARGUMENTS}})
}

/// A call that was asked these messages, and answered so.
fn said(session: &str, messages: Value, text: &str, tools: &[&str]) -> Call {
    let captured = tools.iter().map(|id| CapturedToolCall {
        id: (*id).to_owned(),
        name: "edit".to_owned(),
        arguments: ARGUMENTS.to_owned(),
        arguments_valid_json: true,
    });
    Call {
        trial_id: None,
        client_request: body(
            &json!({"messages": messages, "tools": [{"type": "function", "function": {"name": "edit"}}]}),
        ),
        text: Some(text.to_owned()),
        tool_calls: Some(captured.collect()),
        ..call(session, &[1, 2], &[3])
    }
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn result(id: &str, text: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": text})
}

async fn exported(calls: Vec<Call>, format: &str) -> Exported {
    let folder = tempfile::tempdir().expect("folder");
    write(folder.path(), calls).await;
    Exported::of(folder.path(), format, &[]).ok()
}

/// Two turns with a tool, of which the first was tried twice; a side conversation; calls that are no conversation.
fn session() -> Vec<Call> {
    let asked = json!([{"role": "system", "content": "be brief"}, user("fix it")]);
    let retried = said("s", asked.clone(), "not this", &[]);
    let first = said("s", asked.clone(), "", &["1"]);
    let mut more = asked.as_array().cloned().expect("messages");
    more.push(json!({"role": "assistant", "content": null, "tool_calls": [tool("1")]}));
    more.push(result("1", "done"));
    let second = said("s", json!(more), "fixed", &[]);
    let side = said("s", json!([user("a title")]), "Fix", &[]);
    let cut = Call { finish_reason: Some("length".to_owned()), ..said("s", json!([user("x")]), "a", &[]) };
    let broken = Call { status: CallStatus::Truncated, ..said("s", json!([user("y")]), "a", &[]) };
    let aux = Call { kind: CallKind::Aux, ..said("s", json!([user("z")]), "a", &[]) };
    let prompt = Call {
        client_api: ClientApi::OpenaiCompletions,
        upstream_api: ClientApi::OpenaiCompletions,
        client_request: body(&json!({"prompt": "def f"})),
        ..said("s", json!([]), "x", &[])
    };
    let mut calls = vec![retried, first, second, side, cut, broken, aux, prompt];
    for (at, call) in (0..).zip(&mut calls) {
        call.received_at += at;
    }
    calls
}

#[tokio::test]
async fn a_conversation_is_what_was_asked_last_and_its_reply() {
    let calls = session();
    let named = |at: usize, message: u64| json!({"call_id": calls[at].call_id, "choice_index": 0, "message": message});
    let (first, second) = (named(1, 2), named(2, 4));
    let exported = exported(calls, "openai").await;
    let rows = exported.rows();
    assert_eq!(rows.len(), 2);
    let messages = rows[0]["messages"].as_array().expect("messages");
    assert_eq!(messages.len(), 5);
    assert_eq!(messages[4], json!({"role": "assistant", "content": "fixed"}));
    // The retry that nobody went on from is in none.
    assert_eq!(rows[0]["calls"], json!([first, second]));
    assert_eq!((&rows[0]["conversation_index"], &rows[0]["episode_conversations"]), (&0.into(), &2.into()));
    assert_eq!((&rows[0]["reward"], &rows[0]["task_id"]), (&Value::Null, &"task-1".into()));
    let calls = json!({
        "its prompt is no conversation": 1, "kind aux": 1, "reply was cut off (length)": 1, "status truncated": 1,
        "superseded": 1, "written": 3,
    });
    assert_eq!(exported.by("calls"), calls);
}

#[tokio::test]
async fn arguments_of_the_last_reply_are_the_sampled_bytes() {
    let call = said("s", json!([user("fix it")]), "", &["1"]);
    let rows = exported(vec![call], "openai").await.rows();
    assert_eq!(rows[0]["messages"][1]["tool_calls"], json!([tool("1")]));
}

#[tokio::test]
async fn legos_own_warm_start_reads_conversations() {
    let exported = exported(session(), "openai").await;
    let read = lego::train::sft::read_conversations(&exported.path).expect("conversations");
    assert_eq!(read.len(), 2);
    let rows = exported.rows();
    assert_eq!(read[0].messages, *rows[0]["messages"].as_array().expect("messages"));
    assert_eq!(read[0].tools.as_ref(), rows[0]["tools"].as_array());
}

#[tokio::test]
async fn sharegpt_alternates_or_leaves_out() {
    let mut calls = session();
    calls.push(said("t", json!([{"role": "assistant", "content": "hello"}, user("hi")]), "so", &[]));
    let unmatched = json!([
        user("fix it"), {"role": "assistant", "content": null, "tool_calls": [tool("1")]}, result("2", "done"),
    ]);
    calls.push(said("u", unmatched, "so", &[]));
    let exported = exported(calls, "sharegpt").await;
    let rows = exported.rows();
    assert_eq!(rows.len(), 2);
    let sides: Vec<&str> = rows[0]["conversations"]
        .as_array()
        .expect("turns")
        .iter()
        .filter_map(|turn| turn["from"].as_str())
        .collect();
    assert_eq!(sides, ["system", "human", "gpt", "human", "gpt"]);
    let turn = &rows[0]["conversations"][2]["value"];
    assert_eq!(
        turn,
        &format!("<tool_call>\n{{\"name\": \"edit\", \"arguments\": {ARGUMENTS}}}\n</tool_call>")
    );
    let left_out =
        json!({"a tool result whose call is not known": 1, "turns that do not alternate": 1, "written": 2});
    assert_eq!(exported.by("rows"), left_out);
    assert_eq!(exported.by("sessions"), json!({"no conversation": 2, "written": 1}));
}

#[tokio::test]
async fn a_step_has_the_ids_of_the_reply_that_it_is_and_no_others() {
    let asked = json!([user("fix it")]);
    let first = said("s", asked.clone(), "so", &["1", "2"]);
    let id = first.call_id;
    let conversation = |content: &str, arguments: &str| {
        let mut second = tool("2");
        second["function"]["arguments"] = arguments.into();
        let mut more = asked.as_array().cloned().expect("messages");
        more.push(json!({"role": "assistant", "content": content, "tool_calls": [tool("1"), second]}));
        more.extend([result("2", "two"), result("1", "one"), result("7", "seven")]);
        json!(more)
    };
    for (content, arguments, is_same) in [
        ("so", ARGUMENTS, true),
        // The same value in other bytes.
        ("so", r#"{"a":1,"b":2}"#, true),
        ("so", r#"{"a":1,"b":3}"#, false),
        ("", ARGUMENTS, false),
    ] {
        let second = said("s", conversation(content, arguments), "fixed", &[]);
        let row = &exported(vec![first.clone(), second], "atif").await.rows()[0];
        let step = &row["steps"][1];
        assert_eq!(step["extra"]["call_id"], id.to_string());
        let ids = if is_same { json!([3]) } else { Value::Null };
        assert_eq!(step["metrics"]["completion_token_ids"], ids, "{content} {arguments}");
        assert_eq!(step["extra"]["changed_by_harness"], if is_same { Value::Null } else { true.into() });
        // By id, whatever the order and however the tools are called; one that has none is nobody's.
        let results = step["observation"]["results"].as_array().expect("results");
        let of: Vec<(&Value, &Value)> =
            results.iter().map(|one| (&one["source_call_id"], &one["content"])).collect();
        let expected =
            [(json!("2"), json!("two")), (json!("1"), json!("one")), (Value::Null, json!("seven"))];
        assert_eq!(of, expected.iter().map(|(id, text)| (id, text)).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn other_protocols_are_told_in_chats_form() {
    let messages = Call {
        client_api: ClientApi::AnthropicMessages,
        upstream_api: ClientApi::AnthropicMessages,
        client_request: body(&json!({
            "model": "m", "max_tokens": 9, "system": "be brief",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        })),
        ..said("messages", json!([]), "so", &[])
    };
    let responses = Call {
        client_api: ClientApi::OpenaiResponses,
        upstream_api: ClientApi::OpenaiResponses,
        client_request: body(&json!({"model": "m", "instructions": "be brief", "input": "hi"})),
        ..said("responses", json!([]), "so", &[])
    };
    // What was sent counts, where that was chat.
    let sent = Call {
        client_api: ClientApi::AnthropicMessages,
        upstream_request: body(&json!({"messages": [{"role": "system", "content": "be brief"}, user("hi")]})),
        ..said("sent", json!([]), "so", &[])
    };
    let rows = exported(vec![messages, responses, sent], "sharegpt").await.rows();
    assert_eq!(rows.len(), 3);
    let turns = json!([
        {"from": "system", "value": "be brief"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "so"},
    ]);
    for row in rows {
        assert_eq!(row["conversations"], turns, "{row}");
    }
}

/// What harnesses really sent, turn by turn.
#[tokio::test]
async fn the_turns_of_a_harness_are_one_conversation() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/harness");
    let (messages, responses) = (ClientApi::AnthropicMessages, ClientApi::OpenaiResponses);
    for (folder, api) in [
        ("anthropic-python", messages),
        ("claude-code", messages),
        ("claude-code/parallel_tools_extra_fields", messages),
        ("opencode/anthropic_wire", messages),
        ("pi/anthropic_wire", messages),
        ("codex", responses),
        ("codex/parallel_tools_extra_fields", responses),
        ("opencode/responses_wire", responses),
        ("pi/responses_wire", responses),
    ] {
        let mut calls = vec![];
        for turn in 1..=3 {
            let path = format!("{root}/{folder}/turn{turn}.request.json");
            let Ok(text) = fs::read_to_string(path) else { continue };
            let fixture: Value = serde_json::from_str(&text).expect("JSON");
            let request = fixture.get("body").unwrap_or(&fixture);
            let made = said("s", json!([]), "so", &[]);
            let received_at = made.received_at + turn;
            let client_request = body(request);
            calls.push(Call { client_api: api, upstream_api: api, client_request, received_at, ..made });
        }
        let number = calls.len();
        assert!(number > 0, "{folder}");
        for form in ["openai", "sharegpt", "atif"] {
            let exported = exported(calls.clone(), form).await;
            assert_eq!(exported.by("calls"), json!({"written": number}), "{folder} {form}");
            assert_eq!(exported.by("rows"), json!({"written": 1}), "{folder} {form}");
        }
    }
}

#[tokio::test]
async fn held_out_tasks_are_no_training_data_unless_somebody_says_so() {
    let mut run = Run::new(2);
    run.trial("v0-g0-0", 0, Some(0.0), json!({}));
    run.trial("eval-after-t0-0", 0, Some(1.0), json!({"purpose": "evaluation"}));
    run.capture(["v0-g0-0", "eval-after-t0-0"].map(|trial| sampled(trial, 1, &[1], &[2])).into()).await;
    for form in ["openai", "sharegpt"] {
        let rows = run.export(form, &[]).ok().rows();
        assert_eq!(
            (rows.len(), &rows[0]["reward"], &rows[0]["purpose"]),
            (1, &0.0.into(), &"training".into())
        );
        assert_eq!(rows[0]["group_id"], "v0-g0");
        let rows = run.export(form, &["--with-evaluations"]).ok().rows();
        let mut purposes: Vec<_> = rows.iter().filter_map(|row| row["purpose"].as_str()).collect();
        purposes.sort_unstable();
        assert_eq!(purposes, ["evaluation", "training"]);
    }
    // Samples never are.
    let exported = run.export("trl", &["--with-evaluations"]).ok();
    assert_eq!(exported.by("sessions"), json!({"evaluation": 1, "written": 1}));
}
