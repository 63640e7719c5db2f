//! Why a call does not extend the one whose history it has: its messages are compared with those of that call, and where
//! they are the same, what was printed and what was sampled.
//!
//! Nothing is guessed: [`BreakReason::Unknown`] where what is captured does not tell.

use super::conversation::{self, Message, MessageId, Role};
use super::lineage::Lineage;
use super::threads::{NodeId, Threads};
use super::trie::common;
use crate::record::{Call, CallId, Position};

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
        if same < now.head.max(before.head) {
            return Some((BreakReason::SystemChanged, Some(same)));
        }
        if now.tools != before.tools {
            return Some((BreakReason::ToolsChanged, None));
        }
        if same < expected.len() {
            let rest = &now.messages[same..];
            let is_later_part = |from: usize| {
                let part = &expected[from..];
                !part.is_empty() && self.threads.common(part, rest) == part.len()
            };
            let is_cut = (same + 1..expected.len()).any(is_later_part);
            let has_summary = self.threads.summary_between(self.id, self.from).is_some();
            return match () {
                () if is_cut || has_summary => Some((BreakReason::HistoryCompacted, Some(same))),
                // It ends before what is there: nothing in it is another.
                () if rest.is_empty() => None,
                () => Some((BreakReason::MessageEdited, Some(same))),
            };
        }
        self.printed(&now.messages)
    }

    /// The messages are the same: what was printed otherwise.
    fn printed(&self, messages: &[MessageId]) -> Option<Found> {
        let own = self.lineage.calls.iter().map(|one| &one.call);
        let last = self.threads.nodes[self.from].call;
        let until = own.take_while(|call| call.choice() != last.choice()).chain([last]);
        // The last one that begins to answer before the token.
        let call = until.filter(|call| prompt(call).len() <= self.token).last()?;
        let node = self.threads.node(call.choice())?;
        let at = self.threads.nodes[node].conversation.as_ref()?.messages.len();
        let (reply, now) = (self.message(self.threads.nodes[node].reply?), self.message(*messages.get(at)?));
        let (start, end) = (prompt(call).len(), prompt(call).len() + sampled(call).len());
        if self.token >= end {
            return self.behind(&self.threads.whole(self.from), messages, at);
        }
        let is_there = |text: &str| !text.trim().is_empty();
        let of_response = conversation::reasoning(call);
        let thought = Some(reply.reasoning.as_str()).filter(|text| is_there(text)).or(of_response.as_deref());
        if let Some(thought) = thought.filter(|text| is_there(text)) {
            if !is_there(&now.reasoning) {
                return Some((BreakReason::ReasoningDropped, Some(at)));
            }
            if now.reasoning.trim() != thought.trim() {
                return Some((BreakReason::MessageEdited, Some(at)));
            }
            if self.is_left_out(call, reply) || self.is_without(call, thought) {
                return Some((BreakReason::ReasoningDropped, Some(at)));
            }
            if now.reasoning != thought {
                return Some((BreakReason::WhitespaceChanged, Some(at)));
            }
            // Whether the template prints all of it, only texts can tell.
            self.decode?;
        }
        if reply.text() != now.text() {
            return Some((BreakReason::WhitespaceChanged, Some(at)));
        }
        let printed = |message: &Message| -> Vec<String> {
            message.tool_uses.iter().map(|tool| tool.arguments.clone()).collect()
        };
        if printed(reply) != printed(now) || self.is_in_arguments(call, reply, start) {
            return Some((BreakReason::ArgumentsReserialised, Some(at)));
        }
        self.is_same_text(call).then_some((BreakReason::Retokenised, Some(at)))
    }

    /// The difference is behind a reply: in what the template prints around it, or in the messages that follow.
    fn behind(&self, expected: &[MessageId], messages: &[MessageId], reply: usize) -> Option<Found> {
        let both = expected.iter().zip(messages).enumerate().skip(reply + 1);
        let mut others = both.filter(|(_, (a, b))| self.message(**a).role != Role::Assistant && a != b);
        let other = others.find(|(_, (a, b))| self.message(**a).text() != self.message(**b).text());
        other.map(|(at, _)| (BreakReason::WhitespaceChanged, Some(at)))
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
