//! The backend trait and the plain data that goes through it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::record::ExitEvidence;

/// Limits of one sandbox. `None`: no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    pub memory_bytes: Option<u64>,
    pub max_processes: Option<u64>,
    /// Bytes that the sandbox may write outside its workspace (tmpfs size).
    pub tmp_bytes: Option<u64>,
    /// Bytes that the sandbox may add to each writable mount.
    pub workspace_bytes: Option<u64>,
    /// CPU seconds of a single process.
    pub cpu_seconds: Option<u64>,
}

/// A host path shown inside the sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    pub host: PathBuf,
    /// Absolute path inside.
    pub inside: PathBuf,
    pub is_writable: bool,
}

/// What a sandbox is made of. The root is the backend's read-only system allow-list plus these.
#[derive(Debug, Clone, Default)]
pub struct Spec {
    pub mounts: Vec<Mount>,
    /// Port on 127.0.0.1 inside that is bound and handed out by [`Sandbox::take_listener`].
    pub listen_port: Option<u16>,
    pub limits: Limits,
}

/// A program to run inside.
#[derive(Debug, Clone)]
pub struct Exec {
    pub argv: Vec<OsString>,
    /// The whole environment: nothing of the host's is added.
    pub env: Vec<(OsString, OsString)>,
    pub cwd: PathBuf,
    pub stdin: Vec<u8>,
    /// Bytes of stdout and of stderr to keep; the rest is read and counted.
    pub max_output_bytes: usize,
    /// Wall time; when it passes, every process of the sandbox is killed.
    pub timeout: Duration,
}

/// How the program ended.
#[derive(Debug, Clone, Default)]
pub struct Exit {
    pub evidence: ExitEvidence,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// Bytes of output beyond `max_output_bytes`, thrown away.
    pub discarded_output_bytes: u64,
    pub wall: Duration,
}

/// How a limit is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Enforcement {
    Cgroup,
    Rlimit,
    /// A watcher polls: soft.
    Watched,
    None,
}

/// How a limit on files is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskLimit {
    /// By the kernel: the size of a file system.
    Exact,
    /// A watcher looks at the size, and kills. Every single file is held exactly.
    Polled,
}

/// What a backend can enforce on this machine; stored in trial records and the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// `embedded`, `weak`, …
    pub backend: String,
    /// User mapping or other mode, for people.
    pub mode: String,
    pub memory: Enforcement,
    pub processes: Enforcement,
    /// Of writable mounts, such as the workspace.
    pub disk: DiskLimit,
    /// Of `/tmp` and other places that can be written.
    pub tmp: DiskLimit,
    /// False for the weak sandbox: shown and stored in the report.
    pub is_isolated: bool,
}

/// A sandbox that could not be made or used. The message names what forbids it and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// This machine cannot make such a sandbox.
    #[error("cannot make a sandbox: {cause}. {remedy}")]
    Unsupported { cause: String, remedy: String },
    /// Setting up failed at this step.
    #[error("sandbox set-up failed at {step}: {cause}")]
    Setup { step: String, cause: String },
    /// The sandbox's init is gone.
    #[error("the sandbox was lost: {0}")]
    Lost(String),
    /// The program could not be started.
    #[error("cannot run {program}: {cause}")]
    Exec { program: String, cause: String },
    #[error("sandbox i/o: {0}")]
    Io(#[from] std::io::Error),
}

/// Makes sandboxes.
#[async_trait]
pub trait Backend: Send + Sync {
    fn capabilities(&self) -> &Capabilities;

    /// Makes a sandbox; returns once its init is up and its mounts and listener exist.
    ///
    /// # Errors
    /// [`SandboxError`] when it cannot be made; nothing is left behind.
    async fn create(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError>;
}

/// One running sandbox. Dropping it ends every process in it.
#[async_trait]
pub trait Sandbox: Send {
    /// The listener bound inside at [`Spec::listen_port`], usable from the host; once.
    fn take_listener(&mut self) -> Option<tokio::net::TcpListener>;

    /// Runs a program to its end. Cancelling kills what it started.
    ///
    /// # Errors
    /// [`SandboxError::Lost`] if the sandbox broke, [`SandboxError::Exec`] if the program cannot start.
    async fn exec(&mut self, exec: Exec) -> Result<Exit, SandboxError>;

    /// Ends every process but the init; the sandbox stays usable.
    async fn kill_all(&mut self) -> Result<(), SandboxError>;

    /// Ends it and waits until nothing of it is left.
    async fn stop(self: Box<Self>) -> Result<(), SandboxError>;
}
