//! Which call each lineage of a session comes from: the one that it goes on from with its history rewritten, the one
//! whose tool call started it, the one whose reply it begins with. Read from what calls were asked and answered.
//!
//! Invariants:
//! - Nothing is guessed: where several calls could be meant, or what stands there is too short to be anybody's, none is.
//! - Calls that their harness tells apart (`harness_conversation_id`) never go on from each other.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde_json::Value;

use super::conversation::{Conversation, Heard, MessageId, Role, Texts, Thought, Turn};
use super::lineage::{Lineage, order};
use crate::record::{Call, CallId, ChoiceId};

/// A text that is shorter may stand in a message by accident.
const LEAST_TASK: usize = 12;
const LEAST_REPLY: usize = 24;
const LEAST_SUMMARY: usize = 24;

/// A call of a lineage, with what it says.
pub(super) struct Node<'a> {
    pub(super) call: &'a Arc<Call>,
    /// The lineage whose own it is, by its place in the session.
    pub(super) lineage: usize,
    /// `None`: it cannot be read.
    pub(super) conversation: Option<Conversation>,
    pub(super) reply: Option<MessageId>,
    pub(super) thought: Thought,
}

/// A call by its place among [`Threads::nodes`].
pub(super) type NodeId = usize;

/// What a lineage comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// Nothing that is known.
    None,
    /// The record names the call.
    Recorded(CallId),
    /// Its first own call extends this one, as another lineage does.
    Forked(NodeId),
    /// The same question as this call's, answered again.
    Asked(NodeId),
    /// This call's question, the last message of which got something added.
    Edited(NodeId),
    /// This call's history with its reply, which is no longer made of the same tokens.
    Continued(NodeId),
    /// In the place of a history stands what this call said.
    Compacted(NodeId),
    /// A tool call of this one asked for it.
    Started(NodeId),
}

impl Origin {
    /// The call, if it is one of the session's.
    pub(super) const fn node(self) -> Option<NodeId> {
        match self {
            Self::None | Self::Recorded(_) => None,
            Self::Forked(node)
            | Self::Asked(node)
            | Self::Edited(node)
            | Self::Continued(node)
            | Self::Compacted(node)
            | Self::Started(node) => Some(node),
        }
    }

    /// Whether what it comes from is of the same agent.
    pub(super) const fn is_same_agent(self) -> bool {
        !matches!(self, Self::None | Self::Recorded(_) | Self::Started(_))
    }
}

/// The calls of a session and what its lineages come from.
pub(super) struct Threads<'a> {
    pub(super) texts: Texts,
    /// In time.
    pub(super) nodes: Vec<Node<'a>>,
    /// Of each lineage.
    pub(super) origins: Vec<Origin>,
    /// Of each lineage: its first own call.
    pub(super) starts: Vec<NodeId>,
    by_choice: HashMap<ChoiceId, NodeId>,
    /// Calls by what they answered.
    replies: HashMap<usize, Vec<NodeId>>,
    /// Calls by the ids of their tool calls.
    by_tool: HashMap<String, Vec<NodeId>>,
}

impl<'a> Threads<'a> {
    /// Of the lineages of one session, in the order of their numbers. Calls that were not heard have their bodies.
    pub(super) fn of(session: &'a [Lineage], mut heard: Heard) -> Self {
        let own = session.iter().enumerate();
        let own = own.flat_map(|(lineage, of)| of.own().map(move |one| (lineage, &one.call)));
        let mut own: Vec<(usize, &Arc<Call>)> = own.collect();
        own.sort_by_key(|(_, call)| order(call));
        let nodes = own.into_iter().map(|(lineage, call)| {
            let Turn { conversation, reply, thought } = heard.of(call);
            Node { call, lineage, conversation, reply, thought }
        });
        let nodes: Vec<Node<'_>> = nodes.collect();
        let texts = heard.texts;
        let by_choice = nodes.iter().enumerate().map(|(id, node)| (node.call.choice(), id)).collect();
        let mut replies: HashMap<usize, Vec<NodeId>> = HashMap::new();
        let mut by_tool: HashMap<String, Vec<NodeId>> = HashMap::new();
        for (id, reply) in nodes.iter().enumerate().filter_map(|(id, node)| Some((id, node.reply?))) {
            replies.entry(texts.identity(reply)).or_default().push(id);
            for tool in texts.get(reply).tool_uses.iter().filter(|tool| !tool.id.is_empty()) {
                by_tool.entry(tool.id.clone()).or_default().push(id);
            }
        }
        let mut threads = Self { texts, nodes, origins: vec![], starts: vec![], by_choice, replies, by_tool };
        threads.starts = session.iter().map(|lineage| threads.by_choice[&lineage.start().choice()]).collect();
        let mut started = HashSet::new();
        // Their numbers are in the order of their first own calls.
        for lineage in session {
            let origin = threads.origin(lineage, &mut started);
            threads.origins.push(origin);
        }
        threads
    }

    /// The call of a choice, if it is in a lineage.
    pub(super) fn node(&self, choice: ChoiceId) -> Option<NodeId> {
        self.by_choice.get(&choice).copied()
    }

    fn origin(&self, lineage: &Lineage, started: &mut HashSet<(NodeId, usize)>) -> Origin {
        let id = self.starts[lineage.index as usize];
        let forked = lineage.forked_from().and_then(|call| self.node(call.choice()));
        // One that extends another call's ids may name that call.
        if let Some(parent) = self.nodes[id].call.parent_call_id.filter(|_| forked.is_none()) {
            let parent_node = self.nodes.iter().position(|node| node.call.call_id == parent);
            return parent_node.map_or(Origin::Recorded(parent), Origin::Started);
        }
        let plain = forked.map_or(Origin::None, Origin::Forked);
        let Some(conversation) = &self.nodes[id].conversation else {
            return plain;
        };
        // One on its own way it extends as it is.
        let extended: HashSet<ChoiceId> = lineage.calls.iter().map(|one| one.call.choice()).collect();
        if let Some(from) = self.answered(id, conversation)
            && !extended.contains(&self.nodes[from].call.choice())
        {
            return Origin::Continued(from);
        }
        if let Some(origin) = self.asked(id, conversation) {
            return origin;
        }
        if forked.is_some() {
            return plain;
        }
        if let Some(by) = self.started(id, conversation, started) {
            return Origin::Started(by);
        }
        let before = self.same_agent_before(id);
        before.and_then(|before| self.summary_between(id, before)).map_or(Origin::None, Origin::Compacted)
    }

    /// The last earlier call with the system messages and tools of this one, which tell agents apart.
    pub(super) fn same_agent_before(&self, id: NodeId) -> Option<NodeId> {
        let own = self.nodes[id].conversation.as_ref()?;
        let is_told_apart = own.head > 0 || own.tools.is_some();
        let of_agent = |of: &Conversation| {
            let head = &own.messages[..own.head];
            of.head == own.head && of.tools == own.tools && self.common(&of.messages, head) == head.len()
        };
        let mut before = (0..id).rev().filter(|other| is_told_apart && self.may_be_one(*other, id));
        before.find(|other| self.nodes[*other].conversation.as_ref().is_some_and(of_agent))
    }

    /// Whether the harness does not say that these are of different conversations.
    fn may_be_one(&self, a: NodeId, b: NodeId) -> bool {
        let [a, b] = [a, b].map(|id| self.nodes[id].call);
        let ids = a.harness_conversation_id.as_ref().zip(b.harness_conversation_id.as_ref());
        a.kind == b.kind && ids.is_none_or(|(a, b)| a == b)
    }

    /// What a call was asked and what it answered.
    pub(super) fn whole(&self, id: NodeId) -> Vec<MessageId> {
        let node = &self.nodes[id];
        let asked = node.conversation.iter().flat_map(|conversation| &conversation.messages);
        asked.chain(&node.reply).copied().collect()
    }

    /// How many first messages of both are the same.
    pub(super) fn common(&self, a: &[MessageId], b: &[MessageId]) -> usize {
        let same = |(a, b): &(&MessageId, &MessageId)| self.texts.identity(**a) == self.texts.identity(**b);
        a.iter().zip(b).take_while(same).count()
    }

    /// The call whose reply, or tool call, is the last captured one in this call's prompt, of several that answered the
    /// same the one with most of the history; or the one whose question has another answer here, if that is later.
    fn answered(&self, id: NodeId, conversation: &Conversation) -> Option<NodeId> {
        let by_reply = self.by_reply(id, conversation);
        // What stands in the place of a reply is nobody's: a part of it, or other words.
        let is_reply = |at: usize| {
            conversation
                .messages
                .get(at)
                .is_some_and(|message| self.texts.get(*message).role == Role::Assistant)
        };
        let replaced = |other: NodeId| {
            let of = self.nodes[other].conversation.as_ref()?;
            let all = of.messages.len();
            let is_alike = of.tools == conversation.tools && all > of.head && is_reply(all);
            (is_alike && self.common(&of.messages, &conversation.messages) == all).then_some((all, other))
        };
        let before = (0..id).filter(|other| self.may_be_one(*other, id));
        let by_question = before.filter_map(replaced).max();
        match (by_reply, by_question) {
            (Some((at, reply)), Some((later, question))) => Some(if later > at { question } else { reply }),
            (one, other) => one.or(other).map(|(_, call)| call),
        }
    }

    /// Where the last captured reply stands in a conversation, and whose it is.
    fn by_reply(&self, id: NodeId, conversation: &Conversation) -> Option<(usize, NodeId)> {
        for (at, message) in conversation.messages.iter().enumerate().rev() {
            let message = self.texts.get(*message);
            if message.role != Role::Assistant {
                continue;
            }
            let ids = message.tool_uses.iter().filter_map(|tool| self.by_tool.get(&tool.id));
            let said = self.replies.get(&message.identity).into_iter().chain(ids).flatten().copied();
            let before = said.filter(|other| *other < id && self.may_be_one(*other, id));
            let is_own_words = !message.tool_uses.is_empty() || message.text().trim().len() >= LEAST_REPLY;
            let is_known = |other: &NodeId| is_own_words || self.same_history(*other, conversation) > 0;
            let best = before.filter(is_known).max_by_key(|other| {
                let of = self.nodes[*other].conversation.as_ref();
                let is_in_place = of.is_some_and(|of| of.messages.len() == at);
                let has_tools = of.is_some_and(|of| of.tools == conversation.tools);
                (self.same_history(*other, conversation), is_in_place, has_tools, *other)
            });
            if let Some(best) = best {
                return Some((at, best));
            }
        }
        None
    }

    /// Messages behind the system's that this call's history has in common with a conversation, from the first on.
    fn same_history(&self, id: NodeId, conversation: &Conversation) -> usize {
        let head = self.nodes[id].conversation.as_ref().map_or(0, |own| own.head);
        self.common(&self.whole(id)[head..], &conversation.messages[conversation.head..])
    }

    /// An earlier call that was asked the same, or the same with something added to one message.
    fn asked(&self, id: NodeId, conversation: &Conversation) -> Option<Origin> {
        for other in (0..id).rev().filter(|other| self.may_be_one(*other, id)) {
            let Some(of) = &self.nodes[other].conversation else { continue };
            let (own, others) = (&conversation.messages, &of.messages);
            if (of.tools, of.head, others.len()) != (conversation.tools, conversation.head, own.len()) {
                continue;
            }
            let both = others.iter().zip(own).map(|(a, b)| (self.texts.get(*a), self.texts.get(*b)));
            let mut differ = both.filter(|(a, b)| a.identity != b.identity);
            let Some((asked, now)) = differ.next() else {
                return Some(Origin::Asked(other));
            };
            let (before, text) = (asked.text(), now.text());
            let before = before.trim();
            // What both have besides tells as much as a longer text.
            let is_longer = match own.len() > conversation.head + 1 {
                true => !before.is_empty() && text.trim().starts_with(before),
                false => before.len() >= LEAST_TASK && text.contains(before),
            };
            if is_longer && asked.role == now.role && differ.next().is_none() {
                return Some(Origin::Edited(other));
            }
        }
        None
    }

    /// The call whose reply stands for the part of `from`'s history that `id` has no longer.
    pub(super) fn summary_between(&self, id: NodeId, from: NodeId) -> Option<NodeId> {
        let history = self.whole(from);
        let messages = &self.nodes[id].conversation.as_ref()?.messages;
        let is_shorter = messages.len() < history.len() && self.common(&history, messages) < history.len();
        is_shorter.then(|| self.summary(id, &history))?
    }

    /// The last earlier call whose reply, or the summary in it, stands in what a user or the system says in this one, and not in
    /// `history`.
    pub(super) fn summary(&self, id: NodeId, history: &[MessageId]) -> Option<NodeId> {
        let conversation = self.nodes[id].conversation.as_ref()?;
        let known: HashSet<usize> = history.iter().map(|message| self.texts.identity(*message)).collect();
        let said: Vec<&str> = conversation
            .messages
            .iter()
            .map(|message| self.texts.get(*message))
            .filter(|message| matches!(message.role, Role::User | Role::System))
            .filter(|message| !known.contains(&message.identity))
            .flat_map(|message| message.parts.iter().map(String::as_str))
            .collect();
        (0..id).rev().find(|other| {
            let reply = self.nodes[*other].reply.map(|reply| self.texts.get(reply));
            reply.filter(|reply| reply.tool_uses.is_empty()).is_some_and(|reply| {
                let text = reply.text();
                // Claude Code takes the mark off.
                let inner = text.split_once("<summary>").map_or(&*text, |(_, inner)| inner);
                let inner = inner.split_once("</summary>").map_or(inner, |(inner, _)| inner).trim();
                inner.len() >= LEAST_SUMMARY && said.iter().any(|said| said.contains(inner))
            })
        })
    }

    /// The one earlier call with a tool call that asks for this and that nothing else was started by.
    fn started(
        &self,
        id: NodeId,
        conversation: &Conversation,
        started: &mut HashSet<(NodeId, usize)>,
    ) -> Option<NodeId> {
        let behind_head = conversation.messages.iter().skip(conversation.head);
        let first = behind_head.map(|message| self.texts.get(*message));
        let task = first.into_iter().find(|message| message.role == Role::User)?;
        let tasks: Vec<&str> = task.parts.iter().map(|part| part.trim()).collect();
        let is_task = |text: &str| text.trim().len() >= LEAST_TASK && tasks.contains(&text.trim());
        let mut asking = vec![];
        for other in 0..id {
            let Some(reply) = self.nodes[other].reply else { continue };
            for (at, tool) in self.texts.get(reply).tool_uses.iter().enumerate() {
                let arguments = serde_json::from_str::<Value>(&tool.arguments);
                let has_task = arguments.is_ok_and(|arguments| any_text(&arguments, &is_task));
                if has_task && !started.contains(&(other, at)) {
                    asking.push((other, at));
                }
            }
        }
        let (&(call, at), others) = asking.split_first()?;
        let is_one = others.iter().all(|(other, _)| *other == call);
        is_one.then(|| {
            started.insert((call, at));
            call
        })
    }
}

fn any_text(value: &Value, is_it: &impl Fn(&str) -> bool) -> bool {
    match value {
        Value::String(text) => is_it(text),
        Value::Array(items) => items.iter().any(|item| any_text(item, is_it)),
        Value::Object(members) => members.values().any(|member| any_text(member, is_it)),
        _ => false,
    }
}
