//! What the writer reads of a chat reply: less than the capture does, from the same bytes and by the same rules.

use serde::Deserialize;
use serde_json::Value;

use crate::protocol::chat::{Fragment, ReplyUsage};
use crate::protocol::json;
use crate::protocol::translate::Untranslatable;

/// A chunk or a whole reply.
#[derive(Debug, Deserialize)]
pub(super) struct View {
    choices: Option<Vec<ChoiceView>>,
    usage: Option<UsageView>,
}

/// A choice.
#[derive(Debug, Deserialize)]
pub(super) struct ChoiceView {
    index: Option<u64>,
    delta: Option<DeltaView>,
    message: Option<DeltaView>,
    finish_reason: Option<String>,
    /// vLLM: the stop string that matched, or a token's id.
    stop_reason: Option<Value>,
    /// The same in SGLang.
    matched_stop: Option<Value>,
}

/// What a choice says.
#[derive(Debug, Default, Deserialize)]
pub(super) struct DeltaView {
    content: Option<String>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    refusal: Option<String>,
    pub tool_calls: Option<Vec<Fragment>>,
}

#[derive(Debug, Deserialize)]
struct UsageView {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Debug, Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

impl View {
    /// Reads a copy in which numbers that JSON has not are null.
    pub fn read(data: &[u8]) -> Result<Self, Untranslatable> {
        let view = match serde_json::from_slice::<Self>(data) {
            Ok(view) => view,
            Err(error) => match json::without_bad_numbers(data) {
                Some(clean) => {
                    serde_json::from_slice(&clean).map_err(|error| Untranslatable(error.to_string()))?
                }
                None => return Err(Untranslatable(error.to_string())),
            },
        };
        let is_other = |choice: &ChoiceView| choice.index.unwrap_or(0) != 0;
        if view.choices.iter().flatten().any(is_other) {
            return Err(Untranslatable("it has several choices, which Messages has not".to_owned()));
        }
        Ok(view)
    }

    pub fn usage(&self) -> Option<ReplyUsage> {
        let usage = self.usage.as_ref()?;
        Some(ReplyUsage {
            prompt_tokens: usage.prompt_tokens?,
            completion_tokens: usage.completion_tokens?,
            cached_tokens: usage.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens),
            reasoning_tokens: None,
        })
    }

    pub fn into_choices(self) -> Vec<ChoiceView> {
        self.choices.unwrap_or_default()
    }
}

impl ChoiceView {
    pub fn finish_reason(&self) -> Option<&str> {
        self.finish_reason.as_deref().filter(|reason| !reason.is_empty())
    }

    /// The stop string that ended the choice.
    pub fn matched(&self) -> Option<&str> {
        let stop = self.stop_reason.as_ref().and_then(Value::as_str);
        stop.or_else(|| self.matched_stop.as_ref().and_then(Value::as_str)).filter(|text| !text.is_empty())
    }

    pub fn into_delta(self) -> DeltaView {
        self.delta.or(self.message).unwrap_or_default()
    }
}

impl DeltaView {
    pub fn text(&self) -> &str {
        self.content.as_deref().unwrap_or_default()
    }

    pub fn reasoning(&self) -> &str {
        // As the capture reads it: an empty `reasoning` does not hide the other.
        let reasoning = self.reasoning.as_deref().filter(|text| !text.is_empty());
        reasoning.or(self.reasoning_content.as_deref()).unwrap_or_default()
    }

    /// The text of a refusal, which hosted upstreams keep apart.
    pub fn refusal(&self) -> &str {
        self.refusal.as_deref().unwrap_or_default()
    }
}
