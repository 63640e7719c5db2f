//! Estimators of KL(policy || reference) from the log-probs of sampled tokens.

use serde::{Deserialize, Serialize};

/// Schulman's estimators, `http://joschu.net/blog/kl-approx.html`. Nothing is clamped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `log p - log q`: unbiased, noisy, may be negative.
    K1,
    /// `(log p - log q)^2 / 2`: biased, low variance.
    K2,
    /// `q/p - 1 - log(q/p)`: unbiased and never negative.
    #[default]
    K3,
}

impl KlEstimator {
    /// The estimate for one token, and its derivative with respect to `log_prob`.
    #[must_use]
    pub fn estimate(self, log_prob: f64, reference: f64) -> (f64, f64) {
        let log_ratio = reference - log_prob;
        match self {
            Self::K1 => (-log_ratio, 1.0),
            Self::K2 => (0.5 * log_ratio * log_ratio, -log_ratio),
            // exp_m1 keeps the digits of small differences: exp(d) - 1 - d cancels.
            Self::K3 => (log_ratio.exp_m1() - log_ratio, -log_ratio.exp_m1()),
        }
    }
}
