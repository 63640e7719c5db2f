//! Rows of expert routing that were left out of a call because an earlier one has them, put back.

use std::collections::HashMap;

use bytes::{Bytes, BytesMut};

use crate::record::{Call, Routing, RoutingBase, RoutingShape};

/// Bytes of rows that are remembered for the calls that follow. What is no longer there is read again.
const MAX_BYTES: usize = 256 << 20;
/// Calls that one goes on from, one after the other: only a damaged store has more.
const MAX_STEPS: usize = 100_000;

/// Puts rows back. It remembers those of the calls that it saw.
#[derive(Debug, Default)]
pub(super) struct Joiner {
    seen: HashMap<RoutingBase, Routing>,
    bytes: usize,
}

impl Joiner {
    /// Gives the call all of its rows. `read` gives a call of the store as it lies there. Where a base is not to be had
    /// the call has no routing, and says so.
    ///
    /// # Errors
    /// Those of `read`.
    pub(super) fn join<E>(
        &mut self,
        call: &mut Call,
        mut read: impl FnMut(RoutingBase) -> Result<Option<Call>, E>,
    ) -> Result<(), E> {
        let Some(routing) = call.routing.take() else {
            return Ok(());
        };
        self.remember(call, &routing);
        call.routing = if routing.base().is_none() { Some(routing) } else { self.whole(routing, &mut read)? };
        if call.routing.is_none() {
            call.trainable = false;
            call.not_trainable_reasons.push("routing_base_missing".to_owned());
        }
        Ok(())
    }

    fn remember(&mut self, call: &Call, routing: &Routing) {
        if self.bytes > MAX_BYTES {
            (self.seen, self.bytes) = (HashMap::new(), 0);
        }
        self.bytes += routing.data().len();
        let key = RoutingBase { call_id: call.call_id, choice_index: call.choice_index };
        self.seen.insert(key, routing.clone());
    }

    fn whole<E>(
        &mut self,
        last: Routing,
        read: &mut impl FnMut(RoutingBase) -> Result<Option<Call>, E>,
    ) -> Result<Option<Routing>, E> {
        // From the last rows to the first ones: each piece with the row at which it ends for the one behind it.
        let mut pieces: Vec<Bytes> = vec![last.data().clone()];
        let (shape, mut needed, mut next) = (*last.shape(), last.shape().start, last.base());
        let mut steps = 0;
        while let Some(base) = next {
            steps += 1;
            let piece = match self.seen.get(&base) {
                Some(piece) => piece.clone(),
                None => {
                    let Some(mut call) = read(base)? else {
                        return Ok(None);
                    };
                    let Some(piece) = call.routing.take() else {
                        return Ok(None);
                    };
                    self.remember(&call, &piece);
                    piece
                }
            };
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
