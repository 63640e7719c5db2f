//! One writer a folder. The operating system holds the lock for the open file, so that of a dead process is
//! free at once; the file's text says who has it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;

use super::error::CaptureError;

/// Held while a writer is open; dropping it frees the folder.
pub(super) struct Lock(#[expect(dead_code, reason = "closing the file frees the lock")] File);

impl Lock {
    /// Takes the lock of `dir`, also from a process that died with it.
    pub(super) fn take(dir: &Path) -> Result<Self, CaptureError> {
        let path = dir.join("LOCK");
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(CaptureError::io("open", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                file.read_to_string(&mut pid).map_err(CaptureError::io("read", &path))?;
                return Err(CaptureError::Locked { dir: dir.to_owned(), pid: pid.trim().to_owned() });
            }
            Err(TryLockError::Error(error)) => return Err(CaptureError::io("lock", &path)(error)),
        }
        let write_pid = |file: &mut File| {
            file.set_len(0)?;
            file.rewind()?;
            writeln!(file, "{}", std::process::id())
        };
        write_pid(&mut file).map_err(CaptureError::io("write", &path))?;
        Ok(Self(file))
    }
}
