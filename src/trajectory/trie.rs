//! The tokens of one session's calls as a radix trie. An edge is a range of some call's own ids, so nothing is copied,
//! and what calls have in common is compared at memory speed: once for each call that has it.

use std::collections::HashMap;

use ahash::RandomState;

use crate::record::Call;

/// Prompt and completion ids of a call that has both, as the model saw and sampled them.
#[derive(Clone, Copy)]
pub(super) struct Tokens<'a> {
    pub(super) prompt: &'a [u32],
    pub(super) completion: &'a [u32],
}

impl<'a> Tokens<'a> {
    /// `None` if the ids are missing or nothing was sampled.
    pub(super) fn of(call: &'a Call) -> Option<Self> {
        let is_seen = call.prompt_ids_source.is_exact();
        let prompt = call.prompt_token_ids.as_deref().filter(|_| is_seen)?;
        let completion = call.sampled_ids().filter(|ids| !ids.is_empty())?;
        Some(Self { prompt, completion })
    }
}

/// A call by its place among those that the trie was made of.
type Index = usize;

/// A node by its place in [`Trie::nodes`].
type NodeId = u32;

const ROOT: NodeId = 0;

/// The end of a sequence of tokens, or where several part.
#[derive(Clone, Copy)]
struct Node<'a> {
    parent: NodeId,
    /// Tokens between the parent and here. Only the root has none.
    label: &'a [u32],
    /// The call that ends here with its completion and that others may go on from.
    end: Option<Index>,
    /// The last call that came through.
    last: Index,
}

/// What the tokens say of the calls of one session. Indices are those of the calls they were made of.
pub(super) struct Relations {
    /// The call that each extends: of those whose prompt and completion begin its prompt, the longest.
    pub(super) parents: Vec<Option<Index>>,
    /// Calls that broke off where another one with the same prompt did not: nobody goes on from them.
    pub(super) is_lost: Vec<bool>,
    /// Calls with equal prompts, each group in the order of the calls.
    pub(super) same_prompt: Vec<Vec<Index>>,
    /// Of each call: one that came before it and has most of its prompt, and how many first ids of it.
    pub(super) nearest: Vec<Option<(Index, usize)>>,
}

struct Trie<'a> {
    nodes: Vec<Node<'a>>,
    /// By the node and the first token of the edge.
    children: HashMap<(NodeId, u32), NodeId, RandomState>,
}

/// Where a sequence was put.
struct Put {
    node: NodeId,
    /// How many of its tokens were there before, and who came last to where they end.
    known: usize,
    last: Index,
}

impl<'a> Trie<'a> {
    fn put(&mut self, from: NodeId, mut tokens: &'a [u32], by: Index) -> Put {
        let start = &mut self.nodes[from as usize];
        let mut put = Put { node: from, known: 0, last: std::mem::replace(&mut start.last, by) };
        let mut is_known = true;
        while let Some(&first) = tokens.first() {
            let Some(&child) = self.children.get(&(put.node, first)) else {
                put.node = self.add(put.node, tokens, by);
                break;
            };
            let Node { label, last, .. } = self.nodes[child as usize];
            let same = common(label, tokens);
            tokens = &tokens[same..];
            put.node = if same == label.len() { child } else { self.split(child, same) };
            self.nodes[put.node as usize].last = by;
            if is_known {
                (put.known, put.last) = (put.known + same, last);
            }
            is_known &= same == label.len();
        }
        put
    }

    fn add(&mut self, parent: NodeId, label: &'a [u32], by: Index) -> NodeId {
        let id =
            NodeId::try_from(self.nodes.len()).expect("a call makes 4 nodes at most, and has more bytes");
        self.nodes.push(Node { parent, label, end: None, last: by });
        self.children.insert((parent, label[0]), id);
        id
    }

    /// Puts a node into the edge to `child`, which stays what it is.
    fn split(&mut self, child: NodeId, at: usize) -> NodeId {
        let Node { parent, label, last, .. } = self.nodes[child as usize];
        let middle = self.add(parent, &label[..at], last);
        let below = &mut self.nodes[child as usize];
        (below.parent, below.label) = (middle, &label[at..]);
        self.children.insert((middle, label[at]), child);
        middle
    }

    /// The call that ends here, or nearest above.
    fn end_above(&self, mut at: NodeId) -> Option<Index> {
        loop {
            let node = &self.nodes[at as usize];
            if node.end.is_some() || at == ROOT {
                return node.end;
            }
            at = node.parent;
        }
    }
}

/// What of a call bears on which of several is gone on from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Worth {
    /// It came to its end.
    pub(super) is_whole: bool,
    pub(super) is_trainable: bool,
}

/// Relates calls, which are given in time. Of several with the same tokens the first trainable one becomes the parent of
/// what follows, else the first of all.
pub(super) fn relate(calls: &[Tokens<'_>], worth: impl Fn(Index) -> Worth) -> Relations {
    let root = Node { parent: ROOT, label: &[], end: None, last: 0 };
    let mut trie = Trie { nodes: vec![root], children: HashMap::default() };
    let mut nearest = Vec::with_capacity(calls.len());
    let mut prompts = Vec::with_capacity(calls.len());
    let mut ends = Vec::with_capacity(calls.len());
    let mut groups: HashMap<NodeId, Vec<Index>, RandomState> = HashMap::default();
    for (index, tokens) in calls.iter().enumerate() {
        let prompt = trie.put(ROOT, tokens.prompt, index);
        ends.push(trie.put(prompt.node, tokens.completion, index).node);
        nearest.push((index > 0).then_some((prompt.last, prompt.known)));
        prompts.push(prompt.node);
        groups.entry(prompt.node).or_default().push(index);
    }
    let mut same_prompt: Vec<Vec<Index>> = groups.into_values().collect();
    same_prompt.sort_unstable();
    // The little that came of a call before it broke off may well begin what its retry said.
    let mut is_lost = vec![false; calls.len()];
    for group in &same_prompt {
        let has_whole = group.iter().any(|&index| worth(index).is_whole);
        group.iter().for_each(|&index| is_lost[index] = has_whole && !worth(index).is_whole);
    }
    for (index, &node) in ends.iter().enumerate().filter(|(index, _)| !is_lost[*index]) {
        let end = &mut trie.nodes[node as usize].end;
        if end.is_none_or(|other| worth(index).is_trainable && !worth(other).is_trainable) {
            *end = Some(index);
        }
    }
    let parents = prompts.iter().map(|&node| trie.end_above(node)).collect();
    Relations { parents, is_lost, same_prompt, nearest }
}

/// Tokens that are compared at once.
const BLOCK: usize = 256;

/// How many first tokens two sequences have in common.
pub(super) fn common(a: &[u32], b: &[u32]) -> usize {
    let blocks = a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK));
    let same = BLOCK * blocks.take_while(|(a, b)| a == b).count();
    same + a[same..].iter().zip(&b[same..]).take_while(|(a, b)| a == b).count()
}
