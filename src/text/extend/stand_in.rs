//! Stand-ins for sampled assistant turns: short turns whose place in a rendering can be found.

use std::ops::Range;

use serde_json::{Map, Value, json};

use super::super::template::ChatTemplate;

/// Fields of a message that hold an assistant's reasoning. Templates drop it from earlier turns; a stand-in has none.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Stand-ins for the assistant turns of one conversation.
#[derive(Debug)]
pub(super) struct StandIns {
    /// Begins every stand-in word; occurs nowhere else in messages, tools or template.
    stem: String,
    pub(super) turns: Vec<Turn>,
}

/// What is known of one assistant turn.
#[derive(Debug)]
pub(super) struct Turn {
    /// Its place in the messages.
    pub(super) index: usize,
    pub(super) has_calls: bool,
    /// Name and id of its first call: the template may write them before the call's arguments.
    pub(super) first_call: (String, String),
    /// Name and id of its last call: the template may write them after the call's arguments.
    pub(super) last_call: (String, String),
}

impl StandIns {
    /// For the assistant turns of `messages`, with words that do not occur in `everything`.
    pub(super) fn for_turns_of(messages: &[Value], everything: &str) -> Self {
        let stem = (0..)
            .map(|number| format!("turn{number}x"))
            .find(|stem| !everything.contains(stem))
            .expect("a text is finite");
        let turns = messages
            .iter()
            .enumerate()
            .filter(|(_, message)| message["role"] == "assistant")
            .map(|(index, message)| {
                let calls = message["tool_calls"].as_array().map_or(&[][..], Vec::as_slice);
                Turn {
                    index,
                    has_calls: !calls.is_empty(),
                    first_call: calls.first().map(name_and_id).unwrap_or_default(),
                    last_call: calls.last().map(name_and_id).unwrap_or_default(),
                }
            })
            .collect();
        Self { stem, turns }
    }

    fn content_word(&self, turn: usize) -> String {
        format!("{}c{turn}z", self.stem)
    }

    fn arguments_word(&self, turn: usize) -> String {
        format!("{}a{turn}z", self.stem)
    }

    /// `messages`, with a stand-in in place of each of these turns.
    ///
    /// # Errors
    /// The index of a message with a tool call that names no function.
    pub(super) fn put_in(&self, messages: &[Value], template: &ChatTemplate) -> Result<Vec<Value>, usize> {
        let mut replaced = messages.to_vec();
        for (number, turn) in self.turns.iter().enumerate() {
            let fields = replaced[turn.index].as_object_mut().ok_or(turn.index)?;
            REASONING.iter().for_each(|name| {
                fields.remove(*name);
            });
            let text = fields.get("content").and_then(Value::as_str).unwrap_or_default();
            let is_silent = text.trim().is_empty();
            let content = if turn.has_calls && is_silent { String::new() } else { self.content_word(number) };
            fields.insert("content".to_owned(), Value::from(content));
            for call in fields.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
                let function = call["function"].as_object_mut().ok_or(turn.index)?;
                function.insert("arguments".to_owned(), self.arguments(number, template));
            }
        }
        Ok(replaced)
    }

    fn arguments(&self, turn: usize, template: &ChatTemplate) -> Value {
        let word = self.arguments_word(turn);
        let arguments = Map::from_iter([(word.clone(), json!(word))]);
        if template.reads_argument_text() {
            Value::from(format!("{{\"{word}\": \"{word}\"}}"))
        } else {
            Value::Object(arguments)
        }
    }

    /// Where the first `count` turns stand in a rendering: from the first of their words to the end of the last one.
    ///
    /// # Errors
    /// What about the rendering makes it impossible to tell.
    pub(super) fn find(&self, rendering: &str, count: usize) -> Result<Vec<Range<usize>>, Unplaced> {
        let other = |what: &str| Err(Unplaced::Other(format!("the template {what}")));
        let mut found: Vec<Option<(Range<usize>, bool)>> = vec![None; count];
        let mut last = 0;
        for (at, stem) in rendering.match_indices(&self.stem) {
            let word = &rendering[at + stem.len()..];
            let Some((number, length)) = number_of(word) else { continue };
            if number < last || number >= count {
                return other("does not keep the order of the turns");
            }
            last = number;
            let end = at + stem.len() + length;
            let is_argument = word.starts_with('a');
            match &mut found[number] {
                Some((range, ends_in_arguments)) => {
                    range.end = end;
                    *ends_in_arguments = is_argument;
                }
                place => *place = Some((at..end, is_argument)),
            }
        }
        let mut ranges = Vec::with_capacity(count);
        for (number, (turn, found)) in self.turns.iter().zip(found).enumerate() {
            match found {
                Some((range, ends_in_arguments)) if ends_in_arguments == turn.has_calls => ranges.push(range),
                Some((range, _))
                    if turn.has_calls && !rendering[..range.end].contains(&self.arguments_word(number)) =>
                {
                    return Err(Unplaced::Calls);
                }
                Some(_) => return other("writes a turn's text after its tool calls"),
                None if turn.has_calls => return Err(Unplaced::Calls),
                None => return other("does not write an assistant's text"),
            }
        }
        Ok(ranges)
    }
}

/// Why the place of a turn cannot be told.
#[derive(Debug)]
pub(super) enum Unplaced {
    /// The template does not write tool calls.
    Calls,
    Other(String),
}

/// The number in the rest of a stand-in word, and the length of that rest.
fn number_of(word: &str) -> Option<(usize, usize)> {
    let end = word.find('z')?;
    Some((word.get(1..end)?.parse().ok()?, end + 1))
}

fn name_and_id(call: &Value) -> (String, String) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (text(&call["function"]["name"]), text(&call["id"]))
}
