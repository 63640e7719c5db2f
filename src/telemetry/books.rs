//! What a run's own files say of its trials: `events.jsonl` (which ended how, and which steps were taken),
//! `trials/<trial_id>/result.json` (what for, and which attempt was the last), `reports/report.json`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::Event;
use crate::config::{AgentOom, Config, Environment, Samples};
use crate::record::{Disposition, GroupId, Outcome, PolicyVersion, SessionId, TaskId, Termination, TrialId};

/// The files of a run cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{} cannot be read as a run's: {cause}", path.display())]
pub struct BooksError {
    path: PathBuf,
    cause: String,
}

impl BooksError {
    fn of(path: &Path, cause: impl ToString) -> Self {
        Self { path: path.to_owned(), cause: cause.to_string() }
    }
}

/// What a trainer did with its trials.
#[derive(Debug)]
pub struct RunBooks {
    root: PathBuf,
    trials: BTreeMap<TrialId, Trial>,
    reported_trained: Option<u64>,
}

#[derive(Debug)]
struct Trial {
    incarnation: u32,
    version: PolicyVersion,
    outcome: Outcome,
    sampled: u64,
    /// A step that was not lost was taken with the trials of this version.
    is_stepped: bool,
}

impl Trial {
    fn is_oom(&self) -> bool {
        self.outcome == (Outcome::Valid { termination: Termination::AgentOom })
    }
}

/// Of a trial that was stopped, or still runs.
const NOT_ENDED: &str = "its trial has not ended";

/// A line of `events.jsonl`. Those of a newer lego are passed over.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Known(Event),
    Other {
        #[serde(rename = "event")]
        _event: String,
    },
}

#[derive(Deserialize)]
struct ResultFile {
    session_id: SessionId,
    purpose: String,
    /// Those below a run of an earlier lego may lack.
    task_id: Option<TaskId>,
    group_id: Option<GroupId>,
    reward: Option<f64>,
}

/// What a run says of an attempt at a trial.
#[derive(Debug, Clone, PartialEq)]
pub struct Attempt {
    /// Which start of the run sampled it: trials of two starts share no baseline, whatever their groups are called.
    pub incarnation: u32,
    /// The policy version at which its trial began.
    pub version: PolicyVersion,
    pub task_id: Option<TaskId>,
    /// `None`: the run was made by a lego that did not write it down.
    pub group_id: Option<GroupId>,
    /// `None` for an attempt that was not graded. It is no reward of 0.
    pub reward: Option<f64>,
    pub is_evaluation: bool,
    /// Its reward counts in its group, its tokens do not train.
    pub is_masked: bool,
    /// Why it is no episode of its group; `None`: it is one.
    pub left_out: Option<&'static str>,
}

#[derive(Deserialize)]
struct ReportFile {
    tokens: Option<ReportTokens>,
}

#[derive(Deserialize)]
struct ReportTokens {
    trained: u64,
}

impl RunBooks {
    /// The books of the run whose captures lie in `captures`; `None`: they belong to no run.
    ///
    /// # Errors
    /// Its files are there, and cannot be read.
    pub fn of(captures: &Path) -> Result<Option<Self>, BooksError> {
        let captures = captures.canonicalize().map_err(|error| BooksError::of(captures, error))?;
        let Some(root) = captures.parent().filter(|root| root.join("run.json").is_file()) else {
            return Ok(None);
        };
        let mut books = Self { root: root.to_owned(), trials: BTreeMap::new(), reported_trained: None };
        books.read_events()?;
        let report = root.join("reports/report.json");
        match fs::read(&report) {
            Ok(text) => {
                let read = serde_json::from_slice::<ReportFile>(&text);
                let read = read.map_err(|error| BooksError::of(&report, error))?;
                books.reported_trained = read.tokens.map(|tokens| tokens.trained);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(BooksError::of(&report, error)),
        }
        Ok(Some(books))
    }

    fn read_events(&mut self) -> Result<(), BooksError> {
        let path = self.root.join("events.jsonl");
        let file = match fs::File::open(&path) {
            Ok(file) => BufReader::new(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(BooksError::of(&path, error)),
        };
        let mut incarnation = 0;
        // Which trials each step was taken with: those of a version, sampled by one start of the run.
        let mut steps: BTreeMap<u64, (u32, PolicyVersion)> = BTreeMap::new();
        for (number, line) in file.split(b'\n').enumerate() {
            let line = line.map_err(|error| BooksError::of(&path, error))?;
            let event = match serde_json::from_slice(&line) {
                Ok(Line::Known(event)) => event,
                Ok(Line::Other { .. }) => continue,
                // The last line is being written, or a crash tore it.
                Err(error) if error.is_eof() => continue,
                Err(error) => return Err(BooksError::of(&path, format!("line {}: {error}", number + 1))),
            };
            match event {
                Event::RunStarted { incarnation: started, resumed_at_step, .. } => {
                    incarnation = started;
                    // Steps behind the checkpoint are lost, and taken again with other trials.
                    steps.retain(|step, _| resumed_at_step.is_some_and(|kept| *step <= kept));
                }
                Event::TrialFinished {
                    trial_id, policy_version: version, outcome, sampled_tokens, ..
                } => {
                    let sampled = sampled_tokens;
                    let trial = Trial { incarnation, version, outcome, sampled, is_stepped: false };
                    self.trials.insert(trial_id, trial);
                }
                Event::Step { step, policy_version, .. } => {
                    steps.insert(step, (incarnation, policy_version));
                }
                _ => {}
            }
        }
        for trial in self.trials.values_mut() {
            trial.is_stepped = steps.values().any(|step| *step == (trial.incarnation, trial.version));
        }
        Ok(())
    }

    /// What became of the samples of a session.
    ///
    /// # Errors
    /// What the trial left cannot be read.
    pub fn verdict(&self, id: &TrialId, session: &SessionId) -> Result<Disposition, BooksError> {
        let dropped = |reason: &str| Ok(Disposition::Dropped(reason.to_owned()));
        let Some(trial) = self.trials.get(id) else {
            return dropped(NOT_ENDED);
        };
        let result = self.result(id)?;
        // An attempt that another one followed was ended by machinery, or is not held against the policy.
        if matches!(trial.outcome, Outcome::Invalid { .. }) || result.session_id != *session {
            return Ok(Disposition::InfraFailure);
        }
        if result.purpose == "evaluation" {
            return dropped("evaluation");
        }
        if trial.is_oom() && self.masks_oom()? {
            return Ok(Disposition::Masked("agent_oom".to_owned()));
        }
        if trial.is_stepped {
            Ok(Disposition::Trained)
        } else {
            dropped("no step of the run was taken with it")
        }
    }

    /// What the run says of the attempt that made this session.
    ///
    /// # Errors
    /// What the trial left cannot be read.
    pub fn attempt(&self, id: &TrialId, session: &SessionId) -> Result<Attempt, BooksError> {
        let trial = self.trials.get(id);
        let result = match self.result(id) {
            Ok(result) => Some(result),
            // It is written when its first attempt is over.
            Err(_) if trial.is_none() => None,
            Err(error) => return Err(error),
        };
        let is_evaluation = result.as_ref().is_some_and(|result| result.purpose == "evaluation");
        let is_last = result.as_ref().is_some_and(|result| result.session_id == *session);
        let reward = result.as_ref().and_then(|result| result.reward).filter(|_| is_last);
        let left_out = match trial {
            None => Some(NOT_ENDED),
            Some(trial) if matches!(trial.outcome, Outcome::Invalid { .. }) => Some("infra_failure"),
            Some(_) if !is_last => Some("another attempt followed"),
            Some(_) if is_evaluation => Some("evaluation"),
            Some(_) if reward.is_none() => Some("no reward"),
            Some(_) => None,
        };
        let is_masked = left_out.is_none() && trial.is_some_and(Trial::is_oom) && self.masks_oom()?;
        Ok(Attempt {
            incarnation: trial.map_or(0, |trial| trial.incarnation),
            version: trial.map_or_else(PolicyVersion::default, |trial| trial.version),
            task_id: result.as_ref().and_then(|result| result.task_id.clone()),
            group_id: result.as_ref().and_then(|result| result.group_id),
            reward,
            is_evaluation,
            is_masked,
            left_out,
        })
    }

    fn result(&self, id: &TrialId) -> Result<ResultFile, BooksError> {
        let path = self.root.join("trials").join(id.as_str()).join("result.json");
        let text = fs::read(&path).map_err(|error| BooksError::of(&path, error))?;
        serde_json::from_slice(&text).map_err(|error| BooksError::of(&path, error))
    }

    fn masks_oom(&self) -> Result<bool, BooksError> {
        Ok(self.config()?.sandbox.agent_oom != AgentOom::Grade)
    }

    /// The config that the run was started with.
    ///
    /// # Errors
    /// It is not there, or cannot be read.
    pub fn config(&self) -> Result<Config, BooksError> {
        let path = self.root.join("config.resolved.toml");
        Config::load_resolved(&path, Environment::from_process())
            .map_err(|error| BooksError::of(&path, error))
    }

    /// What the run trains of the calls of its trials.
    ///
    /// # Errors
    /// Its config cannot be read. (A folder without one has the samples of the defaults.)
    pub fn samples(&self) -> Result<Samples, BooksError> {
        if !self.root.join("config.resolved.toml").exists() {
            return Ok(Samples::default());
        }
        Ok(self.config()?.training.samples)
    }

    /// The run's folder.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// How many sampled tokens the trainer counted for each trial that ended.
    pub fn sampled(&self) -> impl Iterator<Item = (&TrialId, u64)> {
        self.trials.iter().map(|(id, trial)| (id, trial.sampled))
    }

    /// How many tokens the run's report says were trained.
    #[must_use]
    pub const fn reported_trained(&self) -> Option<u64> {
        self.reported_trained
    }
}
