//! One writer a folder. The operating system holds the lock for the open file, so that of a dead process is
//! free at once; the file's text says who has it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::thread;
use std::time::Duration;

use super::error::CaptureError;

/// How often the lock is tried: whoever asks [`writer`] has it for a moment, and a child process that another thread
/// starts has what this process has just closed, until it runs its program.
const TRIES: usize = 100;
const PAUSE: Duration = Duration::from_millis(5);

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
        let mut locked = file.try_lock();
        for _ in 1..TRIES {
            if !matches!(locked, Err(TryLockError::WouldBlock)) {
                break;
            }
            thread::sleep(PAUSE);
            locked = file.try_lock();
        }
        match locked {
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

/// The process id of the writer that has `dir` now, if there is one.
pub(super) fn writer(dir: &Path) -> Result<Option<String>, CaptureError> {
    let path = dir.join("LOCK");
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(CaptureError::io("open", &path)(error)),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(None),
        Err(TryLockError::WouldBlock) => {
            let mut pid = String::new();
            file.read_to_string(&mut pid).map_err(CaptureError::io("read", &path))?;
            Ok(Some(pid.trim().to_owned()))
        }
        Err(TryLockError::Error(error)) => Err(CaptureError::io("lock", &path)(error)),
    }
}
