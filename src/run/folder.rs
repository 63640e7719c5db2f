//! The run folder: where everything of one run lies, and the lock that keeps it to one process.

use std::fs::{self, File, Permissions, TryLockError};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::RunError;
use crate::config::Config;
use crate::sandbox::remove_tree;

/// How often the scratch folder is tried again while somebody still writes into it: five seconds in all.
const LAST_WRITERS: usize = 250;

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
    #[serde(default)]
    kind: RunKind,
}

/// What a run folder is of; its name begins with it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunKind {
    #[default]
    Train,
    /// `lego eval`: it is not resumed.
    Eval,
}

impl RunKind {
    const fn prefix(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Eval => "eval",
        }
    }
}

impl RunFolder {
    /// Makes a new run folder.
    ///
    /// # Errors
    /// [`RunError::FolderExists`] if `root` already holds a run.
    pub fn create(root: &Path, kind: RunKind) -> Result<Self, RunError> {
        if root.join("run.json").exists() {
            return Err(RunError::FolderExists(root.to_owned()));
        }
        Self::open(root, RunState { incarnation: 0, kind })
    }

    /// Makes a new run folder under `runs`, with a name of its own.
    ///
    /// # Errors
    /// [`RunError::Io`].
    pub fn create_in(runs: &Path, kind: RunKind) -> Result<Self, RunError> {
        // Names sort by time: UUIDv7's text begins with it.
        Self::create(&runs.join(format!("{}-{}", kind.prefix(), uuid::Uuid::now_v7().simple())), kind)
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
        if state.kind == RunKind::Eval {
            return Err(RunError::NotATraining(root.to_owned()));
        }
        Self::open(root, RunState { incarnation: state.incarnation + 1, ..state })
    }

    fn open(root: &Path, state: RunState) -> Result<Self, RunError> {
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
        let folder = Self { root, incarnation: state.incarnation, _lock: lock };
        // Workspaces of a killed run are of no use to its next start.
        folder.clear_scratch()?;
        for dir in [folder.trials(), folder.checkpoints(), folder.reports(), folder.scratch()] {
            fs::create_dir_all(&dir).map_err(io(&dir))?;
        }
        // What an agent leaves there, a program that runs as its owner among it, is for no other user to reach.
        fs::set_permissions(folder.scratch(), Permissions::from_mode(0o700))
            .map_err(io(&folder.scratch()))?;
        write_json(&folder.root.join("run.json"), &state)?;
        Ok(folder)
    }

    /// The newest training run under `runs`, by the name's order.
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
            .filter(|path| {
                let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
                !name.is_some_and(|name| name.starts_with(RunKind::Eval.prefix()))
            })
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

    /// Keeps the config that the run was started with.
    ///
    /// # Errors
    /// [`RunError::Io`] names the file.
    pub fn keep_config(&self, config: &Config) -> Result<(), RunError> {
        let path = self.resolved_config();
        fs::write(&path, config.to_resolved_toml()).map_err(|source| RunError::Io { path, source })
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
    fn clear_scratch(&self) -> Result<(), RunError> {
        let path = self.scratch();
        for _ in 0..LAST_WRITERS {
            match remove_tree(&path) {
                Ok(()) => return Ok(()),
                // Trials that were stopped may still unpack a repository on a thread of their own.
                Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(source) => return Err(RunError::Io { path, source }),
            }
        }
        let source = std::io::Error::from(std::io::ErrorKind::DirectoryNotEmpty);
        Err(RunError::Io { path, source })
    }

    /// Ends a run: removes the scratch folder. What is left of it changes nothing of a result: the next start removes
    /// it.
    pub fn leave_scratch<T>(&self, result: Result<T, RunError>) -> Result<T, RunError> {
        if let Err(error) = self.clear_scratch() {
            tracing::warn!("workspaces are left: {error}");
        }
        result
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
        let first = RunFolder::create(&root, RunKind::Train).expect("new");
        assert!(matches!(RunFolder::create(&root, RunKind::Train), Err(RunError::FolderExists(_))));
        let in_use = RunFolder::resume(&root).expect_err("locked");
        assert!(in_use.to_string().contains(&std::process::id().to_string()), "{in_use}");
        fs::write(first.scratch().join("left"), "x").expect("write");
        let mode = |folder: &RunFolder| folder.scratch().metadata().expect("scratch").permissions().mode();
        assert_eq!(mode(&first) & 0o777, 0o700, "nobody else reaches what an agent left");
        drop(first);
        let second = RunFolder::resume(&root).expect("resume");
        assert_eq!(second.incarnation(), 1);
        assert!(!second.scratch().join("left").exists());
        assert_eq!(mode(&second) & 0o777, 0o700);
    }

    #[test]
    fn an_evaluation_is_not_taken_for_a_training_run() {
        let temp = tempfile::tempdir().expect("temp");
        let folder = RunFolder::create_in(temp.path(), RunKind::Eval).expect("new");
        let root = folder.root().to_owned();
        drop(folder);
        assert!(matches!(RunFolder::newest(temp.path()), Err(RunError::NothingToResume(_))));
        assert!(matches!(RunFolder::resume(&root), Err(RunError::NotATraining(_))));
    }

    #[test]
    fn resume_names_what_is_missing() {
        let temp = tempfile::tempdir().expect("temp");
        let error = RunFolder::resume(temp.path()).expect_err("no run");
        assert!(error.to_string().contains("no run to resume"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_a_trial_locked_keeps_no_run_from_going_on() {
        use std::os::unix::fs::PermissionsExt;

        crate::sandbox::as_ordinary_user(|folder| {
            let root = folder.join("r1");
            let first = RunFolder::create(&root, RunKind::Train).expect("new");
            let locked = first.scratch().join("t.1/workspace/d");
            fs::create_dir_all(&locked).expect("folders");
            fs::write(locked.join("f"), "x").expect("file");
            fs::set_permissions(&locked, fs::Permissions::from_mode(0o0)).expect("mode");
            drop(first);
            let second = RunFolder::resume(&root).expect("resume");
            assert!(!second.scratch().join("t.1").exists());
        });
    }
}
