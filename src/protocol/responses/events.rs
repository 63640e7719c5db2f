//! Events of a response's stream: numbered from 0, each with its `event:` line, whole, one line of data.

use bytes::Bytes;

use super::raw::Object;
use crate::protocol::translate::Piece;

/// The stream so far.
#[derive(Default)]
pub(super) struct Events {
    next_number: u64,
    /// Events that were not handed out yet.
    buffer: String,
}

impl Events {
    /// True if there was an event.
    pub fn has_begun(&self) -> bool {
        self.next_number > 0
    }

    /// Writes an event; `fill` adds its own members.
    pub fn write(&mut self, kind: &str, fill: impl FnOnce(Object) -> Object) {
        let event = Object::new().text("type", kind).raw("sequence_number", &self.next_number.to_string());
        self.next_number += 1;
        self.buffer.push_str("event: ");
        self.buffer.push_str(kind);
        self.buffer.push_str("\ndata: ");
        let data = fill(event).end();
        self.buffer.reserve(data.len() + 2);
        let mut copied = 0;
        // Some clients take these for line ends. They can only stand in strings.
        for (at, end) in data.match_indices(['\u{85}', '\u{2028}', '\u{2029}']) {
            self.buffer.push_str(&data[copied..at]);
            self.buffer.push_str(match end {
                "\u{85}" => "\\u0085",
                "\u{2028}" => "\\u2028",
                _ => "\\u2029",
            });
            copied = at + end.len();
        }
        self.buffer.push_str(&data[copied..]);
        self.buffer.push_str("\n\n");
    }

    /// What was written, taken out.
    pub fn take(&mut self) -> Bytes {
        Bytes::from(std::mem::take(&mut self.buffer))
    }

    /// Hands out what was written.
    pub fn flush(&mut self, out: &mut Vec<Piece>) {
        if !self.buffer.is_empty() {
            out.push(Piece::Bytes(self.take()));
        }
    }

    /// What follows waits until all that came before is durable.
    pub fn barrier(&mut self, out: &mut Vec<Piece>) {
        self.flush(out);
        out.push(Piece::Barrier);
    }
}
