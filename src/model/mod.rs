//! (room `model`; see the crate docs)
