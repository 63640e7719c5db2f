//! The rows of `metrics.parquet`, out of what the learner, the wave and evaluations report. Names are those of
//! [`crate::telemetry::COLUMNS`].

use std::time::{Duration, Instant};

use super::evaluation::Evaluation;
use super::waves::Wave;
use crate::record::{Disposition, Outcome, PolicyVersion, Termination};
use crate::telemetry::MetricValue;
use crate::train::StepMetrics;
use crate::trajectory::BreakReason;

/// Names and values of one step.
pub type Row = Vec<(&'static str, MetricValue)>;

/// Wall times of the phases of a step.
pub struct StepTimes {
    started: Instant,
    pub rollout: Duration,
    pub train: Duration,
    /// Of `train`: recomputing log-probs before the first of several steps.
    pub replay: Option<Duration>,
    pub publish: Duration,
}

impl StepTimes {
    pub fn start() -> Self {
        let zero = Duration::ZERO;
        Self { started: Instant::now(), rollout: zero, train: zero, replay: None, publish: zero }
    }

    pub fn total(&self) -> Duration {
        self.started.elapsed()
    }
}

/// The column that counts a trial's tokens of this bucket. The other buckets are the learner's to fill.
fn token_column(disposition: &Disposition) -> Option<&'static str> {
    match disposition {
        Disposition::Masked(_) => Some("masked_tokens"),
        Disposition::Superseded => Some("superseded_tokens"),
        Disposition::AuxCall => Some("aux_tokens"),
        Disposition::OverWindow => Some("over_window_tokens"),
        Disposition::InfraFailure => Some("infra_failure_tokens"),
        Disposition::Dropped(_) => Some("dropped_tokens"),
        Disposition::UsageUnknown => Some("usage_unknown_tokens"),
        Disposition::NoIds => Some("no_ids_tokens"),
        Disposition::Trained | Disposition::Stale => None,
    }
}

/// The rows of a policy version's optimizer steps, whose trials are `wave`. What is the version's, such as trials and
/// wall times, is the same in each.
pub fn rows(steps: &[StepMetrics], version: PolicyVersion, wave: &Wave, times: &StepTimes) -> Vec<Row> {
    let learner_tokens = steps.iter().map(|step| step.trained_tokens).sum();
    steps.iter().map(|step| row(step, version, wave, times, learner_tokens)).collect()
}

/// What an evaluation adds to the row of its step; `took` is known if it was made now.
pub fn evaluation_row(evaluation: &Evaluation, took: Option<Duration>) -> Row {
    let rates = &evaluation.rates;
    let values = [
        ("heldout_solve_rate", rates.solve_rate),
        ("heldout_greedy", rates.greedy),
        ("heldout_pass_at_k", rates.pass_at_k),
        ("eval_seconds", took.map(|took| took.as_secs_f64())),
    ];
    values.into_iter().filter_map(|(name, value)| Some((name, value?.into()))).collect()
}

fn row(
    step: &StepMetrics,
    version: PolicyVersion,
    wave: &Wave,
    times: &StepTimes,
    learner_tokens: usize,
) -> Row {
    let results = &wave.results;
    let ended = |termination: Termination| {
        results.iter().filter(|r| r.outcome == Outcome::Valid { termination }).count()
    };
    let left_out = |name: &'static str| {
        let entries = results.iter().flat_map(|result| &result.left_out);
        let tokens =
            entries.filter(|(bucket, _)| token_column(bucket) == Some(name)).map(|(_, tokens)| tokens);
        (name, tokens.sum::<u64>().into())
    };
    let breaks = |reason: BreakReason| {
        let found = results.iter().flat_map(|result| &result.breaks).filter(|found| **found == reason);
        (reason.column(), found.count().into())
    };
    let count = results.len();
    let mean = |sum: f64| if count == 0 { 0.0 } else { sum / count as f64 };
    let calls: usize = results.iter().map(|r| r.turns).sum();
    let prompts: usize = results.iter().map(|r| r.measured_prompts).sum();
    let prompt_tokens: u64 = results.iter().map(|r| r.prompt_tokens).sum();
    let sampled: u64 = results.iter().map(|r| r.sampled_tokens).sum();
    let longest = results.iter().flat_map(|r| &r.samples).map(|s| s.token_ids.len()).max();
    let verify: Duration = results.iter().map(|r| r.verify).sum();
    let per_second = |amount: f64, time: Duration| amount / time.as_secs_f64().max(1e-9);

    let mut row: Row = vec![
        ("policy_version", version.0.into()),
        ("reward_mean", step.reward_mean.into()),
        ("solve_rate", step.solve_rate.into()),
        ("advantage_mean", step.advantage_mean.into()),
        ("advantage_std", step.advantage_std.into()),
        ("degenerate_group_ratio", step.degenerate_group_ratio.into()),
        ("all_solved_group_ratio", step.all_solved_group_ratio.into()),
        ("all_failed_group_ratio", step.all_failed_group_ratio.into()),
        ("trials", count.into()),
        ("valid_trials", results.iter().filter(|r| r.reward.is_some()).count().into()),
        ("invalid_trajectories", wave.invalid().into()),
        ("agent_timeouts", ended(Termination::AgentTimeout).into()),
        ("max_turns_reached", ended(Termination::MaxTurns).into()),
        ("turns_mean", mean(calls as f64).into()),
        ("learning_rate", step.learning_rate.into()),
        ("aligned_tokens", step.aligned_tokens.into()),
        ("sampled_tokens", sampled.into()),
        ("trained_tokens", step.sampled_tokens.into()),
        left_out("masked_tokens"),
        left_out("superseded_tokens"),
        left_out("aux_tokens"),
        left_out("over_window_tokens"),
        left_out("infra_failure_tokens"),
        left_out("dropped_tokens"),
        left_out("usage_unknown_tokens"),
        left_out("no_ids_tokens"),
        ("prompt_length_mean", (prompt_tokens as f64 / prompts.max(1) as f64).into()),
        ("response_length_mean", mean(sampled as f64).into()),
        ("response_length_max", results.iter().map(|r| r.sampled_tokens).max().unwrap_or(0).into()),
        ("sampled_tokens_per_second", per_second(sampled as f64, times.rollout).into()),
        ("trained_tokens_per_second", per_second(learner_tokens as f64, times.train).into()),
        ("trials_per_second", per_second(count as f64, times.rollout).into()),
        ("rollout_seconds", times.rollout.as_secs_f64().into()),
        ("verify_seconds", verify.as_secs_f64().into()),
        ("train_seconds", times.train.as_secs_f64().into()),
        ("publish_seconds", times.publish.as_secs_f64().into()),
        ("step_seconds", times.total().as_secs_f64().into()),
    ];
    row.extend(BreakReason::ALL.iter().copied().map(breaks));
    let optional = [
        ("policy_version_lag", step.policy_version_lag),
        ("loss", step.loss),
        ("policy_loss", step.policy_loss),
        ("kl_loss", step.kl_loss),
        ("kl", step.kl),
        ("kl_old", step.kl_old),
        ("entropy", step.entropy),
        ("clip_fraction", step.clip_fraction),
        ("ratio_mean", step.ratio_mean),
        ("ratio_max", step.ratio_max),
        ("grad_norm", step.grad_norm),
        ("prob_correlation", step.prob_correlation),
        ("max_logprob_diff", step.max_logprob_diff),
        ("mean_logprob_diff", step.mean_logprob_diff),
        ("replay_seconds", times.replay.map(|time| time.as_secs_f64())),
    ];
    row.extend(optional.into_iter().filter_map(|(name, value)| Some((name, value?.into()))));
    let optional = [
        ("policy_version_lag_max", step.policy_version_lag_max),
        ("sequence_length_max", longest.map(|length| length as u64)),
    ];
    row.extend(optional.into_iter().filter_map(|(name, value)| Some((name, value?.into()))));
    row
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use super::*;
    use crate::record::{EpisodeId, GroupId};
    use crate::rollout::{Purpose, TrialResult, TrialSpec};
    use crate::run::batch::sample_of_one_token;
    use crate::run::evaluation::{EvaluationTrial, Rates};
    use crate::task::Task;
    use crate::telemetry::COLUMNS;

    fn result(left_out: Vec<(Disposition, u64)>) -> TrialResult {
        TrialResult {
            spec: TrialSpec {
                trial_id: "v0-g0-0".parse().expect("id"),
                task: Arc::new(Task::example()),
                episode: EpisodeId(0),
                group: GroupId(0),
                purpose: Purpose::Training,
                seed: 0,
                temperature: 1.0,
                is_greedy: false,
            },
            outcome: Outcome::Valid { termination: Termination::Completed },
            reward: Some(1.0),
            sampled_tokens: 1 + left_out.iter().map(|(_, tokens)| tokens).sum::<u64>(),
            samples: vec![sample_of_one_token()],
            left_out,
            breaks: Vec::new(),
            measured_prompts: 1,
            prompt_tokens: 1,
            turns: 1,
            attempts: 1,
            wall: Duration::from_secs(2),
            verify: Duration::from_secs(1),
        }
    }

    /// A step in which everything could be measured.
    fn step() -> StepMetrics {
        let some = Some(0.5);
        StepMetrics {
            sampled_tokens: 1,
            loss: some,
            policy_loss: some,
            kl_loss: some,
            kl: some,
            kl_old: some,
            entropy: some,
            clip_fraction: some,
            ratio_mean: some,
            ratio_max: some,
            grad_norm: some,
            policy_version_lag: some,
            policy_version_lag_max: Some(1),
            prob_correlation: some,
            max_logprob_diff: some,
            mean_logprob_diff: some,
            ..StepMetrics::default()
        }
    }

    #[test]
    fn a_run_fills_every_column_of_the_catalog() {
        let wave = Wave { results: vec![result(vec![])], wall: Duration::from_secs(3) };
        let times = StepTimes { replay: Some(Duration::from_secs(1)), ..StepTimes::start() };
        let row = rows(&[step()], PolicyVersion(0), &wave, &times).remove(0);
        let trial = |is_greedy| EvaluationTrial {
            task_id: "t-1".parse().expect("id"),
            family: String::new(),
            is_greedy,
            reward: Some(1.0),
            turns: 1,
        };
        let evaluation = Evaluation::of(1, 1, &[trial(false), trial(true)]);
        let evaluated = evaluation_row(&evaluation, Some(Duration::from_secs(1)));
        let mut names: Vec<&str> = row.iter().chain(&evaluated).map(|(name, _)| *name).collect();
        // Known only once the checkpoint is there.
        names.push("checkpoint_seconds");
        let distinct: BTreeSet<&str> = names.iter().copied().collect();
        assert_eq!(distinct.len(), names.len(), "a column is named twice");
        assert_eq!(distinct, COLUMNS.iter().map(|column| column.name).collect());
        let nothing = Evaluation { rates: Rates::default(), ..evaluation };
        assert_eq!(evaluation_row(&nothing, None), []);
    }

    #[test]
    fn the_token_columns_sum_to_the_tokens_sampled() {
        let reason = || "a reason".to_owned();
        let buckets = [
            Disposition::Masked(reason()),
            Disposition::Superseded,
            Disposition::AuxCall,
            Disposition::OverWindow,
            Disposition::InfraFailure,
            Disposition::Dropped(reason()),
            Disposition::UsageUnknown,
            Disposition::NoIds,
        ];
        let left_out = buckets.into_iter().zip([2, 4, 8, 16, 32, 64, 128, 256]).collect();
        let wave = Wave { results: vec![result(left_out)], wall: Duration::from_secs(3) };
        let row = rows(&[step()], PolicyVersion(0), &wave, &StepTimes::start()).remove(0);
        let tokens: Vec<_> = COLUMNS
            .iter()
            .filter(|column| column.group == "tokens")
            .map(|column| row.iter().find(|(name, _)| *name == column.name).expect("a value").1)
            .collect();
        let expected = [511, 1, 2, 4, 8, 16, 32, 64, 128, 256_u64];
        assert_eq!(tokens, expected.map(MetricValue::from));
    }
}
