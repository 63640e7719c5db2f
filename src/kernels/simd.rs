//! Sixteen `f32` lanes on three instruction sets, with the same bits on each.
//!
//! Every operation is an IEEE one (correctly rounded, fused where it says so) or a fixed permutation, so a
//! kernel written once over [`Simd`] gives the same result on AVX-512, on AVX2 and in plain Rust.
//! Kernels are `#[inline(always)]` bodies over a type parameter; [`dispatch!`] makes the callable function.

/// Lanes of a [`Simd`] value.
pub(crate) const LANES: usize = 16;

/// Sixteen `f32` lanes. All methods are unsafe: the CPU must have the instruction set of the type.
pub(crate) trait Simd: Copy {
    /// Vectors of a row that one micro-kernel keeps in registers.
    const COLUMNS: usize;
    type V: Copy;

    unsafe fn splat(value: f32) -> Self::V;
    /// Reads 16 floats at `from`, of any alignment.
    unsafe fn load(from: *const f32) -> Self::V;
    /// Reads `count` floats at `from`; the other lanes are 0 and their memory is not touched.
    unsafe fn load_first(from: *const f32, count: usize) -> Self::V;
    unsafe fn store(to: *mut f32, value: Self::V);
    /// Writes the first `count` lanes only.
    unsafe fn store_first(to: *mut f32, value: Self::V, count: usize);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `if a > b { a } else { b }`.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { a } else { b }`.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sqrt(a: Self::V) -> Self::V;
    /// To the nearest whole number, ties to even.
    unsafe fn round(a: Self::V) -> Self::V;
    /// 2 to the power of `a`, whole numbers from -126 to 127.
    unsafe fn power_of_two(a: Self::V) -> Self::V;
    /// The first `count` lanes of `a`, the others of `b`.
    unsafe fn select_first(count: usize, a: Self::V, b: Self::V) -> Self::V;

    /// Sum of the lanes: pairs at distance 8, then 4, 2, 1.
    #[inline(always)]
    unsafe fn reduce_add(a: Self::V) -> f32 {
        let mut lanes = [0f32; LANES];
        // SAFETY: 16 floats fit; the instruction set is the caller's promise.
        unsafe { Self::store(lanes.as_mut_ptr(), a) };
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                lanes[lane] += lanes[lane + width];
            }
            width /= 2;
        }
        lanes[0]
    }

    /// The largest lane.
    #[inline(always)]
    unsafe fn reduce_max(a: Self::V) -> f32 {
        let mut lanes = [0f32; LANES];
        // SAFETY: 16 floats fit; the instruction set is the caller's promise.
        unsafe { Self::store(lanes.as_mut_ptr(), a) };
        let mut largest = lanes[0];
        for &lane in &lanes[1..] {
            largest = if lane > largest { lane } else { largest };
        }
        largest
    }
}

/// Plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn lanes(lane: impl Fn(usize) -> f32) -> [f32; LANES] {
    std::array::from_fn(lane)
}

impl Simd for Portable {
    const COLUMNS: usize = 1;
    type V = [f32; LANES];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::V {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        // SAFETY: the caller promises 16 readable floats; arrays of f32 need f32's alignment only.
        unsafe { *from.cast::<Self::V>() }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> Self::V {
        // SAFETY: the caller promises `count` readable floats.
        lanes(|lane| if lane < count { unsafe { *from.add(lane) } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::V) {
        // SAFETY: the caller promises 16 writable floats.
        unsafe { *to.cast::<Self::V>() = value };
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, value: Self::V, count: usize) {
        for (lane, value) in value.into_iter().enumerate().take(count) {
            // SAFETY: the caller promises `count` writable floats.
            unsafe { *to.add(lane) = value };
        }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        lanes(|lane| a[lane] + b[lane])
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        lanes(|lane| a[lane] - b[lane])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        lanes(|lane| a[lane] * b[lane])
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        lanes(|lane| a[lane] / b[lane])
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanes(|lane| a[lane].mul_add(b[lane], c[lane]))
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        lanes(|lane| if a[lane] > b[lane] { a[lane] } else { b[lane] })
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        lanes(|lane| if a[lane] < b[lane] { a[lane] } else { b[lane] })
    }
    #[inline(always)]
    unsafe fn sqrt(a: Self::V) -> Self::V {
        lanes(|lane| a[lane].sqrt())
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        lanes(|lane| a[lane].round_ties_even())
    }
    #[inline(always)]
    unsafe fn power_of_two(a: Self::V) -> Self::V {
        lanes(|lane| f32::from_bits(((a[lane] as i32 + 127) << 23) as u32))
    }
    #[inline(always)]
    unsafe fn select_first(count: usize, a: Self::V, b: Self::V) -> Self::V {
        lanes(|lane| if lane < count { a[lane] } else { b[lane] })
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, Simd};
    use std::arch::x86_64::*;

    /// AVX-512F.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512;

    #[inline(always)]
    fn mask(count: usize) -> __mmask16 {
        ((1u32 << count) - 1) as __mmask16
    }

    // SAFETY, for every block below: memory is the caller's promise as the trait states it, and so is that
    // the CPU has the instruction set.
    #[expect(clippy::undocumented_unsafe_blocks, reason = "one comment above covers them all")]
    impl Simd for Avx512 {
        const COLUMNS: usize = 4;
        type V = __m512;

        #[inline(always)]
        unsafe fn splat(value: f32) -> __m512 {
            unsafe { _mm512_set1_ps(value) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> __m512 {
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn load_first(from: *const f32, count: usize) -> __m512 {
            unsafe { _mm512_maskz_loadu_ps(mask(count), from) }
        }
        #[inline(always)]
        unsafe fn store(to: *mut f32, value: __m512) {
            unsafe { _mm512_storeu_ps(to, value) }
        }
        #[inline(always)]
        unsafe fn store_first(to: *mut f32, value: __m512, count: usize) {
            unsafe { _mm512_mask_storeu_ps(to, mask(count), value) }
        }
        #[inline(always)]
        unsafe fn add(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sub(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_sub_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn mul(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn div(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_div_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn max(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_max_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn min(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_min_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sqrt(a: __m512) -> __m512 {
            unsafe { _mm512_sqrt_ps(a) }
        }
        #[inline(always)]
        unsafe fn round(a: __m512) -> __m512 {
            unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
        }
        #[inline(always)]
        unsafe fn power_of_two(a: __m512) -> __m512 {
            unsafe {
                let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127));
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
            }
        }
        #[inline(always)]
        unsafe fn select_first(count: usize, a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_mask_blend_ps(mask(count), b, a) }
        }
    }

    /// AVX2 and FMA: two registers of 8 lanes.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2;

    type Pair = (__m256, __m256);

    /// All bits set in the first `count` of 8 lanes.
    #[inline(always)]
    unsafe fn mask8(count: usize) -> __m256i {
        const TABLE: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
        // SAFETY: `8 - count` is between 0 and 8, so 8 values follow it in the table.
        unsafe { _mm256_loadu_si256(TABLE.as_ptr().add(8 - count).cast()) }
    }

    #[inline(always)]
    fn halves(count: usize) -> (usize, usize) {
        (count.min(LANES / 2), count.saturating_sub(LANES / 2))
    }

    // SAFETY, for every block below: memory is the caller's promise as the trait states it (masked lanes do
    // not touch memory), and so is that the CPU has the instruction set.
    #[expect(clippy::undocumented_unsafe_blocks, reason = "one comment above covers them all")]
    impl Simd for Avx2 {
        const COLUMNS: usize = 1;
        type V = Pair;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Pair {
            unsafe { (_mm256_set1_ps(value), _mm256_set1_ps(value)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Pair {
            unsafe { (_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
        }
        #[inline(always)]
        unsafe fn load_first(from: *const f32, count: usize) -> Pair {
            let (low, high) = halves(count);
            unsafe {
                (_mm256_maskload_ps(from, mask8(low)), _mm256_maskload_ps(from.wrapping_add(8), mask8(high)))
            }
        }
        #[inline(always)]
        unsafe fn store(to: *mut f32, value: Pair) {
            unsafe {
                _mm256_storeu_ps(to, value.0);
                _mm256_storeu_ps(to.add(8), value.1);
            }
        }
        #[inline(always)]
        unsafe fn store_first(to: *mut f32, value: Pair, count: usize) {
            let (low, high) = halves(count);
            unsafe {
                _mm256_maskstore_ps(to, mask8(low), value.0);
                _mm256_maskstore_ps(to.wrapping_add(8), mask8(high), value.1);
            }
        }
        #[inline(always)]
        unsafe fn add(a: Pair, b: Pair) -> Pair {
            unsafe { (_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn sub(a: Pair, b: Pair) -> Pair {
            unsafe { (_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn mul(a: Pair, b: Pair) -> Pair {
            unsafe { (_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn div(a: Pair, b: Pair) -> Pair {
            unsafe { (_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn fma(a: Pair, b: Pair, c: Pair) -> Pair {
            unsafe { (_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)) }
        }
        #[inline(always)]
        unsafe fn max(a: Pair, b: Pair) -> Pair {
            unsafe { (_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn min(a: Pair, b: Pair) -> Pair {
            unsafe { (_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn sqrt(a: Pair) -> Pair {
            unsafe { (_mm256_sqrt_ps(a.0), _mm256_sqrt_ps(a.1)) }
        }
        #[inline(always)]
        unsafe fn round(a: Pair) -> Pair {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            unsafe { (_mm256_round_ps::<NEAREST>(a.0), _mm256_round_ps::<NEAREST>(a.1)) }
        }
        #[inline(always)]
        unsafe fn power_of_two(a: Pair) -> Pair {
            unsafe {
                let bias = _mm256_set1_epi32(127);
                let low = _mm256_add_epi32(_mm256_cvtps_epi32(a.0), bias);
                let high = _mm256_add_epi32(_mm256_cvtps_epi32(a.1), bias);
                (
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
                )
            }
        }
        #[inline(always)]
        unsafe fn select_first(count: usize, a: Pair, b: Pair) -> Pair {
            let (low, high) = halves(count);
            unsafe {
                (
                    _mm256_blendv_ps(b.0, a.0, _mm256_castsi256_ps(mask8(low))),
                    _mm256_blendv_ps(b.1, a.1, _mm256_castsi256_ps(mask8(high))),
                )
            }
        }
    }
}
