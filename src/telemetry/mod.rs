//! What a run says about itself: log lines, Prometheus, the run's metrics and its typed events.
//!
//! Invariants:
//! - Log lines go to stderr and, once [`log_to_file`] was called, to `train.log`; stdout belongs to commands.
//! - `metrics.parquet` is complete at every moment: it is replaced by an atomic rename, never written in place.
//!   A value that is missing is null, never 0.
//! - The same values give the same bytes of `metrics.parquet`.
//! - After a resume at step N, rows and TensorBoard points of later steps are gone: they are computed again.
//! - A line of `events.jsonl` is whole, or it is cut off when the file is next opened.

mod books;
mod catalog;
mod events;
mod logs;
mod prometheus;
mod run_metrics;
mod tensorboard;

pub use books::{Attempt, BooksError, RunBooks};
pub use catalog::{COLUMNS, Column, Kind, PROMETHEUS, Prometheus, reference_markdown};
pub use events::{Event, EventLog};
pub use logs::{LogFile, LogSink, configure, log_to_file, note, say, set_stderr_sink, start};
pub use prometheus::{PrometheusPage, install_prometheus};
pub use run_metrics::{MetricValue, RunMetrics, read_column};
pub use tensorboard::{Scalar, TensorBoard, read_scalars};

use std::path::PathBuf;

/// Telemetry that cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// A file of the run folder.
    #[error("{path}: {source}. Check that the folder exists, is writable and not full.", path = path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// A metrics file that is there cannot be read back.
    #[error("{path}: not a metrics file of this run: {cause}. Move it away to go on without it.", path = path.display())]
    Broken { path: PathBuf, cause: String },
    /// A metric that is not in the catalog.
    #[error("metric {0} is not declared in the catalog")]
    UnknownMetric(String),
    /// A step that is not later than the last.
    #[error("metrics of step {step} come after those of step {last}")]
    StepOrder { step: u64, last: u64 },
    /// A recorder or subscriber was installed before.
    #[error("{0} is already installed in this process")]
    AlreadyInstalled(&'static str),
}

impl TelemetryError {
    fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}
