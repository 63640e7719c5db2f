//! What a request of any protocol asks, as a list of who says what. For people: nothing else reads it.

use std::fmt::Write as _;

use serde_json::Value;

use crate::record::ClientApi;

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    pub role: String,
    pub text: String,
}

/// The conversation of a request, its system prompt first.
pub fn turns(request: &Value, api: ClientApi) -> Vec<Turn> {
    let mut turns = Vec::new();
    let mut say = |role: &str, text: String| turns.push(Turn { role: role.to_owned(), text });
    match api {
        ClientApi::OpenaiResponses => {
            if !request["instructions"].is_null() {
                say("instructions", content(&request["instructions"]));
            }
            match &request["input"] {
                Value::Array(items) => items.iter().for_each(|item| {
                    let (role, text) = item_of_responses(item);
                    say(&role, text);
                }),
                Value::Null => {}
                input => say("user", content(input)),
            }
        }
        ClientApi::OpenaiCompletions => match &request["prompt"] {
            Value::Array(prompts) if prompts.iter().all(Value::is_u64) => {
                say("prompt", request["prompt"].to_string());
            }
            Value::Array(prompts) => prompts.iter().for_each(|prompt| match prompt {
                Value::String(text) => say("prompt", text.clone()),
                ids => say("prompt", ids.to_string()),
            }),
            Value::Null => {}
            prompt => say("prompt", content(prompt)),
        },
        _ => {
            if !request["system"].is_null() {
                say("system", content(&request["system"]));
            }
            for message in request["messages"].as_array().into_iter().flatten() {
                let mut text = content(&message["content"]);
                for call in message["tool_calls"].as_array().into_iter().flatten() {
                    call_of(&mut text, &call["function"]["name"], &call["function"]["arguments"]);
                }
                say(message["role"].as_str().unwrap_or("?"), text);
            }
        }
    }
    turns
}

fn item_of_responses(item: &Value) -> (String, String) {
    let mut text = String::new();
    let role = match item["type"].as_str().unwrap_or("message") {
        "message" => {
            text = content(&item["content"]);
            item["role"].as_str().unwrap_or("user")
        }
        "function_call" => {
            call_of(&mut text, &item["name"], &item["arguments"]);
            "assistant"
        }
        "custom_tool_call" => {
            call_of(&mut text, &item["name"], &item["input"]);
            "assistant"
        }
        "function_call_output" | "custom_tool_call_output" => {
            text = content(&item["output"]);
            "tool"
        }
        "reasoning" => {
            text = content(&item["summary"]) + &content(&item["content"]);
            "reasoning"
        }
        other => {
            text = item.to_string();
            other
        }
    };
    (role.to_owned(), text)
}

/// Text, or the text of its parts; tool calls as they were sent.
fn content(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().map(part).collect(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

fn part(part: &Value) -> String {
    let mut text = String::new();
    match (part["type"].as_str(), part["text"].as_str()) {
        (_, Some(own)) => text.push_str(own),
        (Some("tool_use"), _) => call_of(&mut text, &part["name"], &part["input"]),
        (Some("tool_result"), _) => text = format!("[tool result] {}", content(&part["content"])),
        (Some("thinking"), _) => text = format!("[thinking] {}", content(&part["thinking"])),
        (Some("refusal"), _) => text = content(&part["refusal"]),
        (Some(kind), None) => text = format!("[{kind}]"),
        (None, None) => text = part.as_str().unwrap_or("[not text]").to_owned(),
    }
    text
}

fn call_of(text: &mut String, name: &Value, arguments: &Value) {
    // Writing to a text does not fail.
    let _ = write!(text, " → {}({})", name.as_str().unwrap_or("?"), content(arguments));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(request: &Value, api: ClientApi) -> Vec<String> {
        turns(request, api).iter().map(|turn| format!("[{}] {}", turn.role, turn.text)).collect()
    }

    #[test]
    fn the_whole_prompt_of_each_protocol_is_shown() {
        let chat = json!({"messages": [
            {"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "ls", "arguments": "{}"}}]},
        ]});
        assert_eq!(
            told(&chat, ClientApi::OpenaiChat),
            ["[system] be brief", "[user] hi", "[assistant]  → ls({})"]
        );
        let messages = json!({"system": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}], "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "so"}, {"type": "tool_use", "name": "ls", "input": {"a": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "content": [{"type": "text", "text": "a.py"}]}, {"type": "image", "source": {}}]},
        ]});
        assert_eq!(
            told(&messages, ClientApi::AnthropicMessages),
            [
                "[system] be brief",
                "[user] hi",
                "[assistant] [thinking] so → ls({\"a\":1})",
                "[user] [tool result] a.py[image]"
            ]
        );
        let responses = json!({"instructions": "be brief", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
            {"type": "function_call", "name": "ls", "arguments": "{}"},
            {"type": "function_call_output", "output": "a.py"},
        ]});
        assert_eq!(
            told(&responses, ClientApi::OpenaiResponses),
            [
                "[instructions] be brief",
                "[user] hi",
                "[reasoning] so",
                "[assistant]  → ls({})",
                "[tool] a.py"
            ]
        );
        assert_eq!(told(&json!({"input": "hi"}), ClientApi::OpenaiResponses), ["[user] hi"]);
        assert_eq!(told(&json!({"prompt": "def f"}), ClientApi::OpenaiCompletions), ["[prompt] def f"]);
        assert_eq!(
            told(&json!({"prompt": ["a", [1, 2]]}), ClientApi::OpenaiCompletions),
            ["[prompt] a", "[prompt] [1,2]"]
        );
        assert_eq!(told(&json!({"prompt": [1, 2]}), ClientApi::OpenaiCompletions), ["[prompt] [1,2]"]);
    }
}
