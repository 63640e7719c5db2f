//! Control groups: memory and process limits of a sandbox, and exact evidence of out-of-memory kills.
//!
//! Version 1 as root, or a delegated subtree of version 2. Groups are named `lego-<pid>-<start>-<backend>-<n>`
//! after the lego that made them, so that a later one can tell the leftovers of the dead from the living.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const ROOT: &str = "/sys/fs/cgroup";
const PREFIX: &str = "lego-";
/// The kernel charges memory in batches: so far below its limit a group can already be refused more.
const CHARGE_BYTES: u64 = 1 << 20;

/// Where this lego may make groups.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    V1 { memory: PathBuf, pids: PathBuf },
    V2 { parent: PathBuf },
}

/// Makes groups for sandboxes.
#[derive(Debug)]
pub struct Cgroups {
    place: Place,
    prefix: String,
    next: AtomicU64,
}

/// The group of one sandbox. [`Group::remove`] it when nothing runs in it.
#[derive(Debug)]
pub struct Group {
    directories: Vec<PathBuf>,
    is_v2: bool,
    memory_limit: Option<u64>,
}

/// Counters at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Processes of the group that an OOM killer ended, whoever's limit it was.
    oom_kills: u64,
    /// Times that the group's own limit was hit (version 2).
    limit_hits: u64,
}

/// Out-of-memory kills in a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kills {
    /// Under the group's own limit.
    pub own: u64,
    /// By the host's OOM killer, or under a limit above the group.
    pub host: u64,
}

impl Cgroups {
    /// What this machine offers, or why nothing can be used. Removes what dead legos left there.
    /// `prefix` is an [`own_prefix`].
    ///
    /// # Errors
    /// For people: what is missing.
    pub fn find(prefix: String) -> Result<Self, String> {
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let place = find_v1(&own)
            .or_else(|v1| find_v2(&own).map_err(|v2| format!("version 1: {v1}; version 2: {v2}")))?;
        let cgroups = Self { place, prefix, next: AtomicU64::new(0) };
        for parent in cgroups.parents() {
            sweep(&parent);
        }
        Ok(cgroups)
    }

    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    pub fn parents(&self) -> Vec<PathBuf> {
        match &self.place {
            Place::V1 { memory, pids } => vec![memory.clone(), pids.clone()],
            Place::V2 { parent } => vec![parent.clone()],
        }
    }

    pub fn describe(&self) -> &'static str {
        match self.place {
            Place::V1 { .. } => "cgroup v1",
            Place::V2 { .. } => "cgroup v2",
        }
    }

    /// A new group with these limits.
    ///
    /// # Errors
    /// The directory or a limit cannot be made; nothing is left behind.
    pub fn create(&self, memory: Option<u64>, processes: Option<u64>) -> io::Result<Group> {
        let name = format!("{}{}", self.prefix, self.next.fetch_add(1, Ordering::Relaxed));
        let directories: Vec<_> = self.parents().iter().map(|parent| parent.join(&name)).collect();
        let is_v2 = matches!(self.place, Place::V2 { .. });
        let group = Group { directories, is_v2, memory_limit: memory };
        let result = group.set_up(memory, processes);
        if result.is_err() {
            // The error that counts is the first one; a half-made group is empty and goes.
            let _ = group.remove();
        }
        result.map(|()| group)
    }
}

impl Group {
    fn set_up(&self, memory: Option<u64>, processes: Option<u64>) -> io::Result<()> {
        for directory in &self.directories {
            fs::create_dir(directory)?;
        }
        if let Some(bytes) = memory {
            let bytes = bytes.to_string();
            if self.is_v2 {
                self.write(0, "memory.max", &bytes)?;
                self.write_if_there(0, "memory.swap.max", "0")?;
            } else {
                self.write(0, "memory.limit_in_bytes", &bytes)?;
                self.write_if_there(0, "memory.memsw.limit_in_bytes", &bytes)?;
            }
        }
        if let Some(count) = processes {
            self.write(self.directories.len() - 1, "pids.max", &count.to_string())?;
        }
        Ok(())
    }

    fn write(&self, directory: usize, file: &str, text: &str) -> io::Result<()> {
        let path = self.directories[directory].join(file);
        fs::write(&path, text)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
    }

    /// Swap accounting may be compiled out or off.
    fn write_if_there(&self, directory: usize, file: &str, text: &str) -> io::Result<()> {
        if self.directories[directory].join(file).exists() {
            self.write(directory, file, text)
        } else {
            Ok(())
        }
    }

    /// The files through which a process joins by writing `0`.
    pub fn open_joins(&self) -> io::Result<Vec<OwnedFd>> {
        self.directories
            .iter()
            .map(|directory| {
                let path = directory.join("cgroup.procs");
                Ok(fs::OpenOptions::new().write(true).open(path)?.into())
            })
            .collect()
    }

    pub fn counters(&self) -> Counters {
        let memory = &self.directories[0];
        if self.is_v2 {
            let events = memory.join("memory.events");
            Counters { oom_kills: keyed(&events, "oom_kill"), limit_hits: keyed(&events, "oom") }
        } else {
            Counters { oom_kills: keyed(&memory.join("memory.oom_control"), "oom_kill"), limit_hits: 0 }
        }
    }

    /// Who ended processes of the group since `before`.
    pub fn kills_since(&self, before: Counters) -> Kills {
        let now = self.counters();
        let kills = now.oom_kills.saturating_sub(before.oom_kills);
        let is_at_limit = match self.memory_limit {
            None => false,
            Some(_) if self.is_v2 => now.limit_hits > before.limit_hits,
            // Version 1 has no dependable count of hits. A group whose peak is its limit ran into it.
            Some(limit) => self.peak().is_some_and(|peak| peak.saturating_add(CHARGE_BYTES) >= limit),
        };
        if is_at_limit { Kills { own: kills, host: 0 } } else { Kills { own: 0, host: kills } }
    }

    /// Most memory that the group has held, bytes, since it was made.
    pub fn peak(&self) -> Option<u64> {
        let file = if self.is_v2 { "memory.peak" } else { "memory.max_usage_in_bytes" };
        number(&self.directories[0].join(file))
    }

    /// Whether kills by the group's own limit can be told.
    pub fn has_memory_limit(&self) -> bool {
        self.memory_limit.is_some()
    }

    /// # Errors
    /// Something still runs in it.
    pub fn remove(&self) -> io::Result<()> {
        for directory in &self.directories {
            remove(directory)?;
        }
        Ok(())
    }
}

fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn keyed(path: &Path, key: &str) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let value = |line: &str| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok();
    text.lines().find_map(value).unwrap_or(0)
}

/// The own group in a hierarchy of version 1, where it can be written.
fn find_v1(own: &str) -> Result<Place, String> {
    let controller = |name: &str| -> Result<PathBuf, String> {
        let path = own
            .lines()
            .find_map(|line| {
                let (_, rest) = line.split_once(':')?;
                let (controllers, path) = rest.split_once(':')?;
                controllers.split(',').any(|controller| controller == name).then_some(path)
            })
            .ok_or_else(|| format!("no {name} controller"))?;
        let mount = Path::new(ROOT).join(name);
        // In a container the path may be the host's, and the mount's root our own group.
        [mount.join(path.trim_start_matches('/')), mount]
            .into_iter()
            .find(|directory| directory.join("cgroup.procs").exists())
            .ok_or_else(|| format!("no {name} hierarchy under {ROOT}"))
            .and_then(|directory| writable(&directory).map(|()| directory))
    };
    Ok(Place::V1 { memory: controller("memory")?, pids: controller("pids")? })
}

/// The delegated subtree of version 2. lego itself moves to a leaf, since only leaves may hold processes.
fn find_v2(own: &str) -> Result<Place, String> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::/")).ok_or("not in a group")?;
    let mut parent = Path::new(ROOT).join(path);
    if !parent.join("cgroup.controllers").exists() {
        return Err(format!("{} is not of version 2", parent.display()));
    }
    if parent.file_name().is_some_and(|name| name == "lego-main") {
        parent.pop(); // we have stepped aside before
    }
    let have = fs::read_to_string(parent.join("cgroup.controllers")).map_err(|e| e.to_string())?;
    for controller in ["memory", "pids"] {
        if !have.split_whitespace().any(|name| name == controller) {
            return Err(format!("no {controller} controller in {}", parent.display()));
        }
    }
    writable(&parent)?;
    step_aside(&parent).map_err(|error| format!("{}: {error}", parent.display()))?;
    Ok(Place::V2 { parent })
}

fn step_aside(parent: &Path) -> io::Result<()> {
    let main = parent.join("lego-main");
    fs::create_dir_all(&main)?;
    for pid in fs::read_to_string(parent.join("cgroup.procs"))?.lines() {
        fs::write(main.join("cgroup.procs"), pid)?;
    }
    fs::write(parent.join("cgroup.subtree_control"), "+memory +pids")
}

fn writable(directory: &Path) -> Result<(), String> {
    nix::unistd::access(directory, nix::unistd::AccessFlags::W_OK)
        .map_err(|error| format!("{}: {error}", directory.display()))
}

/// `lego-<pid>-<start>-<backend>-` of this process, another one at each call.
pub fn own_prefix() -> String {
    static BACKENDS: AtomicU64 = AtomicU64::new(0);
    let pid = std::process::id();
    let backend = BACKENDS.fetch_add(1, Ordering::Relaxed);
    format!("{PREFIX}{pid}-{}-{backend}-", start_time(pid).unwrap_or(0))
}

/// When a process started, in clock ticks since boot; with the pid it names a process for good.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; field 22 is the 20th after it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Ends and removes what legos that are dead have left in `parent`.
fn sweep(parent: &Path) {
    for name in group_names(parent).filter(|name| is_of_the_dead(name)) {
        end(&parent.join(name));
    }
}

/// Whether a name begins with the [`own_prefix`] of a lego that is gone.
pub fn is_of_the_dead(name: &str) -> bool {
    let owner = name.strip_prefix(PREFIX).and_then(|rest| {
        let mut parts = rest.split('-');
        Some((parts.next()?.parse::<u32>().ok()?, parts.next()?.parse::<u64>().ok()?))
    });
    owner.is_some_and(|(pid, start)| start_time(pid) != Some(start))
}

/// Removes all groups in `parent` whose name starts with `prefix`.
pub fn remove_with_prefix(parent: &Path, prefix: &str) {
    if prefix.is_empty() {
        return;
    }
    for name in group_names(parent).filter(|name| name.starts_with(prefix)) {
        end(&parent.join(name));
    }
}

/// Best effort: a group that cannot be emptied stays for the next sweep.
fn end(group: &Path) {
    const ROUNDS: u32 = 200;
    for _ in 0..ROUNDS {
        for pid in fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default().lines() {
            if let Ok(pid) = pid.parse::<libc::pid_t>() {
                // SAFETY: plain numbers; the process is in a group that a dead lego made for its sandbox.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
        }
        if remove(group).is_ok() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

fn group_names(parent: &Path) -> impl Iterator<Item = String> + use<> {
    fs::read_dir(parent)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with(PREFIX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_name_tells_pid_and_start() {
        let prefix = own_prefix();
        let parts: Vec<_> = prefix.trim_end_matches('-').split('-').collect();
        assert_eq!(parts[1].parse::<u32>().unwrap(), std::process::id());
        assert!(parts[2].parse::<u64>().unwrap() > 0);
        assert_eq!(start_time(u32::MAX), None);
    }

    #[test]
    fn a_group_carries_its_limits_and_goes() {
        let Ok(cgroups) = Cgroups::find(own_prefix()) else {
            return;
        };
        let group = cgroups.create(Some(64 << 20), Some(10)).unwrap();
        let pids = number(&group.directories.last().unwrap().join("pids.max"));
        assert_eq!(pids, Some(10));
        assert_eq!(group.counters(), Counters::default());
        group.remove().unwrap();
        assert!(!group.directories[0].exists());
        sweep(&cgroups.parents()[0]);
    }
}
