//! A response of an upstream that speaks the protocol itself, put together from a parsed copy.
//!
//! It fills the same [`Reply`] that a chat reply fills: one choice; its finish reason is the response's status, or why
//! it is incomplete, as it came. There are no token ids in this protocol, and none are made of texts.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::value::RawValue;

use super::raw::{Object, compact};
use super::view::{self, EventView, Item, Part, ResponseView};
use super::writer;
use crate::protocol::chat::{Choice, Cut, CutError, CutReply, Reply, ReplyError, ToolCall};
use crate::protocol::error::ApiError;
use crate::protocol::json::{self, Edit};
use crate::protocol::messages::Assembled;
use crate::protocol::translate::ReplyNames;

/// A reply so far.
#[derive(Debug, Default)]
pub struct Assembler {
    reply: Reply,
    items: BTreeMap<u64, Open>,
    /// The response as the stream began with it, without what only repeats the request at length.
    head: Option<Box<str>>,
    /// Of the last event that had one.
    sequence_number: Option<u64>,
    /// Something came that only a server of this protocol writes.
    is_response: bool,
    is_over: bool,
}

/// An item of the output.
#[derive(Debug, Default)]
struct Open {
    /// Its place among the tool calls.
    call: Option<usize>,
    /// Texts of which a part came.
    begun: BTreeSet<(Part, u64)>,
    is_done: bool,
}

impl Assembler {
    /// The reply so far.
    #[must_use]
    pub const fn reply(&self) -> &Reply {
        &self.reply
    }

    /// True if it is a response, or events of one: other servers answer with pages, or in another protocol.
    #[must_use]
    pub const fn is_response(&self) -> bool {
        self.is_response
    }

    /// The reply.
    #[must_use]
    pub fn into_reply(self) -> Reply {
        self.reply
    }

    /// Lets go of what grows with the reply. What comes later is read all the same.
    pub fn forget(&mut self) {
        self.reply.forget();
    }

    /// Adds an event of a stream: its name and its data. What follows the stream's own end is not read.
    ///
    /// # Errors
    /// [`ReplyError`] when it is not JSON of the protocol's shapes; nothing was added.
    pub fn event(&mut self, name: &str, data: &[u8]) -> Result<Assembled, ReplyError> {
        if self.is_over {
            return Ok(Assembled::default());
        }
        let done = match serde_json::from_slice(data) {
            Ok(event) => self.add_event(name, &event)?,
            Err(error) => match json::without_bad_numbers(data) {
                Some(clean) => self.add_event(name, &serde_json::from_slice(&clean)?)?,
                None => return Err(error.into()),
            },
        };
        self.is_over = done.is_end;
        Ok(done)
    }

    /// Adds a whole body, a response or an error.
    ///
    /// # Errors
    /// [`ReplyError`] when it is not JSON of the protocol's shapes; nothing was added.
    pub fn body(&mut self, data: &[u8]) -> Result<Assembled, ReplyError> {
        let mut done = match serde_json::from_slice(data) {
            Ok(response) => self.add_body(&response)?,
            Err(error) => match json::without_bad_numbers(data) {
                Some(clean) => self.add_body(&serde_json::from_slice(&clean)?)?,
                None => return Err(error.into()),
            },
        };
        done.must_hold = true;
        done.is_end = true;
        self.is_over = true;
        Ok(done)
    }

    fn add_event(&mut self, name: &str, event: &EventView<'_>) -> Result<Assembled, serde_json::Error> {
        let mut done = Assembled::default();
        let kind = event.kind.as_deref().unwrap_or(name);
        let index = event.output_index.unwrap_or(0);
        self.is_response |= kind.starts_with("response.");
        match kind {
            "response.created" | "response.queued" | "response.in_progress" => {
                if let Some(raw) = event.response {
                    let response: ResponseView<'_> = serde_json::from_str(raw.get())?;
                    self.add_head(&response);
                    self.head.get_or_insert_with(|| head(raw));
                }
            }
            "response.output_item.added" => {
                if let Some(raw) = event.item {
                    let item = Item::read(raw)?;
                    self.start(index, &item);
                }
            }
            "response.content_part.done" => {
                if let Some((part, text)) = event.part.map(view::part).transpose()?.flatten() {
                    self.say_all(index, part, event.place(part), &text);
                }
            }
            "response.function_call_arguments.delta" | "response.custom_tool_call_input.delta" => {
                let delta = view::text(event.delta)?;
                if let Some(call) = self.call(index) {
                    call.arguments.push_str(&delta);
                }
            }
            "response.function_call_arguments.done" | "response.custom_tool_call_input.done" => {
                let given = event.arguments.or(event.input).map(view::words).transpose()?;
                if let (Some(given), Some(call)) = (given, self.call(index)) {
                    call.arguments = given;
                }
            }
            "response.output_item.done" => {
                if let Some(raw) = event.item {
                    let item = Item::read(raw)?;
                    self.stop(index, item);
                }
                done.must_hold = true;
            }
            "response.completed" | "response.incomplete" => {
                self.end(kind, event.response)?;
                done.must_hold = true;
                done.is_end = true;
                done.fed.has_finish = true;
            }
            "response.failed" | "response.cancelled" => {
                let response: Option<ResponseView<'_>> = match event.response {
                    Some(raw) => Some(serde_json::from_str(raw.get())?),
                    None => None,
                };
                if let Some(response) = &response {
                    self.add_head(response);
                    self.reply.usage = response.usage();
                }
                self.fail(response.and_then(|response| response.error), kind);
                done.fed.has_error = true;
                done.is_end = true;
            }
            "error" => {
                let own = [event.code, event.message].into_iter().flatten().map(view::words);
                let own = own.collect::<Result<Vec<_>, _>>()?.join(": ");
                self.fail(event.error, if own.is_empty() { kind } else { &own });
                done.fed.has_error = true;
                done.is_end = true;
            }
            _ if event.error.is_some() => {
                self.fail(event.error, kind);
                done.fed.has_error = true;
                done.is_end = true;
            }
            _ => match Part::of_event(kind) {
                Some((part, false)) => {
                    let delta = view::text(event.delta)?;
                    self.say(index, part, event.place(part), &delta);
                }
                Some((part, true)) => {
                    let all = if part == Part::Refusal { event.refusal } else { event.text };
                    let all = view::text(all)?;
                    self.say_all(index, part, event.place(part), &all);
                }
                // What a hosted tool does, an annotation, or an event that later versions add.
                None => {}
            },
        }
        self.sequence_number = event.sequence_number.or(self.sequence_number);
        Ok(done)
    }

    fn add_body(&mut self, response: &ResponseView<'_>) -> Result<Assembled, serde_json::Error> {
        let mut done = Assembled::default();
        let status = response.status.as_deref().unwrap_or_default();
        self.is_response |= response.output.is_some();
        if response.error.is_some()
            || matches!(status, "failed" | "cancelled")
            || response.kind.as_deref() == Some("error")
        {
            done.fed.has_error = true;
            self.reply.usage = response.usage();
            self.fail(response.error, if status.is_empty() { "error" } else { status });
            return Ok(done);
        }
        self.add_whole(response)?;
        if matches!(status, "completed" | "incomplete") {
            done.fed.has_finish = true;
            self.finish(status, response);
        }
        Ok(done)
    }

    /// The end of a stream.
    fn end(&mut self, kind: &str, raw: Option<&RawValue>) -> Result<(), serde_json::Error> {
        let status = kind.trim_start_matches("response.");
        let Some(raw) = raw else {
            self.choice().finish_reason = Some(status.to_owned());
            return Ok(());
        };
        let response: ResponseView<'_> = serde_json::from_str(raw.get())?;
        // Servers that stream no items tell them here; others repeat them, or leave them out.
        if self.items.is_empty() {
            self.add_whole(&response)?;
        } else {
            self.add_head(&response);
            self.reply.usage = response.usage();
        }
        self.finish(status, &response);
        Ok(())
    }

    fn add_whole(&mut self, response: &ResponseView<'_>) -> Result<(), serde_json::Error> {
        let output = response.output.iter().flatten();
        let items = output.map(|raw| Item::read(raw)).collect::<Result<Vec<_>, _>>()?;
        self.add_head(response);
        self.reply.usage = response.usage();
        for (index, item) in (0..).zip(items) {
            self.stop(index, item);
        }
        Ok(())
    }

    fn add_head(&mut self, response: &ResponseView<'_>) {
        self.choice();
        if self.reply.id.is_none() {
            self.reply.id.clone_from(&response.id);
        }
        if self.reply.model.is_none() {
            self.reply.model.clone_from(&response.model);
        }
        // Some servers write it with a fraction.
        let created = response.created_at.filter(|seconds| *seconds >= 0.0).map(|seconds| seconds as u64);
        self.reply.created = self.reply.created.or(created);
    }

    fn finish(&mut self, status: &str, response: &ResponseView<'_>) {
        let why = response.incomplete_details.as_ref().and_then(|details| details.reason.clone());
        let why = why.filter(|reason| status == "incomplete" && !reason.is_empty());
        self.choice().finish_reason = Some(why.unwrap_or_else(|| status.to_owned()));
    }

    fn fail(&mut self, error: Option<&RawValue>, otherwise: &str) {
        let said = error.and_then(|raw| {
            let value: serde_json::Value = serde_json::from_str(raw.get()).ok()?;
            let words = [&value["code"], &value["message"]].map(|word| word.as_str());
            let words: Vec<&str> = words.into_iter().flatten().collect();
            Some(if words.is_empty() { raw.get().to_owned() } else { words.join(": ") })
        });
        self.reply.error.get_or_insert_with(|| said.unwrap_or_else(|| otherwise.to_owned()));
    }

    /// Begins an item.
    fn start(&mut self, index: u64, item: &Item) {
        let choice = self.choice();
        let call = match item {
            Item::Call { id, name, .. } => {
                choice.tool_calls.push(ToolCall::new(id.as_str(), name.as_str(), ""));
                Some(choice.tool_calls.len() - 1)
            }
            Item::Prose(_) | Item::Other => None,
        };
        self.items.insert(index, Open { call, ..Open::default() });
    }

    /// Ends an item: what it says now is what counts.
    fn stop(&mut self, index: u64, item: Item) {
        let is_call = matches!(item, Item::Call { .. });
        if self.items.get(&index).is_none_or(|open| open.is_done || (is_call && open.call.is_none())) {
            self.start(index, &item);
        }
        match item {
            Item::Prose(said) => {
                for (part, place, text) in said {
                    self.say_all(index, part, place, &text);
                }
            }
            Item::Call { id, name, arguments } => {
                if let Some(call) = self.call(index) {
                    (call.id, call.name) = (id, name);
                    call.arguments = arguments.unwrap_or_else(|| std::mem::take(&mut call.arguments));
                }
            }
            Item::Other => {}
        }
        if let Some(open) = self.items.get_mut(&index) {
            open.is_done = true;
        }
    }

    fn call(&mut self, index: u64) -> Option<&mut ToolCall> {
        let at = self.items.get(&index)?.call?;
        self.choice().tool_calls.get_mut(at)
    }

    /// Adds to a text.
    fn say(&mut self, index: u64, part: Part, place: u64, more: &str) {
        self.items.entry(index).or_default().begun.insert((part, place));
        let choice = self.choice();
        let text = match part {
            Part::Text => &mut choice.text,
            Part::Refusal => &mut choice.refusal,
            Part::Reasoning | Part::Summary => &mut choice.reasoning,
        };
        text.push_str(more);
    }

    /// A text as a whole, which servers that stream no fragments give at once.
    fn say_all(&mut self, index: u64, part: Part, place: u64, all: &str) {
        let has_begun = self.items.get(&index).is_some_and(|open| open.begun.contains(&(part, place)));
        if !has_begun {
            self.say(index, part, place, all);
        }
    }

    fn choice(&mut self) -> &mut Choice {
        self.reply.choices.entry(0).or_default()
    }

    /// The data of an event that changes nothing: the response is in progress. `None` before it has begun, and after
    /// its end. Its number is that of the event before it: those that follow have their own.
    #[must_use]
    pub fn in_progress(&self) -> Option<String> {
        let head = self.head.as_deref().filter(|_| !self.is_over)?;
        Some(stated("response.in_progress", self.sequence_number.unwrap_or(0), head))
    }

    /// Kinds and data of the events that end a response which broke off; none after its own end. `names`: of a
    /// response that had not begun.
    #[must_use]
    pub fn failed(&self, error: &ApiError, names: &ReplyNames) -> Vec<(&'static str, String)> {
        if self.is_over {
            return Vec::new();
        }
        let mut events = Vec::new();
        let mut number = self.sequence_number.map_or(0, |number| number.saturating_add(1));
        let head = match &self.head {
            Some(head) => head.to_string(),
            None => {
                let head = nothing_yet(names);
                events.push(("response.created", stated("response.created", number, &head)));
                number += 1;
                head
            }
        };
        let said = Object::new().text("code", writer::code(error)).text("message", &error.message).end();
        let set = [("status", "\"failed\"".to_owned()), ("error", said)];
        let response = json::set_members(head.as_bytes(), &set, &[]).ok();
        let response = response.and_then(|text| String::from_utf8(text).ok()).unwrap_or(head);
        events.push(("response.failed", stated("response.failed", number, &response)));
        events
    }
}

fn stated(kind: &str, number: u64, response: &str) -> String {
    Object::new()
        .text("type", kind)
        .raw("sequence_number", &number.to_string())
        .raw("response", response)
        .end()
}

/// A response without the request's prompt and tools, which would be kept for as long as it runs.
fn head(raw: &RawValue) -> Box<str> {
    let text = raw.get();
    let long = [("instructions", "null"), ("tools", "[]")];
    let members = json::members(text.as_bytes(), 0).unwrap_or_default();
    let is_there = |name: &str| json::find(text.as_bytes(), &members, name).is_some();
    let set = long.into_iter().filter(|(name, _)| is_there(name));
    let set: Vec<(&str, String)> = set.map(|(name, value)| (name, value.to_owned())).collect();
    let short = json::set_members(text.as_bytes(), &set, &[]).ok();
    let short = short.and_then(|short| String::from_utf8(short).ok());
    compact(short.as_deref().unwrap_or(text)).into()
}

/// A response of which the upstream had said nothing.
fn nothing_yet(names: &ReplyNames) -> String {
    let object = Object::new()
        .text("id", &super::names::response_id(&names.call_id))
        .text("object", "response")
        .raw("created_at", &names.created.to_string())
        .text("status", "in_progress")
        .raw("error", "null")
        .raw("incomplete_details", "null")
        .raw("instructions", "null")
        .text("model", &names.model)
        .raw("output", "[]")
        .raw("parallel_tool_calls", "true")
        .text("tool_choice", "auto")
        .raw("tools", "[]")
        .raw("usage", "null")
        .raw("metadata", "{}");
    object.end()
}

/// The edits by which the response of an event or a body names the model that its client asked for.
///
/// # Errors
/// [`CutError`] when the text is no JSON object.
pub fn cut(text: &[u8], wanted: &Cut) -> Result<CutReply, CutError> {
    let Some(model) = &wanted.model else {
        return Ok(CutReply::default());
    };
    let members = json::members(text, 0)?;
    let is_object = |member: &&json::Member| text[member.value.start] == b'{';
    let inner = match json::find(text, &members, "response").filter(is_object) {
        Some(response) => json::members(text, response.value.start)?,
        // A body.
        None => members,
    };
    let name = serde_json::Value::from(model.as_str()).to_string().into_bytes();
    let other = json::find(text, &inner, "model").filter(|member| member.text(text) != name);
    let edits = other.map(|member| Edit::replace(member.value.clone(), name)).into_iter().collect();
    Ok(CutReply { edits, is_dropped: false })
}
