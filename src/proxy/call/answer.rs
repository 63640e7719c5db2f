//! How a client's reply begins: once the upstream's has, or when it has waited long enough for a sign of life.

use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use http::header::{self, HeaderMap};

use super::{Call, Sending};
use crate::proxy::face::Face;
use crate::proxy::recorder::Recorder;
use crate::proxy::relay::Relay;
use crate::proxy::{rejoin, reply, whole};
use crate::upstream::{self, UpstreamError, UpstreamReply};

/// What the body of an upstream's success is, as its head says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proxy) enum Form {
    /// An event stream.
    Stream,
    Json,
    /// The head does not say.
    Untold,
    /// Something else, or compressed so that it cannot be read; or it is no success.
    Other,
}

impl Form {
    pub(in crate::proxy) fn of(received: &UpstreamReply) -> Self {
        if !received.status.is_success() || whole::is_compressed(&received.headers) {
            return Self::Other;
        }
        let told = received.headers.get(header::CONTENT_TYPE).map(|value| value.to_str().unwrap_or("?"));
        let media_type = told.unwrap_or_default().split(';').next().unwrap_or_default().trim();
        let is = |name: &str| media_type.eq_ignore_ascii_case(name);
        if media_type.is_empty() {
            Self::Untold
        } else if is("text/event-stream") {
            Self::Stream
        } else if is("application/json") || media_type.to_ascii_lowercase().ends_with("+json") {
            Self::Json
        } else {
            Self::Other
        }
    }
}

impl Call {
    pub(super) async fn answer(
        &self,
        mut recorder: Recorder,
        face: Face,
        first: Result<UpstreamReply, UpstreamError>,
    ) -> Response {
        let received = match first {
            Ok(received) => received,
            Err(error) => {
                let (status, error) = whole::no_reply(&error);
                return whole::fail(recorder, &face, status, &error).await;
            }
        };
        let asks_stream = self.request.is_stream;
        let is_destreamed = asks_stream && !recorder.prepared.upstream_is_stream;
        let is_readable = received.status.is_success() && !whole::is_compressed(&received.headers);
        let relayed = match Form::of(&received) {
            Form::Stream => Relay::streaming,
            // Some servers answer with a body although a stream was asked for. A response that passes as it is passes so.
            Form::Json if asks_stream && !face.passes_responses() => Relay::whole,
            Form::Other if is_destreamed && is_readable => Relay::whole,
            Form::Untold if asks_stream => Relay::untold,
            _ => {
                let (inner, abort) = (Arc::clone(&self.inner), self.abort.clone());
                return whole::answer(inner, recorder, face, received, abort).await;
            }
        };
        recorder.http_status = received.status.as_u16();
        let call_id = recorder.call_id;
        let headers = upstream::forward_reply_headers(&received.headers);
        let (inner, abort) = (Arc::clone(&self.inner), self.abort.clone());
        let relay = relayed(inner, recorder, face, received.body, abort);
        reply::with_call_id(stream(headers, relay), call_id)
    }

    /// Begins the client's reply before the upstream's is known.
    pub(super) fn answer_early(&self, mut recorder: Recorder, face: Face, sending: Sending) -> Response {
        recorder.http_status = 200;
        let call_id = recorder.call_id;
        let (inner, abort) = (Arc::clone(&self.inner), self.abort.clone());
        let response = if self.request.is_stream {
            let relay = Relay::waiting(inner, recorder, face, sending, abort);
            stream(HeaderMap::new(), relay)
        } else {
            whole::patient(inner, recorder, face, sending, abort)
        };
        reply::with_call_id(response, call_id)
    }
}

fn stream(mut headers: HeaderMap, relay: Relay) -> Response {
    reply::stream_headers(&mut headers);
    let (attendance, call_id) = (relay.attendance(), relay.call_id());
    // In a box, since it is moved with each piece.
    let pieces = futures_util::stream::unfold(Box::new(relay), |mut relay| async move {
        let piece = relay.next().await?;
        Some((piece, relay))
    });
    rejoin::begun(attendance, call_id, headers, pieces)
}

/// `None`: never returns.
pub(in crate::proxy) async fn sleep(duration: Option<Duration>) {
    match duration {
        Some(duration) => tokio::time::sleep(duration).await,
        None => std::future::pending().await,
    }
}
