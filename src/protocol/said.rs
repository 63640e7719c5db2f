//! A chat message in the form in which harnesses' messages are compared: role, text without white space around it, names
//! and parsed arguments of tool calls, and their ids. How reasoning came back, and how arguments were printed, is kept
//! beside that and bears on no comparison.

use serde::Serialize;
use serde_json::Value;

use super::canonical::canonical;

/// Who says a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Role {
    /// And developers.
    System,
    User,
    Assistant,
    Tool,
    Other,
}

/// A tool call of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolUse {
    pub id: String,
    pub name: String,
    /// As they were printed.
    pub arguments: String,
}

/// A message.
#[derive(Debug)]
pub struct Said {
    pub role: Role,
    /// The texts of its parts.
    pub parts: Vec<String>,
    pub reasoning: String,
    pub tool_uses: Vec<ToolUse>,
    /// The call that a tool's message answers.
    answers: String,
    /// Parts that are no text.
    media: Vec<String>,
}

/// What two messages have in common that are the same.
#[derive(Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Identity {
    role: Role,
    text: String,
    tool_uses: Vec<(String, String, String)>,
    answers: String,
    media: Vec<String>,
}

impl Said {
    /// A message of a chat request; `None`: it is none.
    #[must_use]
    pub fn read(message: &Value) -> Option<Self> {
        let role = match message["role"].as_str()? {
            "system" | "developer" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" | "function" => Role::Tool,
            _ => Role::Other,
        };
        let (parts, media) = content(&message["content"]);
        let reasoning = ["reasoning_content", "reasoning"].iter().find_map(|name| message[name].as_str());
        let tool_uses = message["tool_calls"].as_array().into_iter().flatten().map(|call| ToolUse {
            id: call["id"].as_str().unwrap_or_default().to_owned(),
            name: call["function"]["name"].as_str().unwrap_or_default().to_owned(),
            arguments: match &call["function"]["arguments"] {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            },
        });
        let said = Self {
            role,
            parts,
            reasoning: reasoning.unwrap_or_default().to_owned(),
            tool_uses: tool_uses.collect(),
            answers: message["tool_call_id"].as_str().unwrap_or_default().to_owned(),
            media,
        };
        Some(said.without_thinking())
    }

    /// A reply, as a client says it later.
    #[must_use]
    pub fn reply(text: String, tool_uses: Vec<ToolUse>) -> Self {
        let (parts, media) = (vec![text], Vec::new());
        let (reasoning, answers) = (String::new(), String::new());
        Self { role: Role::Assistant, parts, reasoning, tool_uses, answers, media }.without_thinking()
    }

    /// Thinking that stands before an assistant's text, as engines without a reasoning parser give it, is reasoning.
    /// Templates that open it themselves leave only its end.
    fn without_thinking(mut self) -> Self {
        let text = self.parts.concat();
        let Some((before, after)) = text.split_once("</think>").filter(|_| self.role == Role::Assistant)
        else {
            return self;
        };
        let thinking = before.trim_start();
        let thinking = thinking.strip_prefix("<think>").unwrap_or(thinking);
        if !thinking.contains("<think>") && self.reasoning.is_empty() {
            self.reasoning = thinking.to_owned();
            self.parts = vec![after.to_owned()];
        }
        self
    }

    /// Equal for messages that are the same.
    #[must_use]
    pub fn identity(&self) -> Identity {
        Identity {
            role: self.role,
            text: self.parts.concat().trim().to_owned(),
            tool_uses: self.tool_uses.iter().map(of_tool).collect(),
            answers: self.answers.clone(),
            media: self.media.clone(),
        }
    }
}

fn of_tool(tool: &ToolUse) -> (String, String, String) {
    let arguments = serde_json::from_str(&tool.arguments);
    let arguments = arguments.map_or_else(|_| tool.arguments.clone(), |value| canonical(&value));
    (tool.id.clone(), tool.name.clone(), arguments)
}

/// The texts of a content, and the parts that are none.
fn content(content: &Value) -> (Vec<String>, Vec<String>) {
    let (mut texts, mut media) = (vec![], vec![]);
    match content {
        Value::String(text) => texts.push(text.clone()),
        Value::Array(parts) => {
            for part in parts {
                match part["text"].as_str().or_else(|| part.as_str()) {
                    Some(text) => texts.push(text.to_owned()),
                    None => media.push(canonical(part)),
                }
            }
        }
        Value::Null => {}
        other => media.push(canonical(other)),
    }
    (texts, media)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn identity(message: &Value) -> Option<Identity> {
        Said::read(message).map(|said| said.identity())
    }

    #[test]
    fn history_in_other_words_is_the_same() {
        let calls = json!([{"id": "c1", "type": "function",
            "function": {"name": "f", "arguments": "{\"b\":1, \"a\": 2}"}}]);
        let said = json!({"role": "assistant", "content": [{"type": "text", "text": " hi\n", "cache_control": {}}],
            "reasoning_content": "thought", "tool_calls": calls});
        let used = ToolUse { id: "c1".into(), name: "f".into(), arguments: "{\"a\":2,\"b\":1.0}".into() };
        assert_eq!(identity(&said), Some(Said::reply("hi".into(), vec![used]).identity()));
        let nothing = Said::reply(String::new(), vec![]).identity();
        assert_eq!(identity(&json!({"role": "assistant", "content": null})), Some(nothing));
        let thought = Said::reply("<think>\nhm\n</think>\n\nhi".into(), vec![]).identity();
        assert_eq!(identity(&json!({"role": "assistant", "content": "hi"})), Some(thought));
        let user = |text: &str| identity(&json!({"role": "user", "content": text}));
        assert_ne!(user("a"), user("b"));
        assert_ne!(user("</think>a"), user("a"));
        assert_eq!(identity(&json!({"content": "a"})), None);
        let image = json!({"role": "user", "content": [{"type": "image_url"}, "a"]});
        assert_ne!(identity(&image), user("a"));
    }
}
