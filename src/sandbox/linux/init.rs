//! The helper of one sandbox: makes its namespaces, then waits for its pid 1, which runs programs on demand.
//!
//! The helper stays in lego's namespaces and does there what pid 1 may not: writing id maps and making
//! id-mapped mounts. lego's death closes the control socket, at which pid 1 ends, and the kernel ends
//! everything in its pid namespace with it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::failure::{Failure, Step};
use super::landlock::Rules;
use super::program::{self, Jail};
use super::sys::{self, ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY};
use super::wire::{self, FromInit, Ids, Isolation, Plan, ToInit, status};
use super::{rootfs, seccomp};

/// Makes the host's OOM killer prefer a sandbox to lego.
const OOM_SCORE: &str = "500";
/// Ids that a range map gives to a sandbox.
const RANGE_LENGTH: u32 = 65536;

/// Runs a sandbox until its control socket closes.
pub fn run(plan: &Plan, cgroups: Vec<OwnedFd>, socket: &OwnedFd) -> Result<(), Failure> {
    fs::write("/proc/self/oom_score_adj", OOM_SCORE).step("oom_score_adj")?;
    let jail = Jail {
        rlimits: plan.rlimits.clone(),
        cgroups,
        filters: seccomp::filters(&plan.isolation)
            .map_err(io::Error::other)
            .step("compile seccomp filters")?,
        landlock: None,
    };
    match plan.isolation {
        Isolation::Namespaces { ids } => run_isolated(plan, ids, jail, socket),
        Isolation::Weak => run_weak(plan, jail, socket),
    }
}

fn run_isolated(plan: &Plan, ids: Ids, jail: Jail, socket: &OwnedFd) -> Result<(), Failure> {
    let (ours, theirs) = sys::socket_pair().step("socket pair")?;
    let mut namespaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWCGROUP;
    if ids != Ids::Host {
        namespaces |= libc::CLONE_NEWUSER;
    }
    let Some(child) = sys::fork(namespaces).step("new namespaces")? else {
        drop(ours);
        let result = first_process(plan, ids, jail, &theirs, socket);
        if let Err(failure) = &result {
            let _ = wire::send(socket.as_fd(), &FromInit::Failed(failure.clone()), &[]);
        }
        sys::exit(i32::from(result.is_err()));
    };
    drop(theirs);
    let prepared = prepare_for(child, plan, ids);
    if let Ok(mounts) = &prepared {
        let mounts: Vec<_> = mounts.iter().map(AsFd::as_fd).collect();
        // A child that is gone has said why.
        let _ = wire::send(ours.as_fd(), &(), &mounts);
    }
    drop(ours); // without the message, the child ends
    let (code, signal) = wait_for(child).step("wait for pid 1")?;
    prepared?;
    let _ = wire::send(socket.as_fd(), &FromInit::Gone { code, signal }, &[]);
    Ok(())
}

/// Maps the child's ids, and makes the plan's mounts where only the host's root can.
fn prepare_for(child: libc::pid_t, plan: &Plan, ids: Ids) -> Result<Vec<OwnedFd>, Failure> {
    let write = |file: &str, text: &str| {
        fs::write(format!("/proc/{child}/{file}"), text).step(format!("write {file} \"{text}\""))
    };
    match ids {
        Ids::Host => Ok(Vec::new()),
        Ids::Single { uid, gid } => {
            write("setgroups", "deny")?;
            write("uid_map", &format!("0 {uid} 1"))?;
            write("gid_map", &format!("0 {gid} 1"))?;
            Ok(Vec::new())
        }
        Ids::Ranges { base } => {
            let map = format!("0 {base} {RANGE_LENGTH}");
            write("uid_map", &map)?;
            write("gid_map", &map)?;
            if plan.mounts.is_empty() {
                return Ok(Vec::new());
            }
            let namespace =
                fs::File::open(format!("/proc/{child}/ns/user")).step("open the user namespace")?;
            plan.mounts
                .iter()
                .map(|shown| {
                    let read_only = if shown.is_writable { 0 } else { ATTR_RDONLY };
                    let mount =
                        sys::open_tree(&shown.host).step(format!("open_tree {}", shown.host.display()))?;
                    sys::set_id_map(mount.as_fd(), ATTR_NOSUID | ATTR_NODEV | read_only, namespace.as_fd())
                        .step(format!("id-mapped mount of {}", shown.host.display()))?;
                    Ok(mount)
                })
                .collect()
        }
    }
}

/// (code, signal) of a child.
fn wait_for(child: libc::pid_t) -> io::Result<(Option<i32>, Option<i32>)> {
    let mut status = 0;
    loop {
        // SAFETY: `status` outlives the call.
        match sys::check(unsafe { libc::waitpid(child, &raw mut status, 0) }) {
            Ok(_) => return Ok(decode(status)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn decode(status: i32) -> (Option<i32>, Option<i32>) {
    if libc::WIFEXITED(status) {
        (Some(libc::WEXITSTATUS(status)), None)
    } else {
        (None, Some(libc::WTERMSIG(status)))
    }
}

/// Pid 1 of a sandbox.
fn first_process(
    plan: &Plan,
    ids: Ids,
    jail: Jail,
    helper: &OwnedFd,
    socket: &OwnedFd,
) -> Result<(), Failure> {
    let Some(((), id_mapped)) = wire::receive::<()>(helper.as_fd()).step("wait for the id maps")? else {
        sys::exit(1); // the helper says why
    };
    if ids != Ids::Host {
        sys::become_root_inside(matches!(ids, Ids::Ranges { .. })).step("become root inside")?;
    }
    sys::loopback_up().step("loopback up")?;
    let listener = plan.listen_port.map(listen).transpose()?;
    nix::unistd::sethostname("sandbox").map_err(io::Error::from).step("host name")?;
    rootfs::enter(plan, id_mapped, ids != Ids::Host)?;
    // From here on nothing inside can trace us or open our descriptors, and we die with the helper.
    sys::prctl(libc::PR_SET_DUMPABLE, 0).step("dumpable")?;
    sys::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong).step("death signal")?;
    let proc = sys::open_path(Path::new("/proc")).step("open /proc")?;
    let root = sys::open_path(Path::new("/")).step("open /")?;
    let mut fds = vec![proc.as_fd(), root.as_fd()];
    fds.extend(listener.iter().map(AsFd::as_fd));
    wire::send(socket.as_fd(), &FromInit::Ready, &fds).step("send ready")?;
    drop((proc, root, listener));
    Init { jail, socket, live: BTreeMap::new(), is_alone: true }.serve().step("pid 1")
}

/// The weak sandbox: this process itself runs the programs, on the host's own system.
fn run_weak(plan: &Plan, mut jail: Jail, socket: &OwnedFd) -> Result<(), Failure> {
    // Programs that detach themselves come back to us, so that all can be found and ended.
    sys::prctl(libc::PR_SET_CHILD_SUBREAPER, 1).step("subreaper")?;
    // The port inside is the host's: any free one, and lego translates.
    let listener = plan.listen_port.map(|_| listen(0)).transpose()?;
    let address = listener.as_ref().map(TcpListener::local_addr).transpose().step("listener")?;
    jail.landlock = Some(Rules::new(plan, address.map(|address| address.port()))?);
    let fds: Vec<_> = listener.iter().map(AsFd::as_fd).collect();
    wire::send(socket.as_fd(), &FromInit::Ready, &fds).step("send ready")?;
    drop(listener);
    let mut init = Init { jail, socket, live: BTreeMap::new(), is_alone: false };
    let result = init.serve().step("init");
    init.kill_all().step("kill all")?;
    result
}

fn listen(port: u16) -> Result<TcpListener, Failure> {
    TcpListener::bind(("127.0.0.1", port)).step(format!("listen on 127.0.0.1:{port}"))
}

/// Starts programs, reaps what ends, kills on demand.
struct Init<'a> {
    jail: Jail,
    socket: &'a OwnedFd,
    /// Main processes that run, by pid, with the id of their exec.
    live: BTreeMap<libc::pid_t, u64>,
    /// Pid 1 of a pid namespace: everything else in sight is ours.
    is_alone: bool,
}

impl Init<'_> {
    /// Until lego closes its side.
    fn serve(&mut self) -> io::Result<()> {
        let mut children = SigSet::empty();
        children.add(Signal::SIGCHLD);
        children.thread_block()?;
        let signals = SignalFd::with_flags(&children, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        loop {
            let mut ready = [
                PollFd::new(self.socket.as_fd(), PollFlags::POLLIN),
                PollFd::new(signals.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut ready, PollTimeout::NONE) {
                Err(Errno::EINTR) => continue,
                other => other?,
            };
            let [message, child] = ready.map(|fd| fd.revents().is_some_and(|events| !events.is_empty()));
            if child {
                while signals.read_signal()?.is_some() {}
                while self.reap(libc::WNOHANG)? {}
            }
            if !message {
                continue;
            }
            match wire::receive::<ToInit>(self.socket.as_fd())? {
                None => return Ok(()),
                Some((ToInit::Exec(program), fds)) => self.start(&program, &fds)?,
                Some((ToInit::KillAll { id }, _)) => {
                    self.kill_all()?;
                    self.send(&FromInit::AllDead { id })?;
                }
            }
        }
    }

    fn start(&mut self, program: &wire::Program, fds: &[OwnedFd]) -> io::Result<()> {
        match sys::fork(0) {
            Ok(None) => program::become_program(&self.jail, program, fds),
            Ok(Some(pid)) => {
                self.live.insert(pid, program.id);
            }
            Err(error) => {
                if let Some(pipe) = fds.last() {
                    program::report(pipe, status::SETUP, &format!("fork: {error}"));
                }
            }
        }
        Ok(())
    }

    /// Ends every process of the sandbox but this one. A fork in progress is restarted by the kernel and
    /// then sees the signal, so nothing escapes a round in a pid namespace; others are done in rounds.
    fn kill_all(&mut self) -> io::Result<()> {
        loop {
            if self.is_alone {
                // SAFETY: plain numbers; -1 reaches this pid namespace only, and not its pid 1.
                unsafe { libc::kill(-1, libc::SIGKILL) };
            } else {
                kill_descendants(std::process::id());
            }
            if !self.reap(0)? {
                return Ok(());
            }
        }
    }

    /// Takes one ended child and reports it if it was a main process. False: there was none to take.
    fn reap(&mut self, flags: i32) -> io::Result<bool> {
        let mut status = 0;
        // SAFETY: rusage is plain data for which zero is valid.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both outlive the call.
        let pid = unsafe { libc::wait4(-1, &raw mut status, flags, &raw mut usage) };
        if pid <= 0 {
            return Ok(false);
        }
        if let Some(id) = self.live.remove(&pid) {
            let (code, signal) = decode(status);
            let micros = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
            self.send(&FromInit::Exit {
                id,
                code,
                signal,
                cpu_us: micros(usage.ru_utime) + micros(usage.ru_stime),
                max_rss_bytes: usage.ru_maxrss as u64 * 1024,
            })?;
        }
        Ok(true)
    }

    /// A lego that is gone is noticed at the next receive.
    fn send(&self, message: &FromInit) -> io::Result<()> {
        match wire::send(self.socket.as_fd(), message, &[]) {
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => Ok(()),
            other => other,
        }
    }
}

/// Sends SIGKILL to all processes below `pid`, from the top down.
fn kill_descendants(pid: u32) {
    let path = format!("/proc/{pid}/task/{pid}/children");
    // A process that is gone has no children left; those that it had are ours now.
    for child in fs::read_to_string(path).unwrap_or_default().split_whitespace() {
        let Ok(child) = child.parse::<u32>() else {
            continue;
        };
        kill_descendants(child);
        // SAFETY: plain numbers; a child of ours cannot be recycled before we reap it.
        unsafe { libc::kill(child as libc::pid_t, libc::SIGKILL) };
    }
}
