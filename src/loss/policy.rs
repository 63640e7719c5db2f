//! The clipped surrogate of PPO and GRPO with a KL term, for one training row at a time.

use serde::{Deserialize, Serialize};

use super::error::{LossError, finite, same_length};
use super::kl::KlEstimator;

/// Options of the policy loss.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyLossOptions {
    /// The ratio is clipped below at `1 - clip_low`; 1: not below.
    pub clip_low: f64,
    /// The ratio is clipped above at `1 + clip_high` (DAPO's clip-higher when larger than `clip_low`).
    pub clip_high: f64,
    /// Bounds the loss of negative advantages at `dual_clip * |A|` (Ye et al. 2020, arXiv:1912.09729); `None`: off.
    pub dual_clip: Option<f64>,
    /// Weight of the KL to the reference policy in each token's loss; 0: the term is left out.
    pub kl_coef: f64,
    /// Estimator of that KL.
    pub kl: KlEstimator,
}

impl Default for PolicyLossOptions {
    fn default() -> Self {
        Self { clip_low: 0.2, clip_high: 0.2, dual_clip: None, kl_coef: 0.0, kl: KlEstimator::K3 }
    }
}

/// One training row. Every list has one entry a token; positions where `mask` is false are never read.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// True exactly on sampled tokens.
    pub mask: &'a [bool],
    /// Log-probs under the policy being trained.
    pub log_probs: &'a [f64],
    /// Log-probs captured when the tokens were sampled. The ratio is taken against these.
    pub old_log_probs: &'a [Option<f64>],
    /// Log-probs under the reference policy; needed when `kl_coef` is not 0, a metric otherwise.
    pub reference_log_probs: Option<&'a [f64]>,
    /// The episode's advantage: the same for each of its tokens.
    pub advantage: f64,
    /// What one token weighs in the step ([`Denominator::token_weight`](super::Denominator::token_weight)).
    pub token_weight: f64,
}

/// Sums over sampled tokens; add them up over the rows of a step, then read the means.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TokenStats {
    /// Sampled tokens.
    pub tokens: usize,
    /// Tokens with A < 0 whose ratio is below `1 - clip_low`.
    pub clipped_low: usize,
    /// Tokens with A > 0 whose ratio is above `1 + clip_high`.
    pub clipped_high: usize,
    /// Sum of ratios.
    pub ratio: f64,
    /// Largest ratio; 0 when there are no tokens.
    pub ratio_max: f64,
    /// Sum of k3 between the policy that sampled and the one being trained.
    pub kl_old: f64,
    /// Sum of the chosen estimator to the reference policy.
    pub kl_reference: f64,
    /// Tokens with a reference log-prob.
    pub reference_tokens: usize,
}

impl TokenStats {
    /// Adds the sums of another row.
    pub fn add(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.clipped_low += other.clipped_low;
        self.clipped_high += other.clipped_high;
        self.ratio += other.ratio;
        self.ratio_max = self.ratio_max.max(other.ratio_max);
        self.kl_old += other.kl_old;
        self.kl_reference += other.kl_reference;
        self.reference_tokens += other.reference_tokens;
    }

    /// Share of tokens that the clip leaves without a policy gradient.
    #[must_use]
    pub fn clip_fraction(&self) -> f64 {
        (self.clipped_low + self.clipped_high) as f64 / self.tokens.max(1) as f64
    }

    /// Mean KL to the reference policy; `None` without reference log-probs.
    #[must_use]
    pub fn kl_reference_mean(&self) -> Option<f64> {
        (self.reference_tokens > 0).then(|| self.kl_reference / self.reference_tokens as f64)
    }
}

/// Loss of one row and its gradient.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyLoss {
    /// The row's share of the step's loss, KL term included.
    pub loss: f64,
    /// Its clipped policy-gradient part.
    pub policy_loss: f64,
    /// Its KL part before `kl_coef`; 0 without reference log-probs.
    pub kl_loss: f64,
    /// d loss / d `log_probs[i]`; exactly 0 where the mask is false.
    pub gradient: Vec<f64>,
    /// Sums for the step's metrics.
    pub stats: TokenStats,
}

impl PolicyLossOptions {
    /// Checks the options.
    ///
    /// # Errors
    /// Names the option out of range.
    pub fn check(&self) -> Result<(), LossError> {
        let refuse = |name, value, remedy| Err(LossError::Option { name, value, remedy });
        if !(0.0..=1.0).contains(&self.clip_low) {
            return refuse("clip_low", self.clip_low, "give a number from 0 to 1");
        }
        if !(self.clip_high.is_finite() && self.clip_high >= 0.0) {
            return refuse("clip_high", self.clip_high, "give a finite number of at least 0");
        }
        if !(self.kl_coef.is_finite() && self.kl_coef >= 0.0) {
            return refuse("kl_coef", self.kl_coef, "give a finite number of at least 0");
        }
        if let Some(bound) = self.dual_clip
            && bound.partial_cmp(&1.0) != Some(std::cmp::Ordering::Greater)
        {
            return refuse("dual_clip", bound, "give a number above 1, or leave it out");
        }
        Ok(())
    }

    /// The loss of one row: `-min(r A, clip(r) A)` a token (Schulman et al. 2017, arXiv:1707.06347, equation 7),
    /// plus `kl_coef` times the KL to the reference, times the token's weight.
    ///
    /// # Errors
    /// A missing or non-finite value at a sampled token, lists of different lengths, a ratio that overflows.
    pub fn row(&self, row: &Row<'_>) -> Result<PolicyLoss, LossError> {
        let length = row.mask.len();
        same_length("log_probs", row.log_probs.len(), length)?;
        same_length("old_log_probs", row.old_log_probs.len(), length)?;
        if let Some(reference) = row.reference_log_probs {
            same_length("reference_log_probs", reference.len(), length)?;
        }
        finite(row.advantage, "advantage", "row", 0)?;
        let mut result = PolicyLoss {
            loss: 0.0,
            policy_loss: 0.0,
            kl_loss: 0.0,
            gradient: vec![0.0; length],
            stats: TokenStats::default(),
        };
        for index in (0..length).filter(|&index| row.mask[index]) {
            let log_prob = finite(row.log_probs[index], "log-prob", "token", index)?;
            let old =
                row.old_log_probs[index].ok_or(LossError::Missing { what: "captured log-prob", index })?;
            let old = finite(old, "captured log-prob", "token", index)?;
            let (mut loss, mut gradient) =
                self.surrogate(log_prob, old, row.advantage, index, &mut result.stats)?;
            result.policy_loss += row.token_weight * loss;
            match row.reference_log_probs {
                Some(reference) => {
                    let reference = finite(reference[index], "reference log-prob", "token", index)?;
                    let (kl, kl_gradient) = self.kl.estimate(log_prob, reference);
                    result.stats.kl_reference += finite(kl, "KL to the reference", "token", index)?;
                    result.stats.reference_tokens += 1;
                    result.kl_loss += row.token_weight * kl;
                    if self.kl_coef != 0.0 {
                        loss += self.kl_coef * kl;
                        gradient += self.kl_coef * kl_gradient;
                    }
                }
                None if self.kl_coef != 0.0 => {
                    return Err(LossError::Missing { what: "reference log-prob", index });
                }
                None => {}
            }
            result.loss += row.token_weight * loss;
            result.gradient[index] = row.token_weight * gradient;
        }
        Ok(result)
    }

    /// Loss and gradient of one token, before its weight.
    fn surrogate(
        &self,
        log_prob: f64,
        old: f64,
        advantage: f64,
        index: usize,
        stats: &mut TokenStats,
    ) -> Result<(f64, f64), LossError> {
        let ratio = finite((log_prob - old).exp(), "importance ratio", "token", index)?;
        let clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high);
        let unclipped_loss = -ratio * advantage;
        let clipped_loss = -clipped * advantage;
        // The larger loss is the smaller objective; where the clipped one is larger the ratio gets no gradient.
        let (mut loss, mut gradient) = if clipped_loss > unclipped_loss {
            (clipped_loss, 0.0)
        } else {
            (unclipped_loss, -ratio * advantage)
        };
        if let Some(bound) = self.dual_clip
            && advantage < 0.0
            && loss > -advantage * bound
        {
            (loss, gradient) = (-advantage * bound, 0.0);
        }
        stats.tokens += 1;
        stats.clipped_low += usize::from(advantage < 0.0 && ratio < 1.0 - self.clip_low);
        stats.clipped_high += usize::from(advantage > 0.0 && ratio > 1.0 + self.clip_high);
        stats.ratio += ratio;
        stats.ratio_max = stats.ratio_max.max(ratio);
        stats.kl_old += KlEstimator::K3.estimate(log_prob, old).0.abs();
        Ok((loss, gradient))
    }
}
