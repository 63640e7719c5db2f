//! Rows of logits: log-sum-exp, log-probs, entropy, probabilities and the gradient of a log-prob.
//!
//! Sampling, replay and training call the same functions, so the log-prob of a token does not depend on
//! who asks.

use super::isa::dispatch;
use super::math::{exp, load, store};
use super::simd::{LANES, Simd};

/// A row's normaliser.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalizer {
    /// The largest logit.
    pub max: f32,
    /// `ln sum exp(logit)`.
    pub log_sum_exp: f32,
}

/// Largest value and log-sum-exp of a row.
#[must_use]
pub fn normalizer(row: &[f32]) -> Normalizer {
    let (mut max, mut sum) = (0.0, 0.0);
    // SAFETY: the kernel reads the row's length.
    unsafe { max_and_sum(row.as_ptr(), row.len(), &mut max, &mut sum) };
    Normalizer { max, log_sum_exp: max + ln(sum) }
}

/// Natural logarithm, rounded from f64 so that it does not depend on the system's f32 version.
fn ln(value: f32) -> f32 {
    f64::from(value).ln() as f32
}

/// Log-probs of the whole row in place: `x - log_sum_exp`.
pub fn log_softmax(row: &mut [f32]) {
    let Normalizer { log_sum_exp, .. } = normalizer(row);
    for value in row {
        *value -= log_sum_exp;
    }
}

/// Log-prob of `target` under the row's softmax; equals that element of [`log_softmax`].
///
/// # Panics
/// When `target` is not in the row.
#[must_use]
pub fn log_prob(row: &[f32], target: usize) -> f32 {
    row[target] - normalizer(row).log_sum_exp
}

/// Divides a row of logits by the temperature; 1 changes nothing.
pub fn apply_temperature(row: &mut [f32], temperature: f32) {
    if temperature != 1.0 {
        for value in row {
            *value /= temperature;
        }
    }
}

/// Entropy in nats of the row's softmax: `ln z - sum e^(x-max) (x-max) / z`.
#[must_use]
pub fn entropy(row: &[f32], normalizer: Normalizer) -> f32 {
    // SAFETY: the kernel reads the row's length.
    let (sum, weighted) = unsafe { entropy_sums(row.as_ptr(), row.len(), normalizer.max) };
    ln(sum) - weighted / sum
}

/// Probabilities in place: `exp(x - log_sum_exp)`.
pub fn softmax(row: &mut [f32]) {
    let Normalizer { log_sum_exp, .. } = normalizer(row);
    // SAFETY: the kernel touches the row's length.
    unsafe { scaled_exp(row.as_mut_ptr(), row.len(), log_sum_exp, 1.0) };
}

/// Turns logits in place into the gradient at them of `gradient * log_prob(target)`:
/// `gradient * (1[target] - softmax)`.
///
/// # Panics
/// When `target` is not in the row.
pub fn log_prob_gradient(row: &mut [f32], target: usize, log_sum_exp: f32, gradient: f32) {
    assert!(target < row.len(), "the target is in the vocabulary");
    // SAFETY: the kernel touches the row's length.
    unsafe { scaled_exp(row.as_mut_ptr(), row.len(), log_sum_exp, -gradient) };
    row[target] += gradient;
}

dispatch! {
    unsafe fn max_and_sum(row: *const f32, len: usize, max: &mut f32, sum: &mut f32) = max_and_sum_body
}

#[inline(always)]
unsafe fn max_and_sum_body<S: Simd>(row: *const f32, len: usize, max: &mut f32, sum: &mut f32) {
    // SAFETY: the caller promises `len` floats.
    unsafe {
        *max = row_max::<S>(row, len);
        let shift = S::splat(*max);
        let mut sums = S::splat(0.0);
        let mut at = 0;
        while at < len {
            let n = (len - at).min(LANES);
            let value = exp::<S>(S::sub(load::<S>(row.add(at), n), shift));
            sums = S::add(sums, S::select_first(n, value, S::splat(0.0)));
            at += n;
        }
        *sum = S::reduce_add(sums);
    }
}

/// The largest of `len` values.
///
/// # Safety
/// `len` floats are readable; the CPU has `S`.
#[inline(always)]
pub(crate) unsafe fn row_max<S: Simd>(row: *const f32, len: usize) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let mut largest = S::splat(f32::NEG_INFINITY);
        let mut at = 0;
        while at < len {
            let n = (len - at).min(LANES);
            let value = S::select_first(n, load::<S>(row.add(at), n), largest);
            largest = S::max(value, largest);
            at += n;
        }
        S::reduce_max(largest)
    }
}

dispatch! {
    unsafe fn entropy_sums(row: *const f32, len: usize, max: f32) -> (f32, f32) = entropy_sums_body
}

#[inline(always)]
unsafe fn entropy_sums_body<S: Simd>(row: *const f32, len: usize, max: f32) -> (f32, f32) {
    // SAFETY: the caller promises `len` floats.
    unsafe {
        let shift = S::splat(max);
        let (mut sums, mut weighted) = (S::splat(0.0), S::splat(0.0));
        let mut at = 0;
        while at < len {
            let n = (len - at).min(LANES);
            let value = S::sub(load::<S>(row.add(at), n), shift);
            let weight = S::select_first(n, exp::<S>(value), S::splat(0.0));
            sums = S::add(sums, weight);
            weighted = S::fma(weight, value, weighted);
            at += n;
        }
        (S::reduce_add(sums), S::reduce_add(weighted))
    }
}

dispatch! {
    unsafe fn scaled_exp(row: *mut f32, len: usize, shift: f32, factor: f32) = scaled_exp_body
}

#[inline(always)]
unsafe fn scaled_exp_body<S: Simd>(row: *mut f32, len: usize, shift: f32, factor: f32) {
    let mut at = 0;
    while at < len {
        let n = (len - at).min(LANES);
        // SAFETY: the caller promises `len` floats.
        unsafe {
            let value = exp::<S>(S::sub(load::<S>(row.add(at), n), S::splat(shift)));
            store::<S>(row.add(at), S::mul(value, S::splat(factor)), n);
        }
        at += n;
    }
}
