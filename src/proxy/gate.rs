//! What a trainer outside this process decides: whether calls are let through, and which weights the upstream has.

use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;

/// The gate in front of the upstream. Calls that are under way are not touched; new ones wait at it with their
/// connections kept alive.
pub(super) struct Gate {
    is_open: watch::Sender<bool>,
    version: Mutex<Option<String>>,
}

impl Default for Gate {
    fn default() -> Self {
        Self { is_open: watch::Sender::new(true), version: Mutex::default() }
    }
}

impl Gate {
    pub(super) fn set_open(&self, is_open: bool) {
        self.is_open.send_replace(is_open);
        metrics::gauge!("lego_proxy_paused").set(if is_open { 0.0 } else { 1.0 });
    }

    pub(super) fn is_open(&self) -> bool {
        *self.is_open.borrow()
    }

    /// Returns once the gate is open.
    pub(super) async fn passed(&self) {
        // The sender lives as long as the gate.
        let _ = self.is_open.subscribe().wait_for(|is_open| *is_open).await;
    }

    /// The label of the weights that the upstream has now; `None`: nobody said.
    pub(super) fn version(&self) -> Option<String> {
        self.version.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_version(&self, version: String) {
        *self.version.lock().unwrap_or_else(PoisonError::into_inner) = Some(version);
    }
}
