//! Messages to token ids, so that message text stays text.

use serde_json::{Map, Value};

use super::marking::Marking;
use super::{ChatTemplate, TextError, Tokenizer};

/// What a chat template is rendered with.
#[derive(Debug, Clone, Copy)]
pub struct ChatInput<'a> {
    /// Chat-completion messages.
    pub messages: &'a [Value],
    /// Tool definitions, `None` without tools.
    pub tools: Option<&'a [Value]>,
    /// Whether to end with the beginning of an assistant turn.
    pub add_generation_prompt: bool,
    /// Further variables of the template (`chat_template_kwargs`).
    pub template_kwargs: Option<&'a Map<String, Value>>,
}

/// The prompt's token ids: what the rendered template encodes to, except that text which came from messages or tools
/// is never read as a control token. In an assistant's own messages this holds for special tokens only: markup that
/// the model sampled (`<tool_call>`, `<think>`) and that came back as content becomes the same ids again.
///
/// Content given as parts is joined by line breaks (as vLLM does). A tool call's `arguments` stay the text they are
/// where the template prints text as it is, so that sampled bytes come back as the same ids; otherwise they are parsed,
/// as vLLM does.
///
/// A token that is put together from the end of a message and the template's own text is not looked for; chat
/// templates put line breaks or control tokens there.
///
/// # Errors
/// Messages without a role, content that is not text, a template that refuses them, and control-token text that this
/// tokenizer or template has no exact way to keep as text.
pub fn encode_chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    input: &ChatInput<'_>,
) -> Result<Vec<u32>, TextError> {
    let messages = normal_forms(template, input.messages)?;
    let input = ChatInput { messages: &messages, ..*input };
    let marking = Marking::of(tokenizer, template, &input)?;
    marking.encode(&marking.render(&input)?)
}

/// The messages as templates read them.
pub(super) fn normal_forms(template: &ChatTemplate, messages: &[Value]) -> Result<Vec<Value>, TextError> {
    messages.iter().enumerate().map(|(index, message)| normal_form(index, message, template)).collect()
}

/// Joins content parts, gives missing content as "", and readies tool-call arguments for the template.
fn normal_form(index: usize, message: &Value, template: &ChatTemplate) -> Result<Value, TextError> {
    let refuse = |what: String| Err(TextError::Messages(format!("messages[{index}]{what}")));
    let mut message = message.clone();
    let Some(fields) = message.as_object_mut() else {
        return refuse(" is not an object".to_owned());
    };
    if !fields.get("role").is_some_and(Value::is_string) {
        return refuse(" has no role; give \"system\", \"user\", \"assistant\" or \"tool\"".to_owned());
    }
    let content = match fields.get("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let mut texts = Vec::with_capacity(parts.len());
            for (part_index, part) in parts.iter().enumerate() {
                match part["text"].as_str().or_else(|| part.as_str()) {
                    Some(text) => texts.push(text),
                    None => {
                        let kind = part["type"].as_str().unwrap_or("unknown");
                        return refuse(format!(
                            ".content[{part_index}] is a part of type {kind:?}; this model reads text only"
                        ));
                    }
                }
            }
            texts.join("\n")
        }
        Some(_) => return refuse(".content is neither text nor a list of parts".to_owned()),
    };
    fields.insert("content".to_owned(), Value::from(content));
    let has_calls = fields.get("tool_calls").is_some_and(|calls| !calls.is_null());
    if !has_calls {
        // Templates take a present `tool_calls` for a turn with calls.
        fields.remove("tool_calls");
    }
    for call in fields.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments"))
        else {
            continue;
        };
        if template.reads_argument_text() {
            continue;
        }
        if let Some(parsed) = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok()) {
            *arguments = parsed;
        }
    }
    Ok(message)
}
