//! What can go wrong with a checkpoint or a request to the model.

use std::path::PathBuf;

/// Errors of the `model` room. Each names the file, tensor or argument at fault and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is no model folder: it has no config.json{}", within(.inside))]
    NotAModel {
        path: PathBuf,
        /// Model folders inside of it, oldest checkpoint first.
        inside: Vec<PathBuf>,
    },
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: std::io::Error },
    #[error("{path} is not valid JSON: {source}")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{path}: key `{key}` is missing; a Qwen3 checkpoint's config.json has it")]
    MissingKey { path: PathBuf, key: String },
    #[error("{path}: key `{key}` is {found}, expected {expected}")]
    BadKey { path: PathBuf, key: String, found: String, expected: String },
    #[error(
        "{path}: `{key}` = {found} changes the model's math in a way that lego does not implement (supported: {supported})"
    )]
    Unsupported { path: PathBuf, key: String, found: String, supported: String },
    #[error("{path} is not a readable safetensors file: {reason}; download or copy it again")]
    Safetensors { path: PathBuf, reason: String },
    #[error("{path}: tensor `{tensor}` is missing; expected shape {expected:?}")]
    MissingTensor { path: PathBuf, tensor: String, expected: Vec<usize> },
    #[error("{path}: tensor `{tensor}` has shape {found:?}, config.json asks for {expected:?}")]
    Shape { path: PathBuf, tensor: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("{path}: tensor `{tensor}` has dtype {found}; supported are F32, BF16 and F16")]
    Dtype { path: PathBuf, tensor: String, found: String },
    #[error("{path}: tensor `{tensor}` is not part of the model that config.json describes")]
    UnknownTensor { path: PathBuf, tensor: String },
    #[error("{path}: tensor `{tensor}` holds a value that is not finite at index {index}")]
    NotFinite { path: PathBuf, tensor: String, index: usize },
    #[error("{what} take {} MiB, which this machine does not give; {remedy}", bytes >> 20)]
    Memory { what: String, bytes: u128, remedy: String },
    #[error("{found} parameters given, the model has {expected}")]
    ParameterCount { found: usize, expected: usize },
    #[error("token id {token} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange { token: u32, vocab_size: usize },
    #[error("position {position} is at or beyond max_position_embeddings = {limit}")]
    PositionOutOfRange { position: usize, limit: usize },
    #[error("a sequence is empty; at least one token is needed")]
    EmptySequence,
    #[error("{what}: {found} entries given, {expected} expected")]
    Length { what: &'static str, found: usize, expected: usize },
    #[error("temperature {0} is not a positive finite number")]
    Temperature(f32),
    #[error("slot {slot} does not exist; the cache has {slots} slots")]
    Slot { slot: usize, slots: usize },
    #[error("slot {slot} holds {held} tokens, but position {position} was given; rows must continue a slot")]
    Position { slot: usize, held: usize, position: usize },
    #[error("slot {slot} is full: the cache holds {capacity} tokens per slot")]
    CacheFull { slot: usize, capacity: usize },
}

fn within(inside: &[PathBuf]) -> String {
    let folders: Vec<String> = inside.iter().map(|folder| folder.display().to_string()).collect();
    match folders.as_slice() {
        [] => "; give a folder in Hugging Face form, such as a run's checkpoints/step_N".to_owned(),
        folders => format!(". It holds these: {}", folders.join(", ")),
    }
}
