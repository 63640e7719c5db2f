//! (room `text`; see the crate docs)
