//! A stream passed through live: the client's reads pull it, a parsed copy goes to the recorder, the held event
//! waits for the store.

mod again;
mod begin;
mod foreign;
mod late;
mod passed;
mod ready;
mod wait;

use std::pin::Pin;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::time::{Instant, Sleep};

use self::ready::Ready;
use self::wait::{FAR, Source, Step, reading};
use super::call::Sending;
use super::face::Face;
use super::kept::Again;
use super::measures::OpenStream;
use super::recorder::Recorder;
use super::rejoin::Attendance;
use super::stop::Stop;
use super::whole::BadBody;
use super::{Inner, whole};
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::sse::{Event, Parser};
use crate::record::{CallId, CallStatus, ClientApi};
use crate::upstream::UpstreamBody;

/// An event that is longer cannot be read: from there the stream passes untouched and unread.
const MAX_EVENT_BYTES: usize = 64 * 1024 * 1024;

/// The relay of one call. [`Relay::next`] gives what the client may have.
pub(super) struct Relay {
    inner: Arc<Inner>,
    recorder: Recorder,
    face: Face,
    source: Source,
    abort: Stop,
    aborted: Pin<Box<dyn Future<Output = BadBody> + Send>>,
    steps: u32,
    /// Runs out when a deadline may have passed.
    clock: Pin<Box<Sleep>>,
    parser: Parser,
    /// What the client may have now.
    ready: Ready,
    /// From the first held event on: what waits for the call to be durable.
    held: Ready,
    /// Holding ends then at the latest.
    hold_until: Option<Instant>,
    /// The first block of the upstream's stream that is held.
    held_from: Option<usize>,
    /// How far a client that came back was given what it missed. Until it has all of it nothing new is taken.
    again: Option<Again>,
    /// `ready` has something that a client may act on.
    may_act: bool,
    last_received: Instant,
    /// When the client was last given an event.
    last_sent: Instant,
    /// Bytes of `ready` that are no event: comments.
    quiet_bytes: usize,
    /// The upstream has until then to end its stream: the reply itself is at its end.
    late_until: Option<Instant>,
    /// The body that is read is an error's.
    is_refusal: bool,
    has_terminator: bool,
    /// Nothing is parsed any more.
    is_unread: bool,
    is_over: bool,
    /// A translated reply has its end.
    is_ended: bool,
    /// The reply is not whole: after the error event the connection is broken off, since some clients take a clean end
    /// for the end of a whole reply.
    is_broken: bool,
    /// What is ready was made of what the upstream sent last.
    is_of_upstream: bool,
    /// The upstream showed that it writes responses.
    has_shown: bool,
    measured: OpenStream,
}

impl Relay {
    pub(super) fn waiting(
        inner: Arc<Inner>,
        recorder: Recorder,
        face: Face,
        sending: Sending,
        abort: Stop,
    ) -> Self {
        let mut relay = Self::new(inner, recorder, face, Source::Waiting(sending), abort);
        relay.keep_alive();
        relay
    }

    pub(super) fn streaming(
        inner: Arc<Inner>,
        recorder: Recorder,
        face: Face,
        body: UpstreamBody,
        abort: Stop,
    ) -> Self {
        Self::new(inner, recorder, face, Source::Body(body), abort)
    }

    /// For a client's stream that the upstream answers with a body.
    pub(super) fn whole(
        inner: Arc<Inner>,
        recorder: Recorder,
        face: Face,
        body: UpstreamBody,
        abort: Stop,
    ) -> Self {
        let reading = reading(&inner, recorder.route(), BytesMut::new(), body, abort.clone());
        Self::new(inner, recorder, face, Source::Whole(reading), abort)
    }

    /// For a client's stream that the upstream answers with what nobody knows yet.
    pub(super) fn untold(
        inner: Arc<Inner>,
        recorder: Recorder,
        face: Face,
        body: UpstreamBody,
        abort: Stop,
    ) -> Self {
        Self::new(inner, recorder, face, Source::Untold(body, BytesMut::new()), abort)
    }

    fn new(inner: Arc<Inner>, recorder: Recorder, face: Face, source: Source, abort: Stop) -> Self {
        let now = Instant::now();
        Self {
            is_of_upstream: false,
            measured: inner.measures.stream(),
            inner,
            recorder,
            face,
            source,
            aborted: {
                let abort = abort.clone();
                Box::pin(async move { abort.cancelled().await })
            },
            abort,
            steps: 0,
            clock: Box::pin(tokio::time::sleep_until(now + FAR)),
            parser: Parser::new(),
            ready: Ready::default(),
            held: Ready::default(),
            hold_until: None,
            held_from: None,
            again: None,
            may_act: false,
            last_received: now,
            last_sent: now,
            quiet_bytes: 0,
            late_until: None,
            is_refusal: false,
            has_terminator: false,
            is_unread: false,
            is_over: false,
            is_ended: false,
            is_broken: false,
            has_shown: false,
        }
    }

    pub(super) fn attendance(&self) -> Arc<Attendance> {
        Arc::clone(&self.recorder.attendance)
    }

    pub(super) fn call_id(&self) -> CallId {
        self.recorder.call_id
    }

    /// The next bytes for the client; `None` at the end, an error where the connection is to be broken off. Dropped
    /// instead, the call is recorded as left by its client.
    pub(super) async fn next(&mut self) -> Option<Result<Bytes, std::io::Error>> {
        loop {
            self.begin_again();
            while self.ready.is_empty() && self.again.is_some() {
                self.go_on_again();
            }
            if !self.ready.is_empty() {
                self.given();
                let now = Instant::now();
                if self.ready.len() > std::mem::take(&mut self.quiet_bytes) {
                    self.last_sent = now;
                }
                if std::mem::take(&mut self.is_of_upstream) {
                    self.inner.measures.added_to_reply.record(now - self.last_received);
                }
                self.measured.buffered.set(self.held.len() + self.parser.pending());
                return Some(Ok(self.ready.take()));
            }
            if self.is_over {
                if self.is_left() {
                    self.recorder.attendance.present().await;
                    continue;
                }
                if !std::mem::take(&mut self.is_broken) {
                    return None;
                }
                // The server writes out what it has when there is nothing more to be had.
                tokio::task::yield_now().await;
                return Some(Err(std::io::Error::other("the upstream's reply broke off")));
            }
            // When the client has what came, so that it does not wait for a file.
            if !self.recorder.is_done()
                && let Err(error) = self.recorder.relieve().await
            {
                self.fail(CallStatus::Aborted, whole::sink_error(&error)).await;
                continue;
            }
            match self.step().await {
                Step::Head(Ok(received)) => self.head(received),
                Step::Head(Err(error)) => {
                    let (status, error) = whole::no_reply(&error);
                    self.fail(status, error).await;
                }
                Step::Piece(piece) => {
                    self.is_of_upstream = true;
                    self.piece(piece).await;
                    self.measured.buffered.set(self.held.len() + self.parser.pending() + self.ready.len());
                }
                Step::Whole(Ok(body)) => {
                    self.is_of_upstream = true;
                    self.whole_body(body).await;
                }
                Step::Whole(Err(bad)) => self.fail(bad.status, bad.error).await,
                Step::End(error) => self.end(error).await,
                Step::HoldIsOver => self.release(false).await,
                Step::KeepAlive => self.keep_alive(),
                // As if it had.
                Step::Late => self.end(None).await,
                // The loop begins with it.
                Step::BeginAgain => {}
                Step::Idle => {
                    let idle = self.recorder.route().upstream.timeouts().idle;
                    let message =
                        format!("connection error: the upstream sent nothing for {idle:?} within its reply");
                    let error = ApiError::new(504, ErrorType::Upstream, "upstream_stalled", message);
                    self.fail(CallStatus::Timeout, error).await;
                }
                Step::Abort(ended) => self.fail(ended.status, ended.error).await,
            }
        }
    }

    async fn piece(&mut self, piece: Bytes) {
        let Some(piece) = self.told(piece) else {
            return;
        };
        if self.is_unread {
            self.ready.push(piece);
            return;
        }
        if self.hold_until.is_none() {
            self.recorder.reserve(piece.len());
            if self.face.writer.is_none() {
                self.ready.reserve(piece.len());
            }
        }
        self.parser.push_piece(piece);
        while let Some(event) = self.parser.next_event() {
            self.event(&event).await;
            if self.is_over {
                return;
            }
        }
        let is_full = self.held.len() > self.inner.options.stream_buffer_bytes;
        if self.has_terminator || is_full {
            self.release(self.has_terminator).await;
        }
        if self.parser.pending() > MAX_EVENT_BYTES {
            let why = format!("an event of the stream is longer than {MAX_EVENT_BYTES} bytes");
            self.recorder.unreadable(why.clone());
            self.recorder.more_reasons.push("oversize".to_owned());
            if self.face.writer.is_some() {
                let error = ApiError::new(502, ErrorType::Upstream, "upstream_oversize", why);
                return self.fail(CallStatus::ParseError, error).await;
            }
            self.is_unread = true;
            self.recorder.attendance.close();
            self.release(true).await;
            self.all_again();
            let rest = self.parser.take_pending();
            self.ready.push(rest);
        }
    }

    /// Takes an event: a copy to the recorder, what the client may have to it or to what is held.
    async fn event(&mut self, event: &Event) {
        if event.is_unterminated && event.has_data() && event.data().as_ref() != b"[DONE]" {
            return self.half_event(event);
        }
        if !(self.recorder.is_done() && self.recorder.attendance.is_final()) {
            self.recorder.keep(&event.raw);
        }
        if self.face.writer.is_some() {
            return self.translate(event).await;
        }
        if event.has_data() {
            let data = event.data();
            if data.as_ref() == b"[DONE]" {
                self.has_terminator = true;
                self.hold();
            } else {
                // What comes after the call was committed is passed on and not recorded any more.
                if !self.recorder.is_done() {
                    let read = self.recorder.event(&event.name, &data);
                    self.learn();
                    self.has_terminator |= read.is_end;
                    // With several choices it may be one's alone.
                    if read.fed.has_error && self.recorder.request.n <= 1 {
                        self.await_end();
                    }
                    if read.fed.has_finish || read.is_end {
                        self.hold();
                    } else if read.must_hold {
                        if let Err(error) = self.recorder.draft().await {
                            return self.fail(CallStatus::Aborted, whole::sink_error(&error)).await;
                        }
                        self.may_act = true;
                    }
                }
            }
        }
        let out = self.own(event);
        if self.hold_until.is_some() {
            self.held.push(out);
        } else {
            if !event.has_data() {
                self.quiet_bytes += out.len();
            }
            self.ready.push(out);
        }
    }

    /// What the client gets of an event: all but what lego caused.
    fn own(&mut self, event: &Event) -> Bytes {
        let own = self.less_cut(event);
        // An upstream's error may quote the key that it was sent. What comes after the call was committed nobody reads.
        if self.recorder.reply().error.is_some() || self.recorder.is_done() {
            return self.recorder.route().upstream.without_key(own);
        }
        own
    }

    /// What is left of an event in which the stream ended is no event: clients discard it, and so does the record.
    /// Where something would have to be cut out of it, nobody can say what of it is the client's.
    fn half_event(&mut self, event: &Event) {
        if self.face.writer.is_none() && self.recorder.prepared.cut.is_nothing() {
            let own = self.recorder.route().upstream.without_key(event.raw.clone());
            let out = if self.hold_until.is_some() { &mut self.held } else { &mut self.ready };
            out.push(own);
        }
    }

    fn hold(&mut self) {
        if !self.recorder.is_done() {
            let until = Instant::now() + self.inner.options.commit_wait;
            self.hold_until.get_or_insert(until);
            self.held_from.get_or_insert(self.recorder.kept.len().saturating_sub(1));
        }
    }

    /// Makes the call durable, then lets go of what was held. `is_end`: nothing more of the reply is waited for.
    async fn release(&mut self, is_end: bool) {
        self.attended().await;
        self.hold_until = None;
        self.held_from = None;
        let committed = if self.recorder.is_done() {
            Ok(())
        } else if is_end || self.recorder.reply().is_finished(self.recorder.request.n) {
            let (status, error) = self.recorder.outcome();
            self.recorder.commit(status, error).await
        } else {
            self.recorder.commit_finished().await
        };
        match committed {
            Ok(()) => {
                self.ready.append(&mut self.held);
                self.may_act = true;
                if self.recorder.is_done() {
                    match self.face.aborted(self.recorder.reply()) {
                        Some(error) => self.say(&error),
                        None => self.finish(),
                    }
                    self.wind_up();
                }
            }
            Err(error) => {
                self.again = None;
                self.held.clear();
                self.say(&whole::sink_error(&error));
            }
        }
    }

    /// The upstream's stream is at its end, by itself or by an error.
    async fn end(&mut self, error: Option<String>) {
        self.source = Source::Ended;
        if let Some(event) = self.parser.finish().filter(|_| !self.is_to_be_said()) {
            self.event(&event).await;
        }
        let (status, reason) = self.recorder.outcome();
        if !self.recorder.is_done() {
            if status == CallStatus::Truncated {
                let message = error.or(reason).unwrap_or_default();
                let error = ApiError::new(502, ErrorType::Upstream, "upstream_truncated", message);
                return self.fail(status, error).await;
            }
            self.release(true).await;
        }
        // What could not be read, and an error of the upstream's own, end for the client as they did upstream.
        self.is_broken |= error.is_some() && !self.is_whole();
        self.is_over = true;
    }

    /// A reply with its finish reason is whole, even if what should follow is missing; so is what says itself that it
    /// is over.
    fn is_whole(&self) -> bool {
        self.has_terminator || self.recorder.outcome().0 == CallStatus::Ok
    }

    /// Ends the call, after recording it: with an error event where there is something to be said, and in any case
    /// without a clean end.
    async fn fail(&mut self, status: CallStatus, error: ApiError) {
        self.source = Source::Ended;
        if self.recorder.is_done() {
            self.is_broken |= !self.is_whole();
            self.is_over = true;
            return;
        }
        // Only usage and terminator were waited for: the reply itself is whole.
        if self.recorder.outcome().0 == CallStatus::Ok {
            self.release(true).await;
            self.is_over = true;
            return;
        }
        self.hold_until = None;
        self.recorder.attendance.close();
        match self.recorder.commit(status, Some(error.message.clone())).await {
            Ok(()) => {
                self.ready.append(&mut self.held);
                self.say(&error);
            }
            Err(error) => self.say(&whole::sink_error(&error)),
        }
    }

    fn say(&mut self, error: &ApiError) {
        self.recorder.attendance.close();
        self.all_again();
        // The upstream said nothing, so there is nothing to be said for it: many clients take an error event for final,
        // and try again when a connection breaks.
        let is_cut = matches!(error.code, "upstream_truncated" | "upstream_stalled");
        if !is_cut || self.face.api == ClientApi::OpenaiResponses {
            let event = self.error_event(error);
            self.ready.extend_from_slice(&event);
        }
        self.source = Source::Ended;
        self.is_over = true;
        self.is_broken = true;
    }
}
