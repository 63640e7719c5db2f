//! The conversations of a session as token ids: which of them a request goes on from.
//!
//! A conversation is known by its messages in the form in which they are compared ([`Said`](crate::protocol::said::Said)),
//! since clients say history in other bytes than they were given.
//!
//! Invariants:
//! - Ids are held once: a turn has those that came after the turn before it.
//! - A request goes on from the longest conversation that its messages begin with, and that ends with a reply.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};

use crate::protocol::said::Identity;
use crate::record::CallId;

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

/// A reply that ended well, and how it came to be: the end of a conversation.
#[derive(Debug)]
pub(super) struct Turn {
    before: Option<Arc<Turn>>,
    /// What came after `before`: the rest of the prompt, then what was sampled.
    ids: Vec<u32>,
    /// How many of `ids` were sampled.
    sampled: usize,
    pub(super) call_id: CallId,
}

impl Turn {
    /// `prompt` begins with all ids of `before`.
    pub(super) fn new(
        before: Option<Arc<Self>>,
        prompt: &[u32],
        sampled: &[u32],
        call_id: CallId,
    ) -> Arc<Self> {
        let known = before.as_ref().map_or(0, |before| before.len());
        let ids = [&prompt[known..], sampled].concat();
        Arc::new(Self { before, ids, sampled: sampled.len(), call_id })
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

/// The conversations of one session.
#[derive(Debug, Default)]
pub(in crate::proxy) struct Lineages(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    by_end: HashMap<Key, Arc<Turn>>,
    /// Every conversation that was asked about, up to each of its messages.
    seen: HashSet<Key>,
}

impl Lineages {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The longest conversation that a request goes on from, and its number of messages. `keys[i]`: the request's
    /// conversation up to message `i`.
    pub(super) fn longest(&self, keys: &[Key]) -> Option<(usize, Arc<Turn>)> {
        let known = self.lock();
        // The last message is new: what it would be the reply of is not asked again.
        let begun = keys.len().saturating_sub(1);
        let mut longest_first = keys[..begun].iter().enumerate().skip(1).rev();
        longest_first.find_map(|(messages, key)| Some((messages, Arc::clone(known.by_end.get(key)?))))
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

    /// A request is asked.
    pub(super) fn ask(&self, keys: &[Key]) {
        self.lock().seen.extend(keys);
    }

    /// A conversation ends with a reply, up to and with which it is `end`.
    pub(super) fn hold(&self, end: Key, turn: Arc<Turn>) {
        let mut known = self.lock();
        known.seen.insert(end);
        known.by_end.insert(end, turn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::said::Said;

    fn said(text: &str) -> Identity {
        Said::reply(text.to_owned(), vec![]).identity()
    }

    fn keys(messages: &[&str]) -> Vec<Key> {
        let mut keys = vec![Key::of_shape(b"shape")];
        for message in messages {
            keys.push(keys[keys.len() - 1].with(&said(message)));
        }
        keys
    }

    #[test]
    fn a_request_goes_on_from_the_longest_conversation() {
        let lineages = Lineages::default();
        let asked = keys(&["u1"]);
        lineages.ask(&asked);
        let first = Turn::new(None, &[1, 2], &[3, 4], CallId::now());
        lineages.hold(asked[1].with(&said("a1")), first);
        let next = keys(&["u1", "a1", "u2"]);
        let (messages, turn) = lineages.longest(&next).expect("it goes on");
        assert_eq!((messages, turn.all_ids()), (2, vec![1, 2, 3, 4]));
        let second = Turn::new(Some(turn), &[1, 2, 3, 4, 9], &[5], CallId::now());
        lineages.hold(next[3].with(&said("a2")), second);
        let (messages, turn) = lineages.longest(&keys(&["u1", "a1", "u2", "a2", "u3"])).expect("it goes on");
        assert_eq!((messages, turn.all_ids(), turn.sampled_ids()), (4, vec![1, 2, 3, 4, 9, 5], &[5][..]));
        // Two branches of one.
        let (messages, turn) = lineages.longest(&keys(&["u1", "a1", "other"])).expect("it goes on");
        assert_eq!((messages, turn.all_ids()), (2, vec![1, 2, 3, 4]));
        assert!(lineages.longest(&keys(&["u1", "a1"])).is_none(), "nothing new is said");
        assert!(lineages.longest(&keys(&["u1", "edited", "u2"])).is_none());
        assert_eq!(lineages.seen(&keys(&["u1", "edited", "u2"])), 1);
        assert_eq!(lineages.seen(&keys(&["u0"])), 0);
    }

    #[test]
    fn a_long_conversation_is_dropped_without_recursion() {
        let mut turn = Turn::new(None, &[0], &[1], CallId::now());
        for _ in 0..200_000 {
            turn = Arc::new(Turn { before: Some(turn), ids: vec![2], sampled: 1, call_id: CallId::now() });
        }
        assert_eq!(turn.len(), 200_002);
    }
}
