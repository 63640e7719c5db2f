//! The conversation: `system` and `messages` as chat messages.
//!
//! Turns stay apart as they came, also several of one role in a row: joined, a turn that was already sent would
//! change when the next one comes, and prompts would no longer extend each other.

use serde_json::Value;

use super::ids;
use super::node::{Node, Object, refuse};
use super::parts::{self, Part, push_quoted};
use crate::protocol::error::ApiError;

/// How the conversation ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LastTurn {
    /// With something to answer.
    Open,
    /// With the beginning of the answer, to be continued.
    Prefill,
    /// With tool calls that nobody answered.
    Calls,
}

/// Chat messages in the making.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// The list's elements, with commas.
    pub messages: String,
}

impl Turns {
    /// Adds the leading system message. Its blocks are joined with nothing between them, as vLLM's own Messages
    /// endpoint does: the prompt is then the one that endpoint would render, and no text is invented.
    pub fn system(&mut self, system: Node<'_, '_>) -> Result<(), ApiError> {
        if system.is_list() && system.list()?.is_empty() {
            return Ok(());
        }
        let text = joined_text(system)?;
        self.message("system", |out| push_quoted(&text, out));
        Ok(())
    }

    /// Adds the turns.
    pub fn turns(&mut self, messages: Node<'_, '_>) -> Result<LastTurn, ApiError> {
        let texts = messages.list()?;
        if texts.is_empty() {
            return Err(messages.wrong("at least one message"));
        }
        let last = texts.len() - 1;
        let mut end = LastTurn::Open;
        for (index, text) in texts.into_iter().enumerate() {
            let node = messages.element(index, text);
            let turn = node.object()?;
            let role = turn.need("role")?;
            match role.string()?.as_str() {
                "user" => self.user(turn.need("content")?)?,
                "assistant" => {
                    let answer = Answer::read(&turn)?;
                    if index == last {
                        end = answer.end();
                    }
                    // An empty last turn begins nothing.
                    if index < last || end != LastTurn::Open {
                        self.assistant(&answer);
                    }
                }
                // In its place: moved to the front it would change the prompt's beginning with every turn.
                "system" => {
                    let text = joined_text(turn.need("content")?)?;
                    self.message("system", |out| push_quoted(&text, out));
                }
                _ => return Err(role.wrong("\"user\", \"assistant\" or \"system\"")),
            }
        }
        if self.messages.is_empty() {
            return Err(messages.wrong("a message that says something"));
        }
        Ok(end)
    }

    /// Tool results become tool messages, right behind the assistant turn that asked for them; what else the user
    /// says follows in its order.
    fn user(&mut self, content: Node<'_, '_>) -> Result<(), ApiError> {
        let mut parts = Vec::new();
        let mut said = Turns::default();
        let before = self.messages.len();
        if content.is_list() {
            for (index, text) in content.list()?.into_iter().enumerate() {
                let node = content.element(index, text);
                let block = node.object()?;
                let kind = block.kind()?;
                match kind.as_str() {
                    "tool_result" => self.tool_result(&block, &mut parts)?,
                    "mid_conv_system" => {
                        said.flush(&mut parts);
                        let text = joined_text(block.need("content")?)?;
                        said.message("system", |out| push_quoted(&text, out));
                    }
                    _ if parts::add(&kind, &block, &mut parts)? => {}
                    _ => return Err(parts::unknown(&kind, &block)),
                }
            }
        } else {
            parts::add_content(content, &mut parts)?;
        }
        said.flush(&mut parts);
        if said.messages.is_empty() && self.messages.len() == before {
            self.message("user", |out| out.push_str("\"\""));
        } else if !said.messages.is_empty() {
            self.separate();
            self.messages.push_str(&said.messages);
        }
        Ok(())
    }

    /// Adds a user message of these parts, if they say anything.
    fn flush(&mut self, parts: &mut Vec<Part<'_>>) {
        if parts.iter().any(|part| !matches!(part, Part::Text(""))) {
            self.message("user", |out| parts::push_content(parts, out));
        }
        parts.clear();
    }

    /// Adds a tool message of the result's texts, joined by line ends as vLLM does. Chat's tool messages hold no
    /// images in most engines: those go to the user message that follows, at the result's place.
    fn tool_result<'a>(
        &mut self,
        block: &Object<'a, '_>,
        images: &mut Vec<Part<'a>>,
    ) -> Result<(), ApiError> {
        let id = ids::to_upstream(block.need("tool_use_id")?.string()?);
        let mut parts = Vec::new();
        if let Some(content) = block.get("content") {
            parts::add_content(content, &mut parts)?;
        }
        let mut text = String::new();
        let mut is_first = true;
        for part in parts {
            match part {
                Part::Text(piece) => {
                    if !std::mem::take(&mut is_first) {
                        text.push_str("\\n");
                    }
                    text.push_str(piece);
                }
                image @ Part::Image(_) => images.push(image),
            }
        }
        // Chat has no place for the flag; a text that begins so says it already.
        if block.is_true("is_error")? && !text.starts_with("Error") {
            text.insert_str(0, "Error: ");
        }
        self.separate();
        self.messages.push_str("{\"role\":\"tool\",\"tool_call_id\":");
        self.messages.push_str(&Value::from(id).to_string());
        self.messages.push_str(",\"content\":");
        push_quoted(&text, &mut self.messages);
        self.messages.push('}');
        Ok(())
    }

    /// `reasoning_content` is the one name for thinking that all engines read: SGLang, llama.cpp and DeepSeek know no
    /// other, vLLM takes it beside its own `reasoning`, and templates look for it.
    fn assistant(&mut self, answer: &Answer) {
        self.separate();
        let out = &mut self.messages;
        out.push_str("{\"role\":\"assistant\"");
        if !answer.thinking.is_empty() {
            out.push_str(",\"reasoning_content\":");
            push_quoted(&answer.thinking, out);
        }
        out.push_str(",\"content\":");
        if answer.text.is_empty() && !answer.calls.is_empty() {
            out.push_str("null");
        } else {
            push_quoted(&answer.text, out);
        }
        if !answer.calls.is_empty() {
            out.push_str(",\"tool_calls\":[");
            out.push_str(&answer.calls);
            out.push(']');
        }
        out.push('}');
    }

    fn message(&mut self, role: &str, push_content: impl FnOnce(&mut String)) {
        self.separate();
        self.messages.push_str("{\"role\":\"");
        self.messages.push_str(role);
        self.messages.push_str("\",\"content\":");
        push_content(&mut self.messages);
        self.messages.push('}');
    }

    fn separate(&mut self) {
        if !self.messages.is_empty() {
            self.messages.push(',');
        }
    }
}

/// An assistant turn: one chat message. Texts and calls of a reply that alternated are brought together, as the
/// chat reply that it came from had them.
#[derive(Debug, Default)]
struct Answer {
    /// Literals.
    thinking: String,
    text: String,
    /// Elements of `tool_calls`, with commas.
    calls: String,
}

impl Answer {
    fn read(turn: &Object<'_, '_>) -> Result<Self, ApiError> {
        let mut answer = Self::default();
        let Some(content) = turn.get("content") else {
            return Ok(answer);
        };
        if content.is_string() {
            answer.text.push_str(content.literal()?);
            return Ok(answer);
        }
        if !content.is_list() {
            return Err(content.wrong("a string or a list of blocks"));
        }
        for (index, text) in content.list()?.into_iter().enumerate() {
            let node = content.element(index, text);
            let block = node.object()?;
            let kind = block.kind()?;
            match kind.as_str() {
                "text" => answer.text.push_str(block.need("text")?.literal()?),
                "thinking" => answer.thinking.push_str(block.need("thinking")?.literal()?),
                // Only the vendor can read it.
                "redacted_thinking" => {}
                "tool_use" => answer.call(&block)?,
                _ => return Err(parts::unknown(&kind, &block)),
            }
        }
        Ok(answer)
    }

    /// `input` goes on as the bytes that came: parsed and printed again, spaces and escapes would differ from what
    /// was sampled.
    fn call(&mut self, block: &Object<'_, '_>) -> Result<(), ApiError> {
        let id = ids::to_upstream(block.need("id")?.string()?);
        let name = block.need("name")?;
        let input = block.need("input")?;
        if !input.text.starts_with('{') {
            return Err(input.wrong("an object"));
        }
        if !self.calls.is_empty() {
            self.calls.push(',');
        }
        self.calls.push_str("{\"id\":");
        self.calls.push_str(&Value::from(id).to_string());
        self.calls.push_str(",\"type\":\"function\",\"function\":{\"name\":");
        push_quoted(name.literal()?, &mut self.calls);
        self.calls.push_str(",\"arguments\":");
        self.calls.push_str(&Value::from(input.text).to_string());
        self.calls.push_str("}}");
        Ok(())
    }

    fn end(&self) -> LastTurn {
        if !self.calls.is_empty() {
            LastTurn::Calls
        } else if self.text.is_empty() && self.thinking.is_empty() {
            LastTurn::Open
        } else {
            LastTurn::Prefill
        }
    }
}

/// The literal of a system text: a string, or text blocks joined.
fn joined_text(content: Node<'_, '_>) -> Result<String, ApiError> {
    if content.is_string() {
        return content.literal().map(str::to_owned);
    }
    if !content.is_list() {
        return Err(content.wrong("a string or a list of text blocks"));
    }
    let mut joined = String::new();
    for (index, text) in content.list()?.into_iter().enumerate() {
        let node = content.element(index, text);
        let block = node.object()?;
        let kind = block.kind()?;
        if kind != "text" {
            return Err(refuse(
                block.path,
                format_args!("a system prompt holds only `text` blocks, not `{kind}`"),
            ));
        }
        joined.push_str(block.need("text")?.literal()?);
    }
    Ok(joined)
}

/// True if a system block is Claude Code's billing line. It changes from conversation to conversation, and in some
/// versions from call to call, at the very beginning of the prompt.
#[must_use]
pub fn is_billing_header(text: &str) -> bool {
    text.starts_with("x-anthropic-billing-header")
}
