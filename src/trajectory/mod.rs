//! (room `trajectory`; see the crate docs)
