//! What is wrong with a config file, and what to do about it.

use std::path::PathBuf;

/// Bad configuration. Each message names file, key path, value and remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{file}: cannot read this config file: {cause}. Check the path and its permissions.", file = file.display())]
    Read { file: PathBuf, cause: String },
    /// It is not JSON or TOML.
    #[error("{file}: {cause}. Correct the file.", file = file.display())]
    Syntax { file: PathBuf, cause: String },
    /// A key that does not exist.
    #[error("{file}: {key}: unknown key. {remedy}")]
    UnknownKey { file: String, key: String, remedy: String },
    /// A value of the wrong type, or one that cannot be.
    #[error("{file}: {key} = {value}: {problem}. {remedy}")]
    Value { file: String, key: String, value: String, problem: String, remedy: String },
    /// `${VAR}` or an `_env` key names a variable that is not set.
    #[error("{file}: {key}: environment variable {variable} is not set. Set it, or take it out of {key}.")]
    MissingVariable { file: String, key: String, variable: String },
    /// A value whose feature does not exist yet.
    #[error("{file}: {key} = {value}: not there yet: {problem}. {remedy}")]
    NotThereYet { file: String, key: String, value: String, problem: String, remedy: String },
    /// Several of the above.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Several(Vec<ConfigError>),
}
