//! The conversations of a session as token ids: which of them a request goes on from.
//!
//! A conversation is known by its messages in the form in which they are compared ([`Said`](crate::protocol::said::Said)),
//! since clients say history in other bytes than they were given.
//!
//! Replies to one prompt may say the same in other ids: retries, or choices of one call. Which of them a request goes on
//! from shows in what the comparison does not look at ([`Spelling`]); where that is the same too, nobody can tell.
//!
//! Invariants:
//! - Ids are held once: a turn has those that came after the turn before it.
//! - A request goes on from the longest conversation that its messages begin with, and that ends with a reply.
//! - Of replies that end the same conversation, one that its client was given counts before one that it was not; then the
//!   one that the request spells; then the one that was asked for last, of its choices the first. In which order replies
//!   came to their ends bears on nothing.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};

use super::Renderer;
use crate::protocol::said::{Identity, Said};
use crate::record::{CallId, ChoiceId};

/// Replies that end the same conversation and are held at most.
const MOST_ALIKE: usize = 8;

/// A conversation up to some message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key([u8; 16]);

impl Key {
    /// No message yet. `shape`: all else that the template is rendered with.
    pub(super) fn of_shape(shape: &[u8]) -> Self {
        Self::hash(&[], shape)
    }

    /// The conversation with one more message.
    pub(super) fn with(self, message: &Identity) -> Self {
        Self::hash(&self.0, serde_json::to_string(message).unwrap_or_default().as_bytes())
    }

    fn hash(before: &[u8], text: &[u8]) -> Self {
        let mut hash = Sha256::new();
        hash.update(before);
        hash.update(text);
        let mut key = [0; 16];
        key.copy_from_slice(&hash.finalize()[..16]);
        Self(key)
    }
}

/// What of a message bears on no comparison of conversations, and may still tell two replies apart: white space around its
/// text, what was thought, how arguments are printed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Spelling([u64; 4]);

impl Spelling {
    pub(super) fn of(said: &Said) -> Self {
        let hash = |part: &dyn Fn(&mut DefaultHasher)| {
            let mut hasher = DefaultHasher::new();
            part(&mut hasher);
            hasher.finish()
        };
        let arguments = |hasher: &mut DefaultHasher| {
            said.tool_uses.iter().for_each(|tool| tool.arguments.hash(hasher));
        };
        Self([
            hash(&|hasher| said.parts.concat().hash(hasher)),
            hash(&|hasher| said.reasoning.hash(hasher)),
            // Clients and protocols trim it.
            hash(&|hasher| said.reasoning.trim().hash(hasher)),
            hash(&arguments),
        ])
    }

    /// How much of it is another.
    fn differences(self, other: Self) -> usize {
        self.0.iter().zip(other.0).filter(|(a, b)| **a != *b).count()
    }
}

/// Whether a reply was given to its client up to what that may act on: what the server took for writing.
#[derive(Debug, Clone, Default)]
pub(in crate::proxy) struct Given(Arc<AtomicBool>);

impl Given {
    pub(in crate::proxy) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// What is known of a reply besides its ids.
#[derive(Debug, Clone)]
pub(super) struct Reply {
    pub(super) call_id: CallId,
    pub(super) choice: u16,
    /// Which message of its conversation it is.
    pub(super) at: usize,
    pub(super) spelling: Spelling,
    /// When its request came: [`Lineages::ask`].
    pub(super) asked: u64,
    pub(super) given: Given,
}

/// A reply that ended well, and how it came to be: the end of a conversation.
#[derive(Debug)]
pub(super) struct Turn {
    before: Option<Arc<Turn>>,
    /// What came after `before`: the rest of the prompt, then what was sampled.
    ids: Vec<u32>,
    /// How many of `ids` were sampled.
    sampled: usize,
    reply: Reply,
}

impl Turn {
    /// `prompt` begins with all ids of `before`.
    pub(super) fn new(before: Option<Arc<Self>>, prompt: &[u32], sampled: &[u32], reply: Reply) -> Arc<Self> {
        let known = before.as_ref().map_or(0, |before| before.len());
        let ids = [&prompt[known..], sampled].concat();
        Arc::new(Self { before, ids, sampled: sampled.len(), reply })
    }

    pub(super) const fn choice(&self) -> ChoiceId {
        ChoiceId { call_id: self.reply.call_id, choice_index: self.reply.choice }
    }

    /// How much a request counts for that does not tell replies apart.
    fn rank(&self) -> (bool, u64, Reverse<u16>) {
        (self.reply.given.get(), self.reply.asked, Reverse(self.reply.choice))
    }

    /// How much a request says in other words than this reply, and those before it, the last first. `spelled`: its messages.
    fn differences(&self, spelled: &[Spelling]) -> Vec<usize> {
        let replies = self.chain().map(|turn| (turn.reply.spelling, spelled.get(turn.reply.at)));
        replies.map_while(|(reply, said)| Some(reply.differences(*said?))).collect()
    }

    fn len(&self) -> usize {
        self.chain().map(|turn| turn.ids.len()).sum()
    }

    /// This turn and those before it, the last first.
    fn chain(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |turn| turn.before.as_deref())
    }

    /// Prompt and sampled ids.
    pub(super) fn all_ids(&self) -> Vec<u32> {
        let mut parts: Vec<&[u32]> = self.chain().map(|turn| turn.ids.as_slice()).collect();
        parts.reverse();
        parts.concat()
    }

    /// The ids that were sampled last.
    pub(super) fn sampled_ids(&self) -> &[u32] {
        &self.ids[self.ids.len() - self.sampled..]
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // One after the other: a long conversation would use up the stack.
        let mut before = self.before.take();
        while let Some(turn) = before.and_then(Arc::into_inner) {
            let mut turn = turn;
            before = turn.before.take();
        }
    }
}

/// The conversations of one session, model by model: ids of one model's are another's garbage, and its routing is no other's.
#[derive(Debug, Default)]
pub(in crate::proxy) struct OfModels(Mutex<HashMap<String, Arc<Lineages>>>);

impl OfModels {
    /// Those with a model: an upstream's, with the tokenizer and the template that it is asked with.
    pub(in crate::proxy) fn with(&self, renderer: &Renderer, upstream: &str, model: &str) -> Arc<Lineages> {
        let (tokenizer, template) = renderer.sha256();
        let key = format!("{tokenizer} {template} {upstream} {model}");
        Arc::clone(self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default())
    }
}

/// The conversations of one session with one model.
#[derive(Debug, Default)]
pub(in crate::proxy) struct Lineages(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Few of one conversation: [`MOST_ALIKE`].
    by_end: HashMap<Key, Vec<Arc<Turn>>>,
    /// Every conversation that was asked about, up to each of its messages.
    seen: HashSet<Key>,
    /// Requests that were asked.
    asked: u64,
}

/// Of replies that end the same conversation, the one that a request goes on from.
fn chosen<'a>(alike: &'a [Arc<Turn>], spelled: &[Spelling]) -> Option<&'a Arc<Turn>> {
    if let [only] = alike {
        return Some(only);
    }
    let differences: Vec<Vec<usize>> = alike.iter().map(|turn| turn.differences(spelled)).collect();
    // What one of them was rendered anew of is not compared.
    let compared = differences.iter().map(Vec::len).min().unwrap_or(0);
    let best = alike.iter().zip(&differences).max_by_key(|(turn, differences)| {
        let (is_given, asked, choice) = turn.rank();
        (is_given, Reverse(&differences[..compared]), asked, choice)
    });
    best.map(|(turn, _)| turn)
}

impl Lineages {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The longest conversation that a request goes on from, and its number of messages. `keys[i]`: the request's
    /// conversation up to message `i`; `spelled`: its messages.
    pub(super) fn longest(&self, keys: &[Key], spelled: &[Spelling]) -> Option<(usize, Arc<Turn>)> {
        let known = self.lock();
        // The last message is new: what it would be the reply of is not asked again.
        let begun = keys.len().saturating_sub(1);
        let mut longest_first = keys[..begun].iter().enumerate().skip(1).rev();
        longest_first.find_map(|(messages, key)| {
            let turn = chosen(known.by_end.get(key)?, spelled)?;
            Some((messages, Arc::clone(turn)))
        })
    }

    /// How many messages of a request one conversation began with before.
    pub(super) fn seen(&self, keys: &[Key]) -> usize {
        let known = self.lock();
        keys.iter().rposition(|key| known.seen.contains(key)).unwrap_or(0)
    }

    /// True if nothing was asked yet.
    pub(super) fn is_empty(&self) -> bool {
        self.lock().seen.is_empty()
    }

    /// A request is asked. Gives its number: later ones have higher numbers.
    pub(super) fn ask(&self, chains: [&[Key]; 3]) -> u64 {
        let mut known = self.lock();
        chains.into_iter().for_each(|keys| known.seen.extend(keys));
        known.asked += 1;
        known.asked
    }

    /// A conversation ends with a reply, up to and with which it is `end`.
    pub(super) fn hold(&self, end: Key, turn: Arc<Turn>) {
        let mut known = self.lock();
        known.seen.insert(end);
        let alike = known.by_end.entry(end).or_default();
        // The new one is not given yet.
        if alike.len() >= MOST_ALIKE
            && let Some(least) = (0..alike.len()).min_by_key(|&at| alike[at].rank())
        {
            alike.swap_remove(least);
        }
        alike.push(turn);
    }
}

#[cfg(test)]
mod tests;
