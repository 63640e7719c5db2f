//! Where finished calls go: the one seam between what captures calls and what stores them.

use super::Call;

/// Takes calls and keeps them. `append` resolves when the calls are as durable as the sink promises, so a
/// caller may release to its client what depends on them.
#[async_trait::async_trait]
pub trait CallSink: Send + Sync {
    /// Stores `calls`, all of them or none.
    ///
    /// # Errors
    /// [`SinkError`]: none of `calls` may be counted as stored.
    async fn append(&self, calls: Vec<Call>) -> Result<(), SinkError>;

    /// Keeps what is known of calls that still run, before their client may act on a part of them. If no record of
    /// a call is ever appended, because this process or the machine died, its last draft becomes the record.
    ///
    /// # Errors
    /// [`SinkError`]: none of `calls` may be counted as kept.
    async fn draft(&self, calls: Vec<Call>) -> Result<(), SinkError>;
}

/// Why calls could not be stored. Cloneable, because one failed commit fails all who wait for it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SinkError {
    /// The disk, or a quota on it, is full.
    #[error(
        "no space left for captures in {place}: free space there or set another capture_dir; writing resumes by itself"
    )]
    Full {
        /// The folder that is full.
        place: String,
    },
    /// The sink was closed, or its writer thread ended.
    #[error("the capture store in {place} is closed")]
    Closed {
        /// The folder of the store.
        place: String,
    },
    /// A call cannot be stored as it is.
    #[error("call {call_id} cannot be stored: {reason}")]
    Refused {
        /// Id of the call.
        call_id: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Reading or writing failed for another reason.
    #[error("writing captures to {place} failed: {reason}")]
    Io {
        /// The file or folder.
        place: String,
        /// The system's words.
        reason: String,
    },
}
