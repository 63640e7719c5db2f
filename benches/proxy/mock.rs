//! An upstream that costs next to nothing: vLLM-shaped replies, rendered beforehand, with ids and log-probs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;

/// Events that are rendered beforehand; longer replies repeat them.
const CYCLE: usize = 256;
/// About what one write takes when nothing is paced.
const WRITE_BYTES: usize = 32 << 10;

/// What every reply looks like.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub tokens: usize,
    /// Tokens of one event.
    pub at_once: usize,
    /// Between two events; nothing: as fast as they are taken.
    pub pace: Duration,
    pub is_stream: bool,
}

impl Shape {
    pub fn events(&self) -> usize {
        self.tokens.div_ceil(self.at_once)
    }
}

/// The id of the token at this place.
pub fn token_id(at: usize) -> u32 {
    (at % CYCLE) as u32 * 7 + 11
}

struct Reply {
    shape: Shape,
    head: Vec<u8>,
    /// In http chunks.
    events: Vec<Bytes>,
    last: Bytes,
    /// A reply that is not streamed, with its head.
    whole: Bytes,
    /// Of all data that a client gets.
    checksum: u32,
    bytes: usize,
}

/// The running mock.
#[derive(Clone)]
pub struct Mock {
    pub address: SocketAddr,
    reply: Arc<Reply>,
    open: watch::Sender<usize>,
    gate: watch::Sender<usize>,
    asked: watch::Sender<usize>,
}

impl Mock {
    pub async fn start(shape: Shape) -> Self {
        let socket = TcpSocket::new_v4().expect("socket");
        socket.bind(([127, 0, 0, 1], 0).into()).expect("loopback");
        let listener = socket.listen(8192).expect("loopback");
        let mock = Self {
            address: listener.local_addr().expect("bound"),
            reply: Arc::new(Reply::render(shape)),
            open: watch::Sender::new(0),
            gate: watch::Sender::new(0),
            asked: watch::Sender::new(0),
        };
        tokio::spawn(mock.clone().serve(listener));
        mock
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Length and checksum of what a client gets.
    pub fn wanted(&self) -> (usize, u32) {
        (self.reply.bytes, self.reply.checksum)
    }

    /// Requests that came so far.
    pub fn asked(&self) -> usize {
        *self.asked.borrow()
    }

    /// From now on a reply goes on after its first event only when this many are open at once.
    pub fn hold_until(&self, open: usize) {
        self.gate.send_replace(open);
    }

    /// Waits until that many replies are open.
    pub async fn is_open(&self, count: usize) {
        self.open.subscribe().wait_for(|open| *open >= count).await.expect("mock");
    }

    /// Lets every reply go on.
    pub fn release(&self) {
        self.gate.send_replace(0);
    }

    async fn serve(self, listener: TcpListener) {
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            let mock = self.clone();
            tokio::spawn(async move {
                // Whoever leaves early is the clients' concern.
                let _ = mock.connection(stream).await;
            });
        }
    }

    async fn connection(&self, mut stream: TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let mut buffer = Vec::with_capacity(4096);
        while read_request(&mut stream, &mut buffer).await? {
            self.asked.send_modify(|count| *count += 1);
            if self.reply.shape.is_stream {
                self.open.send_modify(|open| *open += 1);
                let sent = self.stream(&mut stream).await;
                self.open.send_modify(|open| *open -= 1);
                sent?;
            } else {
                stream.write_all(&self.reply.whole).await?;
            }
        }
        Ok(())
    }

    async fn stream(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        let Reply { shape, head, events, last, .. } = &*self.reply;
        stream.write_all(head).await?;
        let mut block = Vec::new();
        let start = tokio::time::Instant::now();
        for at in 0..shape.events() {
            block.extend_from_slice(&events[at % events.len()]);
            if at == 0 {
                stream.write_all(&block).await?;
                block.clear();
                self.gate.subscribe().wait_for(|open| *open == 0).await.expect("mock");
            } else if !shape.pace.is_zero() {
                tokio::time::sleep_until(start + shape.pace * at as u32).await;
                stream.write_all(&block).await?;
                block.clear();
            } else if block.len() >= WRITE_BYTES {
                stream.write_all(&block).await?;
                block.clear();
            }
        }
        block.extend_from_slice(last);
        stream.write_all(&block).await
    }
}

impl Reply {
    fn render(shape: Shape) -> Self {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
                    transfer-encoding: chunked\r\n\r\n";
        let count = shape.events().min(CYCLE);
        let texts: Vec<String> =
            (0..count).map(|event| format!("data: {}\n\n", chunk(shape, event))).collect();
        let usage = format!(
            "\"usage\":{{\"prompt_tokens\":3,\"completion_tokens\":{},\"total_tokens\":{}}}",
            shape.tokens,
            shape.tokens + 3
        );
        let head_of_chunk =
            "\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\"";
        let ends = [
            format!(
                "data: {{{head_of_chunk},\"choices\":[{{\"index\":0,\"delta\":{{}},\"logprobs\":null,\
                 \"finish_reason\":\"stop\",\"stop_reason\":null,\"token_ids\":null}}]}}\n\n"
            ),
            format!("data: {{{head_of_chunk},\"choices\":[],{usage}}}\n\n"),
            "data: [DONE]\n\n".to_owned(),
        ];
        let body = whole(shape, &usage);
        let (mut checksum, mut bytes) = (0, 0);
        let mut add = |text: &str| {
            checksum = crc32c::crc32c_append(checksum, text.as_bytes());
            bytes += text.len();
        };
        if shape.is_stream {
            (0..shape.events()).for_each(|event| add(&texts[event % count]));
            ends.iter().for_each(|text| add(text));
        } else {
            add(&body);
        }
        let in_chunk = |text: &String| format!("{:x}\r\n{text}\r\n", text.len());
        let last = ends.iter().map(in_chunk).collect::<String>() + "0\r\n\r\n";
        let whole = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        Self {
            shape,
            head: head.into(),
            events: texts.iter().map(|text| in_chunk(text).into()).collect(),
            last: last.into(),
            whole: whole.into(),
            checksum,
            bytes,
        }
    }
}

/// The tokens of one event: texts, log-probs, ids.
fn tokens(shape: Shape, event: usize) -> (String, String, String) {
    let places = event * shape.at_once..((event + 1) * shape.at_once).min(shape.tokens);
    let text = |at: usize| format!(" w{}", at % CYCLE);
    let logprob = |at: usize| {
        let bytes: Vec<String> = text(at).bytes().map(|byte| byte.to_string()).collect();
        format!(
            "{{\"token\":\"{}\",\"logprob\":-{}.{:04},\"bytes\":[{}],\"top_logprobs\":[]}}",
            text(at),
            at % 3,
            at % CYCLE * 37 + 1,
            bytes.join(",")
        )
    };
    let texts = places.clone().map(text).collect();
    let logprobs: Vec<String> = places.clone().map(logprob).collect();
    let ids: Vec<String> = places.map(|at| token_id(at).to_string()).collect();
    (texts, logprobs.join(","), ids.join(","))
}

fn chunk(shape: Shape, event: usize) -> String {
    let (text, logprobs, ids) = tokens(shape, event);
    format!(
        "{{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",{}\
         \"choices\":[{{\"index\":0,\"delta\":{{{}\"content\":\"{text}\"}},\
         \"logprobs\":{{\"content\":[{logprobs}]}},\"finish_reason\":null,\"token_ids\":[{ids}]}}]}}",
        if event == 0 { "\"prompt_token_ids\":[1,2,3]," } else { "" },
        if event == 0 { "\"role\":\"assistant\"," } else { "" },
    )
}

fn whole(shape: Shape, usage: &str) -> String {
    let (text, logprobs, ids) = tokens(Shape { at_once: shape.tokens, ..shape }, 0);
    format!(
        "{{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\",\
         \"prompt_token_ids\":[1,2,3],\"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\
         \"content\":\"{text}\"}},\"logprobs\":{{\"content\":[{logprobs}]}},\"finish_reason\":\"stop\",\
         \"token_ids\":[{ids}]}}],{usage}}}"
    )
}

/// Reads a request. False at the connection's end.
async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> std::io::Result<bool> {
    buffer.clear();
    loop {
        if let Some(end) = buffer.windows(4).position(|part| part == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&buffer[..end]).to_ascii_lowercase();
            let length = head.split("content-length:").nth(1).and_then(|rest| rest.lines().next());
            let length: usize = length.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
            let left = (end + 4 + length).saturating_sub(buffer.len());
            let start = buffer.len();
            buffer.resize(start + left, 0);
            stream.read_exact(&mut buffer[start..]).await?;
            return Ok(true);
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(false);
        }
    }
}
