//! Calls to SGLang's native endpoint: completions, which it answers with all ids, and clients of its own protocol.

use super::Call;
use crate::protocol::completions::{self, Prompt};
use crate::protocol::{generate, json};
use crate::proxy::face::Face;
use crate::proxy::routes::Route;
use crate::record::{ClientApi, UpstreamKind};
use crate::upstream::dialect::Prepared;
use crate::upstream::sglang_request::{self, Asking};
use crate::upstream::{self, Capabilities, UpstreamError, UpstreamReply};

/// A request that was read once cannot be read.
const NOT_AGAIN: json::ScanError = json::ScanError { expected: "a request", at: 0 };

/// Completions of a server that is known to have no such endpoint go to its own.
pub(super) fn speak_as_known(route: &Route, face: &mut Face) {
    let is_missing = || route.upstream.known_native().is_some_and(|native| !native.is_there);
    if face.upstream_api == ClientApi::SglangGenerate && face.writer.is_some() && is_missing() {
        face.speak_plainly();
    }
}

impl Call {
    /// What the endpoint gives, found out by the first call that needs to know. Completions of a server that has no
    /// such endpoint go to its own.
    pub(super) async fn native(&mut self, face: &mut Face) -> Capabilities {
        let assumed = Capabilities::assumed(UpstreamKind::Sglang);
        let Some(native) = self.found_of_native().await else {
            return assumed;
        };
        if face.writer.is_none() {
            return Capabilities { routing: native.routing, ..assumed };
        }
        if !native.is_there {
            if !self.leave_tokens(face) {
                face.speak_plainly();
            }
            return assumed;
        }
        // A stream would repeat the prompt's ids in every event, and older releases do not tell them at all.
        let has_ids = self.rendered.is_some();
        if !has_ids && self.route.wanted.token_ids && (self.request.is_stream || !native.prompt_ids) {
            self.prompt_ids = self.tokenized(self.upstream_model()).await;
        }
        Capabilities { routing: native.routing, ..assumed }
    }

    /// The ids of a completions request's texts; `None` where it has ids itself, or the upstream does not say.
    async fn tokenized(&self, model: &str) -> Option<Vec<u8>> {
        let request = completions::Request::parse(self.request.body().clone()).ok()?;
        let has_text = request.prompts.iter().any(|prompt| matches!(prompt, Prompt::Text(_)));
        let prompt = request.object().raw("prompt").filter(|_| has_text)?;
        let upstream = &self.route.upstream;
        if !upstream.tokenizes() {
            return None;
        }
        // It goes out in the call's turn, and the call in another. Where there is none in time, the call has its own.
        let turn = self.route.limits.another().ok()?;
        tokio::select! {
            biased;
            _ = self.abort.cancelled() => None,
            ids = async {
                let ids = upstream::tokenized(upstream, model, prompt).await;
                tokio::time::sleep_until(turn).await;
                ids
            } => ids,
        }
    }

    /// True if there is no such endpoint after all, as the reply to a call of completions says: it goes to the server's
    /// own then.
    pub(super) fn is_without_native(
        &self,
        face: &mut Face,
        first: &Result<UpstreamReply, UpstreamError>,
    ) -> bool {
        let is_missing = face.upstream_api == ClientApi::SglangGenerate
            && face.writer.is_some()
            && first.as_ref().is_ok_and(|reply| upstream::is_missing(reply.status.as_u16()));
        if is_missing {
            self.route.upstream.set_without_native();
            face.speak_plainly();
        }
        is_missing
    }

    pub(super) fn prepared_natively(
        &self,
        face: &Face,
        capabilities: Capabilities,
    ) -> Result<Prepared, json::ScanError> {
        let asking = Asking {
            wanted: self.route.wanted,
            routing: self.route.upstream.routing_hint().is_some() && capabilities.routing,
            plan: self.plan,
        };
        let body = self.request.body().clone();
        if face.writer.is_none() {
            let request = generate::Request::parse(body).map_err(|_| NOT_AGAIN)?;
            return sglang_request::of_native(asking, &request);
        }
        let request = completions::Request::parse(body).map_err(|_| NOT_AGAIN)?;
        Ok(sglang_request::of_completions(asking, &request, self.prompt_ids.as_deref()))
    }
}
