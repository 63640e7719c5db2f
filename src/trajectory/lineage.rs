//! Calls to lineages.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use super::account::{Entry, IdCounts, defect};
use super::trie::{Tokens, Worth, relate};
use crate::record::{Call, CallId, CallKind, CallStatus, ChoiceId, Disposition, SessionId};

/// A chain of calls in which each prompt's token ids extend the ids of the one before, from a root to a leaf.
#[derive(Debug, Clone)]
pub struct Lineage {
    pub session_id: SessionId,
    /// Number in its session, in order of the first call that is its own.
    pub index: u32,
    pub calls: Vec<LineageCall>,
    /// Of its first own call: the one before it that has most of its prompt, and how many first ids of it.
    pub nearest: Option<(ChoiceId, usize)>,
}

/// One call of a lineage.
#[derive(Debug, Clone)]
pub struct LineageCall {
    pub call: Arc<Call>,
    /// Whether the call belongs to this lineage. Where lineages share their first calls, these belong to
    /// the lowest-numbered one and are context in the others.
    pub is_own: bool,
    /// Where its tokens go whatever the other calls are, if its kind is trained at all; `None`: they may be trained.
    pub verdict: Option<Disposition>,
}

/// Sampled tokens that are in no lineage.
#[derive(Debug, Clone)]
pub struct SetAside {
    /// Where they go if calls of this kind are trained at all.
    pub entry: Entry,
    pub call: Arc<Call>,
    /// The one that counts in its place.
    pub(super) winner: Option<ChoiceId>,
}

/// All lineages of some calls, and the sampled tokens that are in none.
#[derive(Debug, Clone, Default)]
pub struct Lineages {
    /// In order of sessions, and in each session of their numbers.
    pub lineages: Vec<Lineage>,
    /// Tokens of calls that were set aside: superseded, or without ids.
    pub set_aside: Vec<SetAside>,
    /// The calls that have expert routing: others' may go on from theirs.
    pub(super) routed: HashMap<ChoiceId, Arc<Call>>,
}

impl Lineage {
    /// Its own calls, oldest first. There is one at least.
    pub fn own(&self) -> impl DoubleEndedIterator<Item = &LineageCall> {
        self.calls.iter().filter(|one| one.is_own)
    }

    /// The first call that is its own: where it begins, or leaves another one.
    #[must_use]
    pub fn start(&self) -> &Arc<Call> {
        let start = self.own().next().or(self.calls.last());
        &start.expect("a lineage is made of one call at least").call
    }

    /// The call that its first own one extends, which is another lineage's.
    #[must_use]
    pub fn forked_from(&self) -> Option<&Arc<Call>> {
        self.calls.iter().rev().find(|one| !one.is_own).map(|one| &one.call)
    }
}

impl Lineages {
    /// The lineages of each session.
    pub fn sessions(&self) -> impl Iterator<Item = &[Lineage]> {
        self.lineages.chunk_by(|a, b| a.session_id == b.session_id)
    }
}

/// Builds the lineages of each session. A call that is given twice counts once.
#[must_use]
pub fn lineages(calls: &[Arc<Call>]) -> Lineages {
    let mut seen = HashSet::new();
    let mut sessions: BTreeMap<&SessionId, Vec<&Arc<Call>>> = BTreeMap::new();
    let mut found = Lineages::default();
    for call in calls {
        if seen.insert(call.choice()) {
            sessions.entry(&call.session_id).or_default().push(call);
            if call.routing.is_some() {
                found.routed.insert(call.choice(), Arc::clone(call));
            }
        }
    }
    let mut sessions: Vec<_> = sessions.into_values().collect();
    for calls in &mut sessions {
        calls.sort_by_key(|call| order(call));
    }
    sessions.sort_by_key(|calls| order(calls[0]));
    for calls in sessions {
        of_session(&calls, &mut found);
    }
    found
}

/// For naming and ties only.
pub(super) fn order(call: &Call) -> impl Ord + use<> {
    (call.received_at, call.call_id, call.choice_index)
}

/// A call of the trie.
struct Node<'a> {
    call: &'a Arc<Call>,
    tokens: Tokens<'a>,
    verdict: Option<Disposition>,
}

impl Node<'_> {
    fn worth(&self) -> Worth {
        let is_trainable = self.verdict.is_none() && defect(self.call).is_none();
        Worth { is_whole: self.call.status == CallStatus::Ok, is_trainable }
    }
}

fn of_session(calls: &[&Arc<Call>], found: &mut Lineages) {
    let counts = IdCounts::of(calls.iter().map(|call| call.as_ref()));
    let mut told: HashSet<CallId> = HashSet::new();
    // What was sampled for something else is no turn of the policy's, whatever its tokens are.
    let mut kinds: Vec<(CallKind, Vec<Node<'_>>)> = vec![];
    for &call in calls {
        let missing = counts.without_ids(call);
        if missing > 0 && told.insert(call.call_id) {
            let entry = Entry { tokens: missing, ..Entry::of(call, Disposition::NoIds) };
            found.set_aside.push(SetAside { entry, call: Arc::clone(call), winner: None });
        }
        if call.sampled_ids().is_none_or(<[u32]>::is_empty) {
            continue;
        }
        let verdict = counts.bucket(call);
        match (Tokens::of(call), kinds.iter_mut().find(|(kind, _)| *kind == call.kind)) {
            (Some(tokens), Some((_, nodes))) => nodes.push(Node { call, tokens, verdict }),
            (Some(tokens), None) => kinds.push((call.kind, vec![Node { call, tokens, verdict }])),
            (None, _) => {
                let no_prompt = Disposition::Dropped("no prompt ids".to_owned());
                let entry = Entry::of(call, verdict.unwrap_or(no_prompt));
                found.set_aside.push(SetAside { entry, call: Arc::clone(call), winner: None });
            }
        }
    }
    let first = found.lineages.len();
    for (_, nodes) in &kinds {
        of_kind(nodes, found);
    }
    let own = &mut found.lineages[first..];
    own.sort_by_key(|lineage| order(lineage.start()));
    for (index, lineage) in (0..).zip(own) {
        lineage.index = index;
    }
}

fn of_kind(nodes: &[Node<'_>], found: &mut Lineages) {
    let tokens: Vec<Tokens<'_>> = nodes.iter().map(|node| node.tokens).collect();
    let relations = relate(&tokens, |index| nodes[index].worth());
    let mut children: HashMap<Option<usize>, Vec<usize>> = HashMap::new();
    let mut is_continued = vec![false; nodes.len()];
    for (parent, _) in relations.parents.iter().zip(&relations.is_lost).filter(|(_, is_lost)| !**is_lost) {
        if let Some(parent) = parent {
            is_continued[*parent] = true;
        }
    }
    for group in &relations.same_prompt {
        let left = || group.iter().copied().filter(|&index| !relations.is_lost[index]);
        let winner = left().max_by_key(|&index| rank(&nodes[index]));
        let any_continued = left().any(|index| is_continued[index]);
        let counts = |index: usize| if any_continued { is_continued[index] } else { winner == Some(index) };
        for &index in group {
            let node = &nodes[index];
            if counts(index) {
                children.entry(relations.parents[index]).or_default().push(index);
                continue;
            }
            // A choice of a call that counts lost to its sister, not to a retry.
            let is_sister = |&other: &usize| counts(other) && nodes[other].call.call_id == node.call.call_id;
            let lost = if group.iter().any(is_sister) {
                Disposition::Dropped("another choice of the call was used".to_owned())
            } else {
                Disposition::Superseded
            };
            let entry = Entry::of(node.call, node.verdict.clone().unwrap_or(lost));
            let winner = group.iter().copied().find(|&other| counts(other));
            let winner = winner.map(|other| nodes[other].call.choice());
            found.set_aside.push(SetAside { entry, call: Arc::clone(node.call), winner });
        }
    }
    for siblings in children.values_mut() {
        siblings.sort_by_key(|&index| Reverse(order(nodes[index].call)));
    }
    let mut walk = Walk { nodes, nearest: &relations.nearest, children };
    walk.run(&mut found.lineages);
}

/// Of calls with one prompt of which none was continued, the one that ranks highest counts: the last that can be trained.
fn rank(node: &Node<'_>) -> impl Ord + use<> {
    let Node { call, verdict, .. } = node;
    let first_choice = Reverse(call.choice_index);
    (verdict.is_none(), defect(call).is_none(), call.received_at, call.call_id, first_choice)
}

/// Walks the trees depth first, without recursion: a session may have more turns than a stack has room.
struct Walk<'a> {
    nodes: &'a [Node<'a>],
    nearest: &'a [Option<(usize, usize)>],
    /// Children of each call, last first.
    children: HashMap<Option<usize>, Vec<usize>>,
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
                    }
                    if path.pop().is_none() {
                        return;
                    }
                    own_from = path.len();
                }
            }
        }
    }

    /// Its number is given when all of the session are there.
    fn lineage(&self, path: &[usize], own_from: usize) -> Lineage {
        let calls = path.iter().enumerate().map(|(depth, &index)| LineageCall {
            call: Arc::clone(self.nodes[index].call),
            is_own: depth >= own_from,
            verdict: self.nodes[index].verdict.clone(),
        });
        let nearest = self.nearest[path[own_from]];
        Lineage {
            session_id: self.nodes[path[0]].call.session_id.clone(),
            index: 0,
            calls: calls.collect(),
            nearest: nearest.map(|(other, tokens)| (self.nodes[other].call.choice(), tokens)),
        }
    }
}
