//! (room `cli`; see the crate docs)
