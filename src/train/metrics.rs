//! What one optimizer step reports.

/// Numbers of one optimizer step. `None`: there was nothing to measure it on.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepMetrics {
    /// Optimizer updates after this step, those of earlier versions included.
    pub optimizer_step: u64,
    pub episodes: usize,
    /// Training rows: lineages of all episodes.
    pub samples: usize,
    /// Mean reward of the step's episodes.
    pub reward_mean: f64,
    /// Share of episodes with a reward of 1.
    pub solve_rate: f64,
    /// Mean and largest number of sampled tokens of an episode.
    pub episode_tokens_mean: f64,
    pub episode_tokens_max: usize,
    /// Sampled tokens in the loss's denominator.
    pub sampled_tokens: usize,
    /// Tokens that went through forward and backward, context included.
    pub trained_tokens: usize,
    /// Policy loss with its KL term, as aggregated.
    pub loss: f64,
    /// Mean KL to the starting policy over sampled tokens; `None` without a reference.
    pub kl: Option<f64>,
    /// Mean k3 estimate of KL(sampling policy || policy before the update).
    pub kl_old: f64,
    /// Mean entropy in nats of the distributions the tokens were sampled from.
    pub entropy: f64,
    pub clip_fraction: f64,
    pub ratio_mean: f64,
    pub ratio_max: f64,
    /// Before clipping; `None` when the step had no gradient and changed nothing.
    pub grad_norm: Option<f64>,
    pub learning_rate: f64,
    pub advantage_std: f64,
    /// Share of groups without spread in the policy version's batch, and its two parts.
    pub degenerate_group_ratio: f64,
    pub all_solved_group_ratio: f64,
    pub all_failed_group_ratio: f64,
    /// Version trained on minus version that sampled, over sampled tokens.
    pub policy_version_lag_mean: f64,
    pub policy_version_lag_max: u64,
    /// Tokens sampled by the version being trained: those that the next three compare.
    pub aligned_tokens: usize,
    /// Pearson correlation of captured and recomputed probabilities.
    pub prob_correlation: Option<f64>,
    /// Largest difference of captured and recomputed log-probs.
    pub max_logprob_diff: Option<f64>,
    pub mean_logprob_diff: Option<f64>,
}

impl StepMetrics {
    /// Names and values, in a fixed order, as written to `metrics.parquet` and TensorBoard.
    #[must_use]
    pub fn scalars(&self) -> Vec<(&'static str, Option<f64>)> {
        let count = |n: usize| Some(n as f64);
        vec![
            ("optimizer_step", Some(self.optimizer_step as f64)),
            ("episodes", count(self.episodes)),
            ("samples", count(self.samples)),
            ("reward_mean", Some(self.reward_mean)),
            ("solve_rate", Some(self.solve_rate)),
            ("episode_tokens_mean", Some(self.episode_tokens_mean)),
            ("episode_tokens_max", count(self.episode_tokens_max)),
            ("sampled_tokens", count(self.sampled_tokens)),
            ("trained_tokens", count(self.trained_tokens)),
            ("loss", Some(self.loss)),
            ("kl", self.kl),
            ("kl_old", Some(self.kl_old)),
            ("entropy", Some(self.entropy)),
            ("clip_fraction", Some(self.clip_fraction)),
            ("ratio_mean", Some(self.ratio_mean)),
            ("ratio_max", Some(self.ratio_max)),
            ("grad_norm", self.grad_norm),
            ("learning_rate", Some(self.learning_rate)),
            ("advantage_std", Some(self.advantage_std)),
            ("degenerate_group_ratio", Some(self.degenerate_group_ratio)),
            ("all_solved_group_ratio", Some(self.all_solved_group_ratio)),
            ("all_failed_group_ratio", Some(self.all_failed_group_ratio)),
            ("policy_version_lag_mean", Some(self.policy_version_lag_mean)),
            ("policy_version_lag_max", Some(self.policy_version_lag_max as f64)),
            ("aligned_tokens", count(self.aligned_tokens)),
            ("prob_correlation", self.prob_correlation),
            ("max_logprob_diff", self.max_logprob_diff),
            ("mean_logprob_diff", self.mean_logprob_diff),
        ]
    }
}
