//! Everything a trial needs beside the policy, wired once: proxy, capture, sandboxes, tasks.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::RunError;
use super::folder::RunFolder;
use super::policy::ServedPolicy;
use crate::capture::{self, Limits as CaptureLimits, Writer, WriterOptions};
use crate::config::{self, AgentOom, Config, HarnessType, SandboxBackend};
use crate::harness::{CommandLine, Harness, Mini};
use crate::proxy::{self, LocalTokenizers, Mode, Proxy, ProxyOptions, RouteOptions};
use crate::rollout::{TrialEnv, TrialOptions};
use crate::sandbox::{self, Backend, Choice, Limits};
use crate::task::{Dataset, TaskStore, Verifier, VerifierOptions};

/// Reward of a trial that the policy itself made invalid, with `penalize_invalid_trajectory`: below the 0
/// of an honest failure.
const INVALID_REWARD: f64 = -1.0;

/// Where a run keeps its files.
pub struct Places {
    pub captures: PathBuf,
    pub trials: PathBuf,
    pub scratch: PathBuf,
}

impl Places {
    pub fn of(folder: &RunFolder) -> Self {
        Self { captures: folder.captures(), trials: folder.trials(), scratch: folder.scratch() }
    }
}

/// The running machinery.
pub struct Machinery {
    pub env: Arc<TrialEnv>,
    pub writer: Arc<Writer>,
    pub max_concurrent: usize,
}

impl Machinery {
    /// Starts everything. The harnesses' calls go to `policy`.
    ///
    /// # Errors
    /// The first part that cannot be started, with its own remedy.
    pub async fn start(
        config: &Config,
        dataset: &Dataset,
        policy: ServedPolicy,
        tokenizers: &LocalTokenizers,
        places: Places,
        allow_weak: bool,
    ) -> Result<Self, RunError> {
        let backend = backend(config, &places, allow_weak).await?;
        // After the backend, whose programs have the limit that this process began with.
        let open_files = proxy::raise_open_files();
        if let Some(warning) = proxy::too_few_files(open_files, config.sandbox.max_concurrent) {
            tracing::warn!("{warning}");
        }
        let ServedPolicy { upstream, model_name, version, renderer, texts } = policy;
        let upstream = Arc::new(upstream);
        let routes = RouteOptions::from_config(config, Some(&upstream), &BTreeMap::new(), tokenizers)?;
        let writer = Arc::new(
            Writer::open(&places.captures, writer_options(&config.proxy))
                .map_err(RunError::because("opening the captures"))?,
        );
        report_recovery(&writer);
        let mode = Mode::Trainer { policy_model: model_name.clone() };
        let mut options = ProxyOptions::from_config(&config.proxy, mode, None);
        options.open_files = open_files;
        options.spill = Some(crate::capture::Spill::in_folder(&places.captures));
        options.local_tokenizer = tokenizers.of_proxy(config);
        options.renderer = renderer;
        let proxy = Proxy::with_routes(options, Arc::clone(&writer) as _, Some(upstream), routes);

        let store = Arc::new(TaskStore::new(dataset, &places.scratch.join("tasks")));
        let limits = limits(config);
        let verifier = Verifier::new(
            Arc::clone(&store),
            VerifierOptions {
                hidden_test_mount: config.sandbox.hidden_test_mount.clone(),
                scratch: places.scratch.join("verifier"),
                partial_credit: config.training.reward.partial_credit,
                limits: limits.clone(),
                timeout: Duration::from_secs(config.sandbox.verify_timeout_sec),
            },
        );
        let env = TrialEnv {
            backend,
            proxy,
            store,
            verifier,
            harness: harness(config)?,
            options: TrialOptions {
                timeout: config.training.r#async.long_tail_timeout(),
                max_calls: config.training.max_turns as u64,
                model_name: config.harness.llm_config_override.model.clone().unwrap_or(model_name),
                limits,
                max_output_bytes: config.sandbox.max_output_bytes,
                is_agent_oom_graded: config.sandbox.agent_oom == AgentOom::Grade,
                invalid_reward: config.training.reward.penalize_invalid_trajectory.then_some(INVALID_REWARD),
                samples: config.training.samples.clone(),
                texts,
            },
            policy_version: version,
            scratch: places.scratch,
            trials: places.trials,
        };
        Ok(Self { env: Arc::new(env), writer, max_concurrent: config.sandbox.max_concurrent })
    }

    /// Ends running calls, and returns when every capture is durable.
    pub async fn stop(&self) {
        self.env.proxy.shutdown().await;
        let closed = self.writer.close().await;
        for problem in closed.left_in_journal {
            tracing::warn!("captures stay in the journal: {problem}");
        }
    }
}

async fn backend(config: &Config, places: &Places, allow_weak: bool) -> Result<Arc<dyn Backend>, RunError> {
    let choice = match config.sandbox.backend {
        SandboxBackend::Auto => Choice::Auto,
        SandboxBackend::Embedded => Choice::Embedded,
        SandboxBackend::Weak => Choice::Weak,
        SandboxBackend::Docker | SandboxBackend::Kubernetes => {
            return Err(RunError::Failed {
                doing: "choosing a sandbox",
                cause: "sandbox.backend names one that is not there yet".to_owned(),
            });
        }
    };
    let options = sandbox::Options {
        choice,
        allow_weak,
        work_dirs: vec![places.scratch.clone()],
        ..sandbox::Options::default()
    };
    let backend = sandbox::select_with(&options).await.map_err(RunError::because("choosing a sandbox"))?;
    let found = backend.capabilities();
    tracing::info!(
        "sandbox: {} ({}), memory {:?}, processes {:?}, workspace {:?}, /tmp {:?}{}",
        found.backend,
        found.mode,
        found.memory,
        found.processes,
        found.disk,
        found.tmp,
        if found.is_isolated { "" } else { ": WEAK, not isolated" },
    );
    Ok(backend)
}

fn harness(config: &Config) -> Result<Arc<dyn Harness>, RunError> {
    if let Some(argv) = &config.harness.command {
        let given = &config.harness.llm_config_override;
        return Ok(Arc::new(CommandLine {
            name: config.harness.r#type.as_str(),
            argv: argv.clone(),
            base_url: given.base_url.clone(),
            auth_type: given.auth_type.clone(),
            env: config.harness.env.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
        }));
    }
    match config.harness.r#type {
        HarnessType::Mini => {
            let max_turns = u32::try_from(config.training.max_turns).unwrap_or(u32::MAX);
            let max_tokens = u32::try_from(config.training.max_new_tokens).ok();
            let mini = Mini::this_binary(max_turns, max_tokens)
                .map_err(RunError::because("finding lego's binary"))?;
            Ok(Arc::new(mini))
        }
        _ => Err(RunError::Failed {
            doing: "choosing a harness",
            cause: "harness.type names one that is not there yet: set it to mini, or set harness.command"
                .to_owned(),
        }),
    }
}

fn limits(config: &Config) -> Limits {
    Limits {
        memory_bytes: Some(config.sandbox.memory_mb << 20),
        max_processes: Some(config.sandbox.max_processes),
        tmp_bytes: Some(config.sandbox.tmp_mb << 20),
        workspace_bytes: Some(config.sandbox.workspace_mb << 20),
        cpu_seconds: Some(config.sandbox.cpu_seconds),
    }
}

/// How the store writes, and what it may take.
pub fn writer_options(proxy: &config::Proxy) -> WriterOptions {
    let some = |bytes: u64| (bytes > 0).then_some(bytes);
    WriterOptions {
        durability: match proxy.durability {
            config::Durability::PowerLoss => capture::Durability::Full,
            config::Durability::ProcessKill => capture::Durability::None,
        },
        limits: CaptureLimits {
            alarm_bytes: some(proxy.capture_alarm_bytes),
            max_bytes: some(proxy.capture_max_bytes),
            min_free_bytes: proxy.capture_min_free_bytes,
            stall: some(proxy.capture_stall_timeout_secs).map(Duration::from_secs),
        },
        ..WriterOptions::default()
    }
}

fn report_recovery(writer: &Writer) {
    let recovery = writer.recovery();
    if !recovery.torn.is_empty() {
        tracing::warn!("captures: torn tails of a killed writer were cut off: {:?}", recovery.torn);
    }
}
