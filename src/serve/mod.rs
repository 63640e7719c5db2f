//! (room `serve`; see the crate docs)
