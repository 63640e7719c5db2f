//! Room for long bodies, in bytes. One of a known length takes all of it before it is read; one that grows takes it part
//! by part.
//!
//! Bodies that grow hold room while they wait for more, so two of them could wait for each other for ever. No part is
//! given of which that could come (Dijkstra's banker): what all of them have, less the one that has most, never is more
//! than what the room has beyond one longest body. So that one can always come to its end, then the next. What is
//! complete waits for no room, and so ends by itself.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The room.
#[derive(Debug)]
pub(super) struct Room {
    bytes: usize,
    /// Of one body.
    longest: usize,
    state: Mutex<State>,
    /// Something was given back, or who waits first is another.
    changed: Notify,
}

#[derive(Debug)]
struct State {
    free: usize,
    /// What bodies have that may need more.
    growing: BTreeMap<u64, usize>,
    /// Bodies that have nothing yet, the first one first. Those that grow are not among them: what they have is of use
    /// to nobody before they are whole.
    queue: VecDeque<u64>,
    next: u64,
}

impl Room {
    /// One body has room in any case.
    pub(super) fn new(bytes: usize, longest: usize) -> Self {
        let bytes = bytes.max(longest);
        let state = State { free: bytes, growing: BTreeMap::new(), queue: VecDeque::new(), next: 0 };
        Self { bytes, longest, state: Mutex::new(state), changed: Notify::new() }
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        self.state().free
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for this much in turn. `grows`: it may need more.
    pub(super) async fn enter(self: &Arc<Self>, bytes: usize, grows: bool) -> Held {
        let bytes = bytes.min(self.bytes);
        let ticket = {
            let mut state = self.state();
            state.next += 1;
            let ticket = state.next;
            state.queue.push_back(ticket);
            ticket
        };
        let _queued = Queued { room: self, ticket };
        self.once(|state| {
            let is_first = state.queue.front() == Some(&ticket);
            if !is_first || bytes > state.free || (grows && !self.is_safe(state, ticket, bytes)) {
                return None;
            }
            state.free -= bytes;
            if grows {
                state.growing.insert(ticket, bytes);
            }
            Some(Held { room: Arc::clone(self), bytes, growing: grows.then_some(ticket) })
        })
        .await
    }

    /// True if all that grow can come to their end where this one has so much.
    fn is_safe(&self, state: &State, ticket: u64, bytes: usize) -> bool {
        let others = || state.growing.iter().filter(|(other, _)| **other != ticket).map(|(_, bytes)| *bytes);
        let (sum, most) = (others().sum::<usize>() + bytes, others().max().unwrap_or(0).max(bytes));
        sum - most <= self.bytes - self.longest
    }

    /// Waits until this gives something.
    async fn once<T>(&self, mut take: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on nothing that changes is missed.
            changed.as_mut().enable();
            if let Some(taken) = take(&mut self.state()) {
                return taken;
            }
            changed.await;
        }
    }
}

/// A place in the queue.
struct Queued<'a> {
    room: &'a Room,
    ticket: u64,
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.room.state().queue.retain(|ticket| *ticket != self.ticket);
        self.room.changed.notify_waiters();
    }
}

/// What a body has of the room, until this is dropped.
#[derive(Debug)]
pub(in crate::proxy) struct Held {
    room: Arc<Room>,
    bytes: usize,
    growing: Option<u64>,
}

impl Held {
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Waits until it has this much.
    pub(super) async fn grow(&mut self, bytes: usize) {
        let bytes = bytes.min(self.room.longest).max(self.bytes);
        let Some(ticket) = self.growing else { return };
        let (room, more) = (&self.room, bytes - self.bytes);
        room.once(|state| {
            if more > state.free || !room.is_safe(state, ticket, bytes) {
                return None;
            }
            state.free -= more;
            state.growing.insert(ticket, bytes);
            Some(())
        })
        .await;
        self.bytes = bytes;
    }

    /// It is whole, and needs no more than this.
    pub(super) fn complete(&mut self, bytes: usize) {
        let mut state = self.room.state();
        if let Some(ticket) = self.growing.take() {
            state.growing.remove(&ticket);
        }
        state.free += self.bytes.saturating_sub(bytes);
        self.bytes = self.bytes.min(bytes);
        drop(state);
        self.room.changed.notify_waiters();
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.complete(0);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn now<T>(future: impl Future<Output = T>) -> Option<T> {
        future.now_or_never()
    }

    #[test]
    fn bodies_that_grow_never_wait_for_each_other_alone() {
        // Whatever their number and steps: as long as some are not whole, one can go on, or none holds any.
        for (bytes, longest) in [(10, 10), (11, 10), (25, 10), (40, 10)] {
            for seed in 0..200_u64 {
                let mut random = seed;
                let mut draw = |most: u64| {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    (random >> 33) % most
                };
                let room = Arc::new(Room::new(bytes, longest));
                let mut running: Vec<Held> = Vec::new();
                let (mut begun, mut whole) = (0, 0);
                while whole < 30 {
                    if begun < 30
                        && draw(2) == 0
                        && let Some(held) = now(room.enter(1, true))
                    {
                        begun += 1;
                        running.push(held);
                    }
                    if running.is_empty() {
                        continue;
                    }
                    let start = usize::try_from(draw(running.len() as u64)).expect("small");
                    let order = (0..running.len()).map(|at| (at + start) % running.len()).collect::<Vec<_>>();
                    let step = 1 + usize::try_from(draw(4)).expect("small");
                    let moved = order.into_iter().find(|at| {
                        let to = (running[*at].bytes + step).min(longest);
                        now(running[*at].grow(to)).is_some()
                    });
                    let at = moved.expect("none can go on");
                    if running[at].bytes == longest || draw(4) == 0 {
                        drop(running.swap_remove(at));
                        whole += 1;
                    }
                }
                assert_eq!(room.free(), bytes);
            }
        }
    }

    #[test]
    fn who_waits_for_all_at_once_does_not_keep_one_that_grows_from_its_end() {
        let room = Arc::new(Room::new(8, 4));
        let complete = now(room.enter(4, false)).expect("room");
        let mut growing = now(room.enter(2, true)).expect("room");
        let mut waiting = Box::pin(room.enter(4, false));
        assert!(waiting.as_mut().now_or_never().is_none());
        assert!(now(room.enter(1, false)).is_none(), "it came later");
        now(growing.grow(4)).expect("room");
        assert_eq!(room.free(), 0);
        growing.complete(3);
        drop(complete);
        let held = waiting.as_mut().now_or_never().expect("room");
        assert_eq!((held.bytes(), room.free()), (4, 1));
        // Who gives its wait up is nobody's way.
        drop(Box::pin(room.enter(4, false)).now_or_never());
        assert!(now(room.enter(1, false)).is_some());
        drop((held, growing));
        assert_eq!(room.free(), 8);
    }
}
