//! What a run carries from step to step, and keeps in each checkpoint beside the learner.

use serde::{Deserialize, Serialize};

use super::RunError;
use super::account::TokenAccount;
use super::report::CurvePoint;
use crate::record::PolicyVersion;
use crate::train::StepMetrics;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Carried {
    /// Optimizer steps taken.
    pub step: u64,
    pub version: PolicyVersion,
    /// Of the training trials.
    pub account: TokenAccount,
    /// Of the evaluations between steps that are done.
    #[serde(default)]
    pub evaluations: TokenAccount,
    /// The policy of this step is to be evaluated before the next.
    #[serde(default)]
    pub is_evaluation_due: bool,
    pub invalid_trajectories: u64,
    pub min_prob_correlation: Option<f64>,
    pub max_logprob_diff: Option<f64>,
    pub train_curve: Vec<CurvePoint>,
}

impl Carried {
    /// What is carried on from a policy version: its `steps` taken, its trials' `account`, `version` published.
    ///
    /// # Errors
    /// [`RunError::Unbalanced`] when its tokens do not add up.
    pub fn after(
        &self,
        steps: &[StepMetrics],
        mut account: TokenAccount,
        version: PolicyVersion,
    ) -> Result<Self, RunError> {
        account.trained += steps.iter().map(|step| step.sampled_tokens as u64).sum::<u64>();
        account.check()?;
        let mut next = Self { version, ..self.clone() };
        next.account.merge(&account);
        let least = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).reduce(f64::min);
        let most = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).reduce(f64::max);
        for step in steps {
            next.step += 1;
            next.min_prob_correlation = least(next.min_prob_correlation, step.prob_correlation);
            next.max_logprob_diff = most(next.max_logprob_diff, step.max_logprob_diff);
            next.train_curve.push(CurvePoint {
                step: next.step,
                solve_rate: step.solve_rate,
                reward_mean: step.reward_mean,
            });
        }
        Ok(next)
    }
}

/// Whether the steps after `before`, up to `after`, hold a multiple of `interval`. An interval of 0 has none.
pub const fn is_reached(interval: u64, before: u64, after: u64) -> bool {
    interval > 0 && before / interval != after / interval
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_reached_once_however_many_steps_a_version_has() {
        let reached = |interval, stride: u64, max: u64| -> Vec<u64> {
            let ends = (0..max).step_by(stride as usize).map(|before| (before, (before + stride).min(max)));
            ends.filter(|&(before, after)| is_reached(interval, before, after))
                .map(|(_, after)| after)
                .collect()
        };
        assert_eq!(reached(5, 1, 20), [5, 10, 15, 20]);
        assert_eq!(reached(5, 4, 20), [8, 12, 16, 20]);
        assert_eq!(reached(3, 4, 10), [4, 8, 10]);
        assert_eq!(reached(0, 1, 20), [0; 0]);
    }

    #[test]
    fn a_version_whose_tokens_do_not_add_up_is_not_carried_on() {
        let carried = Carried::default();
        let step = StepMetrics { sampled_tokens: 6, max_logprob_diff: Some(0.5), ..StepMetrics::default() };
        let account = TokenAccount { sampled: 12, ..TokenAccount::default() };
        let version = PolicyVersion(1);
        let next = carried.after(&[step.clone(), step.clone()], account.clone(), version).expect("balanced");
        assert_eq!((next.step, next.version, next.account.trained), (2, version, 12));
        assert_eq!((next.max_logprob_diff, next.train_curve.len()), (Some(0.5), 2));
        let refused = next.after(&[step], account, PolicyVersion(2)).expect_err("six are missing");
        assert!(matches!(refused, RunError::Unbalanced { sampled: 12, booked: 6 }), "{refused}");
    }
}
