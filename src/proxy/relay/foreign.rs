//! Replies whose events are not the upstream's: those of another protocol, and streams made of a whole body.

use bytes::{Bytes, BytesMut};

use super::{Relay, Source};
use crate::protocol::chat::destream;
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::sse::Event;
use crate::protocol::translate::Piece;
use crate::protocol::{completions, generate, json, messages};
use crate::proxy::whole;
use crate::record::{CallStatus, ClientApi};

impl Relay {
    /// The same for a client of another protocol: the event's meaning in its own.
    pub(super) async fn translate(&mut self, event: &Event) {
        let Some(writer) = self.face.writer.as_mut().filter(|_| event.has_data() && !self.recorder.is_done())
        else {
            return;
        };
        let data = event.data();
        if data.as_ref() == b"[DONE]" {
            self.has_terminator = true;
            return self.hold();
        }
        let read = self.recorder.event(&event.name, &data);
        let fed = read.fed;
        if fed.has_error {
            let upstream = &self.recorder.route().upstream;
            let error = ApiError::from_upstream(502, &upstream.without_key(data), &upstream.name());
            return self.fail(CallStatus::UpstreamError, error).await;
        }
        let mut pieces = Vec::new();
        let written = writer.chunk(&data, &mut pieces);
        if fed.has_finish {
            self.hold();
        } else if read.must_hold {
            // Whatever the writer made of what could not be read here.
            pieces.insert(0, Piece::Barrier);
        }
        for piece in pieces {
            match piece {
                Piece::Bytes(bytes) => self.ready.push(bytes),
                Piece::Barrier => {
                    if let Err(error) = self.recorder.draft().await {
                        return self.fail(CallStatus::Aborted, whole::sink_error(&error)).await;
                    }
                    self.may_act = true;
                }
            }
        }
        if let Err(error) = written {
            self.recorder.unreadable(error.to_string());
            let error = ApiError::new(502, ErrorType::Upstream, "upstream_unreadable", error.to_string());
            self.fail(CallStatus::ParseError, error).await;
        }
    }

    /// A whole body becomes a real event sequence of the client's protocol.
    pub(super) async fn destream(&mut self, body: &Bytes) {
        self.source = Source::Ended;
        let fed = self.recorder.body(body).fed;
        let (status, why) = self.recorder.outcome();
        if fed.has_error {
            let upstream = &self.recorder.route().upstream;
            let clean = upstream.without_key(body.clone());
            let error = ApiError::from_upstream(502, &clean, &upstream.name());
            return self.fail(status, error).await;
        }
        // What the upstream gave up is told in its own words, where the client's protocol has them.
        let is_aborted = self.recorder.reply().aborted().is_some() && status == CallStatus::UpstreamError;
        if status != CallStatus::Ok && !is_aborted {
            let error =
                ApiError::new(502, ErrorType::Upstream, "upstream_unreadable", why.unwrap_or_default());
            return self.fail(status, error).await;
        }
        if let Some(error) = self.face.aborted(self.recorder.reply()) {
            return self.fail(status, error).await;
        }
        match self.destreamed(body) {
            Ok(events) => {
                self.held.push(events);
                self.release(true).await;
                self.is_over = true;
            }
            Err(message) => {
                self.recorder.unreadable(message.clone());
                let error = ApiError::new(502, ErrorType::Upstream, "upstream_unreadable", message);
                self.fail(CallStatus::ParseError, error).await;
            }
        }
    }

    /// What of the events waits for the call to be durable: all of it.
    pub(super) fn destreamed(&mut self, body: &Bytes) -> Result<Bytes, String> {
        let Some(writer) = &mut self.face.writer else {
            let cut = self.recorder.cut(body).map_err(|error| error.to_string())?;
            let own = json::apply(body, &cut.edits);
            return own_events(self.face.api, &own, self.recorder.request.asks_usage);
        };
        let mut pieces = Vec::new();
        let events = match self.face.upstream_api {
            // Its writer reads a whole reply as one event.
            ClientApi::SglangGenerate | ClientApi::OpenaiCompletions | ClientApi::VllmGenerate => {
                vec![body.clone()]
            }
            _ => destream::events(body, true).map_err(|error| error.to_string())?,
        };
        for event in events {
            writer.chunk(&event, &mut pieces).map_err(|error| error.to_string())?;
        }
        let mut events = BytesMut::new();
        for piece in pieces {
            if let Piece::Bytes(bytes) = piece {
                events.extend_from_slice(&bytes);
            }
        }
        Ok(events.freeze())
    }

    /// What ends the reply of a client of another protocol, after the call is durable.
    pub(super) fn finish(&mut self) {
        // It comes behind what a client that came back is still being given.
        if self.again.is_some() {
            return;
        }
        if std::mem::replace(&mut self.is_ended, true) {
            return;
        }
        for bytes in self.face.end() {
            self.ready.push(bytes);
        }
        self.face.keep(&self.inner.responses, &self.recorder.attendance.session, self.recorder.reply());
    }

    /// An event that changes nothing: clients that reset their patience by events stay.
    pub(super) fn keep_alive(&mut self) {
        if self.face.passes_responses() {
            let event = self.in_progress();
            return self.ready.extend_from_slice(&event);
        }
        if let Some(events) = self.face.keep_alive() {
            for bytes in events {
                self.ready.extend_from_slice(&bytes);
            }
            return;
        }
        let reply = self.recorder.reply();
        let is_completion = self.recorder.request.is_completion;
        let own = if is_completion { "cmpl" } else { "chatcmpl" };
        let id = reply.id.clone().unwrap_or_else(|| format!("{own}-{}", self.recorder.call_id));
        let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let created = reply.created.unwrap_or_else(|| seconds.map_or(0, |seconds| seconds.as_secs()));
        let model = match (&self.recorder.prepared.cut.model, &reply.model) {
            (None, Some(served)) => served,
            _ => &self.recorder.request.model,
        };
        let event = if is_completion {
            serde_json::json!({
                "id": id, "object": "text_completion", "created": created, "model": model,
                "choices": [{"index": 0, "text": "", "logprobs": null, "finish_reason": null}],
            })
        } else {
            serde_json::json!({
                "id": id, "object": "chat.completion.chunk", "created": created, "model": model,
                "choices": [{"index": 0, "delta": {}, "logprobs": null, "finish_reason": null}],
            })
        };
        self.ready.extend_from_slice(format!("data: {event}\n\n").as_bytes());
    }

    /// The event without what lego caused in it.
    pub(super) fn less_cut(&mut self, event: &Event) -> Bytes {
        let wanted = &self.recorder.prepared.cut;
        let data = event.data();
        if wanted.is_nothing() || !event.has_data() || data.as_ref() == b"[DONE]" {
            return event.raw.clone();
        }
        match self.recorder.cut(&data) {
            Ok(cut) if cut.is_dropped => Bytes::new(),
            Ok(cut) => event.edited(&cut.edits),
            Err(error) => {
                self.recorder.unreadable(error.to_string());
                event.raw.clone()
            }
        }
    }
}

/// The events of a stream that says what a body says, in the protocol of both.
fn own_events(api: ClientApi, body: &[u8], asks_usage: bool) -> Result<Bytes, String> {
    let events = match api {
        ClientApi::AnthropicMessages => {
            return messages::destream(body).map_err(|error| unreadable(&error));
        }
        ClientApi::OpenaiCompletions => {
            completions::destream::events(body, asks_usage).map_err(|error| unreadable(&error))?
        }
        ClientApi::SglangGenerate => generate::events(body).map_err(|error| unreadable(&error))?,
        _ => destream::events(body, asks_usage).map_err(|error| error.to_string())?,
    };
    Ok(destream::to_stream(&events))
}

fn unreadable(error: &json::ScanError) -> String {
    format!("the upstream's reply could not be read: {error}")
}
