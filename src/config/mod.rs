//! (room `config`; see the crate docs)
