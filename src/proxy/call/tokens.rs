//! Calls that ask with tokens.

use super::Call;
use crate::protocol::{chat, completions, json};
use crate::proxy::face::{self, Face, Incoming};
use crate::proxy::token_in::{self, Rendered};
use crate::record::{ClientApi, UpstreamKind};
use crate::upstream::dialect::{self, Approach, Prepared, Wanted};
use crate::upstream::sglang_request::{self, Asking};
use crate::upstream::vllm_generate;
use crate::upstream::{self, Capabilities, UpstreamError, UpstreamReply};

/// Most bytes of an error that are looked at.
const MAX_SAID: usize = 4 << 10;

impl Call {
    /// Renders the prompt, where the route asks with tokens. What cannot be said so is said in chat.
    pub(super) async fn render(&mut self, face: &mut Face) {
        let Some(renderer) = self.route.renderer_for(self.upstream_model()) else {
            return;
        };
        if face.upstream_api != ClientApi::OpenaiChat {
            return;
        }
        let names = face::names(self.request.body());
        let lineages =
            self.session.lineages.with(renderer, &self.route.upstream.name(), self.upstream_model());
        let volatile = &self.inner.options.volatile;
        let rendered = tokio::select! {
            biased;
            _ = self.abort.cancelled() => return,
            rendered = Rendered::of(renderer, &lineages, &self.request, volatile, names) => rendered,
        };
        match rendered {
            Ok(rendered) => {
                let upstream_api = match self.route.upstream.kind() {
                    UpstreamKind::Sglang => ClientApi::SglangGenerate,
                    _ => ClientApi::OpenaiCompletions,
                };
                face.ask_with_tokens(&rendered, upstream_api);
                token_in::count(rendered.outcome());
                self.rendered = Some(rendered);
            }
            Err(why) => {
                tracing::debug!(%why, "asked in chat's words: tokens cannot stand for a part of the request");
                token_in::count(token_in::IN_CHAT);
            }
        }
    }

    /// Asks vLLM's token endpoint for a stream whose routing no other stream has. What it cannot be asked for, and what
    /// it does not give, is asked of completions, whose whole replies have the routing.
    pub(super) async fn stream_routing(&self, face: &mut Face, capabilities: Capabilities) {
        let is_wanted = face.upstream_api == ClientApi::OpenaiCompletions
            && capabilities.kind == UpstreamKind::Vllm
            && capabilities.routing
            && self.route.upstream.routing_hint().is_some()
            && self.request.is_stream;
        let Some(rendered) = self.rendered.as_ref().filter(|_| is_wanted) else {
            return;
        };
        let is_expressible = completions::Request::parse(rendered.body.clone())
            .is_ok_and(|request| vllm_generate::is_expressible(self.plan, &request));
        if is_expressible && self.found_of_streams().await.is_some_and(|streams| streams.routing) {
            face.upstream_api = ClientApi::VllmGenerate;
        }
    }

    /// Rows of the prompt's routing that need not be asked for: those that the call that it extends has, and those
    /// before it in their lineage.
    fn rows_held(&self, rendered: &Rendered) -> Option<u32> {
        let may_leave_out = self.route.upstream.known_streams().is_some_and(|streams| streams.start);
        // Of other choices it is not remembered.
        let parent = rendered.parent().filter(|reply| may_leave_out && reply.choice_index == 0)?;
        let held = self.session.rows.of_lineage(parent.call_id, self.kind())?;
        // The engine refuses a start behind the prompt.
        (held as usize).lt(&rendered.prompt.len()).then_some(held)
    }

    /// True if there is no such endpoint after all, as the reply says: completions are asked instead.
    pub(super) fn lacks_streams(
        &self,
        face: &mut Face,
        first: &Result<UpstreamReply, UpstreamError>,
    ) -> bool {
        let is_missing = |reply: &UpstreamReply| {
            reply.status == http::StatusCode::FORBIDDEN || upstream::is_missing(reply.status.as_u16())
        };
        let is_without = face.upstream_api == ClientApi::VllmGenerate && first.as_ref().is_ok_and(is_missing);
        if is_without {
            face.upstream_api = ClientApi::OpenaiCompletions;
        }
        is_without
    }

    pub(super) fn prepared_with_tokens(
        &self,
        rendered: &Rendered,
        face: &Face,
        capabilities: Capabilities,
    ) -> Result<Prepared, json::ScanError> {
        let bad = json::ScanError { expected: "a completions request", at: 0 };
        let request = completions::Request::parse(rendered.body.clone()).map_err(|_| bad)?;
        let model = self.route.upstream_model(&self.inner.options, &self.request.model);
        let routing = self.route.upstream.routing_hint().is_some();
        // The reply is read from its ids, whatever is to be captured.
        let wanted = Wanted { token_ids: true, ..self.route.wanted };
        let asking = Asking { wanted, routing: routing && capabilities.routing, plan: self.plan };
        let mut prepared = if self.route.upstream.kind() == UpstreamKind::Sglang {
            sglang_request::of_completions(asking, &request, None)
        } else if face.upstream_api == ClientApi::VllmGenerate {
            vllm_generate::of_completions(asking, &request, self.upstream_model(), self.rows_held(rendered))
        } else {
            let approach = Approach { capabilities, routing, usage: true, relay: self.inner.options.relay };
            dialect::prepare(approach, wanted, self.plan, &chat::Request::from_completions(&request), model)?
        };
        prepared.sent_prompts = request.prompts;
        Ok(prepared)
    }

    /// True if the upstream has no endpoint that takes tokens, as its reply says: it is asked in chat's words then.
    pub(super) async fn lacks_tokens(
        &mut self,
        face: &mut Face,
        first: &mut Result<UpstreamReply, UpstreamError>,
    ) -> bool {
        let Some(reply) = first.as_mut().ok().filter(|reply| upstream::is_missing(reply.status.as_u16()))
        else {
            return false;
        };
        if self.rendered.is_none() {
            return false;
        }
        // A server that does not know the model says so in the same way, and names it.
        let said = tokio::select! {
            biased;
            _ = self.abort.cancelled() => return false,
            said = reply.body.peek(MAX_SAID) => said,
        };
        let model = self.upstream_model().as_bytes();
        memchr::memmem::find(&said, model).is_none() && self.leave_tokens(face)
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
