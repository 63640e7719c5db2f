//! Choosing a backend by trying it.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use super::{Backend, Capabilities, SandboxError};

/// Which backend to use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Choice {
    /// The embedded one; where it cannot work and the weak one is allowed, the weak one.
    #[default]
    Auto,
    Embedded,
    /// The weak one, which must be allowed too.
    Weak,
}

/// A name that is no backend.
#[derive(Debug, thiserror::Error)]
#[error("no sandbox backend is called `{0}`; there are `auto`, `embedded` and `weak`")]
pub struct UnknownChoice(String);

impl FromStr for Choice {
    type Err = UnknownChoice;

    fn from_str(name: &str) -> Result<Self, UnknownChoice> {
        match name {
            "auto" => Ok(Self::Auto),
            "embedded" => Ok(Self::Embedded),
            "weak" => Ok(Self::Weak),
            other => Err(UnknownChoice(other.to_owned())),
        }
    }
}

/// How to choose.
#[derive(Debug, Clone)]
pub struct Options {
    pub choice: Choice,
    /// Whether the weak sandbox may be used (`--weak-sandbox`).
    pub allow_weak: bool,
    /// lego itself, which the backend runs with [`INIT_ARGUMENT`](super::INIT_ARGUMENT). In a test: `CARGO_BIN_EXE_lego`.
    pub binary: PathBuf,
    /// Directories whose file systems sandboxes will mount from; the probe shows that this works.
    pub work_dirs: Vec<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            choice: Choice::Auto,
            allow_weak: false,
            // The link of the process itself: still this build if the file is replaced meanwhile.
            binary: "/proc/self/exe".into(),
            work_dirs: std::env::current_dir().into_iter().chain([std::env::temp_dir()]).collect(),
        }
    }
}

/// One way of making a sandbox, tried.
#[derive(Debug)]
pub struct Attempt {
    pub what: String,
    pub outcome: Result<Capabilities, SandboxError>,
}

/// What `lego doctor` shows.
#[derive(Debug)]
pub struct Examination {
    /// (name, value), for people.
    pub facts: Vec<(String, String)>,
    pub attempts: Vec<Attempt>,
}

/// The backend that works here: a real sandbox has been made with it.
///
/// # Errors
/// [`SandboxError::Unsupported`] names what forbids it and the remedy.
pub async fn select(choice: Choice, allow_weak: bool) -> Result<Arc<dyn Backend>, SandboxError> {
    select_with(&Options { choice, allow_weak, ..Options::default() }).await
}

/// [`select`] with all options.
///
/// # Errors
/// As [`select`].
pub async fn select_with(options: &Options) -> Result<Arc<dyn Backend>, SandboxError> {
    #[cfg(target_os = "linux")]
    return super::linux::probe::select(options).await;
    #[cfg(not(target_os = "linux"))]
    {
        let _ = options;
        Err(not_linux())
    }
}

/// Tries every way of making a sandbox.
pub async fn examine(options: &Options) -> Examination {
    #[cfg(target_os = "linux")]
    return super::linux::probe::examine(options).await;
    #[cfg(not(target_os = "linux"))]
    {
        let _ = options;
        let attempt = Attempt { what: "embedded".into(), outcome: Err(not_linux()) };
        Examination { facts: Vec::new(), attempts: vec![attempt] }
    }
}

#[cfg(not(target_os = "linux"))]
fn not_linux() -> SandboxError {
    SandboxError::Unsupported {
        cause: format!("sandboxes need Linux; this is {}", std::env::consts::OS),
        remedy: "Run lego in a Linux machine or container (on Windows: WSL2)".into(),
    }
}
