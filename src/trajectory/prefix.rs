//! Finds, for each call, the longest other whose tokens begin its prompt. Hashes find candidates in one pass
//! over the tokens; comparing the tokens decides.

use std::collections::HashMap;

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

    pub(super) fn len(&self) -> usize {
        self.prompt.len() + self.completion.len()
    }

    fn is_prefix_of(&self, prompt: &[u32]) -> bool {
        let Some((first, rest)) = prompt.split_at_checked(self.prompt.len()) else {
            return false;
        };
        rest.starts_with(self.completion) && first == self.prompt
    }
}

/// A running hash of a token sequence: equal prefixes have equal states.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct State(u64);

/// An odd number with its bits well mixed.
const FACTOR: u64 = 0xa076_1d64_78bd_642f;

impl State {
    const EMPTY: Self = Self(0x9e37_79b9_7f4a_7c15);

    fn push(self, ids: &[u32]) -> Self {
        Self(ids.iter().fold(self.0, |state, &id| {
            let wide = u128::from(state ^ u64::from(id)) * u128::from(FACTOR);
            (wide as u64) ^ ((wide >> 64) as u64)
        }))
    }
}

/// What the tokens say of the calls of one session. Indices are those of `tokens`.
pub(super) struct Relations {
    /// The call that each extends.
    pub(super) parents: Vec<Option<usize>>,
    /// Calls with equal prompts, each group in the order of `tokens`.
    pub(super) same_prompt: Vec<Vec<usize>>,
}

/// `tokens` in the order of preference: of two calls with the same tokens the earlier becomes the parent.
pub(super) fn relate(tokens: &[Tokens<'_>]) -> Relations {
    let prompts: Vec<State> = tokens.iter().map(|t| State::EMPTY.push(t.prompt)).collect();
    let mut by_end: HashMap<(usize, State), Vec<usize>> = HashMap::new();
    let mut by_prompt: HashMap<(usize, State), Vec<Vec<usize>>> = HashMap::new();
    for (index, (t, &prompt)) in tokens.iter().zip(&prompts).enumerate() {
        by_end.entry((t.len(), prompt.push(t.completion))).or_default().push(index);
        let groups = by_prompt.entry((t.prompt.len(), prompt)).or_default();
        match groups.iter_mut().find(|group| tokens[group[0]].prompt == t.prompt) {
            Some(group) => group.push(index),
            None => groups.push(vec![index]),
        }
    }
    let mut lengths: Vec<usize> = by_end.keys().map(|&(length, _)| length).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let mut same_prompt: Vec<Vec<usize>> = by_prompt.into_values().flatten().collect();
    same_prompt.sort_unstable();
    let mut parents = vec![None; tokens.len()];
    for group in &same_prompt {
        let parent = longest_prefix(tokens[group[0]].prompt, &lengths, &by_end, tokens);
        for &index in group {
            parents[index] = parent;
        }
    }
    Relations { parents, same_prompt }
}

fn longest_prefix(
    prompt: &[u32],
    lengths: &[usize],
    by_end: &HashMap<(usize, State), Vec<usize>>,
    tokens: &[Tokens<'_>],
) -> Option<usize> {
    let mut state = State::EMPTY;
    let mut hashed = 0;
    let mut candidates: Vec<&[usize]> = vec![];
    for &length in lengths.iter().take_while(|&&length| length <= prompt.len()) {
        state = state.push(&prompt[hashed..length]);
        hashed = length;
        candidates.extend(by_end.get(&(length, state)).map(Vec::as_slice));
    }
    let mut longest_first = candidates.into_iter().rev().flatten().copied();
    longest_first.find(|&index| tokens[index].is_prefix_of(prompt))
}
