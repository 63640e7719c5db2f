//! The system calls that neither std nor a crate wraps: the new mount API, capabilities, loopback, Landlock.
//!
//! Every function answers the kernel's own error; nothing is retried or hidden here.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::failure::{Failure, Step};

pub const ATTR_RDONLY: u64 = 0x1;
pub const ATTR_NOSUID: u64 = 0x2;
pub const ATTR_NODEV: u64 = 0x4;
pub const ATTR_NOEXEC: u64 = 0x8;
const ATTR_IDMAP: u64 = 0x10_0000;

const OPEN_TREE_CLONE: u32 = 1;
const MOVE_MOUNT_F_EMPTY_PATH: u32 = 4;
const FSOPEN_CLOEXEC: u32 = 1;
const FSMOUNT_CLOEXEC: u32 = 1;
const FSCONFIG_SET_FLAG: u32 = 0;
const FSCONFIG_SET_STRING: u32 = 1;
const FSCONFIG_CMD_CREATE: u32 = 6;

#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    userns: u64,
}

/// The result of a system call that answers -1 on error.
pub fn check(result: impl Into<i64>) -> io::Result<i64> {
    match result.into() {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

/// A new descriptor answered by a system call.
pub fn check_fd(result: impl Into<i64>) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the call has just answered this descriptor and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A path or argument as C takes it.
pub fn c_string(bytes: impl AsRef<[u8]>) -> io::Result<CString> {
    CString::new(bytes.as_ref())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "contains a NUL byte"))
}

fn c_path(path: &Path) -> io::Result<CString> {
    c_string(path.as_os_str().as_bytes())
}

/// A detached copy of the mounts at and below `source`.
pub fn open_tree(source: &Path) -> io::Result<OwnedFd> {
    let path = c_path(source)?;
    let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as u32 | libc::AT_RECURSIVE as u32;
    // SAFETY: the path is NUL-terminated and outlives the call.
    check_fd(unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) })
}

/// Sets and clears attributes of a mount and, if `is_recursive`, of all below it.
pub fn set_attributes(mount: BorrowedFd, set: u64, clear: u64, is_recursive: bool) -> io::Result<()> {
    mount_setattr(mount, set, clear, 0, is_recursive)
}

/// [`set_attributes`], and ids on disk are seen through the user namespace `userns`.
pub fn set_id_map(mount: BorrowedFd, set: u64, userns: BorrowedFd) -> io::Result<()> {
    let userns = u64::try_from(userns.as_raw_fd()).map_err(io::Error::other)?;
    mount_setattr(mount, set | ATTR_IDMAP, 0, userns, true)
}

fn mount_setattr(mount: BorrowedFd, set: u64, clear: u64, userns: u64, is_recursive: bool) -> io::Result<()> {
    let attributes = MountAttr { set, clear, propagation: 0, userns };
    let recursive = if is_recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: `attributes` has the kernel's layout and outlives the call; its size is passed.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | recursive,
            &raw const attributes,
            size_of::<MountAttr>(),
        )
    })
    .map(drop)
}

/// A detached bind mount of `source`: never setuid, no devices.
pub fn bind(source: &Path, is_read_only: bool) -> io::Result<OwnedFd> {
    let mount = open_tree(source)?;
    let read_only = if is_read_only { ATTR_RDONLY } else { 0 };
    set_attributes(as_fd(&mount), ATTR_NOSUID | ATTR_NODEV | read_only, 0, true)?;
    Ok(mount)
}

/// A detached mount of a new file system. An option with an empty value is a flag.
pub fn new_filesystem(kind: &str, options: &[(&str, &str)], attributes: u64) -> Result<OwnedFd, Failure> {
    let name = c_string(kind).step("file system name")?;
    // SAFETY: the name is NUL-terminated and outlives the call.
    let context = check_fd(unsafe { libc::syscall(libc::SYS_fsopen, name.as_ptr(), FSOPEN_CLOEXEC) })
        .step(format!("fsopen {kind}"))?;
    let configure = |command: u32, key: Option<&str>, value: Option<&str>| -> io::Result<()> {
        let key = key.map(c_string).transpose()?;
        let value = value.map(c_string).transpose()?;
        let pointer = |text: &Option<CString>| text.as_ref().map_or(std::ptr::null(), |text| text.as_ptr());
        // SAFETY: both strings are NUL-terminated or null and outlive the call.
        check(unsafe {
            libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), command, pointer(&key), pointer(&value), 0)
        })
        .map(drop)
    };
    for (key, value) in options {
        let result = if value.is_empty() {
            configure(FSCONFIG_SET_FLAG, Some(key), None)
        } else {
            configure(FSCONFIG_SET_STRING, Some(key), Some(value))
        };
        result.step(format!("{kind} option {key}={value}{}", kernel_words(&context)))?;
    }
    configure(FSCONFIG_CMD_CREATE, None, None).step(format!("create {kind}{}", kernel_words(&context)))?;
    // SAFETY: plain numbers only.
    check_fd(unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), FSMOUNT_CLOEXEC, attributes) })
        .step(format!("fsmount {kind}"))
}

/// What the kernel itself says about a failed mount option; empty where it says nothing.
fn kernel_words(context: &OwnedFd) -> String {
    let mut text = [0u8; 256];
    // SAFETY: the buffer is ours and its length is passed.
    let count = unsafe { libc::read(context.as_raw_fd(), text.as_mut_ptr().cast(), text.len()) };
    match usize::try_from(count) {
        Ok(count) if count > 0 => {
            format!(" ({})", String::from_utf8_lossy(&text[..count]).trim())
        }
        _ => String::new(),
    }
}

/// Attaches a detached mount at `target`.
pub fn attach(mount: BorrowedFd, target: &Path) -> io::Result<()> {
    let path = c_path(target)?;
    // SAFETY: both strings are NUL-terminated and outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            path.as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH,
        )
    })
    .map(drop)
}

/// Makes the working directory the root and drops the old root.
pub fn pivot_to_working_directory() -> io::Result<()> {
    // SAFETY: constant NUL-terminated strings. The old root is stacked on the new one, then detached.
    unsafe {
        check(libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()))?;
        check(libc::umount2(c".".as_ptr(), libc::MNT_DETACH))?;
    }
    std::env::set_current_dir("/")
}

/// No mount of ours may travel to the host, nor one of the host's to us.
pub fn make_mounts_private() -> io::Result<()> {
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: constant strings and null pointers, as mount(2) allows for a change of propagation.
    check(unsafe { libc::mount(std::ptr::null(), c"/".as_ptr(), std::ptr::null(), flags, std::ptr::null()) })
        .map(drop)
}

/// `fork`, with new namespaces: `None` in the child. For single-threaded processes.
pub fn fork(namespaces: libc::c_int) -> io::Result<Option<libc::pid_t>> {
    let flags = libc::c_long::from(namespaces | libc::SIGCHLD);
    // SAFETY: no new stack and no shared memory: the child goes on with its own copy, as after fork(2);
    // the callers are single-threaded, so no lock is held by a thread that the child lacks.
    let pid = check(unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) })?;
    Ok((pid != 0).then_some(pid as libc::pid_t))
}

/// Ends the process without running anything of the parent's exit handlers.
pub fn exit(code: i32) -> ! {
    // SAFETY: _exit has no preconditions.
    unsafe { libc::_exit(code) }
}

/// `prctl` with one argument.
pub fn prctl(option: libc::c_int, argument: libc::c_ulong) -> io::Result<()> {
    // SAFETY: the options used here take numbers only.
    check(unsafe { libc::prctl(option, argument, 0, 0, 0) }).map(drop)
}

/// Becomes user and group 0 of the own user namespace, without other groups, and keeps the capabilities.
pub fn become_root_inside(may_set_groups: bool) -> io::Result<()> {
    prctl(libc::PR_SET_KEEPCAPS, 1)?;
    // SAFETY: plain numbers; an empty list of groups needs no pointer.
    unsafe {
        if may_set_groups {
            check(libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()))?;
        }
        check(libc::setresgid(0, 0, 0))?;
        check(libc::setresuid(0, 0, 0))?;
    }
    Ok(())
}

/// Gives up every capability for good, the bounding set too.
pub fn drop_capabilities() -> io::Result<()> {
    for capability in 0..64 {
        match prctl(libc::PR_CAPBSET_DROP, capability) {
            Ok(()) => {}
            // EINVAL: the kernel does not know the number. EPERM: there was no right to drop it, so none
            // to use it: what counts is the check by no_new_privs and the empty sets below.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EPERM)) => {}
            Err(error) => return Err(error),
        }
    }
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    let none = [0u32; 6];
    // SAFETY: header and data have the layout of version 3 (two blocks of three words).
    check(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) }).map(drop)
}

/// Sets the loopback interface of this network namespace up.
pub fn loopback_up() -> io::Result<()> {
    // SAFETY: plain numbers.
    let socket = check_fd(unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: ifreq is plain data for which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads one ifreq.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) }).map(drop)
}

/// A hard limit of the calling process.
pub fn set_limit(resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: `limit` outlives the call.
    check(unsafe { libc::setrlimit(resource as _, &raw const limit) }).map(drop)
}

/// A pair of connected sockets that keep message bounds, both close-on-exec.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut pair = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the array has room for the two descriptors.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, so both are open and ours.
    Ok(unsafe { (OwnedFd::from_raw_fd(pair[0]), OwnedFd::from_raw_fd(pair[1])) })
}

/// A pipe, both ends close-on-exec and blocking: (read end, write end).
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut pair = [0; 2];
    // SAFETY: the array has room for the two descriptors.
    check(unsafe { libc::pipe2(pair.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: the call succeeded, so both are open and ours.
    Ok(unsafe { (OwnedFd::from_raw_fd(pair[0]), OwnedFd::from_raw_fd(pair[1])) })
}

/// Opens a path only to name it (`O_PATH`).
pub fn open_path(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    // SAFETY: the path is NUL-terminated and outlives the call.
    check_fd(unsafe { libc::open(path.as_ptr(), libc::O_PATH | libc::O_CLOEXEC) })
}

pub fn as_fd(fd: &OwnedFd) -> BorrowedFd<'_> {
    std::os::fd::AsFd::as_fd(fd)
}
