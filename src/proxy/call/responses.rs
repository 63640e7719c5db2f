//! A client of Responses whose upstream may speak that itself: found out by the first call.

use super::Call;
use crate::config::UpstreamResponses;
use crate::protocol::error::{ApiError, ErrorType};
use crate::proxy::face::{self, Face};
use crate::record::ClientApi;
use crate::upstream::{Additions, UpstreamError, UpstreamReply};

impl Call {
    /// What lego adds to the first attempt. To a request of Responses it adds nothing that could be refused.
    pub(super) fn begins_with(&self, face: &Face) -> Additions {
        match face.passes_responses() {
            true => Additions::All,
            false => self.route.upstream.additions(self.upstream_model()),
        }
    }

    /// True if the upstream has no `/v1/responses`, it seems. Some gateways answer so for one of their models: chat will
    /// say the same then.
    pub(super) fn lacks_responses(&self, face: &Face, first: &Result<UpstreamReply, UpstreamError>) -> bool {
        let upstream = &self.route.upstream;
        face.passes_responses()
            && first.as_ref().is_ok_and(|reply| matches!(reply.status.as_u16(), 404 | 405 | 501))
            && upstream.responses_choice() == UpstreamResponses::Auto
            && upstream.has_responses(self.upstream_model()).is_none()
    }

    /// Goes on in chat's words; with what is added to them.
    ///
    /// # Errors
    /// What the client asks has no chat form.
    pub(super) fn in_chat(
        &mut self,
        face: &mut Face,
        first: &Result<UpstreamReply, UpstreamError>,
    ) -> Result<Additions, ApiError> {
        let translated = face::of_responses_after_all(&self.inner, &self.route, &self.body);
        let (request, writer, retold) = translated.map_err(|error| {
            let status = first.as_ref().map_or(404, |reply| reply.status.as_u16());
            let message = format!(
                "{} (the upstream at {} answered {status} to POST /v1/responses, so it was to be asked by \
                 /v1/chat/completions)",
                error.message,
                self.route.upstream.name()
            );
            ApiError::new(400, ErrorType::InvalidRequest, error.code, message)
        })?;
        self.request = request;
        face.upstream_api = ClientApi::OpenaiChat;
        face.writer = Some(writer);
        // For a client that left meanwhile and comes back.
        self.attendance.set_retold(retold);
        Ok(self.begins_with(face))
    }

    /// Remembers of an upstream that answered in chat's words that it was asked so only because it did not know the others.
    /// That it knows them shows no head, but what it writes.
    pub(super) fn learn_of_responses(&self, face: &Face, first: &Result<UpstreamReply, UpstreamError>) {
        let is_success = first.as_ref().is_ok_and(|reply| reply.status.is_success());
        if is_success
            && !face.passes_responses()
            && face.api == ClientApi::OpenaiResponses
            && self.route.passes_responses(&self.inner.options, &self.request.model)
        {
            self.route.upstream.set_has_responses(self.upstream_model(), false);
        }
    }
}
