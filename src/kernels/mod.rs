//! CPU math with a fixed reduction order, chosen by CPU at run time. No autograd, no I/O.

mod pool;

pub use pool::Pool;
