//! Base trees out of bundles, cached by commit; workspaces copied from them.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::changes::{ChangeError, Changes};
use super::git::{GitError, apply, git};
use super::{Dataset, Task};

/// A task whose files cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("task {task}: its repository {} cannot be read: {cause}. Run git bundle verify on it", bundle.display())]
    Bundle { task: String, bundle: PathBuf, cause: GitError },
    #[error("task {task}: {path} in commit {commit} is a {kind}; only regular files are supported")]
    Unsupported { task: String, commit: String, path: String, kind: String },
    #[error("task {task}: test_patch does not apply to base_commit: {cause}")]
    TestPatch { task: String, cause: GitError },
    #[error("task {task}: its files cannot be unpacked in {}: {cause}. Make room there", folder.display())]
    NoRoom { task: String, folder: PathBuf, cause: GitError },
    #[error("task {task}: {what}: {cause}")]
    Io { task: String, what: String, cause: io::Error },
}

/// Makes workspaces of a dataset's tasks.
///
/// The cache holds, by commit, the base tree and a repository of one commit without history; it is filled on
/// first use, by renaming a finished folder into place, so that any number of threads and processes share it.
#[derive(Debug)]
pub struct TaskStore {
    dataset_folder: PathBuf,
    cache: PathBuf,
}

/// What the cache holds of one task.
#[derive(Debug, Clone)]
pub(super) struct Cached {
    /// Files at the base commit.
    pub tree: PathBuf,
    /// A repository of one commit, whose work tree is `tree`.
    repository: PathBuf,
    /// The files that the test patch touches, as it leaves them.
    pub hidden: PathBuf,
}

static NEXT_SCRATCH: AtomicU64 = AtomicU64::new(0);

impl TaskStore {
    /// A store of this dataset's tasks with its cache in `cache` (made if absent).
    #[must_use]
    pub fn new(dataset: &Dataset, cache: &Path) -> Self {
        Self { dataset_folder: dataset.folder.clone(), cache: absolute(cache) }
    }

    /// Makes the agent's workspace in `folder`, which must not exist: the base tree and a repository of one
    /// commit. Nothing of other commits, of the reference patch or of the hidden tests is in it.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn prepare(&self, task: &Task, folder: &Path) -> Result<(), StoreError> {
        let cached = self.cached(task)?;
        let copy = copy_tree(&cached.tree, folder)
            .and_then(|()| copy_tree(&cached.repository, &folder.join(".git")));
        copy.map_err(|cause| io_error(task, format!("workspace {}", folder.display()), cause))
    }

    /// What the agent changed in its workspace, apart from its `.git`.
    ///
    /// # Errors
    /// [`ChangeError::Refused`] for changes that have no text diff: the agent's own doing.
    /// [`ChangeError::Store`] and [`ChangeError::Io`] otherwise.
    pub fn changes(&self, task: &Task, folder: &Path) -> Result<Changes, ChangeError> {
        Changes::between(&self.cached(task)?.tree, folder)
    }

    /// What the cache holds of a task, made first if need be.
    pub(super) fn cached(&self, task: &Task) -> Result<Cached, StoreError> {
        // The hidden tests are the dataset's, not the commit's.
        let key = format!("{}-{}", task.base_commit, digest(&task.test_patch));
        let folder = self.cache.join(key);
        let cached = Cached {
            tree: folder.join("tree"),
            repository: folder.join("repository"),
            hidden: folder.join("hidden"),
        };
        if folder.is_dir() {
            return Ok(cached);
        }
        let number = NEXT_SCRATCH.fetch_add(1, Ordering::Relaxed);
        let scratch = self.cache.join(format!("making-{}-{number}", std::process::id()));
        let made = self.make(task, &scratch);
        let placed = made.and_then(|()| {
            match std::fs::rename(&scratch, &folder) {
                Ok(()) => Ok(()),
                // Another thread or process was faster.
                Err(_) if folder.is_dir() => std::fs::remove_dir_all(&scratch),
                Err(cause) => Err(cause),
            }
            .map_err(|cause| io_error(task, format!("cache {}", folder.display()), cause))
        });
        if placed.is_err() && scratch.exists() {
            // The error at hand says more than one of cleaning up.
            let _ = std::fs::remove_dir_all(&scratch);
        }
        placed.map(|()| cached)
    }

    fn make(&self, task: &Task, scratch: &Path) -> Result<(), StoreError> {
        let io = |what: &str| {
            let what = what.to_owned();
            move |cause| io_error(task, what, cause)
        };
        let bundle_path = self.dataset_folder.join(&task.bundle);
        let bundle = |cause| {
            let of_bundle = |task, cause| StoreError::Bundle { task, bundle: bundle_path.clone(), cause };
            self.git_error(task, cause, of_bundle)
        };
        let tree = scratch.join("tree");
        std::fs::create_dir_all(&tree).map_err(io("cache"))?;

        let objects = scratch.join("objects");
        new_repository(&objects, true).map_err(io("cache"))?;
        let absolute = absolute(&bundle_path);
        let unbundle = ["bundle".as_ref(), "unbundle".as_ref(), absolute.as_os_str()];
        git(&objects, &unbundle, b"").map_err(bundle)?;
        self.extract(task, &objects, &tree).map_err(|error| match error {
            ExtractError::Git(cause) => bundle(cause),
            ExtractError::Io(cause) => io("base tree")(cause),
            ExtractError::Kind { path, kind } => StoreError::Unsupported {
                task: task.instance_id.to_string(),
                commit: task.base_commit.clone(),
                path,
                kind,
            },
        })?;
        std::fs::remove_dir_all(&objects).map_err(io("cache"))?;

        let own = |cause| io("workspace repository")(io::Error::other(cause));
        let dot_git = tree.join(".git");
        new_repository(&dot_git, false).map_err(io("workspace repository"))?;
        git(&tree, &["add", "--all", "--force"], b"").map_err(own)?;
        git(&tree, &["commit", "-q", "--no-verify", "-m", "The task's repository"], b"").map_err(own)?;
        std::fs::remove_dir_all(dot_git.join("logs")).map_err(io("workspace repository"))?;
        std::fs::rename(&dot_git, scratch.join("repository")).map_err(io("workspace repository"))?;

        let tested = scratch.join("tested");
        copy_tree(&tree, &tested).map_err(io("hidden tests"))?;
        apply(&tested, task.test_patch.as_bytes()).map_err(|cause| {
            self.git_error(task, cause, |task, cause| StoreError::TestPatch { task, cause })
        })?;
        let hidden = scratch.join("hidden");
        keep_changed(&tree, &tested, &hidden).map_err(io("hidden tests"))?;
        if !hidden.is_dir() {
            let nothing = io::Error::other("test_patch changes no file");
            return Err(io("hidden tests")(nothing));
        }
        std::fs::remove_dir_all(&tested).map_err(io("hidden tests"))
    }

    /// What git could not do: `own` of what it was given, unless this machine is to blame.
    fn git_error(
        &self,
        task: &Task,
        cause: GitError,
        own: impl FnOnce(String, GitError) -> StoreError,
    ) -> StoreError {
        let name = task.instance_id.to_string();
        match cause {
            cause if cause.is_no_room() => {
                StoreError::NoRoom { task: name, folder: self.cache.clone(), cause }
            }
            cause if cause.is_of_machine() => {
                io_error(task, "its repository".to_owned(), io::Error::other(cause))
            }
            cause => own(name, cause),
        }
    }

    /// Writes the files of the base commit.
    fn extract(&self, task: &Task, objects: &Path, tree: &Path) -> Result<(), ExtractError> {
        let listing = git(objects, &["ls-tree", "-r", "-z", &task.base_commit], b"")?;
        let mut files = Vec::new();
        let mut ids = String::new();
        for entry in listing.split(|&byte| byte == 0).filter(|entry| !entry.is_empty()) {
            let entry = std::str::from_utf8(entry)
                .map_err(|_| kind(&String::from_utf8_lossy(entry), "name that is not UTF-8"))?;
            let (meta, path) = entry.split_once('\t').unwrap_or((entry, ""));
            let mut meta = meta.split(' ');
            let (mode, _, id) = (meta.next(), meta.next(), meta.next().unwrap_or(""));
            let permissions = match mode {
                Some("100644") => 0o644,
                Some("100755") => 0o755,
                Some("120000") => return Err(kind(path, "symbolic link")),
                _ => return Err(kind(path, "submodule")),
            };
            ids += &format!("{id}\n");
            files.push((tree.join(path), permissions));
        }
        let blobs = git(objects, &["cat-file", "--batch"], ids.as_bytes())?;
        let mut rest = blobs.as_slice();
        for (target, permissions) in files {
            let content = next_blob(&mut rest).ok_or_else(|| io::Error::other("git cat-file broke off"))?;
            if let Some(parent) = target.parent() {
                std::fs::create_dir_all(parent)?;
            }
            std::fs::write(&target, content)?;
            std::fs::set_permissions(&target, std::fs::Permissions::from_mode(permissions))?;
        }
        Ok(())
    }
}

/// Takes the next object off the output of `git cat-file --batch`: a line that ends in its size, its bytes, a
/// newline.
fn next_blob<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let end = rest.iter().position(|&byte| byte == b'\n')?;
    let size: usize = std::str::from_utf8(&rest[..end]).ok()?.rsplit(' ').next()?.parse().ok()?;
    let content = rest.get(end + 1..end + 1 + size)?;
    *rest = rest.get(end + 2 + size..)?;
    Some(content)
}

/// An empty repository; the same on every machine, and faster than `git init`.
fn new_repository(folder: &Path, is_bare: bool) -> io::Result<()> {
    std::fs::create_dir_all(folder.join("objects"))?;
    std::fs::create_dir_all(folder.join("refs/heads"))?;
    std::fs::write(folder.join("HEAD"), "ref: refs/heads/main\n")?;
    let config = format!("[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = {is_bare}\n");
    std::fs::write(folder.join("config"), config)
}

#[derive(Debug, thiserror::Error)]
enum ExtractError {
    #[error(transparent)]
    Git(#[from] GitError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("{path} is a {kind}")]
    Kind { path: String, kind: String },
}

fn kind(path: &str, kind: &str) -> ExtractError {
    ExtractError::Kind { path: path.to_owned(), kind: kind.to_owned() }
}

fn io_error(task: &Task, what: String, cause: io::Error) -> StoreError {
    StoreError::Io { task: task.instance_id.to_string(), what, cause }
}

/// Sandboxes and git are told places that do not depend on the current folder.
pub(super) fn absolute(path: &Path) -> PathBuf {
    // It fails for an empty path only, which then fails where it is used.
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The first half of a text's SHA-256, in hexadecimal.
fn digest(text: &str) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(text.as_bytes()).iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Copies the regular files and folders of `from` to the new folder `to`.
pub(super) fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        let kind = entry.file_type()?;
        if kind.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else if kind.is_file() {
            std::fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}

/// Copies to `to`, under the same paths, the files of `after` that `before` has not, or has otherwise.
fn keep_changed(before: &Path, after: &Path, to: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(after)? {
        let entry = entry?;
        let name = entry.file_name();
        if entry.file_type()?.is_dir() {
            keep_changed(&before.join(&name), &entry.path(), &to.join(&name))?;
            continue;
        }
        let content = std::fs::read(entry.path())?;
        if std::fs::read(before.join(&name)).ok().as_ref() != Some(&content) {
            std::fs::create_dir_all(to)?;
            std::fs::write(to.join(&name), content)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_not_blamed_on_the_repository() {
        let dataset = Dataset { tasks: Vec::new(), folder: "data".into() };
        let store = TaskStore::new(&dataset, Path::new("/run/scratch/cache"));
        let told = |cause| {
            let of_bundle = |task, cause| StoreError::Bundle { task, bundle: "x.bundle".into(), cause };
            store.git_error(&Task::example(), cause, of_bundle).to_string()
        };
        let failed =
            |message: &str| GitError::Failed { command: "bundle".to_owned(), message: message.to_owned() };
        let full = told(failed("fatal: write error: No space left on device"));
        assert!(full.contains("/run/scratch/cache") && full.contains("Make room there"), "{full}");
        let killed = told(GitError::Killed { command: "bundle".to_owned() });
        for machine in [full, killed] {
            assert!(!machine.contains("git bundle verify"), "{machine}");
        }
        let broken = told(failed("fatal: early EOF"));
        assert!(broken.contains("x.bundle") && broken.contains("git bundle verify"), "{broken}");
    }
}
