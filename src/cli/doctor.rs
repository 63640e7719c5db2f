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
    println!("lego {}", super::VERSION);
    println!("\nThis machine");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    println!("  {:<46} {threads}", "processors");
    for (name, value) in &examination.facts {
        println!("  {name:<46} {value}");
    }
    println!("\nPrograms");
    let mut missing = Vec::new();
    for (path, why) in PROGRAMS {
        let is_there = Path::new(path).exists();
        println!("  {path:<46} {}", if is_there { "ok" } else { "missing" });
        if !is_there {
            missing.push(format!("{path} is missing: {why}. Install it with the system's package manager"));
        }
    }
    println!("\nSandboxes");
    let mut chosen = None;
    for attempt in &examination.attempts {
        match &attempt.outcome {
            Ok(capabilities) => {
                println!("  {:<46} works", attempt.what);
                println!(
                    "  {:<46} memory: {:?}, processes: {:?}, disk: {:?}",
                    "", capabilities.memory, capabilities.processes, capabilities.disk
                );
                chosen = chosen.or(Some(capabilities));
            }
            Err(SandboxError::Unsupported { cause, remedy }) => {
                println!("  {:<46} does not work: {cause}", attempt.what);
                println!("  {:<46} {remedy}", "");
            }
            Err(error) => println!("  {:<46} does not work: {error}", attempt.what),
        }
    }
    match chosen {
        Some(capabilities) if capabilities.is_isolated => {
            println!("\nlego will use: {}", capabilities.mode);
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
