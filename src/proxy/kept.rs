//! The upstream's reply as it came: for the record, and for a client that comes back for it.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::value::RawValue;

use super::tape::{Place, Tape, Tapes, Turn};
use crate::protocol::sse::{Event, Rereader};
use crate::record::{JsonText, SinkError};

/// What has come of a reply.
#[derive(Default)]
pub(super) enum Kept {
    #[default]
    Nothing,
    /// The blocks of a stream.
    Events(Tape),
    Body(Bytes),
}

/// How far a reply was read again.
#[derive(Default)]
pub(super) struct Again {
    place: Place,
    reader: Rereader,
}

impl Kept {
    /// Adds a block of a stream.
    pub(super) fn push(&mut self, tapes: &Arc<Tapes>, block: &[u8]) {
        if !matches!(self, Self::Events(_)) {
            *self = Self::Events(Tape::new(tapes));
        }
        if let Self::Events(tape) = self {
            tape.push(block);
        }
    }

    /// Makes room for more blocks of a stream.
    pub(super) fn reserve(&mut self, bytes: usize) {
        if let Self::Events(tape) = self {
            tape.reserve(bytes + bytes / 32);
        }
    }

    /// How much of what was read of it may stay in memory when it does not.
    pub(super) fn share(&self) -> usize {
        match self {
            Self::Events(tape) => tape.share(),
            _ => usize::MAX,
        }
    }

    /// Lets go of a block that a later one says again. It does not come back; others keep their numbers.
    pub(super) fn supersede(&mut self, block: usize) {
        if let Self::Events(tape) = self {
            tape.supersede(block);
        }
    }

    /// Number of blocks.
    pub(super) const fn len(&self) -> usize {
        match self {
            Self::Events(tape) => tape.len(),
            _ => 0,
        }
    }

    /// Moves what has come out of memory, if it is time to and may be. True if it did.
    pub(super) async fn relieve(&mut self, may_spill: bool) -> Result<bool, SinkError> {
        let Self::Events(tape) = self else {
            return Ok(false);
        };
        let is_full = may_spill && tape.is_full();
        let spilled = if is_full { tape.spill().await } else { Ok(()) };
        tape.tell();
        spilled.map(|()| is_full)
    }

    /// Waits for the turn to make records of it.
    pub(super) async fn turn(&self) -> Turn {
        match self {
            Self::Events(tape) => tape.turn().await,
            _ => Turn::default(),
        }
    }

    /// Gives the next events of a stream again, each with the number of its block; false when there are no more.
    pub(super) fn read(
        &self,
        again: &mut Again,
        mut take: impl FnMut(usize, &Event),
    ) -> Result<bool, SinkError> {
        let Self::Events(tape) = self else {
            return Ok(false);
        };
        let reader = &mut again.reader;
        tape.read(&mut again.place, |number, block| {
            if let Some(event) = reader.event(block) {
                take(number, &event);
            }
        })
    }

    /// Gives names and data of a stream's events again, the end mark left out.
    fn each(&self, mut take: impl FnMut(&str, &[u8])) -> Result<(), SinkError> {
        let Self::Events(tape) = self else {
            return Ok(());
        };
        let Again { mut place, mut reader } = Again::default();
        let mut read = |_, block: &[u8]| {
            reader.data(block, |name, data| {
                if data != b"[DONE]" {
                    take(name, data);
                }
            });
        };
        while tape.read(&mut place, &mut read)? {}
        Ok(())
    }

    /// As one JSON value: the body, or the array of the events' data. `is_json`: the body, or each event, was read as
    /// JSON as it is, and is not looked at again. `take` gets name and data of each event that is in it.
    pub(super) fn json(
        &self,
        is_json: bool,
        take: impl FnMut(&str, &[u8]),
    ) -> Result<Option<JsonText>, SinkError> {
        match self {
            Self::Nothing => Ok(None),
            Self::Body(body) => {
                let whole = || body.slice_ref(body.trim_ascii());
                let text = if is_json { JsonText::of_read_bytes(whole()).ok() } else { None };
                Ok(Some(text.unwrap_or_else(|| raw(body))))
            }
            Self::Events(tape) => {
                let joined = self.joined(tape.bytes() + 2, take)?;
                let joined = if is_json { String::from_utf8(joined).ok() } else { None };
                match joined {
                    Some(list) => Ok(Some(JsonText::of_read(list))),
                    None => self.each_as_json().map(Some),
                }
            }
        }
    }

    /// The array of the events' data as it is.
    fn joined(&self, bytes: usize, mut take: impl FnMut(&str, &[u8])) -> Result<Vec<u8>, SinkError> {
        let mut list = Vec::with_capacity(bytes);
        list.push(b'[');
        self.each(|name, data| {
            if list.len() > 1 {
                list.push(b',');
            }
            list.extend_from_slice(data.trim_ascii());
            take(name, data);
        })?;
        list.push(b']');
        list.shrink_to_fit();
        Ok(list)
    }

    /// The array with what is no JSON as a string.
    fn each_as_json(&self) -> Result<JsonText, SinkError> {
        let mut list = String::from("[");
        self.each(|_, data| {
            if list.len() > 1 {
                list.push(',');
            }
            match serde_json::from_slice::<&RawValue>(data) {
                Ok(json) => list.push_str(json.get()),
                Err(_) => list.push_str(&as_string(data)),
            }
        })?;
        list.push(']');
        Ok(JsonText::of_read(list))
    }
}

/// Bytes as JSON: as they are when they are JSON, else as a string.
pub(super) fn raw(bytes: &Bytes) -> JsonText {
    JsonText::of_bytes(bytes).unwrap_or_else(|_| JsonText::of_read(as_string(bytes)))
}

fn as_string(bytes: &[u8]) -> String {
    serde_json::Value::from(String::from_utf8_lossy(bytes)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(blocks: &[&'static str]) -> Kept {
        let (mut kept, tapes) = (Kept::default(), Tapes::new(None, 1));
        blocks.iter().for_each(|block| kept.push(&tapes, block.as_bytes()));
        kept
    }

    fn read(kept: &Kept, is_json: bool) -> Option<JsonText> {
        kept.json(is_json, |_, _| ()).expect("in memory")
    }

    #[test]
    fn a_stream_is_the_array_of_its_data_and_what_is_no_json_is_a_string() {
        assert!(read(&Kept::default(), true).is_none());
        let blocks =
            [": hello\n\n", "event: a\ndata: {\"a\" :\ndata: 1}\n\n", "data: oops\n\n", "data: [DONE]\n\n"];
        let odd = kept(&blocks);
        assert_eq!(odd.len(), 4);
        assert_eq!(read(&odd, false).expect("events").get(), "[{\"a\" :\n1},\"oops\"]");
        assert_eq!(
            read(&Kept::Body(Bytes::from_static(b"\xff{")), false).expect("body").get(),
            "\"\u{fffd}{\""
        );
    }

    #[test]
    fn events_that_were_read_are_the_same_array() {
        let blocks = ["data:  {\"a\": [1 ,2]} \n\n", ":\n\n", "data: {}\n\n", "data: [DONE]\n\n"];
        for is_json in [true, false] {
            let json = read(&kept(&blocks), is_json).expect("events");
            assert_eq!(json.get(), "[{\"a\": [1 ,2]},{}]", "{is_json}");
        }
        // Numbers that JSON does not have are read all the same.
        let json = read(&kept(&["data: {\"a\":NaN}\n\n", "data: {}\n\n"]), false).expect("events");
        assert_eq!(json.get(), "[\"{\\\"a\\\":NaN}\",{}]");
        // One that nobody read may not become two.
        let json = read(&kept(&["data: 1,2\n\n"]), false).expect("events");
        assert_eq!(json.get(), "[\"1,2\"]");
    }
}
