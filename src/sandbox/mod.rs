//! Sandboxes: where harnesses and hidden tests run.
//!
//! Invariants:
//! - A sandbox reaches nothing of the host but what its [`Spec`] names: no network except the listener
//!   made inside it, no home folder, no host environment.
//! - A defence that cannot be applied fails the sandbox closed; it is never skipped in silence.
//! - Dropping a [`Sandbox`] ends every process in it. A lego that dies takes its sandboxes along.
//! - Backends report [`ExitEvidence`](crate::record::ExitEvidence); they draw no conclusions.

mod spec;

pub use spec::{
    Backend, Capabilities, DiskLimit, Enforcement, Exec, Exit, Limits, Mount, Sandbox,
    SandboxError, Spec,
};
