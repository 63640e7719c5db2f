//! lego's side of the nursery: starts it, and asks it for helpers.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::sys;
use super::wire::{self, FromInit, Nursery, Plan};
use crate::sandbox::{INIT_ARGUMENT, SandboxError};

/// How long a helper may take to set a sandbox up, on a machine that is very busy.
const SETUP_TIMEOUT: Duration = Duration::from_secs(60);

/// A handle of the nursery process. Dropping it ends the nursery; its sandboxes must be gone by then.
#[derive(Debug)]
pub struct Client {
    binary: PathBuf,
    setup: Nursery,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    socket: OwnedFd,
    process: Child,
}

/// A sandbox that is up.
#[derive(Debug)]
pub struct Started {
    pub control: OwnedFd,
    pub proc: Option<OwnedFd>,
    pub root: Option<OwnedFd>,
    pub listener: Option<std::net::TcpListener>,
}

impl Client {
    /// `binary` is lego itself, which becomes the nursery by [`INIT_ARGUMENT`].
    pub fn new(binary: PathBuf, setup: Nursery) -> Self {
        Self { binary, setup, running: Mutex::new(None) }
    }

    /// Makes a sandbox. Blocks until it is ready.
    ///
    /// A nursery that dies with the request in its hands loses it: a new one is asked, once.
    ///
    /// # Errors
    /// The step that failed. The helper has ended by then.
    pub fn start(&self, plan: &Plan, cgroups: &[OwnedFd]) -> Result<Started, SandboxError> {
        if let Some(started) = self.ask(plan, cgroups)? {
            return Ok(started);
        }
        tracing::warn!("a sandbox's helper ended before it was ready; another one is asked for");
        self.ask(plan, cgroups)?.ok_or_else(|| {
            let binary = self.binary.display();
            SandboxError::Lost(format!(
                "the helper ended before it was ready, twice; is `{binary}` lego itself?"
            ))
        })
    }

    /// `None`: the helper, or the nursery before it began, ended without a word.
    fn ask(&self, plan: &Plan, cgroups: &[OwnedFd]) -> Result<Option<Started>, SandboxError> {
        let (ours, theirs) = sys::socket_pair()?;
        self.request(theirs)?;
        set_receive_timeout(&ours, Some(SETUP_TIMEOUT))?;
        let groups: Vec<_> = cgroups.iter().map(AsFd::as_fd).collect();
        match wire::send(ours.as_fd(), plan, &groups) {
            Err(error)
                if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) =>
            {
                return Ok(None);
            }
            sent => sent?,
        }
        match wire::receive::<FromInit>(ours.as_fd())? {
            Some((FromInit::Ready, fds)) => {
                set_receive_timeout(&ours, None)?;
                ready(plan, ours, fds).map(Some)
            }
            Some((FromInit::Failed(failure), _)) => {
                wait_for_end(&ours);
                Err(SandboxError::Setup { step: failure.step, cause: failure.cause })
            }
            Some((other, _)) => Err(SandboxError::Lost(format!(
                "the helper said {other:?} before it was ready; is `{}` lego itself?",
                self.binary.display()
            ))),
            None => Ok(None),
        }
    }

    /// Hands a helper's control socket to the nursery, which is started if there is none (any more).
    fn request(&self, theirs: OwnedFd) -> Result<(), SandboxError> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(nursery) = &mut *running {
            let sent = wire::send(nursery.socket.as_fd(), &None::<Nursery>, &[theirs.as_fd()]);
            if sent.is_ok() {
                return Ok(());
            }
            tracing::warn!("the sandbox nursery is gone; a new one is started");
            nursery.end();
        }
        let nursery = self.spawn().map_err(|error| SandboxError::Setup {
            step: format!("start {} {INIT_ARGUMENT}", self.binary.display()),
            cause: error.to_string(),
        })?;
        wire::send(nursery.socket.as_fd(), &Some(&self.setup), &[theirs.as_fd()])?;
        *running = Some(nursery);
        Ok(())
    }

    fn spawn(&self) -> io::Result<Running> {
        let (ours, theirs) = sys::socket_pair()?;
        let process = Command::new(&self.binary)
            .arg(INIT_ARGUMENT)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            // Ctrl-C on the terminal is for lego, which then ends its sandboxes in order.
            .process_group(0)
            .spawn()?;
        Ok(Running { socket: ours, process })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let running = self.running.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(nursery) = running {
            nursery.end();
        }
    }
}

impl Running {
    /// Closes the socket for all who may hold it, and waits: the nursery ends once its helpers have.
    fn end(&mut self) {
        shutdown(&self.socket, std::net::Shutdown::Both);
        if let Err(error) = self.process.wait() {
            tracing::warn!("waiting for the sandbox nursery: {error}");
        }
    }
}

fn ready(plan: &Plan, control: OwnedFd, fds: Vec<OwnedFd>) -> Result<Started, SandboxError> {
    let mut fds = fds.into_iter();
    let is_isolated = matches!(plan.isolation, wire::Isolation::Namespaces { .. });
    let (proc, root) = if is_isolated { (fds.next(), fds.next()) } else { (None, None) };
    let listener = fds.next().map(std::net::TcpListener::from);
    if (is_isolated && root.is_none()) || plan.listen_port.is_some() != listener.is_some() {
        return Err(SandboxError::Lost("the helper sent too few descriptors".into()));
    }
    Ok(Started { control, proc, root, listener })
}

/// Shuts a socket down, whoever else holds a copy of it.
pub fn shutdown(socket: &OwnedFd, how: std::net::Shutdown) {
    let how = match how {
        std::net::Shutdown::Write => libc::SHUT_WR,
        std::net::Shutdown::Read => libc::SHUT_RD,
        std::net::Shutdown::Both => libc::SHUT_RDWR,
    };
    // SAFETY: plain numbers. It fails only where the other side is gone, which is what we want.
    unsafe { libc::shutdown(socket.as_raw_fd(), how) };
}

/// Blocks until the helper and all that belongs to it have ended.
pub fn wait_for_end(control: &OwnedFd) {
    shutdown(control, std::net::Shutdown::Write);
    while let Ok(Some(_)) = wire::receive::<serde_json::Value>(control.as_fd()) {}
}

/// How long a [`wire::receive`] may wait.
pub fn set_receive_timeout(socket: &OwnedFd, timeout: Option<Duration>) -> io::Result<()> {
    let seconds = timeout.map_or(0, |timeout| timeout.as_secs());
    let value = libc::timeval { tv_sec: seconds as libc::time_t, tv_usec: 0 };
    // SAFETY: `value` outlives the call and its size is passed.
    sys::check(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVTIMEO,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    })
    .map(drop)
}
