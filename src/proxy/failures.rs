//! A line of the log for each call that failed, and not more lines than somebody can read.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Inner;
use crate::record::CallStatus;

/// Most lines in a window of this length; those beyond are counted.
const MOST: u32 = 20;
const WINDOW: Duration = Duration::from_secs(10);

/// What is said of a call that failed. The span around it names the request and the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Failed<'a> {
    pub(super) status: &'a str,
    /// What the client got, or the upstream answered.
    pub(super) http_status: u16,
    /// In lego's own words: no body, no key.
    pub(super) reason: &'a str,
}

impl<'a> Failed<'a> {
    /// What is said of a call that ended so; `None`: that is no failure. `is_foreign`: the error has words of the
    /// upstream's, which may be those of the request.
    pub(super) fn of(
        status: CallStatus,
        http_status: u16,
        error: Option<&'a str>,
        is_foreign: bool,
    ) -> Option<Self> {
        let own = error.unwrap_or("unknown");
        let reason = match status {
            CallStatus::ParseError => "the reply could not be read",
            CallStatus::UpstreamError if is_foreign => "the upstream answered with an error",
            CallStatus::UpstreamError | CallStatus::Truncated | CallStatus::Timeout => own,
            // It found no place.
            CallStatus::Aborted if http_status == 429 => own,
            CallStatus::Ok | CallStatus::ClientDisconnect | CallStatus::Aborted => return None,
        };
        Some(Self { status: status.as_str(), http_status, reason })
    }
}

/// Says that a call failed, if it did and there is room for the line.
pub(super) fn tell(inner: &Inner, failed: Option<Failed<'_>>) {
    let Some(Failed { status, http_status, reason }) = failed else {
        return;
    };
    match inner.failures.admit(Instant::now()) {
        None => {}
        Some(0) => tracing::warn!(status, http_status, reason, "a call failed"),
        Some(not_logged) => tracing::warn!(
            status,
            http_status,
            reason,
            not_logged,
            "a call failed, and others before it that no line tells of"
        ),
    }
}

/// How many lines there were lately.
#[derive(Default)]
pub(super) struct Failures(Mutex<Window>);

#[derive(Default)]
struct Window {
    since: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Failures {
    /// Whether a line may be written now, and how many were left out since the last one.
    fn admit(&self, now: Instant) -> Option<u64> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if window.since.is_none_or(|since| now.saturating_duration_since(since) >= WINDOW) {
            (window.since, window.lines) = (Some(now), 0);
        }
        if window.lines >= MOST {
            window.left_out += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_told_in_legos_own_words() {
        let of = |status, http_status, is_foreign| {
            Failed::of(status, http_status, Some("words"), is_foreign).map(|failed| failed.reason)
        };
        assert_eq!(of(CallStatus::UpstreamError, 500, true), Some("the upstream answered with an error"));
        assert_eq!(of(CallStatus::UpstreamError, 502, false), Some("words"));
        assert_eq!(of(CallStatus::ParseError, 200, true), Some("the reply could not be read"));
        for status in [CallStatus::Timeout, CallStatus::Truncated] {
            assert_eq!(of(status, 504, false), Some("words"));
        }
        assert_eq!(of(CallStatus::Aborted, 429, false), Some("words"));
        for status in [CallStatus::Ok, CallStatus::ClientDisconnect, CallStatus::Aborted] {
            assert_eq!(of(status, 200, false), None);
        }
    }

    #[test]
    fn a_storm_of_failures_is_a_few_lines_and_a_count() {
        let failures = Failures::default();
        let start = Instant::now();
        let told = (0..100).filter(|_| failures.admit(start).is_some()).count();
        assert_eq!(told, MOST as usize);
        assert_eq!(failures.admit(start + WINDOW / 2), None);
        assert_eq!(failures.admit(start + WINDOW), Some(81));
        assert_eq!(failures.admit(start + WINDOW), Some(0));
    }
}
