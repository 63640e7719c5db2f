//! One running sandbox, on lego's side: programs by message, output, limits, evidence.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::cgroup::{Counters, Group};
use super::client::{self, Client, Started};
use super::disk::Quota;
use super::run::Run;
use super::weak::{PrivateTmp, Translation};
use super::wire::{self, FromInit, ToInit};
use super::{sys, watcher};
use crate::sandbox::{Exec, Exit, Sandbox, SandboxError};

/// How long the kernel may take to end processes that were killed.
pub const KILL_GRACE: Duration = Duration::from_secs(30);

/// What holds a sandbox to its memory limit.
#[derive(Debug)]
pub enum Limiter {
    Group(Group),
    /// Looks every [`watcher::PERIOD`] and kills all over `limit` bytes.
    Watch {
        limit: u64,
    },
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

/// What a program in the sandbox needs of it.
#[derive(Debug)]
pub struct Parts {
    pub control: AsyncFd<OwnedFd>,
    pub proc: Option<Arc<OwnedFd>>,
    root: Option<OwnedFd>,
    pub limiter: Limiter,
    pub quota: Option<Arc<Quota>>,
    pub translation: Option<Translation>,
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
        quota: Option<Quota>,
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
        let (proc, root) = (started.proc.map(Arc::new), started.root);
        let quota = quota.map(Arc::new);
        let parts = Parts { control, proc, root, limiter, quota, translation, tmp, client };
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
        let Some(parts) = self.parts.take() else {
            return Ok(());
        };
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

pub fn not_dying() -> SandboxError {
    SandboxError::Lost(format!("killed processes did not end within {} s", KILL_GRACE.as_secs()))
}

/// A sandbox that is dropped ends at once; a thread waits for the rest and tidies up.
impl Drop for Running {
    fn drop(&mut self) {
        let Some(parts) = self.parts.take() else {
            return;
        };
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
    pub async fn send(&self, message: &ToInit, fds: &[&OwnedFd]) -> Result<(), SandboxError> {
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

    pub async fn receive(&self) -> Result<FromInit, SandboxError> {
        let message =
            self.control.async_io(Interest::READABLE, |control| wire::receive(control.as_fd())).await?;
        match message {
            Some((FromInit::Gone { code, signal }, _)) => {
                Err(SandboxError::Lost(format!("its init ended (code {code:?}, signal {signal:?})")))
            }
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

    pub fn counters(&self) -> Counters {
        match &self.limiter {
            Limiter::Group(group) => group.counters(),
            _ => Counters::default(),
        }
    }

    /// The watched memory is over its limit.
    pub fn is_over_limit(&self) -> bool {
        match (&self.limiter, &self.proc, &self.root) {
            (Limiter::Watch { limit }, Some(proc), Some(root)) => {
                watcher::memory_of(proc, root, *limit) > *limit
            }
            _ => false,
        }
    }
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
