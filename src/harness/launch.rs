//! What starting a harness takes.

use std::time::Duration;

use crate::sandbox::{Exec, Mount};

/// Port on 127.0.0.1 inside a sandbox where the session's listener answers.
pub const LISTEN_PORT: u16 = crate::config::SANDBOX_PORT;
/// Base URL of the policy inside a sandbox, in the form OpenAI clients take.
pub const BASE_URL: &str = "http://127.0.0.1:18080/v1";
/// The key that harnesses hold: the listener itself names the session.
pub const PLACEHOLDER_KEY: &str = "placeholder";
/// Where the task's workspace is inside a sandbox.
pub const WORKSPACE: &str = "/workspace";

/// What a harness is told about its trial.
#[derive(Debug, Clone)]
pub struct TrialInput<'a> {
    /// The task's `problem_statement`.
    pub statement: &'a str,
    /// Name of the model to ask for.
    pub model: &'a str,
    /// Wall time after which the harness is killed.
    pub timeout: Duration,
    /// Bytes of its stdout and of its stderr to keep.
    pub max_output_bytes: usize,
}

/// How to start a harness: what it needs in the sandbox, and the program to run there.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Beside the workspace at [`WORKSPACE`], which the trial mounts.
    pub mounts: Vec<Mount>,
    pub exec: Exec,
}

/// One kind of harness.
pub trait Harness: Send + Sync {
    /// Name in configs and records.
    fn name(&self) -> &'static str;

    /// Version stored in records.
    fn version(&self) -> String;

    /// How to start it for one trial.
    fn launch(&self, trial: &TrialInput<'_>) -> Launch;

    /// True if its output says that it ended because its turns were used up. What it says decides no reward.
    fn used_up_turns(&self, _stdout: &[u8]) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_url_is_the_listeners() {
        assert_eq!(BASE_URL, format!("http://127.0.0.1:{LISTEN_PORT}/v1"));
    }
}
