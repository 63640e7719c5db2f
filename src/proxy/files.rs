//! Open files: how many the system allows, how many calls fit in, and what becomes of connections beyond.
//!
//! A call in flight takes two: its client's connection and its upstream's. A journal that cannot be opened is a call
//! that cannot be recorded, so some are kept back for lego's own files; connections beyond what fits are told to come
//! back later, a few at a time.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::{HeaderMap, HeaderValue, Uri, header};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{body, reply};
use crate::protocol::error::{ApiError, ErrorType};

/// For the journal, drafts, spilled replies, Parquet, listeners, names being resolved and the runtime.
const OWN: usize = 32;
/// Connections that are told at once that there are too many.
const SURPLUS: usize = 8;
/// How long such a connection may take to say what it wants.
pub(super) const SURPLUS_PATIENCE: Duration = Duration::from_secs(5);

/// What to do about a limit that is too low.
const REMEDY: &str = "raise the hard limit of open files (ulimit -Hn; LimitNOFILE= of a systemd unit; --ulimit nofile= of a container)";

/// Raises the soft limit of open files, often 1024, to what the system allows, and gives it; `None`: there is none, or
/// nobody knows.
#[must_use]
pub fn raise_open_files() -> Option<usize> {
    #[cfg(target_os = "linux")]
    {
        use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
        let mut limit = soft;
        if soft < hard {
            match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
                Ok(()) => limit = hard,
                Err(error) => tracing::warn!(%error, "the limit of open files stays as it is"),
            }
        }
        (limit != RLIM_INFINITY).then(|| usize::try_from(limit).unwrap_or(usize::MAX))
    }
    #[cfg(not(target_os = "linux"))]
    None
}

/// Files that a trial and its calls open: eight, as counted, and some for calls side by side.
const OF_A_TRIAL: usize = 12;

/// What is to be said where a limit of open files is too low for so many trials at once.
#[must_use]
pub fn too_few_files(limit: Option<usize>, trials: usize) -> Option<String> {
    let needed = trials.saturating_mul(OF_A_TRIAL).saturating_add(OWN + SURPLUS);
    let limit = limit.filter(|limit| *limit < needed)?;
    Some(format!(
        "this process may open {limit} files, and {trials} trials at once (sandbox.max_concurrent) may take {needed}: \
         trials may fail as broken machinery. Lower sandbox.max_concurrent, or {REMEDY}"
    ))
}

/// What a limit of open files leaves for calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileShare {
    /// Most calls in flight.
    pub calls: usize,
    /// Most connections of clients.
    connections: usize,
    /// The limit, where it is what decides how many calls.
    pub short_of: Option<usize>,
}

impl FileShare {
    /// `limit`: of open files; `None`: none is known. `wanted`: most calls in flight. Each of `upstreams` may have
    /// connections at rest, as many as calls ran at once.
    #[must_use]
    pub fn of(limit: Option<usize>, wanted: usize, upstreams: usize) -> Self {
        let Some(limit) = limit else {
            return Self { calls: wanted, connections: usize::MAX, short_of: None };
        };
        let spare = limit.saturating_sub(OWN + SURPLUS);
        let fits = (spare / (1 + upstreams.max(1))).max(1);
        let calls = wanted.min(fits);
        let connections = spare.saturating_sub(calls.saturating_mul(upstreams.max(1))).max(1);
        Self { calls, connections, short_of: (calls < wanted).then_some(limit) }
    }

    /// What is to be said where the limit is too low for `wanted` calls.
    #[must_use]
    pub fn warning(&self, wanted: usize) -> Option<String> {
        let limit = self.short_of?;
        Some(format!(
            "this process may open {limit} files, which is enough for {} calls at once and not for the {wanted} of \
             proxy.max_in_flight: more wait, then get 429. To let more in, {REMEDY}",
            self.calls
        ))
    }

    /// Why no further call is let in.
    pub(super) fn full(&self) -> String {
        let calls = self.calls;
        let remedy = match self.short_of {
            Some(limit) => format!("this process may open {limit} files: {REMEDY}"),
            None => "raise proxy.max_in_flight".to_owned(),
        };
        format!("{calls} calls are in flight, the most that this proxy lets in; try again soon, or {remedy}")
    }
}

/// Room for connections.
pub(super) struct Room {
    usual: Arc<Semaphore>,
    surplus: Arc<Semaphore>,
}

/// A connection's place.
pub(super) struct Place {
    _held: Option<OwnedSemaphorePermit>,
    /// There is no room: it is to be told so.
    pub(super) is_surplus: bool,
}

impl Room {
    pub(super) fn new(share: &FileShare) -> Self {
        let usual = share.connections.min(Semaphore::MAX_PERMITS);
        Self { usual: Arc::new(Semaphore::new(usual)), surplus: Arc::new(Semaphore::new(SURPLUS)) }
    }

    /// A place for a connection that came. Waits only while many others are being told that there is no room.
    pub(super) async fn enter(&self) -> Place {
        if let Ok(held) = Arc::clone(&self.usual).try_acquire_owned() {
            return Place { _held: Some(held), is_surplus: false };
        }
        // Neither is ever closed.
        tokio::select! {
            biased;
            held = Arc::clone(&self.usual).acquire_owned() => Place { _held: held.ok(), is_surplus: false },
            held = Arc::clone(&self.surplus).acquire_owned() => Place { _held: held.ok(), is_surplus: true },
        }
    }
}

/// Answers a request for which there is no room, after taking its body, and ends its connection.
pub(super) async fn no_room(limit: usize, uri: Uri, headers: HeaderMap, body: Body) -> Response {
    // Clients that send all of it before they read would otherwise see a broken connection.
    let _ = tokio::time::timeout(SURPLUS_PATIENCE, body::drain(body, limit)).await;
    let message = format!(
        "this proxy has as many connections as the files that it may open leave room for; try again soon, or {REMEDY}"
    );
    let error = ApiError::new(429, ErrorType::Server, "too_many_connections", message);
    metrics::counter!("lego_proxy_refused_total", "code" => error.code).increment(1);
    reply::error(reply::api_of(uri.path(), &headers), &error)
}

/// Ends the connection after this response.
pub(super) async fn last(mut response: Response) -> Response {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_calls_and_connections_open_is_within_the_limit() {
        for limit in [1, 40, 41, 60, 256, 1024, 4096, 1 << 20] {
            for upstreams in [0, 1, 3] {
                for wanted in [1, 100, 1024, 1 << 19] {
                    let share = FileShare::of(Some(limit), wanted, upstreams);
                    let open = OWN + SURPLUS + share.connections + share.calls * upstreams.max(1);
                    assert!(open <= limit.max(OWN + SURPLUS + 1 + upstreams.max(1)), "{limit}: {share:?}");
                    assert!(share.calls >= 1 && share.connections >= share.calls, "{limit}: {share:?}");
                    assert_eq!(share.short_of, (share.calls < wanted).then_some(limit));
                }
            }
        }
        let share = FileShare::of(Some(1024), 1024, 1);
        let warning = share.warning(1024).expect("too few");
        for part in ["1024 files", "492 calls", "ulimit -Hn", "proxy.max_in_flight"] {
            assert!(warning.contains(part), "{warning}");
        }
        assert!(share.full().contains("1024 files") && !share.full().contains("max_in_flight"));
        assert_eq!((too_few_files(Some(1024), 32), too_few_files(None, 1 << 20)), (None, None));
        let warning = too_few_files(Some(256), 32).expect("too few");
        for part in ["256 files", "32 trials", "sandbox.max_concurrent", "424", "ulimit -Hn"] {
            assert!(warning.contains(part), "{warning}");
        }
        let share = FileShare::of(None, 7, 1);
        assert_eq!((share.calls, share.warning(7)), (7, None));
        assert!(share.full().contains("proxy.max_in_flight"));
    }

    #[tokio::test]
    async fn connections_beyond_the_room_are_told_so_until_one_ends() {
        let room = Room::new(&FileShare { calls: 1, connections: 2, short_of: Some(44) });
        let mut places = vec![room.enter().await, room.enter().await];
        for _ in 0..SURPLUS {
            places.push(room.enter().await);
        }
        assert_eq!(places.iter().filter(|place| place.is_surplus).count(), SURPLUS);
        drop(places.remove(0));
        assert!(!room.enter().await.is_surplus);
    }
}
