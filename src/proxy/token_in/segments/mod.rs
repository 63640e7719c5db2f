//! One reply in several segments: what an upstream gave up while its weights changed goes on from the tokens that it had
//! sampled (a partial rollout).
//!
//! The stream that comes out is the one that would have come had nobody stopped: [`rewriting`] puts the later segments'
//! events in its words. Who reads it need not know.
//!
//! Invariants:
//! - No token is lost, and none is sampled twice: a segment's prompt is the call's prompt and all that was sampled.
//! - Each row of expert routing is that of the segment that read its position first ([`rows`]).
//! - Each token's weights are those of its segment, as the engine told them, or by lego's clock where that stood still
//!   during the segment. Where neither is known of a segment, nothing is told of the whole.
//! - A reply of one segment passes untouched.

mod rewriting;
mod rows;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method};
use http_body::Frame;
use http_body_util::StreamBody;
use tokio::sync::watch;

use super::Rendered;
use crate::protocol::sse::{Event, Parser};
use crate::proxy::Inner;
use crate::proxy::routes::Route;
use crate::proxy::session::Session;
use crate::record::ClientApi;
use crate::upstream::{UpstreamBody, UpstreamReply};
use rewriting::{Rewriting, Segment, Wording};
use rows::Rows;

/// Bytes of a stream that are taken at once.
const PIECE_BYTES: usize = 8 << 10;
/// While nothing comes, a comment says so often that the upstream is not to be given up.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);
/// Segments in a row that brought nothing, or could not be asked for, before that is the reply's end: 15 seconds.
const MOST_EMPTY: u32 = 8;

/// What a further segment is asked for with.
pub(in crate::proxy) struct Asking {
    pub(in crate::proxy) inner: Arc<Inner>,
    pub(in crate::proxy) session: Arc<Session>,
    pub(in crate::proxy) route: Arc<Route>,
    pub(in crate::proxy) rendered: Arc<Rendered>,
    pub(in crate::proxy) path: &'static str,
    pub(in crate::proxy) headers: HeaderMap,
    /// The first segment's request.
    pub(in crate::proxy) body: Bytes,
    pub(in crate::proxy) version_at_start: Option<String>,
    /// Since before the first segment was asked for: counts the times that running calls were told to let go of their
    /// upstream.
    pub(in crate::proxy) interrupts: watch::Receiver<u64>,
}

/// The body of a reply that goes on after it was given up, if it may.
pub(in crate::proxy) fn joined(
    asking: Asking,
    reply: UpstreamReply,
    upstream_api: ClientApi,
) -> UpstreamReply {
    let version = asking.version_at_start.clone();
    let ends = if asking.rendered.ignores_ends() { &[] } else { asking.rendered.ends() };
    let upstream = &asking.route.upstream;
    let rows = Rows::new(upstream.kind(), upstream.routing_hint(), asking.rendered.prompt.len());
    let wording = Wording::of(upstream_api);
    let Some(rewriting) = Rewriting::of(&asking.body, wording, version, ends, rows) else {
        return reply;
    };
    let UpstreamReply { status, headers, body } = reply;
    let segments = Segments {
        asking,
        rewriting,
        body,
        parser: Parser::new(),
        is_waiting: false,
        passing: None,
        empty: 0,
        is_over: false,
    };
    let stream = futures_util::stream::unfold(segments, |mut segments| async move {
        let piece = segments.next().await?;
        Some((piece.map(Frame::data), segments))
    });
    UpstreamReply { status, headers, body: UpstreamBody::other(StreamBody::new(Box::pin(stream))) }
}

struct Segments {
    asking: Asking,
    rewriting: Rewriting,
    body: UpstreamBody,
    parser: Parser,
    /// The segment is at its end, and the next one not asked for yet.
    is_waiting: bool,
    /// The wait at the gate.
    passing: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// Segments in a row that brought nothing.
    empty: u32,
    is_over: bool,
}

impl Segments {
    /// The next bytes of the stream.
    async fn next(&mut self) -> Option<Result<Bytes, std::io::Error>> {
        loop {
            if self.is_over {
                return None;
            }
            if self.is_waiting {
                return Some(self.go_on().await);
            }
            let piece = tokio::select! {
                biased;
                // The gate, and so its sender, outlives every call.
                Ok(()) = self.asking.interrupts.changed(), if !self.rewriting.is_finished() => {
                    self.is_waiting = true;
                    self.end_segment();
                    continue;
                }
                piece = self.body.next(PIECE_BYTES) => piece,
            };
            match piece {
                Some(Ok(piece)) => self.parser.push_piece(piece),
                Some(Err(error)) => {
                    self.is_over = true;
                    return Some(Err(std::io::Error::other(error.to_string())));
                }
                None => {
                    self.is_over = true;
                    let rest = self.parser.take_pending();
                    return (!rest.is_empty()).then_some(Ok(rest));
                }
            }
            let mut out = BytesMut::new();
            while let Some(event) = self.parser.next_event() {
                if self.event(&event, &mut out) {
                    self.is_waiting = true;
                    self.end_segment();
                    break;
                }
            }
            if !out.is_empty() {
                return Some(Ok(out.freeze()));
            }
        }
    }

    /// Takes an event; true if the upstream gave the reply up, and it is to go on.
    fn event(&mut self, event: &Event, out: &mut BytesMut) -> bool {
        if !event.has_data() {
            out.extend_from_slice(&event.raw);
            return false;
        }
        let before = self.rewriting.sampled();
        let asking = &self.asking;
        let clock = || asking.route.version_now(&asking.inner, &asking.session);
        match self.rewriting.event(event, &clock) {
            Segment::Goes(bytes) => {
                out.extend_from_slice(&bytes);
                false
            }
            Segment::GivenUp { told, original } => {
                let is_empty = self.rewriting.sampled() == before && before == self.rewriting.begun_at();
                if is_empty && self.empty >= MOST_EMPTY {
                    out.extend_from_slice(&original);
                    return false;
                }
                out.extend_from_slice(&told);
                true
            }
        }
    }

    /// Lets go of the upstream. Engines take a closed connection for an abort.
    fn end_segment(&mut self) {
        self.body = UpstreamBody::other(http_body_util::Empty::new());
        self.parser = Parser::new();
        let asking = &self.asking;
        let now = asking.route.version_now(&asking.inner, &asking.session);
        let brought = self.rewriting.end_segment(now);
        self.empty = if brought { 0 } else { self.empty + 1 };
    }

    /// Asks for what follows, once the gate is open. Gives a comment, or why it cannot go on.
    async fn go_on(&mut self) -> Result<Bytes, std::io::Error> {
        if let Some(last) = self.rewriting.is_full() {
            self.is_over = true;
            return Ok(last);
        }
        let sign_of_life = SIGN_OF_LIFE.min(self.asking.route.upstream.timeouts().idle / 2);
        if self.passing.is_none() {
            // What is told from here on is not missed: the gate may be closed again while it is asked for the next one.
            self.asking.interrupts.mark_unchanged();
            let (inner, pause) = (Arc::clone(&self.asking.inner), pause(self.empty));
            self.passing = Some(Box::pin(async move {
                tokio::time::sleep(pause).await;
                inner.gate.passed().await;
            }));
        }
        if let Some(passing) = &mut self.passing
            && tokio::time::timeout(sign_of_life, passing).await.is_err()
        {
            return Ok(Bytes::from_static(b": paused\n\n"));
        }
        self.passing = None;
        let asking = &self.asking;
        self.rewriting.begin_segment(asking.route.version_now(&asking.inner, &asking.session));
        let body = self.rewriting.request(&asking.rendered.prompt);
        let sent = asking.route.upstream.send(Method::POST, asking.path, None, &asking.headers, body).await;
        let why = match sent {
            Ok(reply) if reply.status.is_success() => {
                self.body = reply.body;
                self.is_waiting = false;
                metrics::counter!("lego_proxy_resumed_replies_total").increment(1);
                return Ok(Bytes::from_static(b": resumed\n\n"));
            }
            Ok(mut reply) => {
                let said = asking.route.upstream.without_key(reply.body.peek(4096).await.into());
                let why = format!("{} {}", reply.status, String::from_utf8_lossy(&said));
                // Nothing but time helps against these.
                if !matches!(reply.status.as_u16(), 408 | 429 | 500 | 502..=504) {
                    self.empty = MOST_EMPTY;
                }
                why
            }
            Err(error) => error.to_string(),
        };
        self.empty += 1;
        if self.empty <= MOST_EMPTY {
            return Ok(Bytes::from_static(b": not resumed yet\n\n"));
        }
        self.is_over = true;
        Err(std::io::Error::other(format!("the reply could not go on after its upstream gave it up: {why}")))
    }
}

/// Before another try behind so many that brought nothing: an engine that changes its weights may not be ready yet.
fn pause(empty: u32) -> Duration {
    match empty {
        0 => Duration::ZERO,
        some => Duration::from_millis(100 << some.min(6)).min(SIGN_OF_LIFE),
    }
}
