//! Request bodies, up to the limit of the configuration, and of long ones only so many at once.
//!
//! A long one's room is given back when its call is recorded and not before: until then it is in memory, for the record
//! and for another attempt.

mod room;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use tokio::time::Instant;

use room::Room;

use crate::protocol::error::{ApiError, ErrorType};

pub(super) use room::Held;

/// Bytes beyond a multiple of the limit are not waited for.
const DRAINED_LIMITS: usize = 4;
/// A longer body is a long one. Shorter ones are bounded by the number of connections and of calls.
const SHORT: usize = 1 << 20;
/// A body of unknown length takes room in such parts.
const PART: usize = 256 << 10;

/// Room for long bodies that are being read or belong to a call that is not recorded yet.
pub(super) struct Bodies {
    /// Longest body.
    limit: usize,
    room: Arc<Room>,
    /// For room, over the whole of a body.
    longest_wait: Duration,
    /// A client that sends nothing of a body for longer gives its room to others.
    stall: Option<Duration>,
}

/// A body that was read.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) body: Bytes,
    /// A long one's room, until this is dropped.
    pub(super) held: Option<Held>,
}

impl Bodies {
    /// `room`: bytes of long bodies at once. One has room in any case.
    pub(super) fn new(limit: usize, room: usize, longest_wait: Duration, stall: Option<Duration>) -> Self {
        Self { limit, room: Arc::new(Room::new(room, limit)), longest_wait, stall }
    }

    /// Reads a request's body, which has to be plain UTF-8. One that is too long, or has no room in time, is read on and
    /// thrown away: clients that send all of it before they read would otherwise see a broken connection in place of the
    /// answer.
    pub(super) async fn take(&self, headers: &HeaderMap, mut body: Body) -> Result<Taken, ApiError> {
        let told = body.size_hint().exact();
        let fits = told.and_then(|told| usize::try_from(told).ok()).filter(|told| *told <= self.limit);
        if let Some(told) = told.filter(|_| fits.is_none()) {
            self.drain_from(body, 0).await?;
            return Err(self.too_long(told));
        }
        let mut held = None;
        let mut patience = self.longest_wait;
        if let Some(bytes) = fits.filter(|bytes| *bytes > SHORT) {
            held = within(&mut patience, self.room.enter(bytes, false)).await;
            if held.is_none() {
                return self.no_room(body, 0).await;
            }
        }
        // Of what is not written to yet the system keeps no memory.
        let mut text = BytesMut::with_capacity(fits.unwrap_or(0));
        let mut length = 0_usize;
        while let Some(data) = self.next(&mut body).await? {
            length = length.saturating_add(data.len());
            if length > self.limit {
                drop((text, held));
                length = length.saturating_add(self.drain_from(body, length).await?);
                return Err(self.too_long(length as u64));
            }
            if length > SHORT && held.as_ref().is_none_or(|held| held.bytes() < length) {
                // Nobody said how long it is.
                let needed = length.next_multiple_of(PART).min(self.limit);
                let has_room = match &mut held {
                    Some(held) => within(&mut patience, held.grow(needed)).await.is_some(),
                    None => {
                        held = within(&mut patience, self.room.enter(needed, true)).await;
                        held.is_some()
                    }
                };
                if !has_room {
                    drop((text, held, data));
                    return self.no_room(body, length).await;
                }
            }
            text.extend_from_slice(&data);
        }
        is_plain(headers, &text)?;
        if let Some(held) = &mut held {
            held.complete(length);
        }
        Ok(Taken { body: text.freeze(), held })
    }

    /// The next piece, if the client goes on sending.
    async fn next(&self, body: &mut Body) -> Result<Option<Bytes>, ApiError> {
        let Some(stall) = self.stall else {
            return next(body).await;
        };
        tokio::time::timeout(stall, next(body)).await.unwrap_or_else(|_| {
            let message = format!(
                "the client sent nothing of its request's body for {stall:?} (proxy.client_stall_timeout_secs)"
            );
            Err(ApiError::new(408, ErrorType::InvalidRequest, "request_stalled", message))
        })
    }

    /// Says so, once the client has sent what is left.
    async fn no_room(&self, body: Body, read: usize) -> Result<Taken, ApiError> {
        let length = read.saturating_add(self.drain_from(body, read).await?);
        if length > self.limit {
            // It would have no room another time either.
            return Err(self.too_long(length as u64));
        }
        let message = format!(
            "request bodies of {} MiB together are being handled, the most that this proxy holds of those over 1 MiB; \
             try again soon, or raise proxy.large_bodies_bytes",
            self.room.bytes() >> 20
        );
        Err(ApiError::new(429, ErrorType::Server, "too_many_large_bodies", message))
    }

    /// Reads what is left of a body and throws it away, where so many bytes were read; of one that is far beyond the limit
    /// not all. Gives how many followed.
    async fn drain_from(&self, mut body: Body, read: usize) -> Result<usize, ApiError> {
        let most = self.limit.saturating_mul(DRAINED_LIMITS).saturating_sub(read);
        let mut length = 0_usize;
        while length <= most
            && let Some(data) = self.next(&mut body).await?
        {
            length = length.saturating_add(data.len());
        }
        Ok(length)
    }

    fn too_long(&self, bytes: u64) -> ApiError {
        let limit = self.limit;
        tracing::warn!(bytes, limit, "a request is refused: its body is longer than proxy.max_body_bytes");
        let message = format!(
            "the request body has {bytes} bytes, more than the {limit} that this proxy takes; raise \
             proxy.max_body_bytes if it should pass"
        );
        ApiError::new(413, ErrorType::InvalidRequest, "request_too_large", message)
    }
}

/// What comes within the time that is left of this.
async fn within<T>(patience: &mut Duration, waiting: impl Future<Output = T>) -> Option<T> {
    let since = Instant::now();
    let came = tokio::time::timeout(*patience, waiting).await.ok();
    *patience = patience.saturating_sub(since.elapsed());
    came
}

/// The next piece; `None` at the end.
async fn next(body: &mut Body) -> Result<Option<Bytes>, ApiError> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            let message = format!("the request body broke off: {error}");
            ApiError::new(400, ErrorType::InvalidRequest, "bad_request", message)
        })?;
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// Reads a body and throws it away; of one that is far beyond the limit not all.
pub(super) async fn drain(mut body: Body, limit: usize) -> Result<(), ApiError> {
    let (most, mut length) = (limit.saturating_mul(DRAINED_LIMITS), 0_usize);
    while length <= most
        && let Some(data) = next(&mut body).await?
    {
        length = length.saturating_add(data.len());
    }
    Ok(())
}

/// Says of a body that no JSON can be read from what it is instead.
fn is_plain(headers: &HeaderMap, body: &[u8]) -> Result<(), ApiError> {
    let codings = headers.get_all(header::CONTENT_ENCODING).into_iter();
    let codings =
        codings.flat_map(|value| value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii));
    let compressed = codings.into_iter().find(|coding| !coding.eq_ignore_ascii_case(b"identity"));
    if let Some(coding) = compressed.filter(|coding| !coding.is_empty()) {
        let message = format!(
            "the request body is compressed (Content-Encoding: {}), and this proxy reads plain ones only: switch the \
             client's request compression off",
            coding.escape_ascii()
        );
        return Err(ApiError::new(415, ErrorType::InvalidRequest, "compressed_request", message));
    }
    let mark = match body {
        [0xef, 0xbb, 0xbf, ..] => "UTF-8",
        [0xff, 0xfe, ..] => "UTF-16, little-endian",
        [0xfe, 0xff, ..] => "UTF-16, big-endian",
        _ => return Ok(()),
    };
    let message = format!(
        "the request body begins with a byte order mark ({mark}), which JSON must not have: send it as UTF-8 without one"
    );
    Err(ApiError::new(400, ErrorType::InvalidRequest, "byte_order_mark", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;
    static NONE: std::sync::LazyLock<HeaderMap> = std::sync::LazyLock::new(HeaderMap::new);

    fn told(bytes: usize) -> Body {
        Body::from(vec![b'x'; bytes])
    }

    fn untold(bytes: usize) -> Body {
        let pieces = vec![b'x'; bytes];
        let pieces: Vec<_> =
            pieces.chunks(100_000).map(|piece| Ok::<_, std::io::Error>(piece.to_vec())).collect();
        Body::from_stream(futures_util::stream::iter(pieces))
    }

    #[tokio::test]
    async fn long_bodies_wait_for_room_and_then_are_refused_and_short_ones_never_do() {
        for body in [told, untold] {
            let mut bodies = Bodies::new(4 * MIB, 8 * MIB, Duration::ZERO, None);
            let free = |bodies: &Bodies| bodies.room.free();
            let first = bodies.take(&NONE, body(4 * MIB)).await.expect("room");
            let second = bodies.take(&NONE, body(2 * MIB)).await.expect("room");
            assert_eq!((first.body.len(), free(&bodies)), (4 * MIB, 2 * MIB), "as much as it has");
            let refused = bodies.take(&NONE, body(3 * MIB)).await.expect_err("no room");
            assert_eq!((refused.status, refused.code), (429, "too_many_large_bodies"));
            assert!(
                refused.message.contains("8 MiB") && refused.message.contains("proxy.large_bodies_bytes")
            );
            let short = bodies.take(&NONE, body(MIB)).await.expect("it needs no room");
            assert!(short.held.is_none());
            bodies.longest_wait = Duration::from_secs(60);
            let waiting = async { bodies.take(&NONE, body(4 * MIB)).await.expect("room in time").body.len() };
            let leaving = async { drop((first, second)) };
            assert_eq!(tokio::join!(waiting, leaving).0, 4 * MIB);
            let refused = bodies.take(&NONE, body(5 * MIB)).await.expect_err("too long");
            assert_eq!((refused.status, free(&bodies)), (413, 8 * MIB));
            assert!(refused.message.contains(&(5 * MIB).to_string()), "{}", refused.message);
        }
    }

    #[tokio::test]
    async fn a_client_that_sends_no_more_gives_its_room_back() {
        let bodies = Bodies::new(4 * MIB, 4 * MIB, Duration::from_secs(60), Some(Duration::from_millis(20)));
        let begun = futures_util::stream::iter([Ok::<_, std::io::Error>(vec![b'x'; 2 * MIB])]);
        let stalled =
            Body::from_stream(futures_util::StreamExt::chain(begun, futures_util::stream::pending()));
        let refused = bodies.take(&NONE, stalled).await.expect_err("it stalls");
        assert_eq!((refused.status, refused.code), (408, "request_stalled"));
        assert_eq!(bodies.take(&NONE, told(4 * MIB)).await.expect("room").body.len(), 4 * MIB);
        // Nor does one that is refused keep its connection for ever.
        let begun = futures_util::stream::iter([Ok::<_, std::io::Error>(vec![b'x'; 5 * MIB])]);
        let stalled =
            Body::from_stream(futures_util::StreamExt::chain(begun, futures_util::stream::pending()));
        assert_eq!(bodies.take(&NONE, stalled).await.expect_err("it stalls").status, 408);
    }

    #[tokio::test]
    async fn bodies_that_grow_side_by_side_do_not_wait_for_each_other() {
        let bodies = Bodies::new(4 * MIB, 8 * MIB, Duration::from_secs(60), None);
        let all = (0..20)
            .map(|_| async { bodies.take(&NONE, untold(3 * MIB)).await.map(|taken| taken.body.len()) });
        for read in futures_util::future::join_all(all).await {
            assert_eq!(read.expect("room in time"), 3 * MIB);
        }
    }

    #[tokio::test]
    async fn one_body_has_room_in_any_case() {
        let bodies = Bodies::new(4 * MIB, 1, Duration::from_secs(60), None);
        assert_eq!(bodies.take(&NONE, told(4 * MIB)).await.expect("room").body.len(), 4 * MIB);
    }
}
