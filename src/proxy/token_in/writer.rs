//! The reply of a token endpoint as a chat reply, and that in the client's own protocol.
//!
//! Invariants:
//! - What is told comes from the sampled ids alone, not from the engine's text. Text that comes without its ids is not
//!   left out silently: the reply is broken off.
//! - A finish reason, the usage and the end are written by [`ReplyWriter::end`] alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::Rendered;
use super::reading::Reader;
use crate::protocol::chat::{self, ReplyUsage, StopMatch};
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::translate::{KeptReply, Piece, ReplyWriter, Untranslatable};
use crate::text::parsers::ReplyEvent;
use crate::upstream::sglang_generate::GenerateReply;

/// The upstream's reply as it is read.
enum Source {
    Completions(Box<chat::Reply>),
    Generate(Box<GenerateReply>),
}

impl Source {
    fn reply(&self) -> &chat::Reply {
        match self {
            Self::Completions(reply) => reply,
            Self::Generate(reply) => reply.reply(),
        }
    }

    fn feed(&mut self, data: &[u8]) -> Result<(), Untranslatable> {
        let untranslatable = |error: &dyn std::fmt::Display| Untranslatable(error.to_string());
        match self {
            Self::Completions(reply) => reply.feed(data).map(|_| ()).map_err(|error| untranslatable(&error)),
            Self::Generate(reply) => reply.feed(data).map(|_| ()).map_err(|error| untranslatable(&error)),
        }
    }

    /// Lets go of what was told; true if ids are counted from there.
    fn forget(&mut self) -> bool {
        match self {
            Self::Completions(reply) => {
                reply.forget();
                true
            }
            Self::Generate(_) => false,
        }
    }
}

/// What was told of a choice.
struct Told {
    reader: Reader,
    /// Of the ids and the text that the source holds: those that were read.
    taken: usize,
    text_bytes: usize,
    /// All ids that were read.
    ids: u64,
    /// Its last part had text and no ids: that may be of ids that came before.
    has_bare_end: bool,
    finish_reason: Option<String>,
    stop_match: Option<StopMatch>,
    has_calls: bool,
}

/// Writes the reply to one call.
pub(super) struct TokenWriter {
    rendered: Arc<Rendered>,
    /// `None`: the client speaks chat.
    inner: Option<Box<dyn ReplyWriter>>,
    source: Source,
    told: BTreeMap<u16, Told>,
    is_over: bool,
}

impl TokenWriter {
    /// `is_native`: the upstream answers as SGLang's `/generate` does.
    pub(super) fn new(rendered: Arc<Rendered>, inner: Option<Box<dyn ReplyWriter>>, is_native: bool) -> Self {
        let source = match is_native {
            true => Source::Generate(Box::default()),
            false => Source::Completions(Box::default()),
        };
        Self { rendered, inner, source, told: BTreeMap::new(), is_over: false }
    }

    fn head(&self, object: &str) -> Map<String, Value> {
        let names = &self.rendered.names;
        let head = json!({
            "id": format!("chatcmpl-{}", names.call_id), "object": object, "created": names.created, "model": names.model,
        });
        match head {
            Value::Object(head) => head,
            _ => Map::new(),
        }
    }

    /// Tells a chunk of chat.
    fn tell(
        &mut self,
        choices: Value,
        usage: Option<ReplyUsage>,
        out: &mut Vec<Piece>,
    ) -> Result<(), Untranslatable> {
        let mut chunk = self.head("chat.completion.chunk");
        chunk.insert("choices".to_owned(), choices);
        if let Some(usage) = usage {
            chunk.insert("usage".to_owned(), usage_of(usage));
        }
        let chunk = Value::Object(chunk).to_string();
        match &mut self.inner {
            Some(inner) => inner.chunk(chunk.as_bytes(), out),
            None => {
                out.push(Piece::Bytes(format!("data: {chunk}\n\n").into()));
                Ok(())
            }
        }
    }

    fn tell_delta(&mut self, index: u16, delta: &Value, out: &mut Vec<Piece>) -> Result<(), Untranslatable> {
        let choice = json!([{"index": index, "delta": delta, "logprobs": null, "finish_reason": null}]);
        self.tell(choice, None, out)
    }

    fn begin(&mut self, index: u16, out: &mut Vec<Piece>) -> Result<(), Untranslatable> {
        if self.told.contains_key(&index) {
            return Ok(());
        }
        let reader = Reader::new(&self.rendered.reading);
        let told = Told {
            reader,
            taken: 0,
            text_bytes: 0,
            ids: 0,
            has_bare_end: false,
            finish_reason: None,
            stop_match: None,
            has_calls: false,
        };
        self.told.insert(index, told);
        self.tell_delta(index, &json!({"role": "assistant", "content": ""}), out)
    }

    /// Tells what is new of a choice.
    fn news(&mut self, index: u16, out: &mut Vec<Piece>) -> Result<(), Untranslatable> {
        self.begin(index, out)?;
        let (Some(choice), Some(told)) = (self.source.reply().choices.get(&index), self.told.get_mut(&index))
        else {
            return Ok(());
        };
        if choice.token_ids.is_none() && !choice.text.is_empty() {
            return Err(without_ids("it"));
        }
        let ids = choice.token_ids.as_deref().unwrap_or_default();
        let new = ids.get(told.taken..).unwrap_or_default();
        let finish = choice.finish_reason.as_deref().filter(|_| told.finish_reason.is_none());
        if choice.text.len() > told.text_bytes && new.is_empty() {
            // Engines hold text back that may become a stop text.
            if finish.is_none() {
                return Err(without_ids("a part of it"));
            }
            told.has_bare_end = true;
        }
        told.text_bytes = choice.text.len();
        told.ids += new.len() as u64;
        let mut events = Vec::new();
        told.reader.push(&self.rendered.reading, new, finish, &mut events);
        told.taken = ids.len();
        told.has_calls |= events.iter().any(|event| matches!(event, ReplyEvent::CallStart { .. }));
        let ended = finish.map(str::to_owned);
        if ended.is_some() {
            told.finish_reason = ended.clone();
            told.stop_match = choice.stop_match.clone();
        }
        for event in events {
            if let Some(delta) = self.delta(index, event) {
                self.tell_delta(index, &delta, out)?;
            }
        }
        // A writer of another protocol keeps it until the end by itself.
        if ended.is_some() && self.inner.is_some() {
            let last = self.last(index);
            self.tell(last, None, out)?;
        }
        Ok(())
    }

    /// An event as the delta of a chunk.
    fn delta(&self, choice: u16, event: ReplyEvent) -> Option<Value> {
        Some(match event {
            ReplyEvent::Reasoning(text) => json!({"reasoning_content": text}),
            ReplyEvent::Text(text) => json!({"content": text}),
            ReplyEvent::CallStart { index, id, name } => {
                let id = id.unwrap_or_else(|| self.rendered.reading.call_id(choice, index));
                json!({"tool_calls": [{
                    "index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""},
                }]})
            }
            ReplyEvent::CallArguments { index, text } => {
                json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            }
            // What turned out to be no call is text.
            ReplyEvent::Malformed { raw, .. } => json!({"content": raw}),
            ReplyEvent::Markup(_) | ReplyEvent::CallEnd { .. } => return None,
        })
    }

    /// How a choice ended.
    fn last(&self, index: u16) -> Value {
        let Some(told) = self.told.get(&index) else {
            return json!([]);
        };
        let mut choice = json!({"index": index, "delta": {}, "logprobs": null});
        choice["finish_reason"] = finish_reason(told.finish_reason.as_deref(), told.has_calls);
        choice["stop_reason"] = stop_reason(told.stop_match.as_ref(), &self.rendered.reading.tokenizer);
        json!([choice])
    }
}

impl ReplyWriter for TokenWriter {
    fn chunk(&mut self, data: &[u8], out: &mut Vec<Piece>) -> Result<(), Untranslatable> {
        self.source.feed(data)?;
        let indexes: Vec<u16> = self.source.reply().choices.keys().copied().collect();
        for index in indexes {
            self.news(index, out)?;
        }
        let all: u64 = self.told.values().map(|told| told.ids).sum();
        let is_less = self.source.reply().usage.is_some_and(|usage| usage.completion_tokens > all);
        if is_less && self.told.values().any(|told| told.has_bare_end) {
            return Err(without_ids("its last part"));
        }
        if self.source.forget() {
            self.told.values_mut().for_each(|told| (told.taken, told.text_bytes) = (0, 0));
        }
        Ok(())
    }

    fn end(&mut self, out: &mut Vec<Piece>) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        let usage = self.source.reply().usage;
        if self.inner.is_some() {
            if usage.is_some() {
                let _ = self.tell(json!([]), usage, out);
            }
            return self.inner.iter_mut().for_each(|inner| inner.end(out));
        }
        // A clean end is one of a whole reply.
        if !self.source.reply().is_finished(self.rendered.n) {
            let message = "connection error: the upstream ended its reply before finish_reason";
            let error = ApiError::new(502, ErrorType::Upstream, "upstream_truncated", message);
            return out.push(Piece::Bytes(error.event()));
        }
        let indexes: Vec<u16> = self.told.keys().copied().collect();
        for index in indexes {
            let last = self.last(index);
            // Nothing but another protocol's writer fails.
            let _ = self.tell(last, None, out);
        }
        if let Some(usage) = usage.filter(|_| self.rendered.asks_usage) {
            let _ = self.tell(json!([]), Some(usage), out);
        }
        out.push(Piece::Bytes(Bytes::from_static(b"data: [DONE]\n\n")));
    }

    fn keep_alive(&mut self, out: &mut Vec<Piece>) {
        match &mut self.inner {
            Some(inner) => inner.keep_alive(out),
            None => {
                let _ = self.tell_delta(0, &json!({}), out);
            }
        }
    }

    fn error_event(&mut self, error: &ApiError) -> Bytes {
        self.is_over = true;
        match &mut self.inner {
            Some(inner) => inner.error_event(error),
            None => error.event(),
        }
    }

    fn body(&mut self, data: &[u8]) -> Result<Bytes, Untranslatable> {
        self.source.feed(data)?;
        let reply = self.source.reply();
        let all_ended = reply.choices.values().all(|choice| choice.finish_reason.is_some());
        if reply.choices.is_empty() || !all_ended {
            let why = reply.error.clone().unwrap_or_else(|| "it has no finish_reason".to_owned());
            return Err(Untranslatable(why));
        }
        let mut choices = Vec::new();
        for (&index, choice) in &reply.choices {
            let Some(ids) = &choice.token_ids else { return Err(without_ids("it")) };
            let reading = &self.rendered.reading;
            let whole = reading.whole(index, ids, choice.finish_reason.as_deref().unwrap_or_default());
            let mut message = json!({"role": "assistant", "content": whole.text});
            if !whole.reasoning.is_empty() {
                message["reasoning_content"] = Value::from(whole.reasoning);
            }
            if !whole.calls.is_empty() {
                if whole.text.is_empty() {
                    message["content"] = Value::Null;
                }
                let call = |call: &crate::record::CapturedToolCall| {
                    json!({"id": call.id, "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments}})
                };
                message["tool_calls"] = whole.calls.iter().map(call).collect();
            }
            choices.push(json!({
                "index": index, "message": message, "logprobs": null,
                "finish_reason": finish_reason(choice.finish_reason.as_deref(), !whole.calls.is_empty()),
                "stop_reason": stop_reason(choice.stop_match.as_ref(), &reading.tokenizer),
            }));
        }
        let mut body = self.head("chat.completion");
        body.insert("choices".to_owned(), Value::Array(choices));
        body.insert("usage".to_owned(), reply.usage.map_or(Value::Null, usage_of));
        let body = Value::Object(body).to_string();
        match &mut self.inner {
            Some(inner) => inner.body(body.as_bytes()),
            None => Ok(body.into()),
        }
    }

    fn kept(&self) -> Option<KeptReply> {
        self.inner.as_ref()?.kept()
    }

    fn error_body(&self, error: &ApiError) -> Bytes {
        match &self.inner {
            Some(inner) => inner.error_body(error),
            None => error.body(),
        }
    }
}

fn without_ids(part: &str) -> Untranslatable {
    let remedy = "which the token-in relay is built on; use proxy.relay = live";
    Untranslatable(format!("{part} has no token ids, {remedy}"))
}

fn finish_reason(told: Option<&str>, has_calls: bool) -> Value {
    match told {
        Some("stop") if has_calls => Value::from("tool_calls"),
        other => json!(other),
    }
}

/// What ended a choice, where it is not the model's own end.
fn stop_reason(matched: Option<&StopMatch>, tokenizer: &crate::text::Tokenizer) -> Value {
    match matched {
        Some(StopMatch::Text(text)) => Value::from(text.as_str()),
        Some(StopMatch::Token(id)) if !tokenizer.eos_token_ids().contains(id) => Value::from(*id),
        _ => Value::Null,
    }
}

fn usage_of(usage: ReplyUsage) -> Value {
    let ReplyUsage { prompt_tokens, completion_tokens, cached_tokens, .. } = usage;
    let mut told = json!({
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens.saturating_add(completion_tokens),
        "completion_tokens": completion_tokens,
    });
    if let Some(cached) = cached_tokens {
        told["prompt_tokens_details"] = json!({"cached_tokens": cached});
    }
    told
}
