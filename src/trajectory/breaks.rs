//! Why a call does not extend the one whose history it has: its messages are compared with those of that call, and where
//! they are the same, what was printed and what was sampled.
//!
//! Nothing is guessed: [`BreakReason::Unknown`] where what is captured does not tell.

use super::conversation::{Message, MessageId, Role};
use super::lineage::Lineage;
use super::threads::{Node, NodeId, Threads};
use super::trie::common;
use crate::record::{Call, CallId, Position};

/// Bytes, and tokens, that a template prints at most between a message and what was thought.
const MARK: usize = 64;

/// Texts of ids, special tokens included.
pub type Decode<'a> = &'a dyn Fn(&[u32]) -> String;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal),+ $(,)?) => {
        /// Why a prompt does not begin with the tokens of the call before it. The first of these that is so.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum BreakReason { $($(#[$doc])* $name),+ }

        impl BreakReason {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Its name in tables and metrics.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text),+ }
            }

            /// The column of a run's metrics that counts it.
            #[must_use]
            pub const fn column(self) -> &'static str {
                match self { $(Self::$name => concat!("breaks_", $text)),+ }
            }
        }
    };
}

reasons! {
    /// The system messages at the beginning are others.
    SystemChanged = "system_changed",
    /// Tools were added, taken away, reordered or described otherwise.
    ToolsChanged = "tools_changed",
    /// Messages are gone, and what a call said, or nothing, stands for them.
    HistoryCompacted = "history_compacted",
    /// A message says something else.
    MessageEdited = "message_edited",
    /// What the model thought is no longer in the prompt.
    ReasoningDropped = "reasoning_dropped",
    /// Arguments of a tool call are printed otherwise; their values are the same.
    ArgumentsReserialised = "arguments_reserialised",
    /// White space around a text is another.
    WhitespaceChanged = "whitespace_changed",
    /// The same text in other tokens.
    Retokenised = "retokenised",
    /// Nobody can tell.
    Unknown = "unknown",
}

/// Where a history was rewritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Break {
    pub reason: BreakReason,
    /// The call that it should have extended.
    pub from: CallId,
    /// The first token that differs from that call's prompt and completion.
    pub token: Position,
    /// The first message of the chat request that differs from that call's messages and reply, or the one whose tokens
    /// do. `None`: not known.
    pub message: Option<u32>,
}

impl Threads<'_> {
    /// Why the call `id` does not extend `from`, whose lineage this is.
    pub(super) fn broke(
        &self,
        id: NodeId,
        from: NodeId,
        lineage: &Lineage,
        decode: Option<Decode<'_>>,
    ) -> Break {
        let [now, before] = [id, from].map(|id| self.nodes[id].call);
        let token = shared(before, now);
        let found = Comparison { threads: self, id, from, lineage, token, decode }.reason();
        let (reason, message) = found.unwrap_or((BreakReason::Unknown, None));
        let message = message.and_then(|at| u32::try_from(at).ok());
        Break { reason, from: before.call_id, token: Position::new(token), message }
    }
}

fn prompt(call: &Call) -> &[u32] {
    call.prompt_token_ids.as_deref().unwrap_or_default()
}

fn sampled(call: &Call) -> &[u32] {
    call.sampled_ids().unwrap_or_default()
}

/// How many first tokens of a prompt are those of the prompt and completion before.
fn shared(before: &Call, now: &Call) -> usize {
    let (of_prompt, now) = (prompt(before), prompt(now));
    match common(of_prompt, now) {
        same if same < of_prompt.len() => same,
        same => same + common(sampled(before), &now[same..]),
    }
}

struct Comparison<'a> {
    threads: &'a Threads<'a>,
    id: NodeId,
    from: NodeId,
    lineage: &'a Lineage,
    token: usize,
    decode: Option<Decode<'a>>,
}

type Found = (BreakReason, Option<usize>);

impl Comparison<'_> {
    fn message(&self, id: MessageId) -> &Message {
        self.threads.texts.get(id)
    }

    /// `None`: nothing says.
    fn reason(&self) -> Option<Found> {
        let [now, before] = [self.id, self.from].map(|id| self.threads.nodes[id].conversation.as_ref());
        let (now, before) = (now?, before?);
        let expected = self.threads.whole(self.from);
        let same = self.threads.common(&expected, &now.messages);
        if let Some((at, thought)) = self.thought_gone(&expected) {
            let kept = now.messages.get(at).filter(|id| self.is_most_of(**id, expected[at]));
            let is_it = |id: &MessageId| ["", &thought].contains(&self.message(*id).reasoning.trim());
            if at < same || at == same && kept.is_some_and(is_it) {
                return Some((BreakReason::ReasoningDropped, Some(at)));
            }
        }
        let Some(call) = self.call_before() else {
            // In front of the first reply.
            return if same < now.head.max(before.head) {
                Some((BreakReason::SystemChanged, Some(same)))
            } else if now.tools != before.tools {
                Some((BreakReason::ToolsChanged, None))
            } else {
                self.rewritten(&expected, &now.messages, same)
            };
        };
        let node = self.threads.node(call.choice())?;
        let at = self.threads.nodes[node].conversation.as_ref()?.messages.len();
        let is_within = self.token < prompt(call).len() + sampled(call).len();
        if same <= at {
            // The thought comes before what was changed.
            let kept = now.messages.get(at).filter(|id| self.is_most_of(**id, expected[at]));
            let has_none = kept.is_some_and(|id| self.message(*id).reasoning.trim().is_empty());
            let is_without = same == at && is_within && has_none;
            if is_without && self.thought(call).is_some() {
                return Some((BreakReason::ReasoningDropped, Some(at)));
            }
            return self.rewritten(&expected, &now.messages, same);
        }
        if is_within {
            return self.printed(call, self.threads.nodes[node].reply?, *now.messages.get(at)?, at);
        }
        // Behind the reply: in what the template prints around it, or in the messages that follow.
        let is_reply = |id: &MessageId| self.message(*id).role == Role::Assistant;
        let next =
            expected.iter().skip(at + 1).position(is_reply).map_or(expected.len(), |next| at + 1 + next);
        if same < next {
            return self.rewritten(&expected, &now.messages, same);
        }
        let both = expected.iter().zip(&now.messages).enumerate().take(next).skip(at + 1);
        let mut both = both.map(|(at, (a, b))| (at, self.message(*a), self.message(*b)));
        let (other, ..) = both.find(|(_, a, b)| a.text() != b.text())?;
        Some((BreakReason::WhitespaceChanged, Some(other)))
    }

    /// Whether a reply says what the other one said, with or without its tool calls: clients leave out those that were
    /// cut off.
    fn is_most_of(&self, now: MessageId, before: MessageId) -> bool {
        let (now, before) = (self.message(now), self.message(before));
        let (said, text) = (before.text(), now.text());
        now.role == Role::Assistant && !said.trim().is_empty() && said.trim() == text.trim()
    }

    /// The last call that begins to answer before the token.
    fn call_before(&self) -> Option<&Call> {
        let own = self.lineage.calls.iter().map(|one| one.call.as_ref());
        let last: &Call = self.threads.nodes[self.from].call;
        let until = own.take_while(|call| call.choice() != last.choice()).chain([last]);
        until.filter(|call| prompt(call).len() <= self.token).last()
    }

    /// Messages are others from `same` on, or gone.
    fn rewritten(&self, expected: &[MessageId], messages: &[MessageId], same: usize) -> Option<Found> {
        let rest = messages.get(same..).filter(|_| same < expected.len())?;
        let is_later_part = |from: usize| {
            let part = &expected[from..];
            self.threads.common(part, rest) == part.len()
        };
        let is_cut = (same + 1..expected.len()).any(is_later_part);
        if is_cut || self.threads.summary_between(self.id, self.from).is_some() {
            return Some((BreakReason::HistoryCompacted, Some(same)));
        }
        // One that ends before what is there has nothing that is another.
        (!rest.is_empty()).then_some((BreakReason::MessageEdited, Some(same)))
    }

    /// A reply is the same message, and printed otherwise.
    fn printed(&self, call: &Call, reply: MessageId, now: MessageId, at: usize) -> Option<Found> {
        let (reply, now) = (self.message(reply), self.message(now));
        let start = prompt(call).len();
        if let Some(thought) = self.thought(call) {
            if now.reasoning.trim().is_empty() {
                return Some((BreakReason::ReasoningDropped, Some(at)));
            }
            if now.reasoning.trim() != thought.trim() {
                return Some((BreakReason::MessageEdited, Some(at)));
            }
            if self.is_left_out(call, reply) || self.is_without(call, &thought) {
                return Some((BreakReason::ReasoningDropped, Some(at)));
            }
            if now.reasoning != thought {
                return Some((BreakReason::WhitespaceChanged, Some(at)));
            }
            // Whether the template prints all of it, only texts can tell.
            self.decode?;
        }
        // Where nobody tells what was thought, it may be that: only texts can tell.
        let tells_reasoning = self.node(call).is_some_and(|node| node.thought.is_told());
        let is_told = tells_reasoning || self.decode.is_some();
        if reply.text() != now.text() {
            return is_told.then_some((BreakReason::WhitespaceChanged, Some(at)));
        }
        let printed = |message: &Message| -> Vec<String> {
            message.tool_uses.iter().map(|tool| tool.arguments.clone()).collect()
        };
        let is_printed_otherwise = printed(reply) != printed(now) && tells_reasoning;
        if is_printed_otherwise || self.is_in_arguments(call, reply, start) {
            return Some((BreakReason::ArgumentsReserialised, Some(at)));
        }
        self.is_same_text(call).then_some((BreakReason::Retokenised, Some(at)))
    }

    fn node(&self, call: &Call) -> Option<&Node<'_>> {
        self.threads.node(call.choice()).map(|node| &self.threads.nodes[node])
    }

    /// What the model thought before it said the reply, if anything.
    fn thought(&self, call: &Call) -> Option<String> {
        let node = self.node(call);
        let reply = node.and_then(|node| node.reply);
        let in_text = reply.map(|reply| self.message(reply).reasoning.clone());
        let is_there = |text: &String| !text.trim().is_empty();
        in_text.filter(is_there).or_else(|| node?.thought.text(call)).filter(is_there)
    }

    /// The message whose reasoning stood where the texts differ, and does not stand there any more; and that reasoning.
    fn thought_gone(&self, expected: &[MessageId]) -> Option<(usize, String)> {
        let decode = self.decode?;
        let [now, before] = [self.id, self.from].map(|id| self.threads.nodes[id].call);
        let whole = [prompt(before), sampled(before)].concat();
        let (text, at) = (decode(&whole), decode(&whole[..self.token]).len());
        let mut from = 0;
        let find = |piece: &str, from: usize| {
            let start = from + text.get(from..)?.find(piece)?;
            Some((start, start + piece.len()))
        };
        let find_all = |parts: &[String], from: usize| {
            let parts = parts.iter().map(|part| part.trim()).filter(|part| !part.is_empty());
            parts.fold(None, |found: Option<(usize, usize)>, part| {
                let next = find(part, found.map_or(from, |(_, end)| end));
                let Some((start, end)) = next else { return found };
                Some((found.map_or(start, |(first, _)| first), end))
            })
        };
        for (index, message) in expected.iter().enumerate() {
            let of_reply = (index + 1 == expected.len()).then(|| self.thought(before)).flatten();
            let thought = of_reply.as_deref().unwrap_or(&self.message(*message).reasoning).trim();
            // What was thought stands before what was said, or before what others said then.
            let own = find_all(&self.message(*message).parts, from);
            let next = || {
                let others = expected[index + 1..].iter().map(|message| self.message(*message));
                others.into_iter().find_map(|message| find_all(&message.parts, from))
            };
            let until = own.or_else(next).map_or(text.len(), |(start, _)| start);
            if !thought.is_empty()
                && let Some((start, end)) = find(thought, from).filter(|(start, _)| *start < until)
                && start <= at + MARK
                && (from..end).contains(&at)
            {
                let tokens = prompt(now).get(self.token.saturating_sub(MARK)..).unwrap_or_default();
                let tokens = &tokens[..tokens.len().min(2 * (MARK + thought.len()))];
                return (!decode(tokens).contains(thought)).then_some((index, thought.to_owned()));
            }
            from = own.map_or(from, |(_, end)| end);
            if from > at {
                return None;
            }
        }
        None
    }

    /// The tokens of the reply from the difference on, and those of the prompt.
    fn rests<'c>(&'c self, call: &'c Call, back: usize) -> (&'c [u32], &'c [u32]) {
        let start = prompt(call).len();
        let from = self.token.saturating_sub(back).max(start);
        (&sampled(call)[from - start..], &prompt(self.threads.nodes[self.id].call)[from..])
    }

    /// Some of the reply's tokens are left out, and the others follow as they were. They are more than there could be in
    /// its arguments, and in the white space of its text: what is left out is thought.
    fn is_left_out(&self, call: &Call, reply: &Message) -> bool {
        let arguments: usize = reply.tool_uses.iter().map(|tool| tool.arguments.len()).sum();
        let spaces = reply.text().bytes().filter(u8::is_ascii_whitespace).count();
        let (rest, now) = self.rests(call, 0);
        (arguments + spaces + 1..rest.len().saturating_sub(1)).any(|from| now.starts_with(&rest[from..]))
    }

    /// The text that the model thought is in its reply's tokens, and not in the prompt in their place.
    fn is_without(&self, call: &Call, thought: &str) -> bool {
        let Some(decode) = self.decode else { return false };
        let start = prompt(call).len();
        let now = &prompt(self.threads.nodes[self.id].call)[start..];
        let now = &now[..now.len().min(2 * sampled(call).len())];
        let thought = thought.trim();
        decode(sampled(call)).contains(thought) && !decode(now).contains(thought)
    }

    /// The difference is within the printed arguments of a tool call.
    fn is_in_arguments(&self, call: &Call, reply: &Message, start: usize) -> bool {
        let Some(decode) = self.decode.filter(|_| !self.is_same_text(call)) else { return false };
        let text = decode(sampled(call));
        let at = decode(&sampled(call)[..self.token - start]).len();
        let mut from = 0;
        reply.tool_uses.iter().any(|tool| {
            let Some(found) = text.get(from..).and_then(|rest| rest.find(&tool.arguments)) else {
                return false;
            };
            let range = from + found..from + found + tool.arguments.len();
            from = range.end;
            // A token may reach into them.
            range.start <= at + 1 && at <= range.end
        })
    }

    /// The rest of the reply's text stands in the prompt as well.
    fn is_same_text(&self, call: &Call) -> bool {
        let Some(decode) = self.decode else { return false };
        // A character may have begun before the difference.
        let (rest, now) = self.rests(call, 4);
        let now = &now[..now.len().min(4 * rest.len() + 16)];
        decode(now).starts_with(&decode(rest))
    }
}
