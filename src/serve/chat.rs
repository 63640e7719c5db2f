//! `POST /v1/chat/completions`.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::ServeState;
use super::choice::{Call, Choice, Delta, Finish, usage};
use super::error::ApiError;
use super::events::{Choices, EventSource, Frame, stream_response, write_done, write_event};
use super::request::{Common, Logprobs, fields, parse_object};
use super::wire::{
    ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatReply, Chunk, FullUsage, LogprobEntry, Message,
    unix_seconds,
};
use crate::engine::Event;
use crate::text::parsers::{Forms, ToolSchemas};
use crate::text::{ChatInput, encode_chat};

/// Tokens at a prompt's end that may hold the opening tag of reasoning and the white space after it; with a tokenizer of
/// bytes the tag is as many tokens as it has letters.
const REASONING_OPENING_TOKENS: usize = 16;

/// What a prompt is rendered from; `/tokenize` reads the same.
#[derive(Deserialize)]
pub(super) struct PromptFields {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    add_generation_prompt: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

impl PromptFields {
    pub fn encode(&self, state: &ServeState) -> Result<Vec<u32>, ApiError> {
        if self.messages.is_empty() {
            return Err(ApiError::bad_field("messages", "messages is empty; give at least one message"));
        }
        let input = ChatInput {
            messages: &self.messages,
            tools: self.tools.as_deref(),
            add_generation_prompt: self.add_generation_prompt.unwrap_or(true),
            template_kwargs: self.chat_template_kwargs.as_ref(),
        };
        Ok(encode_chat(&state.inner.tokenizer, &state.inner.template, &input)?)
    }
}

#[derive(Deserialize)]
struct ChatFields {
    max_completion_tokens: Option<u64>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
}

/// A checked request with its prompt.
struct ChatRequest {
    common: Common,
    prompt: Vec<u32>,
}

fn read(state: &ServeState, headers: &HeaderMap, body: &Value) -> Result<ChatRequest, ApiError> {
    let chat: ChatFields = fields(body)?;
    let logprobs = Logprobs::of_chat(body)?;
    let mut common = Common::read(state, headers, body, logprobs, chat.max_completion_tokens)?;
    let prompt: PromptFields = fields(body)?;
    if prompt.tools.as_ref().is_some_and(Vec::is_empty) {
        return Err(ApiError::bad_field("tools", "tools is an empty list; leave the key out"));
    }
    let is_auto = match &chat.tool_choice {
        None | Some(Value::Null) => true,
        Some(Value::String(choice)) if choice == "auto" => true,
        Some(Value::String(choice)) if choice == "none" => false,
        Some(other) => {
            let message = format!(
                "tool_choice = {other} needs guided decoding, which the embedded engine does not have; use \"auto\" or \"none\""
            );
            return Err(ApiError::bad_field("tool_choice", message));
        }
    };
    let ids = prompt.encode(state)?;
    let Forms { tools, reasoning } = state.inner.forms;
    let text = &mut common.text;
    if let Some(declared) = prompt.tools.as_ref().filter(|_| is_auto) {
        text.forms.tools = Some(tools.ok_or_else(|| {
            let message = "the model's chat template shows no form of tool calls that lego reads; start the server \
                           with --tool-call-parser, or send tool_choice \"none\"";
            ApiError::bad_field("tools", message)
        })?);
        text.tool_schemas = ToolSchemas::new(declared);
        text.single_tool_call = chat.parallel_tool_calls == Some(false);
        // The markup may be special tokens.
        text.skip_special_tokens = false;
    }
    if let Some(form) = reasoning {
        text.forms.reasoning = reasoning;
        let tokenizer = &state.inner.tokenizer;
        let end = &ids[ids.len().saturating_sub(REASONING_OPENING_TOKENS)..];
        text.starts_in_reasoning = form.is_open_at_end(&tokenizer.decode(end, false));
        let is_special = |tag| tokenizer.token_to_id(tag).is_some_and(|id| tokenizer.is_special(id));
        text.skip_special_tokens &= !form.tags().any(is_special);
    }
    common.id.insert_str(0, "chatcmpl-");
    Ok(ChatRequest { prompt: ids, common })
}

pub(super) async fn chat_completions(
    State(state): State<ServeState>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request = read(&state, &headers, &parse_object(&body)?)?;
    let choices = Choices::submit(&state, std::slice::from_ref(&request.prompt), &request.common.sampling)?;
    let frame = Frame {
        state,
        id: request.common.id.clone(),
        created: unix_seconds(),
        model: request.common.model.clone(),
    };
    if request.common.is_stream {
        return Ok(stream_response(ChatStream::new(frame, request, choices)));
    }
    whole(&frame, &request, choices).await
}

/// Everything that one choice gave.
#[derive(Default)]
struct Collected {
    text: String,
    reasoning: String,
    calls: Vec<Call>,
    token_ids: Vec<u32>,
    logprobs: Vec<LogprobEntry>,
    finish: Option<Finish>,
}

impl Collected {
    fn add(&mut self, delta: Delta) {
        self.text.push_str(&delta.text);
        self.reasoning.push_str(&delta.reasoning);
        self.calls.extend(delta.calls);
        self.token_ids.extend(delta.token_ids);
        self.logprobs.extend(delta.logprobs);
        self.finish = delta.finish.or(self.finish.take());
    }
}

async fn whole(frame: &Frame, request: &ChatRequest, mut choices: Choices) -> Result<Response, ApiError> {
    let ChatRequest { common, prompt } = request;
    let mut states: Vec<(Choice, Collected)> =
        (0..common.sampling.n).map(|_| (Choice::new(common.text.clone()), Collected::default())).collect();
    let mut events = Vec::new();
    while let Some(index) = choices.next(&mut events).await {
        let (choice, collected) = &mut states[index];
        let mut delta = Delta::default();
        for event in events.drain(..) {
            choice.push(&frame.state.inner.tokenizer, event, &mut delta).map_err(ApiError::internal)?;
            if choice.is_finished {
                choices.end(index);
                break;
            }
        }
        collected.add(delta);
    }
    let completion_tokens = states.iter().map(|(choice, _)| choice.tokens).sum();
    let reply = ChatReply {
        id: &frame.id,
        object: "chat.completion",
        created: frame.created,
        model: &frame.model,
        choices: states.iter().enumerate().map(|(index, state)| chat_choice(index, state, common)).collect(),
        service_tier: (),
        system_fingerprint: frame.fingerprint(),
        usage: FullUsage {
            prompt_tokens: prompt.len(),
            total_tokens: prompt.len() + completion_tokens,
            completion_tokens,
            prompt_tokens_details: (),
            completion_tokens_details: (),
        },
        prompt_logprobs: (),
        prompt_token_ids: common.return_token_ids.then_some(prompt),
        prompt_text: (),
        kv_transfer_params: (),
        ec_transfer_params: (),
        metrics: (),
    };
    Ok(Json(reply).into_response())
}

fn chat_choice<'a>(index: usize, state: &'a (Choice, Collected), common: &Common) -> ChatChoice<'a> {
    let (choice, collected) = state;
    let is_content = !collected.text.is_empty() || collected.calls.is_empty();
    ChatChoice {
        index,
        message: Message {
            role: "assistant",
            content: is_content.then_some(&collected.text),
            refusal: (),
            annotations: (),
            audio: (),
            function_call: (),
            tool_calls: &collected.calls,
            reasoning: (!collected.reasoning.is_empty()).then_some(&collected.reasoning),
        },
        logprobs: common.text.logprobs.then_some(ChatLogprobs { content: &collected.logprobs }),
        finish_reason: collected.finish.as_ref().map_or("abort", |finish| finish.reason),
        stop_reason: collected.finish.as_ref().and_then(|finish| finish.stop_reason.as_ref()),
        token_ids: common.return_token_ids.then_some(&collected.token_ids),
        routed_experts: (),
        weight_versions: common.return_weight_versions.then_some(&choice.versions),
    }
}

/// A streamed reply.
struct ChatStream {
    frame: Frame,
    request: ChatRequest,
    choices: Choices,
    states: Vec<Choice>,
    events: Vec<Event>,
    has_begun: bool,
    is_done: bool,
}

impl ChatStream {
    fn new(frame: Frame, request: ChatRequest, choices: Choices) -> Self {
        let states =
            (0..request.common.sampling.n).map(|_| Choice::new(request.common.text.clone())).collect();
        Self { frame, request, choices, states, events: Vec::new(), has_begun: false, is_done: false }
    }

    fn chunk<'a>(&'a self, choices: &'a [ChatChunkChoice<'a>]) -> Chunk<'a, ChatChunkChoice<'a>> {
        Chunk {
            id: &self.frame.id,
            object: "chat.completion.chunk",
            created: self.frame.created,
            model: &self.frame.model,
            choices,
            usage: None,
            system_fingerprint: None,
            prompt_token_ids: None,
            prompt_text: None,
            kv_transfer_params: None,
        }
    }

    /// The usage so far when every chunk is to carry it.
    fn running_usage(&self) -> Option<Value> {
        self.request.common.continuous_usage.then(|| self.usage())
    }

    fn usage(&self) -> Value {
        usage(self.request.prompt.len(), self.states.iter().map(|choice| choice.tokens).sum())
    }

    /// One chunk a choice with its role, once the first token is there.
    fn write_roles(&self, out: &mut Vec<u8>) {
        for index in 0..self.states.len() {
            let choice = ChatChunkChoice {
                index,
                delta: ChatDelta { role: Some("assistant"), content: Some(""), ..ChatDelta::default() },
                logprobs: None,
                finish_reason: None,
                stop_reason: None,
                token_ids: None,
                weight_versions: None,
            };
            let usage = self.running_usage();
            let mut chunk = self.chunk(std::slice::from_ref(&choice));
            chunk.usage = usage.as_ref();
            chunk.prompt_token_ids =
                Some(self.request.common.return_token_ids.then_some(&self.request.prompt[..]));
            chunk.prompt_text = Some(());
            write_event(&chunk, out);
        }
    }

    fn write_delta(&self, index: usize, delta: &Delta, out: &mut Vec<u8>) {
        let common = &self.request.common;
        let is_last = delta.finish.is_some();
        let is_empty = delta.text.is_empty() && delta.reasoning.is_empty() && delta.calls.is_empty();
        if is_empty && !is_last && !common.return_token_ids && !common.text.logprobs {
            return;
        }
        // Markup leaves an empty delta, a partial character empty content.
        let hides_text =
            delta.text.is_empty() && (delta.was_parsed || self.states[index].parses_tool_calls());
        let choice = ChatChunkChoice {
            index,
            delta: ChatDelta {
                role: None,
                reasoning: (!delta.reasoning.is_empty()).then_some(&delta.reasoning),
                content: (!hides_text && (delta.calls.is_empty() || !delta.text.is_empty()))
                    .then_some(&delta.text),
                tool_calls: &delta.calls,
            },
            logprobs: common.text.logprobs.then_some(ChatLogprobs { content: &delta.logprobs }),
            finish_reason: delta.finish.as_ref().map(|finish| finish.reason),
            stop_reason: delta.finish.as_ref().map(|finish| finish.stop_reason.as_ref()),
            token_ids: Some(common.return_token_ids.then_some(&delta.token_ids[..])),
            weight_versions: (is_last && common.return_weight_versions)
                .then_some(&self.states[index].versions[..]),
        };
        let usage = self.running_usage();
        let mut chunk = self.chunk(std::slice::from_ref(&choice));
        chunk.usage = usage.as_ref();
        chunk.kv_transfer_params = Some(());
        write_event(&chunk, out);
    }

    fn write_end(&mut self, out: &mut Vec<u8>) {
        self.is_done = true;
        if self.request.common.include_usage {
            let usage = self.usage();
            let mut chunk = self.chunk(&[]);
            chunk.usage = Some(&usage);
            chunk.system_fingerprint = Some(self.frame.fingerprint());
            write_event(&chunk, out);
        }
        write_done(out);
    }
}

impl EventSource for ChatStream {
    async fn next(&mut self) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        while out.is_empty() && !self.is_done {
            let Some(index) = self.choices.next(&mut self.events).await else {
                self.write_end(&mut out);
                break;
            };
            if !self.has_begun {
                self.has_begun = true;
                self.write_roles(&mut out);
            }
            let mut delta = Delta::default();
            let mut failed = None;
            for event in self.events.drain(..) {
                let choice = &mut self.states[index];
                if let Err(reason) = choice.push(&self.frame.state.inner.tokenizer, event, &mut delta) {
                    failed = Some(reason);
                    break;
                }
                if choice.is_finished {
                    self.choices.end(index);
                    break;
                }
            }
            self.events.clear();
            if !delta.token_ids.is_empty() {
                self.write_delta(index, &delta, &mut out);
            }
            if let Some(reason) = failed {
                write_event(&ApiError::internal(reason).body(), &mut out);
                write_done(&mut out);
                self.is_done = true;
            }
        }
        (!out.is_empty()).then_some(out)
    }
}
