//! Rows of expert routing that were left out of a call because an earlier one of its session has them, put back.
//!
//! What is remembered for the calls that follow is bounded. Sessions that were not read for longest are forgotten first,
//! and are read again, once and as a whole, when one of their calls comes; of a session that is too large by itself the
//! rows that its last call needed stay.

use std::collections::{HashMap, HashSet};

use bytes::{Bytes, BytesMut};

use crate::record::{Call, Routing, RoutingBase, RoutingShape, SessionId};

/// Bytes of rows that are remembered, beyond those that one call needs.
const MAX_BYTES: usize = 256 << 20;
/// Calls that one goes on from, one after the other: only a damaged store has more.
const MAX_STEPS: usize = 100_000;
/// Bases of which it is remembered that they are not to be had.
const MAX_MISSING: usize = 100_000;

/// Puts rows back. It remembers those of the calls that it saw.
#[derive(Debug)]
pub(super) struct Joiner {
    most_bytes: usize,
    bytes: usize,
    sessions: HashMap<SessionId, Seen>,
    /// They are looked for once.
    missing: HashSet<RoutingBase>,
    /// Counts the calls.
    now: u64,
}

/// The rows of one session's calls, as they lie in the store.
#[derive(Debug, Default)]
struct Seen {
    pieces: HashMap<RoutingBase, Piece>,
    bytes: usize,
    used: u64,
}

#[derive(Debug)]
struct Piece {
    routing: Routing,
    used: u64,
}

impl Default for Joiner {
    fn default() -> Self {
        Self { most_bytes: MAX_BYTES, bytes: 0, sessions: HashMap::new(), missing: HashSet::new(), now: 0 }
    }
}

/// The name of a call among those that others go on from.
pub(super) fn name(call: &Call) -> RoutingBase {
    RoutingBase { call_id: call.call_id, choice_index: call.choice_index }
}

impl Joiner {
    /// Gives the call all of its rows. `read` gives those of all calls of a session, as they lie in the store; what cannot
    /// be read it leaves out. Where a base is not to be had the call has no routing, and says so.
    ///
    /// # Errors
    /// Those of `read`.
    pub(super) fn join<E>(
        &mut self,
        call: &mut Call,
        read: impl FnOnce(&SessionId) -> Result<Vec<(RoutingBase, Routing)>, E>,
    ) -> Result<(), E> {
        let Some(routing) = call.routing.take() else {
            return Ok(());
        };
        self.now += 1;
        self.remember(&call.session_id, name(call), routing.clone());
        if routing.base().is_none() {
            call.routing = Some(routing);
        } else {
            call.routing = self.whole(&call.session_id, &routing, read)?;
        }
        // It is what the next one goes on from.
        self.piece(&call.session_id, name(call));
        self.forget(&call.session_id);
        if call.routing.is_none() {
            call.trainable = false;
            call.not_trainable_reasons.push("routing_base_missing".to_owned());
        }
        Ok(())
    }

    fn remember(&mut self, session: &SessionId, name: RoutingBase, routing: Routing) {
        let bytes = routing.data().len();
        let seen = self.sessions.entry(session.clone()).or_default();
        seen.used = self.now;
        let before = seen.pieces.insert(name, Piece { routing, used: self.now });
        let before = before.map_or(0, |piece| piece.routing.data().len());
        seen.bytes += bytes;
        seen.bytes -= before;
        self.bytes += bytes;
        self.bytes -= before;
    }

    /// Makes room. `current` was read last.
    fn forget(&mut self, current: &SessionId) {
        while self.bytes > self.most_bytes {
            let others = self.sessions.iter().filter(|(session, _)| *session != current);
            let Some(oldest) = others.min_by_key(|(_, seen)| seen.used).map(|(session, _)| session.clone())
            else {
                break;
            };
            self.bytes -= self.sessions.remove(&oldest).map_or(0, |seen| seen.bytes);
        }
        if self.bytes > self.most_bytes
            && let Some(seen) = self.sessions.get_mut(current)
        {
            seen.pieces.retain(|_, piece| piece.used == self.now);
            seen.bytes = seen.pieces.values().map(|piece| piece.routing.data().len()).sum();
            self.bytes = seen.bytes;
        }
    }

    fn piece(&mut self, session: &SessionId, base: RoutingBase) -> Option<Routing> {
        let seen = self.sessions.get_mut(session)?;
        let piece = seen.pieces.get_mut(&base)?;
        (seen.used, piece.used) = (self.now, self.now);
        Some(piece.routing.clone())
    }

    fn whole<E>(
        &mut self,
        session: &SessionId,
        last: &Routing,
        read: impl FnOnce(&SessionId) -> Result<Vec<(RoutingBase, Routing)>, E>,
    ) -> Result<Option<Routing>, E> {
        let missing = match self.walk(session, last) {
            Ok(whole) => return Ok(whole),
            Err(missing) => missing,
        };
        if self.missing.contains(&missing) {
            return Ok(None);
        }
        for (name, routing) in read(session)? {
            self.remember(session, name, routing);
        }
        // Of what was just read only what this call goes on from is in use.
        self.now += 1;
        Ok(self.walk(session, last).unwrap_or_else(|missing| {
            if self.missing.len() >= MAX_MISSING {
                self.missing.clear();
            }
            self.missing.insert(missing);
            None
        }))
    }

    /// All rows up to those of `last`; `None` if they do not fit together.
    ///
    /// # Errors
    /// The base that is not remembered.
    fn walk(&mut self, session: &SessionId, last: &Routing) -> Result<Option<Routing>, RoutingBase> {
        // From the last rows to the first ones: each piece with the row at which it ends for the one behind it.
        let mut pieces: Vec<Bytes> = vec![last.data().clone()];
        let (shape, mut needed, mut next) = (*last.shape(), last.shape().start, last.base());
        let mut steps = 0;
        while let Some(base) = next {
            steps += 1;
            let piece = self.piece(session, base).ok_or(base)?;
            let of = piece.shape();
            let is_alike =
                RoutingShape { start: 0, rows: 0, ..*of } == RoutingShape { start: 0, rows: 0, ..shape };
            if !is_alike || needed > of.start + of.rows || steps > MAX_STEPS {
                return Ok(None);
            }
            // One that begins behind what is needed only shares its own base.
            if of.start < needed {
                let row_bytes = piece.data().len() / of.rows.max(1) as usize;
                pieces.push(piece.data().slice(..row_bytes * (needed - of.start) as usize));
                needed = of.start;
            }
            next = piece.base();
        }
        let mut data = BytesMut::with_capacity(pieces.iter().map(Bytes::len).sum());
        pieces.iter().rev().for_each(|piece| data.extend_from_slice(piece));
        let rows = shape.start - needed + shape.rows;
        Ok(Routing::new(RoutingShape { start: needed, rows, ..shape }, data.freeze()).ok())
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::record::{CallId, LayerAxis, RoutingDtype, example};

    const ROW_BYTES: usize = 2;

    /// The calls of a session, of which each adds a row to those of the one before it.
    fn session(name: &str, turns: u32) -> Vec<Call> {
        let mut calls: Vec<Call> = Vec::new();
        for turn in 0..turns {
            let ids: Vec<u32> = (0..2 * (turn + 1)).collect();
            let shape = RoutingShape {
                start: 0,
                rows: turn + 1,
                layers: 1,
                layer_axis: LayerAxis::MoeOnly,
                top_k: 2,
                dtype: RoutingDtype::U8,
            };
            let whole = Routing::pack(shape, &ids).expect("two a row");
            let mut call = example::call(serde_json::json!({"upstream_kind": "vllm"}));
            (call.call_id, call.session_id) = (CallId::now(), name.parse().expect("an id"));
            call.routing = Some(match calls.last() {
                Some(before) => whole.without_first(turn, super::name(before)),
                None => whole,
            });
            calls.push(call);
        }
        calls
    }

    /// Joins these calls of a store, in this order; gives how often a session was read again.
    fn joined(
        joiner: &mut Joiner,
        store: &[Vec<Call>],
        order: impl IntoIterator<Item = (usize, usize)>,
    ) -> usize {
        let mut reads = 0;
        for (session, turn) in order {
            let mut call = store[session][turn].clone();
            let read = |id: &SessionId| {
                reads += 1;
                let calls = store.iter().flatten().filter(|call| call.session_id == *id);
                let of = |call: &Call| Some((name(call), call.routing.clone()?));
                Ok::<_, Infallible>(calls.filter_map(of).collect())
            };
            joiner.join(&mut call, read).expect("infallible");
            let routing = call.routing.expect("all rows");
            assert_eq!((routing.shape().start, routing.shape().rows as usize), (0, turn + 1));
            assert!(routing.ids().eq(0..2 * (turn as u32 + 1)));
            let counted: usize = joiner.sessions.values().map(|seen| seen.bytes).sum();
            let held = joiner.sessions.values().flat_map(|seen| seen.pieces.values());
            let held: usize = held.map(|piece| piece.routing.data().len()).sum();
            assert_eq!((joiner.bytes, counted), (held, held));
            assert!(held <= joiner.most_bytes.max((turn + 1) * ROW_BYTES), "{held}");
        }
        reads
    }

    fn small(rows: usize) -> Joiner {
        Joiner { most_bytes: rows * ROW_BYTES, ..Joiner::default() }
    }

    #[test]
    fn a_session_that_follows_others_is_never_read_again() {
        let store: Vec<_> = ["a", "b", "c"].map(|name| session(name, 20)).into();
        let one_by_one = (0..3).flat_map(|session| (0..20).map(move |turn| (session, turn)));
        assert_eq!(joined(&mut small(21), &store, one_by_one), 0);
        let interleaved = (0..20).flat_map(|turn| (0..3).map(move |session| (session, turn)));
        assert_eq!(joined(&mut small(60), &store, interleaved), 0);
    }

    #[test]
    fn a_call_whose_session_was_forgotten_reads_it_once() {
        let store: Vec<_> = ["a", "b", "c"].map(|name| session(name, 20)).into();
        let interleaved = (0..20).flat_map(|turn| (0..3).map(move |session| (session, turn)));
        let reads = joined(&mut small(10), &store, interleaved);
        assert!(reads > 0 && reads <= 3 * 19, "{reads}");
        // One call alone reads its session once, however long the chain.
        assert_eq!(joined(&mut small(10), &store, [(1, 19), (1, 18), (1, 17)]), 1);
    }

    #[test]
    fn what_the_last_call_of_a_large_session_needed_stays() {
        let store = vec![session("a", 50)];
        assert_eq!(joined(&mut small(5), &store, (0..50).map(|turn| (0, turn))), 0);
        // Also after it was read again, which gives the rows of all its calls.
        assert_eq!(joined(&mut small(5), &store, (10..50).map(|turn| (0, turn))), 1);
    }

    #[test]
    fn a_base_that_is_gone_is_looked_for_once() {
        let mut calls = session("a", 5);
        calls.remove(1);
        let (mut joiner, mut reads) = (Joiner::default(), 0);
        for (at, call) in calls.clone().iter_mut().enumerate() {
            let read = |_: &SessionId| {
                reads += 1;
                let of = |call: &Call| Some((name(call), call.routing.clone()?));
                Ok::<_, Infallible>(calls.iter().filter_map(of).collect())
            };
            joiner.join(call, read).expect("infallible");
            assert_eq!(call.routing.is_some(), at == 0);
            assert_eq!(call.not_trainable_reasons.contains(&"routing_base_missing".to_owned()), at > 0);
        }
        assert_eq!(reads, 1);
    }
}
