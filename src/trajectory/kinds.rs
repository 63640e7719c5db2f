//! Whose lineages are: the main agent's, a sub-agent's, side calls, compactions.
//!
//! The main agent is, of the conversations that nothing else of the session began, one that is given tools if any is, of
//! those the one with the most calls, and of equals the first.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use super::conversation::Heard;
use super::lineage::Lineage;
use super::threads::{NodeId, Origin, Threads};
use crate::config::{AuxKind, Samples, SideKind, TrainedLineages};
use crate::record::{Call, CallKind, ChoiceId, Disposition};

/// Whose a lineage is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LineageKind {
    /// The main agent's.
    Main,
    /// Of calls beside it.
    Beside(SideKind),
}

impl LineageKind {
    /// Its name in tables.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Beside(SideKind::SubAgent) => "sub_agent",
            Self::Beside(SideKind::Side) => "side",
            Self::Beside(SideKind::Compaction) => "compaction",
            Self::Beside(SideKind::Other) => "other",
        }
    }
}

/// Whose the lineages of one session are.
#[derive(Debug)]
pub struct Kinds {
    /// Of each lineage.
    of: Vec<LineageKind>,
    /// Calls whose reply stands for the history in a later prompt.
    compactions: HashSet<ChoiceId>,
}

impl Kinds {
    /// Of the lineages of one session, in the order of their numbers. Their calls must have their bodies.
    #[must_use]
    pub fn of(session: &[Lineage]) -> Self {
        Self::of_threads(session, &Threads::of(session, Heard::default()))
    }

    pub(super) fn of_threads(session: &[Lineage], threads: &Threads<'_>) -> Self {
        let compactions: HashSet<NodeId> = (0..session.len())
            .filter_map(|lineage| match threads.origins[lineage] {
                Origin::Compacted(summary) => Some(summary),
                Origin::Continued(from) => threads.summary_between(threads.starts[lineage], from),
                _ => None,
            })
            .collect();
        // One that has its own prompt is nobody's history.
        let is_compaction = |first: usize| {
            let mut own = session[first].own();
            let only = own.next().filter(|_| own.next().is_none());
            let only = only.and_then(|only| threads.node(only.call.choice()));
            threads.origins[first] == Origin::None && only.is_some_and(|only| compactions.contains(&only))
        };
        let before = |lineage: usize| -> Option<usize> {
            let origin = threads.origins[lineage];
            let from = origin.node().filter(|_| origin.is_same_agent())?;
            let from = threads.nodes[from].lineage;
            if !is_compaction(from) {
                return Some(from);
            }
            threads.same_agent_before(threads.starts[lineage]).map(|node| threads.nodes[node].lineage)
        };
        // Of each lineage the one that its agent began with. Records whose times are wrong may go round in a circle.
        let first = |lineage: usize| {
            (0..session.len()).try_fold(lineage, |at, _| before(at).ok_or(at)).unwrap_or_else(|first| first)
        };
        let agents: Vec<usize> = (0..session.len()).map(first).collect();
        let mut calls: BTreeMap<usize, usize> = BTreeMap::new();
        for (lineage, agent) in session.iter().zip(&agents) {
            *calls.entry(*agent).or_default() += lineage.own().count();
        }
        let has_tools = |first: usize| {
            threads.nodes[threads.starts[first]].conversation.as_ref().map(|of| of.tools.is_some())
        };
        let may_be_main = |first: &usize| {
            let is_begun_by_none = threads.origins[*first] == Origin::None && !is_compaction(*first);
            is_begun_by_none && is_agents(session[*first].start())
        };
        let main = calls.keys().copied().filter(may_be_main);
        let main = main.max_by_key(|first| (has_tools(*first) == Some(true), calls[first], Reverse(*first)));
        let main_has_tools = main.and_then(has_tools) == Some(true);
        let is_side = |first: usize| {
            let has_none = main_has_tools && has_tools(first) == Some(false);
            !is_agents(session[first].start()) || threads.origins[first] == Origin::None && has_none
        };
        let kind = |first: usize| match threads.origins[first] {
            _ if Some(first) == main => LineageKind::Main,
            _ if is_compaction(first) => LineageKind::Beside(SideKind::Compaction),
            _ if is_side(first) => LineageKind::Beside(SideKind::Side),
            Origin::Started(_) | Origin::Recorded(_) => LineageKind::Beside(SideKind::SubAgent),
            _ => LineageKind::Beside(SideKind::Other),
        };
        let of = agents.into_iter().map(kind).collect();
        let compactions = compactions.into_iter().map(|node| threads.nodes[node].call.choice()).collect();
        Self { of, compactions }
    }

    /// Whose the lineage is.
    #[must_use]
    pub fn get(&self, lineage: &Lineage) -> LineageKind {
        self.of[lineage.index as usize]
    }

    /// Whether the call's reply stands for the history in a later prompt.
    #[must_use]
    pub fn is_compaction(&self, call: &Call) -> bool {
        self.compactions.contains(&call.choice())
    }

    /// Why the tokens of a call are not to be trained by this policy.
    pub(super) fn left_out(&self, lineage: &Lineage, call: &Call, policy: &Samples) -> Option<Disposition> {
        let kind = self.get(lineage);
        let is_left_out = |kind: SideKind| policy.leave_out.contains(&kind);
        match kind {
            LineageKind::Beside(side) if is_left_out(side) => Some(Disposition::AuxCall),
            _ if self.is_compaction(call) && is_left_out(SideKind::Compaction) => Some(Disposition::AuxCall),
            LineageKind::Beside(_) if policy.lineages == TrainedLineages::Main => {
                Some(Disposition::Dropped("not the main agent's".to_owned()))
            }
            _ => None,
        }
    }
}

/// Whether calls like this one are trained at all: the policy's turns are, and side calls that are taken in. `choice`
/// says which call it is, or counts in its place.
pub(super) fn is_taken_in(policy: &Samples, kind: CallKind, choice: ChoiceId, kinds: Option<&Kinds>) -> bool {
    let is_compaction = || kinds.is_some_and(|kinds| kinds.compactions.contains(&choice));
    match kind {
        CallKind::Policy => true,
        CallKind::Aux if is_compaction() => policy.take_in.contains(&AuxKind::Compaction),
        CallKind::Aux => policy.take_in.contains(&AuxKind::Side),
        _ => false,
    }
}

/// Calls that an agent may have made: stand-alone, nobody says what a call is for.
const fn is_agents(call: &Call) -> bool {
    matches!(call.kind, CallKind::Policy | CallKind::Unknown)
}
