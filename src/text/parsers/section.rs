//! Calls in a section of their own, each between tags: DeepSeek and Kimi.
//!
//! A call's arguments are a JSON object, the sampled bytes. At the end of the reply a call whose arguments are complete
//! counts without its closing tag. After a malformed call's closing tag the section goes on.

use super::call_object::{CallArguments, Read};
use super::form::{CallParser, Step};
use super::sink::{Malformation, Sink};
use super::window::{Next, Tags, Window};

/// What differs between the forms.
#[derive(Debug)]
pub(super) struct Spelling {
    pub tags: Tags,
    /// Opens the section.
    pub open: Tags,
    /// Opens a call; closes the section.
    pub between: Tags,
    /// Ends what stands before the arguments.
    pub header_end: Tags,
    /// Stands between the arguments and the call's closing tag.
    pub fence: Option<Tags>,
    /// Closes a call; closes the section.
    pub close: Tags,
    /// Name and id of what stands before the arguments.
    pub header: fn(&str) -> Option<(&str, Option<&str>)>,
}

#[derive(Debug)]
pub(super) struct Section {
    spelling: Spelling,
    state: State,
}

#[derive(Debug)]
enum State {
    Between,
    Header { from: usize },
    Arguments(CallArguments),
    Fence,
    Close,
}

impl Section {
    pub fn new(spelling: Spelling) -> Self {
        Self { spelling, state: State::Between }
    }
}

impl CallParser for Section {
    fn tags(&self) -> Tags {
        self.spelling.tags
    }

    fn openers(&self) -> Tags {
        self.spelling.open
    }

    fn breaks_before(&self) -> usize {
        0
    }

    fn begin(&mut self, _: Option<usize>) {
        self.state = State::Between;
    }

    fn read(&mut self, window: &mut Window, sink: &mut Sink) -> Result<Step, Malformation> {
        loop {
            match &mut self.state {
                State::Between => {
                    window.skip_space();
                    match window.next(self.spelling.between) {
                        Next::Wait => return Ok(Step::Wait),
                        Next::Tag(0) => self.state = State::Header { from: window.at },
                        Next::Tag(_) => return Ok(Step::Close),
                        // Between calls nothing is unfinished.
                        Next::Other if window.is_end() && window.rest().is_empty() => return Ok(Step::Close),
                        Next::Other => return Err(Malformation::Markup),
                    }
                }
                State::Header { from } => {
                    let found = window.find_name(*from, self.spelling.header_end, |_| true);
                    let Some(tag) = found.map_err(|()| Malformation::Name)? else { return Ok(Step::Wait) };
                    let header = window.slice(*from..window.at - self.spelling.header_end[tag].len());
                    let (name, id) = (self.spelling.header)(header.trim_ascii())
                        .filter(|(name, _)| !name.is_empty() && name.chars().all(is_of_name))
                        .ok_or(Malformation::Name)?;
                    self.state = State::Arguments(CallArguments::new(name, id));
                }
                State::Arguments(arguments) => {
                    if arguments.read(window, sink)? == Read::Wait {
                        return Ok(Step::Wait);
                    }
                    self.state = if self.spelling.fence.is_some() { State::Fence } else { State::Close };
                }
                State::Fence => {
                    window.skip_space();
                    match window.next(self.spelling.fence.unwrap_or_default()) {
                        Next::Wait => return Ok(Step::Wait),
                        Next::Tag(_) => self.state = State::Close,
                        Next::Other if window.is_end() && window.rest().is_empty() => {
                            self.state = State::Close;
                        }
                        Next::Other => return Err(Malformation::Markup),
                    }
                }
                State::Close => {
                    window.skip_space();
                    match window.next(&self.spelling.close[..1]) {
                        Next::Wait => return Ok(Step::Wait),
                        Next::Tag(_) => {}
                        Next::Other if window.is_end() && window.rest().is_empty() => {}
                        Next::Other => return Err(Malformation::Markup),
                    }
                    sink.end(window);
                    self.state = State::Between;
                }
            }
        }
    }

    fn closers(&self) -> Tags {
        self.spelling.close
    }

    fn resume(&mut self, closer: usize) -> bool {
        self.state = State::Between;
        closer == 0
    }
}

/// Whether a function's or a parameter's name may have this character.
pub(super) fn is_of_name(character: char) -> bool {
    !character.is_whitespace() && !"<>{}\"".contains(character)
}
