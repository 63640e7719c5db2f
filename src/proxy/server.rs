//! Listening and serving. `axum::serve` cannot end the connections of one listener, which a session's end must.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::files::{Place, Room, SURPLUS_PATIENCE};
use super::stall::{Link, Noted, Patience, Watch};

/// Connections that may wait to be accepted: with the usual 128, a burst of new clients waits a second for TCP's
/// retries.
const BACKLOG: u32 = 4096;
/// A client that has not sent a request's head after this time loses its connection.
const HEAD_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of a reply that a connection takes ahead of its client, and of a request's head. By itself hyper takes 400 kB.
const BUFFER_BYTES: usize = 16 << 10;
/// Most headers of a request: clients behind gateways have many. Of more, hyper says 431 without a word.
const MAX_HEADERS: usize = 256;
/// Connections get this long to send what is on its way after their calls were ended.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// An address that cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error(
        "{host:?} is not an address of this machine: {cause}. Set proxy.listen_host to one, such as 127.0.0.1"
    )]
    Host { host: String, cause: std::io::Error },
    #[error(
        "port {port} on {host} is in use. Stop what uses it, or set proxy.listen_port to another (0: any)"
    )]
    InUse { host: String, port: u16 },
    #[error("cannot listen on {host}:{port}: {cause}")]
    Other { host: String, port: u16, cause: std::io::Error },
    #[error(
        "proxy.listen_host = {host:?} is reachable from other machines, so proxy.client_token_env must name a \
         variable with a token; or listen on 127.0.0.1"
    )]
    NoToken { host: String },
}

/// Listens on an address. Beyond loopback only with a client token.
///
/// # Errors
/// [`ListenError`] says what is in the way.
pub async fn listen(host: &str, port: u16, has_client_token: bool) -> Result<TcpListener, ListenError> {
    bound(host, port, has_client_token, false).await
}

/// Listens on each of these addresses, at one port.
///
/// # Errors
/// [`ListenError`] names the address and says what is in the way.
pub async fn listen_on(
    hosts: &[String],
    port: u16,
    has_client_token: bool,
) -> Result<Vec<TcpListener>, ListenError> {
    let mut listeners: Vec<TcpListener> = Vec::new();
    for host in hosts {
        // Where the system chooses, it does so once.
        let chosen = listeners.first().and_then(|first| first.local_addr().ok());
        let port = chosen.map_or(port, |address| address.port());
        listeners.push(bound(host, port, has_client_token, hosts.len() > 1).await?);
    }
    Ok(listeners)
}

/// `is_one_of_several`: an unspecified IPv6 address does not stand for those of IPv4 too.
async fn bound(
    host: &str,
    port: u16,
    has_client_token: bool,
    is_one_of_several: bool,
) -> Result<TcpListener, ListenError> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let found = tokio::net::lookup_host((bare, port)).await;
    let address = found.map_err(|cause| ListenError::Host { host: host.to_owned(), cause })?.next();
    let address = address.ok_or_else(|| ListenError::Host {
        host: host.to_owned(),
        cause: std::io::Error::other("it has no address"),
    })?;
    if !address.ip().is_loopback() && !has_client_token {
        return Err(ListenError::NoToken { host: host.to_owned() });
    }
    let open = || -> std::io::Result<TcpListener> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        if is_one_of_several && address.is_ipv6() {
            SockRef::from(&socket).set_only_v6(true)?;
        }
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    open().map_err(|cause| match cause.kind() {
        std::io::ErrorKind::AddrInUse => ListenError::InUse { host: host.to_owned(), port },
        _ => ListenError::Other { host: host.to_owned(), port, cause },
    })
}

/// What connections are answered by.
#[derive(Clone)]
pub(super) struct Routers {
    pub(super) usual: Router,
    /// Where there is no room for one more.
    pub(super) surplus: Router,
}

/// Serves a listener until `stop`, then lets its connections finish; soon after `abort` they are closed. Before that a
/// connection is closed whose client takes nothing for longer than `stall`.
pub(super) async fn serve(
    listener: TcpListener,
    routers: Routers,
    room: &Room,
    stop: CancellationToken,
    abort: CancellationToken,
    stall: Option<Duration>,
) {
    let patience = Patience { longest: stall, after_stop: DRAIN_LIMIT };
    let mut connections = JoinSet::new();
    let ending = Ending::default();
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let place = tokio::select! {
                        biased;
                        () = stop.cancelled() => break,
                        place = room.enter() => place,
                    };
                    let router = if place.is_surplus { &routers.surplus } else { &routers.usual };
                    connections.spawn(connection(stream, place, router.clone(), ending.clone(), patience));
                }
                Err(error) => {
                    // Too many open files, mostly: they are closed as calls end.
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
        }
    }
    drop(listener);
    ending.begin();
    let drained = async { while connections.join_next().await.is_some() {} };
    let patience = async {
        abort.cancelled().await;
        tokio::time::sleep(DRAIN_LIMIT).await;
    };
    tokio::select! {
        () = drained => {}
        // What is left is closed by dropping the set.
        () = patience => {}
    }
}

/// Tells the connections of a listener that no further request is wanted. A token alone would be asked with a lock
/// each time that a connection has something to do.
#[derive(Clone, Default)]
struct Ending {
    has_begun: Arc<AtomicBool>,
    token: CancellationToken,
}

impl Ending {
    fn begin(&self) {
        self.has_begun.store(true, Ordering::Release);
        self.token.cancel();
    }
}

async fn connection(stream: TcpStream, place: Place, router: Router, ending: Ending, patience: Patience) {
    // Without it a token waits up to 40 ms for the acknowledgement of the one before.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection went away");
        return;
    }
    let link = Link::default();
    let answers = link.clone();
    let router = ServiceExt::<Request<Incoming>>::map_response(router, move |reply| answers.answers(reply));
    let service = TowerToHyperService::new(router);
    let head_limit = if place.is_surplus { SURPLUS_PATIENCE } else { HEAD_LIMIT };
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(head_limit)
        .max_buf_size(BUFFER_BYTES)
        .max_headers(MAX_HEADERS);
    let mut watch = Watch::new(link.clone(), patience);
    let serving = builder.serve_connection(TokioIo::new(Noted::new(stream, link)), service);
    let mut serving = std::pin::pin!(serving);
    let mut ended = std::pin::pin!(ending.token.cancelled());
    let (mut is_told, mut is_ending) = (false, false);
    let result = std::future::poll_fn(|cx| {
        // Asked once: the token then wakes this task, and the flag says why.
        if !std::mem::replace(&mut is_told, true) {
            let _ = ended.as_mut().poll(cx);
        }
        if !is_ending && ending.has_begun.load(Ordering::Acquire) {
            is_ending = true;
            serving.as_mut().graceful_shutdown();
        }
        match serving.as_mut().poll(cx) {
            Poll::Pending if watch.is_over(cx) => Poll::Ready(Ok(())),
            polled => polled,
        }
    })
    .await;
    if let Err(error) = result {
        tracing::debug!(%error, "a connection ended with an error");
    }
}
