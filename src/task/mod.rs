//! Tasks: datasets in SWE-bench's schema, workspaces made from them, and the verifier.
//!
//! Invariants:
//! - The agent's workspace holds one commit of the task's repository at `base_commit`, and nothing of
//!   the reference patch or the hidden tests.
//! - The verifier works in a fresh sandbox that the agent never touched.

mod dataset;

pub use dataset::{Split, Task};
