//! The path that an export appears at: written aside, synced, and named when it is whole.

use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Component, Path, PathBuf};

use serde::Serialize;
use serde_json::json;

use super::ExportError;
use super::counts::Counts;

/// In a folder of lego's: what it holds. Only a folder with it is ever replaced.
const MARK: &str = "lego-export.json";

/// Names in a run's folder that are the run's own.
const OF_RUN: [&str; 14] = [
    "captures",
    "checkpoints",
    "config.resolved.toml",
    "eval.log",
    "events.jsonl",
    "inputs.json",
    "metrics.parquet",
    "reports",
    "run.json",
    "run.lock",
    "scratch",
    "tensorboard",
    "train.log",
    "trials",
];

/// A file or a folder that is written.
#[derive(Debug)]
pub(super) struct Output {
    path: PathBuf,
    /// Beside it, with a name that no other export has; removed again unless it is finished.
    aside: PathBuf,
    file: Option<BufWriter<File>>,
    steps: Vec<serde_json::Value>,
    force: bool,
    is_finished: bool,
}

impl Output {
    /// Begins an export of `captures` at `path`. `run`: the folder of the run that made them.
    pub(super) fn create(
        path: &Path,
        captures: &Path,
        run: Option<&Path>,
        is_folder: bool,
        force: bool,
    ) -> Result<Self, ExportError> {
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let Some(name) = path.file_name().map(|name| name.to_string_lossy().into_owned()) else {
            let source = io::Error::new(ErrorKind::InvalidInput, "it is no name for a file");
            return Err(ExportError::Io { path: path.to_owned(), source });
        };
        let parent = parent.canonicalize().map_err(ExportError::io(parent))?;
        let whole = parent.join(&name);
        reserved(&whole, captures, run)?;
        let aside = parent.join(format!(".{name}.{}.tmp", uuid::Uuid::now_v7().simple()));
        let mut output = Self { path: whole, aside, file: None, steps: vec![], force, is_finished: false };
        // Before the work, so that it is not in vain. It is looked at again when it is named.
        output.may_be_named(is_folder)?;
        if is_folder {
            fs::create_dir(&output.aside).map_err(ExportError::io(&output.path))?;
        } else {
            let file = File::create_new(&output.aside).map_err(ExportError::io(&output.path))?;
            output.file = Some(BufWriter::with_capacity(1 << 20, file));
        }
        Ok(output)
    }

    fn may_be_named(&self, is_folder: bool) -> Result<(), ExportError> {
        let path = self.path.clone();
        let found = match fs::symlink_metadata(&path) {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(ExportError::Io { path, source }),
        };
        // A device, a link: what is behind it is somebody else's.
        let (is, is_wanted) = match (found.is_dir(), found.is_file()) {
            (true, _) => ("folder", is_folder),
            (_, true) => ("file", !is_folder),
            _ => ("link or a device", false),
        };
        if !is_wanted {
            let wanted = if is_folder { "folder" } else { "file" };
            return Err(ExportError::OtherKind { path, is, wanted });
        }
        match self.force {
            false => Err(ExportError::Exists { path }),
            true if is_folder && !path.join(MARK).is_file() => Err(ExportError::NotAnExport { path }),
            true => Ok(()),
        }
    }

    /// The one file of an export that is no folder.
    pub(super) fn file(&mut self) -> Result<&mut Self, ExportError> {
        match self.file {
            Some(_) => Ok(self),
            None => Err(ExportError::OtherKind { path: self.path.clone(), is: "folder", wanted: "file" }),
        }
    }

    /// A line of JSON.
    pub(super) fn line(&mut self, line: &impl Serialize) -> Result<(), ExportError> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let written = serde_json::to_writer(&mut *file, line).map_err(io::Error::from);
        written.and_then(|()| file.write_all(b"\n")).map_err(ExportError::io(&self.path))
    }

    /// A new file in the folder, by its path in there.
    pub(super) fn create_in(&self, name: &str) -> Result<BufWriter<File>, ExportError> {
        let path = self.aside.join(name);
        let made = path.parent().map_or(Ok(()), fs::create_dir_all);
        let made = made.and_then(|()| File::create_new(&path));
        Ok(BufWriter::with_capacity(1 << 20, made.map_err(ExportError::io(&self.path.join(name)))?))
    }

    /// What went wrong with a file of the folder.
    pub(super) fn failed(&self) -> impl FnOnce(io::Error) -> ExportError + use<> {
        ExportError::io(&self.path)
    }

    /// Tells in the folder's own words what is in a file of it.
    pub(super) fn tell(&mut self, step: serde_json::Value) {
        self.steps.push(step);
    }

    /// Syncs what was written, and gives it its name.
    pub(super) fn finish(mut self, counts: &Counts) -> Result<(), ExportError> {
        let is_folder = self.file.is_none();
        match self.file.take() {
            Some(mut file) => {
                file.flush().and_then(|()| file.get_ref().sync_all()).map_err(ExportError::io(&self.path))?;
            }
            None => {
                let told = json!({"counts": counts, "files": self.steps});
                let mut mark = self.create_in(MARK)?;
                let written = serde_json::to_writer_pretty(&mut mark, &told).map_err(io::Error::from);
                written.and_then(|()| close(mark)).map_err(ExportError::io(&self.path))?;
                sync_folders(&self.aside).map_err(ExportError::io(&self.path))?;
            }
        }
        self.may_be_named(is_folder)?;
        self.name(is_folder)?;
        self.is_finished = true;
        let parent = self.path.parent().unwrap_or(Path::new("."));
        File::open(parent).and_then(|folder| folder.sync_all()).map_err(ExportError::io(parent))
    }

    fn name(&self, is_folder: bool) -> Result<(), ExportError> {
        let io = ExportError::io(&self.path);
        let taken = |error: io::Error| match error.kind() {
            ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty => {
                ExportError::Exists { path: self.path.clone() }
            }
            _ => ExportError::Io { path: self.path.clone(), source: error },
        };
        if !is_folder && !self.force {
            // Other than a rename it fails where somebody else took the name meanwhile.
            return match fs::hard_link(&self.aside, &self.path) {
                Ok(()) => fs::remove_file(&self.aside).map_err(io),
                // A file system without links: the name is taken by an empty file first.
                Err(error)
                    if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::PermissionDenied) =>
                {
                    File::create_new(&self.path).map_err(taken)?;
                    fs::rename(&self.aside, &self.path).map_err(io)
                }
                Err(error) => Err(taken(error)),
            };
        }
        if !is_folder || !self.path.exists() {
            return fs::rename(&self.aside, &self.path).map_err(taken);
        }
        let old = self.aside.with_extension("old");
        let renamed = fs::rename(&self.path, &old).and_then(|()| fs::rename(&self.aside, &self.path));
        renamed.and_then(|()| fs::remove_dir_all(&old)).map_err(io)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        self.file = None;
        let removed = match self.aside.is_dir() {
            true => fs::remove_dir_all(&self.aside),
            false => fs::remove_file(&self.aside),
        };
        if let Err(error) = removed.or_else(|error| match error.kind() {
            ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        }) {
            tracing::warn!("cannot remove {}: {error}", self.aside.display());
        }
    }
}

/// Flushes and syncs a file of the folder.
pub(super) fn close(mut file: BufWriter<File>) -> io::Result<()> {
    file.flush()?;
    file.get_ref().sync_all()
}

fn sync_folders(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            sync_folders(&path)?;
        }
    }
    File::open(folder)?.sync_all()
}

/// Nothing is written into captures, nor at a name that a run has for something else.
fn reserved(path: &Path, captures: &Path, run: Option<&Path>) -> Result<(), ExportError> {
    let captures = captures.canonicalize().map_err(ExportError::io(captures))?;
    if path.starts_with(&captures) {
        return Err(ExportError::Reserved { path: path.to_owned(), of: "the captures'", root: captures });
    }
    let Some(run) = run else { return Ok(()) };
    let first = path.strip_prefix(run).ok().and_then(|inside| inside.components().next());
    let is_own = match first {
        Some(Component::Normal(name)) => OF_RUN.iter().any(|own| name == *own),
        _ => path == run,
    };
    if is_own {
        return Err(ExportError::Reserved { path: path.to_owned(), of: "the run's", root: run.to_owned() });
    }
    Ok(())
}
