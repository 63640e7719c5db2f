//! Requests: failures that others met, by their ids, and the rules of the protocol.

use super::*;
use crate::protocol::responses::Kept;

fn call_item(id: &str) -> Value {
    json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"})
}

fn output_item(id: &str, output: Value) -> Value {
    json!({"type": "function_call_output", "call_id": id, "output": output})
}

fn roles(messages: &Value) -> Vec<&str> {
    messages.as_array().expect("list").iter().filter_map(|message| message["role"].as_str()).collect()
}

#[test]
fn instructions_lead_and_developers_speak_as_the_system_in_their_place() {
    let request = json!({"model": "m", "instructions": "I", "input": [
        {"role": "user", "content": "u"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "system", "content": "s"},
    ]});
    let expected = json!([
        {"role": "system", "content": "I"}, {"role": "user", "content": "u"},
        {"role": "system", "content": "d"}, {"role": "system", "content": "s"},
    ]);
    assert_eq!(chat_of(&request)["messages"], expected);
}

#[test]
fn b02_reasoning_never_becomes_text() {
    let history = messages(json!([
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "sec"}, {"type": "reasoning_text", "text": "ret"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
        call_item("x"),
    ]));
    assert_eq!(history.as_array().expect("list").len(), 1);
    assert_eq!(history[0]["content"], "hi");
    assert_eq!(history[0]["reasoning_content"], "secret");
    // What only another server can read is left out.
    let sealed = messages(json!([
        {"role": "user", "content": "u"},
        {"type": "reasoning", "summary": [], "content": null, "encrypted_content": "gAAA"},
        {"role": "user", "content": "v"},
    ]));
    assert_eq!(roles(&sealed), ["user", "user"]);
    // A reply of lego's own whose thoughts the client left out was one all the same.
    let own = messages(json!([
        {"role": "user", "content": "u"},
        {"type": "reasoning", "summary": [], "content": null, "encrypted_content": "lego.aa-1_0"},
        {"role": "user", "content": "v"},
    ]));
    assert_eq!(own[1], json!({"role": "assistant", "content": ""}));
}

#[test]
fn b03_images_in_tool_results_stay_images() {
    let url = "data:image/png;base64,AAAA";
    let text = json!({"type": "input_text", "text": "t"});
    let image = json!({"type": "input_image", "image_url": url, "detail": "low"});
    let cases = [
        (json!("t"), json!("t")),
        (json!([text]), json!("t")),
        (json!([]), json!("")),
        (json!([image]), json!([{"type": "image_url", "image_url": {"url": url, "detail": "low"}}])),
        (
            json!([text, image]),
            json!([{"type": "text", "text": "t"}, {"type": "image_url", "image_url": {"url": url, "detail": "low"}}]),
        ),
    ];
    for (output, content) in cases {
        let history = messages(json!([call_item("x"), output_item("x", output)]));
        assert_eq!(history[1], json!({"role": "tool", "tool_call_id": "x", "content": content}));
    }
}

#[test]
fn b04_outputs_follow_their_calls() {
    let history = messages(json!([
        call_item("a"), call_item("b"), call_item("c"),
        output_item("c", json!("C")),
        {"role": "user", "content": "note"},
        output_item("a", json!("A")), output_item("b", json!("B")),
        {"role": "user", "content": "next"},
    ]));
    assert_eq!(roles(&history), ["assistant", "tool", "tool", "tool", "user", "user"]);
    let answers: Vec<_> =
        (1..4).map(|at| (history[at]["tool_call_id"].clone(), history[at]["content"].clone())).collect();
    assert_eq!(answers, [("c", "C"), ("a", "A"), ("b", "B")].map(|(id, text)| (json!(id), json!(text))));
    assert_eq!(history[4]["content"], "note");
    // A message between a call and its output is of the call's own reply.
    let history = messages(json!([
        call_item("a"), {"role": "assistant", "content": "said"}, output_item("a", json!("A")),
    ]));
    assert_eq!(roles(&history), ["assistant", "tool"]);
    assert_eq!(history[0]["content"], "said");
}

#[test]
fn ids_of_our_own_replies_tell_them_apart() {
    let message = |id: &str, text: &str| json!({"role": "assistant", "id": id, "content": text});
    let call =
        |id: &str| json!({"type": "function_call", "id": id, "call_id": id, "name": "f", "arguments": "{}"});
    // The first was cut off after its text; a call alone would else go to it.
    let cut =
        messages(json!([message("msg_aa-1_0", "one"), call("fc_bb-2_0"), message("msg_cc-3_0", "three")]));
    assert_eq!(roles(&cut), ["assistant", "assistant", "assistant"]);
    let same =
        messages(json!([message("msg_aa-1_0", "one "), message("msg_aa-1_1", "two"), call("fc_aa-1_2")]));
    assert_eq!(roles(&same), ["assistant"]);
    assert_eq!(same[0]["content"], "one two");
    // Clients that drop ids keep `encrypted_content`.
    let thought = |key: &str| {
        let content = [json!({"type": "reasoning_text", "text": key})];
        json!({"type": "reasoning", "summary": [], "content": content, "encrypted_content": format!("lego.{key}")})
    };
    assert_eq!(roles(&messages(json!([thought("aa-1_0"), thought("bb-2_0")]))).len(), 2);
    assert_eq!(roles(&messages(json!([thought("aa-1_0"), thought("aa-1_1")]))).len(), 1);
    // Others' ids say nothing: without a number at the end they are not read.
    let foreign = messages(json!([message("msg_1", "one"), call("fc_2")]));
    assert_eq!(roles(&foreign), ["assistant"]);
}

#[test]
fn b12_nothing_is_invented_for_empty_content() {
    let assistant = |content: Value, has_call: bool| {
        let mut items = vec![json!({"role": "assistant", "content": content})];
        if has_call {
            items.push(call_item("x"));
        }
        messages(Value::from(items))[0]["content"].clone()
    };
    for has_call in [false, true] {
        assert_eq!(assistant(json!(""), has_call), "");
        assert_eq!(assistant(json!("  "), has_call), "  ");
        assert_eq!(assistant(json!([]), has_call), "");
    }
    assert_eq!(messages(json!([call_item("x")]))[0]["content"], Value::Null);
    assert!(
        refusal(&json!({"model": "m", "input": [{"role": "user", "content": null}]})).contains("input[0]")
    );
}

#[test]
fn b15_schemas_go_as_they_came() {
    let schema = r##"{"$schema": "x", "type": ["object","null"], "properties": {"b": {"pattern": "(?=\\p{L})", "minimum": 1.0},
        "a": {"$ref": "#/$defs/A"}}, "required": ["b"], "$defs": {"A": {"anyOf": [{}, {"const": 12345678901234567890123}]}}}"##;
    let body = format!(
        r#"{{"model":"m","input":"hi","tools":[{{"type":"function","name":"f","parameters":{schema}}}]}}"#
    );
    let (chat, _) = open_call(&Bytes::from(body), names(), None).expect("a request");
    assert!(String::from_utf8(chat.to_vec()).expect("UTF-8").contains(schema));
}

#[test]
fn b15_hosted_tools_are_dropped_or_refused_and_never_empty_functions() {
    let with = |tools: Value, choice: Value| json!({"model": "m", "input": "hi", "tools": tools, "tool_choice": choice, "parallel_tool_calls": true});
    let dropped =
        json!([{"type": "web_search"}, {"type": "web_search_preview_2025_03_11"}, {"type": "tool_search"}]);
    let chat = chat_of(&with(dropped.clone(), json!("auto")));
    for member in ["tools", "tool_choice", "parallel_tool_calls"] {
        assert!(chat.get(member).is_none(), "{member}");
    }
    assert!(refusal(&with(dropped.clone(), json!("required"))).contains("tool_choice"));
    assert!(refusal(&with(dropped, json!({"type": "web_search"}))).contains("tool_choice"));
    for kind in ["file_search", "code_interpreter", "mcp", "computer_use_preview", "new_thing"] {
        let message =
            refusal(&with(json!([{"type": "function", "name": "f"}, {"type": kind}]), json!("auto")));
        assert!(message.starts_with("tools[1] ") && message.contains(kind), "{message}");
    }
}

#[test]
fn tools_are_called_by_the_name_that_the_model_sees() {
    let tools = json!([
        {"type": "function", "name": "f", "description": "d", "strict": true, "parameters": {"type": "object"}},
        {"type": "namespace", "name": "mcp__srv__", "tools": [{"type": "function", "name": "get"}]},
        {"type": "namespace", "name": "team", "tools": [{"type": "custom", "name": "say"}]},
        {"type": "namespace", "name": "functions", "tools": [{"type": "function", "name": "run"}]},
        {"type": "local_shell"},
    ]);
    let request = |choice: Value| json!({"model": "m", "input": "hi", "tools": tools, "tool_choice": choice});
    let chat = chat_of(&request(json!("required")));
    let shown: Vec<_> =
        chat["tools"].as_array().expect("list").iter().map(|t| t["function"]["name"].clone()).collect();
    assert_eq!(shown, ["f", "mcp__srv__get", "team__say", "run", "local_shell"]);
    assert_eq!(chat["tool_choice"], "required");
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    let choices = [
        (json!({"type": "function", "name": "f"}), named("f")),
        (json!({"type": "custom", "name": "say", "namespace": "team"}), named("team__say")),
        (json!({"type": "local_shell"}), named("local_shell")),
        (
            json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}),
            json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("f")]}}),
        ),
    ];
    for (choice, expected) in choices {
        assert_eq!(chat_of(&request(choice))["tool_choice"], expected);
    }
    assert!(refusal(&request(json!({"type": "function", "name": "g"}))).contains("\"g\""));
    // The history calls it by the same name.
    let history = messages(json!([
        {"type": "function_call", "call_id": "x", "name": "get", "namespace": "mcp__srv__", "arguments": "{}"},
    ]));
    assert_eq!(history[0]["tool_calls"][0]["function"]["name"], "mcp__srv__get");
    let clash = json!([
        {"type": "function", "name": "team__say"},
        {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "say"}]},
    ]);
    assert!(refusal(&json!({"model": "m", "input": "hi", "tools": clash})).contains("tools[1].tools[0]"));
}

#[test]
fn c14_arguments_go_as_they_were_sampled() {
    let arguments = "{\"b\":  1,\"a\":\"\\u00e9\\n\"} ";
    let history = messages(json!([
        {"type": "function_call", "call_id": "x", "name": "f", "arguments": arguments},
    ]));
    assert_eq!(history[0]["tool_calls"][0]["function"]["arguments"], arguments);
    // A text that no UTF-8 string holds goes as it was written.
    let body = r#"{"model":"m","input":"half \ud83d of it"}"#;
    let (chat, _) = open_call(&Bytes::from(body), names(), None).expect("a request");
    assert!(String::from_utf8(chat.to_vec()).expect("UTF-8").contains(r#""half \ud83d of it""#));
}

#[test]
fn custom_and_shell_calls_are_calls_of_functions() {
    let history = messages(json!([
        {"type": "custom_tool_call", "call_id": "x", "name": "patch", "input": "a\n\"é\""},
        {"type": "local_shell_call", "id": "lsh_9", "call_id": "y", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "timeout_ms": null, "env": {}}},
        {"type": "custom_tool_call_output", "call_id": "x", "output": "ok"},
        {"type": "local_shell_call_output", "id": "lsh_9", "output": "files"},
    ]));
    let calls = &history[0]["tool_calls"];
    assert_eq!(calls[0]["function"], json!({"name": "patch", "arguments": "{\"input\": \"a\\n\\\"é\\\"\"}"}));
    assert_eq!(calls[1]["function"], json!({"name": "local_shell", "arguments": "{\"command\":[\"ls\"]}"}));
    assert_eq!(history[1], json!({"role": "tool", "tool_call_id": "x", "content": "ok"}));
    assert_eq!(history[2], json!({"role": "tool", "tool_call_id": "y", "content": "files"}));
}

#[test]
fn b21_options_have_their_chat_names() {
    let chat = chat_of(&json!({
        "model": "m", "input": "hi", "max_output_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3,
        "reasoning": {"effort": "high", "summary": "auto"}, "tools": [{"type": "function", "name": "f"}],
        "parallel_tool_calls": false, "stream": true, "store": true, "metadata": {"a": "b"},
        "client_metadata": {"a": "b"}, "prompt_cache_key": "k", "service_tier": "auto", "truncation": "auto",
        "include": ["reasoning.encrypted_content"], "user": "u", "unheard_of": 1,
        "text": {"verbosity": "low", "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": true}},
    }));
    let function = json!({"type": "function", "function": {"name": "f"}});
    let schema = json!({"name": "n", "schema": {"type": "object"}, "strict": true});
    let expected = json!({
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [function],
        "parallel_tool_calls": false, "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": schema}, "max_completion_tokens": 7,
        "temperature": 0.5, "top_p": 0.9, "seed": 3, "stream": true, "stream_options": {"include_usage": true},
    });
    assert_eq!(chat, expected);
    let chat =
        chat_of(&json!({"model": "m", "input": "hi", "temperature": null, "reasoning": null, "text": null,
        "tools": null, "tool_choice": null, "instructions": null, "previous_response_id": null}));
    assert_eq!(chat, json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]}));
}

#[test]
fn how_much_to_think_has_chats_words() {
    for (level, expected) in [
        ("none", "none"),
        ("minimal", "minimal"),
        ("medium", "medium"),
        ("high", "high"),
        ("xhigh", "high"),
        ("max", "high"),
        ("odd", "odd"),
    ] {
        let chat = chat_of(&json!({"model": "m", "input": "hi", "reasoning": {"effort": level}}));
        assert_eq!(chat["reasoning_effort"], expected, "{level}");
    }
}

#[test]
fn b21_a_response_that_is_not_kept_here_is_refused_in_clear_words() {
    let message = refusal(&json!({"model": "m", "input": "hi", "previous_response_id": "resp_7"}));
    assert!(message.contains("previous_response_id") && message.contains("resp_7"), "{message}");
    let message = refusal(&json!({"model": "m", "input": "hi", "conversation": {"id": "conv_1"}}));
    assert!(message.contains("conversation") && message.contains("conv_1"), "{message}");
    let kept = |request: Value| Kept::read(&Bytes::from(request.to_string()));
    let read = kept(json!({"conversation": "conv_1", "store": false})).expect("ids");
    assert_eq!((read.conversation.as_deref(), read.store), (Some("conv_1"), false));
    assert!(kept(json!({"previous_response_id": "r"})).expect("ids").store);
    assert!(kept(json!({"previous_response_id": 1})).is_err());
    assert!(kept(json!({"previous_response_id": "r", "conversation": "c"})).is_err());
    assert!(Kept::read(&Bytes::from_static(b"[]")).is_err());
}

#[test]
fn what_has_no_chat_form_is_refused_with_its_place() {
    let items = [
        (json!({"type": "item_reference", "id": "msg_1"}), "item_reference"),
        (json!({"type": "compaction", "encrypted_content": "x"}), "compaction"),
        (json!({"type": "web_search_call", "id": "ws_1"}), "web_search_call"),
        (json!({"type": "tool_search_output"}), "tool_search_output"),
        (json!({"type": "never_heard"}), "never_heard"),
        (json!({"id": "x"}), "type"),
        (json!(1), "object"),
        (json!({"role": "robot", "content": "x"}), "robot"),
        (json!({"role": "user"}), "content"),
        (json!({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}), "content[0]"),
        (json!({"role": "user", "content": [{"type": "hologram"}]}), "hologram"),
        (json!({"type": "function_call", "name": "f", "arguments": "{}"}), "call_id"),
        (json!({"type": "function_call", "call_id": "x", "name": "f", "arguments": {}}), "arguments"),
        (json!({"type": "function_call_output", "call_id": "x"}), "output"),
        (json!({"type": "local_shell_call", "call_id": "x", "action": []}), "action"),
    ];
    for (item, part) in items {
        let message = refusal(&json!({"model": "m", "input": [{"role": "user", "content": "u"}, item]}));
        assert!(message.starts_with("input[1]") && message.contains(part), "{message}");
    }
    let requests = [
        (json!({"model": "m", "input": "hi", "background": true}), "background"),
        (json!({"model": "m", "prompt": {"id": "p"}}), "prompt"),
        (json!({"model": "m", "input": "hi", "include": ["message.output_text.logprobs"]}), "log-probs"),
        (json!({"model": "m", "input": "hi", "text": {"format": {"type": "grammar"}}}), "text.format"),
        (json!({"model": "m", "input": []}), "input"),
        (json!({"model": "m"}), "input"),
        (json!({"input": "hi"}), "model"),
        (json!([]), "object"),
    ];
    for (request, part) in requests {
        assert!(refusal(&request).contains(part), "{request}");
    }
    let half = Bytes::from_static(br#"{"model":"\ud83c","input":"hi"}"#);
    assert!(open_call(&half, names(), None).is_err_and(|error| error.message.contains("model")));
    assert!(open_call(&Bytes::from_static(b"{"), names(), None).is_err());
}
