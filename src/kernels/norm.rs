//! RMS norm, per-head RMS norm with rotary position embedding, and their gradients.

use super::isa::dispatch;
use super::math::{dot, load, store};
use super::simd::{LANES, Simd};

/// `y = w * x / rms(x)` for rows of `w.len()` values; `scales` receives `1 / rms` of each row.
///
/// # Panics
/// When the lengths do not fit.
pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32], scales: &mut [f32]) {
    let width = weight.len();
    assert!(
        x.len() == y.len() && x.len() == scales.len() * width,
        "rows fit"
    );
    // SAFETY: lengths were checked.
    unsafe {
        rows(
            x.as_ptr(),
            weight.as_ptr(),
            epsilon,
            y.as_mut_ptr(),
            scales.as_mut_ptr(),
            scales.len(),
            width,
        );
    }
}

dispatch! {
    unsafe fn rows(x: *const f32, weight: *const f32, epsilon: f32, y: *mut f32, scales: *mut f32, count: usize, width: usize) = rows_body
}

/// `1 / sqrt(mean(x^2) + epsilon)`.
#[inline(always)]
unsafe fn inverse_rms<S: Simd>(x: *const f32, width: usize, epsilon: f32) -> f32 {
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
    assert!(
        x.len() == dy.len() && x.len() == dx.len() && x.len() == scales.len() * width,
        "rows fit"
    );
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
unsafe fn row_backward<S: Simd>(
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
            let old = if adds {
                load::<S>(dx.add(at), n)
            } else {
                S::splat(0.0)
            };
            let value = S::fma(product, scale, old);
            store::<S>(
                dx.add(at),
                S::fma(load::<S>(x.add(at), n), correction, value),
                n,
            );
            at += n;
        }
    }
}

/// Continues `dw[j]` with the chain over rows of `dy[row, j] * (x[row, j] * scales[row])`.
///
/// # Panics
/// When the lengths do not fit.
pub fn rms_norm_weight_gradient(x: &[f32], scales: &[f32], dy: &[f32], dw: &mut [f32]) {
    assert!(
        x.len() == dy.len() && x.len() == scales.len() * dw.len(),
        "rows fit"
    );
    // SAFETY: lengths were checked.
    unsafe {
        weight_gradient(
            x.as_ptr(),
            scales.as_ptr(),
            dy.as_ptr(),
            dw.as_mut_ptr(),
            scales.len(),
            dw.len(),
        );
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
                let normed = S::mul(
                    load::<S>(x.add(row * width + at), n),
                    S::splat(*scales.add(row)),
                );
                sum = S::fma(load::<S>(dy.add(row * width + at), n), normed, sum);
            }
            store::<S>(dw.add(at), sum, n);
        }
        at += n;
    }
}

/// Cosines and sines `[positions, head_dim / 2]` of rotary position embedding.
#[derive(Debug, Clone)]
pub struct RopeTable {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl RopeTable {
    /// Angles are `position * theta^(-2j / head_dim)`, with the frequency and the product rounded to f32 as
    /// the reference implementations do.
    #[must_use]
    pub fn new(theta: f64, head_dim: usize, positions: usize) -> Self {
        let half = head_dim / 2;
        let frequencies: Vec<f32> = (0..half)
            .map(|j| (1.0 / theta.powf(2.0 * j as f64 / head_dim as f64)) as f32)
            .collect();
        let mut table = Self {
            cos: Vec::new(),
            sin: Vec::new(),
            half,
        };
        table.cos.reserve(positions * half);
        table.sin.reserve(positions * half);
        for position in 0..positions {
            for frequency in &frequencies {
                let angle = f64::from(position as f32 * frequency);
                table.cos.push(angle.cos() as f32);
                table.sin.push(angle.sin() as f32);
            }
        }
        table
    }

    /// Number of positions.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.cos.len() / self.half.max(1)
    }
}

/// Per-head norm and rotation of one kind of head (query or key).
#[derive(Debug, Clone, Copy)]
pub struct HeadNorm<'a> {
    /// RMS norm weight `[head_dim]`.
    pub weight: &'a [f32],
    pub epsilon: f32,
    pub table: &'a RopeTable,
    /// Multiplies the result: `1 / sqrt(head_dim)` for queries, 1 for keys.
    pub factor: f32,
    /// Number of heads.
    pub heads: usize,
}

impl HeadNorm<'_> {
    fn check(&self, wide: usize, stride: usize, narrow: usize, positions: &[u32]) {
        let width = self.heads * self.weight.len();
        let rows = positions.len();
        assert!(
            self.weight.len() == 2 * self.table.half
                && narrow == rows * width
                && (rows == 0 || (width <= stride && wide >= (rows - 1) * stride + width)),
            "heads fit"
        );
        let limit = self.table.positions();
        assert!(
            positions
                .iter()
                .all(|&position| (position as usize) < limit),
            "positions have angles"
        );
    }

    /// `y = factor * rope(rms_norm(x))` for every head of every row; rows of `x` start `stride` apart, those
    /// of `y` are dense.
    ///
    /// # Panics
    /// When the lengths do not fit, or a position has no angle.
    pub fn forward(&self, x: &[f32], stride: usize, positions: &[u32], y: &mut [f32]) {
        self.check(x.len(), stride, y.len(), positions);
        // SAFETY: lengths were checked.
        unsafe { heads_forward(self, x.as_ptr(), stride, positions, y.as_mut_ptr()) };
    }

    /// Turns `dy` (dense) in place into the gradient at the norm's output, and writes the gradient at `x`
    /// to `dx`, whose rows start `stride` apart like those of `x`.
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn backward(
        &self,
        x: &[f32],
        stride: usize,
        positions: &[u32],
        dy: &mut [f32],
        dx: &mut [f32],
    ) {
        self.check(x.len(), stride, dy.len(), positions);
        self.check(dx.len(), stride, dy.len(), positions);
        // SAFETY: lengths were checked.
        unsafe {
            heads_backward(
                self,
                x.as_ptr(),
                stride,
                positions,
                dy.as_mut_ptr(),
                dx.as_mut_ptr(),
            );
        }
    }

    /// Continues `dw` with the chain over rows and heads of `dy * normed x`, `dy` as [`HeadNorm::backward`]
    /// left it.
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn weight_gradient(
        &self,
        x: &[f32],
        stride: usize,
        positions: &[u32],
        dy: &[f32],
        dw: &mut [f32],
    ) {
        self.check(x.len(), stride, dy.len(), positions);
        assert_eq!(dw.len(), self.weight.len(), "heads fit");
        // SAFETY: lengths were checked.
        unsafe {
            heads_weight_gradient(
                self,
                x.as_ptr(),
                stride,
                positions.len(),
                dy.as_ptr(),
                dw.as_mut_ptr(),
            );
        }
    }
}

dispatch! {
    unsafe fn heads_forward(h: &HeadNorm<'_>, x: *const f32, stride: usize, positions: &[u32], y: *mut f32) = heads_forward_body
}

#[inline(always)]
unsafe fn heads_forward_body<S: Simd>(
    h: &HeadNorm<'_>,
    x: *const f32,
    stride: usize,
    positions: &[u32],
    y: *mut f32,
) {
    let (half, dim) = (h.table.half, h.weight.len());
    let weight = h.weight.as_ptr();
    for (row, &position) in positions.iter().enumerate() {
        for head in 0..h.heads {
            // SAFETY: `HeadNorm::forward` checked the lengths and positions.
            unsafe {
                let x = x.add(row * stride + head * dim);
                let y = y.add((row * h.heads + head) * dim);
                let cos = h.table.cos.as_ptr().add(position as usize * half);
                let sin = h.table.sin.as_ptr().add(position as usize * half);
                let scale = S::splat(inverse_rms::<S>(x, dim, h.epsilon));
                let factor = S::splat(h.factor);
                let mut at = 0;
                while at < half {
                    let n = (half - at).min(LANES);
                    let a = S::mul(load::<S>(x.add(at), n), scale);
                    let a = S::mul(a, load::<S>(weight.add(at), n));
                    let b = S::mul(load::<S>(x.add(half + at), n), scale);
                    let b = S::mul(b, load::<S>(weight.add(half + at), n));
                    let (cos, sin) = (load::<S>(cos.add(at), n), load::<S>(sin.add(at), n));
                    let first = S::sub(S::mul(a, cos), S::mul(b, sin));
                    let second = S::fma(b, cos, S::mul(a, sin));
                    store::<S>(y.add(at), S::mul(first, factor), n);
                    store::<S>(y.add(half + at), S::mul(second, factor), n);
                    at += n;
                }
            }
        }
    }
}

dispatch! {
    unsafe fn heads_backward(h: &HeadNorm<'_>, x: *const f32, stride: usize, positions: &[u32], dy: *mut f32, dx: *mut f32) = heads_backward_body
}

#[inline(always)]
unsafe fn heads_backward_body<S: Simd>(
    h: &HeadNorm<'_>,
    x: *const f32,
    stride: usize,
    positions: &[u32],
    dy: *mut f32,
    dx: *mut f32,
) {
    let (half, dim) = (h.table.half, h.weight.len());
    for (row, &position) in positions.iter().enumerate() {
        for head in 0..h.heads {
            // SAFETY: `HeadNorm::backward` checked the lengths and positions.
            unsafe {
                let at_head = row * stride + head * dim;
                let (x, dx) = (x.add(at_head), dx.add(at_head));
                let dy = dy.add((row * h.heads + head) * dim);
                let cos = h.table.cos.as_ptr().add(position as usize * half);
                let sin = h.table.sin.as_ptr().add(position as usize * half);
                let factor = S::splat(h.factor);
                let mut at = 0;
                while at < half {
                    let n = (half - at).min(LANES);
                    let a = S::mul(load::<S>(dy.add(at), n), factor);
                    let b = S::mul(load::<S>(dy.add(half + at), n), factor);
                    let (cos, sin) = (load::<S>(cos.add(at), n), load::<S>(sin.add(at), n));
                    store::<S>(dy.add(at), S::fma(b, sin, S::mul(a, cos)), n);
                    store::<S>(dy.add(half + at), S::sub(S::mul(b, cos), S::mul(a, sin)), n);
                    at += n;
                }
                let scale = inverse_rms::<S>(x, dim, h.epsilon);
                row_backward::<S>(x, h.weight.as_ptr(), scale, dy, dx, dim, false);
            }
        }
    }
}

dispatch! {
    unsafe fn heads_weight_gradient(h: &HeadNorm<'_>, x: *const f32, stride: usize, rows: usize, dy: *const f32, dw: *mut f32) = heads_weight_gradient_body
}

#[inline(always)]
unsafe fn heads_weight_gradient_body<S: Simd>(
    h: &HeadNorm<'_>,
    x: *const f32,
    stride: usize,
    rows: usize,
    dy: *const f32,
    dw: *mut f32,
) {
    let dim = h.weight.len();
    for row in 0..rows {
        for head in 0..h.heads {
            // SAFETY: `HeadNorm::weight_gradient` checked the lengths.
            unsafe {
                let x = x.add(row * stride + head * dim);
                let dy = dy.add((row * h.heads + head) * dim);
                let scale = S::splat(inverse_rms::<S>(x, dim, h.epsilon));
                let mut at = 0;
                while at < dim {
                    let n = (dim - at).min(LANES);
                    let normed = S::mul(load::<S>(x.add(at), n), scale);
                    let sum = S::fma(load::<S>(dy.add(at), n), normed, load::<S>(dw.add(at), n));
                    store::<S>(dw.add(at), sum, n);
                    at += n;
                }
            }
        }
    }
}
