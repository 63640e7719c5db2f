//! The operations by which the store changes files, in one place: journal, drafts, recovery and compaction use no
//! others. They count the folder's bytes; tests put a machine in their place whose disk fails or whose power goes.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use super::layout;

/// A file that is being written.
pub(super) trait Disk: Send {
    /// Writes all of `bytes`, or fails having written a part of them.
    fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<()>;
    /// Returns when what was written would survive a power loss, if the file's name does.
    fn sync(&mut self) -> io::Result<()>;
    fn truncate(&mut self, length: u64) -> io::Result<()>;
}

/// What changes a folder.
pub(super) trait Storage: Send + Sync {
    /// Makes an empty file; one of that name is gone.
    fn create(&self, path: &Path) -> io::Result<Box<dyn Disk>>;
    /// Makes a folder whose parent exists.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Deletes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Cuts a file off, and returns when that and all that lies before would survive a power loss.
    fn cut(&self, path: &Path, length: u64) -> io::Result<()>;
    /// Returns when names that were made, changed or deleted in `folder` would be so after a power loss.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;
}

/// The files of this machine. Clones count together.
#[derive(Debug, Clone, Default)]
pub(super) struct Files {
    /// Bytes of the files, as far as they were changed through this.
    pub(super) bytes: Arc<AtomicI64>,
}

impl Files {
    fn grew(&self, from: u64, to: u64) {
        let [from, to] = [from, to].map(|length| i64::try_from(length).unwrap_or(i64::MAX));
        self.bytes.fetch_add(to - from, Ordering::Relaxed);
    }
}

impl Storage for Files {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Disk>> {
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
        Ok(Box::new(Counted { file, length: 0, files: self.clone() }))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let length = fs::symlink_metadata(path)?.len();
        fs::remove_file(path)?;
        self.grew(length, 0);
        Ok(())
    }

    fn cut(&self, path: &Path, length: u64) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(path)?;
        let before = file.metadata()?.len();
        file.set_len(length)?;
        self.grew(before, length);
        file.sync_all()
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        layout::sync_folder(folder)
    }
}

/// A file whose length counts.
struct Counted {
    file: File,
    length: u64,
    files: Files,
}

impl Counted {
    fn is_now(&mut self, length: u64) {
        self.files.grew(self.length, length);
        self.length = length;
    }
}

impl Disk for Counted {
    fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, at)?;
        self.is_now(self.length.max(at + bytes.len() as u64));
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.file.set_len(length)?;
        self.is_now(length);
        Ok(())
    }
}

/// Makes a folder, and those above it that are missing, so that they survive a power loss. One that is there may have
/// been made by a process that died before it could sync.
pub(super) fn make_folder(storage: &dyn Storage, folder: &Path) -> io::Result<()> {
    let above = match folder.parent() {
        Some(above) if above.as_os_str().is_empty() => Path::new("."),
        Some(above) => above,
        None => return Ok(()),
    };
    match storage.create_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make_folder(storage, above)?;
            storage.create_dir(folder)?;
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {}
        made => made?,
    }
    storage.sync_folder(above)
}

#[cfg(test)]
pub(super) mod machine;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_counts_as_the_files_lengths_do() {
        let dir = tempfile::tempdir().expect("folder");
        let files = Files::default();
        let bytes = || files.bytes.load(Ordering::Relaxed);
        let path = dir.path().join("a");
        let mut disk = files.create(&path).expect("made");
        for (at, len, sum) in [(0, 10, 10), (4, 3, 10), (4, 9, 13)] {
            disk.write_at(at, &vec![7; len]).expect("written");
            assert_eq!(bytes(), sum);
        }
        disk.truncate(5).expect("cut");
        assert_eq!(bytes(), 5);
        disk.write_at(5, b"more").expect("written");
        files.cut(&path, 2).expect("cut");
        assert_eq!(bytes(), 2);
        let to = dir.path().join("b");
        files.rename(&path, &to).expect("renamed");
        assert_eq!((bytes(), fs::read(&to).expect("read").len()), (2, 2));
        files.remove(&to).expect("removed");
        assert_eq!(bytes(), 0);
    }

    #[test]
    fn folders_are_made_from_above_and_may_be_there() {
        let dir = tempfile::tempdir().expect("folder");
        let folder = dir.path().join("a/b/c");
        for _ in 0..2 {
            make_folder(&Files::default(), &folder).expect("made");
            assert!(folder.is_dir());
        }
        fs::write(dir.path().join("file"), b"").expect("written");
        assert!(make_folder(&Files::default(), &dir.path().join("file")).is_err());
    }
}
