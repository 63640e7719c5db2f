//! Whether a call is sent upstream again, and the record of the attempt before.

use super::{Again, Attempt, Call};
use crate::proxy::face::Face;
use crate::proxy::recorder::Recorder;
use crate::proxy::{retry, whole};
use crate::record::{CallStatus, ClientApi, SinkError};
use crate::upstream::{self, Additions, UpstreamError, UpstreamReply};

/// Most bytes of an error that are looked at.
const MAX_SAID: usize = 64 << 10;

impl Call {
    /// How the call is tried once more, if at all.
    pub(super) async fn again(
        &self,
        attempt: &Attempt,
        face: &mut Face,
        recorder: &Recorder,
        first: &mut Result<UpstreamReply, UpstreamError>,
    ) -> Option<Again> {
        if self.is_without_native(face, first) {
            return Some(Again::With(attempt.additions));
        }
        let (status, headers) = match first {
            Ok(reply) if reply.status.is_success() => return None,
            Ok(reply) => {
                if let Some(fewer) = self.after_refusal(attempt, face, recorder, reply).await {
                    return Some(Again::With(fewer));
                }
                (Some(reply.status.as_u16()), Some(&reply.headers))
            }
            Err(error) if !error.may_pass() => return None,
            Err(_) => (None, None),
        };
        let pause = retry::pause(self.route.retries, attempt.retries, status, headers, recorder.call_id)?;
        Some(Again::After(pause))
    }

    /// What to add to the next try where the upstream refused what was added to this one: the client still gets its
    /// reply.
    async fn after_refusal(
        &self,
        attempt: &Attempt,
        face: &Face,
        recorder: &Recorder,
        reply: &mut UpstreamReply,
    ) -> Option<Additions> {
        // Endpoints of engines' own are asked in their own words only.
        let is_refusal = matches!(reply.status.as_u16(), 400 | 422)
            && attempt.additions != Additions::Nothing
            && !matches!(face.upstream_api, ClientApi::SglangGenerate | ClientApi::VllmGenerate)
            && !face.passes_responses();
        if !is_refusal {
            return None;
        }
        let upstream = &self.route.upstream;
        let said = tokio::select! {
            biased;
            _ = self.abort.cancelled() => return None,
            said = tokio::time::timeout(upstream.timeouts().idle, reply.body.peek(MAX_SAID)) => said.ok()?,
        };
        let sent = &recorder.prepared.body;
        upstream::after_refusal(upstream.kind(), attempt.additions, &self.request, sent, &said)
    }

    /// Records an attempt that is followed by another.
    pub(super) async fn give_up(
        &self,
        mut recorder: Recorder,
        first: Result<UpstreamReply, UpstreamError>,
    ) -> Result<(), SinkError> {
        recorder.is_retried = true;
        let inner = &self.inner;
        let (status, message) = match first {
            Ok(UpstreamReply { status, body, .. }) => {
                recorder.http_status = status.as_u16();
                let upstream = &self.route.upstream;
                match whole::read(upstream, body, inner.options.stream_buffer_bytes, &self.abort).await {
                    Ok(text) => {
                        let clean = upstream.without_key(text);
                        recorder.error_body(&clean);
                        let error = whole::upstream_error(&self.route, status.as_u16(), &clean);
                        (CallStatus::UpstreamError, error.message)
                    }
                    Err(bad) => (bad.status, bad.error.message),
                }
            }
            Err(error) => (CallStatus::UpstreamError, error.to_string()),
        };
        recorder.commit(status, Some(message)).await
    }
}
