//! The upstream's reply as it came: for the record, and for a client that comes back for it.

use bytes::Bytes;
use serde_json::value::RawValue;

use crate::protocol::sse::{self, Event};

/// What has come of a reply.
#[derive(Default)]
pub(super) enum Kept {
    #[default]
    Nothing,
    /// The blocks of a stream.
    Events(Vec<Bytes>),
    Body(Bytes),
}

impl Kept {
    /// Adds a block of a stream.
    pub(super) fn push(&mut self, block: Bytes) {
        match self {
            Self::Events(blocks) => blocks.push(block),
            kept => *kept = Self::Events(vec![block]),
        }
    }

    /// Number of blocks.
    pub(super) const fn len(&self) -> usize {
        match self {
            Self::Events(blocks) => blocks.len(),
            _ => 0,
        }
    }

    /// As one JSON value: the body, or the array of the events' data.
    pub(super) fn json(&self) -> Option<Box<RawValue>> {
        match self {
            Self::Nothing => None,
            Self::Body(body) => Some(raw(body)),
            Self::Events(blocks) => {
                let is_told = |event: &Event| event.has_data() && event.data().as_ref() != b"[DONE]";
                let mut list = String::from("[");
                for (index, event) in sse::reread(blocks).filter(is_told).enumerate() {
                    if index > 0 {
                        list.push(',');
                    }
                    let data = event.data();
                    match serde_json::from_slice::<&RawValue>(&data) {
                        Ok(json) => list.push_str(json.get()),
                        Err(_) => list.push_str(&as_string(&data)),
                    }
                }
                list.push(']');
                Some(raw(list.as_bytes()))
            }
        }
    }
}

/// Bytes as JSON: as they are when they are JSON, else as a string.
pub(super) fn raw(bytes: &[u8]) -> Box<RawValue> {
    let own = String::from_utf8(bytes.to_vec()).ok().and_then(|text| RawValue::from_string(text).ok());
    own.unwrap_or_else(|| RawValue::from_string(as_string(bytes)).unwrap_or_default())
}

fn as_string(bytes: &[u8]) -> String {
    serde_json::Value::from(String::from_utf8_lossy(bytes)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_the_array_of_its_data_and_what_is_no_json_is_a_string() {
        let mut kept = Kept::default();
        assert!(kept.json().is_none());
        let blocks =
            [": hello\n\n", "event: a\ndata: {\"a\" :\ndata: 1}\n\n", "data: oops\n\n", "data: [DONE]\n\n"];
        for block in blocks {
            kept.push(Bytes::from_static(block.as_bytes()));
        }
        assert_eq!(kept.len(), 4);
        assert_eq!(kept.json().expect("events").get(), "[{\"a\" :\n1},\"oops\"]");
        assert_eq!(Kept::Body(Bytes::from_static(b"\xff{")).json().expect("body").get(), "\"\u{fffd}{\"");
    }
}
