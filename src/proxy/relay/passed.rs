//! What lego itself has to say within a response that the upstream writes.

use bytes::Bytes;

use super::Relay;
use crate::protocol::error::ApiError;
use crate::protocol::json;
use crate::proxy::face;
use crate::record::CallStatus;

impl Relay {
    /// Remembers that the upstream writes responses, once it did.
    pub(super) fn learn(&mut self) {
        if self.has_shown || !self.recorder.response().is_some_and(|so_far| so_far.is_response()) {
            return;
        }
        self.has_shown = true;
        self.recorder.route().wrote_response(&self.inner.options, &self.recorder.request.model);
    }

    /// An event that changes nothing. Before the first of the upstream's own there is none in the protocol: clients want
    /// that to be `response.created`.
    pub(super) fn in_progress(&self) -> Bytes {
        match self.recorder.response().and_then(|so_far| so_far.in_progress()) {
            Some(data) => self.named("response.in_progress", &data),
            None => Bytes::from_static(b": keep-alive\n\n"),
        }
    }

    /// The end of a stream that broke off.
    pub(super) fn error_event(&mut self, error: &ApiError) -> Bytes {
        if !self.face.passes_responses() {
            return self.face.error_event(error);
        }
        let names = face::names(self.recorder.request.body());
        let events = self.recorder.response().map(|so_far| so_far.failed(error, &names));
        let events = events.into_iter().flatten().map(|(kind, data)| self.named(kind, &data));
        events.collect::<Vec<_>>().concat().into()
    }

    /// True where a stream that ends now is ended by an event of lego's: half an event before it would swallow it.
    pub(super) fn is_to_be_said(&self) -> bool {
        self.face.passes_responses()
            && !self.recorder.is_done()
            && self.recorder.outcome().0 == CallStatus::Truncated
    }

    /// An event of lego's, with the client's name for the model as in those of the upstream.
    fn named(&self, kind: &str, data: &str) -> Bytes {
        let edits = self.recorder.cut(data.as_bytes()).map(|cut| cut.edits).unwrap_or_default();
        let data = json::apply(data.as_bytes(), &edits);
        [b"event: ", kind.as_bytes(), b"\ndata: ", data.as_slice(), b"\n\n"].concat().into()
    }
}
