//! Most events of a stream differ from the one before in what a token brings, and in nothing else: those are compared
//! with it instead of parsed.
//!
//! Invariant: what is read like this, [`Reply::feed`] reads the same. Whatever else comes is left to it.

mod reading;

use std::borrow::Cow;
use std::ops::Range;

use reading::Reading;

use super::reply::{Fed, Reply, ReplyError};
use super::view::Few;
use crate::protocol::json::{self, Member};

/// A reply that is read from the events of a stream.
#[derive(Default, Clone)]
pub struct Stream {
    reply: Reply,
    mold: Option<Mold>,
    /// How often a mold was made, and used.
    made: u32,
    used: u32,
}

/// What is the same in longer events is not kept for each of thousands of streams.
const LONGEST: usize = 4 << 10;
/// Molds that are made before one was of use. A stream whose events are all different is not worth more.
const TRIES: u32 = 8;

impl Stream {
    /// The reply so far.
    pub const fn reply(&self) -> &Reply {
        &self.reply
    }

    /// The reply, to be changed by another reader than this.
    pub const fn reply_mut(&mut self) -> &mut Reply {
        &mut self.reply
    }

    pub fn into_reply(self) -> Reply {
        self.reply
    }

    /// As [`Reply::feed`].
    ///
    /// # Errors
    /// As of that.
    pub fn feed(&mut self, event: &[u8]) -> Result<Fed, ReplyError> {
        if let Some(found) = self.mold.as_ref().and_then(|mold| mold.read(event)) {
            self.used = self.used.saturating_add(1);
            self.reply.add_found(found);
            return Ok(Fed { is_json: true, ..Fed::default() });
        }
        let fed = self.reply.feed(event)?;
        if fed.is_json && self.made < self.used.saturating_add(TRIES) {
            self.made += 1;
            self.mold = Mold::of(event).or(self.mold.take());
        }
        Ok(fed)
    }
}

/// What an event brought.
#[derive(Default)]
pub(super) struct Found<'a> {
    pub(super) index: u16,
    pub(super) text: Cow<'a, str>,
    pub(super) reasoning: Cow<'a, str>,
    pub(super) reasoning_content: Cow<'a, str>,
    pub(super) tool_index: Option<u64>,
    /// More arguments of a tool call.
    pub(super) arguments: Option<Cow<'a, str>>,
    pub(super) ids: Option<Few<u32>>,
    pub(super) values: Few<Option<f32>>,
}

/// An event that was read, and where others like it may differ from it.
#[derive(Clone)]
struct Mold {
    /// What is the same, one after the other.
    same: Vec<u8>,
    parts: Vec<Part>,
}

#[derive(Clone)]
enum Part {
    /// These bytes of what is the same.
    Same(Range<usize>),
    Index,
    Text,
    Reasoning,
    ReasoningContent,
    ToolIndex,
    Arguments,
    Ids,
    /// Log-probs of a completion.
    Values,
    /// Log-probs in chat: a list of objects of these parts.
    Entries(Vec<Part>),
    /// Within an entry.
    Logprob,
    /// Within an entry: its token's text, in which there is no id.
    Token,
    /// A value that nothing reads.
    Any,
}

/// Spans with what they are, in order.
type Spans = Vec<(Range<usize>, Part)>;

impl Mold {
    /// `event` was read; `None` if it brought more than tokens and their text.
    fn of(event: &[u8]) -> Option<Self> {
        let mut making = Making { event, same: Vec::new() };
        let mut spans = Spans::new();
        let mut has_choice = false;
        for member in &json::members(event, 0).ok()? {
            let value = member.text(event);
            match key(event, member)? {
                // Against guesses at lengths.
                "obfuscation" => spans.push((member.value.clone(), Part::Any)),
                "choices" => {
                    let [choice] = &json::elements(event, member.value.start).ok()?[..] else {
                        return None;
                    };
                    has_choice = true;
                    making.of_choice(choice.start, &mut spans)?;
                }
                "usage" | "prompt_token_ids" | "metadata" | "sglext" | "input_ids" | "output_ids"
                | "error" => is_one_of(value, &["null"])?,
                _ => {}
            }
        }
        if !has_choice {
            return None;
        }
        let parts = making.parts(spans, 0..event.len());
        making.same.shrink_to_fit();
        (making.same.len() <= LONGEST).then_some(Self { same: making.same, parts })
    }

    fn read<'a>(&self, event: &'a [u8]) -> Option<Found<'a>> {
        let mut reading = Reading { text: event, at: 0 };
        let mut found = Found::default();
        for part in &self.parts {
            match part {
                Part::Same(range) => reading.same(&self.same[range.clone()])?,
                Part::Index => found.index = reading.integer()?.try_into().ok()?,
                Part::Text => found.text = reading.string()?,
                Part::Reasoning => found.reasoning = reading.string()?,
                Part::ReasoningContent => found.reasoning_content = reading.string()?,
                Part::ToolIndex => found.tool_index = Some(reading.integer()?.into()),
                Part::Arguments => found.arguments = Some(reading.string()?),
                Part::Ids => found.ids = Some(reading.list(|ids| ids.integer())?),
                Part::Values => found.values = reading.list(|values| values.logprob())?,
                Part::Entries(parts) => found.values = reading.list(|list| list.entry(&self.same, parts))?,
                // The first two are within entries.
                Part::Logprob | Part::Token | Part::Any => reading.any(0)?,
            }
        }
        (reading.at == event.len()).then_some(found)
    }
}

fn key<'a>(event: &'a [u8], member: &Member) -> Option<&'a str> {
    let quoted = std::str::from_utf8(&event[member.key.clone()]).ok()?;
    let name = quoted.strip_prefix('"')?.strip_suffix('"')?;
    (!name.contains('\\')).then_some(name)
}

fn is_one_of(value: &[u8], texts: &[&str]) -> Option<()> {
    texts.iter().any(|text| text.as_bytes() == value).then_some(())
}

/// A mold in the making.
struct Making<'a> {
    event: &'a [u8],
    same: Vec<u8>,
}

impl Making<'_> {
    /// Keeps bytes of the event.
    fn keep(&mut self, range: Range<usize>) -> Part {
        let at = self.same.len();
        self.same.extend_from_slice(&self.event[range]);
        Part::Same(at..self.same.len())
    }

    /// Adds what a choice brings.
    fn of_choice(&mut self, at: usize, spans: &mut Spans) -> Option<()> {
        let event = self.event;
        let mut texts = 0;
        let mut has_ids = false;
        for member in &json::members(event, at).ok()? {
            let (value, span) = (member.text(event), member.value.clone());
            match key(event, member)? {
                "index" => spans.push((span, Part::Index)),
                "delta" if value != b"null" => texts += usize::from(self.of_delta(span.start, spans)?),
                "text" if value != b"null" => {
                    texts += 1;
                    spans.push((span, Part::Text));
                }
                "logprobs" if value != b"null" => self.of_logprobs(span.start, spans)?,
                "token_ids" | "response_token_ids" if value != b"null" => {
                    if std::mem::replace(&mut has_ids, true) {
                        return None;
                    }
                    spans.push((span, Part::Ids));
                }
                "finish_reason" => is_one_of(value, &["null", "\"\""])?,
                "message" | "prompt_token_ids" | "weight_versions" | "routed_experts" | "meta_info"
                | "stop_reason" | "matched_stop" => is_one_of(value, &["null"])?,
                _ => {}
            }
        }
        // Two would have an order.
        (texts <= 1).then_some(())
    }

    /// Adds what a delta brings; true if that may be text.
    fn of_delta(&self, at: usize, spans: &mut Spans) -> Option<bool> {
        let event = self.event;
        let mut has_text = false;
        for member in &json::members(event, at).ok()? {
            let (value, span) = (member.text(event), member.value.clone());
            match key(event, member)? {
                "content" if value != b"null" => {
                    has_text = true;
                    spans.push((span, Part::Text));
                }
                "reasoning" if value != b"null" => spans.push((span, Part::Reasoning)),
                "reasoning_content" if value != b"null" => spans.push((span, Part::ReasoningContent)),
                "refusal" => is_one_of(value, &["null", "\"\""])?,
                "tool_calls" if value != b"null" && value != b"[]" => {
                    let [fragment] = &json::elements(event, span.start).ok()?[..] else {
                        return None;
                    };
                    self.of_fragment(fragment.start, spans)?;
                }
                _ => {}
            }
        }
        Some(has_text)
    }

    /// Adds what more of a tool call's arguments are.
    fn of_fragment(&self, at: usize, spans: &mut Spans) -> Option<()> {
        let event = self.event;
        for member in &json::members(event, at).ok()? {
            let (value, span) = (member.text(event), member.value.clone());
            match key(event, member)? {
                "index" if value != b"null" => spans.push((span, Part::ToolIndex)),
                "id" => is_one_of(value, &["null"])?,
                "function" => {
                    for member in &json::members(event, span.start).ok()? {
                        let value = member.text(event);
                        match key(event, member)? {
                            "arguments" if value != b"null" => {
                                spans.push((member.value.clone(), Part::Arguments));
                            }
                            "name" => is_one_of(value, &["null", "\"\""])?,
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        spans.iter().any(|(_, part)| matches!(part, Part::Arguments)).then_some(())
    }

    fn of_logprobs(&mut self, at: usize, spans: &mut Spans) -> Option<()> {
        let event = self.event;
        let mut has_values = false;
        for member in &json::members(event, at).ok()? {
            let (value, span) = (member.text(event), member.value.clone());
            let part = match key(event, member)? {
                "content" if value != b"null" => {
                    let elements = json::elements(event, span.start).ok()?;
                    let first = elements.first()?.clone();
                    Part::Entries(self.parts(self.of_entry(first.start)?, first))
                }
                "token_logprobs" if value != b"null" => Part::Values,
                "tokens" | "text_offset" | "top_logprobs" => Part::Any,
                _ => continue,
            };
            if !matches!(part, Part::Any) && std::mem::replace(&mut has_values, true) {
                return None;
            }
            spans.push((span, part));
        }
        Some(())
    }

    fn of_entry(&self, at: usize) -> Option<Spans> {
        let event = self.event;
        let mut spans = Spans::new();
        for member in &json::members(event, at).ok()? {
            let part = match key(event, member)? {
                "logprob" => Part::Logprob,
                "token" => Part::Token,
                "bytes" | "top_logprobs" | "token_id" | "rank" => Part::Any,
                _ => continue,
            };
            spans.push((member.value.clone(), part));
        }
        Some(spans)
    }

    /// The parts of `whole`: what is between the spans is the same.
    fn parts(&mut self, spans: Spans, whole: Range<usize>) -> Vec<Part> {
        let mut parts = Vec::with_capacity(2 * spans.len() + 1);
        let mut at = whole.start;
        for (span, part) in spans {
            parts.push(self.keep(at..span.start));
            parts.push(part);
            at = span.end;
        }
        parts.push(self.keep(at..whole.end));
        parts
    }
}

#[cfg(test)]
#[path = "mold_tests.rs"]
mod tests;
