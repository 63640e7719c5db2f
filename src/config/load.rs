//! The three files together.

use super::{ProxyFile, SandboxFile, TrainFile};

/// Effective values of the three files.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Config {
    pub proxy: ProxyFile,
    pub sandbox: SandboxFile,
    pub train: TrainFile,
}
