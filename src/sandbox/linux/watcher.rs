//! The soft memory limit where there is no control group: a look at the sandbox's own /proc.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A look costs about 0.1 ms a process, and a burst within a period is caught by the limit of each process.
pub const PERIOD: Duration = Duration::from_millis(50);

/// Writable places of a sandbox that live in memory; they share one tmpfs.
const TMPFS: &str = "tmp";

/// Bytes held by all processes of a sandbox but its init, and by its tmpfs.
///
/// First a cheap sum that counts shared pages more than once; only if that is over `limit`, the exact
/// one, which walks page tables.
pub fn memory_of(proc: &OwnedFd, root: &OwnedFd, limit: u64) -> u64 {
    let processes = processes(proc);
    let files = tmpfs_bytes(root);
    let sum = |of: fn(&Path) -> u64| files + processes.iter().map(|path| of(path)).sum::<u64>();
    let cheap = sum(resident);
    if cheap <= limit { cheap } else { sum(proportional) }
}

/// The processes of a sandbox but its init.
pub fn processes(proc: &OwnedFd) -> Vec<PathBuf> {
    fs::read_dir(format!("/proc/self/fd/{}", proc.as_raw_fd()))
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| {
            let pid = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
            pid.is_some_and(|pid| pid > 1)
        })
        .map(|entry| entry.path())
        .collect()
}

fn tmpfs_bytes(root: &OwnedFd) -> u64 {
    let path = format!("/proc/self/fd/{}/{TMPFS}", root.as_raw_fd());
    nix::sys::statfs::statfs(path.as_str()).map_or(0, |statistics| {
        let used = statistics.blocks().saturating_sub(statistics.blocks_free());
        used.saturating_mul(statistics.block_size().unsigned_abs())
    })
}

fn resident(process: &Path) -> u64 {
    let status = fs::read_to_string(process.join("status")).unwrap_or_default();
    field(&status, "RssAnon:") + field(&status, "RssShmem:")
}

fn proportional(process: &Path) -> u64 {
    match fs::read_to_string(process.join("smaps_rollup")) {
        Ok(text) => field(&text, "Pss:"),
        Err(_) => resident(process),
    }
}

/// A `Name:  123 kB` line, in bytes; 0 where the process is gone.
fn field(text: &str, name: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|value| value.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .map_or(0, |kib| kib * 1024)
}

/// Times that the host as a whole ran out of memory and killed something.
pub fn host_oom_kills() -> u64 {
    fs::read_to_string("/proc/vmstat")
        .unwrap_or_default()
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_line_is_read_in_bytes() {
        assert_eq!(field("Name:\tx\nRssAnon:\t     132 kB\n", "RssAnon:"), 132 * 1024);
        assert_eq!(field("", "RssAnon:"), 0);
    }
}
