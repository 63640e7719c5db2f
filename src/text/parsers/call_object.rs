//! A call as a JSON object: `{"name": …, "arguments": {…}}`.
//!
//! The call begins when its name is known and its arguments have begun, whichever comes first in the text. The
//! arguments are the sampled bytes. Other keys are read over; a key of the call given twice makes it malformed.

use std::ops::Range;

use super::json::{JsonScanner, Scan};
use super::sink::{Malformation, Sink};
use super::window::Window;

/// What the keys are called.
#[derive(Debug, Clone, Copy)]
pub(super) struct Keys {
    pub arguments: &'static [&'static str],
    /// Whether `id` is the call's id.
    pub has_id: bool,
    /// Whether the first key must be one of a call's: else the object is not meant as a call.
    pub is_strict: bool,
}

/// How far reading came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Read {
    /// More text is needed.
    Wait,
    /// The object is closed; the cursor is behind it.
    Whole,
}

#[derive(Debug)]
pub(super) struct CallObject {
    keys: Keys,
    state: State,
    name: Option<String>,
    id: Option<String>,
    /// The arguments; their end is where reading has come to while they go on.
    arguments: Option<Range<usize>>,
    /// Up to where the arguments are given.
    given: usize,
    has_started: bool,
}

#[derive(Debug)]
enum State {
    Open,
    FirstKey,
    Key,
    KeyText { from: usize, scanner: JsonScanner },
    Colon(Field),
    Value { field: Field, from: Option<usize>, scanner: JsonScanner },
    AfterValue,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    Id,
    Other,
}

impl CallObject {
    pub fn new(keys: Keys) -> Self {
        Self { keys, state: State::Open, name: None, id: None, arguments: None, given: 0, has_started: false }
    }

    /// Reads on; `Err` at the first byte that no call has there.
    pub fn read(&mut self, window: &mut Window, sink: &mut Sink) -> Result<Read, Malformation> {
        loop {
            if !matches!(self.state, State::KeyText { .. } | State::Value { from: Some(_), .. }) {
                window.skip_space();
            }
            let Some(&byte) = window.plain().as_bytes().first() else {
                // A control token has no place in JSON.
                return if window.rest().is_empty() { Ok(Read::Wait) } else { Err(Malformation::Json) };
            };
            match (&mut self.state, byte) {
                (State::Open, b'{') => self.state = State::FirstKey,
                (State::FirstKey | State::AfterValue, b'}') => {
                    window.at += 1;
                    return match (&self.name, &self.arguments) {
                        (None, _) => Err(Malformation::Name),
                        (_, None) => Err(Malformation::Arguments),
                        _ => Ok(Read::Whole),
                    };
                }
                (State::FirstKey | State::Key, b'"') => {
                    self.state = State::KeyText { from: window.at, scanner: JsonScanner::default() };
                    continue;
                }
                (State::Colon(field), b':') => {
                    self.state = State::Value { field: *field, from: None, scanner: JsonScanner::default() };
                }
                (State::AfterValue, b',') => self.state = State::Key,
                (State::KeyText { from, scanner }, _) => {
                    let from = *from;
                    if scan(scanner, window)? == Read::Wait {
                        continue;
                    }
                    let field = self.field(window.slice(from..window.at))?;
                    self.state = State::Colon(field);
                    continue;
                }
                (State::Value { field, from, scanner }, byte) => {
                    let field = *field;
                    let from = *from.get_or_insert(window.at);
                    if field == Field::Arguments && self.arguments.is_none() {
                        if byte != b'{' {
                            return Err(Malformation::Arguments);
                        }
                        self.arguments = Some(from..from);
                        self.given = from;
                    }
                    let read = scan(scanner, window);
                    // What is known before an error is given too: with other cuts it would have been.
                    if field == Field::Arguments {
                        self.arguments = Some(from..window.at);
                        self.give(window, sink);
                    }
                    if read? == Read::Whole {
                        self.take(field, window.slice(from..window.at))?;
                        self.give(window, sink);
                        self.state = State::AfterValue;
                    }
                    continue;
                }
                _ => return Err(Malformation::Json),
            }
            window.at += 1;
        }
    }

    /// What the key that is spelled so holds.
    fn field(&self, spelled: &str) -> Result<Field, Malformation> {
        let key: String = serde_json::from_str(spelled).map_err(|_| Malformation::Json)?;
        let field = match key.as_str() {
            "name" => Field::Name,
            "id" if self.keys.has_id => Field::Id,
            key if self.keys.arguments.contains(&key) => Field::Arguments,
            "type" | "id" => return Ok(Field::Other),
            _ if self.keys.is_strict && self.name.is_none() && self.arguments.is_none() => {
                return Err(Malformation::Name);
            }
            _ => return Ok(Field::Other),
        };
        match field {
            Field::Name if self.name.is_some() => Err(Malformation::Name),
            Field::Arguments if self.arguments.is_some() => Err(Malformation::Arguments),
            Field::Id if self.id.is_some() => Err(Malformation::Json),
            field => Ok(field),
        }
    }

    fn take(&mut self, field: Field, value: &str) -> Result<(), Malformation> {
        match field {
            Field::Name => {
                let name: String = serde_json::from_str(value).map_err(|_| Malformation::Name)?;
                if name.is_empty() {
                    return Err(Malformation::Name);
                }
                self.name = Some(name);
            }
            Field::Id => self.id = serde_json::from_str(value).ok(),
            Field::Arguments | Field::Other => {}
        }
        Ok(())
    }

    /// Gives what is known of the call and not given yet.
    fn give(&mut self, window: &Window, sink: &mut Sink) {
        let (Some(name), Some(arguments)) = (&self.name, &self.arguments) else { return };
        if !self.has_started {
            self.has_started = true;
            sink.start(name.clone(), self.id.clone());
        }
        sink.arguments(window.slice(self.given..arguments.end));
        self.given = arguments.end;
    }
}

/// Lets the scanner read what is there; the cursor goes as far as it is JSON.
fn scan(scanner: &mut JsonScanner, window: &mut Window) -> Result<Read, Malformation> {
    let text = window.plain();
    let (length, read) = match scanner.push(text.as_bytes()) {
        Scan::More => (text.len(), Ok(Read::Wait)),
        Scan::Done(end) => (end, Ok(Read::Whole)),
        Scan::Wrong(end) => (end, Err(Malformation::Json)),
    };
    window.count(length);
    window.at += length;
    read
}

/// The arguments alone, of a call whose name stands before them. The call begins with their brace.
#[derive(Debug)]
pub(super) struct CallArguments {
    /// Name and id, until the call begins.
    head: Option<(String, Option<String>)>,
    scanner: JsonScanner,
}

impl CallArguments {
    pub fn new(name: &str, id: Option<&str>) -> Self {
        Self { head: Some((name.to_owned(), id.map(str::to_owned))), scanner: JsonScanner::default() }
    }

    /// Reads on; `Err` at the first byte that no object has there.
    pub fn read(&mut self, window: &mut Window, sink: &mut Sink) -> Result<Read, Malformation> {
        if self.head.is_some() {
            window.skip_space();
            match window.plain().as_bytes().first() {
                None if window.rest().is_empty() => return Ok(Read::Wait),
                Some(b'{') => {}
                _ => return Err(Malformation::Arguments),
            }
        }
        if let Some((name, id)) = self.head.take() {
            sink.start(name, id);
        }
        let from = window.at;
        let read = scan(&mut self.scanner, window);
        sink.arguments(window.slice(from..window.at));
        match read? {
            // A control token has no place in JSON.
            Read::Wait if !window.rest().is_empty() => Err(Malformation::Json),
            read => Ok(read),
        }
    }
}
