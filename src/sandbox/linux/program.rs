//! From a fork of the init to the program: limits, capabilities, filters, `execve`.

use std::ffi::{CStr, CString, OsString};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use seccompiler::BpfProgram;

use super::failure::{Failure, Step};
use super::landlock::Rules;
use super::sys;
use super::wire::{Program, Rlimit, status};

/// Where programs are looked for when the environment has no PATH.
const DEFAULT_PATH: &[u8] = b"/usr/bin:/bin";

/// What is put on every program of a sandbox.
pub struct Jail {
    pub rlimits: Vec<Rlimit>,
    /// `cgroup.procs` files. The init stays outside the groups and so survives an OOM in them.
    pub cgroups: Vec<OwnedFd>,
    pub filters: Vec<BpfProgram>,
    /// Weak sandboxes only.
    pub landlock: Option<Rules>,
}

/// Runs in the forked child: becomes the program or writes into the status pipe why not.
pub fn become_program(jail: &Jail, program: &Program, fds: &[OwnedFd]) -> ! {
    let [stdin, stdout, stderr, status_pipe] = fds else { sys::exit(127) };
    let (kind, text) = match prepare(jail, program, [stdin, stdout, stderr]) {
        Ok((arguments, environment)) => {
            (status::EXEC, execute(program, &arguments, &environment).to_string())
        }
        Err(failure) => (status::SETUP, failure.to_string()),
    };
    report(status_pipe, kind, &text);
    sys::exit(127)
}

/// Tells lego why the program does not run.
pub fn report(status_pipe: &OwnedFd, kind: u8, text: &str) {
    if let Ok(copy) = status_pipe.try_clone() {
        // lego may be gone already; then nobody asks.
        let _ = std::fs::File::from(copy).write_all(&[&[kind], text.as_bytes()].concat());
    }
}

fn prepare(
    jail: &Jail,
    program: &Program,
    stdio: [&OwnedFd; 3],
) -> Result<(Vec<CString>, Vec<CString>), Failure> {
    let arguments = c_strings(&program.argv).step("argument")?;
    let environment = c_strings(&program.env).step("environment")?;
    unblock_signals().step("signal mask")?;
    // SAFETY: setsid has no preconditions; it fails only for a group leader, which a new child is not.
    sys::check(unsafe { libc::setsid() }).step("setsid")?;
    for group in &jail.cgroups {
        nix::unistd::write(group, b"0").map_err(io::Error::from).step("join the control group")?;
    }
    for (target, fd) in stdio.into_iter().enumerate() {
        // SAFETY: plain descriptors; 0 to 2 are /dev/null until here. `dup2` clears close-on-exec.
        sys::check(unsafe { libc::dup2(fd.as_raw_fd(), target as i32) }).step("dup2")?;
    }
    // SAFETY: plain numbers. Everything but the program's own three is closed by execve.
    sys::check(unsafe { libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as i32) })
        .step("close_range")?;
    std::env::set_current_dir(&program.cwd).step(format!("working directory {}", program.cwd.display()))?;
    for limit in &jail.rlimits {
        sys::set_limit(limit.resource, limit.soft, limit.hard).step(format!("limit {}", limit.resource))?;
    }
    sys::drop_capabilities().step("drop capabilities")?;
    sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1).step("no_new_privs")?;
    if let Some(rules) = &jail.landlock {
        // No pid namespace ends the tree of a weak sandbox: at least the program dies with its init.
        sys::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong).step("death signal")?;
        rules.apply().step("landlock")?;
    }
    for filter in &jail.filters {
        seccompiler::apply_filter(filter).map_err(io::Error::other).step("seccomp")?;
    }
    Ok((arguments, environment))
}

fn c_strings(list: &[OsString]) -> io::Result<Vec<CString>> {
    list.iter().map(|text| sys::c_string(text.as_bytes())).collect()
}

/// A program must not inherit the init's blocked signals.
fn unblock_signals() -> io::Result<()> {
    Ok(nix::sys::signal::SigSet::empty().thread_set_mask()?)
}

/// `execve` along the PATH of the program's own environment. Comes back only with an error.
fn execute(program: &Program, arguments: &[CString], environment: &[CString]) -> io::Error {
    let Some(name) = arguments.first() else {
        return io::Error::new(io::ErrorKind::InvalidInput, "no program is named");
    };
    if name.as_bytes().contains(&b'/') {
        return execve(name, arguments, environment);
    }
    let path = program.env.iter().find_map(|entry| entry.as_bytes().strip_prefix(b"PATH="));
    let mut refused = io::Error::from_raw_os_error(libc::ENOENT);
    for directory in path.unwrap_or(DEFAULT_PATH).split(|&byte| byte == b':') {
        let Ok(candidate) = sys::c_string([directory, b"/", name.as_bytes()].concat()) else {
            continue;
        };
        let error = execve(&candidate, arguments, environment);
        if !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) {
            refused = error;
        }
    }
    refused
}

fn execve(path: &CStr, arguments: &[CString], environment: &[CString]) -> io::Error {
    match nix::unistd::execve(path, arguments, environment) {
        Err(error) => error.into(),
        Ok(never) => match never {},
    }
}
