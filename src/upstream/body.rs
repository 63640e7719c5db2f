//! The body of a reply, whatever carries it.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Body;
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;

use super::pool::{PoolError, PooledBody};
use super::unpack::Unpacker;

/// A reply that broke off. The words are ones by which clients that read messages know to try again.
#[derive(Debug, thiserror::Error)]
#[error("connection error: the upstream's reply broke off: {0}")]
pub struct BodyError(String);

/// The body of a reply. Dropping it before its end aborts the request upstream.
#[derive(Debug)]
pub struct UpstreamBody {
    source: Source,
    /// `None`: its bytes are the reply's.
    unpacker: Option<Box<Unpacker>>,
    /// What was read already and not taken yet.
    #[expect(clippy::box_collection, reason = "few replies have any, and every open stream has this field")]
    ahead: Option<Box<VecDeque<Result<Bytes, BodyError>>>>,
    is_over: bool,
}

#[derive(Debug)]
enum Source {
    Pooled(Box<PooledBody>),
    Other(UnsyncBoxBody<Bytes, BodyError>),
}

impl UpstreamBody {
    /// A body from elsewhere.
    pub fn other<B, E>(body: B) -> Self
    where
        B: Body<Data = Bytes, Error = E> + Send + 'static,
        E: std::fmt::Display,
    {
        Self::of(Source::Other(body.map_err(|error| BodyError(error.to_string())).boxed_unsync()))
    }

    /// The body of a connection of the pool.
    pub(super) fn pooled(body: PooledBody) -> Self {
        Self::of(Source::Pooled(Box::new(body)))
    }

    const fn of(source: Source) -> Self {
        Self { source, unpacker: None, ahead: None, is_over: false }
    }

    /// The same, unpacked.
    pub(super) fn unpacked(self, unpacker: Option<Unpacker>) -> Self {
        Self { unpacker: unpacker.map(Box::new), ..self }
    }

    /// The first bytes, at least `most` of them if there are so many; [`next`](Self::next) gives them again. What has
    /// come by the time that this is cancelled is not lost.
    pub async fn peek(&mut self, most: usize) -> Vec<u8> {
        let mut seen = Vec::new();
        while seen.len() < most {
            let Some(piece) = self.read(most).await else { break };
            if let Ok(piece) = &piece {
                seen.extend_from_slice(piece);
            }
            self.ahead.get_or_insert_default().push_back(piece);
        }
        seen
    }

    /// The next bytes, up to about `max` of them joined; `None` at the end. Nothing is read ahead of this call.
    pub async fn next(&mut self, max: usize) -> Option<Result<Bytes, BodyError>> {
        if let Some(ahead) = &mut self.ahead {
            if let Some(piece) = ahead.pop_front() {
                return Some(piece);
            }
            self.ahead = None;
        }
        self.read(max).await
    }

    async fn read(&mut self, max: usize) -> Option<Result<Bytes, BodyError>> {
        loop {
            if self.is_over {
                return None;
            }
            let piece = std::future::poll_fn(|cx| self.poll_next(cx, max)).await;
            self.is_over = !matches!(piece, Some(Ok(_)));
            let Some(unpacker) = &mut self.unpacker else {
                return piece;
            };
            let plain = match piece {
                Some(Ok(piece)) => unpacker.push(piece),
                Some(Err(error)) => return Some(Err(error)),
                None => unpacker.finish(),
            };
            match plain {
                Ok(plain) if plain.is_empty() => {}
                Ok(plain) => return Some(Ok(plain)),
                Err(error) => {
                    self.is_over = true;
                    return Some(Err(BodyError(error.to_string())));
                }
            }
        }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>, max: usize) -> Poll<Option<Result<Bytes, BodyError>>> {
        match &mut self.source {
            Source::Pooled(body) => {
                body.poll_piece(cx, max).map_err(|error: PoolError| BodyError(error.to_string()))
            }
            Source::Other(body) => loop {
                let frame = std::task::ready!(Pin::new(&mut *body).poll_frame(cx));
                match frame.map(|frame| frame.map(http_body::Frame::into_data)) {
                    None => return Poll::Ready(None),
                    Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                    Some(Ok(Ok(data))) => return Poll::Ready(Some(Ok(data))),
                    Some(Ok(Err(_trailers))) => {}
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_looked_at_comes_again() {
        let pieces =
            ["ab", "cd", "ef"].map(|piece| Ok(http_body::Frame::data(Bytes::from_static(piece.as_bytes()))));
        let failed = Err(std::io::Error::other("gone"));
        let stream = futures_util::stream::iter(pieces.into_iter().chain([failed]));
        let mut body = UpstreamBody::other(http_body_util::StreamBody::new(stream));
        assert_eq!(body.peek(3).await, b"abcd");
        let mut text = Vec::new();
        let error = loop {
            match body.next(100).await.expect("an error before the end") {
                Ok(piece) => text.extend_from_slice(&piece),
                Err(error) => break error,
            }
        };
        assert_eq!((text.as_slice(), error.to_string().contains("gone")), (b"abcdef".as_slice(), true));
        let failed =
            futures_util::stream::iter([Err::<http_body::Frame<Bytes>, _>(std::io::Error::other("gone"))]);
        let mut body = UpstreamBody::other(http_body_util::StreamBody::new(failed));
        assert_eq!(body.peek(3).await, b"");
        assert!(body.next(100).await.expect("the error").is_err());
        assert!(body.next(100).await.is_none());
    }
}
