//! The events of a Messages stream as bytes: each `data` line comes after its `event` line, since the vendor's SDKs
//! skip frames without one.

use std::io::Write;

use super::stop::{MessageUsage, Stop};

/// A kind of block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Thinking,
}

/// Bytes of whole events.
#[derive(Debug, Default)]
pub(super) struct Events {
    pub bytes: Vec<u8>,
}

impl Events {
    pub fn message_start(&mut self, id: &str, model: &str, usage: &MessageUsage) {
        self.open("message_start");
        self.raw(",\"message\":{\"id\":");
        self.string(id);
        self.raw(",\"type\":\"message\",\"role\":\"assistant\",\"model\":");
        self.string(model);
        self.raw(",\"content\":[],\"stop_reason\":null,\"stop_sequence\":null,\"usage\":");
        self.raw(&usage.json());
        self.raw("}");
        self.close();
    }

    pub fn ping(&mut self) {
        self.open("ping");
        self.close();
    }

    pub fn block_start(&mut self, index: usize, kind: Kind) {
        self.open_block("content_block_start", index);
        self.raw(match kind {
            Kind::Text => ",\"content_block\":{\"type\":\"text\",\"text\":\"\"}",
            Kind::Thinking => {
                ",\"content_block\":{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}"
            }
        });
        self.close();
    }

    pub fn tool_start(&mut self, index: usize, id: &str, name: &str) {
        self.open_block("content_block_start", index);
        self.raw(",\"content_block\":{\"type\":\"tool_use\",\"id\":");
        self.string(id);
        self.raw(",\"name\":");
        self.string(name);
        self.raw(",\"input\":{}}");
        self.close();
    }

    pub fn delta(&mut self, index: usize, kind: Kind, text: &str) {
        match kind {
            Kind::Text => self.any_delta(index, "text_delta", "text", text),
            Kind::Thinking => self.any_delta(index, "thinking_delta", "thinking", text),
        }
    }

    pub fn signature(&mut self, index: usize, signature: &str) {
        self.any_delta(index, "signature_delta", "signature", signature);
    }

    pub fn arguments(&mut self, index: usize, fragment: &str) {
        self.any_delta(index, "input_json_delta", "partial_json", fragment);
    }

    pub fn block_stop(&mut self, index: usize) {
        self.open_block("content_block_stop", index);
        self.close();
    }

    pub fn message_end(&mut self, stop: &Stop, usage: &MessageUsage) {
        self.open("message_delta");
        self.raw(",\"delta\":{\"stop_reason\":");
        self.string(stop.reason);
        self.raw(",\"stop_sequence\":");
        match &stop.sequence {
            Some(sequence) => self.string(sequence),
            None => self.raw("null"),
        }
        self.raw("},\"usage\":");
        self.raw(&usage.json());
        self.close();
        self.open("message_stop");
        self.close();
    }

    fn any_delta(&mut self, index: usize, kind: &str, key: &str, text: &str) {
        self.open_block("content_block_delta", index);
        self.raw(",\"delta\":{\"type\":\"");
        self.raw(kind);
        self.raw("\",\"");
        self.raw(key);
        self.raw("\":");
        self.string(text);
        self.raw("}");
        self.close();
    }

    fn open_block(&mut self, name: &str, index: usize) {
        self.open(name);
        // A `Vec` takes every write.
        let _ = write!(self.bytes, ",\"index\":{index}");
    }

    fn open(&mut self, name: &str) {
        self.raw("event: ");
        self.raw(name);
        self.raw("\ndata: {\"type\":\"");
        self.raw(name);
        self.raw("\"");
    }

    fn close(&mut self) {
        self.raw("}\n\n");
    }

    fn raw(&mut self, text: &str) {
        self.bytes.extend_from_slice(text.as_bytes());
    }

    fn string(&mut self, text: &str) {
        if text.contains(['\u{2028}', '\u{2029}', '\u{85}']) {
            push_line_safe(&mut self.bytes, serde_json::Value::from(text).to_string().as_bytes());
        } else {
            // Neither a string nor a `Vec` makes this fail.
            let _ = serde_json::to_writer(&mut self.bytes, text);
        }
    }
}

/// Appends JSON text in which U+2028, U+2029 and U+0085 are escaped: some clients end a line there. They can only
/// stand inside strings, where the escape means the same.
pub(super) fn push_line_safe(out: &mut Vec<u8>, json: &[u8]) {
    let mut rest = json;
    while let Some(at) = rest.iter().position(|byte| matches!(byte, 0xE2 | 0xC2)) {
        let (escape, length) = match &rest[at..] {
            [0xE2, 0x80, 0xA8, ..] => ("\\u2028", 3),
            [0xE2, 0x80, 0xA9, ..] => ("\\u2029", 3),
            [0xC2, 0x85, ..] => ("\\u0085", 2),
            _ => ("", 0),
        };
        if length == 0 {
            out.extend_from_slice(&rest[..=at]);
            rest = &rest[at + 1..];
        } else {
            out.extend_from_slice(&rest[..at]);
            out.extend_from_slice(escape.as_bytes());
            rest = &rest[at + length..];
        }
    }
    out.extend_from_slice(rest);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b20_every_data_line_has_its_event_line_and_no_other_line_end() {
        let mut events = Events::default();
        events.delta(3, Kind::Text, "a\u{2028}b\u{2029}c\u{85}d\né京\u{a0}â");
        let text = String::from_utf8(events.bytes).expect("text");
        let data = text.strip_prefix("event: content_block_delta\ndata: ").expect("event line first");
        let value: serde_json::Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(value["type"], "content_block_delta");
        assert_eq!(value["index"], 3);
        assert_eq!(value["delta"]["text"], "a\u{2028}b\u{2029}c\u{85}d\né京\u{a0}â");
        assert!(!text.contains(['\u{2028}', '\u{2029}', '\u{85}', '\r']));
        assert_eq!(text.matches('\n').count(), 3);
    }
}
