//! Dataset lines: SWE-bench's schema plus our `split`.

use serde::{Deserialize, Serialize};

use crate::record::TaskId;

/// Which part of the dataset a task belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    Train,
    Heldout,
}

/// One task. Unknown fields are kept in `extra`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Task {
    pub instance_id: TaskId,
    pub repo: String,
    pub base_commit: String,
    pub problem_statement: String,
    /// Reference patch. Never reachable from a sandbox of the agent.
    pub patch: String,
    /// Adds the hidden tests. Never reachable from a sandbox of the agent.
    pub test_patch: String,
    #[serde(rename = "FAIL_TO_PASS")]
    pub fail_to_pass: Vec<String>,
    #[serde(rename = "PASS_TO_PASS")]
    pub pass_to_pass: Vec<String>,
    pub split: Split,
    #[serde(flatten)]
    pub extra: serde_json::Map<String, serde_json::Value>,
}
