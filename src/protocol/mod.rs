//! (room `protocol`; see the crate docs)
