//! A completions request as lego needs it: a few members are read, all others stay bytes.

use bytes::Bytes;
use serde_json::Value;

use crate::protocol::body::{Body, BodyError};
use crate::protocol::json;

/// Why a body is not a completions request.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error("the request body has no `model` string")]
    NoModel,
    #[error(
        "the request body's `prompt` must be a text, a list of token ids, or a list of one or more of either"
    )]
    NoPrompt,
}

/// A prompt to go on from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    TokenIds(Vec<u32>),
}

/// A completions request: its bytes, and what lego reads of them.
#[derive(Debug, Clone)]
pub struct Request {
    body: Body,
    /// Name of the model that the client asks for.
    pub model: String,
    pub is_stream: bool,
    /// Number of choices asked for, of each prompt.
    pub n: u64,
    /// At least one, in order.
    pub prompts: Vec<Prompt>,
    /// `stream_options.include_usage` is true.
    pub asks_usage: bool,
    /// `return_token_ids` is true.
    pub asks_token_ids: bool,
    /// `logprobs` is a number (0 asks for the sampled token's own).
    pub asks_logprobs: bool,
    /// `return_weight_versions` is true.
    pub asks_weight_versions: bool,
    /// `echo` is true: the reply's text and log-probs begin with the prompt's, so that they do not belong to the
    /// sampled ids alone.
    pub asks_echo: bool,
    /// Something else than the policy's own distribution decides tokens: a grammar.
    pub is_constrained: bool,
}

impl Request {
    /// Reads a body.
    ///
    /// # Errors
    /// [`RequestError`] says what is wrong with it.
    pub fn parse(body: Bytes) -> Result<Self, RequestError> {
        let body = Body::parse(body)?;
        let Some(Value::String(model)) = body.get("model") else {
            return Err(RequestError::NoModel);
        };
        let prompts = body.raw("prompt").and_then(prompts).ok_or(RequestError::NoPrompt)?;
        Ok(Self {
            model,
            is_stream: body.is_true("stream"),
            n: body.get("n").and_then(|n| n.as_u64()).unwrap_or(1),
            prompts,
            asks_usage: body.asks_usage(),
            asks_token_ids: body.is_true("return_token_ids"),
            asks_logprobs: body.get("logprobs").is_some_and(|logprobs| logprobs != Value::Bool(false)),
            asks_weight_versions: body.is_true("return_weight_versions"),
            asks_echo: body.is_true("echo"),
            is_constrained: body.has_grammar(),
            body,
        })
    }

    /// The body as it came.
    #[must_use]
    pub const fn body(&self) -> &Bytes {
        self.body.text()
    }

    /// The body, to be read further.
    #[must_use]
    pub(crate) const fn object(&self) -> &Body {
        &self.body
    }

    /// The value of a top-level member; `None` if it is absent or null.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Value> {
        self.body.get(name)
    }

    /// True if the body has the member, null or not.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.body.raw(name).is_some()
    }

    /// Number of choices that the reply has: `n` of each prompt.
    #[must_use]
    pub fn choices(&self) -> u64 {
        self.n.saturating_mul(self.prompts.len() as u64)
    }

    /// The prompt of a choice; `None` if the request has no such choice.
    #[must_use]
    pub fn prompt_of(&self, choice: u16) -> Option<&Prompt> {
        let prompt = u64::from(choice).checked_div(self.n)?;
        self.prompts.get(usize::try_from(prompt).ok()?)
    }

    /// The body with members set and removed: [`Body::edited`].
    ///
    /// # Errors
    /// As of [`Body::edited`].
    pub fn edited(&self, set: &[(&str, String)], remove: &[&str]) -> Result<Bytes, json::ScanError> {
        self.body.edited(set, remove)
    }
}

/// One prompt or a list of them, as JSON; `None` if it is neither.
#[must_use]
pub fn prompts(raw: &[u8]) -> Option<Vec<Prompt>> {
    if !raw.starts_with(b"[") {
        return serde_json::from_slice(raw).ok().map(|text| vec![Prompt::Text(text)]);
    }
    let first = raw.get(json::skip_space(raw, 1))?;
    if !matches!(first, b'"' | b'[') {
        // An empty list is no prompt, and ends here as no list of ids either.
        let ids: Vec<u32> = serde_json::from_slice(raw).ok()?;
        return (!ids.is_empty()).then(|| vec![Prompt::TokenIds(ids)]);
    }
    let one = |span: std::ops::Range<usize>| {
        let text = &raw[span];
        if text.starts_with(b"[") {
            serde_json::from_slice(text).ok().map(Prompt::TokenIds)
        } else {
            serde_json::from_slice(text).ok().map(Prompt::Text)
        }
    };
    json::elements(raw, 0).ok()?.into_iter().map(one).collect()
}
