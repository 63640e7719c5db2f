//! `lego sandbox`: run a command as a harness would be run.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Subcommand;

use crate::sandbox::{self, Choice, Exec, Limits, Mount, Spec};

/// Make sandboxes by hand.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a command in a new sandbox: no network, no home folder, no environment, system read-only.
    Run(Run),
}

#[derive(Debug, clap::Args)]
struct Run {
    /// Show a directory or file of this machine inside: HOST:INSIDE[:rw]. Can be repeated.
    #[arg(long = "mount", value_name = "HOST:INSIDE[:rw]", value_parser = parse_mount)]
    mounts: Vec<Mount>,
    /// Set a variable: NAME=VALUE. Can be repeated.
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = parse_env)]
    env: Vec<(OsString, OsString)>,
    /// Where the command starts, inside.
    #[arg(long, value_name = "DIR", default_value = "/tmp")]
    cwd: PathBuf,
    /// Memory limit in MiB.
    #[arg(long, value_name = "MIB")]
    memory: Option<u64>,
    /// Most processes at once.
    #[arg(long, value_name = "N")]
    processes: Option<u64>,
    /// Size of /tmp in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 64)]
    tmp: u64,
    /// Most MiB added to each writable mount.
    #[arg(long, value_name = "MIB")]
    disk: Option<u64>,
    /// Seconds after which everything inside is killed.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    timeout: u64,
    /// Give the command this process's standard input.
    #[arg(long)]
    stdin: bool,
    /// Which backend to use.
    #[arg(long, value_name = "auto|embedded|weak", default_value = "auto")]
    backend: Choice,
    /// Allow the weak sandbox (Landlock and seccomp only) where no other works.
    #[arg(long)]
    weak_sandbox: bool,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    argv: Vec<OsString>,
}

/// Runs the command.
///
/// # Errors
/// The sandbox or the program could not be started.
pub fn run(args: Args) -> anyhow::Result<()> {
    let Command::Run(run) = args.command;
    let code = super::block_on(run_in_sandbox(run))?;
    if code == 0 {
        return Ok(());
    }
    std::process::exit(code)
}

/// The program's exit code, or as shells do, 128 and its signal's number.
async fn run_in_sandbox(run: Run) -> anyhow::Result<i32> {
    const MIB: u64 = 1 << 20;
    const MAX_OUTPUT_BYTES: usize = 64 << 20;
    let backend = sandbox::select(run.backend, run.weak_sandbox).await?;
    if !backend.capabilities().is_isolated {
        errln!("warning: weak sandbox ({})", backend.capabilities().mode);
    }
    let mut stdin = Vec::new();
    if run.stdin {
        std::io::stdin().read_to_end(&mut stdin).context("cannot read standard input")?;
    }
    let limits = Limits {
        memory_bytes: run.memory.map(|mib| mib * MIB),
        max_processes: run.processes,
        tmp_bytes: Some(run.tmp * MIB),
        workspace_bytes: run.disk.map(|mib| mib * MIB),
        cpu_seconds: None,
    };
    let mut env = run.env;
    for (name, value) in [("PATH", "/usr/bin:/bin"), ("HOME", "/tmp")] {
        if !env.iter().any(|(set, _)| set == name) {
            env.push((name.into(), value.into()));
        }
    }
    let mut sandbox = backend.create(Spec { mounts: run.mounts, listen_port: None, limits }).await?;
    let exec = Exec {
        argv: run.argv,
        env,
        cwd: run.cwd,
        stdin,
        max_output_bytes: MAX_OUTPUT_BYTES,
        timeout: Duration::from_secs(run.timeout),
    };
    let exit = tokio::select! {
        exit = sandbox.exec(exec) => Some(exit),
        interrupt = tokio::signal::ctrl_c() => interrupt.map(|()| None)?,
    };
    sandbox.stop().await?;
    let Some(exit) = exit else { anyhow::bail!("interrupted") };
    let exit = exit?;
    std::io::stdout().write_all(&exit.stdout).context("cannot write to standard output")?;
    std::io::stderr().write_all(&exit.stderr).context("cannot write to standard error")?;
    let evidence = &exit.evidence;
    if exit.discarded_output_bytes > 0 {
        errln!("warning: {} bytes of output were thrown away", exit.discarded_output_bytes);
    }
    if evidence.timed_out {
        errln!("killed: {} s have passed", run.timeout);
    }
    if evidence.oom_kills.is_some_and(|kills| kills > 0) {
        errln!("killed: out of memory under the sandbox's own limit");
    }
    if evidence.is_over_disk_limit {
        let ended = if evidence.is_killed_for_disk { "killed" } else { "over its limit" };
        errln!("{ended}: more was written to the writable mounts than --disk allows");
    }
    Ok(evidence.code.unwrap_or_else(|| 128 + evidence.signal.unwrap_or(0)))
}

fn parse_mount(text: &str) -> Result<Mount, String> {
    let parts: Vec<&str> = text.split(':').collect();
    let (host, inside, is_writable) = match parts[..] {
        [host, inside] | [host, inside, "ro"] => (host, inside, false),
        [host, inside, "rw"] => (host, inside, true),
        _ => return Err("expected HOST:INSIDE or HOST:INSIDE:rw".into()),
    };
    Ok(Mount { host: host.into(), inside: inside.into(), is_writable })
}

fn parse_env(text: &str) -> Result<(OsString, OsString), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err("expected NAME=VALUE".into()),
    }
}
