//! RMS norm and its gradients.

use super::isa::dispatch;
use super::math::{dot, load, store};
use super::simd::{LANES, Simd};

/// `y = w * x / rms(x)` for rows of `w.len()` values; `scales` receives `1 / rms` of each row.
///
/// # Panics
/// When the lengths do not fit.
pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32], scales: &mut [f32]) {
    let width = weight.len();
    assert!(x.len() == y.len() && x.len() == scales.len() * width, "rows fit");
    // SAFETY: lengths were checked.
    unsafe {
        rows(x.as_ptr(), weight.as_ptr(), epsilon, y.as_mut_ptr(), scales.as_mut_ptr(), scales.len(), width);
    }
}

dispatch! {
    unsafe fn rows(x: *const f32, weight: *const f32, epsilon: f32, y: *mut f32, scales: *mut f32, count: usize, width: usize) = rows_body
}

/// `1 / sqrt(mean(x^2) + epsilon)`.
#[inline(always)]
pub(super) unsafe fn inverse_rms<S: Simd>(x: *const f32, width: usize, epsilon: f32) -> f32 {
    // SAFETY: the caller promises `width` readable floats.
    let mean = unsafe { dot::<S>(x, x, width) } / width as f32;
    1.0 / (mean + epsilon).sqrt()
}

#[inline(always)]
unsafe fn rows_body<S: Simd>(
    x: *const f32,
    weight: *const f32,
    epsilon: f32,
    y: *mut f32,
    scales: *mut f32,
    count: usize,
    width: usize,
) {
    for row in 0..count {
        // SAFETY: `rms_norm` checked the lengths.
        unsafe {
            let (x, y) = (x.add(row * width), y.add(row * width));
            let scale = inverse_rms::<S>(x, width, epsilon);
            *scales.add(row) = scale;
            let scale = S::splat(scale);
            let mut at = 0;
            while at < width {
                let n = (width - at).min(LANES);
                let normed = S::mul(load::<S>(x.add(at), n), scale);
                store::<S>(y.add(at), S::mul(normed, load::<S>(weight.add(at), n)), n);
                at += n;
            }
        }
    }
}

/// Adds to `dx` the gradient through [`rms_norm`] of `dy`.
///
/// # Panics
/// When the lengths do not fit.
pub fn rms_norm_backward(x: &[f32], weight: &[f32], scales: &[f32], dy: &[f32], dx: &mut [f32]) {
    let width = weight.len();
    assert!(x.len() == dy.len() && x.len() == dx.len() && x.len() == scales.len() * width, "rows fit");
    // SAFETY: lengths were checked.
    unsafe {
        rows_backward(
            x.as_ptr(),
            weight.as_ptr(),
            scales.as_ptr(),
            dy.as_ptr(),
            dx.as_mut_ptr(),
            scales.len(),
            width,
        );
    }
}

dispatch! {
    unsafe fn rows_backward(x: *const f32, weight: *const f32, scales: *const f32, dy: *const f32, dx: *mut f32, count: usize, width: usize) = rows_backward_body
}

#[inline(always)]
unsafe fn rows_backward_body<S: Simd>(
    x: *const f32,
    weight: *const f32,
    scales: *const f32,
    dy: *const f32,
    dx: *mut f32,
    count: usize,
    width: usize,
) {
    for row in 0..count {
        // SAFETY: `rms_norm_backward` checked the lengths.
        unsafe {
            let (x, dy, dx) = (x.add(row * width), dy.add(row * width), dx.add(row * width));
            row_backward::<S>(x, weight, *scales.add(row), dy, dx, width, true);
        }
    }
}

/// `dx (+)= r (w dy) - x r^3 mean(w dy x)`.
#[inline(always)]
pub(super) unsafe fn row_backward<S: Simd>(
    x: *const f32,
    weight: *const f32,
    scale: f32,
    dy: *const f32,
    dx: *mut f32,
    width: usize,
    adds: bool,
) {
    // SAFETY: the caller promises `width` floats everywhere.
    unsafe {
        let mut sum = S::splat(0.0);
        let mut at = 0;
        while at < width {
            let n = (width - at).min(LANES);
            let product = S::mul(load::<S>(dy.add(at), n), load::<S>(weight.add(at), n));
            sum = S::fma(product, load::<S>(x.add(at), n), sum);
            at += n;
        }
        let correction = -(S::reduce_add(sum) * scale * scale * scale / width as f32);
        let (scale, correction) = (S::splat(scale), S::splat(correction));
        let mut at = 0;
        while at < width {
            let n = (width - at).min(LANES);
            let product = S::mul(load::<S>(dy.add(at), n), load::<S>(weight.add(at), n));
            let old = if adds { load::<S>(dx.add(at), n) } else { S::splat(0.0) };
            let value = S::fma(product, scale, old);
            store::<S>(dx.add(at), S::fma(load::<S>(x.add(at), n), correction, value), n);
            at += n;
        }
    }
}

/// Continues `dw[j]` with the chain over rows of `dy[row, j] * (x[row, j] * scales[row])`.
///
/// # Panics
/// When the lengths do not fit.
pub fn rms_norm_weight_gradient(x: &[f32], scales: &[f32], dy: &[f32], dw: &mut [f32]) {
    assert!(x.len() == dy.len() && x.len() == scales.len() * dw.len(), "rows fit");
    // SAFETY: lengths were checked.
    unsafe {
        weight_gradient(x.as_ptr(), scales.as_ptr(), dy.as_ptr(), dw.as_mut_ptr(), scales.len(), dw.len());
    }
}

dispatch! {
    unsafe fn weight_gradient(x: *const f32, scales: *const f32, dy: *const f32, dw: *mut f32, count: usize, width: usize) = weight_gradient_body
}

#[inline(always)]
unsafe fn weight_gradient_body<S: Simd>(
    x: *const f32,
    scales: *const f32,
    dy: *const f32,
    dw: *mut f32,
    count: usize,
    width: usize,
) {
    let mut at = 0;
    while at < width {
        let n = (width - at).min(LANES);
        // SAFETY: `rms_norm_weight_gradient` checked the lengths.
        unsafe {
            let mut sum = load::<S>(dw.add(at), n);
            for row in 0..count {
                let normed = S::mul(load::<S>(x.add(row * width + at), n), S::splat(*scales.add(row)));
                sum = S::fma(load::<S>(dy.add(row * width + at), n), normed, sum);
            }
            store::<S>(dw.add(at), sum, n);
        }
        at += n;
    }
}
