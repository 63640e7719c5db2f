//! What a relay waits for: its source, the clock, the end of the call, a client that came back.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::time::Instant;

use super::Relay;
use crate::proxy::call::Sending;
use crate::proxy::routes::Route;
use crate::proxy::stop::Stop;
use crate::proxy::whole::BadBody;
use crate::proxy::{Inner, whole};
use crate::upstream::{UpstreamBody, UpstreamError, UpstreamReply};

/// Where no deadline is set, the clock is looked at this often.
pub(super) const FAR: Duration = Duration::from_secs(3600);

/// Most bytes of a stream that are taken at once: that many are on their way in each of thousands of streams.
const PIECE_BYTES: usize = 8 << 10;

pub(super) enum Source {
    /// The upstream has not begun to answer; the client's stream has.
    Waiting(Sending),
    Body(UpstreamBody),
    /// A body whose head does not say what it is. So far it was white space.
    Untold(UpstreamBody, BytesMut),
    /// A body that becomes the client's stream once it is whole.
    Whole(Reading),
    Ended,
}

pub(super) type Reading = Pin<Box<dyn Future<Output = Result<Bytes, BadBody>> + Send>>;

pub(super) enum Step {
    Head(Result<UpstreamReply, UpstreamError>),
    Piece(Bytes),
    Whole(Result<Bytes, BadBody>),
    End(Option<String>),
    HoldIsOver,
    KeepAlive,
    /// The upstream does not end a reply that is at its end.
    Late,
    BeginAgain,
    Idle,
    Abort(BadBody),
}

impl Relay {
    /// Waits for what happens next.
    pub(super) async fn step(&mut self) -> Step {
        let piece_bytes = self.inner.options.stream_buffer_bytes.min(PIECE_BYTES);
        // Asked now and then, since it takes a lock, and in any case when nothing has come.
        self.steps = self.steps.wrapping_add(1);
        if self.steps.is_multiple_of(64) {
            if let Some(ended) = self.abort.now() {
                return Step::Abort(ended);
            }
            // Also while much comes of which nothing is the client's. That the upstream is silent is not known before it
            // was asked.
            let due = self.soonest().filter(|(at, _)| *at <= Instant::now());
            if let Some((_, step)) = due.filter(|(_, step)| !matches!(step, Step::Idle)) {
                return step;
            }
        }
        loop {
            // The clock is set once for many pieces: it is put forward when it has run out, and back when it must.
            let until = self.soonest().map_or_else(|| Instant::now() + FAR, |(at, _)| at);
            if self.clock.deadline() > until || self.clock.is_elapsed() {
                self.clock.as_mut().reset(until);
            }
            tokio::select! {
                biased;
                () = self.recorder.attendance.came_back() => return Step::BeginAgain,
                step = self.source.next(piece_bytes) => {
                    self.last_received = Instant::now();
                    return step;
                }
                ended = self.aborted.as_mut() => return Step::Abort(ended),
                () = self.clock.as_mut() => {}
            }
            if let Some((_, step)) = self.soonest().filter(|(at, _)| *at <= Instant::now()) {
                return step;
            }
        }
    }

    /// What happens next if nothing else does, and when.
    fn soonest(&self) -> Option<(Instant, Step)> {
        let hold = self.hold_until.map(|at| (at, Step::HoldIsOver));
        let late = self.late_until.map(|at| (at, Step::Late));
        let idle = matches!(self.source, Source::Body(_) | Source::Untold(..)).then(|| {
            let at = self.last_received + self.recorder.route().upstream.timeouts().idle;
            (at, Step::Idle)
        });
        let every = self.inner.options.keep_alive.filter(|_| self.may_keep_alive());
        let keep_alive = every.map(|every| (self.last_sent + every, Step::KeepAlive));
        [hold, late, idle, keep_alive].into_iter().flatten().min_by_key(|(at, _)| *at)
    }

    /// True where an event of lego's own does no harm: between two events, and before the reply is at its end.
    fn may_keep_alive(&self) -> bool {
        self.hold_until.is_none()
            && self.late_until.is_none()
            && !self.is_unread
            && !self.has_terminator
            && !self.recorder.is_done()
    }
}

/// Reads a body that begins with `before`.
pub(super) fn reading(
    inner: &Inner,
    route: &Route,
    before: BytesMut,
    body: UpstreamBody,
    abort: Stop,
) -> Reading {
    let piece_bytes = inner.options.stream_buffer_bytes;
    let upstream = Arc::clone(&route.upstream);
    Box::pin(async move { whole::read_on(before, &upstream, body, piece_bytes, &abort).await })
}

impl Source {
    async fn next(&mut self, piece_bytes: usize) -> Step {
        match self {
            Self::Waiting(sending) => Step::Head(sending.await),
            Self::Body(body) | Self::Untold(body, _) => match body.next(piece_bytes).await {
                Some(Ok(piece)) => Step::Piece(piece),
                Some(Err(error)) => Step::End(Some(error.to_string())),
                None => Step::End(None),
            },
            Self::Whole(reading) => Step::Whole(reading.await),
            Self::Ended => Step::End(None),
        }
    }
}
