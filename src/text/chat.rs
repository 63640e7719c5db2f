//! Messages to token ids, so that message text stays text.

use serde_json::{Map, Value};

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
    let messages = input
        .messages
        .iter()
        .enumerate()
        .map(|(index, message)| normal_form(index, message, template))
        .collect::<Result<Vec<_>, _>>()?;
    let input = ChatInput { messages: &messages, ..*input };
    let Some(found) = control_text(tokenizer, &input) else {
        return tokenizer.encode(&template.render_input(&input)?);
    };
    encode_protected(tokenizer, template, &input, &found)
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

/// The text of a control token somewhere in messages or tools.
fn control_text(tokenizer: &Tokenizer, input: &ChatInput<'_>) -> Option<String> {
    let in_tools = input.tools.into_iter().flatten().find_map(|tool| find_in(tokenizer, tool, true));
    in_tools.or_else(|| {
        input.messages.iter().find_map(|message| find_in(tokenizer, message, with_markup(message)))
    })
}

/// An assistant's own words may hold the markup that it samples.
fn with_markup(message: &Value) -> bool {
    message["role"] != "assistant"
}

fn find_in(tokenizer: &Tokenizer, value: &Value, with_markup: bool) -> Option<String> {
    let find =
        |text: &str| tokenizer.find_control(text, 0, with_markup).map(|(_, token)| token.content.clone());
    match value {
        Value::String(text) => find(text),
        Value::Array(items) => items.iter().find_map(|item| find_in(tokenizer, item, with_markup)),
        Value::Object(fields) => fields
            .iter()
            .find_map(|(key, value)| find(key).or_else(|| find_in(tokenizer, value, with_markup))),
        _ => None,
    }
}

/// Renders with a private-use character inside every control token's text, takes the characters out again, and encodes
/// with those occurrences as text. To the template such text is text as well.
fn encode_protected(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    input: &ChatInput<'_>,
    found: &str,
) -> Result<Vec<u32>, TextError> {
    let refuse = |why: &str| TextError::ControlToken { token: found.to_owned(), why: why.to_owned() };
    let everything = format!(
        "{}{}{}",
        template.source(),
        Value::from(input.messages),
        Value::from(input.tools.unwrap_or_default())
    );
    let marker = ('\u{e000}'..='\u{f8ff}')
        .find(|&marker| !everything.contains(marker))
        .ok_or_else(|| refuse("the messages use every private-use character"))?;

    let marked: Vec<Value> =
        input.messages.iter().map(|message| mark(tokenizer, message, with_markup(message), marker)).collect();
    let marked_tools: Option<Vec<Value>> =
        input.tools.map(|tools| tools.iter().map(|tool| mark(tokenizer, tool, true, marker)).collect());
    let rendered =
        template.render_input(&ChatInput { messages: &marked, tools: marked_tools.as_deref(), ..*input })?;
    if rendered.contains(&format!("\\u{:04x}", u32::from(marker))) {
        return Err(refuse("the template escapes characters beyond ASCII"));
    }

    let mut text = String::with_capacity(rendered.len());
    let mut protected = Vec::new();
    for character in rendered.chars() {
        if character == marker {
            protected.push(text.len());
        } else {
            text.push(character);
        }
    }
    // The split below must be the tokenizer's own wherever nothing is protected.
    if encode_split(tokenizer, &text, &[])? != tokenizer.encode(&text)? {
        return Err(refuse("the tokenizer finds its added tokens in a way that lego does not know"));
    }
    encode_split(tokenizer, &text, &protected)
}

/// `value` with `marker` after the first character of each control token's text.
fn mark(tokenizer: &Tokenizer, value: &Value, with_markup: bool, marker: char) -> Value {
    let mark_text = |text: &str| {
        let mut marked = String::with_capacity(text.len() + 8);
        let mut copied = 0;
        let mut from = 0;
        // Overlapping occurrences are marked as well: a next one may begin inside this one.
        while let Some((at, token)) = tokenizer.find_control(text, from, with_markup) {
            let first = token.content.chars().next().map_or(1, char::len_utf8);
            marked.push_str(&text[copied..at + first]);
            marked.push(marker);
            copied = at + first;
            from = copied;
        }
        marked.push_str(&text[copied..]);
        marked
    };
    match value {
        Value::String(text) => Value::String(mark_text(text)),
        Value::Array(items) => items.iter().map(|item| mark(tokenizer, item, with_markup, marker)).collect(),
        Value::Object(fields) => fields
            .iter()
            .map(|(key, value)| (mark_text(key), mark(tokenizer, value, with_markup, marker)))
            .collect(),
        other => other.clone(),
    }
}

/// Encodes `text`: added tokens become their ids, except where one covers a `protected` byte; the rest is text.
fn encode_split(tokenizer: &Tokenizer, text: &str, protected: &[usize]) -> Result<Vec<u32>, TextError> {
    let mut ids = Vec::new();
    let mut begin = 0;
    let mut from = 0;
    let push_text = |ids: &mut Vec<u32>, part: &str| {
        if part.is_empty() {
            return Ok(());
        }
        let part_ids = tokenizer.encode_text(part)?;
        if let Some(&id) = part_ids.iter().find(|&&id| tokenizer.is_control(id)) {
            return Err(TextError::ControlToken {
                token: tokenizer.id_to_token(id).unwrap_or_default(),
                why: "the tokenizer's merges make this token out of text".to_owned(),
            });
        }
        ids.extend(part_ids);
        Ok(())
    };
    while let Some((at, token)) = tokenizer.find_added(text, from) {
        let end = at + token.content.len();
        let first = protected.partition_point(|&position| position <= at);
        // A one-character token has no inside: its mark is at its end.
        let is_protected = protected.get(first).is_some_and(|&position| {
            position < end || (position == end && token.content.chars().nth(1).is_none())
        });
        if is_protected {
            from = at + text[at..].chars().next().map_or(1, char::len_utf8);
            continue;
        }
        push_text(&mut ids, &text[begin..at])?;
        ids.push(token.id);
        begin = end;
        from = end;
    }
    push_text(&mut ids, &text[begin..])?;
    Ok(ids)
}
