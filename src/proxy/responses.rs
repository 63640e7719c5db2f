//! Responses that later ones go on from (`previous_response_id`), and the sessions that they were of. In memory and
//! bounded: harnesses that need a long memory send their whole history, as Codex does.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use crate::protocol::responses::Kept;
use crate::protocol::translate::KeptReply;
use crate::record::SessionId;

/// Bytes of items kept at most; the oldest response is forgotten first.
const MOST_BYTES: usize = 64 << 20;
/// Responses whose session is remembered at most; the oldest is forgotten first.
const MOST_SESSIONS: usize = 50_000;
/// No longer id is remembered.
const LONGEST_ID: usize = 256;

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
    sessions: HashMap<String, SessionId>,
    oldest_session_first: VecDeque<String>,
}

impl Responses {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The items that a request goes on from. Ids are random: who knows one has had the response.
    pub(super) fn earlier(&self, kept: &Kept) -> Option<Vec<Bytes>> {
        self.state().by_id.get(kept.previous_response_id.as_ref()?).cloned()
    }

    /// Remembers which session a response was of.
    pub(super) fn was_of(&self, id: &str, session: &SessionId) {
        if id.len() > LONGEST_ID {
            return;
        }
        let mut state = self.state();
        if state.sessions.insert(id.to_owned(), session.clone()).is_some() {
            return;
        }
        state.oldest_session_first.push_back(id.to_owned());
        if state.oldest_session_first.len() > MOST_SESSIONS
            && let Some(oldest) = state.oldest_session_first.pop_front()
        {
            state.sessions.remove(&oldest);
        }
    }

    /// The session that a response was of, if that is remembered.
    pub(super) fn session_of(&self, id: &str) -> Option<SessionId> {
        self.state().sessions.get(id).cloned()
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

    #[test]
    fn the_sessions_of_the_last_responses_are_known() {
        let store = Responses::default();
        let session: SessionId = "s1".parse().expect("an id");
        for number in 0..=MOST_SESSIONS {
            store.was_of(&number.to_string(), &session);
            store.was_of("1", &session);
        }
        store.was_of(&"x".repeat(LONGEST_ID + 1), &session);
        assert_eq!((store.session_of("0"), store.session_of("1")), (None, Some(session)));
        assert_eq!(store.state().sessions.len(), MOST_SESSIONS);
    }
}
