//! How many calls of a route run at once, and how many requests go out in a minute or a second.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::HeaderValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::body::Held;
use super::gate::Running;
use super::routes::RouteOptions;
use crate::protocol::error::{ApiError, ErrorType};

/// What a call holds while it runs. A call that was refused has a record too, and holds nothing.
#[derive(Default)]
pub(super) struct Places {
    /// One of the proxy's calls in flight.
    pub(super) _slot: Option<OwnedSemaphorePermit>,
    /// One of its route's.
    pub(super) _of_route: Option<OwnedSemaphorePermit>,
    pub(super) _running: Option<Running>,
    /// The room of a long request body.
    pub(super) _body: Option<Held>,
}

/// A call that found no place in time.
pub(super) struct Refused {
    pub(super) status: u16,
    /// What is full, and which key says how large it is.
    pub(super) message: String,
    pub(super) code: &'static str,
    /// When it is worth trying again.
    pub(super) after: Duration,
}

impl Refused {
    /// Whole seconds, so that nobody comes back too early.
    pub(super) fn retry_after(&self) -> HeaderValue {
        let seconds = self.after.as_secs() + u64::from(self.after.subsec_nanos() > 0);
        seconds.max(1).into()
    }

    pub(super) fn error(&self) -> ApiError {
        ApiError::new(self.status, ErrorType::Server, self.code, self.message.clone())
    }
}

/// Limits of one route.
pub(super) struct Limits {
    /// The table of the configuration that has them.
    table: String,
    places: Option<(usize, Arc<Semaphore>)>,
    windows: Mutex<Vec<Window>>,
    longest_wait: Duration,
}

impl Limits {
    pub(super) fn new(table: String, options: &RouteOptions, longest_wait: Duration) -> Self {
        let windows = [
            ("requests_per_minute", options.requests_per_minute, 60),
            ("requests_per_second", options.requests_per_second, 1),
        ];
        let window = |(key, most, seconds): (&'static str, Option<u32>, u64)| {
            Some(Window {
                key,
                most: most? as usize,
                period: Duration::from_secs(seconds),
                times: VecDeque::new(),
            })
        };
        Self {
            table,
            places: options.max_concurrent.map(|most| (most, Arc::new(Semaphore::new(most)))),
            windows: Mutex::new(windows.into_iter().filter_map(window).collect()),
            longest_wait,
        }
    }

    /// A place among the route's calls in flight, then the turn to send; waits for both, and no longer than allowed.
    pub(super) async fn place(&self) -> Result<Option<OwnedSemaphorePermit>, Refused> {
        let place = match &self.places {
            None => None,
            Some((most, semaphore)) => {
                let waiting = Arc::clone(semaphore).acquire_owned();
                // The semaphore is never closed.
                let place = tokio::time::timeout(self.longest_wait, waiting).await.ok().and_then(Result::ok);
                Some(place.ok_or_else(|| Refused {
                    status: 429,
                    message: format!(
                        "{most} calls for this model are in flight, the most that {}.max_concurrent lets in; try \
                         again soon",
                        self.table
                    ),
                    code: "too_many_calls",
                    after: Duration::from_secs(1),
                })?)
            }
        };
        self.turn().await?;
        Ok(place)
    }

    /// The turn to send one request. A client that leaves while it waits leaves its turn unused.
    pub(super) async fn turn(&self) -> Result<(), Refused> {
        let at = self.reserve(Instant::now())?;
        tokio::time::sleep_until(at).await;
        Ok(())
    }

    /// Takes another turn, and tells when it is.
    pub(super) fn another(&self) -> Result<Instant, Refused> {
        self.reserve(Instant::now())
    }

    /// When a request may go out that is ready at `now`.
    fn reserve(&self, now: Instant) -> Result<Instant, Refused> {
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        let full = windows.iter().max_by_key(|window| window.earliest(now));
        let Some((key, most, at)) = full.map(|window| (window.key, window.most, window.earliest(now))) else {
            return Ok(now);
        };
        let after = at.saturating_duration_since(now);
        if after > self.longest_wait {
            let message = format!(
                "this model gets no more than {most} requests in that time ({}.{key}); try again in {after:.1?}",
                self.table
            );
            return Err(Refused { status: 429, message, code: "rate_limited", after });
        }
        for window in windows.iter_mut() {
            window.take(at);
        }
        Ok(at)
    }
}

/// The times of the last requests: in no `period` there are more than `most`.
struct Window {
    key: &'static str,
    most: usize,
    period: Duration,
    /// In ascending order; some lie ahead, for requests that wait.
    times: VecDeque<Instant>,
}

impl Window {
    fn earliest(&self, now: Instant) -> Instant {
        let behind = self.times.len().checked_sub(self.most).and_then(|index| self.times.get(index));
        let after = behind.map(|time| *time + self.period);
        let last = self.times.back().copied();
        [after, last].into_iter().flatten().fold(now, Instant::max)
    }

    fn take(&mut self, at: Instant) {
        self.times.push_back(at);
        if self.times.len() > self.most {
            self.times.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(per_minute: Option<u32>, per_second: Option<u32>, wait: u64) -> Limits {
        let window = |key, most: Option<u32>, seconds| {
            Some(Window {
                key,
                most: most? as usize,
                period: Duration::from_secs(seconds),
                times: VecDeque::new(),
            })
        };
        let windows =
            [window("requests_per_minute", per_minute, 60), window("requests_per_second", per_second, 1)];
        Limits {
            table: "proxy.routes.judge".to_owned(),
            places: None,
            windows: Mutex::new(windows.into_iter().flatten().collect()),
            longest_wait: Duration::from_secs(wait),
        }
    }

    #[test]
    fn no_minute_and_no_second_has_more_requests_than_allowed() {
        let start = Instant::now();
        for (per_minute, per_second) in [(Some(5), None), (None, Some(2)), (Some(5), Some(2))] {
            let limits = limits(per_minute, per_second, 3600);
            let mut times = Vec::new();
            for ready in [0, 0, 0, 1, 1, 50, 50, 70, 70, 70, 70, 70, 70, 300] {
                let at = limits.reserve(start + Duration::from_secs(ready)).ok().expect("a turn");
                assert!(at >= start + Duration::from_secs(ready));
                times.push(at);
            }
            assert!(times.is_sorted());
            for (most, period) in [(per_minute, 60), (per_second, 1)] {
                let Some(most) = most else { continue };
                for pair in times.windows(most as usize + 1) {
                    assert!(pair[most as usize] - pair[0] >= Duration::from_secs(period), "{times:?}");
                }
            }
            assert_eq!(times.last(), Some(&(start + Duration::from_secs(300))));
        }
    }

    #[test]
    fn who_would_wait_too_long_is_told_when_to_come_back() {
        let start = Instant::now();
        let limits = limits(Some(2), None, 10);
        let seconds = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(limits.reserve(start).ok(), Some(start));
        assert_eq!(limits.reserve(seconds(20)).ok(), Some(seconds(20)));
        let refused = limits.reserve(seconds(30)).expect_err("too early");
        assert_eq!((refused.code, refused.after), ("rate_limited", Duration::from_secs(30)));
        assert!(refused.message.contains("proxy.routes.judge.requests_per_minute"), "{}", refused.message);
        assert_eq!(limits.reserve(seconds(55)).ok(), Some(seconds(60)), "a refusal takes no turn");
        assert_eq!(limits.reserve(seconds(90)).ok(), Some(seconds(90)));
    }
}
