//! What can go wrong in the store, with the file and the remedy.

use std::io;
use std::path::{Path, PathBuf};

use crate::record::SinkError;

/// An error of the capture store.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// Another writer has the folder.
    #[error("{dir} is being written by process {pid}: stop it, or give this one another capture_dir")]
    Locked {
        /// The capture folder.
        dir: PathBuf,
        /// Id of the process that has it.
        pid: String,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file holds something that is not a capture of this schema.
    #[error("{path} cannot be read as captures: {reason}")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The Parquet library failed.
    #[error("Parquet file {path}: {source}")]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The library's error.
        source: parquet::errors::ParquetError,
    },
    /// The folder does not exist.
    #[error("no captures: {dir} is not a folder (set --capture-dir to the proxy's capture_dir)")]
    NoFolder {
        /// The folder asked for.
        dir: PathBuf,
    },
    /// Object storage did not do what was asked of it.
    #[error("cannot {action} {place}: {reason}")]
    Remote {
        /// The URL, or that of an object.
        place: String,
        /// What was tried.
        action: &'static str,
        /// What happened, and what to do.
        reason: String,
        /// The object is not there.
        is_missing: bool,
    },
    /// There is nothing in object storage.
    #[error("no captures: there is nothing under {place} (the proxy's capture_dir is meant)")]
    Nothing {
        /// The URL.
        place: String,
    },
    /// A URL that cannot be used.
    #[error("this place of captures cannot be used: {reason}")]
    Url {
        /// Why, and what to do.
        reason: String,
    },
    /// The folder that goes with a URL is another's.
    #[error(
        "{dir} holds captures that go to {owner}, not to {url}: name another folder (proxy.capture_local_dir, --local-dir)"
    )]
    OthersFolder {
        /// The folder.
        dir: PathBuf,
        /// The URL that was named.
        url: String,
        /// The one that it belongs to.
        owner: String,
    },
    /// The writer was closed before.
    #[error("the capture store in {dir} is closed")]
    Closed {
        /// The capture folder.
        dir: PathBuf,
    },
}

impl CaptureError {
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    pub(super) fn parquet(path: &Path) -> impl FnOnce(parquet::errors::ParquetError) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Parquet { path, source }
    }

    pub(super) fn corrupt(path: &Path, reason: impl Into<String>) -> Self {
        Self::Corrupt { path: path.to_owned(), reason: reason.into() }
    }
}

/// The error that a waiting `append` gets for a failed write or sync.
pub(super) fn sink_error(place: &Path, error: &io::Error) -> SinkError {
    let place = place.display().to_string();
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => SinkError::Full { place },
        _ => SinkError::Io { place, reason: error.to_string() },
    }
}
