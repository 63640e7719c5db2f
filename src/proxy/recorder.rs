//! What is captured of one call, and its way to the store. Dropped before its end, it records that too.
//!
//! Of a long reply the recorder keeps in memory what the relay asks for; the rest is read again from its copy
//! ([`super::tape`]) when a record is made.

mod prompts;
mod records;

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::Instrument as _;

use super::failures::Failed;
use super::gate::VersionAtStart;
use super::kept::Kept;
use super::limits::Places;
use super::received::{Received, Unreadable};
use super::rejoin::Attendance;
use super::routes::Route;
use super::session::Session;
use super::tape::Turn;
use super::token_in::Rendered;
use super::{Inner, failures, store};
use crate::protocol::chat::{Choice, CutError, CutReply, Reply, Request};
use crate::protocol::messages::Assembled;
use crate::protocol::responses;
use crate::record::{Call, CallId, CallKind, CallStatus, ClientApi, SinkError};
use crate::upstream::dialect::Prepared;

pub(super) use records::Records;

/// One call from its admission until it is durable.
pub(super) struct Recorder(Option<Box<Open>>);

/// What a recorder holds until it is dropped.
pub(super) struct Open {
    inner: Arc<Inner>,
    session: Arc<Session>,
    pub(super) attendance: Arc<Attendance>,
    /// Keep the session and the proxy from ending before the call is durable.
    tokens: (TaskTrackerToken, TaskTrackerToken),
    _slot: Arc<Places>,
    pub(super) call_id: CallId,
    wire: Wire,
    /// The same as a chat request.
    pub(super) request: Request,
    pub(super) prepared: Prepared,
    pub(super) attempt: u16,
    pub(super) retry_of: Option<CallId>,
    /// Another attempt follows: this one's failure is no evidence against the upstream.
    pub(super) is_retried: bool,
    pub(super) http_status: u16,
    pub(super) conversation_id: Option<String>,
    /// What the client calls itself.
    pub(super) client_name: Option<String>,
    pub(super) client_version: Option<String>,
    pub(super) kind: CallKind,
    /// What is said in addition to the verdict.
    pub(super) more_reasons: Vec<String>,
    reply: Received,
    /// What was read of the reply is not all in `reply`: it is read again when a record is made.
    is_forgotten: bool,
    received: Instant,
    received_at: i64,
    ttft_us: Option<u64>,
    pub(super) version_at_start: VersionAtStart,
    pub(super) kept: Kept,
    unreadable: Option<String>,
    /// All that is kept was read as JSON as it is.
    is_json: bool,
    /// Why a part of it could not be stored on its way.
    not_kept: Option<String>,
    committed: BTreeSet<u16>,
    is_done: bool,
    has_succeeded: bool,
    /// When the last event of the upstream's stream came.
    last_event: Option<Instant>,
    /// That of the request.
    span: tracing::Span,
}

/// What is spoken on both sides.
pub(super) struct Wire {
    pub(super) client_api: ClientApi,
    /// The client's request as it came.
    pub(super) client_body: Bytes,
    pub(super) upstream_api: ClientApi,
    pub(super) route: Arc<Route>,
    /// The prompt that lego rendered.
    pub(super) rendered: Option<Arc<Rendered>>,
}

impl Recorder {
    pub(super) fn new(
        attendance: Arc<Attendance>,
        tokens: (TaskTrackerToken, TaskTrackerToken),
        slot: Arc<Places>,
        wire: Wire,
        request: Request,
        prepared: Prepared,
    ) -> Self {
        let (inner, session) = (Arc::clone(&attendance.inner), Arc::clone(&attendance.session));
        inner.measures.in_flight.increment(1.0);
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let open = Open {
            tokens,
            _slot: slot,
            call_id: CallId::now(),
            reply: Received::new(wire.upstream_api, request.n_each),
            is_forgotten: false,
            request,
            prepared,
            attempt: 1,
            retry_of: None,
            is_retried: false,
            http_status: 0,
            conversation_id: None,
            client_name: None,
            client_version: None,
            kind: wire.route.kind.unwrap_or(session.spec.kind),
            more_reasons: Vec::new(),
            received: Instant::now(),
            received_at: i64::try_from(since_epoch.as_micros()).unwrap_or(i64::MAX),
            ttft_us: None,
            version_at_start: VersionAtStart::default(),
            kept: Kept::default(),
            unreadable: None,
            is_json: true,
            not_kept: None,
            committed: BTreeSet::new(),
            is_done: false,
            has_succeeded: false,
            wire,
            last_event: None,
            span: tracing::Span::current(),
            inner,
            session,
            attendance,
        };
        Self(Some(Box::new(open)))
    }
}

impl Deref for Recorder {
    type Target = Open;

    fn deref(&self) -> &Open {
        self.0.as_ref().expect("it is taken when it is dropped")
    }
}

impl DerefMut for Recorder {
    fn deref_mut(&mut self) -> &mut Open {
        self.0.as_mut().expect("it is taken when it is dropped")
    }
}

impl Open {
    /// The request came before this: a probe, or the wait for a place, was first.
    pub(super) fn came_at(&mut self, received: Instant) {
        let before = self.received.saturating_duration_since(received).as_micros();
        self.received_at = self.received_at.saturating_sub(i64::try_from(before).unwrap_or(i64::MAX));
        self.received = received;
    }

    /// Where the call goes.
    pub(super) const fn route(&self) -> &Arc<Route> {
        &self.wire.route
    }

    /// The prompt that lego rendered.
    pub(super) const fn rendered(&self) -> Option<&Arc<Rendered>> {
        self.wire.rendered.as_ref()
    }

    /// The reply so far.
    pub(super) const fn reply(&self) -> &Reply {
        self.reply.so_far()
    }

    /// What is known of a response that the upstream writes itself.
    pub(super) fn response(&self) -> Option<&responses::Assembler> {
        self.reply.response()
    }

    /// Reads an event of a stream, whose block is kept.
    pub(super) fn event(&mut self, name: &str, data: &Bytes) -> Assembled {
        let now = Instant::now();
        match self.last_event.replace(now) {
            Some(last) => self.inner.measures.inter_token.record(now - last),
            None => self.inner.measures.ttft.record(now - self.received),
        }
        self.first_byte();
        let read = self.reply.event(name, data);
        let is_read = read.is_ok();
        let may_finish = !is_read && self.reply.may_finish(data);
        let mut read = self.read(read);
        read.must_hold |= may_finish;
        let block = self.kept.len().saturating_sub(1);
        for block in self.reply.superseded(block, data, is_read).into_iter().flatten() {
            self.kept.supersede(block);
        }
        read
    }

    /// What of an event or a body comes only of what lego asked for.
    pub(super) fn cut(&self, text: &[u8]) -> Result<CutReply, CutError> {
        self.reply.cut(text, &self.prepared.cut)
    }

    /// Makes room for blocks of a stream.
    pub(super) fn reserve(&mut self, bytes: usize) {
        self.kept.reserve(bytes);
    }

    /// Keeps a block of a stream.
    pub(super) fn keep(&mut self, block: &Bytes) {
        self.kept.push(&self.inner.tapes, block);
    }

    /// Moves what has come of a long reply out of memory, if it is time to.
    ///
    /// # Errors
    /// It cannot be written. Nothing of it is lost.
    pub(super) async fn relieve(&mut self) -> Result<(), SinkError> {
        // The next events take the place of all that there is: a file would be written for nothing.
        let may_spill = !self.reply.repeats_itself();
        let relieved = self.kept.relieve(may_spill).await;
        if self.noted(relieved)? {
            self.is_forgotten |= self.reply.forget(self.kept.share());
        }
        Ok(())
    }

    /// Reads a copy of a whole body.
    pub(super) fn body(&mut self, body: &Bytes) -> Assembled {
        self.first_byte();
        self.kept = Kept::Body(body.clone());
        let read = self.reply.body(body);
        self.read(read)
    }

    /// Keeps an error's body without reading it as a reply.
    pub(super) fn error_body(&mut self, body: &Bytes) {
        self.first_byte();
        self.is_json = false;
        self.kept = Kept::Body(body.clone());
    }

    /// A part of the reply could not be read: forwarded, not trainable.
    pub(super) fn unreadable(&mut self, why: String) {
        self.is_json = false;
        self.unreadable.get_or_insert(why);
    }

    /// The upstream said something. A client may get it later: the record is made before what it may act on leaves.
    pub(super) fn first_byte(&mut self) {
        self.ttft_us.get_or_insert_with(|| micros(self.received));
    }

    /// True once everything is handed to the store.
    pub(super) const fn is_done(&self) -> bool {
        self.is_done
    }

    fn without_key(&self, text: &str) -> Bytes {
        self.wire.route.upstream.without_key(Bytes::copy_from_slice(text.as_bytes()))
    }

    /// How a call ended whose reply came to its end, and what to say about it.
    pub(super) fn outcome(&self) -> (CallStatus, Option<String>) {
        let clean = |text: &str| Some(String::from_utf8_lossy(&self.without_key(text)).into_owned());
        if let Some(why) = &self.unreadable {
            (CallStatus::ParseError, clean(why))
        } else if let Some(error) = &self.reply().error {
            (CallStatus::UpstreamError, clean(error))
        } else if let Some(why) = self.reply().aborted() {
            (CallStatus::UpstreamError, Some(why))
        } else if self.reply().is_finished(self.request.n) {
            (CallStatus::Ok, None)
        } else {
            (
                CallStatus::Truncated,
                Some("connection error: the upstream ended its reply before finish_reason".to_owned()),
            )
        }
    }

    /// Stores every choice that is not stored yet. Returns when they are durable.
    pub(super) async fn commit(
        &mut self,
        status: CallStatus,
        error: Option<String>,
    ) -> Result<(), SinkError> {
        let turn = self.kept.turn().await;
        let records = turn.run(|| self.take_all(status, error));
        self.store(records, status, turn).await?;
        self.has_succeeded = status == CallStatus::Ok;
        Ok(())
    }

    /// The client has what it may act on, or nobody comes back for it.
    pub(super) fn given(&self) {
        if self.has_succeeded {
            self.attendance.succeeded();
        }
    }

    /// Stores the choices that have their finish reason, while others go on.
    pub(super) async fn commit_finished(&mut self) -> Result<(), SinkError> {
        let finished = |(index, choice): (&u16, &Choice)| choice.finish_reason.is_some().then_some(*index);
        let finished: Vec<u16> = self.reply().choices.iter().filter_map(finished).collect();
        let turn = self.kept.turn().await;
        let records = turn.run(|| self.calls(&finished, CallStatus::Ok, None));
        self.store(records, CallStatus::Ok, turn).await
    }

    /// Keeps what is known so far, before the client may act on a part of it. Returns when it is durable.
    pub(super) async fn draft(&mut self) -> Result<(), SinkError> {
        let drafted = self.stored_draft().await;
        self.noted(drafted)
    }

    /// A store that fails is broken machinery (law 9), also where the call's record is written after all.
    fn noted<T>(&mut self, stored: Result<T, SinkError>) -> Result<T, SinkError> {
        if let Err(error) = &stored {
            self.not_kept.get_or_insert_with(|| error.to_string());
        }
        stored
    }

    async fn stored_draft(&self) -> Result<(), SinkError> {
        let why = "lego ended while this call ran; its client may have acted on this part of the reply";
        let turn = self.kept.turn().await;
        let records =
            turn.run(|| self.records(&self.open_choices(), CallStatus::Aborted, Some(why.to_owned())))?;
        let inner = Arc::clone(&self.inner);
        let draft = async move {
            let _turn = turn;
            inner.sink.draft(records.calls).await
        };
        match tokio::spawn(draft).await {
            Ok(result) => result,
            Err(error) => Err(SinkError::Io { place: "the capture".to_owned(), reason: error.to_string() }),
        }
    }

    /// Builds what is left and closes the recorder.
    fn take_all(&mut self, status: CallStatus, error: Option<String>) -> Result<Records, SinkError> {
        self.is_done = true;
        let choices = self.open_choices();
        let after = self.received.elapsed();
        self.inner.measures.ended(status, after);
        if let Some(route) = &self.wire.route.name {
            let labels = [("route", route.clone()), ("status", status.as_str().to_owned())];
            metrics::counter!("lego_proxy_route_calls_total", &labels).increment(1);
        }
        self.span.in_scope(|| {
            let (call_id, attempt, http_status) = (self.call_id, self.attempt, self.http_status);
            let (ended, ms) = (status.as_str(), after.as_millis() as u64);
            tracing::debug!(%call_id, attempt, status = ended, http_status, ms, "a call ended");
            if !self.is_retried {
                // The words of an upstream may be those of the request.
                let is_foreign = self.reply().error.is_some() || matches!(self.kept, Kept::Body(_));
                failures::tell(&self.inner, Failed::of(status, http_status, error.as_deref(), is_foreign));
            }
        });
        self.calls(&choices, status, error)
    }

    /// Appends in a task of its own, so that it goes on if the client leaves meanwhile.
    async fn store(
        &self,
        records: Result<Records, SinkError>,
        status: CallStatus,
        turn: Turn,
    ) -> Result<(), SinkError> {
        let records = records.inspect_err(|error| store::lost(&self.inner, &self.session, error))?;
        if records.calls.is_empty() {
            return Ok(());
        }
        let failure = self.failure(status, &records.calls);
        let (inner, session) = (Arc::clone(&self.inner), Arc::clone(&self.session));
        let append = store::append(inner, session, self.tokens.clone(), records, failure, turn)
            .instrument(self.span.clone());
        match tokio::spawn(append).await {
            Ok(result) => result,
            Err(error) => Err(SinkError::Io { place: "the capture".to_owned(), reason: error.to_string() }),
        }
    }

    /// What a trainer should know as broken machinery.
    fn failure(&self, status: CallStatus, calls: &[Call]) -> Option<String> {
        let is_clients_fault = matches!(self.http_status, 400 | 413 | 422);
        let is_broken = match status {
            CallStatus::UpstreamError => !is_clients_fault,
            CallStatus::Truncated | CallStatus::Timeout => true,
            _ => false,
        };
        let error = calls.iter().find_map(|call| call.error.as_deref()).unwrap_or_default();
        if let Some(error) = &self.not_kept {
            return Some(format!("capture: {error}"));
        }
        (is_broken && !self.is_retried)
            .then(|| format!("call {}: {}: {error}", self.call_id, status.as_str()))
    }

    fn read(&mut self, read: Result<Assembled, Unreadable>) -> Assembled {
        let read = read.unwrap_or_else(|error| {
            self.unreadable(error.to_string());
            Assembled::default()
        });
        self.is_json &= read.fed.is_json;
        read
    }

    /// The choices without a record. A call that has none at all has one record.
    fn open_choices(&self) -> Vec<u16> {
        let open = self.reply().choices.keys().copied().filter(|index| !self.committed.contains(index));
        let mut choices: Vec<u16> = open.collect();
        if choices.is_empty() && self.committed.is_empty() {
            choices.push(0);
        }
        choices
    }

    /// Records of these choices, which count as stored from now on.
    fn calls(
        &mut self,
        choices: &[u16],
        status: CallStatus,
        error: Option<String>,
    ) -> Result<Records, SinkError> {
        let new: Vec<u16> = choices.iter().copied().filter(|index| self.committed.insert(*index)).collect();
        self.records(&new, status, error)
    }

    /// How a call ends that was dropped, and what to say about it.
    fn dropped(&self) -> (CallStatus, String) {
        let is_closed = self.session.closed().is_cancelled();
        let left = "the client went away before the end of the reply";
        if !self.attendance.is_away() {
            return match self.attendance.stop.now() {
                _ if is_closed => {
                    (CallStatus::Aborted, "the session was closed while the call ran".to_owned())
                }
                Some(ended) => (ended.status, ended.error.message),
                None => (CallStatus::ClientDisconnect, left.to_owned()),
            };
        }
        let grace = self.inner.options.retry_grace;
        let how = if is_closed || self.inner.closing.is_cancelled() {
            "lego ended the call before it came back".to_owned()
        } else if self.outcome().0 == CallStatus::Ok {
            format!(
                "the reply was whole within {grace:?} (proxy.retry_grace_ms), and nobody came back for it"
            )
        } else {
            format!("the upstream call ran on for {grace:?} (proxy.retry_grace_ms), then it was cancelled")
        };
        (CallStatus::ClientDisconnect, format!("{left}; {how}"))
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let Some(mut open) = self.0.take() else {
            return;
        };
        if open.is_done {
            return open.given();
        }
        let (status, why) = open.dropped();
        let call_id = open.call_id;
        match tokio::runtime::Handle::try_current() {
            // What fails is told on the way to the store.
            Ok(runtime) => drop(runtime.spawn(async move {
                let _ = open.commit(status, Some(why)).await;
            })),
            Err(_) => tracing::error!(%call_id, "no runtime to record a dropped call in"),
        }
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
