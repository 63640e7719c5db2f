//! The events of all choices of a reply, and its frame: id, model, stream settings.

use std::convert::Infallible;
use std::future::poll_fn;
use std::task::Poll;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::Response;
use serde::Serialize;
use tokio::sync::mpsc::Receiver;

use super::ServeState;
use super::error::ApiError;
use super::request::Sampling;
use crate::engine::{Event, GenerateRequest, derive_seed};

/// Events of one choice that are taken at once; what has piled up goes into one chunk.
const MAX_EVENTS: usize = 64;

/// The receivers of a reply's choices. Dropping them ends the choices in the engine.
pub(super) struct Choices {
    receivers: Vec<Option<Receiver<Event>>>,
    next: usize,
}

impl Choices {
    /// Submits `sampling.n` requests for each prompt: the choices of prompt p are `p * n ..`.
    pub fn submit(state: &ServeState, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Self, ApiError> {
        let max_context = state.engine().options().max_context;
        let mut receivers = Vec::with_capacity(prompts.len() * sampling.n);
        for prompt in prompts {
            let room = max_context.saturating_sub(prompt.len());
            for index in 0..sampling.n {
                let mut params = sampling.params;
                params.seed = derive_seed(params.seed, index as u64);
                receivers.push(Some(state.engine().submit(GenerateRequest {
                    prompt: prompt.clone(),
                    sampling: params,
                    max_tokens: sampling.max_tokens.unwrap_or(room),
                    stop_token_ids: sampling.stop_token_ids.clone(),
                    top_logprobs: sampling.top_logprobs,
                })?));
            }
        }
        Ok(Self { receivers, next: 0 })
    }

    /// The next events of one choice; `None` once all have ended.
    pub async fn next(&mut self, events: &mut Vec<Event>) -> Option<usize> {
        poll_fn(|context| {
            let count = self.receivers.len();
            let mut is_open = false;
            for offset in 0..count {
                let index = (self.next + offset) % count;
                let Some(receiver) = &mut self.receivers[index] else { continue };
                match receiver.poll_recv_many(context, events, MAX_EVENTS) {
                    Poll::Ready(0) => {
                        self.receivers[index] = None;
                        // The last event closes a choice: a channel that closes before it has lost its engine.
                        events.push(Event::Aborted("the engine has ended".into()));
                        return Poll::Ready(Some(index));
                    }
                    Poll::Ready(_) => {
                        if matches!(events.last(), Some(Event::Last(..) | Event::Aborted(_))) {
                            self.receivers[index] = None;
                        }
                        self.next = index + 1;
                        return Poll::Ready(Some(index));
                    }
                    Poll::Pending => is_open = true,
                }
            }
            if is_open { Poll::Pending } else { Poll::Ready(None) }
        })
        .await
    }

    /// Ends a choice in the engine: its text has reached a stop string.
    pub fn end(&mut self, index: usize) {
        self.receivers[index] = None;
    }
}

/// What is the same in every part of a reply.
pub(super) struct Frame {
    pub state: ServeState,
    pub id: String,
    pub created: u64,
    pub model: String,
}

impl Frame {
    pub fn fingerprint(&self) -> &str {
        &self.state.inner.fingerprint
    }
}

/// Appends one server-sent event.
pub(super) fn write_event(value: &impl Serialize, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    if let Err(error) = serde_json::to_writer(&mut *out, value) {
        // Every wire type is a tree of text and numbers, and a Vec takes all bytes.
        tracing::error!(%error, "a chunk could not be written");
    }
    out.extend_from_slice(b"\n\n");
}

/// The end of a stream.
pub(super) fn write_done(out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: [DONE]\n\n");
}

/// A source of a stream's bytes, whole events at a time.
pub(super) trait EventSource: Send + 'static {
    /// The next events; `None` at the end.
    fn next(&mut self) -> impl Future<Output = Option<Vec<u8>>> + Send;
}

/// A streaming reply. Dropping its body drops `source`.
pub(super) fn stream_response(source: impl EventSource) -> Response {
    let stream = futures_util::stream::unfold(source, |mut source| async move {
        let bytes = source.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(bytes)), source))
    });
    let mut response = Response::new(Body::from_stream(stream));
    let headers = response.headers_mut();
    headers
        .insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-cache"));
    response
}
