//! How far two sets of log-probs of the same tokens are apart: captured against recomputed.

use super::error::{LossError, finite, same_length};

/// Statistics over token pairs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Alignment {
    /// Token pairs compared.
    pub tokens: usize,
    /// Pearson correlation of the probabilities `exp(log-prob)`; `None` when either side has no spread.
    pub prob_correlation: Option<f64>,
    /// Largest absolute difference of log-probs.
    pub max_logprob_diff: f64,
    /// Mean absolute difference of log-probs.
    pub mean_logprob_diff: f64,
    /// Mean k3 estimate of KL(captured || recomputed).
    pub mismatch_kl: f64,
}

/// Compares `captured[i]` with `recomputed[i]`.
///
/// # Errors
/// Different lengths, no pair at all, or a value that is not finite.
pub fn alignment(captured: &[f64], recomputed: &[f64]) -> Result<Alignment, LossError> {
    same_length("recomputed log-probs", recomputed.len(), captured.len())?;
    if captured.is_empty() {
        return Err(LossError::NoTokens);
    }
    let count = captured.len() as f64;
    let (mut max_diff, mut sum_diff, mut kl) = (0.0f64, 0.0, 0.0);
    let (mut mean_x, mut mean_y) = (0.0, 0.0);
    for (index, (&x, &y)) in captured.iter().zip(recomputed).enumerate() {
        finite(x, "captured log-prob", "token", index)?;
        finite(y, "recomputed log-prob", "token", index)?;
        max_diff = max_diff.max((x - y).abs());
        sum_diff += (x - y).abs();
        kl += (y - x).exp_m1() - (y - x);
        mean_x += x.exp();
        mean_y += y.exp();
    }
    (mean_x, mean_y) = (mean_x / count, mean_y / count);
    let (mut xx, mut yy, mut xy) = (0.0, 0.0, 0.0);
    for (x, y) in captured.iter().zip(recomputed) {
        let (dx, dy) = (x.exp() - mean_x, y.exp() - mean_y);
        xx += dx * dx;
        yy += dy * dy;
        xy += dx * dy;
    }
    let scale = (xx * yy).sqrt();
    Ok(Alignment {
        tokens: captured.len(),
        prob_correlation: (scale > 0.0).then(|| xy / scale),
        max_logprob_diff: max_diff,
        mean_logprob_diff: sum_diff / count,
        mismatch_kl: kl / count,
    })
}
