//! A pool of plain http/1.1 connections to one host.
//!
//! What one read of a socket brought comes out as one piece, however many chunks it holds, and a stream that waits has
//! no buffer: all connections of a thread read into one. hyper's client hands on each chunk by itself, through a channel
//! between two tasks, and keeps some 25 to 80 kB for each connection.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use http::{Method, Request, Response};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::http1::{self, BodyReader, Head, Malformed};

/// Idle connections kept for reuse.
const MAX_IDLE: usize = 512;
/// Most bytes of one read.
const READ_BYTES: usize = 32 << 10;
/// A connection idle for longer is not reused.
const MAX_IDLE_TIME: Duration = Duration::from_secs(50);

thread_local! {
    /// What a read brings, until it is taken apart.
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; READ_BYTES]);
}

/// Why an exchange failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum PoolError {
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    #[error("no connection within {0:?}")]
    ConnectTimeout(Duration),
    #[error("it closed the connection")]
    Closed,
    #[error(transparent)]
    Io(io::Error),
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// The pool. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Pool {
    host: String,
    port: u16,
    connect_timeout: Duration,
    idle: IdleConnections,
}

type IdleConnections = Arc<Mutex<Vec<Idle>>>;

#[derive(Debug)]
struct Idle {
    stream: TcpStream,
    since: Instant,
}

impl Idle {
    /// False if the server closed it meanwhile, or said something that nobody asked for.
    fn is_usable(&self) -> bool {
        // The system is asked: what the runtime knows may be older.
        let peeked = socket2::SockRef::from(&self.stream).peek(&mut [MaybeUninit::uninit()]);
        let is_silent = peeked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        is_silent && self.since.elapsed() < MAX_IDLE_TIME
    }
}

impl Pool {
    pub(super) fn new(host: &str, port: u16, connect_timeout: Duration) -> Self {
        Self { host: host.to_owned(), port, connect_timeout, idle: Arc::default() }
    }

    /// Sends a request (origin-form URI, `Host` header) and returns the head of its response.
    pub(super) async fn send(&self, request: Request<Bytes>) -> Result<Response<PooledBody>, PoolError> {
        let mut stream = match self.take_idle() {
            Some(stream) => stream,
            None => self.connect().await?,
        };
        let (parts, body) = request.into_parts();
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        let head = http1::request_head(&parts.method, path, &parts.headers, body.len());
        let mut unsent = Unsent { head, body };
        let (head, rest) =
            std::future::poll_fn(response_head(&mut stream, &mut unsent, &parts.method)).await?;
        let is_kept = head.is_kept && !unsent.is_left();
        let mut body = PooledBody {
            stream: Some(stream),
            reader: head.body,
            rest,
            unsent: unsent.is_left().then_some(unsent),
            is_kept,
            error: None,
            idle: Arc::clone(&self.idle),
        };
        if body.reader.is_over() {
            body.is_kept &= body.rest.is_empty();
            body.release();
        }
        let mut response = Response::new(body);
        *response.status_mut() = head.status;
        *response.headers_mut() = head.headers;
        Ok(response)
    }

    fn take_idle(&self) -> Option<TcpStream> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(connection) = idle.pop() {
            if connection.is_usable() {
                return Some(connection.stream);
            }
        }
        None
    }

    async fn connect(&self) -> Result<TcpStream, PoolError> {
        let connecting = async {
            // A server on this machine listens on one of the two, and the system's table may name the other only.
            if self.host.eq_ignore_ascii_case("localhost") {
                let addresses = [
                    SocketAddr::from((Ipv4Addr::LOCALHOST, self.port)),
                    SocketAddr::from((Ipv6Addr::LOCALHOST, self.port)),
                ];
                return TcpStream::connect(&addresses[..]).await;
            }
            TcpStream::connect((self.host.as_str(), self.port)).await
        };
        let stream = tokio::time::timeout(self.connect_timeout, connecting)
            .await
            .map_err(|_| PoolError::ConnectTimeout(self.connect_timeout))?
            .map_err(PoolError::Connect)?;
        stream.set_nodelay(true).map_err(PoolError::Connect)?;
        Ok(stream)
    }
}

/// What of a request is still to be sent.
#[derive(Debug)]
struct Unsent {
    head: Bytes,
    body: Bytes,
}

impl Unsent {
    fn is_left(&self) -> bool {
        !self.head.is_empty() || !self.body.is_empty()
    }

    /// Sends what the socket takes; ready once all of it is sent.
    fn poll_send(&mut self, stream: &mut TcpStream, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.is_left() {
            let parts = [IoSlice::new(&self.head), IoSlice::new(&self.body)];
            let sent = ready!(Pin::new(&mut *stream).poll_write_vectored(cx, &parts))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let of_head = sent.min(self.head.len());
            self.head.advance(of_head);
            self.body.advance(sent - of_head);
        }
        Poll::Ready(Ok(()))
    }
}

/// Reads what has come, at most `max` bytes, and gives it to `take`; none at the stream's end.
fn poll_read<T>(
    stream: &mut TcpStream,
    cx: &mut Context<'_>,
    max: usize,
    take: impl FnOnce(&[u8]) -> T,
) -> Poll<io::Result<T>> {
    SCRATCH.with_borrow_mut(|scratch| {
        let length = max.clamp(1, scratch.len());
        let mut buffer = ReadBuf::new(&mut scratch[..length]);
        ready!(Pin::new(stream).poll_read(cx, &mut buffer))?;
        Poll::Ready(Ok(take(buffer.filled())))
    })
}

/// Sends the request and reads the head of its response, which may come before all is sent; with what came behind it.
fn response_head<'a>(
    stream: &'a mut TcpStream,
    unsent: &'a mut Unsent,
    method: &'a Method,
) -> impl FnMut(&mut Context<'_>) -> Poll<Result<(Head, Bytes), PoolError>> + 'a {
    let mut came = Vec::new();
    let mut not_sent = None;
    move |cx| {
        // A server that refuses a request may not read all of it, and closes behind its answer.
        if not_sent.is_none()
            && let Poll::Ready(Err(error)) = unsent.poll_send(stream, cx)
        {
            not_sent = Some(error);
        }
        loop {
            let read = ready!(poll_read(stream, cx, READ_BYTES, |bytes| {
                came.extend_from_slice(bytes);
                bytes.len()
            }));
            match read {
                Ok(0) => return Poll::Ready(Err(not_sent.take().map_or(PoolError::Closed, PoolError::Io))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Err(PoolError::Io(not_sent.take().unwrap_or(error)))),
            }
            if let Some(head) = Head::parse(&came, method)? {
                let rest = Bytes::copy_from_slice(&came[head.bytes..]);
                return Poll::Ready(Ok((head, rest)));
            }
        }
    }
}

/// A response's body. Read to its end it gives the connection back; dropped before, it closes it.
#[derive(Debug)]
pub(super) struct PooledBody {
    /// `None` once the body is over or broke off.
    stream: Option<TcpStream>,
    reader: BodyReader,
    /// What came with the head.
    rest: Bytes,
    /// Of a request whose response began early.
    unsent: Option<Unsent>,
    is_kept: bool,
    /// What comes after the last piece.
    error: Option<PoolError>,
    idle: IdleConnections,
}

impl PooledBody {
    /// The next piece: everything that has arrived, up to `max` bytes.
    pub(super) fn poll_piece(
        &mut self,
        cx: &mut Context<'_>,
        max: usize,
    ) -> Poll<Option<Result<Bytes, PoolError>>> {
        loop {
            let Some(stream) = &mut self.stream else {
                return Poll::Ready(self.error.take().map(Err));
            };
            if let Some(unsent) = &mut self.unsent
                && unsent.poll_send(stream, cx).is_ready()
            {
                self.unsent = None;
            }
            let reader = &mut self.reader;
            let read = if self.rest.is_empty() {
                ready!(poll_read(stream, cx, max, |came| (came.len(), reader.read(came))))
            } else {
                let came = std::mem::take(&mut self.rest);
                Ok((came.len(), reader.read(&came)))
            };
            let piece = match read {
                Ok((0, _)) => {
                    self.stream = None;
                    let is_end = matches!(self.reader, BodyReader::UntilClose);
                    return Poll::Ready((!is_end).then_some(Err(PoolError::Closed)));
                }
                Ok((came, read)) => {
                    self.error = read.error.map(PoolError::Malformed);
                    // Nobody asked for more than the body.
                    self.is_kept &= read.used == came;
                    read.bytes
                }
                Err(error) => {
                    self.error = Some(PoolError::Io(error));
                    Bytes::new()
                }
            };
            if self.error.is_some() {
                self.stream = None;
            } else if self.reader.is_over() {
                self.release();
            }
            if !piece.is_empty() {
                return Poll::Ready(Some(Ok(piece)));
            }
        }
    }

    /// Gives the connection back, if it can be used again.
    fn release(&mut self) {
        let Some(stream) = self.stream.take().filter(|_| self.is_kept) else {
            return;
        };
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push(Idle { stream, since: Instant::now() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    async fn get(pool: &Pool) -> Vec<u8> {
        let mut request = Request::new(Bytes::new());
        request.headers_mut().insert("host", http::HeaderValue::from_static("h"));
        let mut body = pool.send(request).await.expect("a head").into_body();
        let mut text = Vec::new();
        while let Some(piece) = std::future::poll_fn(|cx| body.poll_piece(cx, 1 << 16)).await {
            text.extend_from_slice(&piece.expect("a piece"));
        }
        text
    }

    /// Answers `per_connection` requests on each connection, then closes it; tells how many connections it closed.
    async fn server(per_connection: usize) -> (Pool, tokio::sync::watch::Receiver<usize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let port = listener.local_addr().expect("bound").port();
        let (closed, receiver) = tokio::sync::watch::channel(0);
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.expect("a connection");
                for _ in 0..per_connection {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        head.push(stream.read_u8().await.expect("a request"));
                    }
                    let chunks = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n";
                    stream.write_all(chunks).await.expect("written");
                }
                drop(stream);
                closed.send_modify(|count| *count += 1);
            }
        });
        (Pool::new("127.0.0.1", port, Duration::from_secs(5)), receiver)
    }

    /// Everything of a reply, of which a part and then the end of the connection come in between two polls.
    async fn cut_reply(head: &'static str, part: &'static str) -> (Vec<u8>, Option<PoolError>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let pool =
            Pool::new("127.0.0.1", listener.local_addr().expect("bound").port(), Duration::from_secs(5));
        let mut request = Request::new(Bytes::new());
        request.headers_mut().insert("host", http::HeaderValue::from_static("h"));
        let serve = async {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut asked = Vec::new();
            while !asked.ends_with(b"\r\n\r\n") {
                asked.push(stream.read_u8().await.expect("a request"));
            }
            stream.write_all(head.as_bytes()).await.expect("written");
            stream
        };
        let (reply, mut stream) = tokio::join!(pool.send(request), serve);
        let mut body = reply.expect("a head").into_body();
        stream.write_all(part.as_bytes()).await.expect("written");
        drop(stream);
        let mut text = Vec::new();
        loop {
            match std::future::poll_fn(|cx| body.poll_piece(cx, 1 << 16)).await {
                Some(Ok(piece)) => text.extend_from_slice(&piece),
                Some(Err(error)) => return (text, Some(error)),
                None => return (text, None),
            }
        }
    }

    #[tokio::test]
    async fn an_end_that_comes_with_the_last_bytes_is_told_as_what_it_is() {
        let head = "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n";
        let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        for (head, part, whole, is_cut) in [
            (head, "abc", "abc", true),
            (head, "abcdefghij", "abcdefghij", false),
            (chunked, "3\r\nabc\r\n", "abc", true),
            (chunked, "3\r\nabc\r\n2\r\nde\r\n", "abcde", true),
            (chunked, "3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", "abcde", false),
        ] {
            let (text, error) = cut_reply(head, part).await;
            assert_eq!(String::from_utf8_lossy(&text), whole);
            assert_eq!(error.is_some(), is_cut, "{part:?}: {error:?}");
        }
    }

    #[tokio::test]
    async fn a_connection_is_used_again() {
        let (pool, closed) = server(3).await;
        for _ in 0..3 {
            assert_eq!(get(&pool).await, b"abcde");
        }
        closed.clone().wait_for(|count| *count == 1).await.expect("served");
    }

    #[tokio::test]
    async fn a_connection_that_the_server_closed_meanwhile_is_not_used() {
        let (pool, mut closed) = server(1).await;
        for round in 1..4 {
            assert_eq!(get(&pool).await, b"abcde");
            closed.wait_for(|count| *count == round).await.expect("served");
            // Lets the runtime see the end of the stream, as it does between two calls of an agent.
            for _ in 0..200 {
                tokio::task::yield_now().await;
            }
        }
    }
}
