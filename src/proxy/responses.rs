//! Responses that later ones go on from (`previous_response_id`). In memory and bounded: harnesses that need a long
//! memory send their whole history, as Codex does.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use crate::protocol::responses::Kept;
use crate::protocol::translate::KeptReply;

/// Bytes of items kept at most; the oldest response is forgotten first.
const MOST_BYTES: usize = 64 << 20;

/// The responses that are kept.
#[derive(Default)]
pub(super) struct Responses {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    by_id: HashMap<String, Vec<Bytes>>,
    oldest_first: VecDeque<String>,
    bytes: usize,
}

impl Responses {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The items that a request goes on from. Ids are random: who knows one has had the response.
    pub(super) fn earlier(&self, kept: &Kept) -> Option<Vec<Bytes>> {
        self.state().by_id.get(kept.previous_response_id.as_ref()?).cloned()
    }

    /// Keeps a response.
    pub(super) fn keep(&self, reply: KeptReply) {
        let mut state = self.state();
        state.bytes += size(&reply.items);
        state.oldest_first.push_back(reply.id.clone());
        if let Some(replaced) = state.by_id.insert(reply.id, reply.items) {
            state.bytes -= size(&replaced);
        }
        while state.bytes > MOST_BYTES {
            let Some(oldest) = state.oldest_first.pop_front() else { break };
            if let Some(items) = state.by_id.remove(&oldest) {
                state.bytes -= size(&items);
            }
        }
    }
}

fn size(items: &[Bytes]) -> usize {
    items.iter().map(Bytes::len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_responses_are_forgotten_first() {
        let store = Responses::default();
        let big = Bytes::from(vec![0u8; MOST_BYTES / 3]);
        for id in ["a", "b", "c", "d"] {
            store.keep(KeptReply { id: id.to_owned(), items: vec![big.clone()] });
        }
        let after =
            |id: &str| store.earlier(&Kept { previous_response_id: Some(id.to_owned()), ..Kept::default() });
        assert!(after("a").is_none());
        assert!(["b", "c", "d"].into_iter().all(|id| after(id).is_some()));
        assert_eq!(store.state().bytes, big.len() * 3);
        assert!(store.earlier(&Kept::default()).is_none());
    }
}
