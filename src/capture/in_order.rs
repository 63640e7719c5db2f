//! Calls in the order in which they were made, however they lie, in bounded memory.
//!
//! The order is read first, without what makes calls large. A call that comes too early waits, up to [`MAX_BYTES`] of
//! them; what is beyond is let go of, and read again when its turn comes.

use std::collections::{BTreeMap, VecDeque};

use super::compact::memory_bytes;
use super::error::CaptureError;
use super::place::Place;
use super::reader::{Query, Reader};
use crate::record::{Call, CallId};

/// Bytes of calls that wait.
const MAX_BYTES: usize = 64 << 20;

/// What the order is: when a call was received, which it is, which choice.
type Key = (i64, CallId, u16);

fn key(call: &Call) -> Key {
    (call.received_at, call.call_id, call.choice_index)
}

/// Gives the calls that `query` asks for, oldest first; those that come while it reads are left out. Returns what of the
/// store was left out, in words ([`Reader::left_out`]).
///
/// # Errors
/// The folder is missing or a file cannot be read; or those of `give`, with which it ends.
pub fn in_order<E: From<CaptureError>>(
    dir: impl Into<Place>,
    query: &Query,
    give: &mut dyn FnMut(Call) -> Result<(), E>,
) -> Result<Vec<String>, E> {
    let dir = dir.into();
    Order::read(&dir, query, &mut |_| true)?.give(&dir, query, give)
}

/// Which calls there are, and in which order.
#[derive(Debug)]
pub struct Order(VecDeque<Key>);

impl Order {
    /// Of the calls that `query` asks for, those that are `wanted`, which is asked without bodies and routing.
    ///
    /// # Errors
    /// The folder is missing or a file cannot be read.
    pub fn read(
        dir: &Place,
        query: &Query,
        wanted: &mut dyn FnMut(&Call) -> bool,
    ) -> Result<Self, CaptureError> {
        let lean = Query { without_bodies: true, without_routing: true, as_stored: true, ..query.clone() };
        let mut order = vec![];
        for call in Reader::open(dir.clone(), lean)? {
            let call = call?;
            if wanted(&call) {
                order.push(key(&call));
            }
        }
        order.sort_unstable();
        Ok(Self(order.into()))
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The last `count` of them.
    #[must_use]
    pub fn newest(mut self, count: usize) -> Self {
        self.0.drain(..self.len().saturating_sub(count));
        self
    }

    /// Gives these calls, whatever came since. Returns what of the store was left out, in words ([`Reader::left_out`]).
    ///
    /// # Errors
    /// A file cannot be read; or those of `give`, with which it ends.
    pub fn give<E: From<CaptureError>>(
        self,
        dir: &Place,
        query: &Query,
        give: &mut dyn FnMut(Call) -> Result<(), E>,
    ) -> Result<Vec<String>, E> {
        self.of_most(dir, query, MAX_BYTES, give)
    }

    fn of_most<E: From<CaptureError>>(
        self,
        dir: &Place,
        query: &Query,
        most_bytes: usize,
        give: &mut dyn FnMut(Call) -> Result<(), E>,
    ) -> Result<Vec<String>, E> {
        let mut order = self.0;
        let (mut waiting, mut bytes) = (BTreeMap::new(), 0);
        let mut reader = Reader::open(dir.clone(), query.clone())?;
        for call in reader.by_ref() {
            let call = call?;
            if order.binary_search(&key(&call)).is_err() {
                continue;
            }
            bytes += memory_bytes(&call);
            waiting.insert(key(&call), call);
            while order.front().is_some_and(|next| waiting.contains_key(next)) {
                give_next(dir, query, &mut order, &mut waiting, &mut bytes, give)?;
            }
            while bytes > most_bytes
                && waiting.len() > 1
                && let Some((_, last)) = waiting.pop_last()
            {
                bytes -= memory_bytes(&last);
            }
        }
        while !order.is_empty() {
            give_next(dir, query, &mut order, &mut waiting, &mut bytes, give)?;
        }
        Ok(reader.left_out())
    }
}

/// Gives the next one, read again if it was let go of. One that is gone meanwhile is none.
fn give_next<E: From<CaptureError>>(
    dir: &Place,
    query: &Query,
    order: &mut VecDeque<Key>,
    waiting: &mut BTreeMap<Key, Call>,
    bytes: &mut usize,
    give: &mut dyn FnMut(Call) -> Result<(), E>,
) -> Result<(), E> {
    let Some(next) = order.pop_front() else {
        return Ok(());
    };
    if let Some(call) = waiting.remove(&next) {
        *bytes -= memory_bytes(&call);
        return give(call);
    }
    for call in Reader::open(dir.clone(), Query { call_id: Some(next.1), ..query.clone() })? {
        let call = call?;
        if key(&call) == next {
            return give(call);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::{Writer, WriterOptions};
    use crate::record::{CallSink as _, example};

    #[tokio::test]
    async fn calls_come_oldest_first_however_many_may_wait() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut open = None;
        // Two files, and a journal; no order in any.
        for part in 0..3_i64 {
            let writer = Writer::open(dir.path(), WriterOptions::default()).expect("a free folder");
            for number in 0..20_i64 {
                let of = serde_json::json!({
                    "session_id": "s", "received_at": (number * 7 % 20) * 3 + part, "client_request": [number],
                });
                writer.append(vec![example::call(of)]).await.expect("room");
            }
            if part < 2 {
                writer.close().await;
            } else {
                open = Some(writer);
            }
        }
        let query = Query::session("s".parse().expect("an id"));
        let place = Place::from(dir.path());
        for (most, newest) in [(0, 60), (20_000, 60), (usize::MAX, 60), (0, 7), (usize::MAX, 7)] {
            let mut times = vec![];
            let mut give = |call: Call| {
                assert!(call.client_request.is_some());
                times.push(call.received_at);
                Ok::<(), CaptureError>(())
            };
            let order = Order::read(&place, &query, &mut |_| true).expect("readable");
            assert_eq!(order.len(), 60);
            let left_out = order.newest(newest).of_most(&place, &query, most, &mut give).expect("whole");
            assert_eq!(left_out, [] as [String; 0]);
            assert_eq!(times, (60 - newest as i64..60).collect::<Vec<_>>(), "{most}");
        }
        drop(open);
    }
}
