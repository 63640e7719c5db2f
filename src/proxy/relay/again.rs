//! A client that comes back has the reply from its first event on, whatever the one before it had of it.

use bytes::Bytes;
use tokio::time::Instant;

use super::Relay;
use crate::protocol::sse::Event;
use crate::protocol::translate::Piece;
use crate::proxy::kept::{Again, Kept};
use crate::proxy::whole;
use crate::record::CallStatus;

impl Relay {
    /// The client takes what is ready.
    pub(super) fn given(&mut self) {
        if self.recorder.attendance.is_away() {
            return;
        }
        if self.may_act {
            self.recorder.attendance.close();
            if self.recorder.is_done() && self.again.is_none() {
                self.recorder.attendance.given.set();
                self.recorder.given();
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
        let Some(mut face) = self.recorder.attendance.take_returned() else {
            return;
        };
        if let Some(rendered) = self.recorder.rendered() {
            face.ask_with_tokens(rendered, self.face.upstream_api);
        } else if self.face.upstream_api != face.upstream_api {
            // The call is asked in other words than were thought of when this client came.
            match self.recorder.attendance.retold().filter(|_| self.face.writer.is_some()) {
                Some(retold) => face = retold,
                None => face.speak_plainly(),
            }
        }
        self.face = face;
        self.is_ended = false;
        self.ready.clear();
        self.quiet_bytes = 0;
        self.held.clear();
        self.again = None;
        self.last_sent = Instant::now();
        let kept = std::mem::take(&mut self.recorder.kept);
        match &kept {
            Kept::Nothing => {}
            Kept::Events(_) => self.again = Some(Again::default()),
            Kept::Body(body) => {
                // It became events for the client before, so it does again.
                let events = self.destreamed(body).unwrap_or_default();
                let part = if self.recorder.is_done() { &mut self.ready } else { &mut self.held };
                part.extend_from_slice(&events);
            }
        }
        self.recorder.kept = kept;
        if self.recorder.is_done() {
            self.finish();
        }
    }

    /// Makes the next part of what the client missed ready. A part, so that a long reply fills no memory for a client
    /// that is slow to take it again.
    pub(super) fn go_on_again(&mut self) {
        let Some(mut again) = self.again.take() else {
            return;
        };
        let kept = std::mem::take(&mut self.recorder.kept);
        let read = kept.read(&mut again, |number, event| {
            let out = self.for_this_client(event);
            let is_held = self.held_from.is_some_and(|first| number >= first);
            let part = if is_held { &mut self.held } else { &mut self.ready };
            part.extend_from_slice(&out);
        });
        self.recorder.kept = kept;
        match read {
            Ok(true) => self.again = Some(again),
            Ok(false) if self.recorder.is_done() => self.finish(),
            Ok(false) => {}
            Err(error) => {
                self.held.clear();
                self.say(&whole::sink_error(&error));
            }
        }
    }

    /// The same with all of it.
    pub(super) fn all_again(&mut self) {
        while self.again.is_some() {
            self.go_on_again();
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
