//! Tasks: datasets in SWE-bench's schema, workspaces made from them, and the verifier.
//!
//! Invariants:
//! - The agent's workspace holds one commit of the task's repository at `base_commit`, and nothing of
//!   the reference patch or the hidden tests.
//! - No program is run on what the agent left behind: its changes are read file by file, without
//!   following links, and become a text diff or are refused.
//! - The verifier works in a fresh sandbox that the agent never touched, on the base tree plus that diff.
//!   Tests come from the dataset, whatever the diff says.
//! - Whatever a diff does is graded. [`InfraFailure`](crate::record::InfraFailure) needs a fault before any
//!   of its code ran, or proof from outside the sandbox.

mod changes;
mod dataset;
mod git;
mod store;
mod verdict;
mod verifier;

pub use changes::{ChangeError, Changes};
pub use dataset::{Dataset, DatasetError, Split, TEST_FORMAT, Task};
pub use store::{StoreError, TaskStore};
pub use verdict::{TestResult, Verdict};
pub use verifier::{Verifier, VerifierOptions};
