//! `events.jsonl`: what happened, one typed line each.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};

use super::TelemetryError;
use crate::record::{InfraFailure, Outcome, PolicyVersion, TaskId, TrialId};

/// Something that happened in a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The process started to work on the run.
    RunStarted { version: String, seed: u64, incarnation: u32, resumed_at_step: Option<u64> },
    /// A trial ended.
    TrialFinished {
        trial_id: TrialId,
        task_id: TaskId,
        policy_version: PolicyVersion,
        outcome: Outcome,
        reward: Option<f64>,
        turns: u64,
        sampled_tokens: u64,
        seconds: f64,
    },
    /// A trial left its group: machinery failed, with proof.
    InvalidTrajectory { trial_id: TrialId, task_id: TaskId, failure: InfraFailure },
    /// An optimizer step was taken. Without a token to train on it has no loss.
    Step { step: u64, policy_version: PolicyVersion, loss: Option<f64>, solve_rate: Option<f64> },
    /// New weights answer new requests.
    WeightsPublished { policy_version: PolicyVersion, step: u64 },
    /// A held-out evaluation ended.
    Evaluation {
        step: u64,
        policy_version: PolicyVersion,
        tasks: u64,
        samples: u64,
        solve_rate: Option<f64>,
        greedy_solve_rate: Option<f64>,
        pass_at_k: Option<f64>,
    },
    /// A checkpoint is complete.
    CheckpointSaved { step: u64, path: PathBuf },
    /// Something to look at that did not stop the run.
    Warning { message: String },
    /// Someone asked the run to stop.
    Interrupted { step: u64 },
    /// The run came to its end.
    RunFinished { step: u64, seconds: f64 },
    /// The run stopped with an error.
    RunFailed { step: u64, error: String },
}

/// A line: when, and what.
#[derive(Serialize)]
struct Line<'a> {
    at: &'a str,
    #[serde(flatten)]
    event: &'a Event,
}

/// Appends to `events.jsonl`.
#[derive(Debug)]
pub struct EventLog {
    path: PathBuf,
    file: File,
}

impl EventLog {
    /// Opens the file to append to it. A last line that a crash tore is cut off.
    ///
    /// # Errors
    /// [`TelemetryError::Io`].
    pub fn open(path: &Path) -> Result<Self, TelemetryError> {
        let open = || {
            let mut file = File::options().create(true).read(true).append(true).open(path)?;
            let mut length = file.seek(SeekFrom::End(0))?;
            let mut byte = [0];
            while length > 0 {
                file.seek(SeekFrom::Start(length - 1))?;
                file.read_exact(&mut byte)?;
                if byte == *b"\n" {
                    break;
                }
                length -= 1;
            }
            file.set_len(length)?;
            Ok(file)
        };
        let file = open().map_err(TelemetryError::io(path))?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Appends one event, with the time of now (UTC).
    ///
    /// # Errors
    /// [`TelemetryError::Io`].
    pub fn write(&mut self, event: &Event) -> Result<(), TelemetryError> {
        let mut at = String::new();
        let time = SystemTime.format_time(&mut Writer::new(&mut at));
        let line = time
            .map_err(std::io::Error::other)
            .and_then(|()| Ok(serde_json::to_vec(&Line { at: &at, event })?));
        let mut line = line.map_err(TelemetryError::io(&self.path))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(TelemetryError::io(&self.path))
    }
}
