//! What can go wrong while training.

use std::path::PathBuf;

use crate::loss::LossError;
use crate::model::ModelError;
use crate::record::EpisodeId;
use crate::text::TextError;

/// Errors of the `train` room. Each names the thing at fault and what to do.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Text(#[from] TextError),
    #[error(transparent)]
    Loss(#[from] LossError),
    #[error("episode {}: {source}", episode.0)]
    Episode { episode: EpisodeId, source: LossError },
    #[error(
        "episode {} has tokens sampled at several temperatures in one row; the trainer needs one temperature a row",
        .0.0
    )]
    MixedTemperature(EpisodeId),
    #[error("episode {} is in the batch twice", .0.0)]
    DuplicateEpisode(EpisodeId),
    #[error("stopped")]
    Stopped,
    #[error("the batch has no episode")]
    EmptyBatch,
    #[error(
        "the gradient's norm is {norm} at optimizer step {step}: nothing was updated; lower learning_rate, or look \
         at the captured log-probs of this batch"
    )]
    GradientNotFinite { norm: f64, step: u64 },
    #[error("option {name} is {value}: {remedy}")]
    Option { name: &'static str, value: String, remedy: &'static str },
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: std::io::Error },
    #[error(
        "checkpoint file {path} is broken: {reason}; remove its folder to resume from an earlier checkpoint"
    )]
    BrokenCheckpoint { path: PathBuf, reason: String },
    #[error("{path}, line {line}: {message}")]
    Conversation { path: PathBuf, line: usize, message: String },
    #[error("{path}: {message}")]
    File { path: PathBuf, message: String },
}
