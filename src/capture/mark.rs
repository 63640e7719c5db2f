//! Who reads a day. A reader holds a shared lock on the day's folder from before it lists its files until it is past
//! them; whoever takes files away (`prune`, `compact`) holds it alone for that moment. The operating system keeps the
//! lock for the open folder, so that of a dead process is free at once.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;

use super::error::CaptureError;

/// Held while a day is read, or while files are taken from it; dropping it lets go.
#[derive(Debug)]
pub(super) struct Mark(#[expect(dead_code, reason = "closing the folder frees the lock")] File);

impl Mark {
    /// Marks a day as read. `None`: the folder is gone. Waits while files are taken from it.
    pub(super) fn share(folder: &Path) -> Result<Option<Self>, CaptureError> {
        loop {
            let file = match File::open(folder) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(CaptureError::io("open", folder)(error)),
            };
            // A file system without locks: nobody can take files away there either.
            let _ = file.lock_shared();
            match is_same(&file, folder) {
                Ok(true) => return Ok(Some(Self(file))),
                Ok(false) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(CaptureError::io("read", folder)(error)),
            }
        }
    }

    /// Takes a day for oneself. `None`: somebody reads it, or it is gone.
    pub(super) fn alone(folder: &Path) -> Result<Option<Self>, CaptureError> {
        let file = match File::open(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(CaptureError::io("open", folder))?,
        };
        match file.try_lock() {
            Ok(()) => Ok(Some(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(CaptureError::io("lock", folder)(error)),
        }
    }
}

/// Whether `folder` is still what was opened by this name.
#[cfg(unix)]
fn is_same(file: &File, folder: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt as _;
    let (opened, now) = (file.metadata()?, fs::metadata(folder)?);
    Ok((opened.dev(), opened.ino()) == (now.dev(), now.ino()))
}

#[cfg(not(unix))]
fn is_same(_: &File, folder: &Path) -> io::Result<bool> {
    fs::metadata(folder).map(|_| true)
}
