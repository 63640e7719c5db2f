//! Replies of SGLang's native `/generate` as those of OpenAI's completions, in the form of SGLang's own
//! `/v1/completions`: what that endpoint would say, from the one that tells all ids.
//!
//! Invariants:
//! - What was said is never said again nor taken back, whether events tell everything so far or only what is new.
//! - A finish reason, the usage and the end are written by [`ReplyWriter::end`] alone.
//! - A log-prob that the client asked for is the text that the engine printed.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::sglang_generate::GenerateReply;
use crate::protocol::chat::{Choice, ReplyUsage, StopMatch};
use crate::protocol::completions::Request;
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::json::without_bad_numbers;
use crate::protocol::object::Object;
use crate::protocol::translate::{Piece, ReplyNames, ReplyWriter, Untranslatable};

/// What a client wants to see beside the text.
#[derive(Debug, Clone, Copy)]
struct Asked {
    usage: bool,
    /// In every chunk.
    running_usage: bool,
    token_ids: bool,
    logprobs: bool,
    routing: bool,
}

/// What a client was told of an output.
#[derive(Debug, Default)]
struct Told {
    text: String,
    tokens: usize,
    has_prompt: bool,
}

/// Writes the reply to one completions request.
#[derive(Debug)]
pub struct CompletionsWriter {
    names: ReplyNames,
    asked: Asked,
    reply: GenerateReply,
    told: BTreeMap<u16, Told>,
    /// Number of outputs.
    expected: u64,
    is_over: bool,
    /// The reply's id, once it was said.
    id: Option<String>,
}

impl CompletionsWriter {
    /// For the reply to this request.
    #[must_use]
    pub fn new(request: &Request, names: ReplyNames) -> Self {
        let is_true = |name: &str| request.get(name) == Some(Value::Bool(true));
        let options = request.get("stream_options").unwrap_or_default();
        let asked = Asked {
            usage: request.asks_usage,
            running_usage: options["continuous_usage_stats"] == Value::Bool(true),
            token_ids: request.asks_token_ids,
            logprobs: request.asks_logprobs,
            routing: is_true("return_routed_experts"),
        };
        let reply = GenerateReply::of_prompts(request.n);
        let expected = request.choices();
        Self { names, asked, reply, told: BTreeMap::new(), expected, is_over: false, id: None }
    }

    /// Begins a reply or a chunk of it.
    fn head(&mut self) -> Object {
        let own = || format!("cmpl-{}", self.names.call_id);
        let id = self.id.get_or_insert_with(|| self.reply.reply().id.clone().unwrap_or_else(own));
        let mut head = Object::default();
        head.member("id", text(id).as_bytes());
        head.member("object", b"\"text_completion\"");
        head.member("created", self.names.created.to_string().as_bytes());
        head.member("model", text(&self.names.model).as_bytes());
        head
    }

    /// A chunk with these choices.
    fn chunk_of(&mut self, choices: &[u8], usage: Option<ReplyUsage>, out: &mut Vec<Piece>) {
        let mut chunk = self.head();
        chunk.member("choices", choices);
        if let Some(usage) = usage {
            chunk.member("usage", usage_text(usage).as_bytes());
        }
        out.push(Piece::Bytes(event(&chunk.finish())));
    }

    fn running_usage(&self) -> Option<ReplyUsage> {
        self.reply.reply().usage.filter(|_| self.asked.running_usage)
    }

    /// What of an output is new. `logprobs`: what the last event or the body says of it.
    fn news(
        &mut self,
        index: u16,
        logprobs: Option<&Logprobs<'_>>,
    ) -> Result<Option<Vec<u8>>, Untranslatable> {
        let Some(choice) = self.reply.reply().choices.get(&index) else {
            return Ok(None);
        };
        let told = self.told.entry(index).or_default();
        let total = choice.token_ids.as_ref().map_or(0, Vec::len);
        let more = match choice.text.strip_prefix(told.text.as_str()) {
            Some(more) => more,
            // A stop string that was told in part before it was whole: the engine's own endpoint says no more.
            None if told.text.starts_with(&choice.text) => "",
            None => {
                return Err(Untranslatable(format!("the text of output {index} is not what it was before")));
            }
        };
        if more.is_empty() && total == told.tokens {
            return Ok(None);
        }
        let mut part = Object::default();
        part.member("index", index.to_string().as_bytes());
        part.member("text", text(more).as_bytes());
        let logprobs = logprobs.filter(|_| self.asked.logprobs);
        let logprobs = logprobs.and_then(|told_now| told_now.written(told.tokens, total));
        part.member("logprobs", logprobs.as_deref().unwrap_or(b"null"));
        part.member("finish_reason", b"null");
        part.member("matched_stop", b"null");
        if self.asked.token_ids {
            let ids = choice.token_ids.as_deref().unwrap_or_default();
            part.member("token_ids", json!(ids.get(told.tokens..)).to_string().as_bytes());
            if let Some(prompt) = choice.prompt_token_ids.as_ref().filter(|_| !told.has_prompt) {
                told.has_prompt = true;
                part.member("prompt_token_ids", json!(prompt).to_string().as_bytes());
            }
        }
        told.text.push_str(more);
        told.tokens = total;
        Ok(Some(part.finish()))
    }

    /// An output as a whole.
    fn whole(&self, index: u16, choice: &Choice, logprobs: Option<&Logprobs<'_>>) -> Vec<u8> {
        let mut part = Object::default();
        part.member("index", index.to_string().as_bytes());
        part.member("text", text(&choice.text).as_bytes());
        let total = choice.token_ids.as_ref().map_or(0, Vec::len);
        let logprobs = logprobs.filter(|_| self.asked.logprobs).and_then(|told| told.written(0, total));
        part.member("logprobs", logprobs.as_deref().unwrap_or(b"null"));
        ending(&mut part, choice);
        if self.asked.token_ids {
            part.member("token_ids", json!(choice.token_ids).to_string().as_bytes());
            part.member("prompt_token_ids", json!(choice.prompt_token_ids).to_string().as_bytes());
        }
        part.finish()
    }

    /// SGLang's extension: the routing of the first choice, for a client that asked for it.
    fn routing(&self) -> Option<String> {
        let routed = self.reply.reply().choices.get(&0)?.routed_experts.as_ref();
        routed.filter(|_| self.asked.routing).map(|routed| json!({"routed_experts": routed}).to_string())
    }
}

impl ReplyWriter for CompletionsWriter {
    fn chunk(&mut self, data: &[u8], out: &mut Vec<Piece>) -> Result<(), Untranslatable> {
        self.reply.feed(data).map_err(|error| Untranslatable(error.to_string()))?;
        let clean = if self.asked.logprobs { without_bad_numbers(data) } else { None };
        let logprobs = if self.asked.logprobs {
            Logprobs::of_all(clean.as_deref().unwrap_or(data))
        } else {
            BTreeMap::new()
        };
        let indexes: Vec<u16> = self.reply.reply().choices.keys().copied().collect();
        for index in indexes {
            if let Some(part) = self.news(index, logprobs.get(&index))? {
                let usage = self.running_usage();
                self.chunk_of(&list(&[part]), usage, out);
            }
        }
        Ok(())
    }

    fn end(&mut self, out: &mut Vec<Piece>) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        // A clean end is one of a whole reply.
        if !self.reply.reply().is_finished(self.expected) {
            let message = "connection error: the upstream ended its reply before finish_reason";
            let error = ApiError::new(502, ErrorType::Upstream, "upstream_truncated", message);
            return out.push(Piece::Bytes(error.event()));
        }
        let last = |(index, choice): (&u16, &Choice)| {
            let mut part = Object::default();
            part.member("index", index.to_string().as_bytes());
            part.member("text", b"\"\"");
            part.member("logprobs", b"null");
            ending(&mut part, choice);
            if self.asked.token_ids {
                part.member("token_ids", b"[]");
            }
            part.finish()
        };
        let last: Vec<Vec<u8>> = self.reply.reply().choices.iter().map(last).collect();
        for part in last {
            let usage = self.running_usage();
            self.chunk_of(&list(&[part]), usage, out);
        }
        if let Some(routing) = self.routing() {
            let mut chunk = self.head();
            chunk.member("choices", b"[]");
            chunk.member("sglext", routing.as_bytes());
            out.push(Piece::Bytes(event(&chunk.finish())));
        }
        if let Some(usage) = self.reply.reply().usage.filter(|_| self.asked.usage) {
            self.chunk_of(b"[]", Some(usage), out);
        }
        out.push(Piece::Bytes(Bytes::from_static(b"data: [DONE]\n\n")));
    }

    fn keep_alive(&mut self, out: &mut Vec<Piece>) {
        let nothing =
            json!([{"index": 0, "text": "", "logprobs": null, "finish_reason": null, "matched_stop": null}]);
        self.chunk_of(nothing.to_string().as_bytes(), None, out);
    }

    fn error_event(&mut self, error: &ApiError) -> Bytes {
        self.is_over = true;
        error.event()
    }

    fn body(&mut self, data: &[u8]) -> Result<Bytes, Untranslatable> {
        self.reply.feed(data).map_err(|error| Untranslatable(error.to_string()))?;
        let clean = without_bad_numbers(data);
        let logprobs = Logprobs::of_all(clean.as_deref().unwrap_or(data));
        let reply = self.reply.reply().clone();
        let all_ended = reply.choices.values().all(|choice| choice.finish_reason.is_some());
        if reply.choices.is_empty() || !all_ended {
            let why = reply.error.unwrap_or_else(|| "it has no finish_reason".to_owned());
            return Err(Untranslatable(why));
        }
        let choices =
            reply.choices.iter().map(|(index, choice)| self.whole(*index, choice, logprobs.get(index)));
        let choices: Vec<Vec<u8>> = choices.collect();
        let mut body = self.head();
        body.member("choices", &list(&choices));
        let usage = reply.usage.map_or_else(|| "null".to_owned(), usage_text);
        body.member("usage", usage.as_bytes());
        let first = reply.choices.values().next();
        if let Some(version) = first.and_then(|choice| choice.weight_version.as_ref()) {
            body.member("metadata", json!({"weight_version": version}).to_string().as_bytes());
        }
        if let Some(routing) = self.routing() {
            body.member("sglext", routing.as_bytes());
        }
        Ok(body.finish().into())
    }

    fn error_body(&self, error: &ApiError) -> Bytes {
        error.body()
    }
}

/// How an output ended.
fn ending(part: &mut Object, choice: &Choice) {
    part.member("finish_reason", json!(choice.finish_reason).to_string().as_bytes());
    let matched = match &choice.stop_match {
        Some(StopMatch::Token(id)) => json!(id),
        Some(StopMatch::Text(text)) => json!(text),
        None => Value::Null,
    };
    part.member("matched_stop", matched.to_string().as_bytes());
}

fn usage_text(usage: ReplyUsage) -> String {
    let ReplyUsage { prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens } = usage;
    let cached = cached_tokens.map(|cached| json!({"cached_tokens": cached}));
    json!({
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens.saturating_add(completion_tokens),
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": cached,
        "reasoning_tokens": reasoning_tokens.unwrap_or(0),
    })
    .to_string()
}

fn text(text: &str) -> String {
    Value::from(text).to_string()
}

fn list(parts: &[Vec<u8>]) -> Vec<u8> {
    [b"[".as_slice(), &parts.join(&b','), b"]"].concat()
}

fn event(data: &[u8]) -> Bytes {
    [b"data: ".as_slice(), data, b"\n\n"].concat().into()
}

/// Log-probs of one output as the engine printed them: `[log-prob, id, text]` of each token, and of its alternatives.
#[derive(Debug, Default)]
struct Logprobs<'a> {
    sampled: Vec<Vec<&'a RawValue>>,
    alternatives: Vec<Option<Vec<Vec<&'a RawValue>>>>,
}

#[derive(Deserialize)]
struct Output<'a> {
    index: Option<u16>,
    #[serde(borrow)]
    meta_info: Option<Meta<'a>>,
}

#[derive(Deserialize)]
struct Meta<'a> {
    #[serde(borrow)]
    output_token_logprobs: Option<Vec<Vec<&'a RawValue>>>,
    #[serde(borrow)]
    output_top_logprobs: Option<Vec<Option<Vec<Vec<&'a RawValue>>>>>,
}

impl<'a> Logprobs<'a> {
    /// Those of every output of an event or a body; none where they are not of the shape that is known.
    fn of_all(data: &'a [u8]) -> BTreeMap<u16, Self> {
        let outputs: Vec<Output<'a>> = if data.trim_ascii_start().starts_with(b"[") {
            serde_json::from_slice(data).unwrap_or_default()
        } else {
            serde_json::from_slice(data).map(|output| vec![output]).unwrap_or_default()
        };
        let one = |(position, output): (usize, Output<'a>)| {
            let meta = output.meta_info?;
            let sampled = meta.output_token_logprobs?;
            let alternatives = meta.output_top_logprobs.unwrap_or_default();
            Some((output.index.or(u16::try_from(position).ok())?, Self { sampled, alternatives }))
        };
        outputs.into_iter().enumerate().filter_map(one).collect()
    }

    /// Those of the tokens from `before` to `total`; `None` if they did not come.
    fn written(&self, before: usize, total: usize) -> Option<Vec<u8>> {
        // All so far, or what is new.
        let from = if self.sampled.len() == total { before } else { 0 };
        let new = from..from + total.checked_sub(before)?;
        let sampled = self.sampled.get(new.clone())?;
        let mut offsets = Vec::new();
        let (mut values, mut tokens, mut tops) = (Vec::new(), Vec::new(), Vec::new());
        for item in sampled {
            // The engine's own endpoint does not say where in the text a token is.
            offsets.push(b"-1".to_vec());
            values.push(raw(item.first()));
            tokens.push(token(item).into_bytes());
        }
        for alternatives in self.alternatives.get(new).unwrap_or_default() {
            tops.push(match alternatives {
                Some(alternatives) => {
                    let pair = |item: &Vec<&RawValue>| {
                        [token(item).into_bytes(), b":".to_vec(), raw(item.first())].concat()
                    };
                    let pairs: Vec<Vec<u8>> = alternatives.iter().map(pair).collect();
                    [b"{".as_slice(), &pairs.join(&b','), b"}"].concat()
                }
                None => b"null".to_vec(),
            });
        }
        let mut out = Object::default();
        out.member("text_offset", &list(&offsets));
        out.member("token_logprobs", &list(&values));
        out.member("tokens", &list(&tokens));
        out.member("top_logprobs", &list(&tops));
        Some(out.finish())
    }
}

fn raw(value: Option<&&RawValue>) -> Vec<u8> {
    value.map_or_else(|| b"null".to_vec(), |value| value.get().as_bytes().to_vec())
}

/// A token's text, as JSON; its id where the engine did not say it.
fn token(item: &[&RawValue]) -> String {
    match item.get(2).map(|text| text.get()) {
        Some(text) if text.starts_with('"') => text.to_owned(),
        _ => text(&format!("token_id:{}", item.get(1).map_or("", |id| id.get()))),
    }
}

#[cfg(test)]
#[path = "sglang_completions_tests.rs"]
mod tests;
