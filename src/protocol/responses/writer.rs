//! Writes a chat reply as a response, while it comes in.
//!
//! The chunks are put together by [`chat::Reply`](crate::protocol::chat::Reply), and what is new in it is written:
//! so the text, the reasoning and the calls of the stream are those that the capture has. Items never interleave.
//! The first call is streamed; other calls, and text that comes after a call has begun, wait for the end, since a
//! server may go back to an earlier call until then.

use std::collections::HashMap;

use bytes::Bytes;

use super::echo::{Echo, State};
use super::events::Events;
use super::output::{Output, Text};
use super::raw::Object;
use super::tools::Target;
use crate::protocol::chat::{Choice, Reply, ToolCall};
use crate::protocol::error::ApiError;
use crate::protocol::translate::{KeptReply, Piece, ReplyNames, ReplyWriter, Untranslatable};

/// The writer of one response.
pub struct Writer {
    echo: Echo,
    output: Output,
    events: Events,
    reply: Reply,
    /// Bytes of each kind of text that were written.
    written: [usize; 3],
    has_calls: bool,
    outcome: Option<Outcome>,
    /// The id under which the response is kept, if it is to be.
    kept_as: Option<String>,
    /// The conversation before this reply, as items.
    items: Vec<Bytes>,
}

/// How a response ended.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Completed,
    /// With the reason.
    Incomplete(String),
    /// With code and message.
    Failed(String, String),
}

impl Writer {
    pub(super) fn new(
        names: ReplyNames,
        echo: Echo,
        targets: HashMap<String, Target>,
        includes_encrypted: bool,
        (kept_as, items): (Option<String>, Vec<Bytes>),
    ) -> Self {
        Self {
            echo,
            output: Output::new(names.call_id, targets, includes_encrypted),
            events: Events::default(),
            reply: Reply::default(),
            written: [0; 3],
            has_calls: false,
            outcome: None,
            items,
            kept_as,
        }
    }

    /// The items that a later response goes on from: what the request had, with what was before it, and the output.
    /// `None` while the response is not finished, and if it failed.
    #[must_use]
    pub fn items(&self) -> Option<Vec<Bytes>> {
        match self.outcome {
            None | Some(Outcome::Failed(..)) => None,
            Some(_) => {
                let output = self.output.done.iter().map(|item| Bytes::from(item.clone()));
                Some(self.items.iter().cloned().chain(output).collect())
            }
        }
    }

    fn begin(&mut self) {
        if !self.events.has_begun() {
            self.write_state("response.created");
            self.write_state("response.in_progress");
        }
    }

    /// Writes an event that holds the whole response.
    fn write_state(&mut self, kind: &str) {
        let response = self.response();
        self.events.write(kind, |event| event.raw("response", &response));
    }

    fn response(&self) -> String {
        let usage = self.reply.usage;
        let state = match &self.outcome {
            None => return self.echo.response(&State { status: "in_progress", ..State::default() }, &[]),
            Some(Outcome::Completed) => State { status: "completed", usage, ..State::default() },
            Some(Outcome::Incomplete(reason)) => {
                let details = Object::new().text("reason", reason).end();
                State { status: "incomplete", incomplete_details: Some(details), usage, error: None }
            }
            Some(Outcome::Failed(code, message)) => {
                let error = Object::new().text("code", code).text("message", message).end();
                State { status: "failed", error: Some(error), usage, incomplete_details: None }
            }
        };
        self.echo.response(&state, &self.output.done)
    }

    /// Writes what is new in the reply.
    fn advance(&mut self, choice: &Choice, out: &mut Vec<Piece>) {
        if !self.has_calls {
            self.write_texts(choice, out);
        }
        let Some(first) = choice.tool_calls.first() else { return };
        if !self.has_calls {
            self.has_calls = true;
            self.output.close_text(true, &mut self.events, out);
        }
        self.output.call_so_far(first, 0, &mut self.events);
    }

    fn write_texts(&mut self, choice: &Choice, out: &mut Vec<Piece>) {
        for (kind, written) in Text::ALL.into_iter().zip(&mut self.written) {
            let text = kind.of(choice);
            let delta = text.get(*written..).unwrap_or_default();
            if !delta.is_empty() {
                self.output.text(kind, delta, &mut self.events, out);
                *written = text.len();
            }
        }
    }

    /// Writes all that is left of the reply and ends its items.
    fn close(&mut self, choice: &Choice, is_whole: bool, out: &mut Vec<Piece>) {
        if !self.has_calls {
            self.write_texts(choice, out);
            if !choice.tool_calls.is_empty() {
                self.output.close_text(true, &mut self.events, out);
            }
        }
        let mut kinds = Text::ALL.into_iter().zip(self.written);
        let has_late_text = kinds.any(|(kind, written)| kind.of(choice).len() > written);
        let last = choice.tool_calls.len().saturating_sub(1);
        for (position, call) in choice.tool_calls.iter().enumerate() {
            // Only what came last can have been cut off.
            let is_last = position == last && !has_late_text;
            let is_whole = is_whole || !is_last || is_json(call);
            self.output.call(call, position, is_whole, &mut self.events, out);
        }
        self.write_texts(choice, out);
        // A client sends back what it was given: nothing at all would be a turn that never was.
        self.output.begin_if_empty(&mut self.events);
        self.output.close_text(is_whole, &mut self.events, out);
    }

    /// The end of a whole reply.
    fn finish(&mut self, choice: &Choice, out: &mut Vec<Piece>) {
        let outcome = match choice.finish_reason.as_deref() {
            None => failed("the upstream's reply ended without a finish reason"),
            Some("abort" | "error") => failed("the upstream aborted this reply"),
            Some("length") => Outcome::Incomplete("max_output_tokens".to_owned()),
            Some(reason @ ("content_filter" | "repetition")) => Outcome::Incomplete(reason.to_owned()),
            Some(_) => Outcome::Completed,
        };
        if !matches!(outcome, Outcome::Failed(..)) {
            self.close(choice, outcome == Outcome::Completed, out);
        }
        self.outcome = Some(outcome);
    }
}

impl ReplyWriter for Writer {
    fn chunk(&mut self, data: &[u8], out: &mut Vec<Piece>) -> Result<(), Untranslatable> {
        if self.outcome.is_some() {
            return Ok(());
        }
        self.reply.feed(data).map_err(|error| Untranslatable(error.to_string()))?;
        if let Some(error) = &self.reply.error {
            return Err(Untranslatable(format!("it holds an error: {error}")));
        }
        self.begin();
        let reply = std::mem::take(&mut self.reply);
        if let Some(choice) = reply.choices.get(&0) {
            self.advance(choice, out);
        }
        self.reply = reply;
        self.events.flush(out);
        Ok(())
    }

    fn end(&mut self, out: &mut Vec<Piece>) {
        if self.outcome.is_some() {
            return;
        }
        self.begin();
        let reply = std::mem::take(&mut self.reply);
        self.finish(reply.choices.get(&0).unwrap_or(&Choice::default()), out);
        self.reply = reply;
        let kind = match self.outcome {
            Some(Outcome::Completed) => "response.completed",
            Some(Outcome::Incomplete(_)) => "response.incomplete",
            _ => "response.failed",
        };
        if kind != "response.failed" {
            self.events.barrier(out);
        }
        self.write_state(kind);
        self.events.flush(out);
    }

    fn keep_alive(&mut self, out: &mut Vec<Piece>) {
        if self.outcome.is_some() {
            return;
        }
        if self.events.has_begun() {
            self.write_state("response.in_progress");
        } else {
            self.begin();
        }
        self.events.flush(out);
    }

    fn error_event(&mut self, error: &ApiError) -> Bytes {
        if self.outcome.is_none() {
            self.begin();
            self.outcome = Some(Outcome::Failed(code(error).to_owned(), error.message.clone()));
            self.write_state("response.failed");
        }
        self.events.take()
    }

    fn body(&mut self, chat: &[u8]) -> Result<Bytes, Untranslatable> {
        let mut reply = Reply::default();
        reply.feed(chat).map_err(|error| Untranslatable(error.to_string()))?;
        if let Some(error) = reply.error {
            return Err(Untranslatable(format!("it holds an error: {error}")));
        }
        let Some(choice) = reply.choices.remove(&0) else {
            return Err(Untranslatable("it has no choice".to_owned()));
        };
        self.reply = reply;
        self.finish(&choice, &mut Vec::new());
        Ok(Bytes::from(self.response()))
    }

    fn kept(&self) -> Option<KeptReply> {
        Some(KeptReply { id: self.kept_as.clone()?, items: self.items()? })
    }

    fn error_body(&self, error: &ApiError) -> Bytes {
        error.body()
    }
}

fn failed(message: &str) -> Outcome {
    Outcome::Failed("server_error".to_owned(), message.to_owned())
}

fn is_json(call: &ToolCall) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(&call.arguments).is_ok()
}

/// The code by which clients decide whether to try again.
pub(super) fn code(error: &ApiError) -> &'static str {
    let is_too_long = |text: &str| {
        ["context_length", "context length", "maximum model length"].iter().any(|part| text.contains(part))
    };
    match error.status {
        // Whatever status it came with: to try it again is no use.
        _ if is_too_long(error.code) || is_too_long(&error.message) => "context_length_exceeded",
        429 if error.code == "insufficient_quota" => "insufficient_quota",
        429 => "rate_limit_exceeded",
        400..=499 => "invalid_prompt",
        _ => "server_error",
    }
}
