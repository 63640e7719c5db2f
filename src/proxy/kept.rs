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

    /// Lets go of a block that a later one says again. Others keep their places.
    pub(super) fn forget(&mut self, block: usize) {
        if let Self::Events(blocks) = self
            && let Some(block) = blocks.get_mut(block)
        {
            *block = Bytes::from_static(b":\n\n");
        }
    }

    /// Number of blocks.
    pub(super) const fn len(&self) -> usize {
        match self {
            Self::Events(blocks) => blocks.len(),
            _ => 0,
        }
    }

    /// As one JSON value: the body, or the array of the events' data. `is_read`: each event was read as JSON, so the
    /// array need not be looked at part by part.
    pub(super) fn json(&self, is_read: bool) -> Option<Box<RawValue>> {
        match self {
            Self::Nothing => None,
            Self::Body(body) => Some(raw(body)),
            Self::Events(blocks) => {
                let joined = is_read.then(|| joined(blocks)).flatten();
                Some(joined.unwrap_or_else(|| each_as_json(blocks)))
            }
        }
    }
}

/// The data of the blocks that tell something.
fn told(blocks: &[Bytes]) -> impl Iterator<Item = Bytes> {
    let events = sse::reread(blocks).filter(Event::has_data).map(|event| event.data());
    events.filter(|data| data.as_ref() != b"[DONE]")
}

/// The array of them as they are, which is looked at once; `None` if it is no JSON.
fn joined(blocks: &[Bytes]) -> Option<Box<RawValue>> {
    let mut list = Vec::with_capacity(blocks.iter().map(Bytes::len).sum::<usize>() + 2);
    list.push(b'[');
    for data in told(blocks) {
        if list.len() > 1 {
            list.push(b',');
        }
        list.extend_from_slice(data.trim_ascii());
    }
    list.push(b']');
    RawValue::from_string(String::from_utf8(list).ok()?).ok()
}

/// The array with what is no JSON as a string.
fn each_as_json(blocks: &[Bytes]) -> Box<RawValue> {
    let mut list = String::from("[");
    for data in told(blocks) {
        if list.len() > 1 {
            list.push(',');
        }
        match serde_json::from_slice::<&RawValue>(&data) {
            Ok(json) => list.push_str(json.get()),
            Err(_) => list.push_str(&as_string(&data)),
        }
    }
    list.push(']');
    raw(list.as_bytes())
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

    fn kept(blocks: &[&'static str]) -> Kept {
        let mut kept = Kept::default();
        blocks.iter().for_each(|block| kept.push(Bytes::from_static(block.as_bytes())));
        kept
    }

    #[test]
    fn a_stream_is_the_array_of_its_data_and_what_is_no_json_is_a_string() {
        assert!(Kept::default().json(true).is_none());
        let blocks =
            [": hello\n\n", "event: a\ndata: {\"a\" :\ndata: 1}\n\n", "data: oops\n\n", "data: [DONE]\n\n"];
        let odd = kept(&blocks);
        assert_eq!(odd.len(), 4);
        assert_eq!(odd.json(false).expect("events").get(), "[{\"a\" :\n1},\"oops\"]");
        assert_eq!(
            Kept::Body(Bytes::from_static(b"\xff{")).json(false).expect("body").get(),
            "\"\u{fffd}{\""
        );
    }

    #[test]
    fn events_that_were_read_are_the_same_array() {
        let blocks = ["data:  {\"a\": [1 ,2]} \n\n", ":\n\n", "data: {}\n\n", "data: [DONE]\n\n"];
        for is_read in [true, false] {
            let json = kept(&blocks).json(is_read).expect("events");
            assert_eq!(json.get(), "[{\"a\": [1 ,2]},{}]", "{is_read}");
        }
        // Numbers that JSON does not have are read all the same.
        let json = kept(&["data: {\"a\":NaN}\n\n", "data: {}\n\n"]).json(true).expect("events");
        assert_eq!(json.get(), "[\"{\\\"a\\\":NaN}\",{}]");
        // One that nobody read may not become two.
        let json = kept(&["data: 1,2\n\n"]).json(false).expect("events");
        assert_eq!(json.get(), "[\"1,2\"]");
    }
}
