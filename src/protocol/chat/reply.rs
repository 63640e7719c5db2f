//! A chat or completions reply put together from a parsed copy of a body or of a stream's events.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::tools::{self, Fragment, ToolCall};
use crate::protocol::json;

/// Values at or below this are engines' stand-ins for "no value" (vLLM clamps to it).
const LOGPROB_FLOOR: f32 = -9999.0;

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
    /// `None`: no part of the reply had log-probs. An element is `None` where the engine gave no usable number.
    pub logprobs: Option<Vec<Option<f32>>>,
    /// The last one that was neither null nor empty.
    pub finish_reason: Option<String>,
    pub weight_versions: Option<Vec<VersionSpan>>,
}

/// What one event did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fed {
    /// A choice got its finish reason: a client may act now.
    pub has_finish: bool,
    pub has_error: bool,
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
    /// Message of the first error in the reply.
    pub error: Option<String>,
}

impl Reply {
    /// Adds a stream's event, or a whole body.
    ///
    /// # Errors
    /// [`ReplyError`] when it is not a chat reply; nothing was added.
    pub fn feed(&mut self, data: &[u8]) -> Result<Fed, ReplyError> {
        match serde_json::from_slice::<View>(data) {
            Ok(view) => Ok(self.add(view)),
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

    fn add(&mut self, view: View<'_>) -> Fed {
        let mut fed = Fed::default();
        if let Some(error) = view.error {
            fed.has_error = true;
            self.error.get_or_insert_with(|| error_message(error));
        }
        self.id = self.id.take().or(view.id);
        self.created = self.created.or(view.created);
        self.model = self.model.take().or(view.model);
        if self.prompt_token_ids.is_none() {
            self.prompt_token_ids = view.prompt_token_ids;
        }
        if let Some(usage) = view.usage {
            self.usage = Some(ReplyUsage {
                prompt_tokens: usage.prompt_tokens.unwrap_or(0),
                completion_tokens: usage.completion_tokens.unwrap_or(0),
                cached_tokens: usage.prompt_tokens_details.and_then(|details| details.cached_tokens),
                reasoning_tokens: usage.completion_tokens_details.and_then(|d| d.reasoning_tokens),
            });
        }
        for choice in view.choices.unwrap_or_default() {
            let index = choice.index.unwrap_or(0);
            fed.has_finish |= self.choices.entry(index).or_default().add(choice);
        }
        fed
    }
}

impl Choice {
    /// Adds a part; true if it carried the finish reason.
    fn add(&mut self, view: ChoiceView<'_>) -> bool {
        if let Some(delta) = view.delta.or(view.message) {
            self.text.push_str(delta.content.as_deref().unwrap_or_default());
            let reasoning = delta.reasoning.or(delta.reasoning_content);
            self.reasoning.push_str(reasoning.as_deref().unwrap_or_default());
            self.refusal.push_str(delta.refusal.as_deref().unwrap_or_default());
            for fragment in delta.tool_calls.unwrap_or_default() {
                tools::add(&mut self.tool_calls, fragment);
            }
        }
        self.text.push_str(view.text.as_deref().unwrap_or_default());
        if self.prompt_token_ids.is_none() {
            self.prompt_token_ids = view.prompt_token_ids;
        }
        let entries = view.logprobs.and_then(LogprobsView::entries);
        if let Some(ids) = &view.token_ids {
            self.token_ids.get_or_insert_default().extend_from_slice(ids);
        }
        let ids = view.token_ids.map_or(0, |ids| ids.len());
        if entries.is_some() || self.logprobs.is_some() || ids > 0 {
            let values = entries.as_deref().unwrap_or_default();
            if !values.is_empty() || self.logprobs.is_some() {
                // Tokens that came before the first log-prob have none.
                let missing = self.token_ids.as_ref().map_or(0, Vec::len).saturating_sub(ids);
                let all = self.logprobs.get_or_insert_with(|| vec![None; missing]);
                all.extend(values.iter().map(Entry::value));
                // An id without its log-prob has null, so that what follows is not shifted.
                all.extend(std::iter::repeat_n(None, ids.saturating_sub(values.len())));
            }
        }
        if let Some(spans) = view.weight_versions {
            self.weight_versions = Some(spans.into_iter().filter_map(VersionView::span).collect());
        }
        match view.finish_reason.filter(|reason| !reason.is_empty()) {
            Some(reason) => {
                self.finish_reason = Some(reason);
                true
            }
            None => false,
        }
    }
}

fn error_message(error: &RawValue) -> String {
    match serde_json::from_str::<Value>(error.get()) {
        Ok(Value::String(text)) => text,
        Ok(value) => match value["message"].as_str() {
            Some(message) => message.to_owned(),
            None => value.to_string(),
        },
        Err(_) => error.get().to_owned(),
    }
}

#[derive(Deserialize)]
struct View<'a> {
    id: Option<String>,
    created: Option<u64>,
    model: Option<String>,
    #[serde(borrow)]
    choices: Option<Vec<ChoiceView<'a>>>,
    usage: Option<UsageView>,
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ChoiceView<'a> {
    index: Option<u16>,
    delta: Option<DeltaView>,
    message: Option<DeltaView>,
    /// Completions: what `delta` or `message` is in chat.
    text: Option<String>,
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(borrow)]
    logprobs: Option<LogprobsView<'a>>,
    finish_reason: Option<String>,
    token_ids: Option<Vec<u32>>,
    weight_versions: Option<Vec<VersionView>>,
}

#[derive(Deserialize)]
struct DeltaView {
    content: Option<String>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    refusal: Option<String>,
    tool_calls: Option<Vec<Fragment>>,
}

#[derive(Deserialize)]
struct LogprobsView<'a> {
    #[serde(borrow)]
    content: Option<Vec<Entry<'a>>>,
    /// Completions.
    #[serde(borrow)]
    token_logprobs: Option<Vec<Option<&'a RawValue>>>,
}

impl<'a> LogprobsView<'a> {
    fn entries(self) -> Option<Vec<Entry<'a>>> {
        let bare = self.token_logprobs;
        self.content.or_else(|| Some(bare?.into_iter().map(|logprob| Entry { logprob }).collect()))
    }
}

/// The number is read from its own text, so that the `f32` is the nearest one to what the engine printed.
#[derive(Deserialize)]
struct Entry<'a> {
    #[serde(borrow)]
    logprob: Option<&'a RawValue>,
}

impl Entry<'_> {
    fn value(&self) -> Option<f32> {
        let value: f32 = self.logprob?.get().parse().ok()?;
        (value.is_finite() && value > LOGPROB_FLOOR && value <= 0.0).then_some(value)
    }
}

#[derive(Deserialize)]
struct VersionView {
    version: Value,
    start: u32,
    end: u32,
}

impl VersionView {
    fn span(self) -> Option<VersionSpan> {
        let version = match self.version {
            Value::String(text) => text,
            Value::Number(number) => number.to_string(),
            _ => return None,
        };
        Some(VersionSpan { version, start: self.start, end: self.end })
    }
}

#[derive(Deserialize)]
struct UsageView {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
    completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct CompletionDetails {
    reasoning_tokens: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::sse;

    fn fixture(name: &str) -> Vec<u8> {
        let path = format!("{}/tests/fixtures/wire/{name}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read(path).expect("fixture")
    }

    fn stream(name: &str) -> Reply {
        let mut parser = sse::Parser::new();
        parser.push(&fixture(name));
        let mut reply = Reply::default();
        while let Some(event) = parser.next_event() {
            if event.has_data() && event.data() != "[DONE]" {
                reply.feed(&event.data()).expect("readable");
            }
        }
        reply
    }

    #[test]
    fn a_vllm_stream_and_body_of_the_same_answer_read_the_same() {
        let mut body = Reply::default();
        body.feed(&fixture("vllm_chat.json")).expect("readable");
        let streamed = stream("vllm_chat_stream.sse");
        let (a, b) = (&body.choices[&0], &streamed.choices[&0]);
        assert_eq!(a.token_ids, b.token_ids);
        assert_eq!(a.token_ids.as_ref().expect("ids").len(), 13);
        assert_eq!(a.logprobs, b.logprobs);
        assert_eq!(a.logprobs.as_ref().expect("logprobs")[0], Some(-1.748_499_989_509_582_5_f64 as f32));
        assert_eq!((&a.text, &a.finish_reason), (&b.text, &b.finish_reason));
        assert_eq!(a.text, "\n\nHello! 🎉");
        assert_eq!(a.weight_versions, b.weight_versions);
        assert_eq!(body.prompt_token_ids, streamed.prompt_token_ids);
        assert_eq!(body.usage, streamed.usage);
    }

    #[test]
    fn c02_c05_ids_in_chunks_without_text_are_kept() {
        let reply = stream("vllm_chat_tools_stream.sse");
        let choice = &reply.choices[&0];
        let ids = choice.token_ids.as_ref().expect("ids").len() as u64;
        assert_eq!(ids, reply.usage.expect("usage").completion_tokens);
        assert_eq!(choice.logprobs.as_ref().expect("logprobs").len() as u64, ids);
        assert!(choice.tool_calls.iter().all(|call| serde_json::from_str::<Value>(&call.arguments).is_ok()));
        assert!(!choice.tool_calls.is_empty());
    }

    #[test]
    fn a06_a18_empty_choices_and_empty_finish_reasons_do_no_harm() {
        let mut reply = Reply::default();
        for chunk in [
            r#"{"choices":[],"prompt_filter_results":[]}"#,
            r#"{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":""}],"error":null}"#,
            r#"{"choices":[{"index":0,"delta":{"content":"b error"},"finish_reason":"length"}]}"#,
            r#"{"usage":{"prompt_tokens":3,"completion_tokens":2}}"#,
        ] {
            reply.feed(chunk.as_bytes()).expect("readable");
        }
        assert_eq!(reply.choices[&0].text, "ab error");
        assert_eq!(reply.choices[&0].finish_reason.as_deref(), Some("length"));
        assert_eq!(reply.usage.expect("usage").completion_tokens, 2);
        assert_eq!(reply.error, None);
    }

    #[test]
    fn c07_c08_c12_unusable_log_probs_are_null_and_nothing_shifts() {
        let mut reply = Reply::default();
        let chunk = br#"{"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[1,2,3,4,5,6,7],"logprobs":{"content":[
            {"logprob":-Infinity},{"logprob":NaN},{"logprob":null},{"logprob":-9999.0},{"logprob":1e999},{"logprob":-0.25}]}}]}"#;
        reply.feed(chunk).expect("readable");
        let logprobs = reply.choices[&0].logprobs.clone().expect("logprobs");
        assert_eq!(logprobs, [None, None, None, None, None, Some(-0.25), None]);
    }

    #[test]
    fn a_log_prob_is_the_nearest_f32_to_its_text() {
        for value in [-1e-40_f32, -0.1, -1.175_494_4e-38, -0.0, -13.815_511] {
            let text =
                format!("{{\"choices\":[{{\"logprobs\":{{\"content\":[{{\"logprob\":{value:?}}}]}}}}]}}");
            let mut reply = Reply::default();
            reply.feed(text.as_bytes()).expect("readable");
            let read = reply.choices[&0].logprobs.as_ref().expect("logprobs")[0];
            assert_eq!(read.expect("value").to_bits(), value.to_bits());
        }
    }
}
