//! Per-head RMS norm followed by rotary position embedding (Su et al. 2021, the half-split form), and their
//! gradients.

use super::isa::dispatch;
use super::math::{load, store};
use super::norm::{inverse_rms, row_backward};
use super::simd::{LANES, Simd};

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
        let frequencies: Vec<f32> =
            (0..half).map(|j| (1.0 / theta.powf(2.0 * j as f64 / head_dim as f64)) as f32).collect();
        let mut table = Self { cos: Vec::new(), sin: Vec::new(), half };
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
        assert!(positions.iter().all(|&position| (position as usize) < limit), "positions have angles");
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
    pub fn backward(&self, x: &[f32], stride: usize, positions: &[u32], dy: &mut [f32], dx: &mut [f32]) {
        self.check(x.len(), stride, dy.len(), positions);
        self.check(dx.len(), stride, dy.len(), positions);
        // SAFETY: lengths were checked.
        unsafe {
            heads_backward(self, x.as_ptr(), stride, positions, dy.as_mut_ptr(), dx.as_mut_ptr());
        }
    }

    /// Continues `dw` with the chain over rows and heads of `dy * normed x`, `dy` as [`HeadNorm::backward`]
    /// left it.
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn weight_gradient(&self, x: &[f32], stride: usize, positions: &[u32], dy: &[f32], dw: &mut [f32]) {
        self.check(x.len(), stride, dy.len(), positions);
        assert_eq!(dw.len(), self.weight.len(), "heads fit");
        // SAFETY: lengths were checked.
        unsafe {
            heads_weight_gradient(self, x.as_ptr(), stride, positions.len(), dy.as_ptr(), dw.as_mut_ptr());
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
