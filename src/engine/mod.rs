//! (room `engine`; see the crate docs)
