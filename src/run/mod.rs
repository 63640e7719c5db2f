//! (room `run`; see the crate docs)
