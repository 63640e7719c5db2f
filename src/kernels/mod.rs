//! (room `kernels`; see the crate docs)
