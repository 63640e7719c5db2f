//! (room `proxy`; see the crate docs)
