//! Git on our own repositories, apart from whatever the machine or the user has configured.

use std::ffi::OsStr;
use std::io::{ErrorKind, Write};
#[cfg(unix)]
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Git that cannot be run, or that refused.
#[derive(Debug, thiserror::Error)]
pub enum GitError {
    #[error("git cannot be started: {0}. Install git")]
    Start(std::io::Error),
    #[error("git {command}: {message}")]
    Failed { command: String, message: String },
    #[error("git {command} was killed")]
    Killed { command: String },
    #[error("git: {0}")]
    Io(#[from] std::io::Error),
}

impl GitError {
    /// True if it is this machine's: what git was given may be good.
    pub fn is_of_machine(&self) -> bool {
        !matches!(self, Self::Failed { .. }) || self.is_no_room()
    }

    /// True if the disk is full.
    pub fn is_no_room(&self) -> bool {
        let says = |message: &str| {
            ["No space left on device", "Disk quota exceeded"].iter().any(|part| message.contains(part))
        };
        match self {
            Self::Failed { message, .. } => says(message),
            Self::Io(error) => matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded),
            Self::Start(_) | Self::Killed { .. } => false,
        }
    }
}

/// Where git is. With a path, and only then, the standard library starts a program without forking this
/// process, whose page tables are large.
fn program() -> Result<&'static Path, GitError> {
    static GIT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let search = || {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).map(|folder| folder.join("git")).find(|file| file.is_file())
    };
    let missing = || GitError::Start(std::io::Error::from(std::io::ErrorKind::NotFound));
    GIT.get_or_init(search).as_deref().ok_or_else(missing)
}

/// Runs git in a folder and gives its stdout.
///
/// # Errors
/// [`GitError`] with what git said.
pub fn git<S: AsRef<OsStr>>(folder: &Path, args: &[S], stdin: &[u8]) -> Result<Vec<u8>, GitError> {
    // Git takes no notice of a relative ceiling.
    let folder = std::path::absolute(folder)?;
    let mut child = Command::new(program()?)
        .args(args)
        .current_dir(&folder)
        // A terminal's Ctrl-C goes to lego, which ends what it began.
        .process_group(0)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("LC_ALL", "C")
        .env("HOME", "/nonexistent")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_ATTR_NOSYSTEM", "1")
        .env("GIT_TERMINAL_PROMPT", "0")
        .env("GIT_CONFIG_COUNT", "1")
        .env("GIT_CONFIG_KEY_0", "maintenance.auto")
        .env("GIT_CONFIG_VALUE_0", "false")
        // Nothing above the folder is a repository of ours.
        .env("GIT_CEILING_DIRECTORIES", folder.parent().unwrap_or(&folder))
        .env("GIT_AUTHOR_NAME", "lego")
        .env("GIT_AUTHOR_EMAIL", "lego@example.invalid")
        .env("GIT_AUTHOR_DATE", "1735689600 +0000")
        .env("GIT_COMMITTER_NAME", "lego")
        .env("GIT_COMMITTER_EMAIL", "lego@example.invalid")
        .env("GIT_COMMITTER_DATE", "1735689600 +0000")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(GitError::Start)?;
    let pipe = child.stdin.take();
    // Written beside, since git may want its output read before it reads on.
    let output = std::thread::scope(|scope| {
        scope.spawn(move || {
            // A git that stopped reading says why on stderr.
            pipe.map(|mut pipe| pipe.write_all(stdin))
        });
        child.wait_with_output()
    })?;
    let command = || args.first().map(|arg| arg.as_ref().to_string_lossy().into_owned()).unwrap_or_default();
    if output.status.success() {
        return Ok(output.stdout);
    }
    if output.status.code().is_none() {
        return Err(GitError::Killed { command: command() });
    }
    let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(GitError::Failed { command: command(), message })
}

/// Applies a patch to the files of a folder that is no repository. Paths outside it are refused.
///
/// # Errors
/// [`GitError::Failed`] when the patch does not apply, or the files cannot be written: [`check`] tells one from the
/// other.
pub fn apply(folder: &Path, patch: &[u8]) -> Result<(), GitError> {
    git(folder, &["apply", "--whitespace=nowarn", "-"], patch).map(|_| ())
}

/// Whether a patch applies to the files of a folder; nothing is written.
///
/// # Errors
/// [`GitError::Failed`] when it does not.
pub fn check(folder: &Path, patch: &[u8]) -> Result<(), GitError> {
    git(folder, &["apply", "--check", "--whitespace=nowarn", "-"], patch).map(|_| ())
}
