//! Replies that are not streams: read to their end, recorded, then sent (the held event is the last byte).

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::response::Response;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header};

use super::call::Sending;
use super::call::answer::{Form, sleep};
use super::face::Face;
use super::measures::Buffered;
use super::recorder::Recorder;
use super::rejoin::Attendance;
use super::routes::Route;
use super::stop::Stop;
use super::{Inner, rejoin, reply};
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::json;
use crate::record::{CallId, CallStatus};
use crate::upstream::{self, Upstream, UpstreamBody, UpstreamError, UpstreamReply};

/// Longest body that is taken from an upstream.
const MAX_BODY_BYTES: usize = 256 * 1024 * 1024;

const JSON: header::HeaderValue = header::HeaderValue::from_static("application/json");

/// Why a body did not come to its end.
pub(super) struct BadBody {
    pub(super) status: CallStatus,
    pub(super) error: ApiError,
}

/// Reads a body to its end.
pub(super) async fn read(
    upstream: &Upstream,
    body: UpstreamBody,
    piece_bytes: usize,
    abort: &Stop,
) -> Result<Bytes, BadBody> {
    read_on(BytesMut::new(), upstream, body, piece_bytes, abort).await
}

/// The same of a body whose beginning is `text`.
pub(super) async fn read_on(
    mut text: BytesMut,
    upstream: &Upstream,
    mut body: UpstreamBody,
    piece_bytes: usize,
    abort: &Stop,
) -> Result<Bytes, BadBody> {
    let idle = upstream.timeouts().idle;
    let mut buffered = Buffered::default();
    loop {
        let piece = tokio::select! {
            biased;
            ended = abort.cancelled() => return Err(ended),
            piece = tokio::time::timeout(idle, body.next(piece_bytes)) => piece,
        };
        let bad = |status, code: u16, name, message: String| BadBody {
            status,
            error: ApiError::new(code, ErrorType::Upstream, name, message),
        };
        match piece {
            Err(_) => {
                let message =
                    format!("connection error: the upstream sent nothing for {idle:?} within its reply");
                return Err(bad(CallStatus::Timeout, 504, "upstream_timeout", message));
            }
            Ok(None) => return Ok(text.freeze()),
            Ok(Some(Err(error))) => {
                let message = error.to_string();
                return Err(bad(CallStatus::Truncated, 502, "upstream_truncated", message));
            }
            Ok(Some(Ok(piece))) => text.extend_from_slice(&piece),
        }
        buffered.set(text.len());
        if text.len() > MAX_BODY_BYTES {
            let message = "the upstream's reply is longer than 256 MiB".to_owned();
            return Err(bad(CallStatus::UpstreamError, 502, "upstream_oversize", message));
        }
    }
}

/// Records a call that ends in an error of lego's own making and answers with it.
pub(super) async fn fail(
    mut recorder: Recorder,
    face: &Face,
    status: CallStatus,
    error: &ApiError,
) -> Response {
    recorder.http_status = error.status;
    let call_id = recorder.call_id;
    let response = match recorder.commit(status, Some(error.message.clone())).await {
        Ok(()) => face.error(error),
        Err(sink) => face.error(&sink_error(&sink)),
    };
    reply::with_call_id(response, call_id)
}

/// How a call ends to which no reply began.
pub(super) fn no_reply(error: &UpstreamError) -> (CallStatus, ApiError) {
    let (status, code) =
        if error.is_timeout() { (CallStatus::Timeout, 504) } else { (CallStatus::UpstreamError, 502) };
    (status, ApiError::new(code, ErrorType::Upstream, error.code(), error.to_string()))
}

/// What an upstream's error answer says. Where it refuses the key, the message names where the key is from.
pub(super) fn upstream_error(route: &Route, status: u16, body: &[u8]) -> ApiError {
    let mut error = ApiError::from_upstream(status, body, &route.upstream.name());
    if matches!(status, 401 | 403) {
        let key = match &route.upstream_key_env {
            Some(name) => {
                format!("lego sends the value of the environment variable {name} as the key; check it")
            }
            None => {
                format!("lego sends no key, since {} names no variable; set it", route.key_of_key)
            }
        };
        error.message = format!("{} ({key})", error.message);
    }
    error
}

/// The error of a call that could not be made durable.
pub(super) fn sink_error(error: &crate::record::SinkError) -> ApiError {
    let message = format!("lego could not store this call, so it must not count: {error}");
    ApiError::new(503, ErrorType::Server, "capture_failed", message)
}

/// A reply that came to its end, and may leave.
struct Settled {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

/// A reply on its way to its end.
type Settling = Pin<Box<dyn Future<Output = Result<Settled, ApiError>> + Send>>;

/// Answers with a reply that is not a stream.
pub(super) async fn answer(
    inner: Arc<Inner>,
    recorder: Recorder,
    mut face: Face,
    received: UpstreamReply,
    abort: Stop,
) -> Response {
    let (call_id, api) = (recorder.call_id, face.api);
    let attendance = Arc::clone(&recorder.attendance);
    let every = inner.options.keep_alive;
    let early = early_headers(&face, &received);
    let mut settling: Settling =
        Box::pin(async move { settle(&inner, recorder, &mut face, received, &abort).await });
    let settled = tokio::select! {
        biased;
        settled = &mut settling => settled,
        // Its client has waited long enough for a sign of life.
        () = sleep(every.filter(|_| early.is_some())) => {
            return begun(attendance, call_id, early.unwrap_or_default(), every, settling);
        }
    };
    let response = match settled {
        Ok(Settled { status, headers, body }) => {
            attendance.given.set();
            reply::whole(status, headers, body)
        }
        Err(error) => reply::error(api, &error),
    };
    reply::with_call_id(response, call_id)
}

/// The head of a reply that may begin before its body is known; `None`: it may not, since its status is an error's or
/// spaces in front of it would change it.
fn early_headers(face: &Face, received: &UpstreamReply) -> Option<HeaderMap> {
    let is_readable = received.status.is_success() && !is_compressed(&received.headers);
    if !is_readable || (face.writer.is_none() && Form::of(received) != Form::Json) {
        return None;
    }
    let mut headers = upstream::forward_reply_headers(&received.headers);
    headers.insert(header::CONTENT_TYPE, JSON);
    Some(headers)
}

/// Begins a body before the upstream's is known: spaces, which JSON allows, until it is. If it turns out to be an
/// error the connection is broken off, since the status has said otherwise.
pub(super) fn patient(
    inner: Arc<Inner>,
    recorder: Recorder,
    mut face: Face,
    sending: Sending,
    abort: Stop,
) -> Response {
    let every = inner.options.keep_alive;
    let (call_id, attendance) = (recorder.call_id, Arc::clone(&recorder.attendance));
    let settling = async move {
        let sent = tokio::select! {
            biased;
            ended = abort.cancelled() => Err((ended.status, ended.error)),
            sent = sending => sent.map_err(|error| no_reply(&error)),
        };
        match sent {
            Ok(received) => settle(&inner, recorder, &mut face, received, &abort).await,
            Err((status, error)) => {
                fail(recorder, &face, status, &error).await;
                Err(error)
            }
        }
    };
    begun(
        attendance,
        call_id,
        HeaderMap::from_iter([(header::CONTENT_TYPE, JSON)]),
        every,
        Box::pin(settling),
    )
}

/// A body that begins with spaces.
fn begun(
    attendance: Arc<Attendance>,
    call_id: CallId,
    headers: HeaderMap,
    every: Option<Duration>,
    settling: Settling,
) -> Response {
    let attended = Arc::clone(&attendance);
    let work = async move {
        let settled = settling.await;
        // Its only piece follows.
        attended.close();
        match settled {
            Ok(settled) if settled.status.is_success() => {
                attended.given.set();
                Ok(settled.body)
            }
            Ok(settled) => Err(std::io::Error::other(format!("the upstream answered {}", settled.status))),
            Err(error) => Err(std::io::Error::other(error.message)),
        }
    };
    type Work = Pin<Box<dyn Future<Output = Result<Bytes, std::io::Error>> + Send>>;
    let space = || Bytes::from_static(b" ");
    let pieces = futures_util::stream::unfold(
        (true, Some(Box::pin(work) as Work)),
        move |(is_first, work)| async move {
            let mut work = work?;
            if is_first {
                return Some((Ok(space()), (false, Some(work))));
            }
            tokio::select! {
                biased;
                body = &mut work => Some((body, (false, None))),
                () = sleep(every) => Some((Ok(space()), (false, Some(work)))),
            }
        },
    );
    rejoin::begun(attendance, call_id, headers, pieces)
}

/// Reads a reply that is not a stream to its end, records it, and says what the client gets.
async fn settle(
    inner: &Inner,
    mut recorder: Recorder,
    face: &mut Face,
    received: UpstreamReply,
    abort: &Stop,
) -> Result<Settled, ApiError> {
    let route = Arc::clone(recorder.route());
    let upstream = &*route.upstream;
    let UpstreamReply { status, headers, body } = received;
    let text = match read(upstream, body, inner.options.stream_buffer_bytes, abort).await {
        Ok(text) => text,
        Err(bad) => {
            recorder.http_status = bad.error.status;
            let committed = recorder.commit(bad.status, Some(bad.error.message.clone())).await;
            return Err(committed.map_or_else(|sink| sink_error(&sink), |()| bad.error));
        }
    };
    let read_at = Instant::now();
    recorder.http_status = status.as_u16();
    recorder.first_byte();
    let mut headers = upstream::forward_reply_headers(&headers);
    let is_compressed = is_compressed(&headers);
    let mut broken = None;
    let mut is_kept = false;
    let mut out = text.clone();
    let (call_status, error) = if status.is_success() && !is_compressed {
        let read = recorder.body(&text);
        if recorder.response().is_some_and(|response| response.is_response()) {
            route.wrote_response(&inner.options, &recorder.request.model);
        }
        // An upstream's error may quote the key that it was sent.
        let has_error = recorder.reply().error.is_some();
        let text = if has_error { upstream.without_key(text) } else { text };
        out = text.clone();
        broken = face.refusal(read, recorder.reply(), &text, &upstream.name());
        match &mut face.writer {
            Some(_) if broken.is_some() => {}
            Some(writer) => match writer.body(&text) {
                Ok(body) => {
                    is_kept = true;
                    headers.insert(header::CONTENT_TYPE, JSON);
                    out = body;
                }
                Err(error) => {
                    recorder.unreadable(error.to_string());
                    let message = error.to_string();
                    broken = Some(ApiError::new(502, ErrorType::Upstream, "upstream_unreadable", message));
                }
            },
            None => {
                if !recorder.prepared.cut.is_nothing() {
                    match recorder.cut(&text) {
                        Ok(cut) if cut.edits.is_empty() => {}
                        Ok(cut) => out = Bytes::from(json::apply(&text, &cut.edits)),
                        Err(error) => recorder.unreadable(error.to_string()),
                    }
                }
            }
        }
        recorder.outcome()
    } else if status.is_success() {
        let why =
            "the upstream compressed its reply, which it was asked not to, in a way that is not known here"
                .to_owned();
        if face.writer.is_some() {
            broken = Some(ApiError::new(502, ErrorType::Upstream, "upstream_unreadable", why.clone()));
        }
        (CallStatus::ParseError, Some(why))
    } else {
        let clean = upstream.without_key(text);
        recorder.error_body(&clean);
        let error = upstream_error(&route, status.as_u16(), &clean);
        // As it is when clients of the protocol can read it and nothing needs to be said.
        let is_readable =
            face.writer.is_none() && !matches!(status.as_u16(), 401 | 403) && ApiError::is_openai(&clean);
        out = if is_readable { clean } else { reply::error_body(face.api, &error) };
        if !is_readable {
            headers.insert(header::CONTENT_TYPE, JSON);
            headers.remove(header::CONTENT_ENCODING);
        }
        (CallStatus::UpstreamError, Some(error.message))
    };
    let attendance = Arc::clone(&recorder.attendance);
    // What nobody is there to have is not final: its client may come back for it.
    if call_status == CallStatus::Ok {
        attendance.present().await;
    }
    recorder.commit(call_status, error).await.map_err(|error| sink_error(&error))?;
    if call_status == CallStatus::Ok {
        attendance.present().await;
    }
    if is_kept || call_status == CallStatus::Ok {
        face.keep(&inner.responses, &attendance.session, recorder.reply());
    }
    inner.measures.added_to_reply.record(read_at.elapsed());
    match broken {
        Some(error) => Err(error),
        None => Ok(Settled { status, headers, body: out }),
    }
}

/// True if the body cannot be read as it is.
pub(super) fn is_compressed(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity")
}
