//! A pool of plain http/1.1 connections to one host, on `hyper`'s connection type.
//!
//! `hyper_util`'s pooled client runs each connection in a task of its own and hands on every http chunk through a
//! channel between two tasks. Here the connection is driven by whoever reads the reply's body, and the chunks that
//! one read of the socket gave come out as one piece: with many streams that is several times less work a token.

use std::future::Future;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use http_body::Body;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Idle connections kept for reuse.
const MAX_IDLE: usize = 512;
/// Most bytes of one read, and longest head of a response. By itself hyper goes up to 400 kB, which is what thousands of
/// fast streams would hold then.
const READ_BYTES: usize = 32 << 10;
/// A connection idle for longer is not reused.
const MAX_IDLE_TIME: Duration = Duration::from_secs(50);

/// Why an exchange failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum PoolError {
    #[error("cannot connect: {0}")]
    Connect(std::io::Error),
    #[error("no connection within {0:?}")]
    ConnectTimeout(Duration),
    #[error("{}", cause(.0))]
    Http(hyper::Error),
}

/// The innermost cause: hyper's own text is "connection error".
fn cause(error: &hyper::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// The pool. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Pool {
    host: String,
    port: u16,
    connect_timeout: Duration,
    idle: Arc<Mutex<Vec<Idle>>>,
}

#[derive(Debug)]
struct Idle {
    connection: Connection,
    since: Instant,
}

type Driver = http1::Connection<TokioIo<TcpStream>, Full<Bytes>>;

#[derive(Debug)]
struct Connection {
    sender: SendRequest<Full<Bytes>>,
    /// `None` once it has ended.
    driver: Option<Pin<Box<Driver>>>,
}

impl Connection {
    /// Lets the connection read and write what it can.
    fn drive(&mut self, cx: &mut Context<'_>) {
        if let Some(driver) = &mut self.driver
            && driver.as_mut().poll(cx).is_ready()
        {
            self.driver = None;
        }
    }
}

impl Pool {
    pub(super) fn new(host: &str, port: u16, connect_timeout: Duration) -> Self {
        Self { host: host.to_owned(), port, connect_timeout, idle: Arc::default() }
    }

    /// Sends a request (origin-form URI, `Host` header) and returns the head of its response.
    ///
    /// A request that a reused connection refused before any of it was sent goes out again on another.
    pub(super) async fn send(
        &self,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<PooledBody>, PoolError> {
        loop {
            let (mut connection, is_reused) = match self.take_idle() {
                Some(connection) => (connection, true),
                None => (self.connect().await?, false),
            };
            let mut response = std::pin::pin!(connection.sender.try_send_request(request));
            let driver = &mut connection.driver;
            let result = std::future::poll_fn(|cx| {
                if let Some(running) = driver
                    && running.as_mut().poll(cx).is_ready()
                {
                    *driver = None;
                }
                response.as_mut().poll(cx)
            })
            .await;
            match result {
                Ok(response) => {
                    return Ok(response.map(|body| PooledBody {
                        body,
                        end: None,
                        connection: Some(connection),
                        idle: Arc::clone(&self.idle),
                    }));
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if is_reused => request = unsent,
                    _ => return Err(PoolError::Http(error.into_error())),
                },
            }
        }
    }

    fn take_idle(&self) -> Option<Connection> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(Idle { mut connection, since }) = idle.pop() {
            // Reads an end of stream that arrived while nobody drove the connection.
            connection.drive(&mut Context::from_waker(Waker::noop()));
            let is_alive = connection.driver.is_some() && connection.sender.is_ready();
            if is_alive && since.elapsed() < MAX_IDLE_TIME {
                return Some(connection);
            }
        }
        None
    }

    async fn connect(&self) -> Result<Connection, PoolError> {
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
        let mut builder = http1::Builder::new();
        builder.max_buf_size(READ_BYTES);
        let (sender, driver) = builder.handshake(TokioIo::new(stream)).await.map_err(PoolError::Http)?;
        Ok(Connection { sender, driver: Some(Box::pin(driver)) })
    }
}

/// A response's body, which drives its connection. Read to its end it gives the connection back; dropped before, it
/// closes it.
#[derive(Debug)]
pub(super) struct PooledBody {
    body: Incoming,
    /// The end, or the error, that came right behind a piece. hyper tells an error once.
    end: Option<Result<(), hyper::Error>>,
    connection: Option<Connection>,
    idle: Arc<Mutex<Vec<Idle>>>,
}

impl PooledBody {
    /// The next piece: everything that has arrived, up to about `max` bytes.
    pub(super) fn poll_piece(
        &mut self,
        cx: &mut Context<'_>,
        max: usize,
    ) -> Poll<Option<Result<Bytes, PoolError>>> {
        let mut first: Option<Bytes> = None;
        let mut joined = BytesMut::new();
        let mut was_driven = false;
        loop {
            let polled = match self.end.take() {
                None => Pin::new(&mut self.body).poll_frame(cx),
                Some(Ok(())) => Poll::Ready(None),
                Some(Err(error)) => Poll::Ready(Some(Err(error))),
            };
            match polled {
                Poll::Ready(Some(Ok(frame))) => {
                    was_driven = false;
                    let Ok(data) = frame.into_data() else {
                        continue;
                    };
                    match first.take() {
                        None if joined.is_empty() => first = Some(data),
                        None => joined.extend_from_slice(&data),
                        Some(head) => {
                            joined.extend_from_slice(&head);
                            joined.extend_from_slice(&data);
                        }
                    }
                    if joined.len() < max {
                        continue;
                    }
                }
                // What has arrived is handed out first.
                Poll::Ready(None) if first.is_some() || !joined.is_empty() => self.end = Some(Ok(())),
                Poll::Ready(Some(Err(error))) if first.is_some() || !joined.is_empty() => {
                    self.end = Some(Err(error));
                }
                Poll::Pending if first.is_some() || !joined.is_empty() => {
                    if !std::mem::replace(&mut was_driven, true) && self.drive(cx) {
                        continue;
                    }
                }
                Poll::Ready(None) => {
                    self.release(cx);
                    return Poll::Ready(None);
                }
                Poll::Ready(Some(Err(error))) => {
                    return Poll::Ready(Some(Err(PoolError::Http(error))));
                }
                Poll::Pending => {
                    if std::mem::replace(&mut was_driven, true) || !self.drive(cx) {
                        return Poll::Pending;
                    }
                    continue;
                }
            }
            return Poll::Ready(Some(Ok(first.unwrap_or_else(|| joined.freeze()))));
        }
    }

    /// False if there is nothing left to drive.
    fn drive(&mut self, cx: &mut Context<'_>) -> bool {
        match &mut self.connection {
            Some(connection) if connection.driver.is_some() => {
                connection.drive(cx);
                true
            }
            _ => false,
        }
    }

    fn release(&mut self, cx: &mut Context<'_>) {
        let Some(mut connection) = self.connection.take() else {
            return;
        };
        connection.drive(cx);
        if connection.driver.is_none() || !connection.sender.is_ready() {
            return;
        }
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push(Idle { connection, since: Instant::now() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    async fn get(pool: &Pool) -> Vec<u8> {
        let mut request = Request::new(Full::new(Bytes::new()));
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
        let mut request = Request::new(Full::new(Bytes::new()));
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
