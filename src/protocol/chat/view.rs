//! What is read of a chat reply's JSON. Members that only some engines send are read leniently: another shape of
//! theirs is as if they were not there, and the reply is read all the same.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use super::reply::{StopMatch, VersionSpan};
use super::tools::Fragment;

/// Before an id in the place of its token's text.
pub(super) const TOKEN_ID: &str = "token_id:";

/// Values at or below this are engines' stand-ins for "no value" (vLLM clamps to it).
const LOGPROB_FLOOR: f32 = -9999.0;

/// A string, which is not copied where it has no escapes: most of a stream's are read and let go of.
pub(super) struct Text<'a>(Cow<'a, str>);

impl Text<'_> {
    pub(super) fn into_owned(self) -> String {
        self.0.into_owned()
    }
}

impl std::ops::Deref for Text<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Strings;

        impl<'de> Visitor<'de> for Strings {
            type Value = Text<'de>;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a string")
            }

            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }

        deserializer.deserialize_str(Strings)
    }
}

/// A list. Most in a stream have one element, which is not put on the heap.
pub(super) struct Few<T> {
    first: Option<T>,
    more: Vec<T>,
}

impl<T> Few<T> {
    pub(super) fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.more.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(&self.more)
    }

    pub(super) fn push(&mut self, item: T) {
        if self.first.is_none() {
            self.first = Some(item);
        } else {
            self.more.push(item);
        }
    }

    pub(super) fn map<U>(self, to: impl FnMut(T) -> U) -> Few<U> {
        self.into_iter().map(to).collect()
    }
}

impl<T> Default for Few<T> {
    fn default() -> Self {
        Self { first: None, more: Vec::new() }
    }
}

impl<T> IntoIterator for Few<T> {
    type Item = T;
    type IntoIter = std::iter::Chain<std::option::IntoIter<T>, std::vec::IntoIter<T>>;

    fn into_iter(self) -> Self::IntoIter {
        self.first.into_iter().chain(self.more)
    }
}

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let mut items = items.into_iter();
        Self { first: items.next(), more: items.collect() }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Few<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
            type Value = Few<T>;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Few<T>, A::Error> {
                let mut few = Few { first: list.next_element()?, more: Vec::new() };
                while let Some(item) = list.next_element()? {
                    few.more.push(item);
                }
                Ok(few)
            }
        }

        deserializer.deserialize_seq(List(PhantomData))
    }
}

#[derive(Deserialize)]
pub(super) struct View<'a> {
    #[serde(borrow)]
    pub(super) id: Option<Text<'a>>,
    pub(super) created: Option<u64>,
    #[serde(borrow)]
    pub(super) model: Option<Text<'a>>,
    #[serde(borrow)]
    pub(super) choices: Option<Few<ChoiceView<'a>>>,
    pub(super) usage: Option<UsageView>,
    pub(super) prompt_token_ids: Option<Vec<u32>>,
    #[serde(borrow)]
    pub(super) metadata: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) sglext: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) input_ids: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) output_ids: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
pub(super) struct ChoiceView<'a> {
    pub(super) index: Option<u16>,
    #[serde(borrow)]
    pub(super) delta: Option<DeltaView<'a>>,
    #[serde(borrow)]
    pub(super) message: Option<DeltaView<'a>>,
    /// Completions: what `delta` or `message` is in chat.
    #[serde(borrow)]
    pub(super) text: Option<Text<'a>>,
    #[serde(borrow)]
    pub(super) logprobs: Option<LogprobsView<'a>>,
    #[serde(borrow)]
    pub(super) finish_reason: Option<Text<'a>>,
    pub(super) token_ids: Option<Few<u32>>,
    /// SGLang's name for them.
    pub(super) response_token_ids: Option<Few<u32>>,
    /// Where SGLang, and completions, have them.
    pub(super) prompt_token_ids: Option<Vec<u32>>,
    pub(super) weight_versions: Option<Vec<VersionView>>,
    #[serde(borrow)]
    pub(super) routed_experts: Option<&'a RawValue>,
    /// Of a reply in several parts.
    pub(super) routed_experts_prompt_start: Option<u64>,
    #[serde(borrow)]
    pub(super) meta_info: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) stop_reason: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) matched_stop: Option<&'a RawValue>,
}

#[derive(Deserialize)]
pub(super) struct DeltaView<'a> {
    #[serde(borrow)]
    pub(super) content: Option<Text<'a>>,
    #[serde(borrow)]
    pub(super) reasoning: Option<Text<'a>>,
    #[serde(borrow)]
    pub(super) reasoning_content: Option<Text<'a>>,
    #[serde(borrow)]
    pub(super) refusal: Option<Text<'a>>,
    pub(super) tool_calls: Option<Vec<Fragment>>,
}

#[derive(Deserialize)]
pub(super) struct LogprobsView<'a> {
    #[serde(borrow)]
    pub(super) content: Option<Few<Entry<'a>>>,
    /// Completions.
    #[serde(borrow)]
    pub(super) token_logprobs: Option<Vec<Option<&'a RawValue>>>,
}

impl<'a> LogprobsView<'a> {
    pub(super) fn entries(self) -> Option<Few<Entry<'a>>> {
        let bare = self.token_logprobs;
        let entry = |logprob| Entry { logprob, token: None };
        self.content.or_else(|| Some(bare?.into_iter().map(entry).collect()))
    }
}

/// The number is read from its own text, so that the `f32` is the nearest one to what the engine printed.
#[derive(Deserialize)]
pub(super) struct Entry<'a> {
    #[serde(borrow)]
    pub(super) logprob: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) token: Option<&'a RawValue>,
}

impl Entry<'_> {
    pub(super) fn value(&self) -> Option<f32> {
        logprob(self.logprob?)
    }

    /// The id in a token's text `token_id:7`.
    pub(super) fn id_string(&self) -> Option<u32> {
        let text = self.token?.get().strip_prefix('"')?.strip_suffix('"')?;
        text.strip_prefix(TOKEN_ID)?.parse().ok()
    }
}

#[derive(Deserialize)]
pub(super) struct VersionView {
    pub(super) version: Value,
    pub(super) start: u32,
    pub(super) end: u32,
}

impl VersionView {
    pub(super) fn span(self) -> Option<VersionSpan> {
        Some(VersionSpan { version: label(self.version)?, start: self.start, end: self.end })
    }
}

#[derive(Deserialize)]
pub(super) struct UsageView {
    pub(super) prompt_tokens: Option<u64>,
    pub(super) completion_tokens: Option<u64>,
    pub(super) prompt_tokens_details: Option<PromptDetails>,
    pub(super) completion_tokens_details: Option<CompletionDetails>,
    /// SGLang's place for them.
    pub(super) reasoning_tokens: Option<u64>,
}

#[derive(Deserialize)]
pub(super) struct PromptDetails {
    pub(super) cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
pub(super) struct CompletionDetails {
    pub(super) reasoning_tokens: Option<u64>,
}

/// SGLang's `meta_info` of a choice, or of a native reply.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct MetaView<'a> {
    pub(super) weight_version: Option<Value>,
    pub(super) weight_versions: Option<Vec<VersionView>>,
    #[serde(borrow)]
    pub(super) routed_experts: Option<&'a RawValue>,
    /// `[log-prob or null, id, text or null]` for each sampled token.
    #[serde(borrow)]
    pub(super) output_token_logprobs: Option<Vec<Vec<&'a RawValue>>>,
}

/// SGLang's `metadata` of a body.
#[derive(Deserialize)]
pub(super) struct MetadataView {
    pub(super) weight_version: Option<Value>,
    pub(super) weight_versions: Option<Vec<VersionView>>,
}

/// SGLang's `sglext`.
#[derive(Deserialize)]
pub(super) struct SglextView<'a> {
    pub(super) input_ids: Option<Vec<u32>>,
    pub(super) output_ids: Option<Vec<Vec<u32>>>,
    #[serde(borrow)]
    pub(super) routed_experts: Option<&'a RawValue>,
}

/// The value, if it has the shape that is known.
pub(super) fn lenient<'a, T: Deserialize<'a>>(raw: Option<&'a RawValue>) -> Option<T> {
    serde_json::from_str(raw?.get()).ok()
}

/// A label of weights: engines give text or a number.
pub(crate) fn label(version: Value) -> Option<String> {
    match version {
        Value::String(text) => Some(text),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

pub(super) fn spans(views: Vec<VersionView>) -> Vec<VersionSpan> {
    views.into_iter().filter_map(VersionView::span).collect()
}

/// A string's text; the JSON of anything else.
pub(crate) fn raw_text(raw: &RawValue) -> String {
    serde_json::from_str(raw.get()).unwrap_or_else(|_| raw.get().to_owned())
}

pub(super) fn stop_match(raw: &RawValue) -> Option<StopMatch> {
    match serde_json::from_str(raw.get()).ok()? {
        Value::String(text) => Some(StopMatch::Text(text)),
        Value::Number(id) => Some(StopMatch::Token(u32::try_from(id.as_u64()?).ok()?)),
        _ => None,
    }
}

/// Id and log-prob of each sampled token; `None` for an id that is none.
pub(crate) fn pairs(list: &[Vec<&RawValue>]) -> Vec<(Option<u32>, Option<f32>)> {
    let pair = |item: &Vec<&RawValue>| {
        let id = item.get(1).and_then(|id| id.get().parse().ok());
        (id, item.first().and_then(|value| logprob(value)))
    };
    list.iter().map(pair).collect()
}

fn logprob(raw: &RawValue) -> Option<f32> {
    logprob_of(raw.get())
}

/// A usable log-prob.
pub(super) fn logprob_of(text: &str) -> Option<f32> {
    let value: f32 = text.parse().ok()?;
    (value.is_finite() && value > LOGPROB_FLOOR && value <= 0.0).then_some(value)
}
