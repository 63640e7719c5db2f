//! What no trial can go on without.

/// Errors that end the run, not a trial.
#[derive(Debug, thiserror::Error)]
pub enum RolloutError {
    #[error("captures cannot be stored: {0}")]
    Capture(String),
    #[error("{path}: {source}")]
    Io { path: std::path::PathBuf, source: std::io::Error },
    #[error("a trial's task panicked: {0}")]
    Panicked(String),
    #[error("the tokens of session {session} do not add up: {cause}")]
    Ledger { session: String, cause: String },
    #[error("stopped")]
    Cancelled,
}
