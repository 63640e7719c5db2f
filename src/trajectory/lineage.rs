//! Calls to lineages.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use super::account::{Entry, IdCounts};
use super::prefix::{Tokens, relate};
use crate::record::{Call, CallStatus, Disposition, SessionId};

/// A chain of calls in which each prompt's token ids extend the ids of the one before, from a root to a leaf.
#[derive(Debug, Clone)]
pub struct Lineage {
    pub session_id: SessionId,
    /// Number in its session, in order of the first call that is its own.
    pub index: u32,
    pub calls: Vec<LineageCall>,
}

/// One call of a lineage.
#[derive(Debug, Clone)]
pub struct LineageCall {
    pub call: Arc<Call>,
    /// Whether the call belongs to this lineage. Where lineages share their first calls, these belong to
    /// the lowest-numbered one and are context in the others.
    pub is_own: bool,
}

/// All lineages of some calls, and the sampled tokens that are in none.
#[derive(Debug, Clone, Default)]
pub struct Lineages {
    pub lineages: Vec<Lineage>,
    /// Tokens of calls that were set aside: other kinds, superseded, without usage or ids.
    pub set_aside: Vec<Entry>,
}

/// Builds the lineages of each session. A call that is given twice counts once.
#[must_use]
pub fn lineages(calls: &[Arc<Call>]) -> Lineages {
    let mut seen = HashSet::new();
    let mut sessions: BTreeMap<&SessionId, Vec<&Arc<Call>>> = BTreeMap::new();
    for call in calls {
        if seen.insert((call.call_id, call.choice_index)) {
            sessions.entry(&call.session_id).or_default().push(call);
        }
    }
    let mut sessions: Vec<_> = sessions.into_values().collect();
    for calls in &mut sessions {
        calls.sort_by_key(|call| order(call));
    }
    sessions.sort_by_key(|calls| order(calls[0]));
    let mut found = Lineages::default();
    for calls in sessions {
        of_session(&calls, &mut found);
    }
    found
}

/// For naming and ties only.
fn order(call: &Call) -> impl Ord + use<> {
    (call.received_at, call.call_id, call.choice_index)
}

fn of_session(calls: &[&Arc<Call>], found: &mut Lineages) {
    let counts = IdCounts::of(calls.iter().map(|call| call.as_ref()));
    let mut told = HashSet::new();
    let mut nodes = vec![];
    for &call in calls {
        let missing = counts.without_ids(call);
        if missing > 0 && told.insert(call.call_id) {
            let entry = Entry::of(call, Disposition::NoIds);
            found.set_aside.push(Entry { tokens: missing, ..entry });
        }
        let sampled = call.sampled_ids().map_or(0, <[u32]>::len);
        match (counts.bucket(call), Tokens::of(call)) {
            _ if sampled == 0 => {}
            (Some(disposition), _) => found.set_aside.push(Entry::of(call, disposition)),
            (None, Some(tokens)) => nodes.push((call, tokens)),
            (None, None) => {
                let no_prompt = Disposition::Dropped("no prompt ids".to_owned());
                found.set_aside.push(Entry::of(call, no_prompt));
            }
        }
    }
    // Of two calls with the same tokens the trainable one is the parent of what follows.
    nodes.sort_by_key(|(call, _)| !call.trainable);
    let tokens: Vec<Tokens<'_>> = nodes.iter().map(|&(_, tokens)| tokens).collect();
    let relations = relate(&tokens);
    let mut children: HashMap<Option<usize>, Vec<usize>> = HashMap::new();
    let mut is_continued = vec![false; nodes.len()];
    for parent in relations.parents.iter().flatten() {
        is_continued[*parent] = true;
    }
    for group in &relations.same_prompt {
        for &index in group {
            match fate(index, group, &nodes, &is_continued) {
                Some(disposition) => found.set_aside.push(Entry::of(nodes[index].0, disposition)),
                None => children.entry(relations.parents[index]).or_default().push(index),
            }
        }
    }
    for siblings in children.values_mut() {
        siblings.sort_by_key(|&index| Reverse(order(nodes[index].0)));
    }
    let mut walk = Walk { nodes: &nodes, children, next: 0 };
    walk.run(&mut found.lineages);
}

/// Why the call at `index` is not the one that counts among those with its prompt; `None` if it counts.
fn fate(
    index: usize,
    group: &[usize],
    nodes: &[(&Arc<Call>, Tokens<'_>)],
    is_continued: &[bool],
) -> Option<Disposition> {
    let any_continued = group.iter().any(|&other| is_continued[other]);
    let winner = group.iter().copied().max_by_key(|&other| {
        let call = nodes[other].0;
        let first_choice = Reverse(call.choice_index);
        let ended_well = call.status == CallStatus::Ok;
        (ended_well, call.trainable, call.received_at, call.call_id, first_choice)
    });
    let counts = if any_continued { is_continued[index] } else { winner == Some(index) };
    if counts {
        return None;
    }
    // A choice of a call that counts lost to its sister, not to a retry.
    let call_id = nodes[index].0.call_id;
    let is_sister = group.iter().any(|&other| {
        let counts = if any_continued { is_continued[other] } else { winner == Some(other) };
        counts && nodes[other].0.call_id == call_id
    });
    Some(if is_sister {
        Disposition::Dropped("another choice of the call was used".to_owned())
    } else {
        Disposition::Superseded
    })
}

/// Walks the trees depth first, without recursion: a session may have more turns than a stack has room.
struct Walk<'a> {
    nodes: &'a [(&'a Arc<Call>, Tokens<'a>)],
    /// Children of each call, last first.
    children: HashMap<Option<usize>, Vec<usize>>,
    next: u32,
}

impl Walk<'_> {
    fn run(&mut self, found: &mut Vec<Lineage>) {
        let mut path: Vec<usize> = vec![];
        let mut own_from = 0;
        loop {
            let at = path.last().copied();
            match self.children.get_mut(&at).and_then(Vec::pop) {
                Some(child) => path.push(child),
                None => {
                    if own_from < path.len() {
                        found.push(self.lineage(&path, own_from));
                        self.next += 1;
                    }
                    if path.pop().is_none() {
                        return;
                    }
                    own_from = path.len();
                }
            }
        }
    }

    fn lineage(&self, path: &[usize], own_from: usize) -> Lineage {
        let calls = path.iter().enumerate().map(|(depth, &index)| LineageCall {
            call: Arc::clone(self.nodes[index].0),
            is_own: depth >= own_from,
        });
        let calls: Vec<LineageCall> = calls.collect();
        Lineage { session_id: calls[0].call.session_id.clone(), index: self.next, calls }
    }
}
