//! Upstreams that go on when the reply is at its end: clients wait for the end of the connection, and the call keeps its
//! place among those in flight.

use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::Instant;

use super::Relay;
use super::wait::Source;
use crate::proxy::Inner;
use crate::upstream::UpstreamBody;

/// How long a stream may go on at least that has its finish reason, and not its terminator: what should follow is the
/// client's if it comes.
const UNTERMINATED: Duration = Duration::from_secs(5);

/// Read at once of what nobody needs.
const PIECE_BYTES: usize = 16 << 10;

impl Relay {
    /// The call is committed, and the client has what it may act on.
    pub(super) fn wind_up(&mut self) {
        if self.is_unread || self.is_over {
            return;
        }
        if self.face.writer.is_none() {
            return self.await_end();
        }
        // Its events are lego's own, with their end.
        if let Source::Body(body) = std::mem::replace(&mut self.source, Source::Ended) {
            drain(&self.inner, body);
        }
        self.is_over = true;
    }

    /// Gives the upstream a while to end its stream.
    pub(super) fn await_end(&mut self) {
        let commit_wait = self.inner.options.commit_wait;
        let is_told = self.has_terminator || self.recorder.reply().error.is_some();
        let wait = if is_told { commit_wait } else { commit_wait.max(UNTERMINATED) };
        let until = Instant::now() + wait;
        self.late_until = Some(self.late_until.map_or(until, |before| before.min(until)));
    }
}

/// Reads what is left of a body, for a while: so its connection can be used again.
fn drain(inner: &Inner, mut body: UpstreamBody) {
    let mut rest = Box::pin(async move { while let Some(Ok(_)) = body.next(PIECE_BYTES).await {} });
    if rest.as_mut().now_or_never().is_none() {
        inner.running.spawn(tokio::time::timeout(inner.options.commit_wait, rest));
    }
}
