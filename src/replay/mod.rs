//! (room `replay`; see the crate docs)
