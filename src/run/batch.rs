//! What the trials of a policy version give the learner, and where their tokens went.

use super::RunError;
use super::account::TokenAccount;
use crate::config::Training;
use crate::record::PolicyVersion;
use crate::rollout::{TrialResult, derive_seed};
use crate::train::Episode;

/// Rewards of the control are shuffled by seeds of their own.
const SHUFFLE_SEEDS: u64 = 3;

/// A run is given up when so many policy versions in a row had nothing to train on.
const GIVE_UP_AFTER: u32 = 3;

/// The trials of a policy version as the learner takes them.
#[derive(Debug)]
pub struct Batch {
    pub episodes: Vec<Episode>,
    /// Of every token that they sampled; those of `episodes` are for the learner to book.
    pub account: TokenAccount,
}

impl Batch {
    pub fn of(training: &Training, version: PolicyVersion, results: &[TrialResult]) -> Self {
        let mut rewards: Vec<f64> = results.iter().filter_map(|result| result.reward).collect();
        if training.shuffle_rewards {
            for last in (1..rewards.len()).rev() {
                let random = derive_seed(&[training.seed, SHUFFLE_SEEDS, version.0, last as u64]);
                rewards.swap(last, (random % (last as u64 + 1)) as usize);
            }
        }
        let mut rewards = rewards.into_iter();
        let mut episodes = Vec::with_capacity(results.len());
        let mut account = TokenAccount::default();
        for result in results {
            account.add_trial(result);
            if result.reward.is_some()
                && let Some(reward) = rewards.next()
            {
                episodes.push(Episode {
                    episode_id: result.spec.episode,
                    group_id: result.spec.group,
                    reward,
                    samples: result.samples.clone(),
                });
            }
        }
        Self { episodes, account }
    }

    /// What became of the tokens: the largest buckets.
    fn largest_buckets(&self) -> String {
        let mut buckets: Vec<_> = self.account.left_out.iter().filter(|(_, tokens)| **tokens > 0).collect();
        buckets.sort_by_key(|(_, tokens)| std::cmp::Reverse(**tokens));
        if buckets.is_empty() {
            return "no token was sampled".to_owned();
        }
        let buckets: Vec<_> =
            buckets.into_iter().take(3).map(|(name, tokens)| format!("{tokens} {name}")).collect();
        format!("of {} sampled tokens: {}", self.account.sampled, buckets.join(", "))
    }
}

/// Policy versions in a row that had nothing to train on.
#[derive(Debug, Default)]
pub struct Idle(u32);

impl Idle {
    /// Looks at the batch of the next version. `Some` is what to warn of.
    ///
    /// # Errors
    /// [`RunError::NothingToTrain`] when the run is to be given up.
    pub fn look(&mut self, batch: &Batch) -> Result<Option<String>, RunError> {
        let graded = batch.episodes.len();
        if batch.episodes.iter().any(|episode| !episode.samples.is_empty()) {
            self.0 = 0;
            return Ok(None);
        }
        self.0 += 1;
        let buckets = batch.largest_buckets();
        if graded == 0 || self.0 >= GIVE_UP_AFTER {
            return Err(RunError::NothingToTrain { versions: self.0, graded, buckets });
        }
        Ok(Some(format!("none of {graded} graded trials has a token to train on; {buckets}")))
    }
}

/// A training row with one sampled token.
#[cfg(test)]
pub fn sample_of_one_token() -> crate::record::Sample {
    use crate::record::{CallSpan, Sample, SampleParts};
    Sample::new(SampleParts {
        token_ids: vec![1, 2],
        loss_mask: vec![false, true],
        logprobs: vec![None, Some(-0.5)],
        weight_version: vec![None, Some(0)],
        temperature: vec![None, Some(1.0)],
        call_spans: vec![CallSpan::of_test(1, 2)],
        ..SampleParts::default()
    })
    .expect("a sample")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Disposition;
    use crate::record::{EpisodeId, GroupId, Sample};

    fn batch(samples: Vec<Sample>) -> Batch {
        let mut account = TokenAccount { sampled: 90, ..TokenAccount::default() };
        account.add_left_out(&Disposition::Dropped("no prompt ids".to_owned()), 80);
        account.add_left_out(&Disposition::AuxCall, 10);
        let episode = Episode { episode_id: EpisodeId(0), group_id: GroupId(0), reward: 1.0, samples };
        Batch { episodes: vec![episode], account }
    }

    #[test]
    fn a_run_that_trains_nothing_says_what_became_of_its_tokens_and_ends() {
        let mut idle = Idle::default();
        for _ in 1..GIVE_UP_AFTER {
            let warning = idle.look(&batch(vec![])).expect("goes on").expect("a warning");
            assert!(
                warning.contains("of 90 sampled tokens: 80 dropped: no prompt ids, 10 aux_call"),
                "{warning}"
            );
        }
        // One version with something to train on, and the count begins anew.
        assert_eq!(idle.look(&batch(vec![sample_of_one_token()])).expect("goes on"), None);
        for _ in 1..GIVE_UP_AFTER {
            idle.look(&batch(vec![])).expect("goes on");
        }
        let error = idle.look(&batch(vec![])).expect_err("given up").to_string();
        assert!(
            error.contains("3 policy versions") && error.contains("80 dropped: no prompt ids"),
            "{error}"
        );
        // Without one graded trial there is no step to take at all.
        let none = Batch { episodes: vec![], ..batch(vec![]) };
        let error = Idle::default().look(&none).expect_err("given up").to_string();
        assert!(error.contains("0 graded trials"), "{error}");
    }
}
