//! Checkpoint folders: a Hugging Face model folder with what training needs to go on.
//!
//! | file | what it is |
//! |---|---|
//! | `config.json`, `model.safetensors`, tokenizer files | the policy, as any HF tool loads it |
//! | `optimizer.safetensors` | AdamW's moments, one flat tensor each |
//! | `trainer_state.json` | update count, and the caller's own state (seeds, dispatcher) |
//! | `checkpoint.json` | size and SHA-256 of every other file |

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{Learner, TrainError};
use crate::model::Model;

const MANIFEST: &str = "checkpoint.json";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "trainer_state.json";
const FORMAT_VERSION: u32 = 1;

/// The checkpoints of a run: `root/step_N`.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    root: PathBuf,
    keep_last: usize,
}

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format_version: u32,
    files: BTreeMap<String, FileEntry>,
}

#[derive(Debug, Serialize, Deserialize, PartialEq)]
struct FileEntry {
    bytes: u64,
    sha256: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct State {
    optimizer_steps: u64,
    run: Value,
}

impl Checkpoints {
    /// Checkpoints under `root`, of which the last `keep_last` are kept; 0: all.
    #[must_use]
    pub fn new(root: PathBuf, keep_last: usize) -> Self {
        Self { root, keep_last }
    }

    /// Writes `step_<step>` with the learner's model and optimizer, the caller's `run` state, and copies of
    /// `companions` (tokenizer, chat template, …). Everything is on disk before the folder gets its name.
    /// Then older checkpoints beyond `keep_last` go. One of the same step that is there is complete, and stays.
    ///
    /// # Errors
    /// [`TrainError::Write`] with the path, as on a full disk; the earlier checkpoints stay.
    pub fn save(
        &self,
        step: u64,
        learner: &Learner,
        companions: &[PathBuf],
        run: &Value,
    ) -> Result<PathBuf, TrainError> {
        let path = self.root.join(format!("step_{step}"));
        if path.exists() {
            return Ok(path);
        }
        let partial = self.root.join(format!(".step_{step}.partial"));
        remove_if_present(&partial)?;
        fs::create_dir_all(&partial).map_err(|source| write_error(&partial, source))?;
        let result = fill(&partial, learner, companions, run).and_then(|()| {
            fs::rename(&partial, &path).map_err(|source| write_error(&path, source))?;
            sync(&self.root)
        });
        if let Err(error) = result {
            // The first error is the one to report.
            let _ = fs::remove_dir_all(&partial);
            return Err(error);
        }
        if self.keep_last == 0 {
            return Ok(path);
        }
        let steps = self.steps()?;
        for old in &steps[..steps.len().saturating_sub(self.keep_last)] {
            remove_if_present(&self.root.join(format!("step_{old}")))?;
        }
        Ok(path)
    }

    /// Steps that have a checkpoint, ascending.
    ///
    /// # Errors
    /// A folder that cannot be listed.
    pub fn steps(&self) -> Result<Vec<u64>, TrainError> {
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(read_error(&self.root, source)),
        };
        let mut steps = Vec::new();
        for entry in entries {
            let name = entry.map_err(|source| read_error(&self.root, source))?.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix("step_"));
            steps.extend(number.and_then(|number| number.parse::<u64>().ok()));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// The folder of the last checkpoint.
    ///
    /// # Errors
    /// As [`Checkpoints::steps`].
    pub fn latest(&self) -> Result<Option<PathBuf>, TrainError> {
        Ok(self.steps()?.last().map(|step| self.root.join(format!("step_{step}"))))
    }
}

impl Learner {
    /// Takes model, optimizer and update count from the checkpoint `dir`, and gives back the state that was
    /// stored with it. The reference policy stays the one of [`Learner::new`].
    ///
    /// # Errors
    /// [`TrainError::BrokenCheckpoint`] names the file that is missing or not what was written; a checkpoint of
    /// another model. The learner is unchanged then.
    pub fn restore(&mut self, dir: &Path) -> Result<Value, TrainError> {
        verify(dir)?;
        let model = Model::load(dir)?;
        if model.parameters().tensors() != self.model.parameters().tensors() {
            return Err(broken(&dir.join("config.json"), "it is of a model with other shapes"));
        }
        let path = dir.join(OPTIMIZER);
        let bytes = fs::read(&path).map_err(|source| read_error(&path, source))?;
        let tensors = safetensors::SafeTensors::deserialize(&bytes)
            .map_err(|error| broken(&path, error.to_string()))?;
        let moment = |name: &str| {
            let tensor = tensors.tensor(name).map_err(|error| broken(&path, error.to_string()))?;
            let (values, rest) = tensor.data().as_chunks::<4>();
            let is_fitting = tensor.dtype() == safetensors::Dtype::F32
                && rest.is_empty()
                && values.len() == model.parameters().len();
            if !is_fitting {
                return Err(broken(&path, format!("tensor {name} does not fit the model")));
            }
            Ok(values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<_>>())
        };
        let (first, second) = (moment("exp_avg")?, moment("exp_avg_sq")?);
        let path = dir.join(STATE);
        let bytes = fs::read(&path).map_err(|source| read_error(&path, source))?;
        let state: State =
            serde_json::from_slice(&bytes).map_err(|error| broken(&path, error.to_string()))?;
        self.model = model;
        self.optimizer.first_moment = first;
        self.optimizer.second_moment = second;
        self.optimizer.steps = state.optimizer_steps;
        Ok(state.run)
    }
}

/// Writes all files of a checkpoint into `dir` and syncs them.
fn fill(dir: &Path, learner: &Learner, companions: &[PathBuf], run: &Value) -> Result<(), TrainError> {
    learner.model.save(dir)?;
    let optimizer = &learner.optimizer;
    let moments =
        [("exp_avg", le_bytes(&optimizer.first_moment)), ("exp_avg_sq", le_bytes(&optimizer.second_moment))];
    let path = dir.join(OPTIMIZER);
    let views = moments
        .iter()
        .map(|(name, bytes)| {
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![bytes.len() / 4], bytes)
                .map(|view| (*name, view))
        })
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| TrainError::File { path: path.clone(), message: error.to_string() })?;
    let bytes = safetensors::serialize(views, None)
        .map_err(|error| TrainError::File { path: path.clone(), message: error.to_string() })?;
    write(&path, &bytes)?;
    let state = State { optimizer_steps: optimizer.steps, run: run.clone() };
    write_json(&dir.join(STATE), &state)?;
    for companion in companions {
        let Some(name) = companion.file_name() else { continue };
        let bytes = fs::read(companion).map_err(|source| read_error(companion, source))?;
        write(&dir.join(name), &bytes)?;
    }
    let mut files = BTreeMap::new();
    let entries = fs::read_dir(dir).map_err(|source| read_error(dir, source))?;
    for entry in entries {
        let entry = entry.map_err(|source| read_error(dir, source))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        sync(&entry.path())?;
        files.insert(name, describe(&entry.path())?);
    }
    let path = dir.join(MANIFEST);
    write_json(&path, &Manifest { format_version: FORMAT_VERSION, files })?;
    sync(&path)?;
    sync(dir)
}

/// Checks every file of `dir` against its manifest.
fn verify(dir: &Path) -> Result<(), TrainError> {
    let path = dir.join(MANIFEST);
    let bytes = fs::read(&path).map_err(|source| broken(&path, source.to_string()))?;
    let manifest: Manifest =
        serde_json::from_slice(&bytes).map_err(|error| broken(&path, error.to_string()))?;
    if manifest.format_version != FORMAT_VERSION {
        let found = manifest.format_version;
        return Err(broken(&path, format!("format {found}, this lego reads {FORMAT_VERSION}")));
    }
    for name in [OPTIMIZER, STATE, "model.safetensors", "config.json"] {
        if !manifest.files.contains_key(name) {
            return Err(broken(&path, format!("it does not list {name}")));
        }
    }
    for (name, expected) in &manifest.files {
        let path = dir.join(name);
        let found = describe(&path).map_err(|error| broken(&path, error.to_string()))?;
        if found.bytes != expected.bytes {
            let reason = format!("{} bytes, {} were written", found.bytes, expected.bytes);
            return Err(broken(&path, reason));
        }
        if found != *expected {
            return Err(broken(&path, "its SHA-256 is not that of what was written"));
        }
    }
    Ok(())
}

fn describe(path: &Path) -> Result<FileEntry, TrainError> {
    let bytes = fs::read(path).map_err(|source| read_error(path, source))?;
    let sha256 = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(FileEntry { bytes: bytes.len() as u64, sha256 })
}

fn le_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), TrainError> {
    let mut bytes = serde_json::to_vec_pretty(value)
        .map_err(|error| TrainError::File { path: path.to_owned(), message: error.to_string() })?;
    bytes.push(b'\n');
    write(path, &bytes)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    fs::write(path, bytes).map_err(|source| write_error(path, source))
}

/// Brings a file or folder to disk.
fn sync(path: &Path) -> Result<(), TrainError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(|source| write_error(path, source))
}

fn remove_if_present(dir: &Path) -> Result<(), TrainError> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(write_error(dir, error)),
        _ => Ok(()),
    }
}

fn write_error(path: &Path, source: io::Error) -> TrainError {
    TrainError::Write { path: path.to_owned(), source }
}

fn read_error(path: &Path, source: io::Error) -> TrainError {
    TrainError::Read { path: path.to_owned(), source }
}

fn broken(path: &Path, reason: impl Into<String>) -> TrainError {
    TrainError::BrokenCheckpoint { path: path.to_owned(), reason: reason.into() }
}
