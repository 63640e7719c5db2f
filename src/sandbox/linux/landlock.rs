//! Landlock: the weak sandbox's file and network rules, held by the kernel without any privilege.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use super::failure::{Failure, Step};
use super::sys;
use super::wire::Plan;

/// The first version that also holds TCP to ports (Linux 6.7).
pub const NEEDED_ABI: i64 = 4;
/// The first version that also keeps signals and abstract sockets in (Linux 6.12).
const SCOPING_ABI: i64 = 6;
/// The first version that knows device ioctls (Linux 6.10).
const IOCTL_ABI: i64 = 5;

const EXECUTE: u64 = 1 << 0;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
/// All file rights of version 3 (bits 0 to 14).
const ALL_FILE_RIGHTS: u64 = (1 << 15) - 1;
const IOCTL_DEV: u64 = 1 << 15;
const TRUNCATE: u64 = 1 << 14;
const MAKE_CHAR: u64 = 1 << 6;
const MAKE_BLOCK: u64 = 1 << 11;
const BIND_TCP: u64 = 1 << 0;
const CONNECT_TCP: u64 = 1 << 1;
const SCOPE_ALL: u64 = 3;

const READ: u64 = EXECUTE | READ_FILE | READ_DIR;
/// Rights that the kernel accepts on a rule for a plain file.
const OF_A_FILE: u64 = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE;
/// Everything but the making of devices.
const WRITE: u64 = ALL_FILE_RIGHTS & !MAKE_CHAR & !MAKE_BLOCK;

const CREATE_RULESET_VERSION: u32 = 1;
const RULE_PATH_BENEATH: u32 = 1;
const RULE_NET_PORT: u32 = 2;

#[repr(C)]
struct Ruleset {
    files: u64,
    network: u64,
    scoped: u64,
}

#[repr(C, packed)]
struct PathBeneath {
    allowed: u64,
    parent: i32,
}

#[repr(C)]
struct NetPort {
    allowed: u64,
    port: u64,
}

/// The kernel's version of Landlock.
///
/// # Errors
/// The kernel has none, or it is switched off.
pub fn abi() -> io::Result<i64> {
    // SAFETY: the call for the version takes no attributes.
    sys::check(unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<Ruleset>(),
            0,
            CREATE_RULESET_VERSION,
        )
    })
}

/// Rules of a plan, ready to be put on.
pub struct Rules {
    ruleset: OwnedFd,
}

impl Rules {
    /// The system read-only, the plan's mounts as they say, TCP connections only to `port`.
    ///
    /// # Errors
    /// The step that failed; a kernel whose Landlock does not know TCP.
    pub fn new(plan: &Plan, port: Option<u16>) -> Result<Self, Failure> {
        let abi = abi().step("landlock")?;
        if abi < NEEDED_ABI {
            let error = io::Error::other(format!("version {abi}, version {NEEDED_ABI} is needed"));
            return Err(error).step("landlock");
        }
        let ioctl = if abi >= IOCTL_ABI { IOCTL_DEV } else { 0 };
        let attributes = Ruleset {
            files: ALL_FILE_RIGHTS | ioctl,
            network: BIND_TCP | CONNECT_TCP,
            scoped: if abi >= SCOPING_ABI { SCOPE_ALL } else { 0 },
        };
        // Kernels before the scopes know a shorter structure.
        let size = if abi >= SCOPING_ABI { 24 } else { 16 };
        // SAFETY: `attributes` has the kernel's layout and outlives the call; its known size is passed.
        let ruleset = sys::check_fd(unsafe {
            libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attributes, size, 0)
        })
        .step("landlock rule set")?;
        let rules = Self { ruleset };
        for shown in &plan.system {
            rules.allow_path(&shown.host, READ, shown.is_directory)?;
        }
        for shown in &plan.mounts {
            let rights = if shown.is_writable { READ | WRITE } else { READ };
            rules.allow_path(&shown.host, rights, shown.is_directory)?;
        }
        for device in ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"] {
            rules.allow_path(Path::new(device), READ_FILE | WRITE_FILE, false)?;
        }
        if let Some(port) = port {
            rules.allow_port(port)?;
        }
        Ok(rules)
    }

    fn allow_path(&self, path: &Path, rights: u64, is_directory: bool) -> Result<(), Failure> {
        let parent = sys::open_path(path).step(format!("open {}", path.display()))?;
        let rule = PathBeneath {
            allowed: if is_directory { rights } else { rights & OF_A_FILE },
            parent: parent.as_raw_fd(),
        };
        self.add(RULE_PATH_BENEATH, (&raw const rule).cast())
            .step(format!("landlock rule for {}", path.display()))
    }

    fn allow_port(&self, port: u16) -> Result<(), Failure> {
        let rule = NetPort { allowed: CONNECT_TCP, port: port.into() };
        self.add(RULE_NET_PORT, (&raw const rule).cast()).step(format!("landlock rule for port {port}"))
    }

    fn add(&self, kind: u32, rule: *const libc::c_void) -> io::Result<()> {
        // SAFETY: the callers pass a live structure of the kernel's layout for this kind of rule.
        sys::check(unsafe {
            libc::syscall(libc::SYS_landlock_add_rule, self.ruleset.as_raw_fd(), kind, rule, 0)
        })
        .map(drop)
    }

    /// Puts the rules on the calling process and its children to come. Needs no_new_privs.
    pub fn apply(&self) -> io::Result<()> {
        // SAFETY: plain numbers.
        sys::check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, self.ruleset.as_raw_fd(), 0) })
            .map(drop)
    }
}
