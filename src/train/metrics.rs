//! What one optimizer step reports.

/// Numbers of one optimizer step, named as the columns of [`crate::telemetry::COLUMNS`]. `None`: there was nothing
/// to measure it on.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepMetrics {
    /// Mean reward of the step's episodes.
    pub reward_mean: f64,
    /// Share of episodes with a reward of 1.
    pub solve_rate: f64,
    /// Sampled tokens in the loss's denominator: the column `trained_tokens`.
    pub sampled_tokens: usize,
    /// Tokens that went through forward and backward, context included.
    pub trained_tokens: usize,
    /// Policy loss with its KL term, as aggregated.
    pub loss: Option<f64>,
    pub policy_loss: Option<f64>,
    /// Before `kl_coef`; `None` without a reference.
    pub kl_loss: Option<f64>,
    /// Mean KL to the starting policy over sampled tokens; `None` without a reference.
    pub kl: Option<f64>,
    /// Mean k3 estimate of KL(sampling policy || policy before the update).
    pub kl_old: Option<f64>,
    /// Mean entropy in nats of the distributions the tokens were sampled from.
    pub entropy: Option<f64>,
    pub clip_fraction: Option<f64>,
    pub ratio_mean: Option<f64>,
    pub ratio_max: Option<f64>,
    /// Before clipping; `None` when the step had no gradient and changed nothing.
    pub grad_norm: Option<f64>,
    pub learning_rate: f64,
    pub advantage_mean: f64,
    pub advantage_std: f64,
    /// Share of groups without spread in the policy version's batch, and its two parts.
    pub degenerate_group_ratio: f64,
    pub all_solved_group_ratio: f64,
    pub all_failed_group_ratio: f64,
    /// Version trained on minus version that sampled, mean over sampled tokens.
    pub policy_version_lag: Option<f64>,
    pub policy_version_lag_max: Option<u64>,
    /// Tokens sampled by the version being trained: those that the next three compare.
    pub aligned_tokens: usize,
    /// Pearson correlation of captured and recomputed probabilities.
    pub prob_correlation: Option<f64>,
    /// Largest difference of captured and recomputed log-probs.
    pub max_logprob_diff: Option<f64>,
    pub mean_logprob_diff: Option<f64>,
}
