//! What a call was asked and what it answered, message by message, in the form in which harnesses' messages are
//! compared: role, text without white space around it, names and parsed arguments of tool calls, and their ids. How
//! reasoning came back, and how arguments were printed, is kept beside that and bears on no comparison.
//!
//! Messages are those of the chat request that went upstream, or that the client's request makes.

use std::borrow::Cow;
use std::collections::HashMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::protocol::chat::Reply;
pub(super) use crate::protocol::said::Role;
use crate::protocol::said::{Identity, Said, ToolUse};
use crate::protocol::translate::ReplyNames;
use crate::protocol::{messages, responses};
use crate::record::{Call, ChoiceId, ClientApi};

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
        let id = self.add(Said::read(&serde_json::from_str(text).ok()?)?);
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
        let said = Said::reply(call.text.clone().unwrap_or_default(), tool_uses.collect());
        if said.parts.iter().all(|text| text.trim().is_empty()) && said.tool_uses.is_empty() {
            return None;
        }
        Some(self.add(said))
    }

    fn add(&mut self, said: Said) -> MessageId {
        let known = self.identities.len();
        let identity = *self.identities.entry(said.identity()).or_insert(known);
        let Said { role, parts, reasoning, tool_uses, .. } = said;
        self.messages.push(Message { role, parts, reasoning, tool_uses, identity });
        self.messages.len() - 1
    }
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

/// What calls were asked and answered, without their bodies: each message is kept once, however many calls have it. So
/// the calls of a session can be heard one after another, and need not be in memory together.
#[derive(Debug, Default)]
pub struct Heard {
    pub(super) texts: Texts,
    calls: HashMap<ChoiceId, Turn>,
}

/// What one call was asked and answered.
#[derive(Debug, Clone, Default)]
pub(super) struct Turn {
    /// `None`: it cannot be read.
    pub(super) conversation: Option<Conversation>,
    pub(super) reply: Option<MessageId>,
    pub(super) thought: Thought,
}

/// What the model thought before it answered, where the upstream told it apart from the text.
#[derive(Debug, Clone, Default)]
pub(super) enum Thought {
    /// Nobody tells whether it thought anything.
    #[default]
    Untold,
    /// What there is stands in the call's response, and is read when it is asked for.
    InResponse,
    Told(Option<String>),
}

impl Heard {
    /// Takes in a call with its bodies, and all that has to be known of it later.
    pub fn hear(&mut self, call: &Call) {
        let mut heard = self.read(call);
        if matches!(heard.thought, Thought::InResponse) {
            heard.thought = Thought::Told(reasoning(call));
        }
        self.calls.insert(call.choice(), heard);
    }

    /// What was heard of a call, or what it says itself.
    pub(super) fn of(&mut self, call: &Call) -> Turn {
        self.calls.remove(&call.choice()).unwrap_or_else(|| self.read(call))
    }

    fn read(&mut self, call: &Call) -> Turn {
        let tells_reasoning = call.upstream_api == ClientApi::OpenaiChat && call.response.is_some();
        Turn {
            conversation: self.texts.conversation(call),
            reply: self.texts.reply(call),
            thought: if tells_reasoning { Thought::InResponse } else { Thought::Untold },
        }
    }
}

impl Thought {
    /// Whether it is told what the model thought, if it thought anything.
    pub(super) const fn is_told(&self) -> bool {
        !matches!(self, Self::Untold)
    }

    /// What the model thought, of the call that it is of.
    pub(super) fn text(&self, call: &Call) -> Option<String> {
        match self {
            Self::Untold => None,
            Self::InResponse => reasoning(call),
            Self::Told(text) => text.clone(),
        }
    }
}

fn reasoning(call: &Call) -> Option<String> {
    let text = call.response.as_ref()?.get();
    let mut reply = Reply::default();
    match serde_json::from_str::<Vec<&RawValue>>(text) {
        // What cannot be read says nothing of reasoning.
        Ok(events) => events.iter().for_each(|event| drop(reply.feed(event.get().as_bytes()))),
        Err(_) => drop(reply.feed(text.as_bytes())),
    }
    let choice = reply.choices.remove(&call.choice_index)?;
    Some(choice.reasoning).filter(|text| !text.is_empty())
}
