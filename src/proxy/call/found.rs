//! What an upstream can give, found out by the first call that needs to know.

use super::Call;
use crate::proxy::face::Face;
use crate::proxy::probe;
use crate::record::ClientApi;
use crate::upstream::vllm_generate::TokenStreams;
use crate::upstream::{Additions, Capabilities, Native};

impl Call {
    /// What it gives to chat.
    pub(super) async fn capabilities(&self, face: &Face) -> Capabilities {
        let upstream = &self.route.upstream;
        let assumed = Capabilities::assumed(upstream.kind());
        // Of a call with tokens only routing is left to be found out.
        let has_routing = self.rendered.is_some() && self.route.upstream.routing_hint().is_some();
        let is_chat = face.upstream_api == ClientApi::OpenaiChat || has_routing;
        if !self.inner.options.probes_upstream || !is_chat {
            return assumed;
        }
        if let Some(found) = upstream.known_capabilities() {
            return found;
        }
        // It is not asked for what the probe would find out about.
        if upstream.additions(self.upstream_model()) != Additions::All {
            return assumed;
        }
        let model = self.upstream_model().to_owned();
        let (inner, upstream, session) = (self.inner.clone(), upstream.clone(), self.session.clone());
        self.asked(probe::run(inner, upstream, session, model), assumed).await.unwrap_or(assumed)
    }

    /// What SGLang's native endpoint gives; `None`: the call was given up meanwhile.
    pub(super) async fn found_of_native(&self) -> Option<Native> {
        let upstream = &self.route.upstream;
        if let Some(found) = upstream.known_native() {
            return Some(found);
        }
        if !self.inner.options.probes_upstream {
            return Some(Native::ASSUMED);
        }
        let model = self.upstream_model().to_owned();
        let (inner, upstream, session) = (self.inner.clone(), upstream.clone(), self.session.clone());
        self.asked(probe::run_native(inner, upstream, session, model), Native::ASSUMED).await
    }

    /// What streams of vLLM's token endpoint give; `None`: the call was given up meanwhile.
    pub(super) async fn found_of_streams(&self) -> Option<TokenStreams> {
        let upstream = &self.route.upstream;
        if let Some(found) = upstream.known_streams() {
            return Some(found);
        }
        let model = self.upstream_model().to_owned();
        let (inner, upstream, session) = (self.inner.clone(), upstream.clone(), self.session.clone());
        self.asked(probe::run_streams(inner, upstream, session, model), TokenStreams::MISSING).await
    }

    /// What `probe` finds, or `assumed` if it breaks; `None`: the call was given up meanwhile.
    ///
    /// The probe is a task of its own: what was sent is recorded, whoever goes away.
    async fn asked<T: Send + 'static>(
        &self,
        probe: impl Future<Output = T> + Send + 'static,
        assumed: T,
    ) -> Option<T> {
        let probed = self.inner.running.spawn(probe);
        tokio::select! {
            biased;
            _ = self.abort.cancelled() => None,
            found = probed => Some(found.unwrap_or(assumed)),
        }
    }
}
