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

    /// Whether a call may begin whose record is to come here. Asked before anything is sampled for it; a call that has
    /// begun is appended whatever this says.
    ///
    /// # Errors
    /// [`SinkError`]: why there is no room.
    fn admits(&self) -> Result<(), SinkError> {
        Ok(())
    }
}

/// Why calls could not be stored. Cloneable, because one failed commit fails all who wait for it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SinkError {
    /// The disk, or a quota on it, is full.
    #[error(
        "no space left for captures in {place}: free space there (`lego capture prune --older-than 30d {place}` removes old days) or set another capture_dir; writing resumes by itself"
    )]
    Full {
        /// The folder that is full.
        place: String,
    },
    /// The folder is as large as it may be.
    #[error(
        "the captures in {place} are {held} bytes, and proxy.capture_max_bytes allows {most}: remove old days \
         (`lego capture prune --older-than 30d {place}`) or raise the key; calls are served again by themselves"
    )]
    AtCap {
        /// The folder.
        place: String,
        /// Its bytes.
        held: u64,
        /// The bound.
        most: u64,
    },
    /// The disk is nearly full.
    #[error(
        "the disk of the captures in {place} has {free} bytes left, and {least} are to stay free \
         (proxy.capture_min_free_bytes): free space there (`lego capture prune --older-than 30d {place}` removes old \
         days) or set another capture_dir; calls are served again by themselves"
    )]
    LowDisk {
        /// The folder.
        place: String,
        /// Bytes that the disk has left.
        free: u64,
        /// Bytes that are to stay free.
        least: u64,
    },
    /// The disk takes nothing.
    #[error(
        "the disk has taken no captures in {place} for {seconds} seconds (proxy.capture_stall_timeout_secs): it hangs or \
         is too slow; repair it or set another capture_dir; calls are served again by themselves"
    )]
    Stalled {
        /// The folder.
        place: String,
        /// How long it has been waited for.
        seconds: u64,
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
