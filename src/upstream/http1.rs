//! HTTP/1.1 as a client speaks it (RFC 9112): a request's head, a response's head, and where its body ends. Pure: bytes
//! in, bytes out.

use std::mem::MaybeUninit;

use bytes::{BufMut, Bytes, BytesMut};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};

/// Longest head of a response, and longest trailers of one.
pub const MAX_HEAD_BYTES: usize = 32 << 10;
/// Most headers of a response: gateways in a row add theirs.
const MAX_HEADERS: usize = 256;
/// Longest line before a chunk: its length and what may be said about it.
const MAX_CHUNK_LINE: usize = 4 << 10;

/// A response that is not HTTP/1.1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("the head of its reply is not HTTP/1: {0}")]
    Head(httparse::Error),
    #[error("the head of its reply is longer than 32 KiB")]
    LongHead,
    #[error("it switches to a protocol that was not asked for")]
    Upgrade,
    #[error("its reply has no usable Content-Length")]
    Length,
    #[error("its reply is HTTP/1.0 and has a Transfer-Encoding")]
    Coding,
    #[error("a chunk of its reply has no usable length")]
    ChunkLength,
    #[error("a chunk of its reply does not end where it should")]
    ChunkEnd,
    #[error("the trailers of its reply are longer than 32 KiB")]
    LongTrailers,
}

/// The head of a request whose body is `body_bytes` long. `headers` has the `Host`, and nothing about framing.
pub fn request_head(method: &Method, path: &str, headers: &HeaderMap, body_bytes: usize) -> Bytes {
    let mut out = BytesMut::with_capacity(256 + 64 * headers.len() + path.len());
    for part in [method.as_str(), " ", path, " HTTP/1.1\r\n"] {
        out.put_slice(part.as_bytes());
    }
    for (name, value) in headers {
        out.put_slice(name.as_str().as_bytes());
        out.put_slice(b": ");
        out.put_slice(value.as_bytes());
        out.put_slice(b"\r\n");
    }
    let has_no_body = body_bytes == 0 && matches!(*method, Method::GET | Method::HEAD);
    if !has_no_body {
        out.put_slice(format!("content-length: {body_bytes}\r\n").as_bytes());
    }
    out.put_slice(b"\r\n");
    out.freeze()
}

/// The head of a response.
#[derive(Debug)]
pub struct Head {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: BodyReader,
    /// The connection may be used again after the body.
    pub is_kept: bool,
    /// Where the body begins.
    pub bytes: usize,
}

impl Head {
    /// Reads the head at the beginning of `bytes`, after interim ones (1xx); `None`: it is not whole yet. Interim heads
    /// are counted in [`Head::bytes`].
    ///
    /// # Errors
    /// [`Malformed`] when it can become none.
    pub fn parse(bytes: &[u8], method: &Method) -> Result<Option<Self>, Malformed> {
        let mut at = 0;
        loop {
            // Nothing is written to those that there are not.
            let mut headers = [const { MaybeUninit::uninit() }; MAX_HEADERS];
            let mut response = httparse::Response::new(&mut []);
            let config = httparse::ParserConfig::default();
            let parsed = config.parse_response_with_uninit_headers(&mut response, &bytes[at..], &mut headers);
            let length = match parsed.map_err(Malformed::Head)? {
                httparse::Status::Complete(length) => length,
                httparse::Status::Partial if bytes.len() - at >= MAX_HEAD_BYTES => {
                    return Err(Malformed::LongHead);
                }
                httparse::Status::Partial => return Ok(None),
            };
            at += length;
            let code = response.code.unwrap_or_default();
            match StatusCode::from_u16(code) {
                Err(_) => return Err(Malformed::Head(httparse::Error::Status)),
                Ok(StatusCode::SWITCHING_PROTOCOLS) => return Err(Malformed::Upgrade),
                Ok(status) if status.is_informational() => {}
                Ok(status) => {
                    let is_old = response.version == Some(0);
                    return Self::of(status, is_old, response.headers, method, at).map(Some);
                }
            }
        }
    }

    fn of(
        status: StatusCode,
        is_old: bool,
        lines: &[httparse::Header<'_>],
        method: &Method,
        bytes: usize,
    ) -> Result<Self, Malformed> {
        let mut headers = HeaderMap::with_capacity(lines.len());
        for line in lines {
            let name = HeaderName::from_bytes(line.name.as_bytes());
            let name = name.map_err(|_| Malformed::Head(httparse::Error::HeaderName))?;
            let value = HeaderValue::from_bytes(line.value);
            let value = value.map_err(|_| Malformed::Head(httparse::Error::HeaderValue))?;
            headers.append(name, value);
        }
        let has_coding = headers.contains_key(header::TRANSFER_ENCODING);
        let has_length = headers.contains_key(header::CONTENT_LENGTH);
        let is_bodiless =
            *method == Method::HEAD || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        let body = if is_bodiless {
            BodyReader::Length(0)
        } else if has_coding {
            if is_old {
                return Err(Malformed::Coding);
            }
            // Where the last coding is another one, only the connection's end is the body's.
            let last = tokens(&headers, &header::TRANSFER_ENCODING).last();
            let is_chunked = last.is_some_and(|coding| coding.eq_ignore_ascii_case(b"chunked"));
            if is_chunked { BodyReader::Chunked(Chunks::default()) } else { BodyReader::UntilClose }
        } else if has_length {
            BodyReader::Length(content_length(&headers)?)
        } else {
            BodyReader::UntilClose
        };
        let says = |what: &[u8]| {
            tokens(&headers, &header::CONNECTION).any(|option| option.eq_ignore_ascii_case(what))
        };
        let is_kept = if is_old { says(b"keep-alive") } else { !says(b"close") };
        // Two ways to find the end are one too many to trust what follows it.
        let is_kept = is_kept && !(has_coding && has_length) && !matches!(body, BodyReader::UntilClose);
        Ok(Self { status, headers, body, is_kept, bytes })
    }
}

/// The values of a list header, whatever lines they stand in.
fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a [u8]> {
    let lines = headers.get_all(name).into_iter();
    lines.flat_map(|line| line.as_bytes().split(|&byte| byte == b',').map(<[u8]>::trim_ascii))
}

/// The length that all values of the header agree on.
fn content_length(headers: &HeaderMap) -> Result<u64, Malformed> {
    let mut length = None;
    for value in tokens(headers, &header::CONTENT_LENGTH) {
        let is_number = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
        let text = std::str::from_utf8(value).ok().filter(|_| is_number);
        let number = text.and_then(|text| text.parse().ok()).ok_or(Malformed::Length)?;
        if length.replace(number).is_some_and(|other: u64| other != number) {
            return Err(Malformed::Length);
        }
    }
    length.ok_or(Malformed::Length)
}

/// Finds a body in what follows a head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyReader {
    /// Bytes that are left.
    Length(u64),
    Chunked(Chunks),
    UntilClose,
}

impl BodyReader {
    /// Reads what came next.
    pub fn read(&mut self, input: &[u8]) -> Read {
        let taken = match self {
            Self::Length(left) => {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
                *left -= taken as u64;
                taken
            }
            Self::Chunked(chunks) => return chunks.read(input),
            Self::UntilClose => input.len(),
        };
        Read { bytes: Bytes::copy_from_slice(&input[..taken]), used: taken, error: None }
    }

    /// True once all of it was read.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunked(chunks) => matches!(chunks.0, Chunk::Over),
            Self::UntilClose => false,
        }
    }
}

/// What was read.
#[derive(Debug, PartialEq, Eq)]
pub struct Read {
    /// Of the body.
    pub bytes: Bytes,
    /// How much of the input that took, framing included. Without an error, what is left is not of the body.
    pub used: usize,
    /// What follows is not framed as the head says.
    pub error: Option<Malformed>,
}

/// Reads chunks (RFC 9112, section 7.1).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chunks(Chunk);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunk {
    /// In the line before a chunk.
    Line {
        length: u64,
        bytes: usize,
        part: LinePart,
    },
    /// Within a chunk. None left: its end follows.
    Data {
        left: u64,
    },
    DataFeed,
    /// In the lines behind the last chunk; `line`: bytes of this one.
    Trailer {
        bytes: usize,
        line: usize,
        is_after_return: bool,
    },
    Over,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinePart {
    /// Nothing yet.
    Start,
    Digits,
    /// Blanks between the length and what may be said about the chunk.
    Blank,
    Extension,
    Feed,
}

impl Default for Chunk {
    fn default() -> Self {
        Self::Line { length: 0, bytes: 0, part: LinePart::Start }
    }
}

impl Chunks {
    fn read(&mut self, input: &[u8]) -> Read {
        let mut out = BytesMut::new();
        let mut at = 0;
        let mut error = None;
        while at < input.len() && error.is_none() {
            match &mut self.0 {
                Chunk::Over => break,
                Chunk::Data { left } if *left > 0 => {
                    let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len() - at);
                    if out.capacity() == 0 {
                        out.reserve(input.len() - at);
                    }
                    out.extend_from_slice(&input[at..at + taken]);
                    *left -= taken as u64;
                    at += taken;
                }
                _ => match self.0.step(input[at]) {
                    Ok(next) => {
                        self.0 = next;
                        at += 1;
                    }
                    Err(malformed) => error = Some(malformed),
                },
            }
        }
        Read { bytes: out.freeze(), used: at, error }
    }
}

impl Chunk {
    /// What follows a byte that is not of a chunk's data.
    fn step(self, byte: u8) -> Result<Self, Malformed> {
        match self {
            Self::Line { length, bytes, part } => Self::in_line(length, bytes, part, byte),
            Self::Data { .. } if byte == b'\r' => Ok(Self::DataFeed),
            Self::DataFeed if byte == b'\n' => Ok(Self::default()),
            Self::Data { .. } | Self::DataFeed => Err(Malformed::ChunkEnd),
            Self::Trailer { bytes, line, is_after_return } => match byte {
                b'\n' if is_after_return && line == 0 => Ok(Self::Over),
                b'\n' if is_after_return => Ok(Self::Trailer { bytes, line: 0, is_after_return: false }),
                _ if is_after_return || byte == b'\n' => Err(Malformed::ChunkEnd),
                _ if bytes == MAX_HEAD_BYTES => Err(Malformed::LongTrailers),
                b'\r' => Ok(Self::Trailer { bytes: bytes + 1, line, is_after_return: true }),
                _ => Ok(Self::Trailer { bytes: bytes + 1, line: line + 1, is_after_return: false }),
            },
            Self::Over => Ok(self),
        }
    }

    fn in_line(length: u64, bytes: usize, part: LinePart, byte: u8) -> Result<Self, Malformed> {
        if bytes == MAX_CHUNK_LINE {
            return Err(Malformed::ChunkLength);
        }
        let on = |length: u64, part: LinePart| Ok(Self::Line { length, bytes: bytes + 1, part });
        match (part, byte) {
            (LinePart::Start | LinePart::Digits, _) if byte.is_ascii_hexdigit() => {
                let digit = char::from(byte).to_digit(16).unwrap_or_default();
                let length = length.checked_mul(16).map(|length| length + u64::from(digit));
                on(length.ok_or(Malformed::ChunkLength)?, LinePart::Digits)
            }
            (LinePart::Digits | LinePart::Blank, b' ' | b'\t') => on(length, LinePart::Blank),
            (LinePart::Digits | LinePart::Blank, b';') => on(length, LinePart::Extension),
            (LinePart::Digits | LinePart::Blank | LinePart::Extension, b'\r') => on(length, LinePart::Feed),
            (LinePart::Extension, byte) if byte != b'\n' => on(length, LinePart::Extension),
            (LinePart::Feed, b'\n') if length == 0 => {
                Ok(Self::Trailer { bytes: 0, line: 0, is_after_return: false })
            }
            (LinePart::Feed, b'\n') => Ok(Self::Data { left: length }),
            _ => Err(Malformed::ChunkLength),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(text: &str) -> Result<Option<Head>, Malformed> {
        Head::parse(text.as_bytes(), &Method::POST)
    }

    /// All of a body that comes in these pieces, and whether it is over.
    fn read(reader: &mut BodyReader, pieces: &[&[u8]]) -> Result<(Vec<u8>, bool), Malformed> {
        let mut whole = Vec::new();
        for piece in pieces {
            let read = reader.read(piece);
            whole.extend_from_slice(&read.bytes);
            read.error.map_or(Ok(()), Err)?;
        }
        Ok((whole, reader.is_over()))
    }

    #[test]
    fn a_request_says_how_long_it_is_unless_it_has_no_body() {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_static("h:1"));
        headers.append("x-a", HeaderValue::from_static("1"));
        headers.append("x-a", HeaderValue::from_static("2"));
        let text = |method: Method, bytes| {
            String::from_utf8(request_head(&method, "/v1/x?y=1", &headers, bytes).to_vec()).expect("text")
        };
        let lines = "/v1/x?y=1 HTTP/1.1\r\nhost: h:1\r\nx-a: 1\r\nx-a: 2\r\n";
        assert_eq!(text(Method::POST, 12), format!("POST {lines}content-length: 12\r\n\r\n"));
        assert_eq!(text(Method::POST, 0), format!("POST {lines}content-length: 0\r\n\r\n"));
        assert_eq!(text(Method::GET, 0), format!("GET {lines}\r\n"));
    }

    #[test]
    fn how_a_body_is_framed_and_whether_the_connection_is_kept() {
        use BodyReader::{Length, UntilClose};
        let chunked = || BodyReader::Chunked(Chunks::default());
        for (lines, body, is_kept) in [
            ("1.1 200 OK\r\nContent-Length: 5", Length(5), true),
            ("1.1 200 OK\r\ncontent-length: 5, 5\r\nContent-Length: 5", Length(5), true),
            ("1.1 200 OK\r\ncontent-length: 5\r\nconnection: x, Close", Length(5), false),
            ("1.0 200 OK\r\ncontent-length: 5", Length(5), false),
            ("1.0 200 OK\r\ncontent-length: 5\r\nconnection: Keep-Alive", Length(5), true),
            ("1.1 200\r\nTransfer-Encoding: gzip, Chunked", chunked(), true),
            ("1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 5", chunked(), false),
            ("1.1 200 OK\r\ntransfer-encoding: chunked, gzip", UntilClose, false),
            ("1.1 200 OK\r\nx: y", UntilClose, false),
            ("1.1 204 No Content\r\nx: y", Length(0), true),
            ("1.1 304 Not Modified\r\ncontent-length: 5", Length(0), true),
            (
                "1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nx: y\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1",
                Length(1),
                true,
            ),
        ] {
            let text = format!("HTTP/{lines}\r\n\r\n");
            let head = head(&text).expect(lines).expect("whole");
            assert_eq!((head.body, head.is_kept, head.bytes), (body, is_kept, text.len()), "{lines}");
            for end in 0..text.len() {
                assert!(
                    matches!(Head::parse(&text.as_bytes()[..end], &Method::POST), Ok(None)),
                    "{lines} {end}"
                );
            }
        }
        let head = Head::parse(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", &Method::HEAD);
        assert_eq!(head.expect("read").expect("whole").body, Length(0));
    }

    #[test]
    fn what_is_no_reply_is_refused() {
        for (text, why) in [
            ("nonsense\r\n\r\n".to_owned(), Malformed::Head(httparse::Error::Version)),
            (
                "HTTP/1.1 200 OK\r\nbad name: 1\r\n\r\n".to_owned(),
                Malformed::Head(httparse::Error::HeaderName),
            ),
            ("HTTP/1.1 099 OK\r\n\r\n".to_owned(), Malformed::Head(httparse::Error::Status)),
            ("HTTP/1.1 101 Switching\r\n\r\n".to_owned(), Malformed::Upgrade),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n".to_owned(),
                Malformed::Length,
            ),
            ("HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\n".to_owned(), Malformed::Length),
            ("HTTP/1.1 200 OK\r\ncontent-length: 5,\r\n\r\n".to_owned(), Malformed::Length),
            ("HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n".to_owned(), Malformed::Length),
            ("HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_owned(), Malformed::Coding),
            (format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(MAX_HEAD_BYTES)), Malformed::LongHead),
            (
                format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(MAX_HEADERS + 1)),
                Malformed::Head(httparse::Error::TooManyHeaders),
            ),
        ] {
            assert_eq!(head(&text).map(|_| ()), Err(why), "{text:.60}");
        }
    }

    #[test]
    fn a_head_may_have_many_headers() {
        let text =
            format!("HTTP/1.1 200 OK\r\n{}content-length: 5\r\n\r\n", "x: y\r\n".repeat(MAX_HEADERS - 1));
        let head = head(&text).expect("read").expect("whole");
        assert_eq!(
            (head.headers.get_all("x").iter().count(), head.body),
            (MAX_HEADERS - 1, BodyReader::Length(5))
        );
    }

    #[test]
    fn chunks_cut_anywhere_are_the_same_body() {
        let text = b"3\r\nabc\r\n0A ;x=\"y\"\r\n0123456789\r\n1;\r\nZ\r\n000\r\nx: y\r\n\r\nleft";
        let end = text.len() - 4;
        for cut in 0..=text.len() {
            let mut reader = BodyReader::Chunked(Chunks::default());
            let parts: [&[u8]; 2] = [&text[..cut], &text[cut..]];
            let read = read(&mut reader, &parts).expect("well-formed");
            assert_eq!(read, (b"abc0123456789Z".to_vec(), true), "{cut}");
            let mut reader = BodyReader::Chunked(Chunks::default());
            let read = reader.read(&text[..cut]);
            assert_eq!((read.used, read.error), (cut.min(end), None), "{cut}");
            assert_eq!(reader.is_over(), cut >= end, "{cut}");
        }
        let mut reader = BodyReader::Chunked(Chunks::default());
        let bytes: Vec<&[u8]> = text[..end].chunks(1).collect();
        assert_eq!(read(&mut reader, &bytes), Ok((b"abc0123456789Z".to_vec(), true)));
    }

    #[test]
    fn chunks_that_are_none_are_refused() {
        let long = format!("1;{}\r\n", "x".repeat(MAX_CHUNK_LINE));
        let trailers = format!("0\r\n{}", "x: y\r\n".repeat(MAX_HEAD_BYTES / 4));
        for (text, why) in [
            ("\r\n", Malformed::ChunkLength),
            ("g\r\n", Malformed::ChunkLength),
            ("3\n", Malformed::ChunkLength),
            ("3\rx", Malformed::ChunkLength),
            ("3 3\r\n", Malformed::ChunkLength),
            ("3;x\ny\r\n", Malformed::ChunkLength),
            ("-3\r\n", Malformed::ChunkLength),
            ("10000000000000000\r\n", Malformed::ChunkLength),
            (long.as_str(), Malformed::ChunkLength),
            ("3\r\nabcd\r\n", Malformed::ChunkEnd),
            ("3\r\nabc\n", Malformed::ChunkEnd),
            ("3\r\nabc\rx", Malformed::ChunkEnd),
            ("0\r\n\n", Malformed::ChunkEnd),
            ("0\r\nx\ry", Malformed::ChunkEnd),
            (trailers.as_str(), Malformed::LongTrailers),
        ] {
            let mut reader = BodyReader::Chunked(Chunks::default());
            assert_eq!(read(&mut reader, &[text.as_bytes()]), Err(why), "{text:.40}");
        }
        // What came before is not lost.
        let mut reader = BodyReader::Chunked(Chunks::default());
        let read_part = reader.read(b"3\r\nabc\r\nx");
        let expected =
            Read { bytes: Bytes::from_static(b"abc"), used: 8, error: Some(Malformed::ChunkLength) };
        assert_eq!(read_part, expected);
        // As long as a number may be.
        let mut reader = BodyReader::Chunked(Chunks::default());
        assert_eq!(read(&mut reader, &[b"ffffffffffffffff\r\nabc"]), Ok((b"abc".to_vec(), false)));
    }
}
