//! What an upstream can give, found out by the first call that needs to know.

use std::sync::Arc;

use super::Call;
use crate::proxy::face::Face;
use crate::proxy::probe;
use crate::record::ClientApi;
use crate::upstream::{Capabilities, Native};

impl Call {
    /// What it gives to chat.
    pub(super) async fn capabilities(&self, face: &Face) -> Capabilities {
        let inner = &self.inner;
        let upstream = &self.route.upstream;
        let assumed = Capabilities::assumed(upstream.kind());
        if !inner.options.probes_upstream || face.upstream_api != ClientApi::OpenaiChat {
            return assumed;
        }
        if let Some(found) = upstream.known_capabilities() {
            return found;
        }
        // In a task of its own: what was sent is recorded, whoever goes away meanwhile.
        let probed = inner.running.spawn(probe::run(
            Arc::clone(inner),
            Arc::clone(upstream),
            Arc::clone(&self.session),
            self.upstream_model().to_owned(),
        ));
        tokio::select! {
            biased;
            _ = self.abort.cancelled() => assumed,
            found = probed => found.unwrap_or(assumed),
        }
    }

    /// What SGLang's native endpoint gives; `None`: the call was given up meanwhile.
    pub(super) async fn found_of_native(&self) -> Option<Native> {
        let (inner, upstream) = (&self.inner, &self.route.upstream);
        if !inner.options.probes_upstream {
            return Some(Native::ASSUMED);
        }
        if let Some(found) = upstream.known_native() {
            return Some(found);
        }
        // In a task of its own: what was sent is recorded, whoever goes away meanwhile.
        let probed = inner.running.spawn(probe::run_native(
            Arc::clone(inner),
            Arc::clone(upstream),
            Arc::clone(&self.session),
            self.upstream_model().to_owned(),
        ));
        tokio::select! {
            biased;
            _ = self.abort.cancelled() => None,
            found = probed => Some(found.unwrap_or(Native::ASSUMED)),
        }
    }
}
