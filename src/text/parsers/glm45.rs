//! `<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>`: GLM 4.5.
//!
//! A value's bytes are kept, line breaks too. It ends at the `</arg_value>` that closes it (one that closes an
//! `<arg_value>` of its own text does not) and after which a key or the call's end follows. Where no type is declared a
//! value that is JSON is passed as it is, since the template writes everything but strings as JSON; see
//! [`super::values`].

use super::form::{CallParser, Step};
use super::schemas::ToolSchemas;
use super::section::is_of_name;
use super::sink::{Malformation, Sink};
use super::values::Arguments;
use super::window::{Next, Tags, Window};

const OPEN: Tags = &["<tool_call>"];
const CLOSE: Tags = &["</tool_call>"];
/// A call goes on with a key, or ends.
const KEY: Tags = &["<arg_key>", "</tool_call>"];
const KEY_END: Tags = &["</arg_key>"];
const VALUE: Tags = &["<arg_value>"];
const IN_VALUE: Tags = &["</arg_value>", "<arg_value>"];

#[derive(Debug)]
pub(super) struct Glm45 {
    schemas: ToolSchemas,
    state: State,
    name: String,
    arguments: Arguments,
    /// Values within the value.
    depth: usize,
}

#[derive(Debug)]
enum State {
    Open,
    Name {
        from: usize,
    },
    KeyText {
        from: usize,
    },
    ValueOpen,
    Value,
    /// After `</arg_value>`, which ends the value there if markup follows.
    ValueEnd {
        end: usize,
    },
}

impl Glm45 {
    pub fn new(schemas: &ToolSchemas) -> Self {
        Self {
            schemas: schemas.clone(),
            state: State::Open,
            name: String::new(),
            arguments: Arguments::new(),
            depth: 0,
        }
    }

    /// Which of [`KEY`] was read; true at the call's end.
    fn after_tag(&mut self, tag: usize, window: &mut Window, sink: &mut Sink) -> bool {
        if tag == 0 {
            self.state = State::KeyText { from: window.at };
            return false;
        }
        self.arguments.end(sink);
        sink.end(window);
        true
    }
}

impl CallParser for Glm45 {
    fn tags(&self) -> Tags {
        &["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
    }

    fn openers(&self) -> Tags {
        OPEN
    }

    fn breaks_before(&self) -> usize {
        1
    }

    fn begin(&mut self, _: Option<usize>) {
        self.state = State::Open;
    }

    fn read(&mut self, window: &mut Window, sink: &mut Sink) -> Result<Step, Malformation> {
        loop {
            match self.state {
                State::Open => {
                    window.skip_space();
                    if window.rest().is_empty() {
                        return Ok(Step::Wait);
                    }
                    self.state = State::Name { from: window.at };
                }
                State::Name { from } => {
                    let found = window.find_name(from, KEY, |_| true).map_err(|()| Malformation::Name)?;
                    let Some(tag) = found else { return Ok(Step::Wait) };
                    let name = window.slice(from..window.at - KEY[tag].len()).trim_ascii_end();
                    if name.is_empty() || !name.chars().all(is_of_name) {
                        return Err(Malformation::Name);
                    }
                    self.name = name.to_owned();
                    self.arguments = Arguments::new();
                    sink.start(self.name.clone(), None);
                    if self.after_tag(tag, window, sink) {
                        return Ok(Step::Close);
                    }
                }
                State::KeyText { from } => {
                    let found = window.find_name(from, KEY_END, |_| true).map_err(|()| Malformation::Name)?;
                    let Some(tag) = found else { return Ok(Step::Wait) };
                    let key = window.slice(from..window.at - KEY_END[tag].len()).trim_ascii();
                    if key.is_empty() {
                        return Err(Malformation::Name);
                    }
                    let kind = self.schemas.kind(&self.name, key);
                    self.arguments.key(key, kind, sink)?;
                    self.state = State::ValueOpen;
                }
                State::ValueOpen => {
                    window.skip_space();
                    match window.next(VALUE) {
                        Next::Wait => return Ok(Step::Wait),
                        Next::Tag(_) => {}
                        Next::Other => return Err(Malformation::Markup),
                    }
                    self.arguments.begin(window.at);
                    self.depth = 0;
                    self.state = State::Value;
                }
                State::Value => {
                    let found = window.find(IN_VALUE);
                    let end = window.at - found.map_or(0, |tag| IN_VALUE[tag].len());
                    self.arguments.more(end, window, sink);
                    match found {
                        None => return Ok(Step::Wait),
                        Some(0) if self.depth == 0 => self.state = State::ValueEnd { end },
                        Some(0) => self.depth -= 1,
                        Some(_) => self.depth += 1,
                    }
                }
                State::ValueEnd { end } => {
                    window.skip_space();
                    match window.next(KEY) {
                        Next::Wait => return Ok(Step::Wait),
                        Next::Tag(tag) => {
                            self.arguments.close(end, window, sink);
                            if self.after_tag(tag, window, sink) {
                                return Ok(Step::Close);
                            }
                        }
                        Next::Other => self.state = State::Value,
                    }
                }
            }
        }
    }

    fn closers(&self) -> Tags {
        CLOSE
    }
}
