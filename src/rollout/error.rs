//! What no trial can go on without.

/// Errors that end the run, not a trial.
#[derive(Debug, thiserror::Error)]
pub enum RolloutError {
    #[error("cannot open a trial's session: {0}")]
    Session(String),
    #[error("{path}: {source}")]
    Io { path: std::path::PathBuf, source: std::io::Error },
    #[error("a trial's task panicked: {0}")]
    Panicked(String),
    #[error("the tokens of trial {trial} do not add up: {cause}")]
    Ledger { trial: String, cause: String },
    #[error("stopped")]
    Cancelled,
}
