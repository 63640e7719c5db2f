//! What ends a call before its reply does: its session or the proxy, or the limit of its whole time.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::whole::BadBody;
use crate::protocol::error::{ApiError, ErrorType};
use crate::record::CallStatus;

/// When a call must end. Clones end together.
#[derive(Clone)]
pub(super) struct Stop {
    token: CancellationToken,
    /// The limit of the whole call, and when it is reached.
    limit: Option<(Duration, Instant)>,
}

impl Stop {
    /// For a call that begins now and may take `limit`.
    pub(super) fn new(token: CancellationToken, limit: Option<Duration>) -> Self {
        // A time that no clock can tell is never reached.
        let limit = limit.and_then(|limit| Some((limit, Instant::now().checked_add(limit)?)));
        Self { token, limit }
    }

    /// What is said about a call that must end now. Takes a lock.
    pub(super) fn now(&self) -> Option<BadBody> {
        if self.token.is_cancelled() {
            return Some(aborted());
        }
        let (limit, at) = self.limit?;
        (Instant::now() >= at).then(|| timed_out(limit))
    }

    /// Returns when the call must end, with what is said about it.
    pub(super) async fn cancelled(&self) -> BadBody {
        let Some((limit, at)) = self.limit else {
            self.token.cancelled().await;
            return aborted();
        };
        tokio::select! {
            biased;
            () = self.token.cancelled() => aborted(),
            () = tokio::time::sleep_until(at) => timed_out(limit),
        }
    }
}

fn aborted() -> BadBody {
    let message = "lego ended this call: its session was closed or the proxy is shutting down";
    BadBody {
        status: CallStatus::Aborted,
        error: ApiError::new(503, ErrorType::Server, "call_aborted", message),
    }
}

fn timed_out(limit: Duration) -> BadBody {
    let message = format!("lego ended this call: it took longer than {limit:?} (total_timeout_secs)");
    BadBody {
        status: CallStatus::Timeout,
        error: ApiError::new(504, ErrorType::Server, "call_timeout", message),
    }
}
