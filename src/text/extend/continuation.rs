//! What a template writes after an assistant turn, and what it does to all that stands before.

use serde_json::Value;

use super::super::chat::{ChatInput, normal_forms};
use super::super::marking::{Marking, all_text};
use super::super::{ChatTemplate, TextError, Tokenizer};
use super::stand_in::{StandIns, Turn, Unplaced};

/// What follows the assistant turn before message `answered`, in the rendering of the whole conversation.
pub(super) struct Continuation<'a> {
    marking: Marking<'a>,
    stand_ins: StandIns,
    /// Where a turn opens in another way than it did in the prompt that it answers.
    pub(super) openings: Vec<Opening>,
    /// What the template writes between the turn's own words and the token that ends it.
    pub(super) close: String,
    /// The token that ends the turn.
    pub(super) end: u32,
    /// From that token on: with it, the new messages, and the beginning of the next turn. Marked.
    rest: String,
    /// The whole conversation as it is, marked; `Err` if the template refuses it.
    whole: Result<String, TextError>,
}

/// Text between one turn and the words of the next that differs from the prompt that the next one answers: what is
/// left of both behind what they share. Only the beginning of an assistant's turn may differ.
#[derive(Debug)]
pub(super) struct Opening {
    turn: usize,
    pub(super) prompt: String,
    pub(super) now: String,
}

/// Why there is no continuation.
#[derive(Debug)]
pub(super) enum Break {
    /// The template refuses the messages, or they cannot be text.
    Text(TextError),
    /// The template writes no tool calls.
    Calls,
    Why(String),
}

impl From<TextError> for Break {
    fn from(error: TextError) -> Self {
        Self::Text(error)
    }
}

impl From<Unplaced> for Break {
    fn from(unplaced: Unplaced) -> Self {
        match unplaced {
            Unplaced::Calls => Self::Calls,
            Unplaced::Other(why) => Self::Why(why),
        }
    }
}

impl<'a> Continuation<'a> {
    /// Renders the prompt that the turn answers, and the whole conversation, both with stand-ins for what was sampled,
    /// and compares them. `ends`: the tokens that end a turn, with their text.
    pub(super) fn of(
        tokenizer: &'a Tokenizer,
        template: &'a ChatTemplate,
        ends: &[(u32, String)],
        answered: usize,
        input: &ChatInput<'_>,
    ) -> Result<Self, Break> {
        let messages = normal_forms(template, input.messages)?;
        let input = ChatInput { messages: &messages, ..*input };
        let marking = Marking::of(tokenizer, template, &input)?;
        let stand_ins = StandIns::for_turns_of(&messages[..answered], &all_text(template, &input));
        let replaced = stand_ins.put_in(&messages, template).map_err(|index| {
            let why =
                "has a tool call without a function; give {\"function\": {\"name\": …, \"arguments\": …}}";
            TextError::Messages(format!("messages[{index}] {why}"))
        })?;
        let prompt = ChatInput { messages: &replaced[..answered - 1], add_generation_prompt: true, ..input };
        let prompt = marking.render(&prompt)?;
        let now = marking.render(&ChatInput { messages: &replaced, ..input })?;
        let count = stand_ins.turns.len();
        let in_prompt = stand_ins.find(&prompt, count - 1)?;
        let in_now = stand_ins.find(&now, count)?;

        let mut openings = Vec::new();
        let (mut prompt_from, mut now_from) = (0, 0);
        for turn in 0..count {
            let prompt_to = in_prompt.get(turn).map_or(prompt.len(), |range| range.start);
            let (prompt_part, now_part) =
                (&prompt[prompt_from..prompt_to], &now[now_from..in_now[turn].start]);
            if prompt_part != now_part {
                let shared = shared_length(prompt_part, now_part);
                let (prompt, now) = (prompt_part[shared..].to_owned(), now_part[shared..].to_owned());
                openings.push(Opening { turn, prompt, now });
            }
            prompt_from = in_prompt.get(turn).map_or(prompt.len(), |range| range.end);
            now_from = in_now[turn].end;
        }

        let after = &now[now_from..];
        let end = ends
            .iter()
            .filter_map(|(id, text)| Some((after.find(text)?, std::cmp::Reverse(text.len()), *id)))
            .min();
        let Some((at, _, end)) = end else {
            return Err(Break::Why(format!(
                "the template ends an assistant's turn with {:?}, which holds none of the tokens that end a turn ({}); \
                 eos_token of tokenizer_config.json and eos_token_id of generation_config.json name them",
                beginning(after),
                ends.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join(" ")
            )));
        };
        let (close, rest) = (after[..at].to_owned(), after[at..].to_owned());
        let whole = marking.render(&input);
        Ok(Self { marking, stand_ins, openings, close, end, rest, whole })
    }

    /// The rendering of the whole conversation ends with this one's new part.
    pub(super) fn check_whole(&self) -> Result<(), String> {
        match &self.whole {
            Ok(whole) if !whole.ends_with(&self.rest) => {
                let shared =
                    whole.chars().rev().zip(self.rest.chars().rev()).take_while(|(a, b)| a == b).count();
                let at = self.rest.chars().count() - shared;
                let differs: String = self.rest.chars().skip(at.saturating_sub(40)).take(80).collect();
                Err(format!(
                    "what the template writes after a turn depends on the turn's own words, near {differs:?}"
                ))
            }
            // What the template refuses as a whole has no rendering to differ from.
            _ => Ok(()),
        }
    }

    /// The text from the end of the turn on, with the marks of text that is not to become control tokens.
    pub(super) fn rest(&self) -> &str {
        &self.rest
    }

    /// Ids from the end of the turn on.
    pub(super) fn ids(&self) -> Result<Vec<u32>, TextError> {
        self.marking.encode(&self.rest)
    }

    pub(super) fn turn_of(&self, opening: &Opening) -> &Turn {
        &self.stand_ins.turns[opening.turn]
    }

    /// The turn that the lineage ends with.
    pub(super) fn last_turn(&self) -> &Turn {
        &self.stand_ins.turns[self.stand_ins.turns.len() - 1]
    }
}

/// Whether `messages[answered - 1]` is an assistant's turn.
pub(super) fn ends_with_turn(messages: &[Value], answered: usize) -> bool {
    answered > 0 && messages.get(answered - 1).is_some_and(|message| message["role"] == "assistant")
}

fn shared_length(a: &str, b: &str) -> usize {
    let both = a.char_indices().zip(b.chars()).find(|((_, a), b)| a != b);
    both.map_or(a.len().min(b.len()), |((at, _), _)| at)
}

pub(super) fn beginning(text: &str) -> String {
    text.chars().take(60).collect()
}
