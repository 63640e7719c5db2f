//! Which instruction set the kernels use: the best that the CPU has, found once.

use std::sync::atomic::{AtomicU8, Ordering};

/// An instruction set that the kernels are built for. All give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust; slow where the target has no fused multiply-add.
    Portable = 1,
    /// AVX2 and FMA.
    Avx2 = 2,
    /// AVX-512F.
    Avx512 = 3,
}

static CURRENT: AtomicU8 = AtomicU8::new(0);

impl Isa {
    /// The best instruction set of this CPU.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            if has_avx2 && is_x86_feature_detected!("avx512f") {
                return Self::Avx512;
            }
            if has_avx2 {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// What the kernels use now.
    #[inline]
    #[must_use]
    pub fn current() -> Self {
        match CURRENT.load(Ordering::Relaxed) {
            1 => Self::Portable,
            2 => Self::Avx2,
            3 => Self::Avx512,
            _ => {
                let best = Self::detect();
                CURRENT.store(best as u8, Ordering::Relaxed);
                best
            }
        }
    }

    /// Makes all kernels use this instruction set, for comparisons; `false` when the CPU does not have it.
    #[must_use]
    pub fn select(self) -> bool {
        let is_available = self <= Self::detect();
        if is_available {
            CURRENT.store(self as u8, Ordering::Relaxed);
        }
        is_available
    }
}

/// Makes `fn name(args)` call `body::<S>(args)` compiled for the current instruction set.
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis unsafe fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name($($arg: $type),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx512($($arg: $type),*) $(-> $ret)? {
                // SAFETY: the caller's promise is passed on.
                unsafe { $body::<$crate::kernels::simd::Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx2($($arg: $type),*) $(-> $ret)? {
                // SAFETY: the caller's promise is passed on.
                unsafe { $body::<$crate::kernels::simd::Avx2>($($arg),*) }
            }
            // SAFETY: the caller's promise is passed on; `Isa::current` is one that the CPU has.
            unsafe {
                match $crate::kernels::isa::Isa::current() {
                    #[cfg(target_arch = "x86_64")]
                    $crate::kernels::isa::Isa::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::kernels::isa::Isa::Avx2 => avx2($($arg),*),
                    _ => $body::<$crate::kernels::simd::Portable>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use dispatch;
