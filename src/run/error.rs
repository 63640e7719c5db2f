//! Why a run could not start or go on.

use std::path::PathBuf;

use crate::config::ConfigError;

/// Errors of the composition root. Those of the rooms below are passed on with what was being done.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("{} already holds a run: pass another --output-dir, or --resume to go on with a training", .0.display())]
    FolderExists(PathBuf),
    #[error("{} holds checkpoints and no run.json: pass another --output-dir for a new run", .0.display())]
    StrayCheckpoints(PathBuf),
    #[error("{} holds an evaluation, which does not resume: start it again with another --output-dir", .0.display())]
    NotATraining(PathBuf),
    #[error("no run to resume in {}: pass the --output-dir of a run that was started before", .0.display())]
    NothingToResume(PathBuf),
    #[error("{0}: a resumed run keeps its own config. Leave the flag out, or start a new run")]
    OtherConfig(String),
    #[error(
        "{} is not what the run was started with (inputs.json in its folder has the SHA-256): put back what was there, or \
         start a new run",
        .0.display()
    )]
    OtherInput(PathBuf),
    #[error(
        "{} is gone, which has the SHA-256 of what the run was started with: put it back, or start a new run", .0.display()
    )]
    NoInputs(PathBuf),
    #[error("the run in {} is in use by process {pid}: stop that one first", root.display())]
    InUse { root: PathBuf, pid: String },
    #[error("{}: {cause}", path.display())]
    Broken { path: PathBuf, cause: String },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{doing}: {cause}")]
    Failed { doing: &'static str, cause: String },
    #[error(
        "{sampled} tokens were sampled, but {booked} are accounted for: the run stops rather than train on a wrong account"
    )]
    Unbalanced { sampled: u64, booked: u64 },
    #[error("every trial failed by broken machinery, the first like this: {0}")]
    AllInvalid(String),
    #[error(
        "none of {graded} graded trials has a token to train on, and so it was for {versions} policy versions: {buckets}. \
         `lego capture show` says of each call why it is not trainable"
    )]
    NothingToTrain { versions: u32, graded: usize, buckets: String },
    #[error("stopped")]
    Stopped,
    #[error("{0}")]
    Config(#[from] ConfigError),
}

impl RunError {
    /// When a run that ended so can be resumed; `None`: its own config would have to be another.
    pub const fn resumes(&self) -> Option<&'static str> {
        match self {
            Self::Stopped => Some(""),
            Self::AllInvalid(_) | Self::NothingToTrain { .. } => None,
            _ => Some(" once what ended it is gone"),
        }
    }

    /// What was being done when `error` came, in its own words.
    pub fn because<E: std::fmt::Display>(doing: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::Failed { doing, cause: error.to_string() }
    }

    /// An error of a room below with all its causes, and what was being done.
    pub fn failed(doing: &'static str) -> impl FnOnce(anyhow::Error) -> Self {
        move |error| Self::Failed { doing, cause: causes(&error) }
    }
}

/// An error with its causes; one that the text before it already quotes is not repeated.
#[must_use]
pub fn causes(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}
