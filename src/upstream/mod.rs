//! (room `upstream`; see the crate docs)
