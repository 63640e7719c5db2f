//! Clients that check every byte of what they get.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Whom the clients call.
#[derive(Debug, Clone)]
pub struct Target {
    /// `host:port`
    pub address: String,
    pub path: String,
}

/// What one call showed.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    pub ttft: Duration,
    /// Between two reads.
    pub gaps: Vec<Duration>,
    pub bytes: usize,
    pub checksum: u32,
}

/// A connection that makes one call after the other.
pub struct Client {
    target: Target,
    stream: Option<TcpStream>,
    buffer: Vec<u8>,
    is_timed: bool,
}

impl Client {
    pub fn new(target: &Target) -> Self {
        Self { target: target.clone(), stream: None, buffer: Vec::new(), is_timed: false }
    }

    /// One that keeps the time between reads.
    pub fn timed(target: &Target) -> Self {
        Self { is_timed: true, ..Self::new(target) }
    }

    /// Makes a call and reads its reply to the end.
    ///
    /// # Errors
    /// A connection or a reply that broke, or a status other than 200.
    pub async fn call(&mut self, is_stream: bool) -> Result<Seen, String> {
        let seen = self.exchange(is_stream).await;
        if seen.is_err() {
            self.stream = None;
        }
        seen
    }

    async fn exchange(&mut self, is_stream: bool) -> Result<Seen, String> {
        let text = |error: std::io::Error| error.to_string();
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect(&self.target.address).await.map_err(text)?;
                stream.set_nodelay(true).map_err(text)?;
                stream
            }
        };
        let usage = if is_stream { ",\"stream_options\":{\"include_usage\":true}" } else { "" };
        let body = format!(
            "{{\"model\":\"m\",\"messages\":[{{\"role\":\"user\",\"content\":\"hello\"}}],\"stream\":{is_stream},\
             \"logprobs\":true,\"return_token_ids\":true{usage}}}"
        );
        let request = format!(
            "POST {} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.target.path,
            self.target.address,
            body.len()
        );
        let begun = Instant::now();
        stream.write_all(request.as_bytes()).await.map_err(text)?;
        let (mut seen, mut reply, mut last) = (Seen::default(), Reply::default(), None);
        self.buffer.clear();
        loop {
            self.buffer.reserve(16 << 10);
            if stream.read_buf(&mut self.buffer).await.map_err(text)? == 0 {
                return Err("the connection ended within the reply".to_owned());
            }
            let is_over = reply.take(&mut self.buffer, &mut seen)?;
            let now = Instant::now();
            match last.replace(now) {
                None => seen.ttft = now - begun,
                Some(last) if self.is_timed => seen.gaps.push(now - last),
                Some(_) => {}
            }
            if is_over {
                self.stream = Some(stream);
                return Ok(seen);
            }
        }
    }
}

/// How far a reply is read.
#[derive(Default)]
struct Reply {
    has_head: bool,
    is_chunked: bool,
    /// Bytes of the body or chunk that are to come.
    left: usize,
    /// The chunk's line end is to come.
    is_in_chunk: bool,
}

impl Reply {
    /// Takes what is whole. True at the reply's end.
    fn take(&mut self, buffer: &mut Vec<u8>, seen: &mut Seen) -> Result<bool, String> {
        let mut at = 0;
        let is_over = loop {
            let rest = &buffer[at..];
            if !self.has_head {
                let Some(end) = rest.windows(4).position(|part| part == b"\r\n\r\n") else { break false };
                let head = String::from_utf8_lossy(&rest[..end]).to_ascii_lowercase();
                if !head.starts_with("http/1.1 200") {
                    return Err(String::from_utf8_lossy(rest).into_owned());
                }
                self.has_head = true;
                self.is_chunked = head.contains("transfer-encoding: chunked");
                let length = head.split("content-length:").nth(1).and_then(|text| text.lines().next());
                self.left = length.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
                at += end + 4;
            } else if self.left > 0 {
                let part = &rest[..self.left.min(rest.len())];
                if part.is_empty() {
                    break false;
                }
                seen.bytes += part.len();
                seen.checksum = crc32c::crc32c_append(seen.checksum, part);
                self.left -= part.len();
                at += part.len();
            } else if !self.is_chunked {
                break true;
            } else if self.is_in_chunk {
                if rest.len() < 2 {
                    break false;
                }
                self.is_in_chunk = false;
                at += 2;
            } else {
                let Some(end) = rest.windows(2).position(|part| part == b"\r\n") else { break false };
                let size = std::str::from_utf8(&rest[..end]).unwrap_or_default();
                let size = usize::from_str_radix(size, 16).map_err(|_| format!("a chunk of {size:?}"))?;
                if size == 0 {
                    if rest.len() < end + 4 {
                        break false;
                    }
                    at += end + 4;
                    break true;
                }
                (self.left, self.is_in_chunk) = (size, true);
                at += end + 2;
            }
        };
        buffer.drain(..at);
        Ok(is_over)
    }
}
