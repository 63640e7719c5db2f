//! One program in a running sandbox: its output, its time, its memory, and the evidence of its end.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;

use super::cgroup::Counters;
use super::disk::Watch;
use super::output::Output;
use super::running::{KILL_GRACE, Limiter, Parts, not_dying};
use super::weak::Translation;
use super::wire::{self, FromInit, Program, ToInit, status};
use super::{sys, watcher};
use crate::record::ExitEvidence;
use crate::sandbox::{Exec, Exit, SandboxError};

const MAX_STATUS_BYTES: usize = 4096;

/// A program that runs. Dropping it unfinished kills everything in the sandbox.
pub struct Run<'a> {
    parts: &'a Parts,
    id: u64,
    kill_id: u64,
    name: String,
    started: Instant,
    timeout: Duration,
    stdin: Option<Feed>,
    stdout: Option<Output>,
    stderr: Option<Output>,
    status: Option<Output>,
    counters: Counters,
    host_oom_kills: u64,
    is_finished: bool,
}

/// Why lego ended it, if it did.
#[derive(Default, Clone, Copy)]
struct Killed {
    timed_out: bool,
    is_over_memory: bool,
    is_over_disk: bool,
}

/// The end of the main process as the init saw it.
#[derive(Default)]
struct Ended {
    code: Option<i32>,
    signal: Option<i32>,
    cpu_us: u64,
    max_rss_bytes: u64,
}

impl<'a> Run<'a> {
    /// Sends the program to the init.
    pub async fn start(parts: &'a Parts, id: u64, kill_id: u64, exec: Exec) -> Result<Run<'a>, SandboxError> {
        let name = exec.argv.first().map_or_else(String::new, |name| name.to_string_lossy().into());
        let program = program(parts.translation.as_ref(), id, &exec);
        let (stdin_read, stdin) = standard_input(exec.stdin)?;
        let (stdout, stdout_write) = sys::pipe()?;
        let (stderr, stderr_write) = sys::pipe()?;
        let (status, status_write) = sys::pipe()?;
        let run = Run {
            parts,
            id,
            kill_id,
            name: name.clone(),
            started: Instant::now(),
            timeout: exec.timeout,
            stdin,
            stdout: Some(Output::new(stdout, exec.max_output_bytes)?),
            stderr: Some(Output::new(stderr, exec.max_output_bytes)?),
            status: Some(Output::new(status, MAX_STATUS_BYTES)?),
            counters: parts.counters(),
            host_oom_kills: watcher::host_oom_kills(),
            is_finished: false,
        };
        let fds = [&stdin_read, &stdout_write, &stderr_write, &status_write];
        match parts.send(&ToInit::Exec(program), &fds).await {
            Err(SandboxError::Io(cause)) if cause.kind() == io::ErrorKind::InvalidInput => {
                Err(SandboxError::Exec {
                    program: name,
                    cause: format!("arguments and environment: {cause}"),
                })
            }
            Err(error) => Err(error),
            Ok(()) => Ok(run),
        }
    }

    /// Waits for the end.
    pub async fn finish(mut self) -> Result<Exit, SandboxError> {
        let timeout = tokio::time::sleep(self.timeout);
        tokio::pin!(timeout);
        let mut watch = tokio::time::interval(watcher::PERIOD);
        watch.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let is_watched = matches!(self.parts.limiter, Limiter::Watch { .. });
        let mut disk = Watch::new(self.parts.quota.as_ref(), self.parts.proc.as_ref());
        let (mut ended, mut all_dead) = (None, false);
        let Killed { mut timed_out, mut is_over_memory, mut is_over_disk } = Killed::default();
        let mut stdin = self.stdin.take();
        let (mut stdout, mut stderr, mut status) =
            match (self.stdout.take(), self.stderr.take(), self.status.take()) {
                (Some(stdout), Some(stderr), Some(status)) => (stdout, stderr, status),
                _ => return Err(SandboxError::Lost("it was read before".into())),
            };
        let mut is_killed = false;
        while ended.is_none() || (is_killed && !all_dead) {
            tokio::select! {
                message = self.parts.receive() => match message? {
                    FromInit::Exit { id, code, signal, cpu_us, max_rss_bytes } if id == self.id => {
                        ended = Some(Ended { code, signal, cpu_us, max_rss_bytes });
                    }
                    FromInit::AllDead { id } if id == self.kill_id => all_dead = true,
                    _ => {} // of an earlier exec that was given up
                },
                result = stdout.progress() => result?,
                result = stderr.progress() => result?,
                result = status.progress() => result?,
                () = feed(&mut stdin), if stdin.is_some() => {}
                () = &mut timeout => {
                    if is_killed {
                        return Err(not_dying());
                    }
                    (is_killed, timed_out) = (true, true);
                    self.kill().await?;
                    timeout.as_mut().reset(tokio::time::Instant::now() + KILL_GRACE);
                }
                _ = watch.tick(), if is_watched && !is_killed => {
                    if self.parts.is_over_limit() {
                        (is_killed, is_over_memory) = (true, true);
                        self.kill().await?;
                        timeout.as_mut().reset(tokio::time::Instant::now() + KILL_GRACE);
                    }
                }
                () = disk.until_over(), if !is_killed => {
                    (is_killed, is_over_disk) = (true, true);
                    self.kill().await?;
                    timeout.as_mut().reset(tokio::time::Instant::now() + KILL_GRACE);
                }
            }
        }
        let is_killed_for_disk = is_over_disk;
        if !is_over_disk && disk.is_on() {
            is_over_disk = disk.last_look().await;
        }
        self.is_finished = true;
        let wall = self.started.elapsed();
        self.check_status(status)?;
        let (stdout, discarded_stdout) = stdout.finish()?;
        let (stderr, discarded_stderr) = stderr.finish()?;
        let ended = ended.unwrap_or_default();
        let killed = Killed { timed_out, is_over_memory, is_over_disk: is_killed_for_disk };
        Ok(Exit {
            evidence: ExitEvidence { is_over_disk_limit: is_over_disk, ..self.evidence(&ended, killed) },
            stdout,
            stderr,
            discarded_output_bytes: discarded_stdout + discarded_stderr,
            wall,
        })
    }

    async fn kill(&self) -> Result<(), SandboxError> {
        self.parts.send(&ToInit::KillAll { id: self.kill_id }, &[]).await
    }

    /// An error if the program never ran.
    fn check_status(&self, status: Output) -> Result<(), SandboxError> {
        let (text, _) = status.finish()?;
        let Some((&kind, cause)) = text.split_first() else {
            return Ok(());
        };
        let cause = String::from_utf8_lossy(cause).into_owned();
        Err(match kind {
            status::EXEC => SandboxError::Exec { program: self.name.clone(), cause },
            _ => SandboxError::Setup { step: format!("start {}", self.name), cause },
        })
    }

    fn evidence(&self, ended: &Ended, killed: Killed) -> ExitEvidence {
        let Killed { timed_out, is_over_memory, is_over_disk } = killed;
        let mut evidence = ExitEvidence {
            code: ended.code,
            signal: ended.signal,
            timed_out,
            cpu_us: ended.cpu_us,
            is_killed_for_disk: is_over_disk,
            memory_peak_bytes: Some(ended.max_rss_bytes),
            ..ExitEvidence::default()
        };
        match &self.parts.limiter {
            Limiter::Group(group) => {
                let kills = group.kills_since(self.counters);
                evidence.oom_kills = group.has_memory_limit().then_some(kills.own);
                evidence.host_oom = kills.host > 0;
                evidence.memory_peak_bytes = group.peak();
            }
            Limiter::Watch { .. } | Limiter::None => {
                if matches!(self.parts.limiter, Limiter::Watch { .. }) {
                    evidence.oom_kills = Some(is_over_memory.into());
                }
                evidence.host_oom = ended.signal == Some(libc::SIGKILL)
                    && !timed_out
                    && !is_over_memory
                    && !is_over_disk
                    && watcher::host_oom_kills() > self.host_oom_kills;
            }
        }
        evidence
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            let kill = ToInit::KillAll { id: self.kill_id };
            // Not sent: the sandbox is gone, or its queue full, and then its owner ends it.
            let _ = wire::send(self.parts.control.get_ref().as_fd(), &kill, &[]);
        }
    }
}

fn program(translation: Option<&Translation>, id: u64, exec: &Exec) -> Program {
    let translate = |text: OsString| match translation {
        Some(translation) => translation.apply(&text),
        None => text,
    };
    let mut env: Vec<OsString> = exec
        .env
        .iter()
        .map(|(name, value)| {
            let mut entry = name.clone();
            entry.push("=");
            entry.push(value);
            entry
        })
        .collect();
    if translation.is_some() && !exec.env.iter().any(|(name, _)| name == "TMPDIR") {
        env.push("TMPDIR=/tmp".into());
    }
    Program {
        id,
        argv: exec.argv.iter().cloned().map(translate).collect(),
        env: env.into_iter().map(translate).collect(),
        cwd: translate(exec.cwd.clone().into_os_string()).into(),
    }
}

/// The program's standard input, and what is to be written into it.
fn standard_input(text: Vec<u8>) -> Result<(OwnedFd, Option<Feed>), SandboxError> {
    if text.is_empty() {
        return Ok((std::fs::File::open("/dev/null")?.into(), None));
    }
    let (read, write) = sys::pipe()?;
    Ok((read, Some(Feed { pipe: pipe::Sender::from_owned_fd(write)?, text, written: 0 })))
}

/// What is still to be written into a program's standard input.
struct Feed {
    pipe: pipe::Sender,
    text: Vec<u8>,
    written: usize,
}

/// Writes all and closes. A program that does not read its input is no error.
async fn feed(stdin: &mut Option<Feed>) {
    if let Some(Feed { pipe, text, written }) = stdin {
        while *written < text.len() {
            match pipe.write(&text[*written..]).await {
                Ok(count) => *written += count,
                Err(_) => break,
            }
        }
    }
    *stdin = None;
}
