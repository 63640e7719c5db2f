//! `POST /v1/completions`: text or token ids in.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::ServeState;
use super::choice::{Choice, Delta, Finish, usage};
use super::error::ApiError;
use super::events::{Choices, EventSource, Frame, stream_response, write_done, write_event};
use super::request::{Common, Logprobs, parse_object};
use super::wire::{
    Chunk, CompletionChoice, CompletionChunkChoice, CompletionLogprobs, CompletionReply, FullUsage,
    LogprobEntry, unix_seconds,
};
use crate::engine::Event;
use crate::text::Tokenizer;

/// vLLM's and OpenAI's default where it is left out. Null is all that there is room for, as in vLLM.
const DEFAULT_MAX_TOKENS: u64 = 16;

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<u32>>),
}

impl Prompt {
    fn encode(self, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>, ApiError> {
        let prompts = match self {
            Self::Text(text) => vec![tokenizer.encode(&text)?],
            Self::Ids(ids) => vec![ids],
            Self::Texts(texts) => {
                texts.iter().map(|text| tokenizer.encode(text)).collect::<Result<_, _>>()?
            }
            Self::Lists(lists) => lists,
        };
        if prompts.is_empty() {
            return Err(ApiError::bad_field("prompt", "prompt is an empty list; give at least one prompt"));
        }
        Ok(prompts)
    }
}

struct CompletionRequest {
    common: Common,
    prompts: Vec<Vec<u32>>,
}

impl CompletionRequest {
    fn prompt_of(&self, choice: usize) -> &[u32] {
        &self.prompts[choice / self.common.sampling.n]
    }

    fn choices(&self) -> usize {
        self.prompts.len() * self.common.sampling.n
    }

    fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(Vec::len).sum()
    }
}

fn read(state: &ServeState, headers: &HeaderMap, body: &Value) -> Result<CompletionRequest, ApiError> {
    let logprobs = Logprobs::of_completion(body)?;
    let mut common = Common::read(state, headers, body, logprobs, None)?;
    if body.get("max_tokens").is_none() {
        common.sampling.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS as usize);
    }
    common.id.insert_str(0, "cmpl-");
    let prompt = body.get("prompt").cloned().unwrap_or_default();
    let prompt: Prompt = serde_json::from_value(prompt).map_err(|_| {
        ApiError::bad_field("prompt", "prompt must be a text, a list of token ids, or a list of either")
    })?;
    let prompts = prompt.encode(&state.inner.tokenizer)?;
    Ok(CompletionRequest { common, prompts })
}

pub(super) async fn completions(
    State(state): State<ServeState>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request = read(&state, &headers, &parse_object(&body)?)?;
    let choices = Choices::submit(&state, &request.prompts, &request.common.sampling)?;
    let frame = Frame {
        state,
        id: request.common.id.clone(),
        created: unix_seconds(),
        model: request.common.model.clone(),
    };
    if request.common.is_stream {
        return Ok(stream_response(CompletionStream::new(frame, request, choices)));
    }
    whole(&frame, &request, choices).await
}

/// Log-probs in the form of the completions API; `offset` is the length of the text so far, in characters.
fn completion_logprobs(entries: &[LogprobEntry], offset: &mut usize) -> CompletionLogprobs {
    let mut logprobs = CompletionLogprobs::default();
    for entry in entries {
        logprobs.text_offset.push(*offset);
        *offset += entry.token.0.chars().count();
        logprobs.token_logprobs.push(entry.logprob);
        logprobs.tokens.push(entry.token.0.clone());
        let mut top = Map::new();
        top.insert(entry.token.0.clone(), Value::from(entry.logprob));
        for other in &entry.top_logprobs {
            top.entry(other.token.0.clone()).or_insert_with(|| Value::from(other.logprob));
        }
        logprobs.top_logprobs.push(top);
    }
    logprobs
}

#[derive(Default)]
struct Collected {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<LogprobEntry>,
    finish: Option<Finish>,
}

async fn whole(
    frame: &Frame,
    request: &CompletionRequest,
    mut choices: Choices,
) -> Result<Response, ApiError> {
    let common = &request.common;
    let mut states: Vec<(Choice, Collected)> =
        (0..request.choices()).map(|_| (Choice::new(common.text.clone()), Collected::default())).collect();
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
        collected.text.push_str(&delta.text);
        collected.token_ids.extend(delta.token_ids);
        collected.logprobs.extend(delta.logprobs);
        collected.finish = delta.finish.or(collected.finish.take());
    }
    let completion_tokens = states.iter().map(|(choice, _)| choice.tokens).sum();
    let choices = states
        .iter()
        .enumerate()
        .map(|(index, (choice, collected))| CompletionChoice {
            index,
            text: &collected.text,
            logprobs: common.text.logprobs.then(|| completion_logprobs(&collected.logprobs, &mut 0)),
            finish_reason: collected.finish.as_ref().map_or("abort", |finish| finish.reason),
            stop_reason: collected.finish.as_ref().and_then(|finish| finish.stop_reason.as_ref()),
            token_ids: common.return_token_ids.then_some(&collected.token_ids),
            prompt_logprobs: (),
            prompt_token_ids: common.return_token_ids.then(|| request.prompt_of(index)),
            routed_experts: (),
            weight_versions: common.return_weight_versions.then_some(&choice.versions),
        })
        .collect();
    let reply = CompletionReply {
        id: &frame.id,
        object: "text_completion",
        created: frame.created,
        model: &frame.model,
        choices,
        service_tier: (),
        system_fingerprint: frame.fingerprint(),
        usage: FullUsage {
            prompt_tokens: request.prompt_tokens(),
            total_tokens: request.prompt_tokens() + completion_tokens,
            completion_tokens,
            prompt_tokens_details: (),
            completion_tokens_details: (),
        },
        kv_transfer_params: (),
    };
    Ok(Json(reply).into_response())
}

struct CompletionStream {
    frame: Frame,
    request: CompletionRequest,
    choices: Choices,
    /// Each choice, the length of its text in characters, and whether its first chunk was sent.
    states: Vec<(Choice, usize, bool)>,
    events: Vec<Event>,
    is_done: bool,
}

impl CompletionStream {
    fn new(frame: Frame, request: CompletionRequest, choices: Choices) -> Self {
        let states =
            (0..request.choices()).map(|_| (Choice::new(request.common.text.clone()), 0, false)).collect();
        Self { frame, request, choices, states, events: Vec::new(), is_done: false }
    }

    fn usage(&self) -> Value {
        usage(self.request.prompt_tokens(), self.states.iter().map(|(choice, ..)| choice.tokens).sum())
    }

    fn chunk<'a>(&'a self, choices: &'a [CompletionChunkChoice<'a>]) -> Chunk<'a, CompletionChunkChoice<'a>> {
        Chunk {
            id: &self.frame.id,
            object: "text_completion",
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

    fn write_delta(&mut self, index: usize, delta: &Delta, out: &mut Vec<u8>) {
        let (_, offset, has_begun) = &mut self.states[index];
        let logprobs =
            self.request.common.text.logprobs.then(|| completion_logprobs(&delta.logprobs, offset));
        let is_first = !std::mem::replace(has_begun, true);
        let common = &self.request.common;
        let choice = CompletionChunkChoice {
            index,
            text: &delta.text,
            logprobs,
            finish_reason: delta.finish.as_ref().map(|finish| finish.reason),
            stop_reason: delta.finish.as_ref().and_then(|finish| finish.stop_reason.as_ref()),
            prompt_token_ids: (is_first && common.return_token_ids).then(|| self.request.prompt_of(index)),
            token_ids: common.return_token_ids.then_some(&delta.token_ids),
            weight_versions: (delta.finish.is_some() && common.return_weight_versions)
                .then_some(&self.states[index].0.versions[..]),
        };
        let usage = common.continuous_usage.then(|| self.usage());
        let mut chunk = self.chunk(std::slice::from_ref(&choice));
        chunk.usage = usage.as_ref();
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

impl EventSource for CompletionStream {
    async fn next(&mut self) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        while out.is_empty() && !self.is_done {
            let Some(index) = self.choices.next(&mut self.events).await else {
                self.write_end(&mut out);
                break;
            };
            let mut delta = Delta::default();
            let mut failed = None;
            for event in self.events.drain(..) {
                let choice = &mut self.states[index].0;
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
