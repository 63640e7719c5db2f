//! (room `loss`; see the crate docs)
