//! An upstream that sends a reply in two writes or breaks it off, a client that sees every byte, and a store: all by
//! hand, so that nothing of lego's own is between the test and the wire.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock};

use async_trait::async_trait;
use lego::config::{Relay, UpstreamResponses};
use lego::proxy::{Proxy, ProxyOptions};
use lego::record::{Call, CallSink, ChoiceId, Routing, RoutingShape, SinkError, UpstreamKind};
use lego::upstream::Upstream;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::setup::{PATIENCE, timeouts};

/// How a reply is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    Whole,
    /// In two writes; the second one when the first has been read.
    Split(usize),
    /// So many bytes, then the connection breaks.
    Broken(usize),
    /// So many bytes, then the end, as if that were all.
    Ended(usize),
}

/// What the upstream answers.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: u16,
    pub is_stream: bool,
    pub body: Vec<u8>,
    /// The same for who asked for nothing.
    pub plain: Vec<u8>,
}

/// What came of a call.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub call_id: String,
    pub body: Vec<u8>,
    /// Where the pieces end in which the body came.
    pub ends: Vec<usize>,
    /// The body came to its end.
    pub is_whole: bool,
    /// The connection takes no further request.
    is_last: bool,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// A store by call. Expert routing that an earlier call has is put back.
#[derive(Default)]
pub struct Store(Mutex<HashMap<String, Vec<Call>>>, Mutex<HashMap<ChoiceId, Routing>>);

impl Store {
    /// The records of a call. They must be there: durable before done.
    pub fn take(&self, call_id: &str) -> Vec<Call> {
        let mut calls = self.0.lock().expect("store").remove(call_id).expect("the call is recorded");
        calls.sort_by_key(|call| call.choice_index);
        calls
    }

    fn with_all_rows(&self, mut call: Call) -> Call {
        let Some(routing) = call.routing.take() else {
            return call;
        };
        let mut known = self.1.lock().expect("routing");
        let shape = *routing.shape();
        let before = routing.base().map_or_else(Vec::new, |base| {
            let rows = known.get(&base).expect("a base that is stored").rows();
            rows.take(shape.start as usize).collect::<Vec<_>>().concat()
        });
        let shape = RoutingShape { start: 0, rows: shape.start + shape.rows, ..shape };
        let whole =
            Routing::new(shape, [&before[..], &routing.data()[..]].concat().into()).expect("all rows");
        known.insert(ChoiceId { call_id: call.call_id, choice_index: call.choice_index }, whole.clone());
        Call { routing: Some(whole), ..call }
    }
}

#[async_trait]
impl CallSink for Store {
    async fn append(&self, calls: Vec<Call>) -> Result<(), SinkError> {
        let mut all = self.0.lock().expect("store");
        for call in calls.into_iter().map(|call| self.with_all_rows(call)) {
            all.entry(call.call_id.to_string()).or_default().push(call);
        }
        Ok(())
    }

    async fn draft(&self, _: Vec<Call>) -> Result<(), SinkError> {
        Ok(())
    }
}

/// A proxy on loopback in front of the upstream.
pub struct Rig {
    pub proxy: SocketAddr,
    pub upstream: SocketAddr,
    pub store: Arc<Store>,
}

impl Rig {
    /// `replies`: what a request can name with its header `x-reply`.
    /// `responses`: how a gateway is asked by clients of Responses.
    pub async fn new(
        kind: UpstreamKind,
        relay: Relay,
        responses: UpstreamResponses,
        replies: Vec<Reply>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let upstream = listener.local_addr().expect("bound");
        let server = Arc::new(Server { replies, proxy: OnceLock::new() });
        tokio::spawn(accept(listener, Arc::clone(&server)));
        let mut options = ProxyOptions::stand_alone();
        options.retries.most = 0;
        options.probes_upstream = false;
        options.relay = relay;
        let store = Arc::new(Store::default());
        let url = format!("http://{upstream}");
        let lego = Upstream::http(&url, kind, Some("sk-real-canary"), timeouts()).expect("upstream");
        let lego = lego.with_responses(responses);
        let proxy = Proxy::new(options, Arc::clone(&store) as Arc<dyn CallSink>, lego);
        let listener = lego::proxy::listen("127.0.0.1", 0, false).await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        server.proxy.set(address).expect("once");
        tokio::spawn(async move { proxy.serve(listener).await });
        Self { proxy: address, upstream, store }
    }
}

struct Server {
    replies: Vec<Reply>,
    proxy: OnceLock<SocketAddr>,
}

async fn accept(listener: TcpListener, server: Arc<Server>) {
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        stream.set_nodelay(true).expect("set");
        let server = Arc::clone(&server);
        tokio::spawn(async move {
            let mut stream = BufReader::new(stream);
            let mut barrier = Client::new(*server.proxy.get().expect("set"));
            while let Some((head, body)) = request(&mut stream).await {
                if !answer(&server, &mut stream, &mut barrier, &head, &body).await {
                    return;
                }
            }
        });
    }
}

/// Head and body of a request; `None` when the connection is over.
async fn request(stream: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let head = head(stream).await?;
    let length = header(&head, "content-length").map_or(0, |value| value.parse().expect("a length"));
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    Some((head, body))
}

async fn head(stream: &mut BufReader<TcpStream>) -> Option<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    Some(head)
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// False: the connection is to be closed.
async fn answer(
    server: &Server,
    stream: &mut BufReader<TcpStream>,
    barrier: &mut Client,
    head: &str,
    body: &[u8],
) -> bool {
    let asked: Value = serde_json::from_slice(body).expect("the proxy sends JSON");
    let number: usize = header(head, "x-reply").expect("named").parse().expect("a number");
    let how = header(head, "x-how").expect("told");
    let (how, at) = how.split_once(' ').expect("two words");
    let at: usize = at.parse().expect("a number");
    let reply = &server.replies[number];
    let asks = ["return_token_ids", "logprobs", "return_meta_info", "return_logprob"]
        .iter()
        .any(|name| asked[name] == true)
        || asked["logprobs"].is_u64();
    let body = if asks { &reply.body } else { &reply.plain };
    let part = &body[..at.min(body.len())];
    let kind = if reply.is_stream { "text/event-stream" } else { "application/json" };
    let is_chunked = reply.is_stream || how == "ended";
    let framing = if is_chunked {
        "transfer-encoding: chunked".to_owned()
    } else {
        format!("content-length: {}", body.len())
    };
    // What breaks after its last byte must not be taken for a connection that the next request can use.
    let connection = if how == "broken" { "connection: close\r\n" } else { "" };
    let mut first =
        format!("HTTP/1.1 {} X\r\ncontent-type: {kind}\r\n{connection}{framing}\r\n\r\n", reply.status)
            .into_bytes();
    let push = |out: &mut Vec<u8>, piece: &[u8], promised: usize| {
        if !is_chunked {
            return out.extend_from_slice(piece);
        }
        // A chunk of nothing would be the end.
        if promised > 0 {
            out.extend_from_slice(format!("{promised:x}\r\n").as_bytes());
            out.extend_from_slice(piece);
            out.extend_from_slice(if piece.len() == promised { b"\r\n" } else { b"" });
        }
    };
    let last: &[u8] = if is_chunked { b"0\r\n\r\n" } else { b"" };
    match how {
        "whole" | "ended" => {
            let part = if how == "whole" { body } else { part };
            push(&mut first, part, part.len());
            first.extend_from_slice(last);
            stream.write_all(&first).await.expect("written");
            true
        }
        "split" => {
            push(&mut first, part, part.len());
            stream.write_all(&first).await.expect("written");
            barrier.pass().await;
            let rest = &body[part.len()..];
            let mut second = Vec::new();
            push(&mut second, rest, rest.len());
            second.extend_from_slice(last);
            stream.write_all(&second).await.expect("written");
            true
        }
        // Within a chunk at odd places, between two at even ones.
        _ => {
            let promised = if at % 2 == 1 { body.len() } else { part.len() };
            push(&mut first, part, promised);
            stream.write_all(&first).await.expect("written");
            barrier.pass().await;
            false
        }
    }
}

/// A client with a connection that it keeps.
pub struct Client {
    address: SocketAddr,
    stream: Option<BufReader<TcpStream>>,
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        Self { address, stream: None }
    }

    /// Calls the proxy, whose upstream answers with this reply in this way.
    pub async fn call(&mut self, route: &str, body: &str, reply: usize, how: How) -> Answer {
        let how = match how {
            How::Whole => "whole 0".to_owned(),
            How::Split(at) => format!("split {at}"),
            How::Broken(at) => format!("broken {at}"),
            How::Ended(at) => format!("ended {at}"),
        };
        let request = format!(
            "POST {route} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nx-reply: {reply}\r\n\
             x-how: {how}\r\ncontent-length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        );
        self.exchange(&request).await
    }

    /// A round trip through the proxy. All of it and of this test run on one thread, and the kernel tells of readable
    /// sockets in the order in which they became so: what was written to the proxy before has been read after it.
    async fn pass(&mut self) {
        let request = format!("GET /healthz HTTP/1.1\r\nhost: {}\r\n\r\n", self.address);
        assert_eq!(self.exchange(&request).await.status, 200);
    }

    async fn exchange(&mut self, request: &str) -> Answer {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect(self.address).await.expect("connected");
                stream.set_nodelay(true).expect("set");
                BufReader::new(stream)
            }
        };
        stream.write_all(request.as_bytes()).await.expect("written");
        let reading = read(&mut stream);
        let answer = tokio::time::timeout(PATIENCE, reading).await.expect("an end in time");
        if answer.is_whole && !answer.is_last {
            self.stream = Some(stream);
        }
        answer
    }
}

async fn read(stream: &mut BufReader<TcpStream>) -> Answer {
    let head = head(stream).await.expect("an answer");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let call_id = header(&head, "x-lego-call-id").unwrap_or_default().to_owned();
    let is_last = header(&head, "connection").is_some_and(|value| value.eq_ignore_ascii_case("close"));
    let mut answer = Answer { status, call_id, body: Vec::new(), ends: Vec::new(), is_whole: false, is_last };
    if let Some(length) = header(&head, "content-length") {
        let length: usize = length.parse().expect("a length");
        let mut body = (&mut *stream).take(length as u64);
        let _ = body.read_to_end(&mut answer.body).await;
        answer.is_whole = answer.body.len() == length;
        return answer;
    }
    loop {
        let mut line = String::new();
        match stream.read_line(&mut line).await {
            Ok(0) | Err(_) => return answer,
            Ok(_) => {}
        }
        let length = usize::from_str_radix(line.trim(), 16).expect("a chunk's length");
        let mut chunk = vec![0; length + 2];
        if stream.read_exact(&mut chunk).await.is_err() {
            return answer;
        }
        if length == 0 {
            answer.is_whole = true;
            return answer;
        }
        answer.body.extend_from_slice(&chunk[..length]);
        answer.ends.push(answer.body.len());
    }
}
