//! Incremental parser of server-sent events (HTML standard, section 9.2.6) that keeps the original bytes.
//!
//! Line ends are LF, CR and CRLF in any mix; text is never decoded here, so a character cut by a read is whole
//! again in its event. An event is handed out when its blank line arrives.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::json::Edit;

/// One block of a stream, up to and including its blank line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The original bytes. Joined over all events of a stream they are the stream.
    pub raw: Bytes,
    /// Where the `data` lines' values lie in `raw`. None: the block only has comments or other fields, and the
    /// standard dispatches nothing.
    data: Lines,
    /// Value of the `event` field; empty when there was none.
    pub name: String,
    /// The last event id so far.
    pub id: String,
    /// Value of the `retry` field, milliseconds.
    pub retry: Option<u64>,
    /// The stream ended before this event's blank line. The standard discards it; a proxy must not.
    pub is_unterminated: bool,
}

impl Event {
    /// True if a client would be given this block as an event.
    #[must_use]
    pub fn has_data(&self) -> bool {
        self.data.first.is_some()
    }

    /// The `data` lines joined by LF. No copy when there is one.
    #[must_use]
    pub fn data(&self) -> Bytes {
        match &self.data.first {
            None => Bytes::new(),
            Some(one) if self.data.more.is_empty() => self.raw.slice(one.clone()),
            Some(_) => {
                let lines: Vec<&[u8]> = self.data.iter().map(|line| &self.raw[line.clone()]).collect();
                Bytes::from(lines.join(&b'\n'))
            }
        }
    }

    /// The original bytes with `edits`, whose spans are offsets into [`Event::data`], applied.
    #[must_use]
    pub fn edited(&self, edits: &[Edit]) -> Bytes {
        if edits.is_empty() {
            return self.raw.clone();
        }
        let mut out = Vec::with_capacity(self.raw.len());
        let mut copied = 0;
        let mut line_start = 0;
        for line in self.data.iter() {
            let line_end = line_start + line.len();
            for edit in edits {
                let start = edit.span.start.max(line_start);
                let end = edit.span.end.min(line_end);
                let starts_here = (line_start..=line_end).contains(&edit.span.start);
                if start > end || (start == end && !starts_here) {
                    continue;
                }
                out.extend_from_slice(&self.raw[copied..line.start + start - line_start]);
                if starts_here {
                    out.extend_from_slice(&edit.with);
                }
                copied = line.start + end - line_start;
            }
            line_start = line_end + 1;
        }
        out.extend_from_slice(&self.raw[copied..]);
        Bytes::from(out)
    }
}

/// Lines of an event. Most have one, which is not put on the heap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Lines {
    first: Option<Range<usize>>,
    more: Vec<Range<usize>>,
}

impl Lines {
    fn push(&mut self, line: Range<usize>) {
        match &self.first {
            None => self.first = Some(line),
            Some(_) => self.more.push(line),
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Range<usize>> {
        self.first.iter().chain(&self.more)
    }
}

/// The parser. Feed with [`Parser::push`], take with [`Parser::next_event`] until `None`, end with [`Parser::finish`].
#[derive(Debug, Default)]
pub struct Parser {
    /// Bytes of the block in progress.
    buffer: BytesMut,
    /// `buffer[..scanned]` holds whole lines and looked-at bytes of the current one: no byte is looked at twice.
    scanned: usize,
    line_start: usize,
    /// The last byte was a CR that ended a line: an LF that follows belongs to it.
    after_cr: bool,
    past_start: bool,
    fields: Fields,
    last_id: String,
}

#[derive(Debug, Default)]
struct Fields {
    data: Lines,
    name: String,
    retry: Option<u64>,
}

impl Parser {
    /// A parser at the start of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        let length = self.buffer.len() + bytes.len();
        // By itself it would double, which thousands of streams would hold for the little that is in progress.
        if self.buffer.capacity() < length && self.buffer.len() <= bytes.len() {
            let mut joined = BytesMut::with_capacity(length);
            joined.extend_from_slice(&self.buffer);
            self.buffer = joined;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The same for bytes that are nobody else's: they are not copied where no block is in progress.
    pub fn push_piece(&mut self, piece: Bytes) {
        match piece.try_into_mut() {
            Ok(piece) if self.buffer.is_empty() => self.buffer = piece,
            Ok(piece) => self.push(&piece),
            Err(piece) => self.push(&piece),
        }
    }

    /// Bytes of the block that is not complete yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.buffer.len()
    }

    /// Takes the bytes of the incomplete block as they are. The parser must not be used for this stream afterwards.
    pub fn take_pending(&mut self) -> Bytes {
        self.buffer.split().freeze()
    }

    /// The next complete block, if there is one.
    pub fn next_event(&mut self) -> Option<Event> {
        while self.scanned < self.buffer.len() {
            if !self.after_cr {
                let rest = &self.buffer[self.scanned..];
                self.scanned += memchr::memchr2(b'\n', b'\r', rest).unwrap_or(rest.len());
            }
            let Some(&byte) = self.buffer.get(self.scanned) else {
                break;
            };
            self.scanned += 1;
            let follows_cr = std::mem::take(&mut self.after_cr);
            match byte {
                b'\n' if follows_cr => {
                    self.line_start = self.scanned;
                    continue;
                }
                b'\n' | b'\r' => {}
                _ => continue,
            }
            let line = self.line_start..self.scanned - 1;
            if byte == b'\r' {
                if self.buffer.get(self.scanned) == Some(&b'\n') {
                    self.scanned += 1;
                } else {
                    self.after_cr = true;
                }
            }
            self.line_start = self.scanned;
            if self.end_line(line) {
                return Some(self.dispatch(false));
            }
        }
        if self.buffer.is_empty() {
            // Its room would be kept for as long as the stream is open.
            self.buffer = BytesMut::new();
        }
        None
    }

    /// What is left at the end of the stream: a block without its blank line.
    pub fn finish(&mut self) -> Option<Event> {
        if self.buffer.is_empty() {
            return None;
        }
        let line = self.line_start..self.buffer.len();
        if !line.is_empty() {
            self.end_line(line);
        }
        self.scanned = self.buffer.len();
        Some(self.dispatch(true))
    }

    /// Reads a line. True if it is blank: the block ends.
    fn end_line(&mut self, mut line: Range<usize>) -> bool {
        if !self.past_start {
            self.past_start = true;
            if self.buffer[line.clone()].starts_with(b"\xEF\xBB\xBF") {
                line.start += 3;
            }
        }
        if line.is_empty() {
            return true;
        }
        let text = &self.buffer[line.clone()];
        let colon = text.iter().position(|&byte| byte == b':');
        let field = &text[..colon.unwrap_or(text.len())];
        let mut value = line.start + colon.map_or(text.len(), |at| at + 1)..line.end;
        if self.buffer.get(value.start) == Some(&b' ') && !value.is_empty() {
            value.start += 1;
        }
        let content = &self.buffer[value.clone()];
        match field {
            b"data" => self.fields.data.push(value),
            b"event" => self.fields.name = String::from_utf8_lossy(content).into_owned(),
            b"id" if !content.contains(&0) => {
                self.last_id = String::from_utf8_lossy(content).into_owned();
            }
            b"retry" => {
                let is_number = !content.is_empty() && content.iter().all(u8::is_ascii_digit);
                if let (true, Ok(text)) = (is_number, std::str::from_utf8(content)) {
                    self.fields.retry = text.parse().ok();
                }
            }
            _ => {}
        }
        false
    }

    fn dispatch(&mut self, is_unterminated: bool) -> Event {
        let raw = self.buffer.split_to(self.scanned).freeze();
        self.scanned = 0;
        self.line_start = 0;
        let fields = std::mem::take(&mut self.fields);
        Event {
            raw,
            data: fields.data,
            name: fields.name,
            id: self.last_id.clone(),
            retry: fields.retry,
            is_unterminated,
        }
    }
}

/// Reads blocks again that a parser gave, in their order; some may be left out.
#[derive(Default)]
pub struct Rereader(Parser);

impl Rereader {
    /// Name and data of the next block's event, if it has data. Only what is not one plain line of data is parsed.
    pub fn data<T>(&mut self, block: &[u8], take: impl FnOnce(&str, &[u8]) -> T) -> Option<T> {
        if self.0.past_start
            && let Some(line) = block.strip_suffix(b"\n\n").and_then(|line| line.strip_prefix(b"data: "))
            && memchr::memchr2(b'\n', b'\r', line).is_none()
        {
            return Some(take("", line));
        }
        let event = self.event(block).filter(Event::has_data)?;
        Some(take(&event.name, &event.data()))
    }

    /// The event of the next block.
    pub fn event(&mut self, block: &[u8]) -> Option<Event> {
        // The line feed of the block before, where a read came between it and its carriage return, begins this one.
        self.0 = Parser {
            after_cr: true,
            past_start: self.0.past_start,
            last_id: std::mem::take(&mut self.0.last_id),
            ..Parser::default()
        };
        self.0.push(block);
        self.0.next_event().or_else(|| self.0.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CORNER_CASES: &[u8] = include_bytes!("../../tests/fixtures/wire/sse_corner_cases.sse");
    const EXPECTED: &[u8] = include_bytes!("../../tests/fixtures/wire/sse_corner_cases.expected.json");

    fn parse(pieces: &[&[u8]]) -> Vec<Event> {
        let mut parser = Parser::new();
        let mut events = Vec::new();
        for piece in pieces {
            parser.push(piece);
            while let Some(event) = parser.next_event() {
                events.push(event);
            }
        }
        events.extend(parser.finish());
        events
    }

    fn joined(events: &[Event]) -> Vec<u8> {
        events.iter().flat_map(|event| event.raw.to_vec()).collect()
    }

    fn seen(events: &[Event]) -> Vec<(String, Vec<u8>, String, Option<u64>, bool)> {
        let named = |event: &Event| {
            if event.name.is_empty() { "message".to_owned() } else { event.name.clone() }
        };
        events
            .iter()
            .filter(|event| event.has_data())
            .map(|e| (named(e), e.data().to_vec(), e.id.clone(), e.retry, e.is_unterminated))
            .collect()
    }

    fn expected() -> Vec<(String, Vec<u8>, String, Option<u64>, bool)> {
        let list: Vec<serde_json::Value> = serde_json::from_slice(EXPECTED).expect("fixture");
        list.iter()
            .map(|event| {
                (
                    event["event"].as_str().expect("event").to_owned(),
                    event["data"].as_str().expect("data").as_bytes().to_vec(),
                    event["id"].as_str().expect("id").to_owned(),
                    event["retry"].as_u64(),
                    event["unterminated"] == true,
                )
            })
            .collect()
    }

    #[test]
    fn a01_a02_corner_cases_cut_at_every_byte() {
        for cut in 0..=CORNER_CASES.len() {
            let events = parse(&[&CORNER_CASES[..cut], &CORNER_CASES[cut..]]);
            assert_eq!(seen(&events), expected(), "cut at {cut}");
            assert_eq!(joined(&events), CORNER_CASES, "cut at {cut}");
        }
        let bytes: Vec<&[u8]> = CORNER_CASES.chunks(1).collect();
        let events = parse(&bytes);
        assert_eq!(seen(&events), expected());
        assert_eq!(joined(&events), CORNER_CASES);
    }

    #[test]
    fn a02_every_line_end_gives_each_event_when_its_blank_line_arrives() {
        for end in ["\n", "\r\n", "\r"] {
            let mut parser = Parser::new();
            for n in 0..3 {
                parser.push(format!("data: {n}{end}").as_bytes());
                assert_eq!(parser.next_event(), None);
                parser.push(end.as_bytes());
                let event = std::iter::from_fn(|| parser.next_event()).find(Event::has_data);
                assert_eq!(event.expect("complete").data(), format!("{n}"));
            }
            assert!(parser.finish().is_none_or(|event| !event.has_data()), "{end:?}");
        }
    }

    #[test]
    fn edits_reach_through_the_lines_of_a_multi_line_event() {
        let events = parse(&[b"data: {\"a\":1,\ndata: \"b\":2,\ndata: \"c\":3}\n\n"]);
        let data = events[0].data();
        let strip = |keys: &[&str]| {
            let members = crate::protocol::json::members(&data, 0).expect("object");
            let mut edits = Vec::new();
            crate::protocol::json::remove_members(&members, &mut edits, |member| {
                keys.iter().any(|key| member.is_named(&data, key))
            });
            let mut parser = Parser::new();
            parser.push(&events[0].edited(&edits));
            let event = parser.next_event().expect("still one event");
            serde_json::from_slice::<serde_json::Value>(&event.data()).expect("still JSON")
        };
        assert_eq!(strip(&["b"]), serde_json::json!({"a": 1, "c": 3}));
        assert_eq!(strip(&["a", "b"]), serde_json::json!({"c": 3}));
        assert_eq!(strip(&["b", "c"]), serde_json::json!({"a": 1}));
    }

    #[test]
    fn a15_a_large_event_is_scanned_once() {
        let mut parser = Parser::new();
        parser.push(b"data: \"");
        let piece = vec![b'x'; 64 * 1024];
        for _ in 0..128 {
            parser.push(&piece);
            assert_eq!(parser.next_event(), None);
            assert_eq!(parser.scanned, parser.buffer.len());
        }
        parser.push(b"\"\n\n");
        assert_eq!(parser.next_event().expect("whole").data().len(), 128 * piece.len() + 2);
    }

    #[test]
    fn plain_blocks_are_read_again_as_all_others_are() {
        let odd = "\u{feff}data: 0\n\ndata: 1\n\ndata:2\n\nid: 7\ndata: 3\n\ndata: \n\ndata: a\rdata: b\n\n: c\n\ndata: \n4\n\n\
                   event: e\ndata: 5\n\ndata: 6\r\n\r\ndata: 7\n\ndata: end\n";
        for stream in [odd.as_bytes(), CORNER_CASES] {
            let (mut one, mut other) = (Rereader::default(), Rereader::default());
            for block in parse(&[stream]).into_iter().map(|event| event.raw) {
                let data = one.data(&block, |name, data| (name.to_owned(), data.to_vec()));
                let event = other.event(&block).filter(Event::has_data);
                assert_eq!(data, event.map(|event| (event.name.clone(), event.data().to_vec())), "{block:?}");
            }
        }
    }

    #[test]
    fn blocks_are_read_again_although_some_are_left_out() {
        let mut parser = Parser::new();
        let mut blocks = Vec::new();
        // The read ends between a carriage return and its line feed: that begins the next block.
        for piece in ["data: 1\r\n\r", "\ndata: 2\r\n\r", "\ndata: 3\r\n\r\n"] {
            parser.push(piece.as_bytes());
            while let Some(event) = parser.next_event() {
                blocks.push(event.raw);
            }
        }
        assert_eq!(blocks[1].as_ref(), b"\ndata: 2\r\n\r");
        for left_out in 0..blocks.len() {
            let mut reader = Rereader::default();
            let kept = blocks.iter().enumerate().filter(|(at, _)| *at != left_out);
            for (at, block) in kept {
                let event = reader.event(block).expect("an event");
                assert_eq!(event.data().as_ref(), (at + 1).to_string().as_bytes(), "without {left_out}");
            }
        }
    }
}
