//! How much room there is: bytes of the folder, bytes that the disk has left, and whether calls may begin.
//!
//! Invariants:
//! - Only calls that have not begun are refused. One that was sampled is written as long as the disk takes it, above
//!   the folder's bound and out of what is to stay free: that is what it stays free for.
//! - The folder is not walked for a call: what this writer changes is counted as it happens, and a thread walks it now
//!   and then, since others (`lego capture prune`) change it as well. While calls are refused it looks each second, so
//!   that they are served again by themselves.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metrics::Gauge;

use super::layout::journal_dir;
use super::storage::Storage;
use crate::record::SinkError;

/// Between two looks while calls are refused.
const LOOK: Duration = Duration::from_secs(1);
/// So many such times pass between two looks otherwise.
const QUIET_LOOKS: u32 = 30;
/// What is written to find out whether a disk that failed takes captures again.
static PROBE: [u8; 64 << 10] = [0; 64 << 10];

/// What a folder may take. Default: all that there is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// A folder of so many bytes is warned of in the log.
    pub alarm_bytes: Option<u64>,
    /// In one of so many bytes no more calls begin.
    pub max_bytes: Option<u64>,
    /// Nor do they where its disk has less left, or on a small disk less than a twentieth of it.
    pub min_free_bytes: u64,
    /// Nor when the disk has taken nothing for so long; those that wait for it fail then.
    pub stall: Option<Duration>,
}

/// The room of one folder.
pub(super) struct Room {
    dir: PathBuf,
    limits: Limits,
    bytes: Arc<AtomicI64>,
    /// That the disk has left for this process.
    free: AtomicU64,
    /// That it must have left.
    least: AtomicU64,
    /// Why the last commit failed, until one does not.
    failed: Mutex<Option<SinkError>>,
    /// When the commit that runs began.
    busy_since: Mutex<Option<Instant>>,
    is_alarmed: AtomicBool,
    is_refusing: AtomicBool,
    gauges: [Gauge; 2],
}

impl Room {
    /// The room of `dir`, whose bytes are counted on in `bytes`.
    pub(super) fn new(dir: &Path, limits: Limits, bytes: Arc<AtomicI64>) -> Self {
        let room = Self {
            // Commands are told by it, to people who may stand elsewhere.
            dir: std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned()),
            limits,
            bytes,
            free: AtomicU64::new(u64::MAX),
            least: AtomicU64::new(0),
            failed: Mutex::default(),
            busy_since: Mutex::default(),
            is_alarmed: AtomicBool::new(false),
            is_refusing: AtomicBool::new(false),
            gauges: ["lego_capture_folder_bytes", "lego_capture_disk_free_bytes"]
                .map(|name| metrics::gauge!(name)),
        };
        room.count();
        room.tell();
        room
    }

    /// Whether a call may begin.
    pub(super) fn admits(&self) -> Result<(), SinkError> {
        let place = || self.dir.display().to_string();
        if let Some(error) = lock(&self.failed).clone() {
            return Err(error);
        }
        if let Some(stall) = self.limits.stall
            && lock(&self.busy_since).is_some_and(|since| since.elapsed() >= stall)
        {
            return Err(self.stalled());
        }
        let held = self.held();
        match self.limits.max_bytes {
            Some(most) if held >= most => return Err(SinkError::AtCap { place: place(), held, most }),
            _ => {}
        }
        let (free, least) = (self.free.load(Ordering::Relaxed), self.least.load(Ordering::Relaxed));
        if free < least {
            return Err(SinkError::LowDisk { place: place(), free, least });
        }
        Ok(())
    }

    /// Whether so many bytes more would leave room for calls.
    pub(super) fn has_spare(&self, bytes: u64) -> bool {
        let (free, least) = (self.free.load(Ordering::Relaxed), self.least.load(Ordering::Relaxed));
        let is_within = self.limits.max_bytes.is_none_or(|most| self.held().saturating_add(bytes) < most);
        is_within && free.saturating_sub(bytes) >= least
    }

    /// What those are told who have waited for too long.
    pub(super) fn stalled(&self) -> SinkError {
        let seconds = self.limits.stall.unwrap_or_default().as_secs();
        SinkError::Stalled { place: self.dir.display().to_string(), seconds }
    }

    /// How long to wait for the disk.
    pub(super) const fn patience(&self) -> Option<Duration> {
        self.limits.stall
    }

    /// A commit begins.
    pub(super) fn begins(&self) {
        *lock(&self.busy_since) = Some(Instant::now());
    }

    /// A commit ended so.
    pub(super) fn ended(&self, outcome: Result<(), &SinkError>) {
        *lock(&self.busy_since) = None;
        *lock(&self.failed) = outcome.err().cloned();
        self.ask_disk();
        self.tell();
    }

    fn held(&self) -> u64 {
        u64::try_from(self.bytes.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// Walks the folder, and asks the disk.
    fn count(&self) {
        match size(&self.dir) {
            Ok(bytes) => self.bytes.store(i64::try_from(bytes).unwrap_or(i64::MAX), Ordering::Relaxed),
            Err(error) => tracing::debug!(dir = %self.dir.display(), %error, "the folder cannot be counted"),
        }
        self.ask_disk();
    }

    fn ask_disk(&self) {
        let Ok(disk) = nix::sys::statvfs::statvfs(&self.dir) else {
            return;
        };
        let block = disk.fragment_size();
        self.free.store(disk.blocks_available().saturating_mul(block), Ordering::Relaxed);
        let twentieth = disk.blocks().saturating_mul(block) / 20;
        self.least.store(self.limits.min_free_bytes.min(twentieth), Ordering::Relaxed);
    }

    /// Says what is to be said.
    fn tell(&self) {
        let (held, dir) = (self.held(), self.dir.display());
        self.gauges[0].set(held as f64);
        self.gauges[1].set(self.free.load(Ordering::Relaxed) as f64);
        if let Some(alarm) = self.limits.alarm_bytes {
            if held >= alarm && !self.is_alarmed.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    "the captures in {dir} have grown to {held} bytes (proxy.capture_alarm_bytes = {alarm}): \
                     `lego capture prune --older-than 30d {dir}` removes old days"
                );
            } else if held < alarm / 10 * 9 {
                // One that goes up and down at the bound is not warned of each time.
                self.is_alarmed.store(false, Ordering::Relaxed);
            }
        }
        let refused = self.admits().err();
        if self.is_refusing.swap(refused.is_some(), Ordering::Relaxed) != refused.is_some() {
            match refused {
                Some(reason) => tracing::error!(%reason, "calls are refused"),
                None => tracing::info!("there is room for captures in {dir} again: calls are served"),
            }
        }
    }

    /// Looks from time to time until the writer is gone.
    pub(super) fn watch(&self, storage: &dyn Storage, writer: &Receiver<()>) {
        let mut quiet = 0;
        while writer.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
            quiet += 1;
            if self.admits().is_err() || quiet >= QUIET_LOOKS {
                quiet = 0;
                self.count();
            }
            if lock(&self.failed).is_some() && self.probe(storage).is_ok() {
                *lock(&self.failed) = None;
            }
            self.tell();
        }
    }

    /// Whether the disk takes a little.
    fn probe(&self, storage: &dyn Storage) -> io::Result<()> {
        let path = journal_dir(&self.dir).join("probe.tmp");
        let write = || {
            let mut disk = storage.create(&path)?;
            disk.write_at(0, &PROBE)?;
            disk.sync()
        };
        let written = write();
        let _ = storage.remove(&path);
        written
    }
}

/// No code panics while it holds one of these locks, so a poisoned one is still whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of all files below `folder`. What goes away meanwhile is not counted.
fn size(folder: &Path) -> io::Result<u64> {
    let mut sum = 0;
    let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let entries = match fs::read_dir(folder) {
        Err(error) if is_gone(&error) => return Ok(0),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => sum += size(&entry.path())?,
            Ok(metadata) => sum += metadata.len(),
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_refuse_calls_has_no_room_to_spare() {
        let dir = tempfile::tempdir().expect("folder");
        fs::write(dir.path().join("a"), [0; 100]).expect("written");
        let room = |limits| Room::new(dir.path(), limits, Arc::default());
        let bound = room(Limits { max_bytes: Some(1000), ..Limits::default() });
        assert!(bound.has_spare(899) && !bound.has_spare(900));
        let small = room(Limits { min_free_bytes: u64::MAX, ..Limits::default() });
        let free = small.free.load(Ordering::Relaxed);
        assert!(!small.has_spare(free), "a twentieth of the disk stays");
        assert!(room(Limits::default()).has_spare(1));
    }
}
