//! The verifier: a diff, a fresh sandbox, hidden tests, a verdict.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::git::{GitError, apply, check};
use super::store::{Cached, StoreError, absolute, copy_tree};
use super::verdict::{Verdict, grade, parse};
use super::{Task, TaskStore};
use crate::record::InfraFailure;
use crate::sandbox::{Backend, Exec, Exit, Limits, Mount, SandboxError, Spec, remove_tree};

const RUNNER: &str = include_str!("runner.py");
const RUNNER_INSIDE: &str = "/opt/lego/runner.py";
const WORKSPACE_INSIDE: &str = "/workspace";
const MAX_OUTPUT_BYTES: usize = 256 * 1024;
/// Tries of a verification whose machinery failed.
const TRIES: usize = 2;

/// How to verify.
#[derive(Debug, Clone)]
pub struct VerifierOptions {
    /// Where the hidden tests are inside the verifier's sandbox.
    pub hidden_test_mount: PathBuf,
    /// Host folder for the trees under test; made if absent, and emptied of each when it is graded.
    pub scratch: PathBuf,
    /// The reward of an unsolved task is the share of its tests that pass.
    pub partial_credit: bool,
    pub limits: Limits,
    /// Wall time of the tests.
    pub timeout: Duration,
}

impl VerifierOptions {
    /// The defaults, with trees under test in `scratch`.
    #[must_use]
    pub fn new(scratch: &Path) -> Self {
        Self {
            hidden_test_mount: "/opt/hidden_tests".into(),
            scratch: scratch.to_owned(),
            partial_credit: false,
            limits: Limits {
                memory_bytes: Some(512 << 20),
                max_processes: Some(32),
                tmp_bytes: Some(16 << 20),
                workspace_bytes: None,
                cpu_seconds: Some(5),
            },
            timeout: Duration::from_secs(30),
        }
    }
}

/// Grades diffs.
#[derive(Debug, Clone)]
pub struct Verifier {
    store: Arc<TaskStore>,
    options: Arc<VerifierOptions>,
}

/// A folder that is removed on drop.
#[derive(Debug)]
struct Scratch(PathBuf);

/// A tree under test.
#[derive(Debug)]
struct Staged {
    folder: Scratch,
    cached: Cached,
    hidden_files: Vec<PathBuf>,
    restored_paths: Vec<String>,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.0) {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// Why a diff did not come to the tests.
#[derive(Debug, thiserror::Error)]
enum StageError {
    #[error("the diff does not apply to base_commit: {0}")]
    Diff(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Git(GitError),
    #[error("cannot set up the tree under test: {0}")]
    Io(#[from] std::io::Error),
}

static NEXT_SCRATCH: AtomicU64 = AtomicU64::new(0);

impl Verifier {
    /// A verifier of the store's tasks.
    #[must_use]
    pub fn new(store: Arc<TaskStore>, mut options: VerifierOptions) -> Self {
        options.scratch = absolute(&options.scratch);
        Self { store, options: Arc::new(options) }
    }

    /// Applies a diff to the base tree, puts the tests back, and runs the hidden tests in a fresh sandbox.
    /// Machinery that fails is tried a second time, on a fresh tree and sandbox.
    ///
    /// # Errors
    /// [`InfraFailure`] when the machinery failed twice.
    pub async fn verify(
        &self,
        backend: &dyn Backend,
        task: &Task,
        diff: &[u8],
    ) -> Result<Verdict, InfraFailure> {
        let mut result = self.verify_once(backend, task, diff).await;
        for _ in 1..TRIES {
            match &result {
                Ok(_) | Err(InfraFailure::Shutdown | InfraFailure::Task(_)) => break,
                Err(failure) => {
                    tracing::warn!(task = %task.instance_id, ?failure, "verifying again");
                    result = self.verify_once(backend, task, diff).await;
                }
            }
        }
        result
    }

    async fn verify_once(
        &self,
        backend: &dyn Backend,
        task: &Task,
        diff: &[u8],
    ) -> Result<Verdict, InfraFailure> {
        let staged = match self.stage_on_a_thread(task, diff).await? {
            Ok(staged) => staged,
            Err(note) => return Ok(Verdict::rejected(task, note)),
        };
        let nonce = uuid::Uuid::new_v4().simple().to_string();
        let exit = self.run_tests(backend, &staged, &nonce).await?;
        let evidence = &exit.evidence;
        let has_own_oom = evidence.oom_kills.is_some_and(|kills| kills > 0);
        if evidence.host_oom && evidence.signal == Some(9) && !has_own_oom {
            return Err(InfraFailure::HostOom);
        }
        let output = parse(&exit.stdout, &nonce);
        if !output.is_ready {
            return Err(InfraFailure::Verifier(why_not_ready(&exit)));
        }
        let mut verdict = grade(task, &output, evidence, self.options.partial_credit);
        verdict.restored_paths.clone_from(&staged.restored_paths);
        Ok(verdict)
    }

    /// The reference patch as a trial's own diff: applied to a workspace, and read from it as an agent's changes are.
    ///
    /// # Errors
    /// For people: why no trial could hand in this solution.
    pub async fn reference_diff(&self, task: &Task) -> Result<Vec<u8>, String> {
        let (verifier, task) = (self.clone(), task.clone());
        let read = tokio::task::spawn_blocking(move || verifier.read_reference(&task)).await;
        read.map_err(|error| error.to_string())?
    }

    fn read_reference(&self, task: &Task) -> Result<Vec<u8>, String> {
        let number = NEXT_SCRATCH.fetch_add(1, Ordering::Relaxed);
        let name = format!("reference-{}-{number}", std::process::id());
        let workspace = Scratch(self.options.scratch.join(name));
        self.store.prepare(task, &workspace.0).map_err(|error| error.to_string())?;
        let changes = |what: &str| {
            let changes = self.store.changes(task, &workspace.0);
            changes.map_err(|error| format!("{what} cannot be had as a trial's changes: {error}"))
        };
        if let Some(path) = changes("an untouched workspace")?.paths.first() {
            return Err(format!("an untouched workspace differs from base_commit in {path}"));
        }
        apply(&workspace.0, task.patch.as_bytes())
            .map_err(|error| format!("the reference patch does not apply to base_commit: {error}"))?;
        Ok(changes("the reference patch")?.diff)
    }

    /// The tree under test, or why the diff is refused.
    async fn stage_on_a_thread(
        &self,
        task: &Task,
        diff: &[u8],
    ) -> Result<Result<Staged, String>, InfraFailure> {
        let (verifier, task, diff) = (self.clone(), task.clone(), diff.to_vec());
        let staged = tokio::task::spawn_blocking(move || verifier.stage(&task, &diff)).await;
        match staged {
            Ok(Ok(staged)) => Ok(Ok(staged)),
            Ok(Err(error @ StageError::Diff(_))) => Ok(Err(error.to_string())),
            Ok(Err(StageError::Store(error))) => Err(InfraFailure::Task(error.to_string())),
            Ok(Err(error)) => Err(InfraFailure::Verifier(error.to_string())),
            Err(error) if error.is_cancelled() => Err(InfraFailure::Shutdown),
            Err(error) => Err(InfraFailure::Verifier(error.to_string())),
        }
    }

    fn stage(&self, task: &Task, diff: &[u8]) -> Result<Staged, StageError> {
        let cached = self.store.cached(task)?;
        let hidden_files = files_under(&cached.hidden)?;
        let number = NEXT_SCRATCH.fetch_add(1, Ordering::Relaxed);
        let name = format!("verify-{}-{number}", std::process::id());
        let mut staged = Staged {
            folder: Scratch(self.options.scratch.join(name)),
            cached,
            hidden_files,
            restored_paths: Vec::new(),
        };
        let tree = staged.tree();
        copy_tree(&staged.cached.tree, &tree)?;
        if !diff.is_empty() {
            apply_to_copy(&staged.cached.tree, &tree, diff)?;
            refuse_links(&tree)?;
        }
        let places: Vec<PathBuf> = staged.hidden_files.iter().map(|file| test_place(file)).collect();
        for place in places {
            if put_back(&staged.cached.tree.join(&place), &tree.join(&place))? {
                staged.restored_paths.push(place.to_string_lossy().into_owned());
            }
        }
        std::fs::write(staged.runner(), RUNNER)?;
        Ok(staged)
    }

    async fn run_tests(
        &self,
        backend: &dyn Backend,
        staged: &Staged,
        nonce: &str,
    ) -> Result<Exit, InfraFailure> {
        let show =
            |host: PathBuf, inside: &Path| Mount { host, inside: inside.to_owned(), is_writable: false };
        let hidden = &self.options.hidden_test_mount;
        let spec = Spec {
            mounts: vec![
                show(staged.tree(), Path::new(WORKSPACE_INSIDE)),
                show(staged.cached.hidden.clone(), hidden),
                show(staged.runner(), Path::new(RUNNER_INSIDE)),
            ],
            listen_port: None,
            limits: self.options.limits.clone(),
        };
        let program = ["python3", "-I", "-S", "-B", RUNNER_INSIDE, WORKSPACE_INSIDE];
        let files = staged.hidden_files.iter().map(|file| hidden.join(file).into_os_string());
        let env = [("PATH", "/usr/local/bin:/usr/bin:/bin"), ("LANG", "C.UTF-8")];
        let exec = Exec {
            argv: program.iter().map(Into::into).chain(files).collect(),
            env: env.into_iter().map(|(key, value)| (key.into(), value.into())).collect(),
            cwd: "/".into(),
            stdin: format!("{nonce}\n").into_bytes(),
            max_output_bytes: MAX_OUTPUT_BYTES,
            timeout: self.options.timeout,
        };
        let mut sandbox = backend.create(spec).await.map_err(infra)?;
        let exit = sandbox.exec(exec).await.map_err(infra);
        if let Err(error) = sandbox.stop().await {
            tracing::warn!("the verifier's sandbox did not stop cleanly: {error}");
        }
        exit
    }
}

/// Applies a diff to `tree`, a copy of `base`. Only a diff that `base` itself refuses is at fault; what else fails (a
/// full disk) is the machinery.
fn apply_to_copy(base: &Path, tree: &Path, diff: &[u8]) -> Result<(), StageError> {
    apply(tree, diff).map_err(|error| match (&error, check(base, diff)) {
        (GitError::Failed { .. }, Err(GitError::Failed { message, .. })) => StageError::Diff(message),
        _ => StageError::Git(error),
    })
}

impl Staged {
    fn tree(&self) -> PathBuf {
        self.folder.0.join("tree")
    }

    fn runner(&self) -> PathBuf {
        self.folder.0.join("runner.py")
    }
}

fn infra(error: SandboxError) -> InfraFailure {
    match error {
        SandboxError::Unsupported { .. } | SandboxError::Setup { .. } => {
            InfraFailure::SandboxStart(error.to_string())
        }
        SandboxError::Lost(cause) => InfraFailure::SandboxLost(cause),
        SandboxError::Exec { .. } | SandboxError::Io(_) => InfraFailure::Verifier(error.to_string()),
    }
}

fn why_not_ready(exit: &Exit) -> String {
    if exit.evidence.timed_out {
        return format!("the hidden tests did not start within {:?}", exit.wall);
    }
    let stderr = String::from_utf8_lossy(&exit.stderr);
    let last = stderr.lines().last().unwrap_or("nothing on stderr");
    let Exit { evidence, .. } = exit;
    let end = match (evidence.code, evidence.signal) {
        _ if evidence.oom_kills.is_some_and(|kills| kills > 0) => {
            "out of memory (raise sandbox.memory_mb)".to_owned()
        }
        (Some(code), _) => format!("exit code {code}"),
        (None, signal) => format!("signal {}", signal.unwrap_or(0)),
    };
    format!("the hidden tests did not start: {end}, {last}")
}

/// What belongs to the tests: the top folder of a hidden test file, or the file itself.
fn test_place(file: &Path) -> PathBuf {
    file.components().next().map_or_else(PathBuf::new, |first| PathBuf::from(first.as_os_str()))
}

/// Makes `tree` what it is in `base`; true if it was not.
fn put_back(base: &Path, tree: &Path) -> std::io::Result<bool> {
    if is_same(base, tree)? {
        return Ok(false);
    }
    match tree.symlink_metadata() {
        Ok(meta) if meta.is_dir() => remove_tree(tree)?,
        Ok(_) => std::fs::remove_file(tree)?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    if base.is_dir() {
        copy_tree(base, tree)?;
    } else if base.is_file() {
        std::fs::copy(base, tree)?;
    }
    Ok(true)
}

/// Are two places the same files with the same content?
fn is_same(a: &Path, b: &Path) -> std::io::Result<bool> {
    let (meta_a, meta_b) = (a.symlink_metadata().ok(), b.symlink_metadata().ok());
    let (Some(meta_a), Some(meta_b)) = (&meta_a, &meta_b) else {
        return Ok(meta_a.is_none() && meta_b.is_none());
    };
    if meta_a.is_file() && meta_b.is_file() {
        return Ok(meta_a.len() == meta_b.len() && std::fs::read(a)? == std::fs::read(b)?);
    }
    if !(meta_a.is_dir() && meta_b.is_dir()) {
        return Ok(false);
    }
    let (files_a, files_b) = (files_under(a)?, files_under(b)?);
    if files_a != files_b {
        return Ok(false);
    }
    for file in files_a {
        if std::fs::read(a.join(&file))? != std::fs::read(b.join(&file))? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A link could show the tests another file than the one that was graded.
fn refuse_links(tree: &Path) -> Result<(), StageError> {
    for file in files_under(tree)? {
        if !tree.join(&file).symlink_metadata()?.is_file() {
            return Err(StageError::Diff(format!("{} is not a regular file", file.display())));
        }
    }
    Ok(())
}

/// The files of a folder, sorted, relative to it. Links count as files.
fn files_under(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(inner) = folders.pop() {
        for entry in std::fs::read_dir(folder.join(&inner))? {
            let entry = entry?;
            let path = inner.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                folders.push(path);
            } else {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diff_is_at_fault_only_if_the_base_tree_refuses_it() {
        let root = tempfile::tempdir().expect("folder");
        let (base, tree) = (root.path().join("base"), root.path().join("tree"));
        std::fs::create_dir(&base).expect("folder");
        std::fs::write(base.join("a"), "x\n").expect("file");
        copy_tree(&base, &tree).expect("copy");
        let diff = |old: &str| format!("--- a/a\n+++ b/a\n@@ -1,1 +1,1 @@\n-{old}\n+y\n");
        let applied = |diff: &str| apply_to_copy(&base, &tree, diff.as_bytes());
        assert!(matches!(applied(&diff("z")), Err(StageError::Diff(_))));
        assert!(matches!(applied("nothing that git knows"), Err(StageError::Diff(_))));
        // A copy that is not what it should be, as a disk leaves it that was full.
        std::fs::write(tree.join("a"), "").expect("file");
        assert!(matches!(applied(&diff("x")), Err(StageError::Git(GitError::Failed { .. }))));
        copy_tree(&base, &tree).expect("copy");
        applied(&diff("x")).expect("applies");
        assert_eq!(std::fs::read_to_string(tree.join("a")).expect("file"), "y\n");
        assert_eq!(std::fs::read_to_string(base.join("a")).expect("file"), "x\n");
    }
}
