//! One row of `metrics.parquet`, out of what the learner and the wave report. Names are those of
//! [`crate::telemetry::COLUMNS`].

use std::time::{Duration, Instant};

use super::waves::Wave;
use crate::record::{Disposition, Outcome, PolicyVersion, Termination};
use crate::telemetry::MetricValue;
use crate::train::StepMetrics;

/// Wall times of the phases of a step.
pub struct StepTimes {
    started: Instant,
    pub rollout: Duration,
    pub train: Duration,
    pub publish: Duration,
}

impl StepTimes {
    pub fn start() -> Self {
        let zero = Duration::ZERO;
        Self { started: Instant::now(), rollout: zero, train: zero, publish: zero }
    }

    pub fn total(&self) -> Duration {
        self.started.elapsed()
    }
}

/// The row of `step`, whose trials are `wave` (shared by all optimizer steps of a policy version).
pub fn row(
    step: &StepMetrics,
    version: PolicyVersion,
    wave: &Wave,
    times: &StepTimes,
) -> Vec<(&'static str, MetricValue)> {
    let results = &wave.results;
    let ended = |termination: Termination| {
        results.iter().filter(|r| r.outcome == Outcome::Valid { termination }).count()
    };
    let left_out = |is_bucket: fn(&Disposition) -> bool| -> u64 {
        results
            .iter()
            .flat_map(|result| &result.left_out)
            .filter(|(disposition, _)| is_bucket(disposition))
            .map(|(_, tokens)| tokens)
            .sum()
    };
    let count = results.len();
    let mean = |sum: f64| if count == 0 { 0.0 } else { sum / count as f64 };
    let calls: usize = results.iter().map(|r| r.turns).sum();
    let prompts: usize = results.iter().map(|r| r.measured_prompts).sum();
    let prompt_tokens: u64 = results.iter().map(|r| r.prompt_tokens).sum();
    let sampled: u64 = results.iter().map(|r| r.sampled_tokens).sum();
    let longest = results.iter().flat_map(|r| &r.samples).map(|s| s.token_ids.len()).max().unwrap_or(0);
    let per_second = |amount: f64, time: Duration| amount / time.as_secs_f64().max(1e-9);

    let mut row: Vec<(&'static str, MetricValue)> = vec![
        ("policy_version", version.0.into()),
        ("policy_version_lag", step.policy_version_lag_mean.into()),
        ("policy_version_lag_max", step.policy_version_lag_max.into()),
        ("reward_mean", step.reward_mean.into()),
        ("solve_rate", step.solve_rate.into()),
        ("advantage_std", step.advantage_std.into()),
        ("degenerate_group_ratio", step.degenerate_group_ratio.into()),
        ("trials", count.into()),
        ("valid_trials", (count - wave.invalid()).into()),
        ("invalid_trajectories", wave.invalid().into()),
        ("agent_timeouts", ended(Termination::AgentTimeout).into()),
        ("max_turns_reached", ended(Termination::MaxTurns).into()),
        ("turns_mean", mean(calls as f64).into()),
        ("loss", step.loss.into()),
        ("entropy", step.entropy.into()),
        ("clip_fraction", step.clip_fraction.into()),
        ("ratio_mean", step.ratio_mean.into()),
        ("ratio_max", step.ratio_max.into()),
        ("learning_rate", step.learning_rate.into()),
        ("sampled_tokens", sampled.into()),
        ("trained_tokens", step.sampled_tokens.into()),
        ("masked_tokens", left_out(|d| matches!(d, Disposition::Masked(_))).into()),
        ("stale_tokens", left_out(|d| matches!(d, Disposition::Stale)).into()),
        ("superseded_tokens", left_out(|d| matches!(d, Disposition::Superseded)).into()),
        ("aux_tokens", left_out(|d| matches!(d, Disposition::AuxCall)).into()),
        ("infra_failure_tokens", left_out(|d| matches!(d, Disposition::InfraFailure)).into()),
        ("dropped_tokens", left_out(|d| matches!(d, Disposition::Dropped(_))).into()),
        ("prompt_length_mean", (prompt_tokens as f64 / prompts.max(1) as f64).into()),
        ("response_length_mean", mean(sampled as f64).into()),
        ("response_length_max", results.iter().map(|r| r.sampled_tokens).max().unwrap_or(0).into()),
        ("sequence_length_max", longest.into()),
        ("sampled_tokens_per_second", per_second(sampled as f64, times.rollout).into()),
        ("trained_tokens_per_second", per_second(step.trained_tokens as f64, times.train).into()),
        ("trials_per_second", per_second(count as f64, times.rollout).into()),
        ("rollout_seconds", times.rollout.as_secs_f64().into()),
        ("train_seconds", times.train.as_secs_f64().into()),
        ("publish_seconds", times.publish.as_secs_f64().into()),
        ("step_seconds", times.total().as_secs_f64().into()),
    ];
    let optional = [
        ("kl", step.kl),
        ("grad_norm", step.grad_norm),
        ("prob_correlation", step.prob_correlation),
        ("max_logprob_diff", step.max_logprob_diff),
    ];
    row.extend(optional.into_iter().filter_map(|(name, value)| Some((name, value?.into()))));
    row
}
