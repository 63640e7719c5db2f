//! `<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>`: Qwen3-Coder, Qwen 3.5,
//! Nemotron 3. `<tool_call>` may be missing, as these models leave it out at times.
//!
//! One line break after a parameter's opening tag and one before its closing tag are markup. A value is plain text and
//! may hold markup itself (a file about this form), so where it ends is decided so:
//! - `</parameter>` ends it only if the next parameter or the function's end follows;
//! - a function's markup within a value (`<function=name>` to `</function>`) is part of the value;
//! - `</function></tool_call>` without `</parameter>` before it leaves open whether it is text: the call is malformed.
//!
//! A value's type is the declared one, a string where none is declared; see [`super::values`].

use super::form::{CallParser, Step};
use super::schemas::{Kind, ToolSchemas};
use super::section::is_of_name;
use super::sink::{Malformation, Sink};
use super::values::Arguments;
use super::window::{Next, Tags, Window};

const OPEN: Tags = &["<tool_call>", "<function="];
const FUNCTION: Tags = &["<function="];
const NAME_END: Tags = &[">"];
const PARAMETER: Tags = &["<parameter=", "</function>"];
const IN_VALUE: Tags = &["</parameter>", "<function=", "</function>"];
const CLOSE: Tags = &["</tool_call>", "<function="];

#[derive(Debug)]
pub(super) struct Qwen3Coder {
    schemas: ToolSchemas,
    state: State,
    /// Whether `<tool_call>` opened the call.
    is_wrapped: bool,
    name: String,
    arguments: Arguments,
    /// Functions within the value.
    depth: usize,
}

#[derive(Debug)]
enum State {
    /// After `<tool_call>`.
    Open,
    Name {
        from: usize,
    },
    Parameter,
    Key {
        from: usize,
    },
    /// After the parameter's opening tag.
    ValueBreak,
    Value,
    /// After `<function=` within a value.
    Inner {
        from: usize,
    },
    /// After `</parameter>`, which ends the value there if markup follows.
    ValueEnd {
        end: usize,
    },
    /// After `</function>` within a value, but not within a function there.
    StrayEnd,
    /// After `</function>`.
    Close,
}

impl Qwen3Coder {
    pub fn new(schemas: &ToolSchemas) -> Self {
        Self {
            schemas: schemas.clone(),
            state: State::Open,
            is_wrapped: true,
            name: String::new(),
            arguments: Arguments::new(),
            depth: 0,
        }
    }

    /// The value ends at `end`, but for one line break.
    fn without_break(&self, end: usize, window: &Window) -> usize {
        end - usize::from(window.slice(self.arguments.from()..end).ends_with('\n'))
    }

    /// After a parameter or before the first: which of [`PARAMETER`] was read.
    fn after_tag(&mut self, tag: usize, window: &Window, sink: &mut Sink) {
        self.state = if tag == 0 {
            State::Key { from: window.at }
        } else {
            self.arguments.end(sink);
            State::Close
        };
    }

    fn name_or_key(&mut self, from: usize, window: &mut Window) -> Result<Option<String>, Malformation> {
        let found = window.find_name(from, NAME_END, is_of_name).map_err(|()| Malformation::Name)?;
        if found.is_none() {
            return Ok(None);
        }
        let name = window.slice(from..window.at - 1);
        if name.is_empty() { Err(Malformation::Name) } else { Ok(Some(name.to_owned())) }
    }
}

impl CallParser for Qwen3Coder {
    fn tags(&self) -> Tags {
        &["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"]
    }

    fn openers(&self) -> Tags {
        OPEN
    }

    fn breaks_before(&self) -> usize {
        2
    }

    fn begin(&mut self, opener: Option<usize>) {
        self.is_wrapped = opener == Some(0);
        // Without `<tool_call>` the opening tag is the function's own.
        self.state = State::Open;
    }

    fn read(&mut self, window: &mut Window, sink: &mut Sink) -> Result<Step, Malformation> {
        loop {
            match self.state {
                State::Open if !self.is_wrapped => self.state = State::Name { from: window.at },
                State::Open => {
                    window.skip_space();
                    match window.next(FUNCTION) {
                        Next::Wait => return Ok(Step::Wait),
                        Next::Tag(_) => self.state = State::Name { from: window.at },
                        Next::Other => return Err(Malformation::Markup),
                    }
                }
                State::Name { from } => {
                    let Some(name) = self.name_or_key(from, window)? else { return Ok(Step::Wait) };
                    sink.start(name.clone(), None);
                    self.name = name;
                    self.arguments = Arguments::new();
                    self.state = State::Parameter;
                }
                State::Parameter => {
                    window.skip_space();
                    match window.next(PARAMETER) {
                        Next::Wait => return Ok(Step::Wait),
                        Next::Tag(tag) => self.after_tag(tag, window, sink),
                        Next::Other => return Err(Malformation::Markup),
                    }
                }
                State::Key { from } => {
                    let Some(key) = self.name_or_key(from, window)? else { return Ok(Step::Wait) };
                    let kind = match self.schemas.kind(&self.name, &key) {
                        Kind::Unknown => Kind::Text,
                        kind => kind,
                    };
                    self.arguments.key(&key, kind, sink)?;
                    self.state = State::ValueBreak;
                }
                State::ValueBreak => {
                    match window.rest().as_bytes().first() {
                        None => return Ok(Step::Wait),
                        Some(byte) => window.at += usize::from(*byte == b'\n'),
                    }
                    self.arguments.begin(window.at);
                    self.depth = 0;
                    self.state = State::Value;
                }
                State::Value => {
                    let found = window.find(IN_VALUE);
                    let end = window.at - found.map_or(0, |tag| IN_VALUE[tag].len());
                    self.arguments.more(self.without_break(end, window), window, sink);
                    match found {
                        None => return Ok(Step::Wait),
                        Some(0) if self.depth == 0 => self.state = State::ValueEnd { end },
                        Some(0) => {}
                        Some(1) => self.state = State::Inner { from: window.at },
                        Some(_) if self.depth > 0 => self.depth -= 1,
                        Some(_) => self.state = State::StrayEnd,
                    }
                }
                State::Inner { from } => match window.find_name(from, NAME_END, is_of_name) {
                    Ok(None) => return Ok(Step::Wait),
                    Ok(Some(_)) => {
                        self.depth += usize::from(window.at - 1 > from);
                        self.state = State::Value;
                    }
                    Err(()) => self.state = State::Value,
                },
                State::ValueEnd { end } => {
                    window.skip_space();
                    match window.next(PARAMETER) {
                        Next::Wait => return Ok(Step::Wait),
                        Next::Tag(tag) => {
                            self.arguments.close(self.without_break(end, window), window, sink);
                            self.after_tag(tag, window, sink);
                        }
                        Next::Other => self.state = State::Value,
                    }
                }
                State::StrayEnd => {
                    window.skip_space();
                    match window.next(&CLOSE[..1]) {
                        Next::Wait => return Ok(Step::Wait),
                        Next::Tag(_) => return Err(Malformation::Markup),
                        Next::Other => self.state = State::Value,
                    }
                }
                State::Close if !self.is_wrapped => {
                    if sink.is_open() {
                        sink.end(window);
                    }
                    window.skip_space();
                    match window.next(&CLOSE[..1]) {
                        Next::Wait => return Ok(Step::Wait),
                        Next::Tag(_) => {}
                        // White space belongs to the text that follows.
                        Next::Other => window.at = window.mark,
                    }
                    return Ok(Step::Close);
                }
                State::Close => {
                    window.skip_space();
                    match window.next(CLOSE) {
                        Next::Wait => return Ok(Step::Wait),
                        Next::Tag(0) => {
                            sink.end(window);
                            return Ok(Step::Close);
                        }
                        Next::Tag(_) => {
                            // The next function's tag is its own call's.
                            window.at -= CLOSE[1].len();
                            sink.end(window);
                            self.state = State::Open;
                        }
                        Next::Other if window.is_end() && window.rest().is_empty() => {
                            sink.end(window);
                            return Ok(Step::Close);
                        }
                        Next::Other => return Err(Malformation::Markup),
                    }
                }
            }
        }
    }

    fn closers(&self) -> Tags {
        if self.is_wrapped { &CLOSE[..1] } else { &PARAMETER[1..] }
    }
}
