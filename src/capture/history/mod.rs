//! History once: what a call has in common with an earlier one of its session is stored with that one only.
//!
//! ```text
//! append ─▶ shorten ([`Held`]) ─▶ journal ─▶ Parquet        ([`crate::record::Shared`] says what was left out)
//! whole calls ◀─ join ([`Joiner`]) ◀─ reader
//! ```
//! A harness sends its whole conversation with each call. The writer remembers of the last calls of each session not
//! their bodies, but hashes of their blocks, and finds those blocks again wherever they stand in a new body; of a prompt's
//! ids the first ones. Bodies that lego made of others go on from those.
//!
//! Invariants:
//! - A base is durable before a call goes on from it, and was received on the same day (UTC). So a day's folder, and a
//!   journal, stand alone: a day can be read, and removed, without any other.
//! - What is left out has a checksum of the whole. What does not give that again is missing, and said to be.
//! - Expert routing is left out by the proxy, which compares it as it comes; it is put back here.

mod held;
mod joiner;
mod signature;

pub(super) use held::Held;
pub(super) use joiner::{Joiner, Parts};
