//! Renderings in which the text of control tokens is told apart by where it came from.

use std::ops::Range;

use serde_json::Value;

use super::chat::ChatInput;
use super::{ChatTemplate, TextError, Tokenizer};

/// Renders with a private-use character inside every control token's text that messages or tools hold, so that it can
/// be told from the template's own; takes the characters out again when it encodes, with those occurrences as text.
/// To the template such text is text as well. Messages that hold no such text get no marks.
pub(super) struct Marking<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    /// The mark, and one of the texts that need it.
    marker: Option<(char, String)>,
}

impl<'a> Marking<'a> {
    /// A marking for renderings of these messages and tools, or of parts of them.
    pub(super) fn of(
        tokenizer: &'a Tokenizer,
        template: &'a ChatTemplate,
        input: &ChatInput<'_>,
    ) -> Result<Self, TextError> {
        let Some(found) = control_text(tokenizer, input) else {
            return Ok(Self { tokenizer, template, marker: None });
        };
        let everything = all_text(template, input);
        match ('\u{e000}'..='\u{f8ff}').find(|&marker| !everything.contains(marker)) {
            Some(marker) => Ok(Self { tokenizer, template, marker: Some((marker, found)) }),
            None => Err(refuse(&found, "the messages use every private-use character")),
        }
    }

    /// The rendering, with marks.
    pub(super) fn render(&self, input: &ChatInput<'_>) -> Result<String, TextError> {
        let Some((marker, found)) = &self.marker else {
            return self.template.render_input(input);
        };
        let mark = |value: &Value, with_markup| mark(self.tokenizer, value, with_markup, *marker);
        let messages: Vec<Value> =
            input.messages.iter().map(|message| mark(message, with_markup(message))).collect();
        let tools: Option<Vec<Value>> =
            input.tools.map(|tools| tools.iter().map(|tool| mark(tool, true)).collect());
        let rendered = self.template.render_input(&ChatInput {
            messages: &messages,
            tools: tools.as_deref(),
            ..*input
        })?;
        if rendered.contains(&format!("\\u{:04x}", u32::from(*marker))) {
            return Err(refuse(found, "the template escapes characters beyond ASCII"));
        }
        Ok(rendered)
    }

    /// The ids of a rendering with marks, or of a part of one that begins with an added token.
    pub(super) fn encode(&self, marked: &str) -> Result<Vec<u32>, TextError> {
        let Some((marker, found)) = &self.marker else {
            return self.tokenizer.encode(marked);
        };
        let mut text = String::with_capacity(marked.len());
        let mut protected = Vec::new();
        for character in marked.chars() {
            if character == *marker {
                protected.push(text.len());
            } else {
                text.push(character);
            }
        }
        // The split below must be the tokenizer's own wherever nothing is protected.
        if encode_split(self.tokenizer, &text, &[])? != self.tokenizer.encode(&text)? {
            return Err(refuse(
                found,
                "the tokenizer finds its added tokens in a way that lego does not know",
            ));
        }
        encode_split(self.tokenizer, &text, &protected)
    }
}

fn refuse(token: &str, why: &str) -> TextError {
    TextError::ControlToken { token: token.to_owned(), why: why.to_owned() }
}

/// Everything that can come up in a rendering, to choose a text that does not.
pub(super) fn all_text(template: &ChatTemplate, input: &ChatInput<'_>) -> String {
    format!(
        "{}{}{}",
        template.source(),
        Value::from(input.messages),
        Value::from(input.tools.unwrap_or_default())
    )
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
    let push_text = |ids: &mut Vec<u32>, part: Range<usize>| {
        if part.is_empty() {
            return Ok(());
        }
        let part_ids = match part.start {
            0 => tokenizer.encode_first_text(&text[part])?,
            _ => tokenizer.encode_text(&text[part])?,
        };
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
        push_text(&mut ids, begin..at)?;
        ids.push(token.id);
        begin = end;
        from = end;
    }
    push_text(&mut ids, begin..text.len())?;
    Ok(ids)
}
