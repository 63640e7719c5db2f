//! A whole reply: reasoning, text, calls.

use super::form::{CallParser, ReasoningForm, Step, ToolForm};
use super::schemas::ToolSchemas;
use super::sink::{Malformation, ReplyEvent, Sink};
use super::window::{Next, Piece, Tags, Window, is_space};

/// Streaming parser of one reply. See [the module](super) for what it promises.
#[derive(Debug)]
pub struct ReplyParser {
    window: Window,
    sink: Sink,
    calls: Option<Box<dyn CallParser>>,
    reasoning: Option<ReasoningForm>,
    starts_in_reasoning: bool,
    state: State,
    /// Nothing but white space since the last call.
    is_after_call: bool,
    /// The call that is read has no opening tag.
    is_bare: bool,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// Before reasoning: white space.
    Opening(ReasoningForm),
    /// After reasoning's opening tag.
    Opened(ReasoningForm),
    Reasoning(ReasoningForm),
    /// After reasoning's closing tag, with so many line breaks to come.
    Closed {
        breaks: usize,
    },
    /// Before any text: white space.
    Start,
    Text,
    Call,
    /// Within a malformed call, until one of these.
    Skip(Tags),
}

impl ReplyParser {
    /// A parser at the beginning of a reply. `tools`: `None` when the reply has none, its markup is text then.
    /// `starts_in_reasoning`: the prompt ends within a reasoning block ([`ReasoningForm::is_open_at_end`]).
    #[must_use]
    pub fn new(
        tools: Option<ToolForm>,
        reasoning: Option<ReasoningForm>,
        starts_in_reasoning: bool,
        schemas: &ToolSchemas,
    ) -> Self {
        Self {
            window: Window::default(),
            sink: Sink::default(),
            calls: tools.map(|form| form.parser(schemas)),
            reasoning,
            starts_in_reasoning,
            state: reasoning.map_or(State::Start, State::Opening),
            is_after_call: false,
            is_bare: false,
        }
    }

    /// Gives calls once they are whole: start, arguments and end together. A malformed call was never started.
    #[must_use]
    pub fn with_whole_calls(mut self) -> Self {
        self.sink.is_whole = true;
        self
    }

    /// Tags that the tokenizer has as tokens (`is_token`) count only where they are [`Piece::control`]: spelled by
    /// ordinary tokens they are text. Every control token has to be a piece of its own then.
    #[must_use]
    pub fn with_token_tags(mut self, is_token: impl Fn(&str) -> bool) -> Self {
        let calls = self.calls.as_ref().map(|calls| calls.tags()).unwrap_or_default();
        let tags = calls.iter().copied().chain(self.reasoning.into_iter().flat_map(ReasoningForm::tags));
        self.window.require_tokens(tags.filter(|tag| is_token(tag)));
        self
    }

    /// How many calls have ended well.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.sink.ended() as usize
    }

    /// Takes the next text; appends to `events` what is certain by then.
    pub fn push(&mut self, piece: Piece<'_>, events: &mut Vec<ReplyEvent>) {
        self.window.push(piece);
        self.read(events);
    }

    /// The end of the reply: gives what was held back.
    pub fn finish(&mut self, events: &mut Vec<ReplyEvent>) {
        self.window.end();
        self.read(events);
    }

    /// Bytes looked at or moved so far.
    #[cfg(test)]
    pub fn work(&self) -> usize {
        self.window.work
    }

    fn read(&mut self, events: &mut Vec<ReplyEvent>) {
        while self.step() {}
        events.append(&mut self.sink.events);
    }

    /// One step; false when more text is needed.
    fn step(&mut self) -> bool {
        let Self { window, sink, .. } = self;
        match self.state {
            State::Opening(form) => {
                window.skip_space();
                match window.next(form.open()) {
                    Next::Wait => return false,
                    Next::Tag(_) => {
                        give(window, window.at, |text| sink.markup(text));
                        self.state = State::Opened(form);
                    }
                    Next::Other => {
                        // The white space belongs to what follows.
                        window.at = window.mark;
                        self.state =
                            if self.starts_in_reasoning { State::Reasoning(form) } else { State::Start };
                    }
                }
            }
            State::Opened(form) => {
                if form.has_inner_breaks() {
                    match window.rest().as_bytes().first() {
                        None if !window.is_end() => return false,
                        Some(b'\n') => window.at += 1,
                        _ => {}
                    }
                }
                give(window, window.at, |text| sink.markup(text));
                self.state = State::Reasoning(form);
            }
            State::Reasoning(form) => {
                let found = window.find(form.close());
                let end = window.at - found.map_or(0, |tag| form.close()[tag].len());
                let is_done = found.is_none() && window.is_end();
                let breaks = usize::from(form.has_inner_breaks() && !is_done);
                let text = end - line_breaks(window.slice(window.mark..end), breaks);
                give(window, text, |text| sink.reasoning(text));
                if found.is_none() {
                    if is_done {
                        sink.malformed(window, Malformation::UnclosedReasoning);
                        self.state = State::Text;
                    }
                    return false;
                }
                give(window, window.at, |text| sink.markup(text));
                self.state = State::Closed { breaks: form.breaks_after() };
            }
            State::Closed { breaks } => match window.rest().as_bytes().first() {
                None if breaks > 0 && !window.is_end() => return false,
                Some(b'\n') if breaks > 0 => {
                    window.at += 1;
                    give(window, window.at, |text| sink.markup(text));
                    self.state = State::Closed { breaks: breaks - 1 };
                }
                _ => self.state = State::Start,
            },
            State::Start => {
                self.state = State::Text;
                if let Some(calls) = self.calls.as_mut().filter(|calls| calls.opens_bare()) {
                    window.skip_space();
                    match window.rest().as_bytes().first() {
                        None if !window.is_end() => {
                            self.state = State::Start;
                            return false;
                        }
                        Some(b'{') => {
                            calls.begin(None);
                            self.is_bare = true;
                            self.state = State::Call;
                        }
                        _ => window.at = window.mark,
                    }
                }
            }
            State::Text => return self.text(),
            State::Call => return self.call(),
            State::Skip(closers) => {
                let found = window.find(closers);
                give(window, window.at, |text| sink.text(text));
                let Some(closer) = found else { return false };
                self.resume(closer);
            }
        }
        true
    }

    /// Text, up to a tag that opens calls.
    fn text(&mut self) -> bool {
        let Self { window, sink, .. } = self;
        let openers = self.calls.as_ref().map(|calls| calls.openers()).unwrap_or_default();
        let from = window.at;
        let found = window.find(openers);
        let end = window.at - found.map_or(0, |tag| openers[tag].len());
        self.is_after_call &= window.slice(from..end).bytes().all(is_space);
        let is_done = found.is_none() && window.is_end();
        if is_done && self.is_after_call {
            give(window, end, |text| sink.markup(text));
            return false;
        }
        // What may belong to the markup of a call that follows.
        let lead = match &self.calls {
            _ if is_done => 0,
            _ if self.is_after_call => end - window.mark,
            Some(calls) => line_breaks(window.slice(window.mark..end), calls.breaks_before()),
            None => 0,
        };
        give(window, end - lead, |text| sink.text(text));
        let (Some(opener), Some(calls)) = (found, &mut self.calls) else { return false };
        calls.begin(Some(opener));
        self.state = State::Call;
        true
    }

    /// Within the markup of calls.
    fn call(&mut self) -> bool {
        let Self { window, sink, .. } = self;
        let Some(calls) = &mut self.calls else { return false };
        let what = match calls.read(window, sink) {
            Ok(Step::Wait) if !window.is_end() => return false,
            Ok(Step::Wait) => {
                window.at = window.len();
                Malformation::Unfinished
            }
            Ok(Step::Close) => {
                give(window, window.at, |text| sink.markup(text));
                self.is_after_call = true;
                self.is_bare = false;
                self.state = State::Text;
                return true;
            }
            Err(what) => what,
        };
        self.is_after_call = false;
        if std::mem::take(&mut self.is_bare) && !sink.is_open() && sink.ended() == 0 {
            // Without a tag nothing says that it was meant as a call.
            give(window, window.at, |text| sink.text(text));
            self.state = State::Text;
            return true;
        }
        // What the call reads over may hold its closing tag: then the reply goes on here.
        let closers = calls.closers();
        let raw = window.slice(window.mark..window.at);
        let closed = closers.iter().position(|closer| raw.contains(closer));
        sink.malformed(window, what);
        match closed {
            Some(closer) => self.resume(closer),
            None => self.state = State::Skip(closers),
        }
        true
    }

    /// A malformed call has been closed.
    fn resume(&mut self, closer: usize) {
        let goes_on = self.calls.as_mut().is_some_and(|calls| calls.resume(closer));
        self.state = if goes_on { State::Call } else { State::Text };
    }
}

/// Gives the text from the mark to `end`.
fn give(window: &mut Window, end: usize, take: impl FnOnce(&str)) {
    take(window.slice(window.mark..end));
    window.mark = end;
}

/// How many line breaks `text` ends with, `most` at most.
fn line_breaks(text: &str, most: usize) -> usize {
    text.bytes().rev().take(most).take_while(|byte| *byte == b'\n').count()
}
