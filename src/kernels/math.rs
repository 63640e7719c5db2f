//! Small pieces that several kernels share: exponential, dot product, scratch memory.

use super::simd::{LANES, Simd};
use std::cell::RefCell;

/// `e^x` to about 1e-7 relative, for x clamped to [-87.3, 88]. Polynomial of Cephes' `expf`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        let x = S::min(S::max(x, S::splat(-87.3)), S::splat(88.0));
        let k = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts: the first has so few bits that k times it is exact.
        let r = S::fma(k, S::splat(-355.0 / 512.0), x);
        let r = S::fma(k, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.987_569_1e-4);
        for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5] {
            p = S::fma(p, r, S::splat(coefficient));
        }
        let y = S::add(S::fma(S::mul(p, r), r, r), S::splat(1.0));
        S::mul(y, S::power_of_two(k))
    }
}

/// `1 / (1 + e^-x)`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
pub(crate) unsafe fn sigmoid<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        let one = S::splat(1.0);
        S::div(one, S::add(one, exp::<S>(S::sub(S::splat(0.0), x))))
    }
}

/// Sum over `len` elements of `a * b`, lane by lane, then across lanes.
///
/// # Safety
/// `len` floats are readable at both; the CPU has `S`.
#[inline(always)]
pub(crate) unsafe fn dot<S: Simd>(a: *const f32, b: *const f32, len: usize) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sum = S::splat(0.0);
        let mut at = 0;
        while at + LANES <= len {
            sum = S::fma(S::load(a.add(at)), S::load(b.add(at)), sum);
            at += LANES;
        }
        if at < len {
            let (a, b) = (S::load_first(a.add(at), len - at), S::load_first(b.add(at), len - at));
            sum = S::fma(a, b, sum);
        }
        S::reduce_add(sum)
    }
}

/// Loads and stores of up to 16 floats.
///
/// # Safety
/// `count` floats (at most 16) are readable; the CPU has `S`.
#[inline(always)]
pub(crate) unsafe fn load<S: Simd>(from: *const f32, count: usize) -> S::V {
    // SAFETY: the caller's promise.
    unsafe { if count >= LANES { S::load(from) } else { S::load_first(from, count) } }
}

/// # Safety
/// `count` floats (at most 16) are writable; the CPU has `S`.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd>(to: *mut f32, value: S::V, count: usize) {
    // SAFETY: the caller's promise.
    unsafe { if count >= LANES { S::store(to, value) } else { S::store_first(to, value, count) } }
}

thread_local! {
    static SCRATCH: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Lends a buffer of `len` floats that this thread uses again and again. Its content is arbitrary.
pub fn with_scratch<T>(len: usize, work: impl FnOnce(&mut [f32]) -> T) -> T {
    let mut buffer = SCRATCH.with(|scratch| scratch.borrow_mut().pop()).unwrap_or_default();
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    let result = work(&mut buffer[..len]);
    SCRATCH.with(|scratch| scratch.borrow_mut().push(buffer));
    result
}
