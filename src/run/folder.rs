//! The run folder: where everything of one run lies, and the lock that keeps it to one process.

use std::fs::{self, File, Permissions, TryLockError};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::RunError;
use crate::config::Config;
use crate::sandbox::remove_tree;

/// How often the scratch folder is tried again while somebody still writes into it: at a start, five seconds in all.
const WRITERS_BEFORE: usize = 250;
/// At the end one second: the next start tries again.
const WRITERS_AFTER: usize = 50;

/// `runs/<name>/`, held by this process.
#[derive(Debug)]
pub struct RunFolder {
    root: PathBuf,
    state: RunState,
    /// Wall time of all earlier starts, seconds.
    earlier_seconds: f64,
    /// Held for the life of the process; the kernel releases it on any death.
    _lock: File,
}

/// `run.json`: how often the run was started, and for how long. Each start has session ids of its own.
#[derive(Debug, Serialize, Deserialize)]
struct RunState {
    incarnation: u32,
    #[serde(default)]
    kind: RunKind,
    /// It was begun with `inputs.json`.
    #[serde(default)]
    has_inputs: bool,
    /// Wall time of all starts so far.
    #[serde(default)]
    wall_seconds: f64,
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

impl RunState {
    fn read(root: &Path) -> Result<Self, RunError> {
        let path = root.join("run.json");
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|error| RunError::Broken { path, cause: error.to_string() }),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(RunError::NothingToResume(root.to_owned()))
            }
            Err(source) => Err(RunError::Io { path, source }),
        }
    }
}

impl RunFolder {
    /// Makes a new run folder. It holds a run from [`RunFolder::begin`] on: a start that fails or is killed before can
    /// be repeated.
    ///
    /// # Errors
    /// [`RunError::FolderExists`] if `root` already holds a run.
    pub fn create(root: &Path, kind: RunKind) -> Result<Self, RunError> {
        // A new run would take another's checkpoints for its own.
        let entries = fs::read_dir(root.join("checkpoints")).into_iter().flatten().flatten();
        let mut names = entries.map(|entry| entry.file_name());
        let has_checkpoints = names.any(|name| name.to_string_lossy().starts_with("step_"));
        if root.join("run.json").exists() {
            return Err(RunError::FolderExists(root.to_owned()));
        }
        if has_checkpoints {
            return Err(RunError::StrayCheckpoints(root.to_owned()));
        }
        Self::open(
            root,
            RunState { incarnation: 0, kind, has_inputs: kind == RunKind::Train, wall_seconds: 0.0 },
        )
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
        let state = RunState::read(root)?;
        if state.kind == RunKind::Eval {
            return Err(RunError::NotATraining(root.to_owned()));
        }
        let folder = Self::open(root, RunState { incarnation: state.incarnation + 1, ..state })?;
        folder.write_state()?;
        Ok(folder)
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
        let folder = Self { root, earlier_seconds: state.wall_seconds, state, _lock: lock };
        // Workspaces of a killed run are of no use to its next start.
        folder.clear_scratch(WRITERS_BEFORE)?;
        for dir in [folder.trials(), folder.checkpoints(), folder.reports(), folder.scratch()] {
            fs::create_dir_all(&dir).map_err(io(&dir))?;
        }
        // What an agent leaves there, a program that runs as its owner among it, is for no other user to reach.
        fs::set_permissions(folder.scratch(), Permissions::from_mode(0o700))
            .map_err(io(&folder.scratch()))?;
        Ok(folder)
    }

    /// The new run has all that it needs.
    ///
    /// # Errors
    /// [`RunError::Io`].
    pub fn begin(&self) -> Result<(), RunError> {
        self.write_state()
    }

    fn write_state(&self) -> Result<(), RunError> {
        write_json(&self.root.join("run.json"), &self.state)
    }

    /// The training run under `runs` that was started last.
    ///
    /// # Errors
    /// [`RunError::NothingToResume`] if there is none.
    pub fn newest(runs: &Path) -> Result<PathBuf, RunError> {
        let entries = fs::read_dir(runs).into_iter().flatten().flatten();
        // One whose run.json cannot be read is said to be so when it is opened.
        let is_training = |path: &Path| match RunState::read(path) {
            Ok(state) => state.kind == RunKind::Train,
            Err(error) => !matches!(error, RunError::NothingToResume(_)),
        };
        let started = |path: &Path| path.join("run.lock").metadata().and_then(|lock| lock.modified()).ok();
        entries
            .map(|entry| entry.path())
            .filter(|path| path.is_dir() && is_training(path))
            // Names that lego gives sort by time.
            .max_by_key(|path| (started(path), path.clone()))
            .ok_or_else(|| RunError::NothingToResume(runs.to_owned()))
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// 0 for the first start, one more for each resume.
    pub fn incarnation(&self) -> u32 {
        self.state.incarnation
    }

    /// False for a run that was begun by a version of lego that kept no `inputs.json`.
    pub fn has_inputs(&self) -> bool {
        self.state.has_inputs
    }

    /// Wall time of all starts, seconds, if this one has run for so many. Kept for the next start.
    ///
    /// # Errors
    /// [`RunError::Io`].
    pub fn keep_wall(&mut self, seconds: f64) -> Result<f64, RunError> {
        self.state.wall_seconds = self.earlier_seconds + seconds;
        self.write_state()?;
        Ok(self.state.wall_seconds)
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
        write_whole(&path, config.to_resolved_toml().as_bytes())
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
    fn clear_scratch(&self, tries: usize) -> Result<(), RunError> {
        let path = self.scratch();
        for _ in 0..tries {
            match remove_tree(&path) {
                Ok(()) => return Ok(()),
                // Trials that were stopped may still unpack a repository on a thread of their own.
                Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(source) => return Err(RunError::Io { path, source }),
            }
        }
        let source = std::io::Error::from(ErrorKind::DirectoryNotEmpty);
        Err(RunError::Io { path, source })
    }

    /// Ends a run: removes the scratch folder. What is left of it changes nothing of a result: the next start removes
    /// it.
    pub fn leave_scratch<T>(&self, result: Result<T, RunError>) -> Result<T, RunError> {
        if let Err(error) = self.clear_scratch(WRITERS_AFTER) {
            tracing::warn!("workspaces are left: {error}");
        }
        result
    }
}

/// Writes `value` as JSON, as [`write_whole`].
///
/// # Errors
/// [`RunError::Io`] names the path.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), RunError> {
    let mut text = serde_json::to_vec_pretty(value)
        .map_err(|error| RunError::Broken { path: path.to_owned(), cause: error.to_string() })?;
    text.push(b'\n');
    write_whole(path, &text)
}

/// Writes a temporary file beside `path`, syncs it and renames it there.
fn write_whole(path: &Path, text: &[u8]) -> Result<(), RunError> {
    let io = |source| RunError::Io { path: path.to_owned(), source };
    let temporary = path.with_extension("tmp");
    let mut file = File::create(&temporary).map_err(io)?;
    file.write_all(text).and_then(|()| file.sync_all()).map_err(io)?;
    fs::rename(&temporary, path).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(root: &Path, kind: RunKind) -> RunFolder {
        let folder = RunFolder::create(root, kind).expect("new");
        folder.begin().expect("written");
        folder
    }

    #[test]
    fn a_run_is_never_overwritten_and_never_shared() {
        let temp = tempfile::tempdir().expect("temp");
        let root = temp.path().join("r1");
        let first = begun(&root, RunKind::Train);
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
        let folder = begun(&temp.path().join("eval-1"), RunKind::Eval);
        let root = folder.root().to_owned();
        drop(folder);
        assert!(matches!(RunFolder::newest(temp.path()), Err(RunError::NothingToResume(_))));
        assert!(matches!(RunFolder::resume(&root), Err(RunError::NotATraining(_))));
    }

    #[test]
    fn the_newest_training_is_the_one_started_last_whatever_its_name() {
        let temp = tempfile::tempdir().expect("temp");
        let started = |name: &str, kind, seconds: u64| {
            let folder = begun(&temp.path().join(name), kind);
            let at = std::time::UNIX_EPOCH + Duration::from_secs(seconds);
            let lock = File::options().write(true).open(folder.root().join("run.lock")).expect("lock");
            lock.set_modified(at).expect("time");
        };
        started("train-a", RunKind::Train, 10);
        started("eval-of-the-loss", RunKind::Train, 20);
        started("zzz", RunKind::Eval, 30);
        fs::write(temp.path().join("zzz-notes.txt"), "no run").expect("written");
        let newest = RunFolder::newest(temp.path()).expect("one");
        assert_eq!(newest.file_name().expect("name"), "eval-of-the-loss");
    }

    #[test]
    fn the_folder_of_a_run_that_did_not_begin_can_be_used_again() {
        let temp = tempfile::tempdir().expect("temp");
        drop(RunFolder::create(temp.path(), RunKind::Train).expect("new"));
        assert!(matches!(RunFolder::resume(temp.path()), Err(RunError::NothingToResume(_))));
        let folder = RunFolder::create(temp.path(), RunKind::Train).expect("as if it were new");
        folder.begin().expect("written");
        drop(folder);
        assert!(matches!(RunFolder::create(temp.path(), RunKind::Train), Err(RunError::FolderExists(_))));
    }

    #[test]
    fn wall_time_is_of_all_starts() {
        let temp = tempfile::tempdir().expect("temp");
        let mut folder = begun(temp.path(), RunKind::Train);
        assert_eq!(folder.keep_wall(2.0).expect("written"), 2.0);
        assert_eq!(folder.keep_wall(3.0).expect("written"), 3.0);
        drop(folder);
        let mut folder = RunFolder::resume(temp.path()).expect("resumed");
        assert_eq!(folder.keep_wall(1.5).expect("written"), 4.5);
    }

    #[test]
    fn anothers_checkpoints_are_never_taken_for_a_new_runs_own() {
        let temp = tempfile::tempdir().expect("temp");
        fs::create_dir_all(temp.path().join("checkpoints/step_3")).expect("folders");
        let refused = RunFolder::create(temp.path(), RunKind::Train);
        assert!(matches!(refused, Err(RunError::StrayCheckpoints(_))));
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
            let first = begun(&root, RunKind::Train);
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
