//! The token account of a run: law 6, checked at every step.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::RunError;
use crate::record::Disposition;
use crate::rollout::TrialResult;

/// Where every token that the policy sampled in this run went. Part of each checkpoint, so that a resumed
/// run goes on counting.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenAccount {
    pub sampled: u64,
    pub trained: u64,
    /// By bucket, with its reason: `dropped: evaluation`.
    pub left_out: BTreeMap<String, u64>,
}

impl TokenAccount {
    /// Books a trial's tokens that are in no sample.
    pub fn add_trial(&mut self, trial: &TrialResult) {
        self.sampled += trial.sampled_tokens;
        for (disposition, tokens) in &trial.left_out {
            *self.left_out.entry(disposition.bucket()).or_default() += tokens;
        }
    }

    /// Books tokens of samples that the learner did not take.
    pub fn add_left_out(&mut self, disposition: &Disposition, tokens: u64) {
        *self.left_out.entry(disposition.bucket()).or_default() += tokens;
    }

    /// Adds another account to this one.
    pub fn merge(&mut self, other: &Self) {
        self.sampled += other.sampled;
        self.trained += other.trained;
        for (bucket, tokens) in &other.left_out {
            *self.left_out.entry(bucket.clone()).or_default() += tokens;
        }
    }

    /// Checks that every sampled token is in exactly one bucket.
    ///
    /// # Errors
    /// [`RunError::Unbalanced`] with both sums.
    pub fn check(&self) -> Result<(), RunError> {
        let booked = self.trained + self.left_out.values().sum::<u64>();
        if booked == self.sampled {
            Ok(())
        } else {
            Err(RunError::Unbalanced { sampled: self.sampled, booked })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_in_no_bucket_stops_the_run() {
        let mut account = TokenAccount { sampled: 10, trained: 6, ..TokenAccount::default() };
        account.add_left_out(&Disposition::Dropped("evaluation".to_owned()), 4);
        account.check().expect("balanced");
        account.sampled += 1;
        let error = account.check().expect_err("one is missing").to_string();
        assert!(error.contains("11") && error.contains("10"), "{error}");
    }
}
