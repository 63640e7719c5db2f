//! The command line: one file a command, no logic.
//!
//! Each file has `pub struct Args` (`#[derive(clap::Args)]`, doc comments are the help texts) and
//! `pub fn run(args: Args) -> anyhow::Result<()>`. A command that needs a runtime calls [`block_on`].
//!
//! Exit codes: 0; 1 when the work failed or a check found something; 2 for bad usage or configuration
//! ([`crate::config::ConfigError`] or [`Usage`] anywhere in the error's chain).
//! An error is printed once, by `main`, with its causes.

use std::future::Future;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

mod agent;
mod capture;
mod config;
mod serve;
mod sft;
mod doctor;
mod sandbox;

/// `1.2.3 (abcdef012345)`: version and git commit.
pub const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("LEGO_GIT_COMMIT"),
    ")"
);

/// Train code agents by reinforcement learning in their own harnesses.
///
/// A harness runs unchanged in a sandbox and calls the policy through lego's proxy, which captures exact
/// tokens and log-probabilities. Hidden tests give the reward; the captured tokens train the policy.
#[derive(Debug, Parser)]
#[command(name = "lego", version = VERSION, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(hide = true)]
    Agent(agent::Args),
    /// List captured sessions and show their calls, tokens included.
    Capture(capture::Args),
    /// Check, show and document the three config files.
    Config(config::Args),
    /// Train a policy on conversations: the supervised warm start.
    Serve(serve::Args),
    Sft(sft::Args),
    /// Make sandboxes by hand.
    Sandbox(sandbox::Args),
    /// Show what works on this machine, with remedies.
    Doctor(doctor::Args),
}

impl Cli {
    /// Runs the command.
    ///
    /// # Errors
    /// What the command could not do.
    pub fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Agent(args) => agent::run(args),
            Command::Capture(args) => capture::run(args),
            Command::Config(args) => config::run(args),
            Command::Serve(args) => serve::run(args),
            Command::Sft(args) => sft::run(args),
            Command::Sandbox(args) => sandbox::run(args),
            Command::Doctor(args) => doctor::run(args),
        }
    }
}

/// Bad usage that clap cannot see.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// Exit code for an error.
#[must_use]
pub fn exit_code(error: &anyhow::Error) -> u8 {
    let is_usage = error
        .chain()
        .any(|cause| cause.is::<Usage>() || cause.is::<crate::config::ConfigError>());
    if is_usage { 2 } else { 1 }
}

/// Runs a command's future on a new multi-threaded runtime.
///
/// # Errors
/// The future's error, or why no runtime could be made.
pub fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the async runtime")?
        .block_on(work)
}
