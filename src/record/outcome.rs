//! How a trial ended, and the evidence for it. [`ExitEvidence`] is observed; [`Outcome`] is concluded.

use serde::{Deserialize, Serialize};

/// What a sandbox backend observed when a process ended. Facts only, no verdict.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitEvidence {
    /// Exit code, if the process exited by itself.
    pub code: Option<i32>,
    /// Signal that ended it.
    pub signal: Option<i32>,
    /// lego ended it because its time was up.
    pub timed_out: bool,
    /// Out-of-memory kills under the sandbox's own limit while it ran. `None`: nobody counts them here.
    pub oom_kills: Option<u64>,
    /// It had added more to its writable mounts than it may; lego ended it, or it came to its end just then.
    #[serde(default)]
    pub is_over_disk_limit: bool,
    /// lego ended it for that: it had added too much while it ran.
    #[serde(default)]
    pub is_killed_for_disk: bool,
    /// The host's own out-of-memory count grew while it ran.
    pub host_oom: bool,
    /// Peak memory of the sandbox, bytes, where known.
    pub memory_peak_bytes: Option<u64>,
    /// CPU time, µs.
    pub cpu_us: u64,
}

/// Why a trial stopped: the policy's own result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Termination {
    /// The harness exited with code 0.
    Completed,
    /// The harness exited with another code.
    NonZeroExit,
    /// `long_tail_timeout_sec` passed.
    AgentTimeout,
    /// `max_turns` model calls were made.
    MaxTurns,
    /// The trial's own memory limit was reached.
    AgentOom,
}

/// Machinery that failed, with proof. Never the policy's doing, never a reward of 0.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", content = "detail")]
pub enum InfraFailure {
    /// The sandbox could not be made.
    SandboxStart(String),
    /// The sandbox broke while the trial ran.
    SandboxLost(String),
    /// The host ran out of memory.
    HostOom,
    /// The harness ended, and the policy had neither answered a call nor was answering one: nothing of its doing.
    Harness(String),
    /// The upstream failed this session's calls.
    Engine(String),
    /// The verifier could not run.
    Verifier(String),
    /// The task's files are missing or broken.
    Task(String),
    /// The run was stopped.
    Shutdown,
}

/// How a trial ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub enum Outcome {
    /// Graded: takes part in its group.
    Valid { termination: Termination },
    /// Filtered: leaves its group.
    Invalid { failure: InfraFailure },
}
