//! A client that comes back has the reply from its first event on, whatever the one before it had of it.

use bytes::Bytes;
use tokio::time::Instant;

use super::Relay;
use crate::protocol::sse::{self, Event};
use crate::protocol::translate::Piece;
use crate::proxy::kept::Kept;
use crate::record::CallStatus;

impl Relay {
    /// The client takes what is ready.
    pub(super) fn given(&mut self) {
        if self.recorder.attendance.is_away() {
            return;
        }
        if self.may_act {
            self.recorder.attendance.close();
            if self.recorder.is_done() {
                self.recorder.kept = Kept::Nothing;
            }
        }
    }

    /// True if the client left and may come back.
    pub(super) fn is_left(&self) -> bool {
        self.recorder.attendance.is_away() && !self.recorder.attendance.is_final()
    }

    /// Waits for the client if it left: a whole reply is not final while nobody is there to have it. One that failed is
    /// nothing to come back for.
    pub(super) async fn attended(&mut self) {
        if matches!(self.recorder.outcome().0, CallStatus::ParseError | CallStatus::UpstreamError) {
            self.recorder.attendance.close();
            return;
        }
        if self.is_left() {
            self.recorder.attendance.present().await;
        }
        self.begin_again();
    }

    /// Begins the reply again if a client came back.
    pub(super) fn begin_again(&mut self) {
        let Some(face) = self.recorder.attendance.take_returned() else {
            return;
        };
        self.face = face;
        self.is_ended = false;
        self.ready.clear();
        self.held.clear();
        self.last_sent = Instant::now();
        let is_durable = self.recorder.is_done();
        let kept = std::mem::take(&mut self.recorder.kept);
        match &kept {
            Kept::Nothing => {}
            Kept::Events(blocks) => {
                for (index, event) in sse::reread(blocks).enumerate() {
                    let out = self.for_this_client(&event);
                    let is_held = self.held_from.is_some_and(|first| index >= first);
                    let part = if is_held { &mut self.held } else { &mut self.ready };
                    part.extend_from_slice(&out);
                }
            }
            Kept::Body(body) => {
                // It became events for the client before, so it does again.
                let events = self.destreamed(body).unwrap_or_default();
                let part = if is_durable { &mut self.ready } else { &mut self.held };
                part.extend_from_slice(&events);
            }
        }
        self.recorder.kept = kept;
        if is_durable {
            self.finish();
        }
    }

    /// An event as this client is told it.
    fn for_this_client(&mut self, event: &Event) -> Bytes {
        let Some(writer) = &mut self.face.writer else {
            return self.own(event);
        };
        let data = event.data();
        if !event.has_data() || data.as_ref() == b"[DONE]" {
            return Bytes::new();
        }
        let mut pieces = Vec::new();
        let mut out = Vec::new();
        // The client before had it written without an error.
        if writer.chunk(&data, &mut pieces).is_ok() {
            for piece in pieces {
                if let Piece::Bytes(bytes) = piece {
                    out.extend_from_slice(&bytes);
                }
            }
        }
        out.into()
    }
}
