//! (room `rollout`; see the crate docs)
