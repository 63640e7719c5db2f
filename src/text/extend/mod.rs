//! New messages rendered after a lineage: the ids of what comes after it, and of nothing else.
//!
//! A lineage holds a prompt and the ids sampled on it, as they are. Templates would write the sampled part another way
//! when it is history: they drop reasoning, print arguments anew. So nothing is taken from how a template writes old
//! assistant turns. [`Extender::tail`] renders the conversation with a stand-in for every turn that was sampled, and
//! takes what stands after the last one.
//!
//! Invariants:
//! - A tail is, id by id, what the rendering of the whole conversation ends with, from the token that ends the turn on.
//!   Where the template refuses the whole conversation (a sampled call that it cannot print), nothing else is compared.
//! - What is not sampled and stands before the tail (system text, tools, messages, results) is in the lineage as it is
//!   in the rendering of the whole conversation. A template that moves or changes it is found when it is loaded, on
//!   probes, or else by [`Extender::tail`] on the very conversation, and refused.
//! - Between the last new message and a turn's own words stands what opens the turn. Only there, and only in the ways
//!   that the probes have shown, may the whole rendering differ from the prompt that was sampled on: an opened
//!   `<think>`, for one, that history does without.
//! - Text of messages never becomes a control token.

mod continuation;
mod difference;
mod probes;
mod stand_in;

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Map, Value};

use self::continuation::{Break, Continuation, Opening, beginning, ends_with_turn};
pub use self::difference::{Difference, difference};
use self::probes::{FORMS_NEEDED, PROBE, Probe, probes};
use self::stand_in::Turn;
use super::{ChatInput, ChatTemplate, TextError, Tokenizer, encode_chat};

/// Stand for a call's name and id in what the probes have shown; no template writes them.
const NAME: &str = "\u{0}name\u{0}";
const ID: &str = "\u{0}id\u{0}";

/// A form of conversation that [`Extender::tail`] refuses, as far as probes tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// The last turn, and what follows it.
    pub form: String,
    /// The first probe of this form that failed.
    pub probe: String,
    /// What differs, and where; or how the template refuses it.
    pub why: String,
    /// Whether the template itself refuses such a conversation, so that no server could render it.
    pub is_refused_whole: bool,
}

const NO_CALLS: &str = "the template does not write tool calls";

/// Why a template cannot be served by appending new messages: serve it by rendering the whole conversation each turn.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the chat template cannot be continued message by message: {why} (seen with: {probe})")]
pub struct NotIncremental {
    /// The conversation that showed it.
    pub probe: String,
    /// What differs, and where.
    pub why: String,
}

/// A template with its tokenizer, proven at load to render new messages without the old ones.
pub struct Extender {
    tokenizer: Arc<Tokenizer>,
    template: Arc<ChatTemplate>,
    kwargs: Option<Map<String, Value>>,
    ends: Vec<(u32, String)>,
    /// The ways in which a turn's opening may differ from its prompt's: what is left of both behind what they share.
    openings: BTreeSet<(String, String)>,
    /// What the template writes between a turn's words and its end.
    close: Option<String>,
    /// As `close`, behind the arguments of a call; `None` if the template writes no calls.
    call_close: Option<String>,
    limits: Vec<Limit>,
}

impl std::fmt::Debug for Extender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Extender")
            .field("tokenizer", &self.tokenizer)
            .field("template", &self.template)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl Extender {
    /// Proves on probe conversations (with and without system text, tools, tool calls, several results, reasoning) that
    /// the ids appended to a lineage are those that the rendering of the whole conversation has there.
    /// `kwargs`: the further variables of the template that conversations will be rendered with.
    ///
    /// What only some conversations show is found by [`Self::tail`]; [`Self::limits`] says which.
    ///
    /// # Errors
    /// Neither a question behind an answer nor results behind a call can be appended: the probe that differs, and where.
    pub fn prove(
        tokenizer: Arc<Tokenizer>,
        template: Arc<ChatTemplate>,
        kwargs: Option<&Map<String, Value>>,
    ) -> Result<Self, NotIncremental> {
        let added = |id: &u32| Some((*id, tokenizer.added_text(*id)?.to_owned()));
        let mut extender = Self {
            ends: tokenizer.eos_token_ids().iter().filter_map(added).collect(),
            tokenizer,
            template,
            kwargs: kwargs.cloned(),
            openings: BTreeSet::new(),
            close: None,
            call_close: None,
            limits: Vec::new(),
        };
        let probes = probes();
        for form in probes.chunk_by(|a, b| a.form == b.form) {
            let limit = extender.try_form(form);
            extender.limits.extend(limit);
        }
        let needed = FORMS_NEEDED.map(|form| extender.limits.iter().find(|limit| limit.form == form));
        match needed {
            [Some(limit), Some(_)] => {
                Err(NotIncremental { probe: limit.probe.clone(), why: limit.why.clone() })
            }
            _ => Ok(extender),
        }
    }

    /// All probes of a form: what of it cannot be continued. A template may refuse some of them (system text, tools, a
    /// history with calls), not all.
    fn try_form(&mut self, form: &[Probe]) -> Option<Limit> {
        let (mut not_shown, mut is_shown) = (None, false);
        for probe in form {
            let limit = |why, is_refused_whole| Limit {
                form: probe.form.clone(),
                probe: probe.name.clone(),
                why,
                is_refused_whole,
            };
            let why_not = match self.learn(probe) {
                Ok(()) => {
                    is_shown = true;
                    continue;
                }
                Err(Break::Why(why)) => return Some(limit(why, false)),
                Err(Break::Calls) => limit(NO_CALLS.to_owned(), false),
                Err(Break::Text(error)) => limit(first_line(&error.to_string()), true),
            };
            not_shown.get_or_insert(why_not);
        }
        not_shown.filter(|_| !is_shown)
    }

    /// One probe: takes in what it shows of how turns open and close.
    /// `Err(Break::Text)`: the template refuses the whole conversation as well, so there is nothing to be shown.
    fn learn(&mut self, probe: &Probe) -> Result<(), Break> {
        let input = ChatInput {
            messages: &probe.messages,
            tools: probe.tools.as_deref(),
            add_generation_prompt: true,
            template_kwargs: self.kwargs.as_ref(),
        };
        let whole = encode_chat(&self.tokenizer, &self.template, &input)?;
        let found =
            match Continuation::of(&self.tokenizer, &self.template, &self.ends, probe.answered, &input) {
                Err(Break::Text(error)) => {
                    return Err(Break::Why(format!(
                        "of what the template renders whole it refuses a part: {error}"
                    )));
                }
                found => found?,
            };
        found.check_whole().map_err(Break::Why)?;
        let mut openings = Vec::new();
        for opening in &found.openings {
            let call = &found.turn_of(opening).first_call;
            let shown = (pattern(&opening.prompt, call), pattern(&opening.now, call));
            if shown.0.contains(PROBE) || shown.1.contains(PROBE) {
                return Err(Break::Why(format!(
                    "before an assistant's turn the prompt has {:?}, but the whole rendering has {:?}",
                    beginning(&opening.prompt),
                    beginning(&opening.now)
                )));
            }
            openings.push(shown);
        }
        let turn = found.last_turn();
        let close = pattern(&found.close, &turn.last_call);
        if close.contains(PROBE) {
            return Err(Break::Why(format!(
                "behind an assistant's words the template writes {:?}, where a token that ends a turn should be ({})",
                beginning(&found.close),
                self.ends.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join(" ")
            )));
        }
        let known = if turn.has_calls { &mut self.call_close } else { &mut self.close };
        if known.get_or_insert_with(|| close.clone()) != &close {
            return Err(Break::Why(format!(
                "a turn closes with {:?} here, elsewhere with {:?}",
                beginning(&close),
                beginning(known.as_deref().unwrap_or_default())
            )));
        }
        self.openings.extend(openings);

        let tail = found.ids()?;
        let Some(before) = whole.strip_suffix(&tail[..]) else {
            return Err(Break::Why(format!(
                "the ids of {:?} are others as a part of the whole than alone",
                beginning(found.rest())
            )));
        };
        let last_words = format!("{}{}", probe.last_words, found.close);
        if !self.tokenizer.decode(before, false).ends_with(&last_words) {
            return Err(Break::Why(format!(
                "the turn that ends with {:?} does not end there",
                probe.last_words
            )));
        }
        Ok(())
    }

    /// Ids to append to a lineage that ends with `sampled`, the ids that the model sampled for the assistant's turn
    /// `messages[answered - 1]`: the end of the turn as far as it was not sampled, `messages[answered..]`, and the
    /// generation prompt if `input` asks for it. Messages and tools before are those that the lineage was rendered
    /// from. Text is rendered whole, twice with stand-ins and once as it is; ids are made of the new part only.
    ///
    /// # Errors
    /// Messages that the template refuses; text that cannot be kept as text; [`TextError::Tail`] where the lineage
    /// with a tail would not be what the template makes of the conversation: render it whole.
    pub fn tail(
        &self,
        sampled: &[u32],
        answered: usize,
        input: &ChatInput<'_>,
    ) -> Result<Vec<u32>, TextError> {
        let refuse = |why: String| Err(TextError::Tail(why));
        if !ends_with_turn(input.messages, answered) {
            return refuse(format!("message {answered} is not an assistant's turn that was sampled"));
        }
        let is_set = |kwargs: &&Map<String, Value>| !kwargs.is_empty();
        if input.template_kwargs.filter(is_set) != self.kwargs.as_ref().filter(is_set) {
            return refuse("chat_template_kwargs are not those that the template was proven with".to_owned());
        }
        let found = match Continuation::of(&self.tokenizer, &self.template, &self.ends, answered, input) {
            Ok(found) => found,
            Err(Break::Text(error)) => return Err(error),
            Err(Break::Why(why)) => return refuse(why),
            Err(Break::Calls) => return refuse(NO_CALLS.to_owned()),
        };
        if let Some(opening) =
            found.openings.iter().find(|opening| !self.has_seen(opening, found.turn_of(opening)))
        {
            return refuse(format!(
                "the template now writes {:?} where the lineage has {:?}",
                beginning(&opening.now),
                beginning(&opening.prompt)
            ));
        }
        let turn = found.last_turn();
        let close = if turn.has_calls { &self.call_close } else { &self.close };
        if close.as_ref().map(|close| filled(close, &turn.last_call)).as_ref() != Some(&found.close) {
            return refuse(format!("the template closes the turn with {:?}", beginning(&found.close)));
        }
        if let Err(why) = found.check_whole() {
            return refuse(why);
        }
        let mut ids = found.ids()?;
        match sampled.last() {
            Some(last) if *last == found.end => {
                ids.remove(0);
            }
            Some(last) if self.ends.iter().any(|(id, _)| id == last) => {
                return refuse(format!(
                    "the model ended its turn with {:?}, the template ends it with {:?}",
                    self.text_of(*last),
                    self.text_of(found.end)
                ));
            }
            _ if !turn.has_calls && !found.close.is_empty() => {
                return refuse(format!("the turn was cut before the template's {:?}", found.close));
            }
            _ => {}
        }
        Ok(ids)
    }

    /// The forms of conversation that it cannot continue, as far as probes tell.
    #[must_use]
    pub fn limits(&self) -> &[Limit] {
        &self.limits
    }

    fn has_seen(&self, opening: &Opening, turn: &Turn) -> bool {
        let is_filled = |pattern: &str, text: &str| filled(pattern, &turn.first_call) == text;
        self.openings
            .iter()
            .any(|(prompt, now)| is_filled(prompt, &opening.prompt) && is_filled(now, &opening.now))
    }

    fn text_of(&self, end: u32) -> &str {
        self.ends.iter().find(|(id, _)| *id == end).map_or("", |(_, text)| text)
    }
}

/// Of an error; the rest of a template's error is its source, and where in it.
fn first_line(error: &str) -> String {
    let line = error.lines().next().unwrap_or_default();
    line.rsplit_once(" (in ").map_or(line, |(what, _)| what).to_owned()
}

/// What a probe has shown, for calls of any name and id.
fn pattern(text: &str, (name, id): &(String, String)) -> String {
    let replace = |text: String, what: &str, by| if what.is_empty() { text } else { text.replace(what, by) };
    replace(replace(text.to_owned(), id, ID), name, NAME)
}

fn filled(pattern: &str, (name, id): &(String, String)) -> String {
    pattern.replace(ID, id).replace(NAME, name)
}
