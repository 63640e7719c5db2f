//! CPU math with a fixed reduction order, chosen by CPU at run time. No autograd, no I/O.
//!
//! Invariants:
//! - Every result is a function of its inputs alone: not of the batch a row sits in, the number of threads,
//!   nor the instruction set ([`Isa`]: AVX-512, AVX2 with FMA, plain Rust). A dot product over a model's
//!   dimension is one chain of fused multiply-adds in order (see [`gemm`](matmul_packed)); sums over
//!   positions are ordered by absolute position; sums over a row's columns use 16 interleaved partial sums.
//! - Threads split outputs, never a sum.
//! - `unsafe` lives behind functions that check lengths.

mod activation;
mod adamw;
mod attention;
mod attention_backward;
mod gemm;
mod isa;
mod math;
mod matmul;
mod norm;
mod pool;
mod rope;
mod simd;
mod softmax;

pub use activation::{add, swiglu, swiglu_backward};
pub use adamw::{AdamW, adamw, l2_norm};
pub use attention::{Heads, Run, attention, attention_cached, cache_capacity, cache_copy, cache_write};
pub use attention_backward::{AttentionInputs, attention_backward};
pub use gemm::Output;
pub use isa::Isa;
pub use math::with_scratch;
pub use matmul::{Packed, View, accumulate_outer, matmul, matmul_packed};
pub use norm::{rms_norm, rms_norm_backward, rms_norm_weight_gradient};
pub use pool::Pool;
pub use rope::{HeadNorm, RopeTable};
pub use softmax::{
    Normalizer, apply_temperature, entropy, log_prob, log_prob_gradient, log_softmax, normalizer, softmax,
};
