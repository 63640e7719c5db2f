//! AdamW and the gradient's norm.

use super::isa::dispatch;
use super::math::{load, store};
use super::simd::{LANES, Simd};

/// Hyper-parameters of AdamW (Loshchilov & Hutter 2019, algorithm 2; decay times learning rate, as in torch).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
}

/// Step number `step` (from 1) of AdamW on all of `params`; each gradient is multiplied by `grad_scale`
/// (clipping) first. `m` and `v` are the moments.
///
/// # Panics
/// When the lengths differ or `step` is 0.
pub fn adamw(
    params: &mut [f32],
    grads: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    options: &AdamW,
    step: u64,
    grad_scale: f32,
) {
    let len = params.len();
    assert!(grads.len() == len && m.len() == len && v.len() == len, "moments fit the parameters");
    assert!(step > 0, "steps count from 1");
    let correction = |beta: f32| 1.0 - f64::from(beta).powf(step as f64);
    let constants = Constants {
        options: *options,
        grad_scale,
        step_size: (f64::from(options.lr) / correction(options.beta1)) as f32,
        root_correction: correction(options.beta2).sqrt() as f32,
    };
    // SAFETY: lengths were checked.
    unsafe {
        update(params.as_mut_ptr(), grads.as_ptr(), m.as_mut_ptr(), v.as_mut_ptr(), len, &constants);
    }
}

struct Constants {
    options: AdamW,
    grad_scale: f32,
    step_size: f32,
    root_correction: f32,
}

dispatch! {
    unsafe fn update(params: *mut f32, grads: *const f32, m: *mut f32, v: *mut f32, len: usize, constants: &Constants) = update_body
}

#[inline(always)]
unsafe fn update_body<S: Simd>(
    params: *mut f32,
    grads: *const f32,
    m: *mut f32,
    v: *mut f32,
    len: usize,
    constants: &Constants,
) {
    let AdamW { lr, beta1, beta2, eps, weight_decay } = constants.options;
    let mut at = 0;
    while at < len {
        let n = (len - at).min(LANES);
        // SAFETY: `adamw` checked the lengths.
        unsafe {
            let gradient = S::mul(load::<S>(grads.add(at), n), S::splat(constants.grad_scale));
            let (old_m, old_v) = (load::<S>(m.add(at), n), load::<S>(v.add(at), n));
            let new_m = S::fma(S::splat(1.0 - beta1), S::sub(gradient, old_m), old_m);
            let square = S::mul(gradient, S::mul(gradient, S::splat(1.0 - beta2)));
            let new_v = S::fma(S::splat(beta2), old_v, square);
            let root = S::div(S::sqrt(new_v), S::splat(constants.root_correction));
            let ratio = S::div(new_m, S::add(root, S::splat(eps)));
            let decayed = S::mul(load::<S>(params.add(at), n), S::splat(1.0 - lr * weight_decay));
            store::<S>(m.add(at), new_m, n);
            store::<S>(v.add(at), new_v, n);
            store::<S>(params.add(at), S::fma(ratio, S::splat(-constants.step_size), decayed), n);
        }
        at += n;
    }
}

/// Euclidean norm, summed in f64 in a fixed order: eight interleaved partial sums, then those in order.
#[must_use]
pub fn l2_norm(values: &[f32]) -> f64 {
    let mut sums = [0f64; 8];
    let (chunks, rest) = values.as_chunks::<8>();
    for chunk in chunks {
        for (sum, &value) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(value) * f64::from(value);
        }
    }
    for (sum, &value) in sums.iter_mut().zip(rest) {
        *sum += f64::from(value) * f64::from(value);
    }
    sums.iter().sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::l2_norm;

    #[test]
    fn the_norm_counts_every_value() {
        let values: Vec<f32> = (1..=19).map(|value| value as f32).collect();
        assert_eq!(l2_norm(&values), 2470f64.sqrt());
    }
}
