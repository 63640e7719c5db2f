//! One running sandbox, on lego's side: programs by message, output, limits, evidence.

use std::ffi::OsString;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::unix::pipe;

use super::cgroup::{Counters, Group};
use super::client::{self, Client, Started};
use super::output::Output;
use super::weak::{PrivateTmp, Translation};
use super::wire::{self, FromInit, Program, ToInit, status};
use super::{sys, watcher};
use crate::record::ExitEvidence;
use crate::sandbox::{Exec, Exit, Sandbox, SandboxError};

/// How long the kernel may take to end processes that were killed.
const KILL_GRACE: Duration = Duration::from_secs(30);
const MAX_STATUS_BYTES: usize = 4096;

/// What holds a sandbox to its memory limit.
#[derive(Debug)]
pub enum Limiter {
    Group(Group),
    /// Looks every [`watcher::PERIOD`] and kills all over `limit` bytes.
    Watch { limit: u64 },
    None,
}

/// See [`Sandbox`].
#[derive(Debug)]
pub struct Running {
    /// `None` only once stopped.
    parts: Option<Parts>,
    listener: Option<tokio::net::TcpListener>,
    next_id: u64,
}

#[derive(Debug)]
struct Parts {
    control: AsyncFd<OwnedFd>,
    proc: Option<OwnedFd>,
    root: Option<OwnedFd>,
    limiter: Limiter,
    translation: Option<Translation>,
    tmp: Option<PrivateTmp>,
    /// Keeps the nursery until the last sandbox is gone.
    client: Arc<Client>,
}

impl Running {
    /// Needs a tokio runtime.
    pub fn new(
        client: Arc<Client>,
        started: Started,
        limiter: Limiter,
        translation: Option<Translation>,
        tmp: Option<PrivateTmp>,
    ) -> Result<Self, SandboxError> {
        let listener = match started.listener {
            Some(listener) => {
                listener.set_nonblocking(true)?;
                Some(tokio::net::TcpListener::from_std(listener)?)
            }
            None => None,
        };
        set_nonblocking(&started.control)?;
        // SAFETY: an `OwnedFd` keeps the same open descriptor until the `AsyncFd` is dropped or dissolved.
        let control = unsafe { AsyncFd::register(started.control) }.map_err(io::Error::from)?;
        let (proc, root) = (started.proc, started.root);
        let parts = Parts { control, proc, root, limiter, translation, tmp, client };
        Ok(Self { parts: Some(parts), listener, next_id: 0 })
    }

    fn parts(&self) -> Result<&Parts, SandboxError> {
        self.parts.as_ref().ok_or_else(|| SandboxError::Lost("it was stopped".into()))
    }

    fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

#[async_trait]
impl Sandbox for Running {
    fn take_listener(&mut self) -> Option<tokio::net::TcpListener> {
        self.listener.take()
    }

    async fn exec(&mut self, exec: Exec) -> Result<Exit, SandboxError> {
        let (id, kill_id) = (self.next_id(), self.next_id());
        let parts = self.parts()?;
        let run = Run::start(parts, id, kill_id, exec).await?;
        run.finish().await
    }

    async fn kill_all(&mut self) -> Result<(), SandboxError> {
        let id = self.next_id();
        let parts = self.parts()?;
        parts.send(&ToInit::KillAll { id }, &[]).await?;
        let all_dead = async {
            loop {
                if matches!(parts.receive().await?, FromInit::AllDead { id: dead } if dead == id) {
                    return Ok(());
                }
            }
        };
        tokio::time::timeout(KILL_GRACE, all_dead).await.unwrap_or_else(|_| Err(not_dying()))
    }

    async fn stop(mut self: Box<Self>) -> Result<(), SandboxError> {
        let Some(parts) = self.parts.take() else { return Ok(()) };
        client::shutdown(parts.control.get_ref(), Shutdown::Write);
        let end = async { while parts.receive().await.is_ok() {} };
        if tokio::time::timeout(KILL_GRACE, end).await.is_err() {
            return Err(not_dying());
        }
        parts.remove_group().map_err(|error| SandboxError::Setup {
            step: "remove the control group".into(),
            cause: error.to_string(),
        })
    }
}

fn not_dying() -> SandboxError {
    SandboxError::Lost(format!("killed processes did not end within {} s", KILL_GRACE.as_secs()))
}

/// A sandbox that is dropped ends at once; a thread waits for the rest and tidies up.
impl Drop for Running {
    fn drop(&mut self) {
        let Some(parts) = self.parts.take() else { return };
        client::shutdown(parts.control.get_ref(), Shutdown::Write);
        let Parts { control, limiter, tmp, client, .. } = parts;
        let control = control.into_inner();
        let tidy = move || {
            if let Err(error) = set_blocking(&control) {
                tracing::warn!("waiting for a dropped sandbox: {error}");
            }
            client::wait_for_end(&control);
            if let Limiter::Group(group) = &limiter
                && let Err(error) = group.remove()
            {
                tracing::warn!("cannot remove a control group: {error}");
            }
            drop((tmp, client));
        };
        if let Err(error) = std::thread::Builder::new().name("sandbox-tidy".into()).spawn(tidy) {
            tracing::warn!("no thread to tidy up after a sandbox: {error}");
        }
    }
}

impl Parts {
    async fn send(&self, message: &ToInit, fds: &[&OwnedFd]) -> Result<(), SandboxError> {
        let sent = self
            .control
            .async_io(Interest::WRITABLE, |control| {
                let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
                wire::send(control.as_fd(), message, &fds)
            })
            .await;
        sent.map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => SandboxError::Lost("its init is gone".into()),
            _ => error.into(),
        })
    }

    async fn receive(&self) -> Result<FromInit, SandboxError> {
        let message = self
            .control
            .async_io(Interest::READABLE, |control| wire::receive(control.as_fd()))
            .await?;
        match message {
            Some((FromInit::Gone { code, signal }, _)) => Err(SandboxError::Lost(format!(
                "its init ended (code {code:?}, signal {signal:?})"
            ))),
            Some((FromInit::Failed(failure), _)) => {
                Err(SandboxError::Lost(format!("its init failed: {failure}")))
            }
            Some((message, _)) => Ok(message),
            None => Err(SandboxError::Lost("its helper is gone".into())),
        }
    }

    fn remove_group(&self) -> io::Result<()> {
        match &self.limiter {
            Limiter::Group(group) => group.remove(),
            _ => Ok(()),
        }
    }

    fn counters(&self) -> Counters {
        match &self.limiter {
            Limiter::Group(group) => group.counters(),
            _ => Counters::default(),
        }
    }

    /// The watched memory is over its limit.
    fn is_over_limit(&self) -> bool {
        match (&self.limiter, &self.proc, &self.root) {
            (Limiter::Watch { limit }, Some(proc), Some(root)) => {
                watcher::memory_of(proc, root, *limit) > *limit
            }
            _ => false,
        }
    }
}

/// A program that runs. Dropping it unfinished kills everything in the sandbox.
struct Run<'a> {
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

/// The end of the main process as the init saw it.
#[derive(Default)]
struct Ended {
    code: Option<i32>,
    signal: Option<i32>,
    cpu_us: u64,
    max_rss_bytes: u64,
}

impl<'a> Run<'a> {
    async fn start(
        parts: &'a Parts,
        id: u64,
        kill_id: u64,
        exec: Exec,
    ) -> Result<Run<'a>, SandboxError> {
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

    async fn finish(mut self) -> Result<Exit, SandboxError> {
        let timeout = tokio::time::sleep(self.timeout);
        tokio::pin!(timeout);
        let mut watch = tokio::time::interval(watcher::PERIOD);
        watch.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let is_watched = matches!(self.parts.limiter, Limiter::Watch { .. });
        let (mut ended, mut timed_out, mut is_over_limit, mut all_dead) = (None, false, false, false);
        let mut stdin = self.stdin.take();
        let (mut stdout, mut stderr, mut status) = match (self.stdout.take(), self.stderr.take(), self.status.take()) {
            (Some(stdout), Some(stderr), Some(status)) => (stdout, stderr, status),
            _ => return Err(SandboxError::Lost("it was read before".into())),
        };
        while ended.is_none() || ((timed_out || is_over_limit) && !all_dead) {
            let is_killed = timed_out || is_over_limit;
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
                    timed_out = true;
                    self.kill().await?;
                    timeout.as_mut().reset(tokio::time::Instant::now() + KILL_GRACE);
                }
                _ = watch.tick(), if is_watched && !is_killed => {
                    if self.parts.is_over_limit() {
                        is_over_limit = true;
                        self.kill().await?;
                        timeout.as_mut().reset(tokio::time::Instant::now() + KILL_GRACE);
                    }
                }
            }
        }
        self.is_finished = true;
        let wall = self.started.elapsed();
        self.check_status(status)?;
        let (stdout, discarded_stdout) = stdout.finish()?;
        let (stderr, discarded_stderr) = stderr.finish()?;
        let ended = ended.unwrap_or_default();
        Ok(Exit {
            evidence: self.evidence(&ended, timed_out, is_over_limit),
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
        let Some((&kind, cause)) = text.split_first() else { return Ok(()) };
        let cause = String::from_utf8_lossy(cause).into_owned();
        Err(match kind {
            status::EXEC => SandboxError::Exec { program: self.name.clone(), cause },
            _ => SandboxError::Setup { step: format!("start {}", self.name), cause },
        })
    }

    fn evidence(&self, ended: &Ended, timed_out: bool, is_over_limit: bool) -> ExitEvidence {
        let mut evidence = ExitEvidence {
            code: ended.code,
            signal: ended.signal,
            timed_out,
            cpu_us: ended.cpu_us,
            memory_peak_bytes: Some(ended.max_rss_bytes),
            ..ExitEvidence::default()
        };
        match &self.parts.limiter {
            Limiter::Group(group) => {
                let now = group.counters();
                let kills = now.oom_kills.saturating_sub(self.counters.oom_kills);
                // The group counts kills by the host's OOM killer too. Only its own limit leaves hits.
                let is_own = group.has_memory_limit() && now.limit_hits > self.counters.limit_hits;
                evidence.oom_kills = group.has_memory_limit().then_some(if is_own { kills } else { 0 });
                evidence.host_oom = kills > 0 && !is_own;
                evidence.memory_peak_bytes = group.peak();
            }
            Limiter::Watch { .. } | Limiter::None => {
                if matches!(self.parts.limiter, Limiter::Watch { .. }) {
                    evidence.oom_kills = Some(is_over_limit.into());
                }
                evidence.host_oom = ended.signal == Some(libc::SIGKILL)
                    && !timed_out
                    && !is_over_limit
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
fn standard_input(
    text: Vec<u8>,
) -> Result<(OwnedFd, Option<Feed>), SandboxError> {
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

fn set_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    set_flags(fd, libc::O_NONBLOCK)
}

fn set_blocking(fd: &OwnedFd) -> io::Result<()> {
    set_flags(fd, 0)
}

/// A socket has no other status flags to keep.
fn set_flags(fd: &OwnedFd, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: plain numbers.
    sys::check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags) }).map(drop)
}
