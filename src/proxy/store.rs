//! The last step of a call: what is missing is filled in, the store gets the records, then the session.

use std::sync::Arc;
use std::time::Instant;

use tokio_util::task::task_tracker::TaskTrackerToken;

use super::Inner;
use super::measures::Recorded;
use super::recorder::Records;
use super::session::Session;
use super::tape::Turn;
use crate::protocol::error::{ApiError, ErrorType};
use crate::record::{Call, SinkError};

/// Appends calls, then tells the session. The tokens, and the turn to make records, are held until then.
pub(super) async fn append(
    inner: Arc<Inner>,
    session: Arc<Session>,
    tokens: (TaskTrackerToken, TaskTrackerToken),
    records: Records,
    failure: Option<String>,
    _turn: Turn,
) -> Result<(), SinkError> {
    let Records { mut calls, missing, success } = records;
    if let Some(missing) = missing {
        missing.fill(&mut calls).await;
    }
    let kept: Vec<Arc<Call>> =
        if session.keeps_calls() { calls.iter().cloned().map(Arc::new).collect() } else { Vec::new() };
    let done: Vec<Recorded> = calls.iter().map(Recorded::of).collect();
    let ended = Instant::now();
    let rows = session.rows.shorten(&mut calls, &inner.measures.routing_rows);
    let result = inner.sink.append(calls).await;
    match &result {
        Ok(()) => {
            session.rows.hold(rows);
            inner.measures.capture_lag.record(ended.elapsed());
            done.iter().for_each(|call| inner.measures.recorded(call));
            session.keep(kept, failure);
            if let Some(attendance) = success {
                attendance.stored();
            }
        }
        Err(error) => lost(&inner, &session, error),
    }
    drop(tokens);
    result
}

/// A call is not served since its record would have no room: the trainer is told, as of one that was lost.
pub(super) fn refused(session: &Session, error: &SinkError) -> ApiError {
    session.keep(Vec::new(), Some(format!("capture: {error}")));
    let (status, code) = match error {
        SinkError::Full { .. } | SinkError::AtCap { .. } | SinkError::LowDisk { .. } => (507, "capture_full"),
        SinkError::Stalled { .. } => (507, "capture_stalled"),
        SinkError::Closed { .. } | SinkError::Refused { .. } | SinkError::Io { .. } => {
            (503, "capture_failed")
        }
    };
    let message = format!("lego does not serve this call, since it could not store it: {error}");
    ApiError::new(status, ErrorType::Server, code, message)
}

/// A call has no record: the trainer and the log are told.
pub(super) fn lost(inner: &Inner, session: &Session, error: &SinkError) {
    inner.measures.capture_failures.increment(1);
    tracing::error!(%error, "a call could not be captured");
    session.keep(Vec::new(), Some(format!("capture: {error}")));
}
