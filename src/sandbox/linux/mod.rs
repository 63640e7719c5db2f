//! The Linux backends: `embedded` (namespaces) and `weak` (Landlock), which share everything but the plan.
//!
//! ```text
//! lego ──socket──▶ nursery ──fork──▶ helper ──clone──▶ pid 1 ──fork──▶ programs
//!   └───────────────control socket──────┴───────────────┘
//! ```
//! `client`, `running` and `run` are lego's side; `nursery`, `init`, `program`, `rootfs` run in the helper
//! processes, which have one thread and nothing of lego's memory; `wire` is what they say to each other.

mod cgroup;
mod client;
mod disk;
mod embedded;
mod failure;
mod init;
mod landlock;
mod leftovers;
mod nursery;
mod output;
pub mod probe;
mod program;
mod rootfs;
mod run;
mod running;
mod seccomp;
mod sys;
mod system;
mod watcher;
mod weak;
mod wire;

#[cfg(test)]
pub use leftovers::as_ordinary_user;
pub use leftovers::{make_readable, remove_tree};
pub use nursery::init_main;
