//! SwiGLU: `silu(gate) * up`.

use super::isa::dispatch;
use super::math::{load, sigmoid, store};
use super::simd::{LANES, Simd};

/// `y [rows, width]` from `gate_up [rows, 2 width]`, gate first.
///
/// # Panics
/// When the lengths do not fit.
pub fn swiglu(gate_up: &[f32], width: usize, y: &mut [f32]) {
    assert!(gate_up.len() == 2 * y.len() && y.len().is_multiple_of(width), "rows fit");
    // SAFETY: lengths were checked.
    unsafe { forward(gate_up.as_ptr(), y.as_mut_ptr(), y.len() / width, width) };
}

dispatch! {
    unsafe fn forward(gate_up: *const f32, y: *mut f32, rows: usize, width: usize) = forward_body
}

#[inline(always)]
unsafe fn forward_body<S: Simd>(gate_up: *const f32, y: *mut f32, rows: usize, width: usize) {
    for row in 0..rows {
        let mut at = 0;
        while at < width {
            let n = (width - at).min(LANES);
            // SAFETY: `swiglu` checked the lengths.
            unsafe {
                let gate = load::<S>(gate_up.add(row * 2 * width + at), n);
                let up = load::<S>(gate_up.add(row * 2 * width + width + at), n);
                let silu = S::mul(gate, sigmoid::<S>(gate));
                store::<S>(y.add(row * width + at), S::mul(silu, up), n);
            }
            at += n;
        }
    }
}

/// Turns `gate_up` in place into its gradient, and `dy` into the forward's `y`.
///
/// # Panics
/// When the lengths do not fit.
pub fn swiglu_backward(gate_up: &mut [f32], width: usize, dy: &mut [f32]) {
    assert!(gate_up.len() == 2 * dy.len() && dy.len().is_multiple_of(width), "rows fit");
    // SAFETY: lengths were checked.
    unsafe { backward(gate_up.as_mut_ptr(), dy.as_mut_ptr(), dy.len() / width, width) };
}

dispatch! {
    unsafe fn backward(gate_up: *mut f32, dy: *mut f32, rows: usize, width: usize) = backward_body
}

#[inline(always)]
unsafe fn backward_body<S: Simd>(gate_up: *mut f32, dy: *mut f32, rows: usize, width: usize) {
    for row in 0..rows {
        let mut at = 0;
        while at < width {
            let n = (width - at).min(LANES);
            // SAFETY: `swiglu_backward` checked the lengths.
            unsafe {
                let to_gate = gate_up.add(row * 2 * width + at);
                let (to_up, to_y) = (to_gate.add(width), dy.add(row * width + at));
                let (gate, up) = (load::<S>(to_gate, n), load::<S>(to_up, n));
                let dy = load::<S>(to_y, n);
                let one = S::splat(1.0);
                let sigmoid = sigmoid::<S>(gate);
                let silu = S::mul(gate, sigmoid);
                // d silu / d gate = sigmoid (1 + gate (1 - sigmoid))
                let slope = S::mul(sigmoid, S::fma(gate, S::sub(one, sigmoid), one));
                store::<S>(to_gate, S::mul(S::mul(dy, up), slope), n);
                store::<S>(to_up, S::mul(dy, silu), n);
                store::<S>(to_y, S::mul(silu, up), n);
            }
            at += n;
        }
    }
}

/// `y += x`.
///
/// # Panics
/// When the lengths differ.
pub fn add(x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "vectors fit");
    for (y, x) in y.iter_mut().zip(x) {
        *y += x;
    }
}
