//! Chat chunks to Messages events.
//!
//! Invariants:
//! - Blocks never overlap; their indexes are 0, 1, 2 …; none is empty, except that a reply of nothing is one empty
//!   text block.
//! - The texts, the thinking, the names and the argument bytes of all blocks, joined, are those of the chat reply.
//!   White space after the end of a call's arguments may be missing if another call came between.
//! - A [`Piece::Barrier`] stands before a tool_use block's `content_block_stop` and before `message_delta`.

use std::collections::VecDeque;

use bytes::Bytes;

use super::body;
use super::error;
use super::events::{Events, Kind};
use super::ids;
use super::stop::{MessageUsage, is_object, stop};
use super::view::View;
use crate::protocol::chat::{ReplyUsage, ToolCall, add_fragment};
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::translate::{Piece, ReplyNames, ReplyWriter, Untranslatable};

/// Writes one reply as Messages.
#[derive(Debug)]
pub struct Writer {
    names: ReplyNames,
    events: Events,
    has_begun: bool,
    is_over: bool,
    /// All that was read is behind a barrier already.
    is_barred: bool,
    /// Blocks begun so far.
    blocks: usize,
    open: Option<Open>,
    /// What came while a tool_use block was open, in order: it waits until that block may close.
    held: VecDeque<Held>,
    calls: Vec<ToolCall>,
    /// For each call, how far it was written.
    progress: Vec<Progress>,
    finish_reason: Option<String>,
    matched: Option<String>,
    is_refusal: bool,
    usage: Option<ReplyUsage>,
}

/// The last block, while it is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Prose(Kind),
    Call(usize),
}

#[derive(Debug)]
enum Held {
    Prose(Kind, String),
    Call(usize),
}

#[derive(Debug, Default, Clone, Copy)]
struct Progress {
    /// Bytes of the arguments that were sent.
    sent: usize,
    is_closed: bool,
}

impl Writer {
    /// A writer of this call's reply.
    #[must_use]
    pub fn new(names: ReplyNames) -> Self {
        Self {
            names,
            events: Events::default(),
            has_begun: false,
            is_over: false,
            is_barred: false,
            blocks: 0,
            open: None,
            held: VecDeque::new(),
            calls: Vec::new(),
            progress: Vec::new(),
            finish_reason: None,
            matched: None,
            is_refusal: false,
            usage: None,
        }
    }

    fn begin(&mut self) {
        if !self.has_begun {
            self.has_begun = true;
            let id = ids::message(&self.names.call_id);
            self.events.message_start(&id, &self.names.model, &MessageUsage::of(self.usage).at_start());
        }
    }

    fn read(&mut self, view: View, out: &mut Vec<Piece>) -> Result<(), Untranslatable> {
        if let Some(usage) = view.usage() {
            self.usage = Some(usage);
        }
        self.begin();
        for choice in view.into_choices() {
            if let Some(reason) = choice.finish_reason() {
                self.finish_reason = Some(reason.to_owned());
            }
            if let Some(matched) = choice.matched() {
                self.matched = Some(matched.to_owned());
            }
            let delta = choice.into_delta();
            self.prose(Kind::Thinking, delta.reasoning(), out);
            self.prose(Kind::Text, delta.text(), out);
            self.is_refusal |= !delta.refusal().is_empty();
            self.prose(Kind::Text, delta.refusal(), out);
            for fragment in delta.tool_calls.unwrap_or_default() {
                let call = add_fragment(&mut self.calls, fragment);
                self.call(call, out)?;
            }
        }
        Ok(())
    }

    fn prose(&mut self, kind: Kind, text: &str, out: &mut Vec<Piece>) {
        if text.is_empty() {
            return;
        }
        if !matches!(self.open, Some(Open::Call(_))) {
            self.write_prose(kind, text, out);
            return;
        }
        match self.held.back_mut() {
            Some(Held::Prose(last, held)) if *last == kind => held.push_str(text),
            _ => self.held.push_back(Held::Prose(kind, text.to_owned())),
        }
        self.advance(out);
    }

    fn write_prose(&mut self, kind: Kind, text: &str, out: &mut Vec<Piece>) {
        if self.open != Some(Open::Prose(kind)) {
            self.close(out);
            self.events.block_start(self.blocks, kind);
            self.blocks += 1;
            self.open = Some(Open::Prose(kind));
        }
        self.events.delta(self.blocks - 1, kind, text);
    }

    /// A fragment of this call was added.
    fn call(&mut self, call: usize, out: &mut Vec<Piece>) -> Result<(), Untranslatable> {
        if self.progress.len() <= call {
            self.progress.resize(call + 1, Progress::default());
            self.held.push_back(Held::Call(call));
        }
        let progress = self.progress[call];
        if self.open == Some(Open::Call(call)) {
            self.write_arguments(call);
        } else if progress.is_closed && !self.calls[call].arguments[progress.sent..].trim().is_empty() {
            return Err(Untranslatable(format!(
                "arguments of tool call {call} went on after they had been whole and another call had begun"
            )));
        }
        self.advance(out);
        Ok(())
    }

    fn write_arguments(&mut self, call: usize) {
        let arguments = &self.calls[call].arguments[self.progress[call].sent..];
        if !arguments.is_empty() {
            self.events.arguments(self.blocks - 1, arguments);
            self.progress[call].sent = self.calls[call].arguments.len();
        }
    }

    /// Writes what is held, as far as it may be: an open call is closed for it once its arguments are one whole
    /// object, which nothing but white space can follow.
    fn advance(&mut self, out: &mut Vec<Piece>) {
        while let Some(next) = self.held.front() {
            if let Some(Open::Call(open)) = self.open {
                let arguments = &self.calls[open].arguments;
                if !arguments.trim_end().ends_with('}') || !is_object(arguments) {
                    return;
                }
            }
            if let Held::Call(call) = next
                && self.calls[*call].name.is_empty()
            {
                return;
            }
            self.write_next(out);
        }
    }

    /// Closes the open block and writes the first of what is held.
    fn write_next(&mut self, out: &mut Vec<Piece>) {
        match self.held.pop_front() {
            Some(Held::Prose(kind, text)) => self.write_prose(kind, &text, out),
            Some(Held::Call(call)) => {
                self.close(out);
                let ToolCall { id, name, .. } = &self.calls[call];
                let id =
                    if id.is_empty() { ids::made_up(&self.names.call_id, call) } else { ids::to_client(id) };
                self.events.tool_start(self.blocks, &id, name);
                self.blocks += 1;
                self.open = Some(Open::Call(call));
                self.write_arguments(call);
            }
            None => {}
        }
    }

    fn close(&mut self, out: &mut Vec<Piece>) {
        match self.open.take() {
            None => return,
            Some(Open::Prose(Kind::Text)) => {}
            Some(Open::Prose(Kind::Thinking)) => {
                let signature = ids::signature(&self.names.call_id);
                self.events.signature(self.blocks - 1, &signature);
            }
            Some(Open::Call(call)) => {
                self.progress[call].is_closed = true;
                self.bar(out);
            }
        }
        self.events.block_stop(self.blocks - 1);
    }

    /// Nothing is read within one call of the trait, so one barrier holds for all that follows in it.
    fn bar(&mut self, out: &mut Vec<Piece>) {
        if !self.is_barred {
            self.is_barred = true;
            self.flush(out);
            out.push(Piece::Barrier);
        }
    }

    fn flush(&mut self, out: &mut Vec<Piece>) {
        if !self.events.bytes.is_empty() {
            out.push(Piece::Bytes(Bytes::from(std::mem::take(&mut self.events.bytes))));
        }
    }

    fn finish(&mut self, out: &mut Vec<Piece>) -> Result<(), String> {
        let stop =
            stop(self.finish_reason.as_deref(), self.matched.as_deref(), self.is_refusal, &self.calls)?;
        if self.calls.iter().any(|call| call.name.is_empty()) {
            return Err("the upstream's reply has a tool call without a name".to_owned());
        }
        while !self.held.is_empty() {
            self.write_next(out);
        }
        if self.blocks == 0 {
            self.events.block_start(0, Kind::Text);
            self.blocks = 1;
            self.open = Some(Open::Prose(Kind::Text));
        }
        self.close(out);
        self.bar(out);
        self.events.message_end(&stop, &MessageUsage::of(self.usage));
        Ok(())
    }
}

impl ReplyWriter for Writer {
    fn chunk(&mut self, data: &[u8], out: &mut Vec<Piece>) -> Result<(), Untranslatable> {
        self.is_barred = false;
        let result = View::read(data).and_then(|view| self.read(view, out));
        self.flush(out);
        result
    }

    /// An end that is none of the model's own (`abort`, no finish reason) becomes the error event: an open tool_use
    /// block stays open, so that no client runs it.
    fn end(&mut self, out: &mut Vec<Piece>) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        self.is_barred = false;
        self.begin();
        if let Err(problem) = self.finish(out) {
            let error = ApiError::new(502, ErrorType::Upstream, "upstream_aborted", problem);
            self.events.bytes.extend_from_slice(&error::error_event(&error, Some(&self.names.call_id)));
        }
        self.flush(out);
    }

    fn keep_alive(&mut self, out: &mut Vec<Piece>) {
        if !self.is_over {
            self.begin();
            self.events.ping();
            self.flush(out);
        }
    }

    fn error_event(&mut self, error: &ApiError) -> Bytes {
        self.is_over = true;
        error::error_event(error, Some(&self.names.call_id))
    }

    fn body(&mut self, chat: &[u8]) -> Result<Bytes, Untranslatable> {
        body::body(&self.names, chat)
    }

    fn error_body(&self, error: &ApiError) -> Bytes {
        error::error_body(error, Some(&self.names.call_id))
    }
}
