//! The run folder: where everything of one run lies, and the lock that keeps it to one process.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::RunError;

/// `runs/<name>/`, held by this process.
#[derive(Debug)]
pub struct RunFolder {
    root: PathBuf,
    incarnation: u32,
    /// Held for the life of the process; the kernel releases it on any death.
    _lock: File,
}

/// `run.json`: how often the run was started. Each start has session ids of its own.
#[derive(Serialize, Deserialize)]
struct RunState {
    incarnation: u32,
}

impl RunFolder {
    /// Makes a new run folder.
    ///
    /// # Errors
    /// [`RunError::FolderExists`] if `root` already holds a run.
    pub fn create(root: &Path) -> Result<Self, RunError> {
        if root.join("run.json").exists() {
            return Err(RunError::FolderExists(root.to_owned()));
        }
        Self::open(root, 0)
    }

    /// Opens the folder of a run that was stopped or killed, to go on with it.
    ///
    /// # Errors
    /// [`RunError::NothingToResume`] if `root` holds no run.
    pub fn resume(root: &Path) -> Result<Self, RunError> {
        let path = root.join("run.json");
        let text = fs::read_to_string(&path).map_err(|_| RunError::NothingToResume(root.to_owned()))?;
        let state: RunState = serde_json::from_str(&text)
            .map_err(|error| RunError::Broken { path, cause: error.to_string() })?;
        Self::open(root, state.incarnation + 1)
    }

    fn open(root: &Path, incarnation: u32) -> Result<Self, RunError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| RunError::Io { path, source }
        };
        fs::create_dir_all(root).map_err(io(root))?;
        let root = root.canonicalize().map_err(io(root))?;
        let lock_path = root.join("run.lock");
        let lock = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&lock_path)
            .map_err(io(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let owner = fs::read_to_string(&lock_path).unwrap_or_default();
                return Err(RunError::InUse { root, pid: owner.trim().to_owned() });
            }
            Err(TryLockError::Error(source)) => return Err(RunError::Io { path: lock_path, source }),
        }
        lock.set_len(0).map_err(io(&lock_path))?;
        (&lock).write_all(std::process::id().to_string().as_bytes()).map_err(io(&lock_path))?;
        let folder = Self { root, incarnation, _lock: lock };
        // Workspaces of a killed run are of no use to its next start.
        folder.clear_scratch()?;
        for dir in [folder.trials(), folder.checkpoints(), folder.reports(), folder.scratch()] {
            fs::create_dir_all(&dir).map_err(io(&dir))?;
        }
        write_json(&folder.root.join("run.json"), &RunState { incarnation })?;
        Ok(folder)
    }

    /// The newest run under `runs`, by the name's order (names start with the date).
    ///
    /// # Errors
    /// [`RunError::NothingToResume`] if there is none.
    pub fn newest(runs: &Path) -> Result<PathBuf, RunError> {
        fs::read_dir(runs)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.join("run.json").exists())
            .max()
            .ok_or_else(|| RunError::NothingToResume(runs.to_owned()))
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// 0 for the first start, one more for each resume.
    pub fn incarnation(&self) -> u32 {
        self.incarnation
    }

    /// The config that the run was started with.
    pub fn resolved_config(&self) -> PathBuf {
        self.root.join("config.resolved.toml")
    }

    pub fn captures(&self) -> PathBuf {
        self.root.join("captures")
    }

    pub fn trials(&self) -> PathBuf {
        self.root.join("trials")
    }

    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    pub fn reports(&self) -> PathBuf {
        self.root.join("reports")
    }

    /// Workspaces of running trials and the task cache; there only while the run goes on.
    pub fn scratch(&self) -> PathBuf {
        self.root.join("scratch")
    }

    /// Removes the scratch folder.
    ///
    /// # Errors
    /// [`RunError::Io`] names it.
    pub fn clear_scratch(&self) -> Result<(), RunError> {
        let path = self.scratch();
        match fs::remove_dir_all(&path) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                Err(RunError::Io { path, source })
            }
            _ => Ok(()),
        }
    }
}

/// Writes `value` to a temporary file beside `path`, syncs it and renames it there.
///
/// # Errors
/// [`RunError::Io`] names the path.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), RunError> {
    let io = |source| RunError::Io { path: path.to_owned(), source };
    let mut text = serde_json::to_vec_pretty(value)
        .map_err(|error| RunError::Broken { path: path.to_owned(), cause: error.to_string() })?;
    text.push(b'\n');
    let temporary = path.with_extension("tmp");
    let mut file = File::create(&temporary).map_err(io)?;
    file.write_all(&text).and_then(|()| file.sync_all()).map_err(io)?;
    fs::rename(&temporary, path).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_never_overwritten_and_never_shared() {
        let temp = tempfile::tempdir().expect("temp");
        let root = temp.path().join("r1");
        let first = RunFolder::create(&root).expect("new");
        assert!(matches!(RunFolder::create(&root), Err(RunError::FolderExists(_))));
        let in_use = RunFolder::resume(&root).expect_err("locked");
        assert!(in_use.to_string().contains(&std::process::id().to_string()), "{in_use}");
        fs::write(first.scratch().join("left"), "x").expect("write");
        drop(first);
        let second = RunFolder::resume(&root).expect("resume");
        assert_eq!(second.incarnation(), 1);
        assert!(!second.scratch().join("left").exists());
    }

    #[test]
    fn resume_names_what_is_missing() {
        let temp = tempfile::tempdir().expect("temp");
        let error = RunFolder::resume(temp.path()).expect_err("no run");
        assert!(error.to_string().contains("no run to resume"), "{error}");
    }
}
