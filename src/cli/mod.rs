//! The command line: one file a command, no logic.
//!
//! Each file has `pub struct Args` (`#[derive(clap::Args)]`, doc comments are the help texts) and
//! `pub fn run(args: Args) -> anyhow::Result<()>`. A command that needs a runtime calls [`block_on`].
//!
//! Exit codes: 0; 130 when a signal stopped the work; 1 when the work failed or a check found something; 2 for bad usage or configuration
//! ([`crate::config::ConfigError`] or [`Usage`] anywhere in the error's chain).
//! An error is printed once, by `main`, with its causes.

use std::future::Future;
#[cfg(unix)]
use std::task::Poll;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

/// `println!` for data on stdout, but whoever closes the pipe early has read enough.
macro_rules! outln {
    ($($text:tt)*) => {
        $crate::cli::out(format_args!($($text)*))
    };
}

/// `eprintln!` for people, whose going away ends nothing either.
macro_rules! errln {
    ($($text:tt)*) => {
        $crate::telemetry::say(&format!($($text)*))
    };
}

mod agent;
mod capture;
mod config;
mod doctor;
mod eval;
mod launch;
mod proxy;
mod sandbox;
mod serve;
mod sft;
mod task;
mod train;

/// `1.2.3 (abcdef012345)`: version and git commit.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("LEGO_GIT_COMMIT"), ")");

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
    Train(train::Args),
    Launch(launch::Args),
    Eval(eval::Args),
    Proxy(proxy::Args),
    Serve(serve::Args),
    Sft(sft::Args),
    Capture(capture::Args),
    Config(config::Args),
    Sandbox(sandbox::Args),
    Task(task::Args),
    Doctor(doctor::Args),
    #[command(hide = true)]
    Agent(agent::Args),
}

impl Cli {
    /// Runs the command.
    ///
    /// # Errors
    /// What the command could not do.
    pub fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Train(args) => train::run(args),
            Command::Launch(args) => launch::run(args),
            Command::Eval(args) => eval::run(args),
            Command::Proxy(args) => proxy::run(args),
            Command::Serve(args) => serve::run(args),
            Command::Sft(args) => sft::run(args),
            Command::Capture(args) => capture::run(args),
            Command::Config(args) => config::run(args),
            Command::Sandbox(args) => sandbox::run(args),
            Command::Task(args) => task::run(args),
            Command::Doctor(args) => doctor::run(args),
            Command::Agent(args) => agent::run(args),
        }
    }
}

/// Bad usage that clap cannot see.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// A line on stdout. Ends the process if nobody reads it any more.
fn out(line: std::fmt::Arguments<'_>) {
    use std::io::Write as _;
    if let Err(error) = writeln!(std::io::stdout(), "{line}") {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        errln!("error: writing to stdout: {error}");
        std::process::exit(1);
    }
}

/// Exit code for an error.
#[must_use]
pub fn exit_code(error: &anyhow::Error) -> u8 {
    let is_usage = error.chain().any(|cause| cause.is::<Usage>() || cause.is::<crate::config::ConfigError>());
    let was_stopped =
        error.chain().any(|cause| matches!(cause.downcast_ref(), Some(crate::run::RunError::Stopped)));
    match (was_stopped, is_usage) {
        (true, _) => 130,
        (false, true) => 2,
        (false, false) => 1,
    }
}

/// An error for people: with its causes, and what to do about a full disk.
#[must_use]
pub fn message(error: &anyhow::Error) -> String {
    let text = crate::run::causes(error);
    let is_full = text.contains("No space left on device") && !text.contains("namespaces");
    if is_full { format!("{text}. Free some of the disk") } else { text }
}

/// `LEGO_…` variables that nothing reads are most likely misspelt.
fn warn_of_stray_variables(config: &crate::config::Config) {
    for stray in config.stray_variables() {
        errln!("warning: {stray}");
    }
}

/// A token that the first Ctrl-C (or SIGTERM) cancels; the second ends the process at once.
#[must_use]
pub fn stop_on_signal() -> tokio_util::sync::CancellationToken {
    let stop = tokio_util::sync::CancellationToken::new();
    let cancel = stop.clone();
    // From here on, not from when the task first runs.
    let mut signals = Signals::listen();
    tokio::spawn(async move {
        signals.next().await;
        cancel.cancel();
        errln!("stopping; once more to stop at once");
        signals.next().await;
        std::process::exit(130);
    });
    stop
}

/// Ctrl-C and SIGTERM.
struct Signals {
    #[cfg(unix)]
    listened: Vec<tokio::signal::unix::Signal>,
}

impl Signals {
    fn listen() -> Self {
        Self {
            #[cfg(unix)]
            listened: {
                use tokio::signal::unix::{SignalKind, signal};
                let kinds = [SignalKind::interrupt(), SignalKind::terminate()];
                kinds.into_iter().filter_map(|kind| signal(kind).ok()).collect()
            },
        }
    }

    #[cfg(unix)]
    async fn next(&mut self) {
        std::future::poll_fn(|context| {
            let is_told = self.listened.iter_mut().any(|signal| signal.poll_recv(context).is_ready());
            if is_told { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    #[cfg(not(unix))]
    async fn next(&mut self) {
        let _ = tokio::signal::ctrl_c().await;
    }
}

/// How long a command that has ended waits for threads that it left behind.
const LAST_THREADS: Duration = Duration::from_secs(1);

/// Runs a command's future on a new multi-threaded runtime.
///
/// # Errors
/// The future's error, or why no runtime could be made.
pub fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let result = runtime.block_on(work);
    // Threads that still unpack a repository or walk a workspace for trials that are over change nothing.
    runtime.shutdown_timeout(LAST_THREADS);
    result
}
