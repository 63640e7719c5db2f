//! What a call was asked and what it answered, message by message, in the form in which harnesses' messages are
//! compared: role, text without white space around it, names and parsed arguments of tool calls, and their ids. How
//! reasoning came back, and how arguments were printed, is kept beside that and bears on no comparison.
//!
//! Messages are those of the chat request that went upstream, or that the client's request makes.

use std::borrow::Cow;
use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::protocol::canonical::canonical;
use crate::protocol::chat::Reply;
use crate::protocol::translate::ReplyNames;
use crate::protocol::{messages, responses};
use crate::record::{Call, ClientApi};

/// Who says a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Role {
    /// And developers.
    System,
    User,
    Assistant,
    Tool,
    Other,
}

/// A tool call of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ToolUse {
    pub(super) id: String,
    pub(super) name: String,
    /// As they were printed.
    pub(super) arguments: String,
}

/// A message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) role: Role,
    /// The texts of its parts.
    pub(super) parts: Vec<String>,
    pub(super) reasoning: String,
    pub(super) tool_uses: Vec<ToolUse>,
    /// Equal for messages that are the same.
    pub(super) identity: usize,
}

impl Message {
    /// All of its text, as it was printed.
    pub(super) fn text(&self) -> Cow<'_, str> {
        match self.parts.as_slice() {
            [one] => Cow::Borrowed(one),
            parts => Cow::Owned(parts.concat()),
        }
    }
}

/// What two messages have in common that are the same.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Identity {
    role: Role,
    text: String,
    tool_uses: Vec<(String, String, String)>,
    /// Of a tool's message.
    answers: String,
    /// Parts that are no text.
    media: Vec<String>,
}

/// A message by its place among [`Texts`].
pub(super) type MessageId = usize;

/// What a call was asked.
#[derive(Debug, Clone)]
pub(super) struct Conversation {
    pub(super) messages: Vec<MessageId>,
    /// How many system messages it begins with.
    pub(super) head: usize,
    /// Equal for lists of tools that were printed alike; `None`: no tools.
    pub(super) tools: Option<usize>,
}

/// Messages of many calls, each read once however many calls have it.
#[derive(Debug, Default)]
pub(super) struct Texts {
    messages: Vec<Message>,
    by_text: HashMap<Box<str>, MessageId>,
    identities: HashMap<Identity, usize>,
    tools: HashMap<Box<str>, usize>,
}

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    messages: Vec<&'a RawValue>,
    #[serde(borrow, default)]
    tools: Option<&'a RawValue>,
    #[serde(borrow, default)]
    functions: Option<&'a RawValue>,
}

impl Texts {
    pub(super) fn get(&self, id: MessageId) -> &Message {
        &self.messages[id]
    }

    pub(super) fn identity(&self, id: MessageId) -> usize {
        self.messages[id].identity
    }

    /// `None` if the call has no body, or one that is no conversation.
    pub(super) fn conversation(&mut self, call: &Call) -> Option<Conversation> {
        let body = chat_request(call)?;
        let body: Body<'_> = serde_json::from_str(&body).ok()?;
        let messages: Option<Vec<MessageId>> =
            body.messages.iter().map(|message| self.message(message.get())).collect();
        let messages = messages?;
        let head = messages.iter().take_while(|id| self.get(**id).role == Role::System).count();
        let is_list = |tools: &&RawValue| !matches!(tools.get(), "null" | "[]");
        let tools = body.tools.filter(is_list).or(body.functions.filter(is_list));
        let known = self.tools.len();
        let tools = tools.map(|tools| *self.tools.entry(tools.get().into()).or_insert(known));
        Some(Conversation { messages, head, tools })
    }

    fn message(&mut self, text: &str) -> Option<MessageId> {
        if let Some(known) = self.by_text.get(text) {
            return Some(*known);
        }
        let value: Value = serde_json::from_str(text).ok()?;
        let role = match value["role"].as_str()? {
            "system" | "developer" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" | "function" => Role::Tool,
            _ => Role::Other,
        };
        let (parts, media) = content(&value["content"]);
        let reasoning = ["reasoning_content", "reasoning"].iter().find_map(|name| value[name].as_str());
        let tool_uses = value["tool_calls"].as_array().into_iter().flatten().map(|call| ToolUse {
            id: call["id"].as_str().unwrap_or_default().to_owned(),
            name: call["function"]["name"].as_str().unwrap_or_default().to_owned(),
            arguments: match &call["function"]["arguments"] {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            },
        });
        let said = Said { role, parts, reasoning: reasoning.unwrap_or_default().to_owned(), media };
        let answers = value["tool_call_id"].as_str().unwrap_or_default();
        let id = self.add(said, tool_uses.collect(), answers.to_owned());
        self.by_text.insert(text.into(), id);
        Some(id)
    }

    /// The reply as a message of the next request; `None` if it says nothing.
    pub(super) fn reply(&mut self, call: &Call) -> Option<MessageId> {
        let tool_uses = call.tool_calls.iter().flatten().map(|tool| ToolUse {
            id: tool.id.clone(),
            name: tool.name.clone(),
            arguments: tool.arguments.clone(),
        });
        let tool_uses: Vec<ToolUse> = tool_uses.collect();
        let text = call.text.clone().unwrap_or_default();
        if text.trim().is_empty() && tool_uses.is_empty() {
            return None;
        }
        let parts = vec![text];
        let said = Said { role: Role::Assistant, parts, reasoning: String::new(), media: vec![] };
        Some(self.add(said, tool_uses, String::new()))
    }

    fn add(&mut self, mut said: Said, tool_uses: Vec<ToolUse>, answers: String) -> MessageId {
        if said.role == Role::Assistant {
            said.split_thinking();
        }
        let identity = Identity {
            role: said.role,
            text: said.parts.concat().trim().to_owned(),
            tool_uses: tool_uses.iter().map(of_tool).collect(),
            answers,
            media: said.media,
        };
        let known = self.identities.len();
        let identity = *self.identities.entry(identity).or_insert(known);
        let Said { role, parts, reasoning, .. } = said;
        self.messages.push(Message { role, parts, reasoning, tool_uses, identity });
        self.messages.len() - 1
    }
}

/// A message in the making.
struct Said {
    role: Role,
    parts: Vec<String>,
    reasoning: String,
    media: Vec<String>,
}

impl Said {
    /// Thinking that stands before the text, as engines without a reasoning parser give it. Templates that open it
    /// themselves leave only its end.
    fn split_thinking(&mut self) {
        let text = self.parts.concat();
        let Some((before, after)) = text.split_once("</think>") else {
            return;
        };
        let thinking = before.trim_start();
        let thinking = thinking.strip_prefix("<think>").unwrap_or(thinking);
        if !thinking.contains("<think>") && self.reasoning.is_empty() {
            self.reasoning = thinking.to_owned();
            self.parts = vec![after.to_owned()];
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
                match part["text"].as_str() {
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

/// The chat request that the call's prompt was rendered from; `None` if there is none.
#[must_use]
pub fn chat_request(call: &Call) -> Option<Cow<'_, str>> {
    if call.upstream_api == ClientApi::OpenaiChat
        && let Some(body) = &call.upstream_request
    {
        return Some(Cow::Borrowed(body.get()));
    }
    let body = call.client_request.as_ref()?;
    let names = || ReplyNames { call_id: String::new(), model: String::new(), created: 0 };
    let translation = match call.client_api {
        ClientApi::OpenaiChat => return Some(Cow::Borrowed(body.get())),
        ClientApi::AnthropicMessages => messages::translate(body.bytes(), names()),
        ClientApi::OpenaiResponses => responses::translate(body.bytes(), names(), None),
        _ => return None,
    };
    String::from_utf8(translation.ok()?.chat.to_vec()).ok().map(Cow::Owned)
}

/// Whether the reply says what the model thought, if it thought anything.
pub(super) fn tells_reasoning(call: &Call) -> bool {
    call.upstream_api == ClientApi::OpenaiChat && call.response.is_some()
}

/// What the model thought before it answered, where the upstream told it apart from the text.
pub(super) fn reasoning(call: &Call) -> Option<String> {
    let text = call.response.as_ref().filter(|_| tells_reasoning(call))?.get();
    let mut reply = Reply::default();
    match serde_json::from_str::<Vec<&RawValue>>(text) {
        // What cannot be read says nothing of reasoning.
        Ok(events) => events.iter().for_each(|event| drop(reply.feed(event.get().as_bytes()))),
        Err(_) => drop(reply.feed(text.as_bytes())),
    }
    let choice = reply.choices.remove(&call.choice_index)?;
    Some(choice.reasoning).filter(|text| !text.is_empty())
}
