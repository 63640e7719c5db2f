//! Reply bodies, field for field in vLLM's order. An outer `None` is an absent key, an inner one is null.

use serde::ser::{SerializeSeq, SerializeStruct};
use serde::{Serialize, Serializer};

use super::choice::Call;
use crate::record::PolicyVersion;

/// Seconds since the Unix epoch.
pub(super) fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A token's text, sent as `token` and `bytes`.
#[derive(Debug, Clone)]
pub(super) struct TokenText(pub String);

impl TokenText {
    pub fn new(text: String) -> Self {
        Self(text)
    }
}

/// One of the likeliest tokens.
#[derive(Debug, Clone)]
pub(super) struct TopLogprob {
    pub token: TokenText,
    pub logprob: f64,
}

impl Serialize for TopLogprob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut entry = serializer.serialize_struct("TopLogprob", 3)?;
        entry.serialize_field("token", &self.token.0)?;
        entry.serialize_field("logprob", &self.logprob)?;
        entry.serialize_field("bytes", self.token.0.as_bytes())?;
        entry.end()
    }
}

/// A sampled token in `logprobs.content`.
#[derive(Debug, Clone)]
pub(super) struct LogprobEntry {
    pub token: TokenText,
    pub logprob: f64,
    pub top_logprobs: Vec<TopLogprob>,
}

impl Serialize for LogprobEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut entry = serializer.serialize_struct("LogprobEntry", 4)?;
        entry.serialize_field("token", &self.token.0)?;
        entry.serialize_field("logprob", &self.logprob)?;
        entry.serialize_field("bytes", self.token.0.as_bytes())?;
        entry.serialize_field("top_logprobs", &self.top_logprobs)?;
        entry.end()
    }
}

/// `logprobs` of a chat choice.
#[derive(Debug, Serialize)]
pub(super) struct ChatLogprobs<'a> {
    pub content: &'a [LogprobEntry],
}

/// What stopped a choice: a stop string or a stop token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(super) enum StopReason {
    Text(String),
    Token(u32),
}

/// A span of completion tokens sampled by one version of the weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct WeightVersion {
    pub version: String,
    #[serde(skip)]
    pub number: PolicyVersion,
    pub start: usize,
    pub end: usize,
}

/// `delta` of a chat chunk.
#[derive(Debug, Default, Serialize)]
pub(super) struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty", serialize_with = "tool_calls_with_index")]
    pub tool_calls: &'a [Call],
}

#[derive(Serialize)]
struct WireFunction<'a> {
    name: &'a str,
    arguments: &'a str,
}

#[derive(Serialize)]
struct WireCall<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    id: &'a str,
    r#type: &'static str,
    function: WireFunction<'a>,
}

fn wire_call(call: &Call, with_index: bool) -> WireCall<'_> {
    WireCall {
        index: with_index.then_some(call.index),
        id: &call.id,
        r#type: "function",
        function: WireFunction { name: &call.name, arguments: &call.arguments },
    }
}

fn serialize_calls<S: Serializer>(
    calls: &[Call],
    with_index: bool,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let mut list = serializer.serialize_seq(Some(calls.len()))?;
    for call in calls {
        list.serialize_element(&wire_call(call, with_index))?;
    }
    list.end()
}

fn tool_calls_with_index<S: Serializer>(calls: &[Call], serializer: S) -> Result<S::Ok, S::Error> {
    serialize_calls(calls, true, serializer)
}

fn tool_calls<S: Serializer>(calls: &[Call], serializer: S) -> Result<S::Ok, S::Error> {
    serialize_calls(calls, false, serializer)
}

/// A choice of a chat chunk.
#[derive(Debug, Serialize)]
pub(super) struct ChatChunkChoice<'a> {
    pub index: usize,
    pub delta: ChatDelta<'a>,
    pub logprobs: Option<ChatLogprobs<'a>>,
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<Option<&'a StopReason>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Option<&'a [u32]>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_versions: Option<&'a [WeightVersion]>,
}

/// A chunk of a streamed reply, chat or completions.
#[derive(Debug, Serialize)]
pub(super) struct Chunk<'a, C> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<&'a serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_fingerprint: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Option<&'a [u32]>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_text: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_transfer_params: Option<()>,
}

/// The message of a whole chat reply.
#[derive(Debug, Serialize)]
pub(super) struct Message<'a> {
    pub role: &'static str,
    pub content: Option<&'a str>,
    pub refusal: (),
    pub annotations: (),
    pub audio: (),
    pub function_call: (),
    #[serde(skip_serializing_if = "<[_]>::is_empty", serialize_with = "tool_calls")]
    pub tool_calls: &'a [Call],
    pub reasoning: Option<&'a str>,
}

/// A choice of a whole chat reply.
#[derive(Debug, Serialize)]
pub(super) struct ChatChoice<'a> {
    pub index: usize,
    pub message: Message<'a>,
    pub logprobs: Option<ChatLogprobs<'a>>,
    pub finish_reason: &'static str,
    pub stop_reason: Option<&'a StopReason>,
    pub token_ids: Option<&'a [u32]>,
    pub routed_experts: (),
    pub weight_versions: Option<&'a [WeightVersion]>,
}

/// `usage` of a whole reply.
#[derive(Debug, Serialize)]
pub(super) struct FullUsage {
    pub prompt_tokens: usize,
    pub total_tokens: usize,
    pub completion_tokens: usize,
    pub prompt_tokens_details: (),
    pub completion_tokens_details: (),
}

/// A whole chat reply.
#[derive(Debug, Serialize)]
pub(super) struct ChatReply<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub choices: Vec<ChatChoice<'a>>,
    pub service_tier: (),
    pub system_fingerprint: &'a str,
    pub usage: FullUsage,
    pub prompt_logprobs: (),
    pub prompt_token_ids: Option<&'a [u32]>,
    pub prompt_text: (),
    pub kv_transfer_params: (),
    pub ec_transfer_params: (),
    pub metrics: (),
}

/// `logprobs` of a completions choice.
#[derive(Debug, Default, Serialize)]
pub(super) struct CompletionLogprobs {
    pub text_offset: Vec<usize>,
    pub token_logprobs: Vec<f64>,
    pub tokens: Vec<String>,
    pub top_logprobs: Vec<serde_json::Map<String, serde_json::Value>>,
}

/// A choice of a completions chunk.
#[derive(Debug, Serialize)]
pub(super) struct CompletionChunkChoice<'a> {
    pub index: usize,
    pub text: &'a str,
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<&'a StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    pub token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_versions: Option<&'a [WeightVersion]>,
}

/// A choice of a whole completions reply.
#[derive(Debug, Serialize)]
pub(super) struct CompletionChoice<'a> {
    pub index: usize,
    pub text: &'a str,
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: &'static str,
    pub stop_reason: Option<&'a StopReason>,
    pub token_ids: Option<&'a [u32]>,
    pub prompt_logprobs: (),
    pub prompt_token_ids: Option<&'a [u32]>,
    pub routed_experts: (),
    pub weight_versions: Option<&'a [WeightVersion]>,
}

/// A whole completions reply.
#[derive(Debug, Serialize)]
pub(super) struct CompletionReply<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub choices: Vec<CompletionChoice<'a>>,
    pub service_tier: (),
    pub system_fingerprint: &'a str,
    pub usage: FullUsage,
    pub kv_transfer_params: (),
}
