//! `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.name
//! <|constrain|>json<|message|>{…}<|call|>`: gpt-oss. The whole reply is messages, so this form reads all of it.
//!
//! The channel `analysis` is reasoning, other channels are content. A message to `functions.name` is a call, its
//! arguments the sampled bytes; the recipient stands before the channel or after it. The end of the reply closes a
//! complete call: `<|call|>` is the token that ends sampling. Text outside of messages is content.

use super::call_object::{CallArguments, Read};
use super::form::{CallParser, Step};
use super::sink::{Malformation, Sink};
use super::window::{Next, Tags, Window};

pub(super) const TAGS: Tags =
    &["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"];
const CHANNEL: Tags = &["<|channel|>", "<|message|>"];
const MESSAGE: Tags = &["<|message|>"];
const START: Tags = &["<|start|>"];
const OUTSIDE: Tags = &["<|start|>", "<|channel|>"];
const END: Tags = &["<|end|>", "<|return|>", "<|call|>"];
const CLOSE: Tags = &["<|call|>", "<|end|>"];
/// What may stand before a channel.
const ROLE: Tags = &["assistant", "to=", "<|channel|>"];

#[derive(Debug)]
pub(super) struct Harmony {
    has_calls: bool,
    has_reasoning: bool,
    state: State,
    /// What stands before the channel.
    role: String,
}

#[derive(Debug)]
enum State {
    /// Where a message may begin: at the beginning of the reply, after `<|start|>`.
    Begin {
        from: usize,
    },
    Role {
        from: usize,
    },
    Header {
        from: usize,
    },
    Text {
        is_reasoning: bool,
    },
    Arguments(CallArguments),
    Close,
    /// After a message.
    Between,
    /// Text in no message.
    Outside,
}

impl Harmony {
    pub fn new(has_calls: bool, has_reasoning: bool) -> Self {
        Self { has_calls, has_reasoning, state: State::Begin { from: 0 }, role: String::new() }
    }

    /// What the message with this header holds.
    fn body(&self, header: &str) -> Result<State, Malformation> {
        let recipient = [self.role.as_str(), header].into_iter().find_map(|text| text.split_once("to="));
        let recipient = recipient.map(|(_, name)| name.split([' ', '<']).next().unwrap_or_default());
        match recipient.filter(|_| self.has_calls) {
            Some(recipient) => {
                let name = recipient.strip_prefix("functions.").filter(|name| !name.is_empty());
                Ok(State::Arguments(CallArguments::new(name.ok_or(Malformation::Name)?, None)))
            }
            None => {
                let is_analysis = header.trim_start().starts_with("analysis");
                Ok(State::Text { is_reasoning: is_analysis && self.has_reasoning })
            }
        }
    }
}

/// The text from the mark to `end` is markup.
fn markup(window: &mut Window, end: usize, sink: &mut Sink) {
    sink.markup(window.slice(window.mark..end));
    window.mark = end;
}

/// The text from the mark to `end` is the message's.
fn say(window: &mut Window, end: usize, is_reasoning: bool, sink: &mut Sink) {
    let text = window.slice(window.mark..end);
    if is_reasoning {
        sink.reasoning(text)
    } else {
        sink.text(text)
    }
    window.mark = end;
}

impl CallParser for Harmony {
    fn tags(&self) -> Tags {
        TAGS
    }

    fn openers(&self) -> Tags {
        &[]
    }

    fn breaks_before(&self) -> usize {
        0
    }

    fn reads_all(&self) -> bool {
        true
    }

    fn begin(&mut self, _: Option<usize>) {}

    fn read(&mut self, window: &mut Window, sink: &mut Sink) -> Result<Step, Malformation> {
        loop {
            match &mut self.state {
                State::Begin { from } => {
                    window.skip_space();
                    let role = window.at;
                    self.state = match window.next(ROLE) {
                        Next::Wait => return Ok(Step::Wait),
                        Next::Tag(_) => {
                            window.at = role;
                            State::Role { from: role }
                        }
                        Next::Other => {
                            window.at = *from;
                            State::Outside
                        }
                    };
                }
                State::Role { from } => {
                    let found =
                        window.find_name(*from, CHANNEL, |_| true).map_err(|()| Malformation::Name)?;
                    let Some(tag) = found else { return Ok(Step::Wait) };
                    self.role = window.slice(*from..window.at - CHANNEL[tag].len()).to_owned();
                    if tag == 0 {
                        self.state = State::Header { from: window.at };
                    } else {
                        self.state = self.body("")?;
                    }
                }
                State::Header { from } => {
                    let found =
                        window.find_name(*from, MESSAGE, |_| true).map_err(|()| Malformation::Name)?;
                    let Some(tag) = found else { return Ok(Step::Wait) };
                    let header = window.slice(*from..window.at - MESSAGE[tag].len());
                    self.state = self.body(header)?;
                    if matches!(self.state, State::Text { .. }) {
                        markup(window, window.at, sink);
                    }
                }
                State::Text { is_reasoning } => {
                    let found = window.find(END);
                    let end = window.at - found.map_or(0, |tag| END[tag].len());
                    say(window, end, *is_reasoning, sink);
                    if found.is_none() {
                        return Ok(if window.is_end() { Step::Close } else { Step::Wait });
                    }
                    markup(window, window.at, sink);
                    self.state = State::Between;
                }
                State::Arguments(arguments) => {
                    if arguments.read(window, sink)? == Read::Wait {
                        return Ok(Step::Wait);
                    }
                    self.state = State::Close;
                }
                State::Close => {
                    window.skip_space();
                    match window.next(CLOSE) {
                        Next::Wait => return Ok(Step::Wait),
                        Next::Tag(_) => {}
                        Next::Other if window.is_end() && window.rest().is_empty() => {}
                        Next::Other => return Err(Malformation::Markup),
                    }
                    sink.end(window);
                    self.state = State::Between;
                }
                State::Between => match window.next(START) {
                    Next::Wait => return Ok(Step::Wait),
                    Next::Tag(_) => self.state = State::Begin { from: window.at },
                    Next::Other => self.state = State::Outside,
                },
                State::Outside => {
                    let found = window.find(OUTSIDE);
                    let end = window.at - found.map_or(0, |tag| OUTSIDE[tag].len());
                    say(window, end, false, sink);
                    match found {
                        None => return Ok(if window.is_end() { Step::Close } else { Step::Wait }),
                        Some(0) => self.state = State::Begin { from: window.at },
                        Some(_) => {
                            self.role.clear();
                            self.state = State::Header { from: window.at };
                        }
                    }
                }
            }
        }
    }

    fn closers(&self) -> Tags {
        CLOSE
    }

    fn resume(&mut self, _: usize) -> bool {
        self.state = State::Between;
        true
    }
}
