//! The derived table of lineages: whose each is, what it comes from, and why it does not go on from that.

use super::breaks::{Break, BreakReason, Decode};
use super::conversation::Heard;
use super::kinds::{Kinds, LineageKind};
use super::lineage::Lineage;
use super::threads::{Origin, Threads};
use crate::config::SideKind;
use crate::record::{CallId, CallKind, Position, SessionId};

/// How a lineage's parent is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParentBy {
    /// The record of its first call says so.
    Record,
    /// It extends that call's tokens, as another lineage does.
    Tokens,
    /// It asks what that call was asked, or something added to it.
    Question,
    /// It has that call's history and reply.
    History,
    /// That call's reply stands in its prompt: for the history that is gone, or as what is to be summed up.
    Reply,
    /// That call has a tool call with its task.
    ToolCall,
}

impl ParentBy {
    /// Its name in tables.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Record => "record",
            Self::Tokens => "tokens",
            Self::Question => "question",
            Self::History => "history",
            Self::Reply => "reply",
            Self::ToolCall => "tool_call",
        }
    }
}

/// The call that a lineage comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parent {
    pub call_id: CallId,
    pub by: ParentBy,
}

/// One lineage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineageRow {
    pub session_id: SessionId,
    pub index: u32,
    pub kind: LineageKind,
    /// Its own calls.
    pub calls: usize,
    /// Calls before them that are another lineage's.
    pub shared_calls: usize,
    pub first_call_id: CallId,
    pub last_call_id: CallId,
    /// Prompt and completion of the last call together.
    pub tokens: usize,
    /// What its own calls sampled.
    pub sampled_tokens: usize,
    pub parent: Option<Parent>,
    /// `None`: it goes on from its parent as that was, or begins a conversation of its own.
    pub broke: Option<Break>,
}

/// The row of the lineage that has its session to itself, if it may be an agent's: nothing is to be known of what its
/// calls say.
#[must_use]
pub fn only(session: &[Lineage]) -> Option<LineageRow> {
    let [one] = session else { return None };
    let is_agents = matches!(one.start().kind, CallKind::Policy | CallKind::Unknown);
    is_agents.then(|| row(one, LineageKind::Main, None, None))
}

/// Rows of the lineages of one session, in the order of their numbers. Calls that were not `heard` must have their bodies.
/// `decode` gives texts of the policy's tokens: without it more reasons are unknown.
#[must_use]
pub fn table(session: &[Lineage], heard: Heard, decode: Option<Decode<'_>>) -> Vec<LineageRow> {
    if let Some(only) = only(session) {
        return vec![only];
    }
    let threads = Threads::of(session, heard);
    let kinds = Kinds::of_threads(session, &threads);
    let rows = session.iter().map(|lineage| {
        let (kind, at) = (kinds.get(lineage), lineage.index as usize);
        let (start, origin) = (threads.starts[at], threads.origins[at]);
        let id = |node: usize| threads.nodes[node].call.call_id;
        let by = match origin {
            Origin::None => None,
            Origin::Recorded(call_id) => Some(Parent { call_id, by: ParentBy::Record }),
            Origin::Forked(node) => Some(Parent { call_id: id(node), by: ParentBy::Tokens }),
            Origin::Asked(node) | Origin::Edited(node) => {
                Some(Parent { call_id: id(node), by: ParentBy::Question })
            }
            Origin::Continued(node) => Some(Parent { call_id: id(node), by: ParentBy::History }),
            Origin::Compacted(node) => Some(Parent { call_id: id(node), by: ParentBy::Reply }),
            Origin::Started(node) => Some(Parent { call_id: id(node), by: ParentBy::ToolCall }),
        };
        let is_compaction = kind == LineageKind::Beside(SideKind::Compaction);
        let summed_up = threads.summary(start, &[]).filter(|_| by.is_none() && is_compaction);
        let summed_up = summed_up.map(|node| Parent { call_id: id(node), by: ParentBy::Reply });
        let from = match origin {
            Origin::Continued(from) | Origin::Edited(from) => Some(from),
            Origin::Compacted(_) => threads.same_agent_before(start),
            _ => None,
        };
        let broke =
            from.map(|from| threads.broke(start, from, &session[threads.nodes[from].lineage], decode));
        // One of the same agent, or one that nobody can read, may have a history; others begin a conversation.
        let may_have =
            threads.nodes[start].conversation.is_none() || threads.same_agent_before(start).is_some();
        let is_other = kind == LineageKind::Beside(SideKind::Other) && origin == Origin::None;
        let is_nobodys = is_other && may_have && at > 0;
        let nobodys = lineage.nearest.filter(|_| is_nobodys).map(|(nearest, tokens)| Break {
            reason: BreakReason::Unknown,
            from: nearest.call_id,
            token: Position::new(tokens),
            message: None,
        });
        row(lineage, kind, by.or(summed_up), broke.or(nobodys))
    });
    rows.collect()
}

fn row(lineage: &Lineage, kind: LineageKind, parent: Option<Parent>, broke: Option<Break>) -> LineageRow {
    let last = lineage.own().next_back().map_or(lineage.start(), |one| &one.call);
    let sampled = |ids: Option<&[u32]>| ids.map_or(0, <[u32]>::len);
    LineageRow {
        session_id: lineage.session_id.clone(),
        index: lineage.index,
        kind,
        calls: lineage.own().count(),
        shared_calls: lineage.calls.iter().filter(|one| !one.is_own).count(),
        first_call_id: lineage.start().call_id,
        last_call_id: last.call_id,
        tokens: last.prompt_token_ids.as_ref().map_or(0, Vec::len) + sampled(last.sampled_ids()),
        sampled_tokens: lineage.own().map(|one| sampled(one.call.sampled_ids())).sum(),
        parent,
        broke,
    }
}
