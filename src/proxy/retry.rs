//! When a call is sent upstream again: only while its client has not had a byte of the reply.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName, header};

use super::options::Retries;
use crate::record::CallId;

/// First pause; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// The pause before another attempt, after `done` retries; `None`: the failure is the client's to see.
///
/// `status` is `None` where no reply began. What another try cannot change (400, 401, 404 …) is not retried, nor
/// what the upstream wants to be left alone for longer than the configuration allows.
pub(super) fn pause(
    retries: Retries,
    done: u16,
    status: Option<u16>,
    headers: Option<&HeaderMap>,
    call_id: CallId,
) -> Option<Duration> {
    let is_passing = matches!(status, None | Some(408 | 429 | 500 | 502 | 503 | 504 | 529));
    if !is_passing || done >= retries.most {
        return None;
    }
    match headers.and_then(retry_after) {
        Some(asked) => (asked <= retries.longest_wait).then_some(asked),
        None => Some(jittered(done, call_id).min(retries.longest_wait)),
    }
}

/// Exponential, between half and all of its length: calls that failed together do not come back together.
fn jittered(done: u16, call_id: CallId) -> Duration {
    let doublings = u32::from(done).min(16);
    let full = FIRST_PAUSE.saturating_mul(1 << doublings).min(LONGEST_PAUSE);
    // The id's last bytes are random.
    let random =
        call_id.to_string().bytes().rev().take(4).fold(0u32, |sum, byte| (sum << 4) ^ u32::from(byte));
    full / 2 + full / 2 * (random % 1000) / 1000
}

/// `retry-after-ms`, or `Retry-After` in seconds or as a date. The upstream's clock is not ours: a date is counted from
/// the reply's own where it has one. What is over says nothing.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name)?.to_str().ok()?.trim().parse::<f64>().ok();
    let seconds = text("retry-after-ms").map(|ms| ms / 1000.0).or_else(|| text(header::RETRY_AFTER.as_str()));
    if let Some(seconds) = seconds {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let date = |name: HeaderName| httpdate::parse_http_date(headers.get(name)?.to_str().ok()?.trim()).ok();
    let until = date(header::RETRY_AFTER)?;
    until.duration_since(date(header::DATE).unwrap_or_else(SystemTime::now)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETRIES: Retries = Retries { most: 2, longest_wait: Duration::from_secs(30) };

    fn after(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(http::HeaderName::from_static(name), value.parse().expect("header"))])
    }

    #[test]
    fn what_passes_by_itself_is_tried_again_a_few_times() {
        let id = CallId::now();
        for status in [None, Some(429), Some(500), Some(502), Some(503), Some(529)] {
            let first = pause(RETRIES, 0, status, None, id).expect("a retry");
            assert!(first >= FIRST_PAUSE / 2 && first <= FIRST_PAUSE, "{first:?}");
            let second = pause(RETRIES, 1, status, None, id).expect("a retry");
            assert!(second >= FIRST_PAUSE && second <= FIRST_PAUSE * 2, "{second:?}");
            assert_eq!(pause(RETRIES, 2, status, None, id), None);
        }
        for status in [200, 400, 401, 403, 404, 409, 413, 422] {
            assert_eq!(pause(RETRIES, 0, Some(status), None, id), None, "{status}");
        }
        let never = Retries { most: 0, ..RETRIES };
        assert_eq!(pause(never, 0, None, None, id), None);
    }

    #[test]
    fn the_upstream_says_how_long_to_wait() {
        let id = CallId::now();
        let wait = |headers: &HeaderMap| pause(RETRIES, 0, Some(429), Some(headers), id);
        assert_eq!(wait(&after("retry-after", "3")), Some(Duration::from_secs(3)));
        assert_eq!(wait(&after("retry-after-ms", "250")), Some(Duration::from_millis(250)));
        assert_eq!(wait(&after("retry-after", "31")), None, "longer than is waited for");
        for odd in ["-1", "nan", "inf", "Fri, 31 Dec 1999 23:59:59 GMT"] {
            assert!(wait(&after("retry-after", odd)).expect("a retry") <= FIRST_PAUSE, "{odd}");
        }
        let mut dated = after("retry-after", "Fri, 31 Dec 1999 23:59:59 GMT");
        dated.insert("date", "Fri, 31 Dec 1999 23:59:39 GMT".parse().expect("header"));
        assert_eq!(wait(&dated), Some(Duration::from_secs(20)), "by the upstream's clock");
        dated.insert("date", "Fri, 31 Dec 1999 23:59:28 GMT".parse().expect("header"));
        assert_eq!(wait(&dated), None, "longer than is waited for");
        dated.insert("date", "Sat, 01 Jan 2000 00:00:00 GMT".parse().expect("header"));
        assert!(wait(&dated).expect("a retry") <= FIRST_PAUSE);
        assert_eq!(wait(&after("retry-after", "Fri, 31 Dec 9999 23:59:59 GMT")), None, "by ours");
        let many = Retries { most: u16::MAX, ..RETRIES };
        assert_eq!(pause(many, u16::MAX - 1, None, None, id).map(|p| p <= LONGEST_PAUSE), Some(true));
    }
}
