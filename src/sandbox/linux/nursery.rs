//! The nursery: one small single-threaded process, started once, from which all helpers are forked.
//!
//! lego itself has threads and gigabytes, so a fork of it would be unsafe and slow; the nursery is this
//! same binary, executed anew, with nothing in it. It also outlives lego for the moment that it takes to
//! remove the control groups of sandboxes that lego left behind.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use super::failure::{Failure, Step};
use super::wire::{self, FromInit, Nursery, Plan};
use super::{cgroup, init, sys};

/// Entry point of the re-executed binary: `main` calls it before any thread or runtime exists, when the
/// first argument is [`INIT_ARGUMENT`](crate::sandbox::INIT_ARGUMENT). Standard input is the control socket.
pub fn init_main() -> ! {
    let code = match serve() {
        Ok(()) => 0,
        Err(failure) => {
            eprintln!("lego: the sandbox nursery failed: {failure}");
            1
        }
    };
    sys::exit(code)
}

fn serve() -> Result<(), Failure> {
    let control = take_control().step("control socket")?;
    let mut nursery = Nursery::default();
    loop {
        let request = wire::receive::<Option<Nursery>>(control.as_fd()).step("receive")?;
        let Some((setup, fds)) = request else { break };
        if let Some(setup) = setup {
            nursery = setup;
        }
        for socket in fds {
            start_helper(&control, socket)?;
        }
    }
    drop(control);
    // lego is gone, and with it the control sockets of all helpers: they end by themselves.
    wait_for_all();
    for parent in &nursery.parents {
        cgroup::remove_with_prefix(parent, &nursery.prefix);
    }
    Ok(())
}

/// Moves the control socket away from standard input, and closes what else was inherited.
fn take_control() -> io::Result<OwnedFd> {
    // SAFETY: plain numbers; 3 becomes ours, whatever it was.
    unsafe {
        sys::check(libc::dup3(0, 3, libc::O_CLOEXEC))?;
        sys::check(libc::close_range(4, u32::MAX, 0))?;
    }
    // SAFETY: just made.
    let control = unsafe { OwnedFd::from_raw_fd(3) };
    let null = fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    for standard in [0, 1] {
        // SAFETY: plain numbers.
        sys::check(unsafe { libc::dup2(null.as_raw_fd(), standard) })?;
    }
    // SAFETY: no handler is installed: ended helpers need no reaping by us.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    // A helper whose own helper died must not be lost to the host's init.
    sys::prctl(libc::PR_SET_CHILD_SUBREAPER, 1)?;
    // SAFETY: umask cannot fail.
    unsafe { libc::umask(0o022) };
    Ok(control)
}

fn start_helper(control: &OwnedFd, socket: OwnedFd) -> Result<(), Failure> {
    match sys::fork(0) {
        Ok(Some(_)) => Ok(()),
        Ok(None) => {
            // SAFETY: the helper owns neither the nursery's socket nor its way of ignoring children.
            unsafe {
                libc::close(control.as_raw_fd());
                libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            }
            sys::exit(helper(&socket))
        }
        Err(error) => {
            let failure = Err::<(), _>(error).step("fork a helper").unwrap_err();
            // If lego is gone, nobody asks.
            let _ = wire::send(socket.as_fd(), &FromInit::Failed(failure), &[]);
            Ok(())
        }
    }
}

fn helper(socket: &OwnedFd) -> i32 {
    let result = match wire::receive::<Plan>(socket.as_fd()) {
        Ok(Some((plan, cgroups))) => init::run(&plan, cgroups, socket),
        Ok(None) => return 0,
        Err(error) => Err(error).step("receive the plan"),
    };
    match result {
        Ok(()) => 0,
        Err(failure) => {
            let _ = wire::send(socket.as_fd(), &FromInit::Failed(failure), &[]);
            1
        }
    }
}

fn wait_for_all() {
    // With SIGCHLD ignored, waiting blocks until the last child is gone and then fails with ECHILD.
    loop {
        // SAFETY: a null status is allowed.
        let pid = unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) };
        if pid < 0 && io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return;
        }
    }
}
