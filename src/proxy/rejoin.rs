//! A client that leaves before its reply, and comes back for it.
//!
//! A client's connection drops what answers it when it breaks: the handler's future before the reply has begun, the
//! body after. A call that is dropped so runs on for `retry_grace_ms` with its reply read and recorded, but not made
//! final; then it is dropped for good, which cancels it upstream. The same request within that time joins it: the new
//! client gets the reply from its first event on.
//!
//! Invariants:
//! - Two requests are one only if session, protocol, conversation and everything that bears on the reply are equal (of
//!   their texts, without what is volatile in them), and the first one's client is gone without having been given what it may act on. Given is what the server took for
//!   writing: nobody can know more of a connection that broke.
//! - A call whose client is there is in no table and costs nothing here; a client that is there shares its call with
//!   nobody.
//! - Whoever changes [`Attendance`] owns the call's work and has it polled from anew: its waits need no waker.

use std::borrow::Cow;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::Stream;
use http::HeaderMap;
use http_body_util::BodyExt;
use serde_json::Value;
use tokio::sync::oneshot;

use super::face::{Face, Incoming, Retold};
use super::session::Session;
use super::stop::Stop;
use super::token_in::Given;
use super::{Inner, reply};
use crate::protocol::error::ApiError;
use crate::protocol::volatile::{Rules, Shape};
use crate::record::{CallId, ClientApi};

/// What answers a client whose reply has not begun.
type Answer = Pin<Box<dyn Future<Output = Result<Response, ApiError>> + Send>>;

/// The pieces of a reply's body.
type Pieces = Pin<Box<dyn Stream<Item = Result<Bytes, std::io::Error>> + Send>>;

/// Members of a request that say who asks, not what is asked.
const ABOUT_THE_CLIENT: [&str; 5] =
    ["client_metadata", "metadata", "prompt_cache_key", "safety_identifier", "user"];

/// Whether a call's client is there to have its reply.
pub(super) struct Attendance {
    pub(super) inner: Arc<Inner>,
    pub(super) session: Arc<Session>,
    api: ClientApi,
    upstream_api: ClientApi,
    /// The request as lego reads it.
    body: Bytes,
    /// That is as its client said it, in whatever words the upstream is asked.
    is_said: bool,
    /// The request in chat's words, where the upstream turned out to know no others.
    retold: OnceLock<Retold>,
    pub(super) conversation_id: Option<String>,
    /// What ends the call.
    pub(super) stop: Stop,
    /// With its success its session ends; its client said so.
    is_last: AtomicBool,
    /// Its success is durable.
    is_stored: AtomicBool,
    is_away: AtomicBool,
    is_final: AtomicBool,
    has_returned: AtomicBool,
    returned: Mutex<Option<Face>>,
    times_rejoined: AtomicU16,
    /// Of a whole reply.
    pub(super) given: Given,
}

impl Attendance {
    /// The attendance of a new call, whose client is there.
    pub(super) fn new(
        inner: &Arc<Inner>,
        session: &Arc<Session>,
        incoming: &Incoming,
        conversation_id: Option<String>,
        stop: Stop,
        is_last: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            inner: Arc::clone(inner),
            session: Arc::clone(session),
            api: incoming.face.api,
            upstream_api: incoming.face.upstream_api,
            body: incoming.as_said().body().clone(),
            is_said: incoming.said.is_some(),
            retold: OnceLock::new(),
            conversation_id,
            stop,
            is_last: AtomicBool::new(is_last),
            is_stored: AtomicBool::new(false),
            is_away: AtomicBool::new(false),
            is_final: AtomicBool::new(inner.options.retry_grace.is_zero()),
            has_returned: AtomicBool::new(false),
            returned: Mutex::default(),
            times_rejoined: AtomicU16::new(0),
            given: Given::default(),
        })
    }

    /// True while no client is there.
    pub(super) fn is_away(&self) -> bool {
        self.is_away.load(Ordering::Acquire)
    }

    /// True once nobody may join the call any more.
    pub(super) fn is_final(&self) -> bool {
        self.is_final.load(Ordering::Acquire)
    }

    /// Nobody may join from here on: the client is being given what it may act on, or the call failed.
    pub(super) fn close(&self) {
        self.is_final.store(true, Ordering::Release);
    }

    /// The call's success is durable, and its client has it or does not come back for it.
    pub(super) fn succeeded(&self) {
        if self.is_last.swap(false, Ordering::AcqRel) {
            self.inner.sessions.end(&self.session.spec.session_id);
        }
    }

    /// The call's success is durable; its client may still be given it, or come back for it.
    pub(super) fn stored(&self) {
        self.is_stored.store(true, Ordering::Release);
    }

    /// The call goes on in chat's words.
    pub(super) fn set_retold(&self, retold: Retold) {
        // It does so once.
        let _ = self.retold.set(retold);
    }

    /// The face of a client of a call that goes on in chat's words.
    pub(super) fn retold(&self) -> Option<Face> {
        self.retold.get()?.face()
    }

    /// How often a client came back for the reply.
    pub(super) fn times_rejoined(&self) -> u16 {
        self.times_rejoined.load(Ordering::Acquire)
    }

    /// Returns while a client is there.
    pub(super) async fn present(&self) {
        poll_fn(|_| if self.is_away() { Poll::Pending } else { Poll::Ready(()) }).await;
    }

    /// Returns once a client came back whose reply must begin from anew.
    pub(super) async fn came_back(&self) {
        let has_returned = || self.has_returned.load(Ordering::Acquire);
        poll_fn(|_| if has_returned() { Poll::Ready(()) } else { Poll::Pending }).await;
    }

    /// The client that came back, once.
    pub(super) fn take_returned(&self) -> Option<Face> {
        if !self.has_returned.swap(false, Ordering::AcqRel) {
            return None;
        }
        self.returned.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The connection is gone. True if the call runs on for its client to come back.
    fn leave(&self) -> bool {
        let is_over = self.is_final()
            || self.inner.closing.is_cancelled()
            || self.session.closed().is_cancelled()
            || std::thread::panicking();
        !is_over && !self.is_away.swap(true, Ordering::AcqRel)
    }

    fn come_back(&self, face: Face) {
        *self.returned.lock().unwrap_or_else(PoisonError::into_inner) = Some(face);
        self.times_rejoined.fetch_add(1, Ordering::AcqRel);
        self.has_returned.store(true, Ordering::Release);
        self.is_away.store(false, Ordering::Release);
    }

    fn is_same(&self, incoming: &Incoming, conversation_id: Option<&str>) -> bool {
        let body = incoming.as_said().body();
        self.api == incoming.face.api
            && self.is_said == incoming.said.is_some()
            && (self.is_said || self.upstream_api == incoming.face.upstream_api)
            && self.conversation_id.as_deref() == conversation_id
            && (self.body == body
                || is_same_request(&self.inner.options.volatile, self.shape(), &self.body, body))
    }

    /// What [`Attendance::body`] is of, where it has texts with volatile parts.
    const fn shape(&self) -> Option<Shape> {
        match self.upstream_api {
            _ if self.is_said => Some(Shape::Responses),
            ClientApi::OpenaiChat => Some(Shape::Chat),
            ClientApi::AnthropicMessages => Some(Shape::Messages),
            _ => None,
        }
    }
}

impl Drop for Attendance {
    fn drop(&mut self) {
        // The call was given up while it was stored: nobody can have its reply any more.
        if *self.is_stored.get_mut() {
            self.succeeded();
        }
    }
}

/// True if two bodies ask for the same: their members are equal, in whatever order and spacing, but for the parts of
/// prompts that `volatile` matches.
fn is_same_request(volatile: &Rules, shape: Option<Shape>, one: &[u8], other: &[u8]) -> bool {
    let compared = |body| shape.map_or(Cow::Borrowed(body), |shape| volatile.compared_body(shape, body));
    let asked = |body| match serde_json::from_slice(&compared(body)) {
        Ok(Value::Object(mut members)) => {
            members.retain(|name, _| !ABOUT_THE_CLIENT.contains(&name.as_str()));
            Some(members)
        }
        _ => None,
    };
    asked(one).is_some_and(|one| Some(one) == asked(other))
}

/// The calls of a session whose clients left, within their grace.
#[derive(Default)]
pub(super) struct Left {
    calls: Mutex<Vec<Waiting>>,
}

struct Waiting {
    attendance: Arc<Attendance>,
    claim: oneshot::Sender<oneshot::Sender<Parked>>,
}

/// How many calls of a proxy are without a client.
#[derive(Default)]
pub(super) struct LeftCount(AtomicUsize);

impl LeftCount {
    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    fn add(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
        metrics::gauge!("lego_proxy_calls_without_client").increment(1.0);
    }

    fn subtract(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
        metrics::gauge!("lego_proxy_calls_without_client").decrement(1.0);
    }
}

impl Left {
    fn lock(&self) -> MutexGuard<'_, Vec<Waiting>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, waiting: Waiting) {
        waiting.attendance.inner.left.add();
        self.lock().push(waiting);
    }

    fn take(&self, is_it: impl Fn(&Attendance) -> bool) -> Option<Waiting> {
        let mut calls = self.lock();
        let found = calls.iter().position(|waiting| is_it(&waiting.attendance))?;
        let waiting = calls.swap_remove(found);
        waiting.attendance.inner.left.subtract();
        Some(waiting)
    }
}

/// Gives a client the reply of the call that it left, if it asks for the same again in time.
pub(super) async fn rejoin(
    session: &Session,
    incoming: Incoming,
    conversation_id: Option<&str>,
) -> Result<Result<Response, ApiError>, Incoming> {
    let is_it = |left: &Attendance| !left.is_final() && left.is_same(&incoming, conversation_id);
    let Some(Waiting { attendance, claim }) = session.left.take(is_it) else {
        return Err(incoming);
    };
    let (give, given) = oneshot::channel();
    // Either fails if its time ran out just now.
    let _ = claim.send(give);
    let Ok(parked) = given.await else {
        return Err(incoming);
    };
    attendance.come_back(incoming.face);
    metrics::counter!("lego_proxy_rejoined_total").increment(1);
    tracing::info!(session = %session.spec.session_id, "a client came back for the reply of the call that it left");
    Ok(match parked {
        Parked::Asking(answer) => answered(attendance, answer).await,
        Parked::Reply(response) => Ok(response),
    })
}

/// Waits for a call's reply to begin, and has the call run on if the wait is given up.
pub(super) async fn answered(attendance: Arc<Attendance>, answer: Answer) -> Result<Response, ApiError> {
    let mut held = Held { attendance, work: Some(Work::Asking(answer)) };
    poll_fn(|context| held.poll_answer(context)).await
}

/// A reply that has begun, with these pieces as its body; the call runs on if the body is dropped before its end.
pub(super) fn begun(
    attendance: Arc<Attendance>,
    call_id: CallId,
    headers: HeaderMap,
    pieces: impl Stream<Item = Result<Bytes, std::io::Error>> + Send + 'static,
) -> Response {
    response(attendance, call_id, headers, Box::pin(pieces))
}

fn response(attendance: Arc<Attendance>, call_id: CallId, headers: HeaderMap, pieces: Pieces) -> Response {
    let kept = if attendance.is_final() { HeaderMap::new() } else { headers.clone() };
    let stop = attendance.stop.clone();
    let mut held = Held { attendance, work: Some(Work::Body(call_id, kept, pieces)) };
    let pieces = futures_util::stream::poll_fn(move |context| held.poll_piece(context));
    let mut response = Response::new(Body::from_stream(pieces));
    *response.headers_mut() = headers;
    // For the connection: see `stall`.
    response.extensions_mut().insert(stop);
    reply::with_call_id(response, call_id)
}

/// What a connection holds of a call.
struct Held {
    attendance: Arc<Attendance>,
    /// `None`: it came to its end.
    work: Option<Work>,
}

enum Work {
    Asking(Answer),
    /// With the head of the reply.
    Body(CallId, HeaderMap, Pieces),
}

impl Held {
    fn poll_answer(&mut self, context: &mut Context<'_>) -> Poll<Result<Response, ApiError>> {
        let Some(Work::Asking(answer)) = &mut self.work else {
            return Poll::Pending;
        };
        let answer = ready!(answer.as_mut().poll(context));
        self.work = None;
        Poll::Ready(answer)
    }

    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, std::io::Error>>> {
        let Some(Work::Body(_, _, pieces)) = &mut self.work else {
            return Poll::Ready(None);
        };
        let piece = ready!(pieces.as_mut().poll_next(context));
        if piece.is_none() {
            self.work = None;
        }
        Poll::Ready(piece)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(work) = self.work.take() else {
            return;
        };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        if !self.attendance.leave() {
            return;
        }
        let attendance = Arc::clone(&self.attendance);
        let parked = match work {
            Work::Asking(answer) => Parked::Asking(answer),
            Work::Body(call_id, headers, pieces) => {
                Parked::Reply(response(Arc::clone(&attendance), call_id, headers, pieces))
            }
        };
        let (claim, claimed) = oneshot::channel();
        attendance.session.left.put(Waiting { attendance: Arc::clone(&attendance), claim });
        drop(runtime.spawn(outlive(attendance, parked, claimed)));
    }
}

/// A call without a client.
enum Parked {
    Asking(Answer),
    Reply(Response),
}

impl Parked {
    /// Goes on with the call, until it failed. What there would be to send is dropped: it can be had again.
    async fn run(&mut self) {
        if let Self::Asking(answer) = self {
            let Ok(response) = answer.await else {
                return;
            };
            *self = Self::Reply(response);
        }
        if let Self::Reply(response) = self {
            while let Some(Ok(_)) = response.body_mut().frame().await {}
        }
    }
}

/// Runs a call without its client, until that comes back or its time is over.
async fn outlive(
    attendance: Arc<Attendance>,
    mut parked: Parked,
    mut claimed: oneshot::Receiver<oneshot::Sender<Parked>>,
) {
    let closed = attendance.session.closed();
    let claim = tokio::select! {
        biased;
        () = closed.cancelled() => None,
        () = attendance.inner.closing.cancelled() => None,
        claim = &mut claimed => claim.ok(),
        () = parked.run() => None,
        () = tokio::time::sleep(attendance.inner.options.retry_grace) => None,
    };
    match claim {
        // A client that left again meanwhile loses the call.
        Some(give) => drop(give.send(parked)),
        None => drop(attendance.session.left.take(|left| std::ptr::eq(left, &raw const *attendance))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::protocol::volatile::{Pattern, Role, Rule};

    #[test]
    fn a_request_is_the_same_whoever_asks_and_however_it_is_written() {
        let none = Rules::default();
        let is_same = |one: &str, other: &str| {
            is_same_request(&none, Some(Shape::Chat), one.as_bytes(), other.as_bytes())
        };
        let asked = r#"{"model":"m","messages":[{"role":"user","content":"a"}],"temperature":1}"#;
        let shuffled = r#"{ "temperature": 1, "messages": [ {"content":"a","role":"user"} ], "model": "m", "user": "u", "metadata": {"try": 2} }"#;
        assert!(is_same(asked, shuffled));
        for other in [
            r#"{"model":"m","messages":[{"role":"user","content":"b"}],"temperature":1}"#,
            r#"{"model":"m","messages":[{"role":"user","content":"a"}],"temperature":0}"#,
            r#"{"model":"n","messages":[{"role":"user","content":"a"}],"temperature":1}"#,
            r#"{"model":"m","messages":[{"role":"user","content":"a"}],"temperature":1,"stream":true}"#,
            r#"{"model":"m","messages":[{"role":"user","content":"a"}],"temperature":1,"tools":[]}"#,
        ] {
            assert!(!is_same(asked, other), "{other}");
        }
        assert!(!is_same("{", "{"), "what cannot be read is equal to nothing");
    }

    #[test]
    fn a_request_is_the_same_whatever_its_volatile_parts() {
        let rule = |is_removed| Rule {
            role: Role::System,
            pattern: Pattern::Text {
                regex: regex::Regex::new("nonce [0-9]+").expect("a pattern"),
                replacement: String::new(),
            },
            is_removed,
        };
        for is_removed in [false, true] {
            let rules: Rules = [rule(is_removed)].into_iter().collect();
            let is_same = |shape, one: Value, other: Value| {
                is_same_request(&rules, shape, one.to_string().as_bytes(), other.to_string().as_bytes())
            };
            let chat =
                |role: &str, text: &str| json!({"model": "m", "messages": [{"role": role, "content": text}]});
            let (a, b) = ("be brief, nonce 1", "be brief, nonce 2");
            assert!(is_same(Some(Shape::Chat), chat("system", a), chat("system", b)));
            assert!(!is_same(Some(Shape::Chat), chat("user", a), chat("user", b)), "no rule is for it");
            assert!(!is_same(Some(Shape::Chat), chat("system", a), chat("system", "be long, nonce 1")));
            let messages =
                |text: &str| json!({"system": text, "messages": [{"role": "user", "content": "hi"}]});
            assert!(is_same(Some(Shape::Messages), messages(a), messages(b)));
            assert!(!is_same(None, chat("system", a), chat("system", b)), "a prompt is no message");
        }
    }
}
