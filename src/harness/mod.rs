//! (room `harness`; see the crate docs)
