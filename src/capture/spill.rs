//! A file that takes what would fill memory: parts of replies whose calls have no record yet.
//!
//! It has no name, so the system deletes it with this process, whatever ends that; and it is made when it is first
//! needed.
//!
//! Invariants:
//! - A [`Slot`] reads what was written to it, or fails. Dropping it frees its place.
//! - The file is as long as the most that was in it at once, and goes when nothing is in it any more.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::sink_error;
use super::layout::journal_dir;
use crate::record::SinkError;

/// Longest part that a slot takes.
pub const SLOT_BYTES: usize = 8 << 10;

/// The file. Clones share it.
#[derive(Debug, Clone)]
pub struct Spill {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    places: Mutex<Places>,
}

#[derive(Debug, Default)]
struct Places {
    file: Option<Arc<File>>,
    free: Vec<u32>,
    /// Places that the file has.
    count: u32,
}

impl Spill {
    /// A file in this capture folder, which is made if need be.
    #[must_use]
    pub fn in_folder(dir: &Path) -> Self {
        Self { shared: Arc::new(Shared { dir: journal_dir(dir), places: Mutex::default() }) }
    }

    /// Writes `bytes` in parts of [`SLOT_BYTES`], all or none. Blocks while the file is written.
    ///
    /// # Errors
    /// The file cannot be made or written; [`SinkError::Full`] when there is no space for it.
    pub fn write(&self, bytes: &[u8]) -> Result<Vec<Slot>, SinkError> {
        let written: io::Result<_> = bytes.chunks(SLOT_BYTES).map(|part| self.write_part(part)).collect();
        written.map_err(|error| sink_error(&self.shared.dir, &error))
    }

    fn write_part(&self, part: &[u8]) -> io::Result<Slot> {
        let (file, place) = self.shared.take()?;
        let slot = Slot { shared: Arc::clone(&self.shared), place, len: part.len() as u32 };
        file.write_all_at(part, offset(place))?;
        Ok(slot)
    }

    /// Bytes of the file now.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        u64::from(self.shared.places().count) * SLOT_BYTES as u64
    }
}

impl Shared {
    /// No code panics while it holds the lock, so a poisoned one is still whole.
    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> io::Result<(Arc<File>, u32)> {
        let mut places = self.places();
        let file = match &places.file {
            Some(file) => Arc::clone(file),
            None => Arc::clone(places.file.insert(Arc::new(nameless(&self.dir)?))),
        };
        let place = match places.free.pop() {
            Some(place) => place,
            None => {
                let place = places.count;
                places.count = place.checked_add(1).ok_or(io::ErrorKind::FileTooLarge)?;
                place
            }
        };
        Ok((file, place))
    }

    fn give_back(&self, place: u32) {
        let mut places = self.places();
        places.free.push(place);
        if places.free.len() == places.count as usize {
            *places = Places::default();
        }
    }
}

fn offset(place: u32) -> u64 {
    u64::from(place) * SLOT_BYTES as u64
}

/// A file without a name, that nobody else may read.
pub(super) fn nameless(dir: &Path) -> io::Result<File> {
    fs::create_dir_all(dir)?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    match options.clone().custom_flags(libc::O_TMPFILE | libc::O_EXCL).open(dir) {
        // Some file systems over a network know no such files.
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL)) =>
        {
            unlinked(dir, &mut options)
        }
        made => made,
    }
}

/// The same where each file has a name first. A crash between the two steps leaves an empty one, which recovery deletes.
fn unlinked(dir: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let path = dir.join(format!("spill-{}.tmp", uuid::Uuid::new_v4().simple()));
    let file = options.create_new(true).open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

/// A part of the file with what was written to it.
#[derive(Debug)]
pub struct Slot {
    shared: Arc<Shared>,
    place: u32,
    len: u32,
}

impl Slot {
    /// Appends what was written to `out`. Blocks while the file is read.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self, out: &mut Vec<u8>) -> Result<(), SinkError> {
        let file = self.shared.places().file.clone();
        let start = out.len();
        out.resize(start + self.len as usize, 0);
        let read = match file {
            Some(file) => file.read_exact_at(&mut out[start..], offset(self.place)),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        read.map_err(|error| SinkError::Io {
            place: self.shared.dir.display().to_string(),
            reason: format!("the copy of a long reply cannot be read back: {error}"),
        })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.shared.give_back(self.place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_back_from_reused_places_and_nothing_stays() {
        let dir = tempfile::tempdir().expect("folder");
        let spill = Spill::in_folder(&dir.path().join("captures"));
        let text = |seed: usize, len: usize| (0..len).map(|i| (i * 31 + seed) as u8).collect::<Vec<u8>>();
        let mut kept = Vec::new();
        for seed in 0..20 {
            let wanted = text(seed, SLOT_BYTES * (seed % 3) + 100 * seed + 1);
            kept.push((spill.write(&wanted).expect("room"), wanted));
            if seed % 4 == 3 {
                kept.remove(seed % 3);
            }
            for (slots, wanted) in &kept {
                let mut read = Vec::new();
                slots.iter().for_each(|slot| slot.read(&mut read).expect("readable"));
                assert_eq!(&read, wanted);
            }
        }
        let places: usize = kept.iter().map(|(slots, _)| slots.len()).sum();
        let bytes = spill.file_bytes();
        assert!(
            bytes <= ((places + 6) * SLOT_BYTES) as u64,
            "{bytes} for {places} slots: none was used again"
        );
        assert_eq!(
            fs::read_dir(dir.path().join("captures/journal")).expect("folder").count(),
            0,
            "it has no name"
        );
        kept.clear();
        assert_eq!(spill.file_bytes(), 0);
        assert!(spill.shared.places().file.is_none());
    }

    #[test]
    fn without_nameless_files_it_loses_its_name_and_a_crash_before_leaves_nothing() {
        let dir = tempfile::tempdir().expect("folder");
        let journal = journal_dir(dir.path());
        fs::create_dir_all(&journal).expect("folder");
        let file = unlinked(&journal, OpenOptions::new().read(true).write(true)).expect("made");
        file.write_all_at(b"new", 0).expect("written");
        assert_eq!(fs::read_dir(&journal).expect("folder").count(), 0);
        fs::write(journal.join("spill-1.tmp"), b"").expect("written");
        let (found, sealed) =
            super::super::recovery::recover(&super::super::storage::Files::default(), dir.path())
                .expect("recovered");
        assert_eq!((found, sealed.len()), (super::super::recovery::Recovery::default(), 0));
        assert_eq!(fs::read_dir(&journal).expect("folder").count(), 0);
    }

    #[test]
    fn what_cannot_be_written_is_an_error_and_takes_no_place() {
        let dir = tempfile::tempdir().expect("folder");
        let file = dir.path().join("file");
        fs::write(&file, b"").expect("written");
        let spill = Spill::in_folder(&file);
        assert!(matches!(spill.write(b"x"), Err(SinkError::Io { .. })));
        assert_eq!(spill.file_bytes(), 0);

        let full = Spill::in_folder(dir.path());
        let device = OpenOptions::new().read(true).write(true).open("/dev/full").expect("Linux has it");
        full.shared.places().file = Some(Arc::new(device));
        assert!(matches!(full.write(&[7; 3 * SLOT_BYTES]), Err(SinkError::Full { .. })));
        assert_eq!(full.file_bytes(), 0);
        // Once there is space again.
        let slots = full.write(b"x").expect("a new file");
        let mut read = Vec::new();
        slots[0].read(&mut read).expect("readable");
        assert_eq!(read, b"x");
    }
}
