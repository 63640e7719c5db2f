//! What goes into the engine and what comes out.

use std::sync::Arc;

use super::EngineError;
use crate::config::MAX_THREADS;
use crate::model::Model;
use crate::record::PolicyVersion;

/// Sizes and modes of an engine.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Requests that run at once.
    pub max_batch: usize,
    /// Tokens of prompt and completion together.
    pub max_context: usize,
    /// Sequences whose keys and values are kept, running ones included. Memory is used as tokens arrive.
    pub cache_slots: usize,
    /// Requests that may wait.
    pub max_queue: usize,
    /// Prompt tokens read per step, over all requests.
    pub prefill_chunk: usize,
    /// Threads for the arithmetic, the engine's own included.
    pub threads: usize,
    /// Whether a prompt takes over the keys and values of an earlier one that begins the same way.
    pub reuse_prefixes: bool,
    /// Which log-probs are given.
    pub logprobs_mode: LogprobsMode,
    /// Version of the model that the engine starts with.
    pub first_version: PolicyVersion,
}

impl EngineOptions {
    /// Defaults for `model`: its whole context, 64 requests at once, all of the machine's threads.
    #[must_use]
    pub fn for_model(model: &Model) -> Self {
        let max_batch = 64;
        Self {
            max_batch,
            max_context: model.config().max_position_embeddings,
            cache_slots: 2 * max_batch,
            max_queue: 1024,
            prefill_chunk: 512,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            reuse_prefixes: true,
            logprobs_mode: LogprobsMode::Raw,
            first_version: PolicyVersion(0),
        }
    }

    pub(super) fn check(&self, model: &Model) -> Result<(), EngineError> {
        let positions = model.config().max_position_embeddings;
        let refuse = |name, value, remedy: String| Err(EngineError::Option { name, value, remedy });
        if self.max_context == 0 || self.max_context > positions {
            let remedy = format!("the model has {positions} positions; give 1 to {positions}");
            return refuse("max_context", self.max_context, remedy);
        }
        for (name, value) in [
            ("max_batch", self.max_batch),
            ("max_queue", self.max_queue),
            ("prefill_chunk", self.prefill_chunk),
            ("threads", self.threads),
        ] {
            if value == 0 {
                return refuse(name, value, "give 1 or more".to_owned());
            }
        }
        if self.threads > MAX_THREADS {
            let remedy = format!("give 1 to {MAX_THREADS}: the number of cores");
            return refuse("threads", self.threads, remedy);
        }
        if self.cache_slots < self.max_batch {
            let remedy = format!("give at least max_batch = {}", self.max_batch);
            return refuse("cache_slots", self.cache_slots, remedy);
        }
        Ok(())
    }
}

/// Which distribution log-probs are of, as vLLM's `--logprobs-mode`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogprobsMode {
    /// log-softmax of the logits, before temperature and truncation.
    #[default]
    Raw,
    /// The distribution sampled from: after temperature, top-k and top-p. At temperature 0 as [`LogprobsMode::Raw`].
    Processed,
}

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    /// Logits are divided by it; 0 takes the likeliest token.
    pub temperature: f32,
    /// Smallest set of the likeliest tokens whose probabilities reach this; 1 is off.
    pub top_p: f32,
    /// Number of the likeliest tokens kept; 0 is off.
    pub top_k: usize,
    /// Same seed and prompt: same tokens.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, seed: 0 }
    }
}

/// One completion to sample.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
    pub prompt: Vec<u32>,
    pub sampling: SamplingParams,
    /// Sampled at most; at least 1.
    pub max_tokens: usize,
    /// Ids that end the completion; the id itself is given as its last token.
    pub stop_token_ids: Vec<u32>,
    /// Log-probs of this many of the likeliest tokens are given beside the sampled one's.
    pub top_logprobs: usize,
}

impl GenerateRequest {
    pub(super) fn check(&self, options: &EngineOptions, vocab_size: usize) -> Result<(), EngineError> {
        let (prompt_tokens, max_context) = (self.prompt.len(), options.max_context);
        if prompt_tokens == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if prompt_tokens >= max_context {
            return Err(EngineError::PromptTooLong { prompt_tokens, max_context });
        }
        if self.max_tokens > max_context - prompt_tokens {
            return Err(EngineError::ContextExceeded {
                prompt_tokens,
                max_tokens: self.max_tokens,
                max_context,
            });
        }
        if let Some(&token) = self.prompt.iter().find(|&&token| token as usize >= vocab_size) {
            return Err(EngineError::TokenOutOfRange { token, vocab_size });
        }
        let refuse = |name, value: String, remedy| Err(EngineError::Sampling { name, value, remedy });
        let SamplingParams { temperature, top_p, .. } = self.sampling;
        if self.max_tokens == 0 {
            return refuse("max_tokens", "0".to_owned(), "give 1 or more");
        }
        if !(temperature.is_finite() && temperature >= 0.0) {
            return refuse("temperature", temperature.to_string(), "give 0 or more");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return refuse("top_p", top_p.to_string(), "give more than 0 and at most 1");
        }
        Ok(())
    }
}

/// One sampled token.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledToken {
    pub id: u32,
    /// Of [`EngineOptions::logprobs_mode`].
    pub logprob: f32,
    /// The weights that it was sampled from.
    pub version: PolicyVersion,
    /// The likeliest tokens and their log-probs, likeliest first; as many as the request asked for.
    pub top_logprobs: Vec<(u32, f32)>,
}

/// What a request's receiver gets.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The next token.
    Token(SampledToken),
    /// The last token, and why it is the last. Nothing follows.
    Last(SampledToken, FinishReason),
    /// The request could not go on. Nothing follows.
    Aborted(Arc<str>),
}

/// Why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// This stop token was sampled.
    Stop(u32),
    /// `max_tokens` were sampled.
    Length,
}

/// Counters since the engine started, and what it does now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Requests that run.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Steps of the model.
    pub steps: u64,
    /// Prompt tokens that were read.
    pub prefill_tokens: u64,
    /// Prompt tokens whose keys and values were taken over instead.
    pub reused_tokens: u64,
    /// Tokens sampled.
    pub sampled_tokens: u64,
}
