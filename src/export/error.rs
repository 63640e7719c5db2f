//! Why there is no export.

use std::io;
use std::path::{Path, PathBuf};

use crate::capture::CaptureError;
use crate::loss::LossError;
use crate::record::TrialId;
use crate::telemetry::BooksError;
use crate::trajectory::Unbalanced;

/// Why there is no export. Nothing is at the path that was not there before.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Books(#[from] BooksError),
    #[error(
        "{} has the captures of no run, so that rewards, episodes and groups are not known, and {format} needs them: name \
         a run's folder, or take --format calls, openai, sharegpt or atif",
        dir.display()
    )]
    NoRun { dir: PathBuf, format: &'static str },
    #[error(
        "trial {trial}: nothing says which trials it shares a baseline with: its result.json has no group_id, and its id \
         is not of the form v<version>-g<group>-<member>. --format calls, openai, sharegpt and atif need no groups"
    )]
    NoGroup { trial: TrialId },
    #[error(
        "trials {first} and {second} are of one group, and of different {what}: their rewards share no baseline"
    )]
    MixedGroup { first: TrialId, second: TrialId, what: &'static str },
    #[error(
        "training.advantage_eps = {eps} in the run's config.resolved.toml is no estimator's: it is 1e-4 or 1e-6"
    )]
    Estimator { eps: f64 },
    #[error("{} is there: name another path, or pass --force to replace it", path.display())]
    Exists { path: PathBuf },
    #[error(
        "{} is there, and is no export of lego's (it has no lego-export.json): name another path",
        path.display()
    )]
    NotAnExport { path: PathBuf },
    #[error("{} is a {is}, and this export is a {wanted}: name another path", path.display())]
    OtherKind { path: PathBuf, is: &'static str, wanted: &'static str },
    #[error("{} is among {of} own files: name a path outside {}", path.display(), root.display())]
    Reserved { path: PathBuf, of: &'static str, root: PathBuf },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Samples(#[from] Unbalanced),
    #[error("rewards of a group: {0}")]
    Loss(#[from] LossError),
    #[error("{what} do not add up: {all} in all, {in_buckets} told of. Nothing was written")]
    Unbalanced { what: &'static str, all: u64, in_buckets: u64 },
}

impl ExportError {
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}
