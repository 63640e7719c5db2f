//! What a trainer outside this process decides: whether calls are let through, and which weights the upstream has.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tokio::sync::watch;

/// The weights' version by lego's clock when a call was sent upstream; empty before.
pub(super) type VersionAtStart = Arc<OnceLock<Option<String>>>;

/// The gate in front of the upstream. Calls that are under way are not touched, unless they can go on later and are
/// told to stop; new ones wait at it with their connections kept alive.
pub(super) struct Gate {
    is_open: watch::Sender<bool>,
    /// Counts the times that running calls were to let go of their upstream.
    interrupts: watch::Sender<u64>,
    counts: Arc<Counts>,
    version: Mutex<Option<String>>,
}

impl Default for Gate {
    fn default() -> Self {
        Self {
            is_open: watch::Sender::new(true),
            interrupts: watch::Sender::new(0),
            counts: Arc::default(),
            version: Mutex::default(),
        }
    }
}

impl Gate {
    pub(super) fn set_open(&self, is_open: bool) {
        self.is_open.send_replace(is_open);
        metrics::gauge!("lego_proxy_paused").set(if is_open { 0.0 } else { 1.0 });
    }

    /// Closes the gate; running calls that can go on later ([`interrupts`](Self::interrupts)) stop and wait at it.
    pub(super) fn interrupt(&self) {
        self.set_open(false);
        self.interrupts.send_modify(|count| *count += 1);
    }

    /// Changes when running calls are to let go of their upstream.
    pub(super) fn interrupts(&self) -> watch::Receiver<u64> {
        self.interrupts.subscribe()
    }

    pub(super) fn is_open(&self) -> bool {
        *self.is_open.borrow()
    }

    /// Returns once the gate is open.
    pub(super) async fn passed(&self) {
        if self.is_open() {
            return;
        }
        let _waiting = Waiting::new(&self.counts);
        // The sender lives as long as the gate.
        let _ = self.is_open.subscribe().wait_for(|is_open| *is_open).await;
    }

    /// A call is let in. It runs until this is dropped, except while it waits at the gate.
    pub(super) fn enter(&self) -> Running {
        self.counts.running.fetch_add(1, Ordering::AcqRel);
        Running(Arc::clone(&self.counts))
    }

    /// Calls that run, and calls that wait at the gate. While it is closed and none runs, none is at the upstream.
    pub(super) fn calls(&self) -> (usize, usize) {
        (self.counts.running.load(Ordering::Acquire), self.counts.waiting.load(Ordering::Acquire))
    }

    /// The label of the weights that the upstream has now; `None`: nobody said.
    pub(super) fn version(&self) -> Option<String> {
        self.version.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_version(&self, version: String) {
        *self.version.lock().unwrap_or_else(PoisonError::into_inner) = Some(version);
    }
}

#[derive(Default)]
struct Counts {
    running: AtomicUsize,
    waiting: AtomicUsize,
}

/// A call that was let in.
pub(super) struct Running(Arc<Counts>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A call that waits at the gate, and so does not run.
struct Waiting<'a>(&'a Counts);

impl<'a> Waiting<'a> {
    fn new(counts: &'a Counts) -> Self {
        counts.waiting.fetch_add(1, Ordering::AcqRel);
        counts.running.fetch_sub(1, Ordering::AcqRel);
        in_gauges(1.0);
        Self(counts)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_add(1, Ordering::AcqRel);
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
        in_gauges(-1.0);
    }
}

/// So many more calls wait, which are not at the upstream. Their recorders count them as in flight.
fn in_gauges(waiting: f64) {
    metrics::gauge!("lego_proxy_calls_waiting", "reason" => "pause").increment(waiting);
    metrics::gauge!("lego_proxy_calls_in_flight").decrement(waiting);
}
