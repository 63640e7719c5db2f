//! The forms by name, and what a form has to say.

use std::str::FromStr;

use super::schemas::ToolSchemas;
use super::sink::{Malformation, Sink};
use super::window::{Tags, Window};
use super::{deepseek, glm45, hermes, kimi_k2, llama3_json, mistral, qwen3_coder};

/// A form of tool calls. The names are those of vLLM's `--tool-call-parser`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolForm {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and 3.
    Hermes,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen 3.5,
    /// Nemotron 3.
    Qwen3Coder,
    /// `{"name": …, "parameters": {…}}` as the whole reply, or after `<|python_tag|>`: Llama 3.
    Llama3Json,
    /// `[TOOL_CALLS]` with a JSON list, or with a name and a JSON object.
    Mistral,
    /// DeepSeek V3 and R1: arguments in a fenced block.
    DeepSeekV3,
    /// DeepSeek V3.1: arguments after the name.
    DeepSeekV31,
    /// Kimi K2.
    KimiK2,
    /// `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5.
    Glm45,
}

impl ToolForm {
    /// All forms.
    pub const ALL: [Self; 8] = [
        Self::Hermes,
        Self::Qwen3Coder,
        Self::Llama3Json,
        Self::Mistral,
        Self::DeepSeekV3,
        Self::DeepSeekV31,
        Self::KimiK2,
        Self::Glm45,
    ];

    /// vLLM's name for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Qwen3Coder => "qwen3_coder",
            Self::Llama3Json => "llama3_json",
            Self::Mistral => "mistral",
            Self::DeepSeekV3 => "deepseek_v3",
            Self::DeepSeekV31 => "deepseek_v31",
            Self::KimiK2 => "kimi_k2",
            Self::Glm45 => "glm45",
        }
    }

    /// Its tags.
    pub fn tags(self) -> impl Iterator<Item = &'static str> {
        self.parser(&ToolSchemas::default()).tags().iter().copied()
    }

    /// The form that a chat template's own text shows. `None` where it shows none of these: then the form has to be
    /// named, or calls stay text.
    #[must_use]
    pub fn of_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        if has("<tool_call>") && has("<function=") {
            Some(Self::Qwen3Coder)
        } else if has("<tool_call>") && has("<arg_key>") {
            Some(Self::Glm45)
        } else if has("<tool_call>") && has("arguments") {
            Some(Self::Hermes)
        } else if has("<｜tool▁calls▁begin｜>") {
            Some(if has("```json") { Self::DeepSeekV3 } else { Self::DeepSeekV31 })
        } else if has("<|tool_calls_section_begin|>") {
            Some(Self::KimiK2)
        } else if has("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if has("<|start_header_id|>") && has("\"parameters\"") {
            Some(Self::Llama3Json)
        } else {
            None
        }
    }

    pub(super) fn parser(self, schemas: &ToolSchemas) -> Box<dyn CallParser> {
        match self {
            Self::Hermes => Box::new(hermes::Hermes::new()),
            Self::Qwen3Coder => Box::new(qwen3_coder::Qwen3Coder::new(schemas)),
            Self::Llama3Json => Box::new(llama3_json::Llama3Json::new()),
            Self::Mistral => Box::new(mistral::Mistral::new()),
            Self::DeepSeekV3 => Box::new(deepseek::v3()),
            Self::DeepSeekV31 => Box::new(deepseek::v31()),
            Self::KimiK2 => Box::new(kimi_k2::new()),
            Self::Glm45 => Box::new(glm45::Glm45::new(schemas)),
        }
    }
}

/// A form of reasoning. The names are those of vLLM's `--reasoning-parser`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningForm {
    /// `<think>\n…\n</think>\n\n`, with the line breaks that Qwen's templates write: they are markup.
    Qwen3,
    /// `<think>…</think>`, every other byte is text.
    DeepSeekR1,
    /// `<think>…</think>\n`: GLM 4.5.
    Glm45,
    /// `[THINK]…[/THINK]`.
    Mistral,
}

impl ReasoningForm {
    /// All forms.
    pub const ALL: [Self; 4] = [Self::Qwen3, Self::DeepSeekR1, Self::Glm45, Self::Mistral];

    /// vLLM's name for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Qwen3 => "qwen3",
            Self::DeepSeekR1 => "deepseek_r1",
            Self::Glm45 => "glm45",
            Self::Mistral => "mistral",
        }
    }

    /// The form that a chat template's own text shows; `None` where it shows none.
    #[must_use]
    pub fn of_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        if has("[THINK]") && has("[/THINK]") {
            Some(Self::Mistral)
        } else if !(has("<think>") && has("</think>")) {
            None
        } else if has("[gMASK]") {
            Some(Self::Glm45)
        } else if has("<|im_start|>") {
            Some(Self::Qwen3)
        } else {
            Some(Self::DeepSeekR1)
        }
    }

    /// Whether a prompt ends within a reasoning block that the template opened: what is sampled goes on with it.
    #[must_use]
    pub fn is_open_at_end(self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open()[0])
    }

    /// Its tags.
    pub fn tags(self) -> impl Iterator<Item = &'static str> {
        self.open().iter().chain(self.close()).copied()
    }

    pub(super) fn open(self) -> Tags {
        match self {
            Self::Mistral => &["[THINK]"],
            Self::Qwen3 | Self::DeepSeekR1 | Self::Glm45 => &["<think>"],
        }
    }

    pub(super) fn close(self) -> Tags {
        match self {
            Self::Mistral => &["[/THINK]"],
            Self::Qwen3 | Self::DeepSeekR1 | Self::Glm45 => &["</think>"],
        }
    }

    /// Whether a line break after the opening tag, and one before the closing tag, are markup.
    pub(super) fn has_inner_breaks(self) -> bool {
        matches!(self, Self::Qwen3)
    }

    /// How many line breaks after the closing tag are markup.
    pub(super) fn breaks_after(self) -> usize {
        match self {
            Self::Qwen3 => 2,
            Self::Glm45 => 1,
            Self::DeepSeekR1 | Self::Mistral => 0,
        }
    }
}

/// What a model's replies are parsed as; nothing where it is `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Forms {
    /// Tool calls.
    pub tools: Option<ToolForm>,
    /// Reasoning.
    pub reasoning: Option<ReasoningForm>,
}

impl Forms {
    /// Those that a chat template's own text shows.
    #[must_use]
    pub fn of_template(source: &str) -> Self {
        Self { tools: ToolForm::of_template(source), reasoning: ReasoningForm::of_template(source) }
    }
}

/// A name that no form has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a parser that lego has; give one of {known}")]
pub struct UnknownForm {
    name: String,
    known: String,
}

impl UnknownForm {
    fn new(name: &str, known: impl Iterator<Item = &'static str>) -> Self {
        Self { name: name.to_owned(), known: known.collect::<Vec<_>>().join(", ") }
    }
}

impl FromStr for ToolForm {
    type Err = UnknownForm;

    fn from_str(name: &str) -> Result<Self, UnknownForm> {
        let known = Self::ALL.into_iter();
        known
            .clone()
            .find(|form| form.name() == name)
            .ok_or_else(|| UnknownForm::new(name, known.map(Self::name)))
    }
}

impl FromStr for ReasoningForm {
    type Err = UnknownForm;

    fn from_str(name: &str) -> Result<Self, UnknownForm> {
        let known = Self::ALL.into_iter();
        known
            .clone()
            .find(|form| form.name() == name)
            .ok_or_else(|| UnknownForm::new(name, known.map(Self::name)))
    }
}

/// What came of reading on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// More text is needed to go on.
    Wait,
    /// The markup of calls ends at the cursor; what is between the mark and the cursor is markup.
    Close,
}

/// A form's calls, from an opening tag on. The text around calls is the reply parser's.
pub(super) trait CallParser: std::fmt::Debug + Send + Sync {
    /// All tags, for [`super::ReplyParser::with_token_tags`].
    fn tags(&self) -> Tags;

    /// Tags that open calls.
    fn openers(&self) -> Tags;

    /// How many line breaks before an opening tag belong to the markup.
    fn breaks_before(&self) -> usize;

    /// Whether a reply that begins with `{` is a call without a tag.
    fn opens_bare(&self) -> bool {
        false
    }

    /// An opening tag was read; `None` for a call without one.
    fn begin(&mut self, opener: Option<usize>);

    /// Reads on; `Err` when this is no call, with the cursor where that became certain.
    fn read(&mut self, window: &mut Window, sink: &mut Sink) -> Result<Step, Malformation>;

    /// Tags that end a malformed call. Without any the rest of the reply is text.
    fn closers(&self) -> Tags;

    /// A malformed call has ended with this closer: whether the markup of calls goes on.
    fn resume(&mut self, _closer: usize) -> bool {
        false
    }
}
