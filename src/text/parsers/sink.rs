//! What a reply is made of, and where parsers put it.

use std::ops::Range;

use super::window::Window;

/// A part of a reply, in the order of the sampled text. Offsets count bytes of the sampled text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplyEvent {
    /// Text of the reasoning block.
    Reasoning(String),
    /// Content text.
    Text(String),
    /// Sampled text that is neither: tags around reasoning and calls, and the line breaks that belong to them.
    Markup(String),
    /// A call begins: its name is certain, its arguments have begun. Whether they are whole nobody knows yet.
    CallStart {
        /// Counts the calls that were started in this reply.
        index: u32,
        /// The id that the model itself wrote, in the forms that have one (Kimi, Mistral).
        id: Option<String>,
        /// Name of the function.
        name: String,
    },
    /// The next bytes of the arguments, a JSON object in the end.
    CallArguments {
        /// Which call.
        index: u32,
        /// The bytes.
        text: String,
    },
    /// The call is whole and well-formed: only now may anyone act on it.
    CallEnd {
        /// Which call.
        index: u32,
        /// What the call took of the sampled text, markup included.
        span: Range<usize>,
    },
    /// What began as a call, or as reasoning, is not one. A call that was started is void and will not end.
    Malformed {
        /// The call that is void, if one was started.
        index: Option<u32>,
        /// Where it is in the sampled text.
        span: Range<usize>,
        /// The sampled text there, markup included: the content, where a call was not started. Text that follows is
        /// in events of its own.
        raw: String,
        /// What is wrong.
        what: Malformation,
    },
}

/// Why sampled text is not what it began as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformation {
    /// The call's JSON breaks JSON's grammar.
    #[error("the call is not JSON")]
    Json,
    /// No name, an empty one, or two.
    #[error("the call has no name, or more than one")]
    Name,
    /// No arguments, arguments that are not an object, or two of them.
    #[error("the call's arguments are missing, given twice or not a JSON object")]
    Arguments,
    /// The same parameter twice.
    #[error("the call gives a parameter twice")]
    Parameter,
    /// Text where the form has markup, or markup in another place than the form has it.
    #[error("the call's markup is not in its form")]
    Markup,
    /// The reply ended first.
    #[error("the reply ends within the call")]
    Unfinished,
    /// The reply ended within its reasoning.
    #[error("the reply ends within its reasoning")]
    UnclosedReasoning,
}

/// Takes what parsers find, and numbers the calls.
#[derive(Debug, Default)]
pub(super) struct Sink {
    pub events: Vec<ReplyEvent>,
    /// Calls are given once they are whole.
    pub is_whole: bool,
    started: u32,
    ended: u32,
    open: Option<Open>,
}

/// A call that has begun.
#[derive(Debug)]
struct Open {
    id: Option<String>,
    name: String,
    /// All of them when calls are given whole, else empty.
    arguments: String,
}

impl Sink {
    pub fn text(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(ReplyEvent::Text(last)) => last.push_str(text),
            _ => self.events.push(ReplyEvent::Text(text.to_owned())),
        }
    }

    pub fn reasoning(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(ReplyEvent::Reasoning(last)) => last.push_str(text),
            _ => self.events.push(ReplyEvent::Reasoning(text.to_owned())),
        }
    }

    pub fn markup(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(ReplyEvent::Markup(last)) => last.push_str(text),
            _ => self.events.push(ReplyEvent::Markup(text.to_owned())),
        }
    }

    /// Whether a call has begun and not ended.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Calls that have ended.
    pub fn ended(&self) -> u32 {
        self.ended
    }

    pub fn start(&mut self, name: String, id: Option<String>) {
        if !self.is_whole {
            self.events.push(ReplyEvent::CallStart {
                index: self.started,
                id: id.clone(),
                name: name.clone(),
            });
        }
        self.open = Some(Open { id, name, arguments: String::new() });
    }

    pub fn arguments(&mut self, text: &str) {
        let Some(open) = &mut self.open else { return };
        if self.is_whole {
            open.arguments.push_str(text);
            return;
        }
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(ReplyEvent::CallArguments { text: last, .. }) => last.push_str(text),
            _ => self.events.push(ReplyEvent::CallArguments { index: self.started, text: text.to_owned() }),
        }
    }

    /// The open call is whole: it took the text from the mark to the cursor.
    pub fn end(&mut self, window: &mut Window) {
        let Some(Open { id, name, arguments }) = self.open.take() else { return };
        let index = self.started;
        if self.is_whole {
            self.events.push(ReplyEvent::CallStart { index, id, name });
            self.events.push(ReplyEvent::CallArguments { index, text: arguments });
        }
        self.events.push(ReplyEvent::CallEnd { index, span: window.mark..window.at });
        self.started += 1;
        self.ended += 1;
        window.mark = window.at;
    }

    /// The text from the mark to the cursor is not a call.
    pub fn malformed(&mut self, window: &mut Window, what: Malformation) {
        let span = window.mark..window.at;
        let was_started = self.open.take().is_some() && !self.is_whole;
        let index = was_started.then_some(self.started);
        self.started += u32::from(was_started);
        let raw = window.slice(span.clone()).to_owned();
        self.events.push(ReplyEvent::Malformed { index, span, raw, what });
        window.mark = window.at;
    }
}
