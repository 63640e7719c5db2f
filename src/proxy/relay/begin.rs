//! What an upstream's reply is, once it begins.

use bytes::{Bytes, BytesMut};

use super::wait::{Source, reading};
use super::{Arc, Relay, whole};
use crate::proxy::call::answer::Form;
use crate::record::CallStatus;
use crate::upstream::UpstreamReply;

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

impl Relay {
    /// The head of a reply whose client's has begun.
    pub(super) fn head(&mut self, received: UpstreamReply) {
        let form = Form::of(&received);
        let UpstreamReply { status, body, .. } = received;
        self.recorder.http_status = status.as_u16();
        // Some servers answer with a body although a stream was asked for.
        let is_body = form == Form::Json || !self.recorder.prepared.upstream_is_stream;
        self.is_refusal = !status.is_success() || (form == Form::Other && !is_body);
        self.source = match form {
            Form::Stream => Source::Body(body),
            Form::Untold => Source::Untold(body, BytesMut::new()),
            Form::Json | Form::Other => {
                let (route, abort) = (self.recorder.route(), self.abort.clone());
                Source::Whole(reading(&self.inner, route, BytesMut::new(), body, abort))
            }
        };
    }

    /// Decides by its first bytes what a body is whose head did not say it: JSON is a whole reply, anything else its
    /// stream. `None`: it is not decided, or the piece is part of a body that is read to its end first.
    pub(super) fn told(&mut self, piece: Bytes) -> Option<Bytes> {
        if !matches!(self.source, Source::Untold(..)) {
            return Some(piece);
        }
        let Source::Untold(body, mut text) = std::mem::replace(&mut self.source, Source::Ended) else {
            return Some(piece);
        };
        text.extend_from_slice(&piece);
        let begins = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&text).trim_ascii_start();
        match begins.first().copied() {
            None => self.source = Source::Untold(body, text),
            Some(b'{' | b'[') => {
                let (route, abort) = (self.recorder.route(), self.abort.clone());
                self.source = Source::Whole(reading(&self.inner, route, text, body, abort));
            }
            Some(_) => {
                self.source = Source::Body(body);
                return Some(text.freeze());
            }
        }
        None
    }

    /// A body that was read to its end.
    pub(super) async fn whole_body(&mut self, body: Bytes) {
        if !self.is_refusal {
            return self.destream(&body).await;
        }
        let route = Arc::clone(self.recorder.route());
        let clean = route.upstream.without_key(body);
        self.recorder.error_body(&clean);
        let error = whole::upstream_error(&route, self.recorder.http_status, &clean);
        self.fail(CallStatus::UpstreamError, error).await;
    }
}
