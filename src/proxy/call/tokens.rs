//! Calls that ask with tokens.

use super::Call;
use crate::protocol::{chat, completions, json};
use crate::proxy::face::{self, Face, Incoming};
use crate::proxy::token_in::{self, Rendered};
use crate::record::{ClientApi, UpstreamKind};
use crate::upstream::dialect::{self, Approach, Prepared, Wanted};
use crate::upstream::sglang_request::{self, Asking};
use crate::upstream::{self, Additions, Capabilities, UpstreamError, UpstreamReply};

impl Call {
    /// Renders the prompt, where the route asks with tokens. What cannot be said so is said in chat.
    pub(super) async fn render(&mut self, face: &mut Face) {
        let Some(renderer) = &self.route.renderer else {
            return;
        };
        if face.upstream_api != ClientApi::OpenaiChat || !self.takes_tokens() {
            return;
        }
        let names = face::names(self.request.body());
        let (lineages, volatile) = (&self.session.lineages, &self.inner.options.volatile);
        let rendered = tokio::select! {
            biased;
            _ = self.abort.cancelled() => return,
            rendered = Rendered::of(renderer, lineages, &self.request, volatile, names) => rendered,
        };
        match rendered {
            Ok(rendered) => {
                let is_native = self.route.upstream.kind() == UpstreamKind::Sglang;
                face.ask_with_tokens(&rendered, is_native);
                token_in::count(rendered.outcome());
                self.rendered = Some(rendered);
            }
            Err(why) => {
                tracing::debug!(%why, "asked in chat's words: tokens cannot stand for a part of the request");
                token_in::count(token_in::IN_CHAT);
            }
        }
    }

    /// False where the upstream is known to have no endpoint for them, or to refuse what makes it tell ids.
    fn takes_tokens(&self) -> bool {
        let upstream = &self.route.upstream;
        let kind = upstream.kind();
        let is_missing = upstream.known_native().is_some_and(|native| !native.is_there);
        matches!(kind, UpstreamKind::Embedded | UpstreamKind::Vllm | UpstreamKind::Sglang)
            && !(kind == UpstreamKind::Sglang && is_missing)
            && upstream.additions(self.upstream_model()) == Additions::All
    }

    pub(super) fn prepared_with_tokens(
        &self,
        rendered: &Rendered,
        capabilities: Capabilities,
    ) -> Result<Prepared, json::ScanError> {
        let bad = json::ScanError { expected: "a completions request", at: 0 };
        let request = completions::Request::parse(rendered.body.clone()).map_err(|_| bad)?;
        let model = self.route.upstream_model(&self.inner.options, &self.request.model);
        let routing = self.route.upstream.routing_hint().is_some();
        // The reply is read from its ids, whatever is to be captured.
        let wanted = Wanted { token_ids: true, ..self.route.wanted };
        let mut prepared = if self.route.upstream.kind() == UpstreamKind::Sglang {
            let asking = Asking { wanted, routing: routing && capabilities.routing, plan: self.plan };
            sglang_request::of_completions(asking, &request, None)
        } else {
            let approach = Approach { capabilities, routing, usage: true, relay: self.inner.options.relay };
            dialect::prepare(approach, wanted, self.plan, &chat::Request::from_completions(&request), model)?
        };
        prepared.sent_prompts = request.prompts;
        Ok(prepared)
    }

    /// True if the upstream has no endpoint that takes tokens, as its reply says: it is asked in chat's words then.
    pub(super) fn lacks_tokens(
        &mut self,
        face: &mut Face,
        first: &Result<UpstreamReply, UpstreamError>,
    ) -> bool {
        let is_missing = self.rendered.is_some()
            && first.as_ref().is_ok_and(|reply| upstream::is_missing(reply.status.as_u16()));
        is_missing && self.leave_tokens(face)
    }

    /// Asks in chat's words from here on; false if it asks with none else.
    pub(super) fn leave_tokens(&mut self, face: &mut Face) -> bool {
        if self.rendered.take().is_none() {
            return false;
        }
        token_in::count(token_in::IN_CHAT);
        match Incoming::read(&self.inner, &self.route, face.api, self.body.clone()) {
            Ok(incoming) => *face = incoming.face,
            // It was read before.
            Err(error) => tracing::error!(error = error.message, "a request cannot be read again"),
        }
        true
    }
}
