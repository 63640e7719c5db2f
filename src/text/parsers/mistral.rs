//! `[TOOL_CALLS]`: Mistral, both forms.
//!
//! - until tokenizer v7: `[TOOL_CALLS] [{"name": …, "arguments": {…}, "id": …}, …]`, a JSON list;
//! - from v11 on: `[TOOL_CALLS]name{…}`, `[TOOL_CALLS]name[ARGS]{…}`, `[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`, one tag a
//!   call.
//!
//! A call is whole where its JSON object ends. After a malformed call the rest is content: the form has no closing tag
//! to go on from, and what looks like the next call may be text of the malformed one. An id that is written after the
//! arguments, as in the list, comes too late to be given.

use super::call_object::{CallArguments, CallObject, Keys, Read};
use super::form::{CallParser, Step};
use super::sink::{Malformation, Sink};
use super::window::{Tags, Window};

const OPEN: Tags = &["[TOOL_CALLS]"];
const AFTER_NAME: Tags = &["[ARGS]", "[CALL_ID]", "{"];
const ID: usize = 1;
const BRACE: usize = 2;
const ARGS: Tags = &["[ARGS]"];
const KEYS: Keys = Keys { arguments: &["arguments"], has_id: true, is_strict: false };

#[derive(Debug)]
pub(super) struct Mistral {
    state: State,
}

#[derive(Debug)]
enum State {
    /// After the tag.
    Open,
    Name {
        from: usize,
    },
    Id {
        name: String,
        from: usize,
    },
    Arguments(CallArguments),
    /// In the list, before an item; the first may be missing.
    Item {
        is_first: bool,
    },
    ItemObject(CallObject),
    AfterItem,
}

impl Mistral {
    pub fn new() -> Self {
        Self { state: State::Open }
    }
}

impl CallParser for Mistral {
    fn tags(&self) -> Tags {
        &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]
    }

    fn openers(&self) -> Tags {
        OPEN
    }

    fn breaks_before(&self) -> usize {
        0
    }

    fn begin(&mut self, _: Option<usize>) {
        self.state = State::Open;
    }

    fn read(&mut self, window: &mut Window, sink: &mut Sink) -> Result<Step, Malformation> {
        loop {
            match &mut self.state {
                State::Open => {
                    window.skip_space();
                    match window.rest().as_bytes().first() {
                        None => return Ok(Step::Wait),
                        // Only a list may begin so: names have no brackets.
                        Some(b'[') => {
                            window.at += 1;
                            self.state = State::Item { is_first: true };
                        }
                        Some(_) => self.state = State::Name { from: window.at },
                    }
                }
                State::Name { from } => {
                    let found = window.find_name(*from, AFTER_NAME, is_of_name);
                    let Some(tag) = found.map_err(|()| Malformation::Name)? else { return Ok(Step::Wait) };
                    let name = window.slice(*from..window.at - AFTER_NAME[tag].len());
                    if name.is_empty() {
                        return Err(Malformation::Name);
                    }
                    self.state = match tag {
                        ID => State::Id { name: name.to_owned(), from: window.at },
                        _ => State::Arguments(CallArguments::new(name, None)),
                    };
                    // The brace is the arguments'.
                    window.at -= usize::from(tag == BRACE);
                }
                State::Id { name, from } => {
                    let found = window.find_name(*from, ARGS, is_of_name);
                    let Some(tag) = found.map_err(|()| Malformation::Markup)? else { return Ok(Step::Wait) };
                    let id = window.slice(*from..window.at - ARGS[tag].len());
                    let id = (!id.is_empty()).then_some(id);
                    self.state = State::Arguments(CallArguments::new(name, id));
                }
                State::Arguments(arguments) => {
                    if arguments.read(window, sink)? == Read::Wait {
                        return Ok(Step::Wait);
                    }
                    sink.end(window);
                    return Ok(Step::Close);
                }
                State::Item { is_first } => {
                    window.skip_space();
                    match window.rest().as_bytes().first() {
                        None => return Ok(Step::Wait),
                        Some(b'{') => self.state = State::ItemObject(CallObject::new(KEYS)),
                        Some(b']') if *is_first => {
                            window.at += 1;
                            return Ok(Step::Close);
                        }
                        Some(_) => return Err(Malformation::Json),
                    }
                }
                State::ItemObject(object) => {
                    if object.read(window, sink)? == Read::Wait {
                        return Ok(Step::Wait);
                    }
                    sink.end(window);
                    self.state = State::AfterItem;
                }
                State::AfterItem => {
                    window.skip_space();
                    match window.rest().as_bytes().first() {
                        None if window.is_end() => return Ok(Step::Close),
                        None => return Ok(Step::Wait),
                        Some(b',') => {
                            window.at += 1;
                            self.state = State::Item { is_first: false };
                        }
                        Some(b']') => {
                            window.at += 1;
                            return Ok(Step::Close);
                        }
                        Some(_) => return Err(Malformation::Json),
                    }
                }
            }
        }
    }

    fn closers(&self) -> Tags {
        &[]
    }
}

fn is_of_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || "_-.:/".contains(character)
}
