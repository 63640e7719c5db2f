//! Messages requests as chat requests.

use serde_json::{Value, json};

use super::super::{count_reply, count_request, is_billing_header, translate};
use super::{body, names};
use crate::protocol::chat;
use crate::protocol::error::ErrorType;

fn chat_of(request: &Value) -> Value {
    let translation = translate(&body(&request.to_string()), names()).map_err(|error| error.message);
    let chat = translation.expect("a request").chat;
    chat::Request::parse(chat.clone()).expect("a chat request");
    super::json(&chat)
}

/// A request with these members beside the least.
fn with(members: Value) -> Value {
    let mut request = json!({"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in members.as_object().expect("members") {
        request[name] = value.clone();
    }
    request
}

fn messages_of(messages: Value) -> Value {
    chat_of(&with(json!({"messages": messages})))["messages"].clone()
}

fn problem(request: &Value) -> String {
    let error = translate(&body(&request.to_string()), names()).map(|_| ()).expect_err("refused");
    assert_eq!((error.status, error.kind), (400, ErrorType::InvalidRequest));
    error.message
}

#[test]
fn the_least_request_and_all_options() {
    assert_eq!(
        chat_of(&with(json!({}))),
        json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8})
    );
    let chat = chat_of(&with(json!({
        "stream": true, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "stop_sequences": ["A", "é"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object", "z": 1, "a": 2}}},
        "metadata": {"user_id": "secret"}, "cache_control": {"type": "ephemeral"}, "betas": ["x"], "new_field": {"a": 1},
        "context_management": {"edits": []}, "mcp_servers": [], "tools": [], "tool_choice": {"type": "auto"},
    })));
    assert_eq!(
        chat,
        json!({
            "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0.5,
            "top_p": 0.9, "top_k": 40, "stop": ["A", "é"], "thinking_token_budget": 1024, "reasoning_effort": "high",
            "response_format": {"type": "json_schema", "json_schema":
                {"name": "output", "strict": true, "schema": {"type": "object", "z": 1, "a": 2}}},
            "stream": true, "stream_options": {"include_usage": true}
        })
    );
    assert!(!chat.to_string().contains("secret"));
    let off = chat_of(&with(json!({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}})));
    assert_eq!(off["reasoning_effort"], "none");
    for (level, expected) in [("low", "low"), ("medium", "medium"), ("high", "high"), ("xhigh", "high")] {
        let chat = chat_of(&with(json!({"output_config": {"effort": level}})));
        assert_eq!(chat["reasoning_effort"], expected, "{level}");
    }
    let adaptive = chat_of(&with(json!({"thinking": {"type": "adaptive", "display": "omitted"}})));
    assert_eq!(adaptive.as_object().expect("object").len(), 3);
}

#[test]
fn system_blocks_are_joined_and_inline_system_turns_stay_in_place() {
    let chat = chat_of(&with(json!({
        "system": [{"type": "text", "text": "a\n", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b\"é"}],
        "messages": [
            {"role": "user", "content": "u1"},
            {"role": "system", "content": [{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}], "output_config": {}},
            {"role": "user", "content": [{"type": "text", "text": "u2"}]},
            {"role": "user", "content": [{"type": "text", "text": "u3"}, {"type": "mid_conv_system", "content": [{"type": "text", "text": "s3"}]}, {"type": "text", "text": "u4"}]},
        ],
    })));
    assert_eq!(
        chat["messages"],
        json!([
            {"role": "system", "content": "a\nb\"é"}, {"role": "user", "content": "u1"},
            {"role": "system", "content": "s1s2"}, {"role": "user", "content": "u2"}, {"role": "user", "content": "u3"},
            {"role": "system", "content": "s3"}, {"role": "user", "content": "u4"}
        ])
    );
    let plain = chat_of(&with(json!({"system": "one"})));
    assert_eq!(plain["messages"][0], json!({"role": "system", "content": "one"}));
    assert_eq!(chat_of(&with(json!({"system": []})))["messages"].as_array().expect("list").len(), 1);
}

#[test]
fn b02_thinking_is_never_content_and_the_turn_is_one_message() {
    let messages = messages_of(json!([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "secret ", "signature": "s"}, {"type": "redacted_thinking", "data": "xx"},
            {"type": "thinking", "thinking": "plan", "signature": "s"}, {"type": "text", "text": "hi", "citations": null},
            {"type": "tool_use", "id": "lg-functions-2ef-3a0", "name": "f", "input": {"a": 1}, "token_ids": [1]},
            {"type": "text", "text": " there"},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "lg-functions-2ef-3a0", "content": "ok"}]},
    ]));
    assert_eq!(
        messages[1],
        json!({"role": "assistant", "reasoning_content": "secret plan", "content": "hi there", "tool_calls":
            [{"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}}]})
    );
    assert_eq!(messages[2], json!({"role": "tool", "tool_call_id": "functions.f:0", "content": "ok"}));
}

#[test]
fn b01_no_signature_is_sent_where_nobody_can_check_it() {
    let chat = chat_of(&with(json!({"messages": [
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "plan", "signature": "SIGNED"}, {"type": "redacted_thinking", "data": "SEALED"},
            {"type": "tool_use", "id": "x", "name": "f", "input": {}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "r"}]},
    ]})));
    assert_eq!(chat["messages"][0]["reasoning_content"], "plan");
    assert!(!chat.to_string().contains("SIGNED") && !chat.to_string().contains("SEALED"));
}

#[test]
fn c14_tool_inputs_keep_their_bytes() {
    let input = r#"{"b":  1.50, "a":"\u00e9\/", "n":12345678901234567890123, "a":2}"#;
    let text = format!(
        r#"{{"model":"m","max_tokens":1,"messages":[{{"role":"assistant","content":[{{"type":"tool_use","id":"x","name":"f","input":{input}}}]}},{{"role":"user","content":[{{"type":"tool_result","tool_use_id":"x"}}]}}]}}"#
    );
    let chat =
        super::json(&translate(&body(&text), names()).map_err(|error| error.message).expect("request").chat);
    assert_eq!(chat["messages"][0]["tool_calls"][0]["function"]["arguments"], input);
    assert_eq!(chat["messages"][0]["content"], Value::Null);
    assert_eq!(chat["messages"][1]["content"], "");
}

#[test]
fn b03_images_of_tool_results_stay_images() {
    let image =
        json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO+/="}});
    let url = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO+/="}});
    let cases = [
        (json!("s"), "s", 0),
        (json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), "a\nb", 0),
        (json!([image]), "", 1),
        (json!([{"type": "text", "text": "a"}, image]), "a", 1),
        (json!([]), "", 0),
        (Value::Null, "", 0),
        (
            json!([{"type": "tool_reference", "tool_name": "Monitor"}, {"type": "tool_reference", "tool_name": "WebFetch"}]),
            "Monitor\nWebFetch",
            0,
        ),
        (
            json!([{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}, "title": "t"}]),
            "t\nd",
            0,
        ),
        (
            json!([{"type": "search_result", "title": "t", "source": "u", "content": [{"type": "text", "text": "c"}]}]),
            "t\nu\nc",
            0,
        ),
    ];
    for (content, text, images) in cases {
        for is_error in [false, true] {
            let result =
                json!({"type": "tool_result", "tool_use_id": "x", "content": content, "is_error": is_error});
            let messages = messages_of(json!([{"role": "user", "content": [result]}]));
            let text = if is_error { format!("Error: {text}") } else { text.to_owned() };
            assert_eq!(messages[0], json!({"role": "tool", "tool_call_id": "x", "content": text}));
            assert_eq!(messages.as_array().expect("list").len(), 1 + images);
            if images > 0 {
                assert_eq!(messages[1], json!({"role": "user", "content": [url]}));
            }
        }
    }
    let said = json!({"type": "tool_result", "tool_use_id": "x", "content": "Error: no", "is_error": true});
    assert_eq!(messages_of(json!([{"role": "user", "content": [said]}]))[0]["content"], "Error: no");
}

#[test]
fn b04_results_come_first_in_their_order_and_by_id() {
    let image = json!({"type": "image", "source": {"type": "url", "url": "http://h/i.png"}});
    let messages = messages_of(json!([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "A", "name": "f", "input": {}}, {"type": "tool_use", "id": "B", "name": "f", "input": {}},
            {"type": "tool_use", "id": "C", "name": "f", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "C", "content": "c"}, {"type": "text", "text": "note"},
            {"type": "tool_result", "tool_use_id": "A", "content": "a"},
            {"type": "tool_result", "tool_use_id": "B", "content": [{"type": "text", "text": "b"}, image]},
        ]},
    ]));
    let outline: Vec<_> = messages.as_array().expect("list")[2..]
        .iter()
        .map(|message| {
            (message["role"].as_str().expect("role"), message["tool_call_id"].as_str().unwrap_or(""))
        })
        .collect();
    assert_eq!(outline, [("tool", "C"), ("tool", "A"), ("tool", "B"), ("user", "")]);
    assert_eq!(
        messages[5]["content"],
        json!([{"type": "text", "text": "note"}, {"type": "image_url", "image_url": {"url": "http://h/i.png"}}])
    );
}

#[test]
fn b12_nothing_empty_is_sent_and_nothing_is_invented() {
    let call = json!({"type": "tool_use", "id": "x", "name": "f", "input": {}});
    for (content, with_call, without) in [
        (Value::Null, Value::Null, ""),
        (json!([]), Value::Null, ""),
        (json!([{"type": "text", "text": ""}]), Value::Null, ""),
        (json!([{"type": "text", "text": "  "}]), json!("  "), "  "),
    ] {
        let tail =
            json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "r"}]});
        let messages = messages_of(json!([{"role": "assistant", "content": content}, tail]));
        assert_eq!(messages[0], json!({"role": "assistant", "content": without}));
        let mut blocks = content.as_array().cloned().unwrap_or_default();
        blocks.push(call.clone());
        let messages = messages_of(json!([{"role": "assistant", "content": blocks}, tail]));
        assert_eq!(messages[0]["content"], with_call);
        assert_eq!(messages[0]["tool_calls"].as_array().expect("calls").len(), 1);
    }
    let messages = messages_of(json!([{"role": "assistant"}, {"role": "user", "content": ""}]));
    assert_eq!(messages, json!([{"role": "assistant", "content": ""}, {"role": "user", "content": ""}]));
    let parts = json!([{"type": "text", "text": ""}, {"type": "text", "text": "a"}]);
    assert_eq!(messages_of(json!([{"role": "user", "content": parts}]))[0]["content"], "a");
}

#[test]
fn b15_tools_keep_their_schemas_and_servers_tools_are_refused() {
    let schema = r##"{"$schema":"x","type":["object","null"],"properties":{"b":{"anyOf":[{"$ref":"#/$defs/q"}]},"a":{"pattern":"^(?=\\p{L})"}},"required":["b"],"$defs":{"q":{}}}"##;
    let text = format!(
        r#"{{"model":"m","max_tokens":1,"messages":[{{"role":"user","content":"q"}}],"tools":[{{"name":"f","description":"d","input_schema":{schema},"strict":true,"defer_loading":true,"cache_control":{{"type":"ephemeral"}}}},{{"type":"custom","name":"g","input_schema":{{"properties":{{}}}}}},{{"type":"tool_search_tool_regex_20251119","name":"s"}}],"tool_choice":{{"type":"any","disable_parallel_tool_use":true}}}}"#
    );
    let chat = translate(&body(&text), names()).map_err(|error| error.message).expect("request").chat;
    assert!(
        std::str::from_utf8(&chat)
            .expect("text")
            .contains(&format!("\"parameters\":{schema},\"strict\":true"))
    );
    let chat = super::json(&chat);
    assert_eq!(chat["tools"].as_array().expect("tools").len(), 2);
    assert_eq!(
        chat["tools"][1]["function"],
        json!({"name": "g", "parameters": {"properties": {}, "type": "object"}})
    );
    assert_eq!((&chat["tool_choice"], &chat["parallel_tool_calls"]), (&json!("required"), &json!(false)));

    for (tool, words) in [
        (json!({"type": "web_search_20250305", "name": "web_search"}), ["web_search", "turn it off"]),
        (json!({"type": "bash_20250124", "name": "bash"}), ["bash_20250124", "custom tool"]),
        (json!({"type": "text_editor_20250728", "name": "edit"}), ["text_editor_20250728", "custom tool"]),
        (json!({"name": "f"}), ["\"f\"", "add one"]),
        (json!({"name": "f", "input_schema": []}), ["tools[0].input_schema", "an object"]),
    ] {
        let message = problem(&with(json!({"tools": [tool]})));
        assert!(
            message.starts_with("tools[0]") && words.iter().all(|word| message.contains(word)),
            "{message}"
        );
    }
}

#[test]
fn tool_choices() {
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    let choice =
        |choice: Value| chat_of(&with(json!({"tools": tools, "tool_choice": choice})))["tool_choice"].clone();
    assert_eq!(choice(json!({"type": "auto"})), "auto");
    assert_eq!(choice(json!({"type": "none"})), "none");
    assert_eq!(choice(json!({"type": "any"})), "required");
    assert_eq!(
        choice(json!({"type": "tool", "name": "f"})),
        json!({"type": "function", "function": {"name": "f"}})
    );
    let chat = chat_of(&with(json!({"tool_choice": {"type": "none"}})));
    assert_eq!(chat.get("tool_choice"), None);
    assert!(problem(&with(json!({"tool_choice": {"type": "any"}}))).starts_with("tool_choice:"));
    assert!(problem(&with(json!({"tool_choice": {"type": "some"}}))).starts_with("tool_choice.type:"));
}

#[test]
fn a_last_assistant_turn_is_continued() {
    let chat = chat_of(&with(
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The"}]}),
    ));
    assert_eq!(chat["messages"][1], json!({"role": "assistant", "content": "The"}));
    assert_eq!(
        (&chat["continue_final_message"], &chat["add_generation_prompt"]),
        (&json!(true), &json!(false))
    );
    let chat = chat_of(&with(
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}),
    ));
    assert_eq!(chat["messages"], json!([{"role": "user", "content": "q"}]));
    assert_eq!(chat.get("continue_final_message"), None);
    let call = json!([{"type": "tool_use", "id": "x", "name": "f", "input": {}}]);
    let message = problem(&with(json!({"messages": [{"role": "assistant", "content": call}]})));
    assert!(message.contains("tool_result"), "{message}");
}

#[test]
fn wrong_shapes_are_refused_with_their_place() {
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    for (members, start) in [
        (json!({"model": null}), "model: the field is required"),
        (json!({"model": 7}), "model: expected a string"),
        (json!({"max_tokens": null}), "max_tokens: the field is required"),
        (json!({"max_tokens": -1}), "max_tokens: expected a whole number"),
        (json!({"max_tokens": "8"}), "max_tokens:"),
        (json!({"messages": []}), "messages: expected at least one message"),
        (json!({"messages": {}}), "messages: expected a list"),
        (json!({"messages": [7]}), "messages[0]: expected an object"),
        (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].role:"),
        (user(Value::Null), "messages[0].content: the field is required"),
        (user(json!(7)), "messages[0].content: expected a string or a list"),
        (user(json!([{"type": "text"}])), "messages[0].content[0].text: the field is required"),
        (user(json!([{"type": "text", "text": 7}])), "messages[0].content[0].text: expected a string"),
        (user(json!([{"text": "x"}])), "messages[0].content[0].type: the field is required"),
        (
            user(json!([{"type": "image", "source": {"type": "file", "file_id": "f"}}])),
            "messages[0].content[0].source.type: lego keeps no",
        ),
        (
            user(json!([{"type": "document", "source": {"type": "base64", "data": "x"}}])),
            "messages[0].content[0]: chat upstreams read no",
        ),
        (
            user(json!([{"type": "tool_result", "content": "x"}])),
            "messages[0].content[0].tool_use_id: the field",
        ),
        (
            user(json!([{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "odd"}]}])),
            "messages[0].content[0].content[0]: a `odd` block",
        ),
        (
            json!({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}),
            "messages[0].content[0]: a `server_tool_use` block belongs",
        ),
        (
            json!({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": "{}"}]}]}),
            "messages[0].content[0].input: expected an object",
        ),
        (json!({"system": [{"type": "image"}]}), "system[0]: a system prompt holds only"),
        (json!({"system": 7}), "system: expected"),
        (json!({"stream": "yes"}), "stream: expected true or false"),
        (json!({"temperature": "hot"}), "temperature: expected a number"),
        (json!({"top_k": 1.5}), "top_k: expected a whole number"),
        (json!({"stop_sequences": ["a", 7]}), "stop_sequences[1]: expected a string"),
        (json!({"thinking": {"type": "odd"}}), "thinking.type:"),
        (json!({"thinking": {"type": "enabled"}}), "thinking.budget_tokens: the field"),
        (json!({"output_config": {"effort": "odd"}}), "output_config.effort:"),
        (json!({"output_config": {"effort": "minimal"}}), "output_config.effort:"),
        (json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format.type:"),
        (json!({"tools": {}}), "tools: expected a list"),
        (json!({"mcp_servers": [{}]}), "mcp_servers: MCP servers"),
    ] {
        let message = problem(&with(members));
        assert!(message.starts_with(start), "{message}: not {start}");
    }
    for text in ["", "{", "[]", "7", "\u{feff}{}"] {
        assert!(translate(&body(text), names()).is_err(), "{text}");
    }
}

#[test]
fn a_lone_surrogate_reaches_the_upstream_as_it_came() {
    let text = r#"{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"cut \ud83d"}]}"#;
    let chat = translate(&body(text), names()).map_err(|error| error.message).expect("request").chat;
    assert!(std::str::from_utf8(&chat).expect("text").contains(r#""content":"cut \ud83d""#));
}

#[test]
fn b08_a_count_asks_for_the_prompt_of_the_same_request() {
    let request = with(json!({
        "system": "s", "tools": [{"name": "f", "input_schema": {"type": "object"}}], "stream": true, "tool_choice": {"type": "auto"}
    }));
    let chat = chat_of(&request);
    let mut counted = request.clone();
    counted.as_object_mut().expect("object").shift_remove("max_tokens");
    let count = super::json(
        &count_request(&body(&counted.to_string())).map_err(|error| error.message).expect("body"),
    );
    assert_eq!(
        count,
        json!({"model": "m", "messages": chat["messages"], "tools": chat["tools"], "add_generation_prompt": true})
    );
    let prefill = with(json!({"messages": [{"role": "assistant", "content": "The"}]}));
    let count = super::json(
        &count_request(&body(&prefill.to_string())).map_err(|error| error.message).expect("body"),
    );
    assert_eq!(
        (&count["continue_final_message"], &count["add_generation_prompt"]),
        (&json!(true), &json!(false))
    );

    let reply = count_reply(br#"{"count":728,"max_model_len":4096,"tokens":[1,2]}"#).expect("a count");
    assert_eq!(reply, &br#"{"input_tokens":728}"#[..]);
    for text in ["", "{}", r#"{"count":null}"#, r#"{"count":-1}"#] {
        assert!(count_reply(text.as_bytes()).is_err(), "{text}");
    }
}

#[test]
fn b10_the_billing_line_is_known_and_kept() {
    let line = "x-anthropic-billing-header: cc_version=2.1.332.c33; cc_entrypoint=cli;";
    assert!(is_billing_header(line));
    assert!(!is_billing_header("You said x-anthropic-billing-header: a"));
    let chat =
        chat_of(&with(json!({"system": [{"type": "text", "text": line}, {"type": "text", "text": "s"}]})));
    assert_eq!(chat["messages"][0]["content"], format!("{line}s"));
}

#[test]
fn b19_the_asked_model_is_sent_on_as_it_was_written() {
    let text = r#"{"model":"claude-\u006d","max_tokens":1,"messages":[{"role":"user","content":"q"}]}"#;
    let translation = translate(&body(text), names()).map_err(|error| error.message).expect("request");
    assert!(translation.chat.starts_with(br#"{"model":"claude-\u006d","#));
}

#[test]
fn a_model_that_is_no_text_is_refused() {
    let text = r#"{"model":"\ud83c","max_tokens":1,"messages":[{"role":"user","content":"q"}]}"#;
    let Err(error) = translate(&body(text), names()) else { panic!("half a character is no name") };
    assert_eq!(error.status, 400);
    assert!(error.message.contains("model"), "{}", error.message);
}
