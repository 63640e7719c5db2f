//! One choice of a reply: sampled tokens in, text, tool calls, log-probs and the finish reason out.

use serde_json::Value;

use super::wire::{LogprobEntry, StopReason, TokenText, TopLogprob, WeightVersion};
use crate::engine::{Event, FinishReason, SampledToken};
use crate::text::parsers::{Forms, Piece, ReplyEvent, ReplyParser, ToolSchemas};
use crate::text::{Decoder, StopMatcher, Tokenizer};

/// vLLM's floor: JSON has no minus infinity.
const LOGPROB_FLOOR: f64 = -9999.0;

/// How tokens become text.
#[derive(Debug, Clone, Default)]
pub(super) struct TextOptions {
    pub stop: Vec<String>,
    pub include_stop: bool,
    pub skip_special_tokens: bool,
    /// What is parsed; nothing by default.
    pub forms: Forms,
    /// The prompt ends within a reasoning block.
    pub starts_in_reasoning: bool,
    pub tool_schemas: ToolSchemas,
    /// Calls after the first are left out (`parallel_tool_calls: false`); their tokens are not.
    pub single_tool_call: bool,
    pub eos_token_ids: Vec<u32>,
    pub logprobs: bool,
    /// Token texts are `token_id:<id>`.
    pub tokens_as_ids: bool,
}

/// A parsed tool call of the reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Call {
    pub index: usize,
    pub id: String,
    pub name: String,
    pub arguments: String,
}

/// What one or more tokens added.
#[derive(Debug, Default)]
pub(super) struct Delta {
    pub text: String,
    pub reasoning: String,
    pub calls: Vec<Call>,
    /// There was text, of which nothing may be left: markup, or what may become markup.
    pub was_parsed: bool,
    pub token_ids: Vec<u32>,
    /// As many as `token_ids` when log-probs were asked for, else none.
    pub logprobs: Vec<LogprobEntry>,
    pub finish: Option<Finish>,
}

/// Why a choice ended.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Finish {
    pub reason: &'static str,
    pub stop_reason: Option<StopReason>,
}

/// State of a choice between tokens.
pub(super) struct Choice {
    options: TextOptions,
    decoder: Decoder,
    /// Token texts keep special tokens.
    token_decoder: Decoder,
    stop: StopMatcher,
    parser: Option<ReplyParser>,
    calls: usize,
    pub tokens: usize,
    pub versions: Vec<WeightVersion>,
    pub is_finished: bool,
}

impl Choice {
    pub fn new(options: TextOptions) -> Self {
        Self {
            decoder: Decoder::new(options.skip_special_tokens),
            token_decoder: Decoder::new(false),
            stop: StopMatcher::new(options.stop.clone(), options.include_stop),
            parser: (options.forms != Forms::default()).then(|| {
                let Forms { tools, reasoning } = options.forms;
                ReplyParser::new(tools, reasoning, options.starts_in_reasoning, &options.tool_schemas)
                    .with_whole_calls()
            }),
            calls: 0,
            tokens: 0,
            versions: Vec::new(),
            is_finished: false,
            options,
        }
    }

    pub fn parses_tool_calls(&self) -> bool {
        self.options.forms.tools.is_some()
    }

    /// Adds an event to `delta`. `Err` with the reason when the engine could not go on.
    pub fn push(&mut self, tokenizer: &Tokenizer, event: Event, delta: &mut Delta) -> Result<(), String> {
        let (token, end) = match event {
            Event::Token(token) => (token, None),
            Event::Last(token, reason) => (token, Some(reason)),
            Event::Aborted(reason) => return Err(reason.to_string()),
        };
        if self.is_finished {
            // Tokens sampled before the engine saw that a stop string had ended the choice.
            return Ok(());
        }
        self.account(tokenizer, &token, delta);

        let is_stop_token = matches!(end, Some(FinishReason::Stop(_)));
        let mut decoded = String::new();
        if !is_stop_token || self.options.include_stop {
            self.decoder.push(tokenizer, token.id, &mut decoded);
        }
        if end.is_some() {
            self.decoder.finish(&mut decoded);
        }
        let mut text = String::new();
        let mut finish = end.map(|reason| match reason {
            FinishReason::Length => Finish { reason: "length", stop_reason: None },
            FinishReason::Stop(id) => {
                let is_eos = self.options.eos_token_ids.contains(&id);
                Finish { reason: "stop", stop_reason: (!is_eos).then_some(StopReason::Token(id)) }
            }
        });
        if let Some(stop) = self.stop.push(&decoded, &mut text) {
            finish = Some(Finish { reason: "stop", stop_reason: Some(StopReason::Text(stop)) });
        } else if finish.is_some() {
            self.stop.finish(&mut text);
        }
        self.add_text(&text, finish.is_some(), delta);
        if let Some(finish) = &mut finish {
            self.is_finished = true;
            if self.calls > 0 {
                finish.reason = "tool_calls";
            }
        }
        delta.finish = finish;
        Ok(())
    }

    fn account(&mut self, tokenizer: &Tokenizer, token: &SampledToken, delta: &mut Delta) {
        let position = self.tokens;
        self.tokens += 1;
        match self.versions.last_mut() {
            Some(span) if span.number == token.version => span.end = self.tokens,
            _ => self.versions.push(WeightVersion {
                version: token.version.to_string(),
                number: token.version,
                start: position,
                end: self.tokens,
            }),
        }
        delta.token_ids.push(token.id);
        if !self.options.logprobs {
            return;
        }
        let mut text = String::new();
        self.token_decoder.push(tokenizer, token.id, &mut text);
        let as_ids = self.options.tokens_as_ids;
        let name = |id: u32, text: String| {
            if as_ids { TokenText::new(format!("token_id:{id}")) } else { TokenText::new(text) }
        };
        let top_logprobs = token
            .top_logprobs
            .iter()
            .map(|&(id, logprob)| {
                let text = std::str::from_utf8(tokenizer.token_bytes(id)).unwrap_or_default();
                TopLogprob { token: name(id, text.to_owned()), logprob: floor(logprob) }
            })
            .collect();
        delta.logprobs.push(LogprobEntry {
            token: name(token.id, text),
            logprob: floor(token.logprob),
            top_logprobs,
        });
    }

    fn add_text(&mut self, text: &str, is_end: bool, delta: &mut Delta) {
        let Some(parser) = &mut self.parser else {
            delta.text.push_str(text);
            return;
        };
        delta.was_parsed |= !text.is_empty();
        let mut events = Vec::new();
        parser.push(Piece::text(text), &mut events);
        if is_end {
            parser.finish(&mut events);
        }
        for event in events {
            match event {
                ReplyEvent::Text(text) => delta.text.push_str(&text),
                ReplyEvent::Reasoning(text) => delta.reasoning.push_str(&text),
                ReplyEvent::Malformed { raw, what, .. } => {
                    tracing::debug!(%what, bytes = raw.len(), "a malformed tool call stays text");
                    delta.text.push_str(&raw);
                }
                ReplyEvent::CallStart { id, name, .. } => {
                    let index = self.calls;
                    self.calls += 1;
                    if index == 0 || !self.options.single_tool_call {
                        let id =
                            id.unwrap_or_else(|| format!("chatcmpl-tool-{}", uuid::Uuid::new_v4().simple()));
                        delta.calls.push(Call { index, id, name, arguments: String::new() });
                    }
                }
                // Calls come whole: start, arguments and end at once.
                ReplyEvent::CallArguments { text, .. } => {
                    let is_given = self.calls == 1 || !self.options.single_tool_call;
                    if let Some(call) = delta.calls.last_mut().filter(|_| is_given) {
                        call.arguments.push_str(&text);
                    }
                }
                ReplyEvent::CallEnd { .. } | ReplyEvent::Markup(_) => {}
            }
        }
    }
}

fn floor(logprob: f32) -> f64 {
    f64::from(logprob).max(LOGPROB_FLOOR)
}

/// `usage` of a reply.
pub(super) fn usage(prompt_tokens: usize, completion_tokens: usize) -> Value {
    serde_json::json!({
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    })
}
