//! The limit on what a sandbox may add to its writable mounts, which lie on the host's own file system: no quota holds
//! them, so their size is looked at from time to time, and everything inside is killed when it is too large.
//!
//! A look is rarer where it is slow (see [`SHARE`]), up to [`LONGEST`]; between two looks, `RLIMIT_FSIZE` holds every single file.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use super::watcher;
use super::wire::Shown;
use crate::sandbox::Limits;

/// Time between two looks, at least.
const PERIOD: Duration = Duration::from_millis(250);
/// Looks take about one in so many parts of a processor.
const SHARE: u32 = 200;
/// Time between two looks, at most: in ten times as long a fast disk fills.
const LONGEST: Duration = Duration::from_secs(2);
/// What every file and folder counts at least: an empty one takes room too.
const ENTRY_BYTES: u64 = 4096;
/// Bytes of a block in `st_blocks`.
const BLOCK_BYTES: u64 = 512;
/// Folders inside one another. Deeper ones count as too large: nothing honest is so deep.
const MAX_DEPTH: usize = 128;

/// The writable mounts of a sandbox, and how large they may become.
#[derive(Debug)]
pub struct Quota {
    places: Vec<Place>,
    /// The largest file that was there at first, bytes.
    pub largest_file: u64,
}

#[derive(Debug)]
struct Place {
    root: File,
    limit: u64,
}

/// What a tree takes.
#[derive(Debug, Default)]
struct Size {
    bytes: u64,
    largest_file: u64,
    devices: BTreeSet<u64>,
}

impl Quota {
    /// Measures the writable ones of `mounts`, before any program can write to them. `None` if none has a limit.
    pub fn of(mounts: &[Shown], limits: &Limits) -> io::Result<Option<Self>> {
        let mut quota = Self { places: Vec::new(), largest_file: 0 };
        for shown in mounts.iter().filter(|shown| shown.is_writable) {
            // Of the weak sandbox; the others' /tmp is a tmpfs of its size.
            let is_tmp = shown.inside == Path::new("/tmp");
            let Some(added) = (if is_tmp { limits.tmp_bytes } else { limits.workspace_bytes }) else {
                continue;
            };
            let root = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&shown.host)?;
            let mut size = Size::default();
            size.add_root(&root, u64::MAX)?;
            quota.largest_file = quota.largest_file.max(size.largest_file);
            quota.places.push(Place { root, limit: size.bytes.saturating_add(added) });
        }
        Ok((!quota.places.is_empty()).then_some(quota))
    }

    /// Is more there than may be? `proc` is the sandbox's own: files count that are deleted and still open.
    fn is_over(&self, proc: Option<&OwnedFd>) -> bool {
        self.places.iter().any(|place| {
            let mut size = Size::default();
            // Its root is open: it cannot be gone.
            let measured = size.add_root(&place.root, place.limit);
            measured.is_ok()
                && (size.bytes > place.limit || {
                    let deleted = proc.map_or(0, |proc| deleted_bytes(proc, &size.devices));
                    size.bytes.saturating_add(deleted) > place.limit
                })
        })
    }
}

impl Size {
    fn add_root(&mut self, root: &File, enough: u64) -> io::Result<()> {
        let meta = root.metadata()?;
        self.add(&meta);
        if meta.is_dir() {
            self.add_tree(root, 0, enough);
        }
        Ok(())
    }

    fn add(&mut self, meta: &Metadata) {
        self.bytes = self.bytes.saturating_add((meta.blocks() * BLOCK_BYTES).max(ENTRY_BYTES));
        self.devices.insert(meta.dev());
        if meta.is_file() {
            self.largest_file = self.largest_file.max(meta.len());
        }
    }

    /// What lies in an open folder; stops beyond `enough`. Names are resolved one at a time and never through a link,
    /// whatever the programs inside do meanwhile. What cannot be looked into (it is gone by now; its owner locked it
    /// and is not root) counts nothing.
    fn add_tree(&mut self, folder: &File, depth: usize, enough: u64) {
        let place = format!("/proc/self/fd/{}", folder.as_raw_fd());
        let mut inner: Vec<OsString> = Vec::new();
        for entry in fs::read_dir(&place).into_iter().flatten().flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            self.add(&meta);
            if meta.is_dir() {
                inner.push(entry.file_name());
            }
            if self.bytes > enough {
                return;
            }
        }
        if depth >= MAX_DEPTH && !inner.is_empty() {
            self.bytes = u64::MAX;
            return;
        }
        for name in inner {
            let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
            let opened = OpenOptions::new().read(true).custom_flags(flags).open(Path::new(&place).join(name));
            if let Ok(folder) = opened {
                self.add_tree(&folder, depth + 1, enough);
            }
            if self.bytes > enough {
                return;
            }
        }
    }
}

/// Bytes of files on `devices` that have no name any more and are open in the sandbox.
fn deleted_bytes(proc: &OwnedFd, devices: &BTreeSet<u64>) -> u64 {
    let mut seen = BTreeSet::new();
    let mut bytes = 0_u64;
    for process in watcher::processes(proc) {
        for entry in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
            let Ok(meta) = fs::metadata(entry.path()) else { continue };
            let is_nameless = meta.is_file() && meta.nlink() == 0 && devices.contains(&meta.dev());
            if is_nameless && seen.insert((meta.dev(), meta.ino())) {
                bytes = bytes.saturating_add(meta.blocks() * BLOCK_BYTES);
            }
        }
    }
    bytes
}

/// Looks while a program runs.
#[derive(Debug)]
pub struct Watch {
    of: Option<(Arc<Quota>, Option<Arc<OwnedFd>>)>,
    next: tokio::time::Instant,
    look: Option<JoinHandle<(bool, Duration)>>,
}

impl Watch {
    pub fn new(quota: Option<&Arc<Quota>>, proc: Option<&Arc<OwnedFd>>) -> Self {
        let of = quota.map(|quota| (Arc::clone(quota), proc.cloned()));
        Self { of, next: tokio::time::Instant::now() + PERIOD, look: None }
    }

    /// Returns when more is there than may be; never, where nothing is limited. Can be dropped and called again.
    pub async fn until_over(&mut self) {
        loop {
            if self.look.is_none() {
                tokio::time::sleep_until(self.next).await;
            }
            if self.look().await {
                return;
            }
        }
    }

    /// One look that begins now: at the program's end, so that what it wrote last is seen too.
    pub async fn last_look(&mut self) -> bool {
        // One that is under way may have passed by before that.
        let was_over = self.look.is_some() && self.look().await;
        was_over || self.look().await
    }

    async fn look(&mut self) -> bool {
        let Some((quota, proc)) = &self.of else {
            return std::future::pending().await;
        };
        let look = self.look.get_or_insert_with(|| {
            let (quota, proc) = (Arc::clone(quota), proc.clone());
            tokio::task::spawn_blocking(move || {
                let started = Instant::now();
                (quota.is_over(proc.as_deref()), started.elapsed())
            })
        });
        // It fails only where the runtime ends.
        let (is_over, cost) = look.await.unwrap_or((false, PERIOD));
        self.look = None;
        self.next = tokio::time::Instant::now() + (cost * SHARE).clamp(PERIOD, LONGEST);
        is_over
    }

    /// Whether anything is limited.
    pub fn is_on(&self) -> bool {
        self.of.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(host: &Path) -> [Shown; 1] {
        [Shown { host: host.to_owned(), inside: "/workspace".into(), is_writable: true, is_directory: true }]
    }

    fn quota(host: &Path, bytes: u64) -> Quota {
        let limits = Limits { workspace_bytes: Some(bytes), ..Limits::default() };
        Quota::of(&shown(host), &limits).expect("measured").expect("limited")
    }

    #[test]
    fn what_is_added_counts_and_what_was_there_does_not() {
        let root = tempfile::tempdir().expect("folder");
        fs::create_dir(root.path().join("d")).expect("folder");
        fs::write(root.path().join("d/first"), vec![1; 3 << 20]).expect("write");
        let quota = quota(root.path(), 1 << 20);
        assert_eq!(quota.largest_file, 3 << 20);
        assert!(!quota.is_over(None));
        fs::write(root.path().join("d/more"), vec![1; 2 << 20]).expect("write");
        assert!(quota.is_over(None));
        fs::remove_file(root.path().join("d/more")).expect("remove");
        assert!(!quota.is_over(None));
        // Empty files take room too, and a sparse one none.
        let sparse = File::create(root.path().join("sparse")).expect("file");
        sparse.set_len(1 << 40).expect("sparse");
        assert!(!quota.is_over(None));
        for number in 0..300 {
            File::create(root.path().join(format!("d/{number}"))).expect("file");
        }
        assert!(quota.is_over(None));
    }

    #[test]
    fn links_are_not_followed_and_folders_too_deep_are_too_large() {
        let root = tempfile::tempdir().expect("folder");
        let quota = quota(root.path(), 1 << 30);
        std::os::unix::fs::symlink("/", root.path().join("all")).expect("link");
        let mut size = Size::default();
        size.add_root(&quota.places[0].root, u64::MAX).expect("measured");
        assert_eq!(size.bytes, 2 * ENTRY_BYTES, "the folder and the link");
        let deep = vec!["d"; MAX_DEPTH].join("/");
        fs::create_dir_all(root.path().join(&deep)).expect("folders");
        assert!(!quota.is_over(None));
        fs::create_dir_all(root.path().join(deep).join("d/d")).expect("folders");
        assert!(quota.is_over(None));
    }

    #[test]
    fn nothing_writable_or_nothing_limited_is_not_watched() {
        let root = tempfile::tempdir().expect("folder");
        assert!(Quota::of(&shown(root.path()), &Limits::default()).expect("measured").is_none());
        let limits = Limits { workspace_bytes: Some(1), ..Limits::default() };
        let [read_only] = shown(root.path()).map(|shown| Shown { is_writable: false, ..shown });
        assert!(Quota::of(&[read_only], &limits).expect("measured").is_none());
    }
}
