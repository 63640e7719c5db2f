//! The sandbox's own root, made in its own mount namespace.
//!
//! Every mount is first made detached, with its attributes; the targets are only resolved after the old
//! root is gone. So no link in a mounted tree can name a host path.

use std::fs::{self, OpenOptions, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use super::failure::{Failure, Step};
use super::sys::{self, ATTR_NODEV, ATTR_NOEXEC, ATTR_NOSUID, ATTR_RDONLY};
use super::wire::{Plan, Shown};

/// Devices that hold no state.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

/// Links that programs expect in /dev.
const DEVICE_LINKS: [(&str, &str); 5] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
    ("pts/ptmx", "/dev/ptmx"),
];

/// Parts of /proc that speak for the whole machine: readable, never writable.
const READ_ONLY_PROC: [&str; 4] = ["/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"];

/// Parts of /proc that show other tenants' or the kernel's memory.
const HIDDEN_PROC: [&str; 5] =
    ["/proc/kcore", "/proc/kmsg", "/proc/keys", "/proc/timer_list", "/proc/sched_debug"];

/// Inodes of the tmpfs for each MiB of it: as many as mkfs.ext4 would give to small files.
const INODES_PER_MIB: u64 = 256;
const MIB: u64 = 1 << 20;
/// Room for mount points and lego's own small files.
const OWN_TMPFS_BYTES: u64 = 256 * 1024;
const OWN_INODES: u64 = 4096;

/// A detached mount and its place.
struct Pending {
    target: PathBuf,
    mount: OwnedFd,
    is_directory: bool,
}

impl Pending {
    fn bind(shown: &Shown) -> Result<Self, Failure> {
        let mount =
            sys::bind(&shown.host, !shown.is_writable).step(format!("bind {}", shown.host.display()))?;
        Ok(Self::new(shown, mount))
    }

    fn new(shown: &Shown, mount: OwnedFd) -> Self {
        Self { target: shown.inside.clone(), mount, is_directory: shown.is_directory }
    }
}

/// Builds the root of `plan` and moves into it. `id_mapped` are the plan's mounts where another process
/// had to make them; empty: they are made here.
pub fn enter(plan: &Plan, id_mapped: Vec<OwnedFd>, has_user_namespace: bool) -> Result<(), Failure> {
    sys::make_mounts_private().step("make mounts private")?;
    let root = root_tmpfs(plan.tmp_bytes)?;
    let mut pending = plan.system.iter().map(Pending::bind).collect::<Result<Vec<_>, _>>()?;
    // A new /proc needs a fully visible one in sight, so it is made before the old root goes.
    let proc = sys::new_filesystem("proc", &[], ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC)?;
    pending.push(Pending { target: "/proc".into(), mount: proc, is_directory: true });
    for name in DEVICES {
        pending.push(device(name)?);
    }
    pending.push(terminals()?);
    if id_mapped.is_empty() {
        for shown in &plan.mounts {
            pending.push(Pending::bind(shown)?);
        }
    } else {
        pending.extend(plan.mounts.iter().zip(id_mapped).map(|(shown, mount)| Pending::new(shown, mount)));
    }

    // Any directory can carry the new root; this one is sure to exist.
    let carrier = Path::new("/usr");
    sys::attach(sys::as_fd(&root), carrier).step("attach the root")?;
    std::env::set_current_dir(carrier).step("enter the root")?;
    sys::pivot_to_working_directory().step("pivot_root")?;
    writable_directories()?;
    // Outer places first, so that a mount inside another lands on top of it.
    pending.sort_by_key(|mount| mount.target.components().count());
    for mount in &pending {
        place(mount)?;
    }
    for (target, link) in DEVICE_LINKS {
        symlink(target, link).step(format!("link {link}"))?;
    }
    for (target, link) in &plan.links {
        symlink(target, link).step(format!("link {}", link.display()))?;
    }
    for (path, text) in &plan.files {
        write_file(path, text)?;
    }
    guard_proc(has_user_namespace)?;
    // Last: the root itself. /tmp and /dev/shm are mounts of their own and stay writable.
    sys::set_attributes(sys::as_fd(&root), ATTR_RDONLY, 0, false).step("make the root read-only")
}

/// One tmpfs holds the mount points, /tmp and /dev/shm, so one size limits all that can be written.
fn root_tmpfs(tmp_bytes: Option<u64>) -> Result<OwnedFd, Failure> {
    let mut options = vec![("mode", "755".to_owned())];
    if let Some(bytes) = tmp_bytes {
        let inodes = bytes.div_ceil(MIB).saturating_mul(INODES_PER_MIB).saturating_add(OWN_INODES);
        options.push(("size", bytes.saturating_add(OWN_TMPFS_BYTES).to_string()));
        options.push(("nr_inodes", inodes.to_string()));
    }
    let options: Vec<(&str, &str)> = options.iter().map(|(key, value)| (*key, value.as_str())).collect();
    sys::new_filesystem("tmpfs", &options, ATTR_NOSUID | ATTR_NODEV)
}

/// Copies of the still writable root's own directories: the root becomes read-only, these do not.
fn writable_directories() -> Result<(), Failure> {
    fs::create_dir("/dev").step("mkdir /dev")?;
    for path in ["/tmp", "/dev/shm"] {
        let path = Path::new(path);
        fs::create_dir(path).step(format!("mkdir {}", path.display()))?;
        fs::set_permissions(path, Permissions::from_mode(0o1777))
            .step(format!("chmod {}", path.display()))?;
        let mount = sys::open_tree(path).step(format!("open_tree {}", path.display()))?;
        sys::attach(sys::as_fd(&mount), path).step(format!("attach {}", path.display()))?;
    }
    Ok(())
}

fn device(name: &str) -> Result<Pending, Failure> {
    let target = Path::new("/dev").join(name);
    let mount = sys::open_tree(&target).step(format!("open_tree {}", target.display()))?;
    sys::set_attributes(sys::as_fd(&mount), ATTR_NOSUID | ATTR_NOEXEC, 0, true)
        .step(format!("attributes of {}", target.display()))?;
    Ok(Pending { target, mount, is_directory: false })
}

fn terminals() -> Result<Pending, Failure> {
    let options = [("newinstance", ""), ("ptmxmode", "0666"), ("mode", "620")];
    let mount = sys::new_filesystem("devpts", &options, ATTR_NOSUID | ATTR_NOEXEC)?;
    Ok(Pending { target: "/dev/pts".into(), mount, is_directory: true })
}

/// Makes the mount point and attaches.
fn place(pending: &Pending) -> Result<(), Failure> {
    let target = &pending.target;
    if pending.is_directory {
        fs::create_dir_all(target).step(format!("mkdir {}", target.display()))?;
    } else {
        make_parent(target)?;
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(target)
            .step(format!("create {}", target.display()))?;
    }
    sys::attach(sys::as_fd(&pending.mount), target).step(format!("attach {}", target.display()))
}

fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    make_parent(path)?;
    fs::write(path, text).step(format!("write {}", path.display()))
}

fn make_parent(path: &Path) -> Result<(), Failure> {
    match path.parent() {
        Some(parent) => fs::create_dir_all(parent).step(format!("mkdir {}", parent.display())),
        None => Ok(()),
    }
}

/// Closes what /proc offers beyond the sandbox's own processes.
fn guard_proc(has_user_namespace: bool) -> Result<(), Failure> {
    // No nesting, as a second wall behind seccomp. Without an own user namespace the same file would
    // be the host's setting.
    if has_user_namespace {
        fs::write("/proc/sys/user/max_user_namespaces", "0").step("forbid nested namespaces")?;
    }
    for path in READ_ONLY_PROC.map(Path::new) {
        if path.exists() {
            let mount = sys::bind(path, true).step(format!("bind {}", path.display()))?;
            sys::attach(sys::as_fd(&mount), path).step(format!("attach {}", path.display()))?;
        }
    }
    for path in HIDDEN_PROC.map(Path::new) {
        if path.exists() {
            let mount = sys::open_tree(Path::new("/dev/null")).step("open_tree /dev/null")?;
            sys::set_attributes(sys::as_fd(&mount), ATTR_RDONLY | ATTR_NOSUID, 0, true)
                .step("attributes of /dev/null")?;
            sys::attach(sys::as_fd(&mount), path).step(format!("hide {}", path.display()))?;
        }
    }
    Ok(())
}
