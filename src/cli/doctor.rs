//! `lego doctor`: what works on this machine, and what to do about what does not.

use std::path::Path;

use crate::sandbox::{self, Options, SandboxError};

/// Programs of the host that sandboxes need, with why.
const PROGRAMS: [(&str, &str); 2] = [
    ("/usr/bin/python3", "the bundled tasks are in Python"),
    ("/usr/bin/git", "task workspaces are git repositories"),
];

/// Show what works on this machine, with remedies.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Prints the report.
///
/// # Errors
/// Something that `lego train` needs does not work.
pub fn run(_args: Args) -> anyhow::Result<()> {
    let examination = super::block_on(async { Ok(sandbox::examine(&Options::default()).await) })?;
    outln!("lego {}", super::VERSION);
    outln!("\nThis machine");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    outln!("  {:<46} {threads}", "processors");
    for (name, value) in &examination.facts {
        outln!("  {name:<46} {value}");
    }
    outln!("\nPrograms");
    let mut missing = Vec::new();
    for (path, why) in PROGRAMS {
        let is_there = Path::new(path).exists();
        outln!("  {path:<46} {}", if is_there { "ok" } else { "missing" });
        if !is_there {
            missing.push(format!("{path} is missing: {why}. Install it with the system's package manager"));
        }
    }
    outln!("\nSandboxes");
    let mut chosen = None;
    for attempt in &examination.attempts {
        match &attempt.outcome {
            Ok(capabilities) => {
                outln!("  {:<46} works", attempt.what);
                outln!(
                    "  {:<46} memory: {:?}, processes: {:?}, workspace: {:?}, /tmp: {:?}",
                    "",
                    capabilities.memory,
                    capabilities.processes,
                    capabilities.disk,
                    capabilities.tmp
                );
                chosen = chosen.or(Some(capabilities));
            }
            Err(SandboxError::Unsupported { cause, remedy }) => {
                outln!("  {:<46} does not work: {cause}", attempt.what);
                outln!("  {:<46} {remedy}", "");
            }
            Err(error) => outln!("  {:<46} does not work: {error}", attempt.what),
        }
    }
    match chosen {
        Some(capabilities) if capabilities.is_isolated => {
            outln!("\nlego will use: {}", capabilities.mode);
        }
        Some(_) => missing.push(
            "only the weak sandbox works: follow a remedy above, or allow it with --weak-sandbox".into(),
        ),
        None => missing.push("no sandbox works: follow a remedy above".into()),
    }
    if missing.is_empty() {
        return Ok(());
    }
    anyhow::bail!(missing.join("\n"))
}
