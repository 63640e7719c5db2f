//! `sandbox.toml`.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The sandboxes of trials and verifiers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Sandbox {
    /// Root file system: `host` (this machine's system folders, read-only) or a container image.
    /// `LEGO_RL_SANDBOX_IMAGE` overrides it.
    pub image: String,
    /// Fetch an image's files when they are first read.
    pub lazy_pull: bool,
    /// Most trials at once.
    pub max_concurrent: usize,
    /// What a sandbox can reach.
    pub network_policy: NetworkPolicy,
    /// Where the verifier's sandbox shows the hidden tests. The agent's sandbox never has them.
    pub hidden_test_mount: PathBuf,
    /// Leave trials out of training whose machinery provably failed.
    pub termination_aware_filter: bool,
    /// What makes the sandboxes. `auto` is the embedded one, or an error that says why this machine forbids it.
    pub backend: SandboxBackend,
    /// Memory limit of one sandbox, in MiB: 32 or more.
    pub memory_mb: u64,
    /// Most processes and threads in one sandbox.
    pub max_processes: u64,
    /// Size of `/tmp` and other writable places outside the workspace, in MiB.
    pub tmp_mb: u64,
    /// What a trial may add to its workspace, in MiB. The workspace is looked at every quarter of a second, a very large one every two; a trial over
    /// the limit is killed, and graded as it stands.
    pub workspace_mb: u64,
    /// CPU time of a single process, in seconds.
    pub cpu_seconds: u64,
    /// Wall time of one verifier run, in seconds.
    pub verify_timeout_sec: u64,
    /// Bytes of the harness's output that are kept.
    pub max_output_bytes: usize,
    /// A trial that runs out of its own memory limit again after one retry.
    pub agent_oom: AgentOom,
    /// Defences against reward hacking.
    pub defense: Defense,
    /// The image cache.
    pub cache: Cache,
}

impl Default for Sandbox {
    fn default() -> Self {
        Self {
            image: "host".to_owned(),
            lazy_pull: false,
            max_concurrent: 32,
            network_policy: NetworkPolicy::Restricted,
            hidden_test_mount: PathBuf::from("/opt/hidden_tests"),
            termination_aware_filter: true,
            backend: SandboxBackend::Auto,
            memory_mb: 512,
            max_processes: 64,
            tmp_mb: 64,
            workspace_mb: 1024,
            cpu_seconds: 600,
            verify_timeout_sec: 60,
            max_output_bytes: 1 << 20,
            agent_oom: AgentOom::Grade,
            defense: Defense::default(),
            cache: Cache::default(),
        }
    }
}

/// What a sandbox can reach.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NetworkPolicy {
    /// The session's model API, nothing else.
    #[default]
    Restricted,
    /// The session's model API and named hosts.
    Allowlist,
    /// Everything the host reaches.
    Open,
}

/// What makes the sandboxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxBackend {
    /// The embedded one; an error says what forbids it.
    #[default]
    Auto,
    /// lego's own, with Linux namespaces; no daemon.
    Embedded,
    /// Landlock, seccomp and resource limits only: not isolated. Needs `--weak-sandbox` too.
    Weak,
    /// A Docker daemon.
    Docker,
    /// A Kubernetes cluster.
    Kubernetes,
}

/// What becomes of a trial that runs out of its own memory limit twice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AgentOom {
    /// It is graded as it stands.
    #[default]
    Grade,
    /// It keeps its place in its group, but its tokens are not trained on.
    Mask,
}

/// Defences against reward hacking.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Defense {
    /// No way out of the sandbox but the session's model API.
    pub block_outbound: bool,
    /// Hidden tests exist only in the verifier's sandbox.
    pub mask_test_files: bool,
    /// System folders are read-only: `true`, or a list of folders that must be.
    pub readonly_system_paths: ReadonlyPaths,
}

impl Default for Defense {
    fn default() -> Self {
        Self { block_outbound: true, mask_test_files: true, readonly_system_paths: ReadonlyPaths::All(true) }
    }
}

/// Which system folders are read-only.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ReadonlyPaths {
    /// All of them, or (refused) none.
    All(bool),
    /// These.
    Listed(Vec<PathBuf>),
}

/// The image cache.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Cache {
    /// Folder of cached images.
    pub image_cache_dir: PathBuf,
    /// Hours after its last use that an image is kept.
    pub cache_ttl_hours: u64,
}

impl Default for Cache {
    fn default() -> Self {
        Self { image_cache_dir: PathBuf::from("./.lego-cache/images"), cache_ttl_hours: 72 }
    }
}
