//! `train.toml`.

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::UpstreamKind;

/// The trainer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Training {
    /// The loss.
    pub algorithm: Algorithm,
    /// AdamW's learning rate after warm-up.
    pub learning_rate: f64,
    /// Trials an optimizer step.
    pub batch_size: usize,
    /// Trials a policy version: so many are sampled between two publications of weights.
    pub rollout_batch_size: usize,
    /// Trials a task: they share a baseline.
    pub group_size: usize,
    /// Most model calls of one trial.
    pub max_turns: usize,
    /// Weight of the KL penalty to the starting policy in the loss. 0 leaves it out.
    pub kl_coef: f64,
    /// The importance ratio is clipped below 1 minus this. 1: it is not clipped below.
    pub clip_range: f64,
    /// The importance ratio is clipped above 1 plus this. Absent: `clip_range`.
    pub clip_range_high: Option<f64>,
    /// Optimizer steps of the run.
    pub max_steps: u64,
    /// Seed of every random choice of the run.
    pub seed: u64,
    /// Tasks to train on and to evaluate with: JSON lines in SWE-bench's schema. `--dataset` overrides it.
    pub dataset: Option<PathBuf>,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// AdamW's betas.
    pub betas: [f64; 2],
    /// AdamW's epsilon.
    pub adam_eps: f64,
    /// The gradient's global norm is clipped to this. 0: not clipped.
    pub max_grad_norm: f64,
    /// How the learning rate moves after warm-up.
    pub learning_rate_schedule: LearningRateSchedule,
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
    /// How per-token losses become one number.
    pub aggregation: Aggregation,
    /// Divide a group's advantages by the standard deviation of its rewards.
    pub advantage_scale_by_std: bool,
    /// Added to that standard deviation: 1e-4, as in TRL, or 1e-6, as in verl.
    pub advantage_eps: f64,
    /// Estimator of the KL divergence.
    pub kl_estimator: KlEstimator,
    /// Sampling temperature of training and evaluation at temperature.
    pub temperature: f64,
    /// Most tokens sampled in one turn.
    pub max_new_tokens: usize,
    /// Threads of kernels, in engine and learner, at most 1024. 0: one for each core.
    pub threads: usize,
    /// Optimizer steps between held-out evaluations, which follow a whole policy version. 0: only before and after.
    pub eval_interval: u64,
    /// Held-out tasks evaluated before and after; the first of the data set in its order. 0: all.
    pub eval_tasks: usize,
    /// Held-out tasks of an evaluation within the run. 0: `eval_tasks`.
    pub eval_interval_tasks: usize,
    /// Samples of each held-out task.
    pub eval_samples: usize,
    /// Also evaluate greedily, one sample a task.
    pub eval_greedy: bool,
    /// Optimizer steps between checkpoints, which follow a whole policy version. 0: only the last.
    pub checkpoint_interval: u64,
    /// Checkpoints kept; the oldest go first. 0: all.
    pub keep_checkpoints: usize,
    /// Control experiment: rewards are shuffled among the trials of a rollout batch before advantages are
    /// computed.
    pub shuffle_rewards: bool,
    /// Asynchronous training.
    pub r#async: Async,
    /// The reward.
    pub reward: Reward,
    /// What is trained of the calls of a trial.
    pub samples: Samples,
    /// Logs and what can be watched.
    pub observability: Observability,
}

impl Default for Training {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::Grpo,
            learning_rate: 1e-6,
            batch_size: 64,
            rollout_batch_size: 256,
            group_size: 8,
            max_turns: 30,
            kl_coef: 0.01,
            clip_range: 0.2,
            clip_range_high: None,
            max_steps: 100,
            seed: 1,
            dataset: None,
            weight_decay: 0.0,
            betas: [0.9, 0.95],
            adam_eps: 1e-8,
            max_grad_norm: 1.0,
            learning_rate_schedule: LearningRateSchedule::Constant,
            warmup_steps: 0,
            aggregation: Aggregation::TokenMean,
            advantage_scale_by_std: true,
            advantage_eps: 1e-4,
            kl_estimator: KlEstimator::K3,
            temperature: 1.0,
            max_new_tokens: 4096,
            threads: 0,
            eval_interval: 0,
            eval_tasks: 0,
            eval_interval_tasks: 0,
            eval_samples: 4,
            eval_greedy: true,
            checkpoint_interval: 10,
            keep_checkpoints: 2,
            shuffle_rewards: false,
            r#async: Async::default(),
            reward: Reward::default(),
            samples: Samples::default(),
            observability: Observability::default(),
        }
    }
}

impl Training {
    /// The upper clip range: `clip_range_high`, else `clip_range`.
    #[must_use]
    pub fn upper_clip_range(&self) -> f64 {
        self.clip_range_high.unwrap_or(self.clip_range)
    }

    /// Tasks of one rollout batch.
    #[must_use]
    pub const fn groups_per_rollout_batch(&self) -> usize {
        self.rollout_batch_size / self.group_size
    }

    /// Optimizer steps on one rollout batch.
    #[must_use]
    pub const fn steps_per_rollout_batch(&self) -> usize {
        self.rollout_batch_size / self.batch_size
    }

    /// Threads of kernels: `threads`, or one for each core.
    #[must_use]
    pub fn kernel_threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            count => count,
        }
    }
}

/// The loss.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// Group relative policy optimization.
    #[default]
    Grpo,
    /// GRPO without length and difficulty bias.
    DrGrpo,
    /// Decoupled clip and dynamic sampling.
    Dapo,
    /// Sequence-level ratio.
    Gspo,
    /// Clipped importance-sampling weight.
    Cispo,
    /// PPO with a value head.
    Ppo,
    /// Single-rollout asynchronous optimization.
    Sao,
}

/// How the learning rate moves after warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LearningRateSchedule {
    /// It stays.
    #[default]
    Constant,
    /// Linear, to 0 at `max_steps`.
    Linear,
    /// Half a cosine, to 0 at `max_steps`.
    Cosine,
}

/// How per-token losses become one number. Denominators count episodes or their tokens, never samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// Sum over sampled tokens, divided by all sampled tokens of the step.
    #[default]
    TokenMean,
    /// Mean over episodes of the mean over their sampled tokens.
    SeqMeanTokenMean,
    /// Mean over episodes of the sum over their sampled tokens.
    SeqMeanTokenSum,
    /// The same sum, divided by a constant length.
    SeqMeanTokenSumNorm,
}

/// Estimator of the KL divergence (Schulman, "Approximating KL divergence").
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// The log-ratio.
    K1,
    /// Half its square.
    K2,
    /// Ratio minus 1 minus log-ratio: never negative, low variance.
    #[default]
    #[serde(alias = "low_var_kl")]
    K3,
}

/// Asynchronous training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Async {
    /// Sample while the learner steps.
    pub enable: bool,
    /// Most policy versions between the sampling of a token and the forming of its batch.
    pub max_staleness: u64,
    /// A trial ends after this wall time as the policy's own timeout, in seconds. Holds in synchronous training too.
    pub long_tail_timeout_sec: u64,
}

impl Default for Async {
    fn default() -> Self {
        Self { enable: false, max_staleness: 2, long_tail_timeout_sec: 600 }
    }
}

impl Async {
    /// [`Async::long_tail_timeout_sec`] as a duration.
    #[must_use]
    pub const fn long_tail_timeout(&self) -> Duration {
        Duration::from_secs(self.long_tail_timeout_sec)
    }
}

/// The reward.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Reward {
    /// What is rewarded.
    pub r#type: RewardType,
    /// Reward the share of tests that pass, in place of all or nothing.
    pub partial_credit: bool,
    /// Give a reward of -1 to trials that the policy itself made invalid: out of time, out of memory, harness
    /// ended with an error. Never for infrastructure, and not in evaluations.
    pub penalize_invalid_trajectory: bool,
}

/// What is rewarded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RewardType {
    /// 1 if every FAIL_TO_PASS and PASS_TO_PASS test passes in a clean sandbox, else 0.
    #[default]
    TaskSuccess,
    /// A judge model's grade.
    Judge,
}

/// What is trained of the calls of a trial. Tokens that are left out stay in the account (docs/lineages.md).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Samples {
    /// Which lineages of a trial are trained.
    pub lineages: TrainedLineages,
    /// Tokens of a sample at most: what was sampled behind that is not trained. 0: no bound.
    pub max_tokens: usize,
    /// Kinds of calls beside the main agent's that are not trained.
    pub leave_out: Vec<SideKind>,
    /// Kinds of calls that were captured as `aux` and are trained all the same. What else speaks against a call still
    /// holds, and calls of a route of kind `aux` are another model's.
    pub take_in: Vec<AuxKind>,
}

/// Which lineages of a trial are trained.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainedLineages {
    /// Each, one sample a lineage.
    #[default]
    All,
    /// Those of the main agent: the first, and where its history was rewritten those that follow.
    Main,
    /// The one with the most sampled tokens that can be trained.
    Longest,
}

/// Calls beside the main agent's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SideKind {
    /// Of an agent that a tool call of another one started.
    SubAgent,
    /// Without tools beside an agent that has some: titles, topics.
    Side,
    /// Calls whose reply stands for the history in a later prompt.
    Compaction,
    /// Conversations of which nothing says who began them.
    Other,
}

/// Calls that a harness makes beside its agents' turns, known by their requests: they are captured as `aux`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AuxKind {
    /// Titles, topics, checks of a quota.
    Side,
    /// Calls whose reply stands for the history in a later prompt.
    Compaction,
}

impl AuxKind {
    /// The kind of calls beside the main agent's that it is.
    #[must_use]
    pub const fn side(self) -> SideKind {
        match self {
            Self::Side => SideKind::Side,
            Self::Compaction => SideKind::Compaction,
        }
    }
}

/// Logs and what can be watched.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Observability {
    /// Serve the live web pages of the run.
    pub enable_ui: bool,
    /// Least level of log lines. `RUST_LOG` overrides it.
    pub log_level: LogLevel,
    /// Share of trials that are traced in full.
    pub trace_sample_rate: f64,
    /// Log lines as JSON objects.
    pub log_json: bool,
    /// Folder in which run folders are made when `--output-dir` does not say. `LEGO_RL_LOG_DIR` overrides it.
    pub log_dir: PathBuf,
}

impl Default for Observability {
    fn default() -> Self {
        Self {
            enable_ui: false,
            log_level: LogLevel::Info,
            trace_sample_rate: 0.0,
            log_json: false,
            log_dir: PathBuf::from("runs"),
        }
    }
}

/// Least level of log lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Errors only.
    Error,
    /// And warnings.
    #[serde(alias = "WARN", alias = "warning", alias = "WARNING")]
    Warn,
    /// And what the run does.
    #[default]
    #[serde(alias = "INFO")]
    Info,
    /// And details.
    #[serde(alias = "DEBUG")]
    Debug,
    /// Everything.
    #[serde(alias = "TRACE")]
    Trace,
}

impl LogLevel {
    /// The name in config files and in `RUST_LOG`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

/// The policy; what is set here overrides the upstream of `proxy_config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Overrides `proxy.upstream_kind`; `embedded` also sets `proxy.upstream_base_url`.
    pub upstream: Option<UpstreamKind>,
    /// Overrides `proxy.upstream_base_url`.
    pub base_url: Option<String>,
    /// Overrides `proxy.upstream_api_key_env`.
    pub api_key_env: Option<String>,
    /// Overrides `proxy.model_path`.
    pub model_path: Option<PathBuf>,
    /// Name under which the policy is served. Absent: the name of its folder.
    pub model_name: Option<String>,
    /// Embedded engine: most sequences decoded at once.
    pub max_batch: usize,
    /// Embedded engine: most tokens of one sequence. Absent: the model's own limit.
    pub max_context_tokens: Option<usize>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            upstream: None,
            base_url: None,
            api_key_env: None,
            model_path: None,
            model_name: None,
            max_batch: 64,
            max_context_tokens: None,
        }
    }
}
