//! Sandboxes: where harnesses and hidden tests run.
//!
//! [`select`] gives the backend that works on this machine. A [`Backend`] makes a [`Sandbox`] from a
//! [`Spec`]; programs are run in it by [`Sandbox::exec`].
//!
//! Invariants:
//! - A sandbox reaches nothing of the host but what its [`Spec`] names and a fixed list of read-only
//!   system directories: no network except the listener made inside it, no home folder, no host environment.
//! - A defence that cannot be applied fails the sandbox closed; it is never skipped in silence. What a
//!   backend can enforce is in its [`Capabilities`].
//! - Dropping a [`Sandbox`] ends every process in it. A lego that dies takes its sandboxes along.
//! - Backends report [`ExitEvidence`](crate::record::ExitEvidence); they draw no conclusions.

#[cfg(target_os = "linux")]
mod linux;
mod select;
mod spec;

#[cfg(all(test, target_os = "linux"))]
pub(crate) use linux::as_ordinary_user;
#[cfg(target_os = "linux")]
pub use linux::{init_main, make_readable, remove_tree};
pub use select::{Attempt, Choice, Examination, Options, UnknownChoice, examine, select, select_with};
pub use spec::{
    Backend, Capabilities, DiskLimit, Enforcement, Exec, Exit, Limits, Mount, Sandbox, SandboxError, Spec,
};

/// The first argument with which lego's own binary becomes the sandboxes' nursery: see [`init_main`].
pub const INIT_ARGUMENT: &str = "__sandbox-init";

/// Elsewhere than on Linux nothing starts lego with [`INIT_ARGUMENT`].
#[cfg(not(target_os = "linux"))]
pub fn init_main() -> ! {
    eprintln!("lego: sandboxes need Linux");
    std::process::exit(1)
}

/// Elsewhere than on Linux no program has run that could have locked anything.
#[cfg(not(target_os = "linux"))]
pub fn make_readable(_root: &std::path::Path) {}

/// Removes a tree; one that is not there is removed already.
///
/// # Errors
/// What cannot be removed.
#[cfg(not(target_os = "linux"))]
pub fn remove_tree(root: &std::path::Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(root) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
