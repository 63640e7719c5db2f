//! (room `capture`; see the crate docs)
