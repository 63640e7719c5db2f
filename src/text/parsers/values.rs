//! Arguments whose values are plain text between tags, written as a JSON object.
//!
//! A string's bytes are kept and only quoted. Any other declared type is passed as it was sampled where that is JSON.
//! `True`, `False` and `None`, as Jinja prints these values and as models learned to, stand for JSON's words. What is
//! not JSON is quoted, so that nothing is lost and the tool can refuse it.

use std::collections::HashSet;

use super::json::JsonScanner;
use super::schemas::Kind;
use super::sink::{Malformation, Sink};
use super::window::Window;

#[derive(Debug)]
pub(super) struct Arguments {
    keys: HashSet<String>,
    kind: Kind,
    /// Start of the value.
    from: usize,
    /// Up to where the value is given; `None` before its quote.
    given: Option<usize>,
}

impl Arguments {
    pub fn new() -> Self {
        Self { keys: HashSet::new(), kind: Kind::Unknown, from: 0, given: None }
    }

    /// A parameter's name is known, and how its value is to be read.
    pub fn key(&mut self, key: &str, kind: Kind, sink: &mut Sink) -> Result<(), Malformation> {
        sink.arguments(if self.keys.is_empty() { "{" } else { ", " });
        if !self.keys.insert(key.to_owned()) {
            return Err(Malformation::Parameter);
        }
        sink.arguments(&format!("\"{}\": ", escaped(key)));
        self.kind = kind;
        Ok(())
    }

    /// The value begins here.
    pub fn begin(&mut self, from: usize) {
        self.from = from;
        self.given = None;
    }

    /// Start of the value.
    pub fn from(&self) -> usize {
        self.from
    }

    /// The value reaches at least to `end`: gives what is certain of it.
    pub fn more(&mut self, end: usize, window: &Window, sink: &mut Sink) {
        // Null may be spelled with four letters.
        let is_text = match self.kind {
            Kind::Text => end > self.from,
            Kind::TextOrNull => end > self.from + 4,
            Kind::Json | Kind::Unknown => false,
        };
        if is_text {
            self.give(end, window, sink);
        }
    }

    fn give(&mut self, end: usize, window: &Window, sink: &mut Sink) {
        let given = self.given.unwrap_or_else(|| {
            sink.arguments("\"");
            self.from
        });
        if given < end {
            sink.arguments(&escaped(window.slice(given..end)));
        }
        self.given = Some(given.max(end));
    }

    /// The value ends at `end`.
    pub fn close(&mut self, end: usize, window: &Window, sink: &mut Sink) {
        let value = window.slice(self.from..end);
        let word = match value.trim() {
            "True" => Some("true"),
            "False" => Some("false"),
            "None" | "null" => Some("null"),
            _ => None,
        };
        match self.kind {
            Kind::TextOrNull if matches!(value, "None" | "null") => sink.arguments("null"),
            Kind::Json | Kind::Unknown if word.is_some() => sink.arguments(word.unwrap_or_default()),
            Kind::Json | Kind::Unknown if JsonScanner::is_value(value) => {
                sink.arguments(value.trim_ascii());
            }
            _ => {
                self.give(end, window, sink);
                sink.arguments("\"");
            }
        }
    }

    /// The call ends.
    pub fn end(&self, sink: &mut Sink) {
        sink.arguments(if self.keys.is_empty() { "{}" } else { "}" });
    }
}

/// `text` as it stands within quotes in JSON.
fn escaped(text: &str) -> String {
    let mut quoted = serde_json::Value::from(text).to_string();
    quoted.pop();
    quoted.remove(0);
    quoted
}
