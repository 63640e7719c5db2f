//! The error of the helper's side: which step failed, with the kernel's number.

use std::io;

use serde::{Deserialize, Serialize};

/// A failed step of setting up a sandbox, as it travels to the parent.
#[derive(Debug, Clone, Serialize, Deserialize, thiserror::Error)]
#[error("{step}: {cause}")]
pub struct Failure {
    pub step: String,
    /// 0: no error of the kernel's.
    pub errno: i32,
    pub cause: String,
}

/// Names the step at which an I/O error happened.
pub trait Step<T> {
    fn step(self, step: impl Into<String>) -> Result<T, Failure>;
}

impl<T> Step<T> for io::Result<T> {
    fn step(self, step: impl Into<String>) -> Result<T, Failure> {
        self.map_err(|error| Failure {
            step: step.into(),
            errno: error.raw_os_error().unwrap_or(0),
            cause: error.to_string(),
        })
    }
}
