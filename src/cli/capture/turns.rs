//! What a request of any protocol asks, as a list of who says what. For people: nothing else reads it.

use std::fmt::Write as _;

use serde_json::Value;

use crate::record::ClientApi;

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    pub role: String,
    pub text: String,
    /// Of a system prompt or a user: the texts in it, which may have been changed before they were sent.
    pub texts: Vec<String>,
}

/// What was sent in the place of a turn.
#[derive(Debug, PartialEq, Eq)]
pub enum Sent<'a> {
    As(&'a str),
    /// Something else; the protocol that it was sent in has other turns.
    Otherwise,
}

impl Turn {
    fn is_users(&self) -> bool {
        self.role == "user"
    }

    /// What was `sent` in its place, if that is something else. It is one of `asked`.
    pub fn changed<'a>(&self, asked: &[Self], sent: &'a [Self]) -> Option<Sent<'a>> {
        let is_sent = |text: &String| sent.iter().any(|turn| turn.text.contains(text.as_str()));
        if self.texts.iter().all(is_sent) {
            return None;
        }
        let is_alike = |turn: &&Self| turn.is_users() == self.is_users() && !turn.texts.is_empty();
        let mut of_asked = asked.iter().filter(is_alike);
        let place = of_asked.clone().position(|turn| std::ptr::eq(turn, self));
        let (asked, of_sent) = (of_asked.by_ref().count(), sent.iter().filter(is_alike));
        let own = place.filter(|_| of_sent.clone().count() == asked);
        let own = own.and_then(|place| of_sent.clone().nth(place));
        Some(own.map_or(Sent::Otherwise, |turn| Sent::As(&turn.text)))
    }
}

/// The conversation of a request, its system prompt first.
pub fn turns(request: &Value, api: ClientApi) -> Vec<Turn> {
    let mut turns = Vec::new();
    let mut tell = |role: &str, text: String, of: &Value| {
        let is_of_prompt = matches!(role, "system" | "developer" | "instructions" | "user");
        let texts = if is_of_prompt { texts(of) } else { Vec::new() };
        turns.push(Turn { role: role.to_owned(), text, texts });
    };
    match api {
        ClientApi::OpenaiResponses => {
            if !request["instructions"].is_null() {
                tell("instructions", content(&request["instructions"]), &request["instructions"]);
            }
            match &request["input"] {
                Value::Array(items) => items.iter().for_each(|item| {
                    let (role, text) = item_of_responses(item);
                    tell(&role, text, &item["content"]);
                }),
                Value::Null => {}
                input => tell("user", content(input), input),
            }
        }
        ClientApi::SglangGenerate => {
            for prompt in [&request["text"], &request["input_ids"]] {
                if !prompt.is_null() {
                    tell(
                        "prompt",
                        prompt.as_str().map_or_else(|| prompt.to_string(), str::to_owned),
                        &Value::Null,
                    );
                }
            }
        }
        ClientApi::OpenaiCompletions => match &request["prompt"] {
            Value::Array(prompts) if prompts.iter().all(Value::is_u64) => {
                tell("prompt", request["prompt"].to_string(), &Value::Null);
            }
            Value::Array(prompts) => prompts.iter().for_each(|prompt| match prompt {
                Value::String(text) => tell("prompt", text.clone(), &Value::Null),
                ids => tell("prompt", ids.to_string(), &Value::Null),
            }),
            Value::Null => {}
            prompt => tell("prompt", content(prompt), &Value::Null),
        },
        _ => {
            if !request["system"].is_null() {
                tell("system", content(&request["system"]), &request["system"]);
            }
            for message in request["messages"].as_array().into_iter().flatten() {
                let mut text = content(&message["content"]);
                for call in message["tool_calls"].as_array().into_iter().flatten() {
                    call_of(&mut text, &call["function"]["name"], &call["function"]["arguments"]);
                }
                tell(message["role"].as_str().unwrap_or("?"), text, &message["content"]);
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

/// The texts of a content.
fn texts(content: &Value) -> Vec<String> {
    match content {
        Value::String(text) => vec![text.clone()],
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part["text"].as_str().map(str::to_owned)).collect()
        }
        _ => Vec::new(),
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
        assert_eq!(told(&json!({"text": "def f"}), ClientApi::SglangGenerate), ["[prompt] def f"]);
        assert_eq!(told(&json!({"input_ids": [1, 2]}), ClientApi::SglangGenerate), ["[prompt] [1,2]"]);
    }

    #[test]
    fn what_was_sent_in_another_form_is_told() {
        let chat = |system: &str, user: &str| {
            let messages = json!([{"role": "system", "content": system}, {"role": "user", "content": user}]);
            turns(&json!({"messages": messages}), ClientApi::OpenaiChat)
        };
        let (asked, sent) = (chat("Today is 1", "hi"), chat("Today is a day", "hi"));
        assert_eq!(asked[0].changed(&asked, &sent), Some(Sent::As("Today is a day")));
        assert_eq!(asked[1].changed(&asked, &sent), None);
        assert_eq!(asked[0].changed(&asked, &asked), None);
        // Messages have tool results in a user's turn, chat has not, and system blocks are one text.
        let messages = json!({"system": [{"type": "text", "text": "nonce 1"}, {"type": "text", "text": "be brief"}], "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Today is 1"}]},
            {"role": "user", "content": [{"type": "tool_result", "content": "a.py"}]},
            {"role": "user", "content": [{"type": "text", "text": "go on"}, {"type": "tool_result", "content": "b.py"}]},
        ]});
        let asked = turns(&messages, ClientApi::AnthropicMessages);
        let sent = json!({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Today is"},
            {"role": "tool", "content": "a.py"}, {"role": "tool", "content": "b.py"}, {"role": "user", "content": "go on"},
            {"role": "user", "content": "one more"}]});
        let sent = turns(&sent, ClientApi::OpenaiChat);
        let changed: Vec<_> = asked.iter().map(|turn| turn.changed(&asked, &sent)).collect();
        assert_eq!(changed, [Some(Sent::As("be brief")), Some(Sent::Otherwise), None, None]);
    }
}
