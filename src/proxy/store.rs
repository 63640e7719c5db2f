//! The last step of a call: what is missing is filled in, the store gets the records, then the session.

use std::sync::Arc;
use std::time::Instant;

use tokio_util::task::task_tracker::TaskTrackerToken;

use super::Inner;
use super::local_ids::Missing;
use super::session::Session;
use crate::record::{Call, SinkError};

/// Appends calls, then tells the session. The tokens are held until then.
pub(super) async fn append(
    inner: Arc<Inner>,
    session: Arc<Session>,
    tokens: (TaskTrackerToken, TaskTrackerToken),
    mut calls: Vec<Call>,
    missing: Option<Missing>,
    failure: Option<String>,
) -> Result<(), SinkError> {
    if let Some(missing) = missing {
        missing.fill(&mut calls).await;
    }
    let kept: Vec<Arc<Call>> = calls.iter().cloned().map(Arc::new).collect();
    let ended = Instant::now();
    let result = inner.sink.append(calls).await;
    match &result {
        Ok(()) => {
            inner.measures.capture_lag.record(ended.elapsed());
            kept.iter().for_each(|call| inner.measures.recorded(call));
            session.keep(kept, failure);
        }
        Err(error) => {
            inner.measures.capture_failures.increment(1);
            tracing::error!(%error, "a call could not be captured");
            session.keep(Vec::new(), Some(format!("capture: {error}")));
        }
    }
    drop(tokens);
    result
}
