//! Harnesses: how to start an agent in a sandbox. One file (or folder) a harness.
//!
//! Invariants:
//! - A harness is a program started by command line and environment. It reaches the policy only by the
//!   base URL it is given, and holds no real key.
//! - Nothing that varies by run (time, host path, process id) is given to a harness, so that nothing of it
//!   can enter a prompt.
//! - The prompt of [`mini`] is made from the task's statement and workspace alone.

mod command;
mod launch;
pub mod mini;

pub use command::CommandLine;
pub use launch::{BASE_URL, Harness, LISTEN_PORT, Launch, PLACEHOLDER_KEY, TrialInput, WORKSPACE};
pub use mini::Mini;
