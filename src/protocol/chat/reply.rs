//! A chat or completions reply put together from a parsed copy of a body or of a stream's events.

use std::collections::BTreeMap;

use serde_json::Value;
use serde_json::value::RawValue;

use super::mold::Found;
use super::tools::{self, Fragment, ToolCall};
use super::view::{
    ChoiceView, Entry, Few, LogprobsView, MetaView, MetadataView, SglextView, Text, View, label, lenient,
    pairs, raw_text, spans, stop_match,
};
use crate::protocol::json;

/// A copy could not be read. The original bytes are forwarded all the same.
#[derive(Debug, thiserror::Error)]
#[error("the upstream's reply could not be read: {0}")]
pub struct ReplyError(#[from] serde_json::Error);

/// Token counts as reported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplyUsage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub cached_tokens: Option<u64>,
    pub reasoning_tokens: Option<u64>,
}

/// Completion tokens `[start, end)` were sampled by the weights labelled `version`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionSpan {
    pub version: String,
    pub start: u32,
    pub end: u32,
}

/// Where a choice's token ids were found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum IdsFrom {
    /// In a member of their own.
    #[default]
    Engine,
    /// In the log-probs, each id in the place of its token's text (`token_id:7`).
    TokenStrings,
}

/// What of the output ended it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopMatch {
    Token(u32),
    Text(String),
}

/// One choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Choice {
    pub text: String,
    pub reasoning: String,
    /// What the model said instead of an answer, where the upstream tells it apart.
    pub refusal: String,
    pub tool_calls: Vec<ToolCall>,
    /// Ids of this choice's own prompt, where they come with the choice (completions).
    pub prompt_token_ids: Option<Vec<u32>>,
    /// `None`: no part of the reply had ids.
    pub token_ids: Option<Vec<u32>>,
    pub ids_from: IdsFrom,
    /// `None`: no part of the reply had log-probs. An element is `None` where the engine gave no usable number.
    pub logprobs: Option<Vec<Option<f32>>>,
    /// The last one that was neither null nor empty.
    pub finish_reason: Option<String>,
    /// vLLM's `stop_reason`, SGLang's `matched_stop`.
    pub stop_match: Option<StopMatch>,
    pub weight_versions: Option<Vec<VersionSpan>>,
    /// The one label that the engine gave this choice's weights.
    pub weight_version: Option<String>,
    /// Expert routing as the engine sent it: base64, or the JSON of what else it was.
    pub routed_experts: Option<String>,
    /// Position of its first row, where the reply says it.
    pub routing_start: Option<u64>,
}

/// What one event did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fed {
    /// A choice got its finish reason: a client may act now.
    pub has_finish: bool,
    pub has_error: bool,
    /// All of it was read as JSON, as it is. False also where nobody looked.
    pub is_json: bool,
}

/// A reply so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reply {
    pub id: Option<String>,
    pub created: Option<u64>,
    pub model: Option<String>,
    pub prompt_token_ids: Option<Vec<u32>>,
    pub choices: BTreeMap<u16, Choice>,
    pub usage: Option<ReplyUsage>,
    /// The one label that the engine gave the weights of the whole reply.
    pub weight_version: Option<String>,
    /// Message of the first error in the reply.
    pub error: Option<String>,
}

impl Reply {
    /// Adds a stream's event, or a whole body.
    ///
    /// # Errors
    /// [`ReplyError`] when it is not a chat reply; nothing was added.
    pub fn feed(&mut self, data: &[u8]) -> Result<Fed, ReplyError> {
        // Text is looked at once, instead of each string by itself.
        let read = match simdutf8::basic::from_utf8(data) {
            Ok(text) => serde_json::from_str::<View>(text),
            Err(_) => serde_json::from_slice::<View>(data),
        };
        match read {
            Ok(view) => Ok(Fed { is_json: true, ..self.add(view) }),
            // Engines print NaN and -Infinity, which JSON has not: read a copy that has null there.
            Err(error) => match json::without_bad_numbers(data) {
                Some(clean) => Ok(self.add(serde_json::from_slice::<View>(&clean)?)),
                None => Err(error.into()),
            },
        }
    }

    /// The prompt's ids of a choice, when every prompt has `n` choices: the choice's own, those of another choice of
    /// the same prompt, or those of the reply.
    #[must_use]
    pub fn prompt_ids_of(&self, choice: u16, n: u64) -> Option<&[u32]> {
        let first = u64::from(choice).checked_div(n)?.saturating_mul(n);
        let end = first.saturating_add(n);
        let own = self.choices.get(&choice).and_then(|choice| choice.prompt_token_ids.as_deref());
        let of_sibling = || {
            let is_sibling = |index: u16| (first..end).contains(&u64::from(index));
            let mut siblings = self.choices.iter().filter(|(index, _)| is_sibling(**index));
            siblings.find_map(|(_, sibling)| sibling.prompt_token_ids.as_deref())
        };
        own.or_else(of_sibling).or(self.prompt_token_ids.as_deref())
    }

    /// True once `asked` choices have their finish reason.
    #[must_use]
    pub fn is_finished(&self, asked: u64) -> bool {
        let finished = self.choices.values().filter(|choice| choice.finish_reason.is_some()).count();
        finished > 0 && finished as u64 >= asked && finished == self.choices.len()
    }

    /// Why a choice ended that ended by nothing of the model's own: the engine gave it up.
    #[must_use]
    pub fn aborted(&self) -> Option<String> {
        let aborted = self.choices.values().find(|choice| choice.is_aborted())?;
        let reason = aborted.finish_reason.as_deref().unwrap_or_default();
        Some(format!("the upstream gave this reply up: finish_reason \"{reason}\""))
    }

    fn add(&mut self, view: View<'_>) -> Fed {
        let mut fed = Fed::default();
        if let Some(error) = view.error {
            fed.has_error = true;
            self.error.get_or_insert_with(|| error_message(error));
        }
        self.id = self.id.take().or_else(|| view.id.map(Text::into_owned));
        self.created = self.created.or(view.created);
        self.model = self.model.take().or_else(|| view.model.map(Text::into_owned));
        if self.prompt_token_ids.is_none() {
            self.prompt_token_ids = view.prompt_token_ids;
        }
        if let Some(usage) = view.usage {
            // A count that is not told is no count of 0.
            let counts = usage.prompt_tokens.zip(usage.completion_tokens);
            self.usage = counts.map(|(prompt_tokens, completion_tokens)| ReplyUsage {
                prompt_tokens,
                completion_tokens,
                cached_tokens: usage.prompt_tokens_details.and_then(|details| details.cached_tokens),
                reasoning_tokens: usage
                    .completion_tokens_details
                    .and_then(|details| details.reasoning_tokens)
                    .or(usage.reasoning_tokens),
            });
        }
        let choices = view.choices.unwrap_or_default();
        let is_only_choice = choices.len() == 1;
        for mut choice in choices {
            let index = choice.index.unwrap_or(0);
            let is_chat = choice.text.is_none();
            if is_chat && self.prompt_token_ids.is_none() {
                self.prompt_token_ids = choice.prompt_token_ids.take();
            }
            let known = self.choices.entry(index).or_default();
            // In completions each choice may have a prompt of its own.
            if !is_chat && known.prompt_token_ids.is_none() {
                known.prompt_token_ids = choice.prompt_token_ids.take();
            }
            fed.has_finish |= known.add(choice);
        }
        if let Some(metadata) = lenient::<MetadataView>(view.metadata) {
            self.weight_version = self.weight_version.take().or(metadata.weight_version.and_then(label));
            // The spans of one output: with several choices nobody says whose.
            if is_only_choice
                && self.choices.len() == 1
                && let Some(choice) = self.choices.values_mut().next()
                && choice.weight_versions.is_none()
            {
                choice.weight_versions = metadata.weight_versions.map(spans);
            }
        }
        let sglext = lenient::<SglextView<'_>>(view.sglext);
        let sglext = sglext.or_else(|| {
            // As an event of its own (`sglext_ids`) it has no envelope.
            let (input_ids, output_ids) = (lenient(view.input_ids), Some(lenient(view.output_ids)?));
            Some(SglextView { input_ids, output_ids, routed_experts: None })
        });
        if let Some(sglext) = sglext {
            self.add_sglext(sglext);
        }
        fed
    }

    /// Adds what an event brought that told nothing else.
    pub(super) fn add_found(&mut self, found: Found<'_>) {
        let choice = self.choices.entry(found.index).or_default();
        choice.text.push_str(&found.text);
        let reasoning = if found.reasoning.is_empty() { &found.reasoning_content } else { &found.reasoning };
        choice.reasoning.push_str(reasoning);
        if let Some(arguments) = found.arguments {
            tools::add(
                &mut choice.tool_calls,
                Fragment::of_arguments(found.tool_index, arguments.into_owned()),
            );
        }
        choice.add_tokens(found.ids, found.values);
    }

    /// SGLang's extension: ids of each choice, routing of the first one.
    fn add_sglext(&mut self, view: SglextView<'_>) {
        if self.prompt_token_ids.is_none() {
            self.prompt_token_ids = view.input_ids;
        }
        for (index, ids) in view.output_ids.into_iter().flatten().enumerate() {
            let choice = u16::try_from(index).ok().and_then(|index| self.choices.get_mut(&index));
            if let Some(choice) = choice.filter(|choice| choice.token_ids.is_none()) {
                choice.token_ids = Some(ids);
            }
        }
        if let Some(choice) = self.choices.get_mut(&0)
            && choice.routed_experts.is_none()
        {
            choice.routed_experts = view.routed_experts.map(raw_text);
        }
    }
}

impl Choice {
    /// True if its finish reason is no end of the model's own.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        matches!(self.finish_reason.as_deref(), Some("abort" | "error"))
    }

    /// Adds a part; true if it carried the finish reason.
    fn add(&mut self, view: ChoiceView<'_>) -> bool {
        if let Some(delta) = view.delta.or(view.message) {
            self.text.push_str(delta.content.as_deref().unwrap_or_default());
            let reasoning = delta.reasoning.filter(|text| !text.is_empty()).or(delta.reasoning_content);
            self.reasoning.push_str(reasoning.as_deref().unwrap_or_default());
            self.refusal.push_str(delta.refusal.as_deref().unwrap_or_default());
            for fragment in delta.tool_calls.unwrap_or_default() {
                tools::add(&mut self.tool_calls, fragment);
            }
        }
        self.text.push_str(view.text.as_deref().unwrap_or_default());
        let meta = lenient::<MetaView<'_>>(view.meta_info).unwrap_or_default();
        let sampled = meta.output_token_logprobs.map(|list| pairs(&list));
        let entries = view.logprobs.and_then(LogprobsView::entries).unwrap_or_default();
        let ids = view.token_ids.or(view.response_token_ids).or_else(|| {
            let sampled = sampled.as_deref()?;
            sampled.iter().map(|(id, _)| *id).collect::<Option<Few<u32>>>()
        });
        let ids = ids.or_else(|| self.ids_of_strings(&entries));
        let values: Few<Option<f32>> = match sampled {
            // A value belongs to its id: those of other ids are none of ours.
            Some(sampled) => match &ids {
                Some(ids) if !sampled.iter().map(|(id, _)| *id).eq(ids.iter().map(|id| Some(*id))) => {
                    std::iter::repeat_n(None, ids.len()).collect()
                }
                _ => sampled.into_iter().map(|(_, value)| value).collect(),
            },
            None => entries.map(|entry| entry.value()),
        };
        self.add_tokens(ids, values);
        if let Some(versions) = view.weight_versions.or(meta.weight_versions) {
            self.weight_versions = Some(spans(versions));
        }
        self.weight_version = meta.weight_version.and_then(label).or(self.weight_version.take());
        let routed = view.routed_experts.or(meta.routed_experts);
        self.routed_experts = routed.map(raw_text).or(self.routed_experts.take());
        self.routing_start = view.routed_experts_prompt_start.or(self.routing_start);
        let stop = view.stop_reason.or(view.matched_stop).and_then(stop_match);
        self.stop_match = stop.or(self.stop_match.take());
        match view.finish_reason.filter(|reason| !reason.is_empty()) {
            Some(reason) => {
                self.finish_reason = Some(reason.into_owned());
                true
            }
            None => false,
        }
    }

    fn add_tokens(&mut self, ids: Option<Few<u32>>, values: Few<Option<f32>>) {
        let added = ids.as_ref().map_or(0, Few::len);
        if let Some(ids) = ids {
            self.token_ids.get_or_insert_default().extend(ids);
        }
        if values.len() == 0 && self.logprobs.is_none() {
            return;
        }
        // Tokens that came before the first log-prob have none.
        let missing = self.token_ids.as_ref().map_or(0, Vec::len).saturating_sub(added);
        let all = self.logprobs.get_or_insert_with(|| vec![None; missing]);
        let surplus = added.saturating_sub(values.len());
        all.extend(values);
        // An id without its log-prob has null, so that what follows is not shifted.
        all.extend(std::iter::repeat_n(None, surplus));
    }

    /// Ids in the place of token texts, if every token so far came like that.
    fn ids_of_strings(&mut self, entries: &Few<Entry<'_>>) -> Option<Few<u32>> {
        let so_far = self.token_ids.as_ref().map_or(0, Vec::len);
        let is_whole = so_far == self.logprobs.as_ref().map_or(0, Vec::len)
            && (so_far == 0 || self.ids_from == IdsFrom::TokenStrings);
        let ids: Few<u32> = entries.iter().map(Entry::id_string).collect::<Option<_>>()?;
        if ids.len() == 0 || !is_whole {
            return None;
        }
        self.ids_from = IdsFrom::TokenStrings;
        Some(ids)
    }
}

/// The message of an `error` member, whatever its form.
pub(crate) fn error_message(error: &RawValue) -> String {
    match serde_json::from_str::<Value>(error.get()) {
        Ok(Value::String(text)) => text,
        Ok(value) => match value["message"].as_str() {
            Some(message) => message.to_owned(),
            None => value.to_string(),
        },
        Err(_) => error.get().to_owned(),
    }
}

#[cfg(test)]
#[path = "reply_tests.rs"]
mod tests;
