//! What is read of a response that an upstream wrote itself: its events, its items, its whole body.

use serde::Deserialize;
use serde_json::Error;
use serde_json::value::RawValue;

use crate::protocol::chat::ReplyUsage;

/// An event. Members whose shape depends on the event's type are read when that is known.
#[derive(Deserialize)]
pub(super) struct EventView<'a> {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub sequence_number: Option<u64>,
    pub output_index: Option<u64>,
    content_index: Option<u64>,
    summary_index: Option<u64>,
    #[serde(borrow)]
    pub response: Option<&'a RawValue>,
    #[serde(borrow)]
    pub item: Option<&'a RawValue>,
    #[serde(borrow)]
    pub part: Option<&'a RawValue>,
    #[serde(borrow)]
    pub delta: Option<&'a RawValue>,
    #[serde(borrow)]
    pub text: Option<&'a RawValue>,
    #[serde(borrow)]
    pub refusal: Option<&'a RawValue>,
    #[serde(borrow)]
    pub arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    pub input: Option<&'a RawValue>,
    #[serde(borrow)]
    pub error: Option<&'a RawValue>,
    #[serde(borrow)]
    pub code: Option<&'a RawValue>,
    #[serde(borrow)]
    pub message: Option<&'a RawValue>,
}

impl EventView<'_> {
    /// Which of its item's parts of this kind the event is of.
    pub fn place(&self, part: Part) -> u64 {
        let own = if part == Part::Summary { self.summary_index } else { self.content_index };
        own.unwrap_or(0)
    }
}

/// A response, in an event or as a body.
#[derive(Deserialize)]
pub(super) struct ResponseView<'a> {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub id: Option<String>,
    pub model: Option<String>,
    pub created_at: Option<f64>,
    pub status: Option<String>,
    #[serde(borrow)]
    pub output: Option<Vec<&'a RawValue>>,
    pub incomplete_details: Option<IncompleteView>,
    usage: Option<UsageView>,
    #[serde(borrow)]
    pub error: Option<&'a RawValue>,
}

impl ResponseView<'_> {
    /// A count that is not told is no count of 0.
    pub fn usage(&self) -> Option<ReplyUsage> {
        let usage = self.usage.as_ref()?;
        Some(ReplyUsage {
            prompt_tokens: usage.input_tokens?,
            completion_tokens: usage.output_tokens?,
            cached_tokens: usage.input_tokens_details.as_ref().and_then(|details| details.cached_tokens),
            reasoning_tokens: usage
                .output_tokens_details
                .as_ref()
                .and_then(|details| details.reasoning_tokens),
        })
    }
}

#[derive(Deserialize)]
pub(super) struct IncompleteView {
    pub reason: Option<String>,
}

#[derive(Deserialize)]
struct UsageView {
    input_tokens: Option<u64>,
    input_tokens_details: Option<InputDetails>,
    output_tokens: Option<u64>,
    output_tokens_details: Option<OutputDetails>,
}

#[derive(Deserialize)]
struct InputDetails {
    cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct OutputDetails {
    reasoning_tokens: Option<u64>,
}

/// A kind of text that an item has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    Text,
    Refusal,
    Reasoning,
    Summary,
}

impl Part {
    /// The kind of an event's text, and whether the event has all of it.
    pub fn of_event(kind: &str) -> Option<(Self, bool)> {
        let (name, is_all) = match kind.strip_suffix(".delta") {
            Some(name) => (name, false),
            None => (kind.strip_suffix(".done")?, true),
        };
        let part = match name {
            "response.output_text" => Self::Text,
            "response.refusal" => Self::Refusal,
            "response.reasoning_text" => Self::Reasoning,
            "response.reasoning_summary_text" => Self::Summary,
            _ => return None,
        };
        Some((part, is_all))
    }

    fn of_type(kind: &str) -> Option<Self> {
        match kind {
            "output_text" | "text" => Some(Self::Text),
            "refusal" => Some(Self::Refusal),
            "reasoning_text" => Some(Self::Reasoning),
            "summary_text" => Some(Self::Summary),
            _ => None,
        }
    }
}

#[derive(Deserialize)]
struct PartView {
    #[serde(rename = "type")]
    kind: Option<String>,
    text: Option<String>,
    refusal: Option<String>,
}

impl PartView {
    fn said(self) -> Option<(Part, String)> {
        let part = Part::of_type(self.kind.as_deref()?)?;
        let text = if part == Part::Refusal { self.refusal } else { self.text };
        Some((part, text?))
    }
}

/// The text of a part; `None` if it is no text.
pub(super) fn part(raw: &RawValue) -> Result<Option<(Part, String)>, Error> {
    Ok(serde_json::from_str::<PartView>(raw.get())?.said())
}

/// What an item says.
pub(super) enum Item {
    /// A message or reasoning: texts, each with its place among the parts.
    Prose(Vec<(Part, u64, String)>),
    /// A call that the client answers.
    Call { id: String, name: String, arguments: Option<String> },
    /// What the upstream does by itself.
    Other,
}

#[derive(Deserialize)]
struct ItemView<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    id: Option<String>,
    call_id: Option<String>,
    name: Option<String>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    #[serde(borrow)]
    action: Option<&'a RawValue>,
    #[serde(borrow)]
    operation: Option<&'a RawValue>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    summary: Option<&'a RawValue>,
}

impl Item {
    /// Reads an item. Calls that clients answer have a `call_id` to do it by; those of hosted tools have none.
    pub fn read(raw: &RawValue) -> Result<Self, Error> {
        let view: ItemView<'_> = serde_json::from_str(raw.get())?;
        let kind = view.kind.unwrap_or_default();
        if matches!(kind.as_str(), "message" | "reasoning") {
            let mut said = Vec::new();
            for list in [view.summary, view.content].into_iter().flatten() {
                let parts: Vec<PartView> = serde_json::from_str(list.get())?;
                for (index, part) in (0..).zip(parts) {
                    said.extend(part.said().map(|(part, text)| (part, index, text)));
                }
            }
            return Ok(Self::Prose(said));
        }
        let is_named = matches!(kind.as_str(), "function_call" | "custom_tool_call" | "local_shell_call");
        let Some(tool) = kind.strip_suffix("_call").filter(|_| is_named || view.call_id.is_some()) else {
            return Ok(Self::Other);
        };
        let given = [view.arguments, view.input, view.action, view.operation];
        let arguments = given.into_iter().flatten().next().map(words).transpose()?;
        let name = view.name.unwrap_or_else(|| tool.to_owned());
        Ok(Self::Call { id: view.call_id.or(view.id).unwrap_or_default(), name, arguments })
    }
}

/// The text of a JSON string; the JSON of anything else, as it came.
pub(super) fn words(raw: &RawValue) -> Result<String, Error> {
    match raw.get().starts_with('"') {
        true => serde_json::from_str(raw.get()),
        false => Ok(raw.get().to_owned()),
    }
}

/// The text of a JSON string, or of nothing.
pub(super) fn text(raw: Option<&RawValue>) -> Result<String, Error> {
    raw.map_or(Ok(String::new()), |raw| serde_json::from_str(raw.get()))
}
