//! A machine whose disk fails at an operation of one's choice, and whose power goes at one: then everything that was not
//! synced is gone, whole or from some byte on, names as well.
//!
//! What the running program sees lies in a real folder, as in the page cache. Beside it stands what a disk would hold.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use super::{Disk, Storage};

/// Numbers that look random and repeat with their seed (xorshift64*).
pub(in crate::capture) struct Dice(u64);

impl Dice {
    pub(in crate::capture) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Below `bound`, which is not 0.
    pub(in crate::capture) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % bound
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }
}

/// How an operation fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::capture) enum Fault {
    /// The device reports an error. What a failed sync did not bring to disk never gets there.
    Device,
    /// There is no space: nothing is written.
    Full,
    /// There is no space for all: a part is written.
    Short,
}

impl Fault {
    fn error(self) -> io::Error {
        io::Error::from_raw_os_error(if self == Self::Device { libc::EIO } else { libc::ENOSPC })
    }
}

/// An operation that was done, of the file or folder of this name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::capture) enum Did {
    Made(PathBuf),
    MadeFolder(PathBuf),
    Written(PathBuf),
    Synced(PathBuf),
    SyncedFolder(PathBuf),
    /// By its old name.
    Renamed(PathBuf),
    Removed(PathBuf),
    Cut(PathBuf),
}

type FileId = usize;

/// A change of names that is not on disk yet.
#[derive(Debug, Clone)]
enum Change {
    Made { path: PathBuf, file: FileId },
    MadeFolder { path: PathBuf },
    Renamed { from: PathBuf, to: PathBuf, file: FileId },
    Removed { path: PathBuf, file: FileId },
}

impl Change {
    const fn file(&self) -> Option<FileId> {
        match self {
            Self::Made { file, .. } | Self::Renamed { file, .. } | Self::Removed { file, .. } => Some(*file),
            Self::MadeFolder { .. } => None,
        }
    }

    fn is_in(&self, folder: &Path) -> bool {
        let lies = |path: &Path| path.parent() == Some(folder);
        match self {
            Self::Made { path, .. } | Self::MadeFolder { path } | Self::Removed { path, .. } => lies(path),
            Self::Renamed { from, to, .. } => lies(from) || lies(to),
        }
    }
}

struct OneFile {
    /// As the program sees it.
    handle: File,
    /// As it is on disk.
    synced: Vec<u8>,
    /// A sync failed: the system has forgotten that it is to be written.
    is_forgotten: bool,
}

impl OneFile {
    fn now(&self) -> Vec<u8> {
        let length = self.handle.metadata().expect("open").len() as usize;
        let mut bytes = vec![0; length];
        self.handle.read_exact_at(&mut bytes, 0).expect("readable");
        bytes
    }

    fn sync(&mut self) {
        if !self.is_forgotten {
            self.synced = self.now();
        }
    }

    /// What may be there once the power is back.
    fn survives(&self, dice: &mut Dice) -> Vec<u8> {
        let now = self.now();
        let common = now.iter().zip(&self.synced).take_while(|(a, b)| a == b).count();
        let unsynced = now.len().max(self.synced.len()) - common;
        if unsynced == 0 || self.is_forgotten || dice.coin() {
            return self.synced.clone();
        }
        let kept = common + dice.below(unsynced as u64 + 1) as usize;
        let mut bytes = now[..kept.min(now.len())].to_vec();
        match dice.below(3) {
            // The length came to disk before the bytes did.
            0 => bytes.resize(now.len().max(bytes.len()), 0),
            1 => bytes.extend_from_slice(self.synced.get(bytes.len()..).unwrap_or_default()),
            _ => {}
        }
        bytes
    }
}

struct State {
    operations: u64,
    /// The power goes in the place of this operation.
    cut_at: Option<u64>,
    /// The process is killed in the place of this operation.
    kill_at: Option<u64>,
    /// The process that lives.
    process: u32,
    /// From this operation on, so many fail.
    fault: Option<(u64, u64, Fault)>,
    /// Bytes that may still be written.
    room: u64,
    files: Vec<OneFile>,
    /// Names as the program sees them, and as they are on disk; a folder has no file.
    names: BTreeMap<PathBuf, Option<FileId>>,
    on_disk: BTreeMap<PathBuf, Option<FileId>>,
    changes: Vec<Change>,
    done: Vec<Did>,
}

/// The machine, as one process has it. Clones are the same process.
#[derive(Clone)]
pub(in crate::capture) struct Machine {
    state: Arc<Mutex<State>>,
    /// Whether syncs wait.
    hangs: Arc<(Mutex<bool>, Condvar)>,
    process: u32,
}

impl Machine {
    /// One whose disk holds what is in `root`, all of it synced. What lies outside is not the machine's.
    pub(in crate::capture) fn new(root: &Path) -> Self {
        let mut state = State {
            operations: 0,
            cut_at: None,
            kill_at: None,
            process: 0,
            fault: None,
            room: u64::MAX,
            files: vec![],
            names: BTreeMap::from([(root.to_owned(), None)]),
            on_disk: BTreeMap::new(),
            changes: vec![],
            done: vec![],
        };
        let mut folders = vec![root.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    state.names.insert(path.clone(), None);
                    folders.push(path);
                    continue;
                }
                let handle = File::open(&path).expect("a file");
                let file = OneFile { handle, synced: vec![], is_forgotten: false };
                let file = OneFile { synced: file.now(), ..file };
                state.names.insert(path, Some(state.files.len()));
                state.files.push(file);
            }
        }
        state.on_disk = state.names.clone();
        Self { state: Arc::new(Mutex::new(state)), hangs: Arc::default(), process: 0 }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no operation panics")
    }

    /// The power goes at the `count`-th operation from now on.
    pub(in crate::capture) fn cut_after(&self, count: u64) {
        let mut state = self.state();
        state.cut_at = Some(state.operations + count);
    }

    /// The process is killed at the `count`-th operation from now on.
    pub(in crate::capture) fn kill_after(&self, count: u64) {
        let mut state = self.state();
        state.kill_at = Some(state.operations + count);
    }

    /// Kills the process now, and gives the next one. What was written stays, synced or not.
    pub(in crate::capture) fn restarted(&self) -> Self {
        let mut state = self.state();
        state.process += 1;
        state.kill_at = None;
        Self { state: Arc::clone(&self.state), hangs: Arc::clone(&self.hangs), process: state.process }
    }

    /// The `count`-th operation from now on fails, and `more` after it.
    pub(in crate::capture) fn fail_after(&self, count: u64, more: u64, fault: Fault) {
        let mut state = self.state();
        state.fault = Some((state.operations + count, more, fault));
    }

    /// Syncs wait from now on, or no longer.
    pub(in crate::capture) fn hangs(&self, hangs: bool) {
        *self.hangs.0.lock().expect("no operation panics") = hangs;
        self.hangs.1.notify_all();
    }

    /// So many bytes may still be written.
    pub(in crate::capture) fn has_room(&self, bytes: u64) {
        self.state().room = bytes;
    }

    /// What was done so far, in order.
    pub(in crate::capture) fn done(&self) -> Vec<Did> {
        self.state().done.clone()
    }

    pub(in crate::capture) fn operations(&self) -> u64 {
        self.state().operations
    }

    /// The process is dead, or the power is off.
    pub(in crate::capture) fn is_over(&self) -> bool {
        let state = self.state();
        state.is_off() || state.process != self.process
    }

    /// Takes the power away now, and writes what is left of `root` to the new folder `to`.
    pub(in crate::capture) fn wreck(&self, dice: &mut Dice, root: &Path, to: &Path) {
        let mut state = self.state();
        state.cut_at = Some(0);
        let changes = std::mem::take(&mut state.changes);
        // A file system with a journal keeps the first ones; others may keep any.
        let first = dice.below(changes.len() as u64 + 1) as usize;
        let is_in_order = dice.coin();
        for (number, change) in changes.into_iter().enumerate() {
            if if is_in_order { number < first } else { dice.coin() } {
                state.reach(change);
            }
        }
        fs::create_dir_all(to).expect("a folder");
        for (path, file) in &state.on_disk {
            let Ok(path) = path.strip_prefix(root) else { continue };
            // What lies in a folder that is not there is gone as well.
            if !to.join(path.parent().unwrap_or(Path::new(""))).is_dir() || path.as_os_str().is_empty() {
                continue;
            }
            match file {
                None => fs::create_dir(to.join(path)).expect("a folder"),
                Some(file) => {
                    let bytes = state.files[*file].survives(dice);
                    fs::write(to.join(path), bytes).expect("written");
                }
            }
        }
    }
}

impl Machine {
    /// Counts an operation, which fails if it is its turn. `None`: whoever asks is dead.
    fn enter(&self) -> (MutexGuard<'_, State>, Result<(), Option<Fault>>) {
        let mut state = self.state();
        let number = state.operations;
        if state.process == self.process && state.kill_at.is_some_and(|at| number >= at) {
            state.process += 1;
        }
        if state.process != self.process || state.is_off() {
            return (state, Err(None));
        }
        state.operations += 1;
        let begun = match state.fault {
            Some((from, more, fault)) if number >= from && number <= from.saturating_add(more) => {
                Err(Some(fault))
            }
            _ => Ok(()),
        };
        (state, begun)
    }

    /// The same for what does not write.
    fn enter_bare(&self) -> io::Result<MutexGuard<'_, State>> {
        let (state, begun) = self.enter();
        begun.map_err(|fault| fault.map_or_else(off, Fault::error))?;
        Ok(state)
    }

    /// The same for what needs no space.
    fn enter_freeing(&self) -> io::Result<MutexGuard<'_, State>> {
        let (state, begun) = self.enter();
        match begun {
            Err(None) => Err(off()),
            Err(Some(Fault::Device)) => Err(Fault::Device.error()),
            Ok(()) | Err(Some(Fault::Full | Fault::Short)) => Ok(state),
        }
    }
}

impl State {
    fn is_off(&self) -> bool {
        self.cut_at.is_some_and(|at| self.operations >= at)
    }

    /// A change is on disk now.
    fn reach(&mut self, change: Change) {
        match change {
            Change::Made { path, file } => drop(self.on_disk.insert(path, Some(file))),
            Change::MadeFolder { path } => drop(self.on_disk.insert(path, None)),
            Change::Renamed { from, to, file } => {
                self.leave(&from, file);
                self.on_disk.insert(to, Some(file));
            }
            Change::Removed { path, file } => self.leave(&path, file),
        }
    }

    fn leave(&mut self, path: &Path, file: FileId) {
        if self.on_disk.get(path) == Some(&Some(file)) {
            self.on_disk.remove(path);
        }
    }

    fn file(&self, path: &Path) -> io::Result<FileId> {
        self.names.get(path).copied().flatten().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

fn off() -> io::Error {
    io::Error::other("dead")
}

impl Storage for Machine {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Disk>> {
        let mut state = self.enter_bare()?;
        if let Some(Some(file)) = state.names.get(path).copied() {
            fs::remove_file(path)?;
            state.changes.push(Change::Removed { path: path.to_owned(), file });
        }
        let handle = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        let file = state.files.len();
        let ours = handle.try_clone()?;
        state.files.push(OneFile { handle: ours, synced: vec![], is_forgotten: false });
        state.names.insert(path.to_owned(), Some(file));
        state.changes.push(Change::Made { path: path.to_owned(), file });
        state.done.push(Did::Made(path.to_owned()));
        Ok(Box::new(MachineDisk { machine: self.clone(), path: path.to_owned(), handle, file }))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.enter_bare()?;
        fs::create_dir(path)?;
        state.names.insert(path.to_owned(), None);
        state.changes.push(Change::MadeFolder { path: path.to_owned() });
        state.done.push(Did::MadeFolder(path.to_owned()));
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.enter_bare()?;
        let file = state.file(from)?;
        fs::rename(from, to)?;
        state.names.remove(from);
        state.names.insert(to.to_owned(), Some(file));
        state.changes.push(Change::Renamed { from: from.to_owned(), to: to.to_owned(), file });
        state.done.push(Did::Renamed(from.to_owned()));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.enter_freeing()?;
        let file = state.file(path)?;
        fs::remove_file(path)?;
        state.names.remove(path);
        state.changes.push(Change::Removed { path: path.to_owned(), file });
        state.done.push(Did::Removed(path.to_owned()));
        Ok(())
    }

    fn cut(&self, path: &Path, length: u64) -> io::Result<()> {
        let mut state = self.enter_freeing()?;
        let file = state.file(path)?;
        OpenOptions::new().write(true).open(path)?.set_len(length)?;
        state.files[file].sync();
        state.done.push(Did::Cut(path.to_owned()));
        Ok(())
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        let mut state = self.enter_bare()?;
        state.done.push(Did::SyncedFolder(folder.to_owned()));
        let changes = std::mem::take(&mut state.changes);
        let is_synced: Vec<bool> = changes.iter().map(|change| change.is_in(folder)).collect();
        for (number, change) in changes.iter().enumerate() {
            // What became of a file before comes with it.
            let is_before = |(later, is_synced): (&Change, &bool)| {
                *is_synced && later.file().is_some() && later.file() == change.file()
            };
            let comes_along = changes.iter().zip(&is_synced).skip(number).any(is_before);
            if is_synced[number] || comes_along {
                state.reach(change.clone());
            } else {
                state.changes.push(change.clone());
            }
        }
        Ok(())
    }
}

struct MachineDisk {
    machine: Machine,
    /// Its first name.
    path: PathBuf,
    handle: File,
    file: FileId,
}

impl Disk for MachineDisk {
    fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let (mut state, begun) = self.machine.enter();
        let length = self.handle.metadata()?.len();
        let (fits, failed) = match begun {
            Ok(()) => (bytes.len(), None),
            Err(None) => return Err(off()),
            Err(Some(fault)) => (if fault == Fault::Short { bytes.len() / 2 } else { 0 }, Some(fault)),
        };
        // As a full disk does: what fits is written, then the error comes.
        let overwritten = length.saturating_sub(at).min(fits as u64);
        let fits = fits.min((state.room.saturating_add(overwritten)).min(usize::MAX as u64) as usize);
        self.handle.write_all_at(&bytes[..fits], at)?;
        state.room -= (fits as u64).saturating_sub(overwritten).min(state.room);
        match failed {
            Some(fault) => Err(fault.error()),
            None if fits < bytes.len() => Err(Fault::Full.error()),
            None => {
                state.done.push(Did::Written(self.path.clone()));
                Ok(())
            }
        }
    }

    fn sync(&mut self) -> io::Result<()> {
        let (hangs, changed) = &*self.machine.hangs;
        let hangs = hangs.lock().expect("no operation panics");
        drop(changed.wait_while(hangs, |hangs| *hangs).expect("no operation panics"));
        let (mut state, begun) = self.machine.enter();
        let file = &mut state.files[self.file];
        match begun {
            Ok(()) => {
                file.sync();
                state.done.push(Did::Synced(self.path.clone()));
                Ok(())
            }
            Err(None) => Err(off()),
            Err(Some(fault)) => {
                file.is_forgotten = true;
                Err(fault.error())
            }
        }
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        let mut state = self.machine.enter_freeing()?;
        let before = self.handle.metadata()?.len();
        state.room = state.room.saturating_add(before.saturating_sub(length));
        self.handle.set_len(length)
    }
}
