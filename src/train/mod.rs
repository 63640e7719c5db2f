//! (room `train`; see the crate docs)
