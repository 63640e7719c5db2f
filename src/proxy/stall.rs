//! Clients that take nothing of their reply.
//!
//! A connection asks a reply's body for more only while it can write. Behind a client that does not read, nobody would
//! see that the call must end, nor would a call that is ended let go of its session. So a connection that cannot write
//! is watched: it is dropped soon after its call must end, and in any case when its client took nothing for too long.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::Response;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::stop::Stop;

/// What is known of a connection's writing. While it can write, a write costs two stores.
#[derive(Clone, Default)]
pub(super) struct Link(Arc<State>);

#[derive(Default)]
struct State {
    is_blocked: AtomicBool,
    /// Writes of which something was taken.
    writes: AtomicUsize,
    /// Replies so far.
    replies: AtomicUsize,
    /// What ends the call of the last one.
    stop: Mutex<Option<Stop>>,
}

impl Link {
    /// The connection goes on with this reply.
    pub(super) fn answers<B>(&self, mut response: Response<B>) -> Response<B> {
        let stop = response.extensions_mut().remove::<Stop>();
        *self.0.stop.lock().unwrap_or_else(PoisonError::into_inner) = stop;
        self.0.replies.fetch_add(1, Ordering::Relaxed);
        response
    }

    fn stop(&self) -> Option<Stop> {
        self.0.stop.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn wrote(&self, polled: &Poll<io::Result<usize>>) {
        if polled.is_ready() {
            let writes = self.0.writes.load(Ordering::Relaxed).wrapping_add(1);
            self.0.writes.store(writes, Ordering::Relaxed);
        }
        self.0.is_blocked.store(polled.is_pending(), Ordering::Relaxed);
    }
}

/// A connection's stream, whose writes are noted.
pub(super) struct Noted<S> {
    stream: S,
    link: Link,
}

impl<S> Noted<S> {
    pub(super) const fn new(stream: S, link: Link) -> Self {
        Self { stream, link }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Noted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Noted<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.link.wrote(&polled);
        polled
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.link.wrote(&polled);
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// How long a connection is waited for that cannot write.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// Since its client last took something; `None`: for ever.
    pub(super) longest: Option<Duration>,
    /// Since its call must end.
    pub(super) after_stop: Duration,
}

/// Looks at one connection.
pub(super) struct Watch {
    link: Link,
    patience: Patience,
    /// From the first time on that a reply could not be written.
    stall: Option<Stall>,
}

struct Stall {
    reply: usize,
    writes: usize,
    longest: Option<Pin<Box<Sleep>>>,
    stopped: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Watch {
    pub(super) const fn new(link: Link, patience: Patience) -> Self {
        Self { link, patience, stall: None }
    }

    /// True once the connection is to be dropped. Asked after each of its turns.
    pub(super) fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        let state = &self.link.0;
        if !state.is_blocked.load(Ordering::Relaxed) {
            return false;
        }
        let reply = state.replies.load(Ordering::Relaxed);
        let writes = state.writes.load(Ordering::Relaxed);
        let longest = self.patience.longest.and_then(|longest| Instant::now().checked_add(longest));
        let stall = match &mut self.stall {
            Some(stall) if stall.reply == reply => stall,
            stall => {
                let (stop, after_stop) = (self.link.stop(), self.patience.after_stop);
                let stopped = async move {
                    match stop {
                        Some(stop) => drop(stop.cancelled().await),
                        None => std::future::pending().await,
                    }
                    tokio::time::sleep(after_stop).await;
                };
                let longest = longest.map(|at| Box::pin(tokio::time::sleep_until(at)));
                stall.insert(Stall { reply, writes, longest, stopped: Box::pin(stopped) })
            }
        };
        if stall.stopped.as_mut().poll(cx).is_ready() {
            tracing::info!("a client takes nothing of a reply whose call is over: its connection is closed");
            return true;
        }
        let Some(sleep) = &mut stall.longest else {
            return false;
        };
        if stall.writes != writes
            && let Some(at) = longest
        {
            stall.writes = writes;
            sleep.as_mut().reset(at);
        }
        let is_over = sleep.as_mut().poll(cx).is_ready();
        if is_over {
            let longest = self.patience.longest.unwrap_or_default();
            tracing::warn!(
                ?longest,
                "a client took nothing of its reply for that long: its connection is closed"
            );
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use tokio_util::sync::CancellationToken;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn watch(longest: Option<Duration>, after_stop: Duration) -> (Watch, Link) {
        let link = Link::default();
        (Watch::new(link.clone(), Patience { longest, after_stop }), link)
    }

    fn is_over(watch: &mut Watch) -> bool {
        watch.is_over(&mut Context::from_waker(Waker::noop()))
    }

    async fn over(watch: &mut Watch) {
        std::future::poll_fn(|cx| if watch.is_over(cx) { Poll::Ready(()) } else { Poll::Pending }).await;
    }

    /// A reply whose call ends with the token.
    fn reply(link: &Link) -> CancellationToken {
        let token = CancellationToken::new();
        let mut response = Response::new(());
        response.extensions_mut().insert(Stop::new(token.clone(), None));
        link.answers(response);
        token
    }

    #[tokio::test]
    async fn a_client_that_takes_something_now_and_then_is_waited_for() {
        let (mut watch, link) = watch(Some(HOUR), HOUR);
        assert!(!is_over(&mut watch) && watch.stall.is_none(), "it can write");
        link.wrote(&Poll::Pending);
        assert!(!is_over(&mut watch));
        let deadline = |watch: &Watch| {
            watch.stall.as_ref().and_then(|stall| stall.longest.as_ref()).map(|sleep| sleep.deadline())
        };
        let first = deadline(&watch).expect("a limit");
        while Instant::now() + HOUR <= first {}
        assert!(!is_over(&mut watch));
        assert_eq!(deadline(&watch), Some(first), "nothing was taken");
        link.wrote(&Poll::Ready(Ok(1)));
        link.wrote(&Poll::Pending);
        assert!(!is_over(&mut watch));
        assert!(deadline(&watch) > Some(first));
    }

    #[tokio::test]
    async fn one_that_takes_nothing_for_too_long_is_not() {
        let (mut watch, link) = watch(Some(Duration::ZERO), HOUR);
        link.wrote(&Poll::Ready(Ok(1)));
        assert!(!is_over(&mut watch), "it can write");
        link.wrote(&Poll::Pending);
        over(&mut watch).await;
    }

    #[tokio::test]
    async fn the_end_of_its_call_is_not_put_off_by_taking_a_little() {
        let (mut watch, link) = watch(None, Duration::from_millis(1));
        let token = reply(&link);
        link.wrote(&Poll::Pending);
        assert!(!is_over(&mut watch));
        token.cancel();
        while !is_over(&mut watch) {
            link.wrote(&Poll::Ready(Ok(1)));
            link.wrote(&Poll::Pending);
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn each_reply_of_a_connection_has_its_own_call() {
        let (mut watch, link) = watch(None, Duration::ZERO);
        let first = reply(&link);
        link.wrote(&Poll::Pending);
        assert!(!is_over(&mut watch));
        link.wrote(&Poll::Ready(Ok(1)));
        let second = reply(&link);
        first.cancel();
        link.wrote(&Poll::Pending);
        assert!(!is_over(&mut watch) && !is_over(&mut watch));
        second.cancel();
        over(&mut watch).await;
    }
}
