//! Output items, and the events between their beginning and their end.

use std::collections::HashMap;

use super::events::Events;
use super::names::{encrypted, item_id};
use super::raw::{Object, list};
use super::tools::{Kind, Target};
use super::{shell, unwrap};
use crate::protocol::chat::{Choice, ToolCall};
use crate::protocol::translate::Piece;

/// A kind of text that a reply holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Text {
    Reasoning,
    Output,
    Refusal,
}

impl Text {
    /// In the order in which a chat message holds them.
    pub const ALL: [Self; 3] = [Self::Reasoning, Self::Output, Self::Refusal];

    /// This kind's text in a reply.
    pub fn of(self, choice: &Choice) -> &str {
        match self {
            Self::Reasoning => &choice.reasoning,
            Self::Output => &choice.text,
            Self::Refusal => &choice.refusal,
        }
    }

    const fn prefix(self) -> &'static str {
        match self {
            Self::Reasoning => "rs",
            Self::Output | Self::Refusal => "msg",
        }
    }

    const fn event(self) -> &'static str {
        match self {
            Self::Reasoning => "response.reasoning_text",
            Self::Output => "response.output_text",
            Self::Refusal => "response.refusal",
        }
    }

    fn part(self, text: &str) -> String {
        match self {
            Self::Reasoning => Object::new().text("type", "reasoning_text").text("text", text),
            Self::Output => Object::new()
                .text("type", "output_text")
                .text("text", text)
                .raw("annotations", "[]")
                .raw("logprobs", "[]"),
            Self::Refusal => Object::new().text("type", "refusal").text("refusal", text),
        }
        .end()
    }
}

/// An item that has begun.
enum Open {
    Text {
        kind: Text,
        id: String,
        text: String,
    },
    /// The client's id of the call stays what it was when the call began.
    Call {
        id: String,
        call_id: String,
        given: usize,
        unwrapper: unwrap::Unwrapper,
    },
}

/// The output of a response.
pub(super) struct Output {
    call_id: String,
    targets: HashMap<String, Target>,
    includes_encrypted: bool,
    /// Items that are done.
    pub done: Vec<String>,
    open: Option<Open>,
}

impl Output {
    pub fn new(call_id: String, targets: HashMap<String, Target>, includes_encrypted: bool) -> Self {
        Self { call_id, targets, includes_encrypted, done: Vec::new(), open: None }
    }

    /// Adds text; ends the item before it if that is of another kind.
    pub fn text(&mut self, kind: Text, delta: &str, events: &mut Events, out: &mut Vec<Piece>) {
        let is_open = matches!(&self.open, Some(Open::Text { kind: open, .. }) if *open == kind);
        if !is_open {
            self.close_text(true, events, out);
            self.open_text(kind, events);
        }
        let index = self.done.len();
        if let Some(Open::Text { id, text, .. }) = &mut self.open {
            text.push_str(delta);
            events.write(&format!("{}.delta", kind.event()), |event| {
                let event = place(event, id, index).raw("content_index", "0").text("delta", delta);
                with_logprobs(event, kind)
            });
        }
    }

    /// A reply of nothing is one empty message.
    pub fn begin_if_empty(&mut self, events: &mut Events) {
        if self.done.is_empty() && self.open.is_none() {
            self.open_text(Text::Output, events);
        }
    }

    fn open_text(&mut self, kind: Text, events: &mut Events) {
        let index = self.done.len();
        let id = item_id(kind.prefix(), &self.call_id, index);
        let item = self.text_item(kind, &id, None, "in_progress");
        write_item("response.output_item.added", index, &item, events);
        events.write("response.content_part.added", |event| {
            place(event, &id, index).raw("content_index", "0").raw("part", &kind.part(""))
        });
        self.open = Some(Open::Text { kind, id, text: String::new() });
    }

    /// Ends the open text item, if there is one.
    pub fn close_text(&mut self, is_whole: bool, events: &mut Events, out: &mut Vec<Piece>) {
        match self.open.take() {
            Some(Open::Text { kind, id, text }) => {
                let index = self.done.len();
                let part = kind.part(&text);
                events.write(&format!("{}.done", kind.event()), |event| {
                    let member = if kind == Text::Refusal { "refusal" } else { "text" };
                    let event = place(event, &id, index).raw("content_index", "0").text(member, &text);
                    with_logprobs(event, kind)
                });
                events.write("response.content_part.done", |event| {
                    place(event, &id, index).raw("content_index", "0").raw("part", &part)
                });
                let item = self.text_item(kind, &id, Some(&part), status(is_whole));
                self.finish(item, events, out);
            }
            other => self.open = other,
        }
    }

    fn text_item(&self, kind: Text, id: &str, part: Option<&str>, status: &str) -> String {
        let content = list(part.as_slice());
        let item = Object::new().text("id", id);
        if kind == Text::Reasoning {
            let item = item.text("type", "reasoning").raw("summary", "[]").raw("content", &content);
            let encrypted = self.includes_encrypted.then(|| encrypted(&self.call_id, self.done.len()));
            let item = match encrypted {
                Some(value) => item.text("encrypted_content", &value),
                None => item.raw("encrypted_content", "null"),
            };
            return item.text("status", status).end();
        }
        item.text("type", "message")
            .text("role", "assistant")
            .text("status", status)
            .raw("content", &content)
            .end()
    }

    /// Writes what there is of a call while it comes in, if its kind is streamed.
    pub fn call_so_far(&mut self, call: &ToolCall, position: usize, events: &mut Events) {
        let target = self.target(call);
        if call.name.is_empty() || target.kind == Kind::LocalShell {
            return;
        }
        if self.open.is_none() {
            self.open_call(call, position, &target, events);
        }
        let index = self.done.len();
        let Some(Open::Call { id, given, unwrapper, .. }) = &mut self.open else { return };
        let delta = match target.kind {
            Kind::Custom => unwrapper.more(&call.arguments),
            _ => call.arguments.get(*given..).unwrap_or_default().to_owned(),
        };
        *given = call.arguments.len();
        write_delta(target.kind, id, index, &delta, events);
    }

    fn open_call(&mut self, call: &ToolCall, position: usize, target: &Target, events: &mut Events) {
        let index = self.done.len();
        let prefix = if target.kind == Kind::Custom { "ctc" } else { "fc" };
        let id = item_id(prefix, &self.call_id, index);
        let call_id = self.client_id(call, position);
        let item = call_item(&id, "in_progress", &call_id, target, "");
        write_item("response.output_item.added", index, &item, events);
        self.open = Some(Open::Call { id, call_id, given: 0, unwrapper: unwrap::Unwrapper::default() });
    }

    /// Ends a call: the whole of it, or what was not written yet.
    pub fn call(
        &mut self,
        call: &ToolCall,
        position: usize,
        is_whole: bool,
        events: &mut Events,
        out: &mut Vec<Piece>,
    ) {
        let mut target = self.target(call);
        if target.kind == Kind::LocalShell {
            match shell::action(&call.arguments) {
                Some(action) => return self.shell(call, position, &action, is_whole, events, out),
                // The client tells the model what is wrong with it.
                None => target.kind = Kind::Function,
            }
        }
        if self.open.is_none() {
            self.open_call(call, position, &target, events);
        }
        let index = self.done.len();
        let Some(Open::Call { id, call_id, given, mut unwrapper }) = self.open.take() else { return };
        let content = match target.kind {
            Kind::Custom => {
                let input = unwrap::input(&call.arguments);
                // What is not the wrapper is passed on as it is.
                let input = input.unwrap_or_else(|| call.arguments.clone());
                let more = unwrapper.more(&call.arguments);
                write_delta(target.kind, &id, index, &more, events);
                write_delta(target.kind, &id, index, unwrapper.rest(&input), events);
                input
            }
            _ => {
                let rest = call.arguments.get(given..).unwrap_or_default();
                write_delta(target.kind, &id, index, rest, events);
                call.arguments.clone()
            }
        };
        let (kind, member) = match target.kind {
            Kind::Custom => ("response.custom_tool_call_input.done", "input"),
            _ => ("response.function_call_arguments.done", "arguments"),
        };
        events.write(kind, |event| {
            let event = place(event, &id, index);
            let event = if member == "arguments" { event.text("name", &target.name) } else { event };
            event.text(member, &content)
        });
        let item = call_item(&id, status(is_whole), &call_id, &target, &content);
        self.finish(item, events, out);
    }

    fn shell(
        &mut self,
        call: &ToolCall,
        position: usize,
        action: &str,
        is_whole: bool,
        events: &mut Events,
        out: &mut Vec<Piece>,
    ) {
        let index = self.done.len();
        let id = item_id("lsh", &self.call_id, index);
        let call_id = self.client_id(call, position);
        let item = |status: &str| {
            Object::new()
                .text("id", &id)
                .text("type", "local_shell_call")
                .text("status", status)
                .text("call_id", &call_id)
                .raw("action", action)
                .end()
        };
        write_item("response.output_item.added", index, &item("in_progress"), events);
        self.finish(item(status(is_whole)), events, out);
    }

    /// The client may act on an item once it is done.
    fn finish(&mut self, item: String, events: &mut Events, out: &mut Vec<Piece>) {
        events.barrier(out);
        write_item("response.output_item.done", self.done.len(), &item, events);
        self.done.push(item);
    }

    fn target(&self, call: &ToolCall) -> Target {
        self.targets.get(&call.name).cloned().unwrap_or_else(|| Target {
            kind: Kind::Function,
            namespace: None,
            name: call.name.clone(),
        })
    }

    /// The id by which the client answers.
    fn client_id(&self, call: &ToolCall, position: usize) -> String {
        if call.id.is_empty() { item_id("call", &self.call_id, position) } else { call.id.clone() }
    }
}

/// Places an event at its item.
fn place(event: Object, id: &str, index: usize) -> Object {
    event.text("item_id", id).raw("output_index", &index.to_string())
}

fn with_logprobs(event: Object, kind: Text) -> Object {
    if kind == Text::Output { event.raw("logprobs", "[]") } else { event }
}

const fn status(is_whole: bool) -> &'static str {
    if is_whole { "completed" } else { "incomplete" }
}

fn call_item(id: &str, status: &str, call_id: &str, target: &Target, content: &str) -> String {
    let (kind, member) = match target.kind {
        Kind::Custom => ("custom_tool_call", "input"),
        _ => ("function_call", "arguments"),
    };
    let item = Object::new()
        .text("id", id)
        .text("type", kind)
        .text("status", status)
        .text("call_id", call_id)
        .text("name", &target.name)
        .text(member, content);
    match &target.namespace {
        Some(namespace) => item.text("namespace", namespace),
        None => item,
    }
    .end()
}

fn write_item(kind: &str, index: usize, item: &str, events: &mut Events) {
    events.write(kind, |event| event.raw("output_index", &index.to_string()).raw("item", item));
}

fn write_delta(kind: Kind, id: &str, index: usize, delta: &str, events: &mut Events) {
    if delta.is_empty() {
        return;
    }
    let name = match kind {
        Kind::Custom => "response.custom_tool_call_input.delta",
        _ => "response.function_call_arguments.delta",
    };
    events.write(name, |event| place(event, id, index).text("delta", delta));
}
