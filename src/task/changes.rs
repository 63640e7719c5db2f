//! What changed between a base tree and a workspace, as a text diff.
//!
//! Files are read and compared here; git never sees what the agent left behind, so that no configuration,
//! attribute or hook of its making can run or rewrite anything.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::store::StoreError;

const MAX_ENTRIES: usize = 10_000;
const MAX_FILE_BYTES: u64 = 1 << 20;
const MAX_DIFF_BYTES: usize = 4 << 20;
/// Far below what a path may have, so that the verifier's copy can be read wherever it lies.
const MAX_PATH_BYTES: usize = 1024;
const CONTEXT_LINES: usize = 3;

/// A workspace whose changes cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// The agent's own doing: the trial is graded as unsolved.
    #[error("{path}: {reason}")]
    Refused { path: String, reason: String },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("workspace {}: {cause}", path.display())]
    Io { path: PathBuf, cause: io::Error },
}

/// The changes of a workspace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// A patch in git's form; empty when nothing changed.
    pub diff: Vec<u8>,
    /// The changed files.
    pub paths: Vec<String>,
}

/// A regular file of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    bytes: u64,
    is_executable: bool,
}

impl Changes {
    /// Compares regular files. `.git` at the top and Python's byte code are left out.
    ///
    /// # Errors
    /// [`ChangeError::Refused`] for links, devices, binary or very large files, names that a patch cannot hold,
    /// and what the workspace keeps from being read.
    pub fn between(base: &Path, workspace: &Path) -> Result<Self, ChangeError> {
        let before = list(base)?;
        let agents_own = |error| agents_own(workspace, error);
        let after = list(workspace).map_err(agents_own)?;
        let paths: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        let mut changes = Self::default();
        for path in paths {
            let old = side(base, path, before.get(path))?;
            let new = side(workspace, path, after.get(path)).map_err(agents_own)?;
            if old == new {
                continue;
            }
            if path.len() > MAX_PATH_BYTES {
                return refuse(path, &format!("its path is longer than {MAX_PATH_BYTES} bytes"));
            }
            let [old, new] = [old, new].map(|side| side.map(|side| side.text(path)).transpose());
            write_file(&mut changes.diff, path, old?, new?);
            changes.paths.push(path.clone());
            if changes.diff.len() > MAX_DIFF_BYTES {
                return refuse(path, &format!("the diff is larger than {MAX_DIFF_BYTES} bytes"));
            }
        }
        Ok(changes)
    }
}

/// Content and mode of a file.
#[derive(Debug, PartialEq, Eq)]
struct Side {
    content: Vec<u8>,
    is_executable: bool,
}

struct TextSide {
    text: String,
    is_executable: bool,
}

impl Side {
    fn text(self, path: &str) -> Result<TextSide, ChangeError> {
        match String::from_utf8(self.content) {
            Ok(text) if !text.contains('\0') => Ok(TextSide { text, is_executable: self.is_executable }),
            _ => refuse(path, "is changed and not text"),
        }
    }
}

fn side(folder: &Path, path: &str, entry: Option<&Entry>) -> Result<Option<Side>, ChangeError> {
    let Some(entry) = entry else {
        return Ok(None);
    };
    if entry.bytes > MAX_FILE_BYTES {
        return refuse(path, &format!("is larger than {MAX_FILE_BYTES} bytes"));
    }
    let full = folder.join(path);
    let content = std::fs::read(&full).map_err(|cause| ChangeError::Io { path: full.clone(), cause })?;
    Ok(Some(Side { content, is_executable: entry.is_executable }))
}

/// What the agent can bring about in its workspace at will is no failure of the machine's.
fn agents_own(workspace: &Path, error: ChangeError) -> ChangeError {
    use io::ErrorKind::{InvalidFilename, IsADirectory, NotADirectory, NotFound, PermissionDenied};
    match error {
        ChangeError::Io { path, cause }
            if matches!(
                cause.kind(),
                InvalidFilename | IsADirectory | NotADirectory | NotFound | PermissionDenied
            ) =>
        {
            let path = path.strip_prefix(workspace).unwrap_or(&path).to_string_lossy().into_owned();
            ChangeError::Refused { path, reason: format!("cannot be read: {cause}") }
        }
        error => error,
    }
}

/// The regular files of a tree by path, without following links.
fn list(root: &Path) -> Result<BTreeMap<String, Entry>, ChangeError> {
    let mut found = BTreeMap::new();
    let mut folders = vec![String::new()];
    let mut seen = 0;
    while let Some(folder) = folders.pop() {
        let full = root.join(&folder);
        let failed = |cause| ChangeError::Io { path: full.clone(), cause };
        for entry in std::fs::read_dir(&full).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let path = format!("{folder}{}", name.to_string_lossy());
            if path == ".git" || name == "__pycache__" {
                continue;
            }
            seen += 1;
            if seen > MAX_ENTRIES {
                return refuse(&path, &format!("the workspace has more than {MAX_ENTRIES} files"));
            }
            let is_plain = |c: char| !c.is_control() && !matches!(c, '"' | '\\' | '\u{fffd}');
            if !path.chars().all(is_plain) || path.ends_with(' ') || name == ".git" {
                return refuse(&path, "a patch cannot hold this name");
            }
            let meta = entry.metadata().map_err(failed)?;
            let kind = meta.file_type();
            if kind.is_dir() {
                folders.push(format!("{path}/"));
            } else if kind.is_file() {
                let is_executable = meta.permissions().mode() & 0o100 != 0;
                found.insert(path, Entry { bytes: meta.len(), is_executable });
            } else {
                return refuse(&path, "is not a regular file");
            }
        }
    }
    Ok(found)
}

fn refuse<T>(path: &str, reason: &str) -> Result<T, ChangeError> {
    Err(ChangeError::Refused { path: path.to_owned(), reason: reason.to_owned() })
}

/// Writes the patch of one file.
fn write_file(out: &mut Vec<u8>, path: &str, old: Option<TextSide>, new: Option<TextSide>) {
    let mode = |side: &TextSide| {
        if side.is_executable { "100755" } else { "100644" }
    };
    // Git ends a name that has blanks with a tab.
    let tab = if path.contains(' ') { "\t" } else { "" };
    let mut text = format!("diff --git a/{path} b/{path}\n");
    let (mut from, mut to) = (format!("a/{path}{tab}"), format!("b/{path}{tab}"));
    match (&old, &new) {
        (None, Some(new)) => {
            text += &format!("new file mode {}\n", mode(new));
            from = "/dev/null".to_owned();
        }
        (Some(old), None) => {
            text += &format!("deleted file mode {}\n", mode(old));
            to = "/dev/null".to_owned();
        }
        (Some(old), Some(new)) if mode(old) != mode(new) => {
            text += &format!("old mode {}\nnew mode {}\n", mode(old), mode(new));
        }
        _ => {}
    }
    let lines = |side: &Option<TextSide>| -> Vec<String> {
        let text = side.as_ref().map_or("", |side| side.text.as_str());
        text.split_inclusive('\n').map(str::to_owned).collect()
    };
    let (old, new) = (lines(&old), lines(&new));
    if old != new {
        text += &format!("--- {from}\n+++ {to}\n");
        text += &hunk(&old, &new);
    }
    out.extend_from_slice(text.as_bytes());
}

/// One hunk from the first to the last line that differs.
fn hunk(old: &[String], new: &[String]) -> String {
    let same_start = old.iter().zip(new).take_while(|(a, b)| a == b).count();
    let rest = old.len().min(new.len()) - same_start;
    let same_end = old.iter().rev().zip(new.iter().rev()).take(rest).take_while(|(a, b)| a == b).count();
    let (old_end, new_end) = (old.len() - same_end, new.len() - same_end);
    let start = same_start.saturating_sub(CONTEXT_LINES);
    let after = same_end.min(CONTEXT_LINES);
    let (old_count, new_count) = (old_end + after - start, new_end + after - start);
    // A range of no lines names the line before it.
    let first = |count: usize| if count == 0 { start } else { start + 1 };
    let mut text = format!("@@ -{},{old_count} +{},{new_count} @@\n", first(old_count), first(new_count));
    let mut push = |sign: char, lines: &[String]| {
        for line in lines {
            text.push(sign);
            text.push_str(line);
            if !line.ends_with('\n') {
                text.push_str("\n\\ No newline at end of file\n");
            }
        }
    };
    push(' ', &old[start..same_start]);
    push('-', &old[same_start..old_end]);
    push('+', &new[same_start..new_end]);
    push(' ', &old[old_end..old_end + after]);
    text
}

#[cfg(test)]
mod tests {
    use super::super::git;
    use super::*;

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
            std::fs::write(path, text).expect("write");
        }
    }

    /// Two folders with these files.
    fn folders(before: &[(&str, &str)], after: &[(&str, &str)]) -> (tempfile::TempDir, PathBuf, PathBuf) {
        let root = tempfile::tempdir().expect("folder");
        let (base, workspace) = (root.path().join("base"), root.path().join("workspace"));
        std::fs::create_dir(&base).expect("folder");
        std::fs::create_dir(&workspace).expect("folder");
        write(&base, before);
        write(&workspace, after);
        (root, base, workspace)
    }

    #[test]
    fn git_applies_what_is_written() {
        let long: String = (0..20).map(|n| format!("line {n}\n")).collect();
        let edited = long.replace("line 7\n", "seven\nand more\n").replace("line 11\n", "");
        type Files<'a> = [(&'a str, &'a str)];
        let cases: [(&str, &Files, &Files); 7] = [
            ("edit", &[("a.py", &long)], &[("a.py", &edited)]),
            ("ends", &[("a.py", "x\ny\n")], &[("a.py", "z\nx\ny\nw\n")]),
            ("no newline", &[("a.py", "x\ny")], &[("a.py", "x\nz")]),
            ("newline added", &[("a.py", "x")], &[("a.py", "x\n")]),
            ("new and deleted", &[("a.py", "x\n")], &[("d/b c.py", "y\n"), ("empty", "")]),
            ("emptied", &[("a.py", "x\n")], &[("a.py", "")]),
            ("unicode", &[("ä.py", "ü\n")], &[("ä.py", "ö\u{2028}\r\n")]),
        ];
        for (name, before, after) in cases {
            let (_root, base, workspace) = folders(before, after);
            let changes = Changes::between(&base, &workspace).expect(name);
            git::apply(&base, &changes.diff).expect(name);
            let left = Changes::between(&base, &workspace).expect(name);
            assert_eq!(left, Changes::default(), "{name}");
        }
    }

    #[test]
    fn modes_are_kept_and_nothing_is_nothing() {
        let (_root, base, workspace) = folders(&[("a.sh", "x\n")], &[("a.sh", "x\n")]);
        write(&workspace, &[(".git/config", "[core]\n"), ("__pycache__/a.pyc", "\0")]);
        assert_eq!(Changes::between(&base, &workspace).expect("same"), Changes::default());
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(workspace.join("a.sh"), executable).expect("mode");
        let changes = Changes::between(&base, &workspace).expect("mode");
        git::apply(&base, &changes.diff).expect("apply");
        let mode = base.join("a.sh").metadata().expect("file").permissions().mode();
        assert_eq!(mode & 0o100, 0o100);
    }

    #[test]
    fn what_a_patch_cannot_hold_is_refused() {
        let refused = |make: &dyn Fn(&Path)| {
            let (_root, base, workspace) = folders(&[("a.py", "x\n")], &[("a.py", "x\n")]);
            make(&workspace);
            match Changes::between(&base, &workspace) {
                Err(ChangeError::Refused { path, .. }) => path,
                other => panic!("{other:?}"),
            }
        };
        let link = |root: &Path| std::os::unix::fs::symlink("/etc/passwd", root.join("l")).expect("link");
        assert_eq!(refused(&link), "l");
        assert_eq!(refused(&|root| write(root, &[("b.bin", "a\0b")])), "b.bin");
        assert_eq!(refused(&|root| write(root, &[("d/a\nb", "")])), "d/a\nb");
        assert_eq!(refused(&|root| write(root, &[("d/.git/config", "")])), "d/.git");
        let huge = "x".repeat(usize::try_from(MAX_FILE_BYTES).expect("size") + 1);
        assert_eq!(refused(&|root| write(root, &[("big", &huge)])), "big");
    }

    #[test]
    fn what_the_agent_keeps_from_being_read_is_its_own_doing() {
        let (_root, base, workspace) = folders(&[("a.py", "x\n")], &[("a.py", "y\n")]);
        // A path longer than the system takes, and one that would be too long where the diff is verified.
        let name = "d".repeat(250);
        let (mut deep, mut path) = (workspace.clone(), PathBuf::new());
        while deep.as_os_str().len() + name.len() < 4000 {
            deep.push(&name);
            path.push(&name);
            std::fs::create_dir(&deep).expect("folder");
        }
        std::fs::write(deep.join("f"), "x").expect("file");
        let refused = |error| match error {
            Err(ChangeError::Refused { path, reason }) => (path, reason),
            other => panic!("{other:?}"),
        };
        let (found, reason) = refused(Changes::between(&base, &workspace));
        assert_eq!(found, path.join("f").to_string_lossy());
        assert!(reason.contains("longer than 1024 bytes"), "{reason}");
        let last = std::fs::File::open(&deep).expect("folder");
        let below = format!("/proc/self/fd/{}/{name}/{name}", std::os::fd::AsRawFd::as_raw_fd(&last));
        std::fs::create_dir_all(below).expect("folder");
        let (found, reason) = refused(Changes::between(&base, &workspace));
        assert!(found.starts_with(&name) && reason.contains("cannot be read"), "{found}: {reason}");
    }

    #[test]
    fn only_the_workspaces_errors_are_the_agents_and_only_those_it_can_bring_about() {
        let failed = |code| {
            let cause = io::Error::from_raw_os_error(code);
            agents_own(Path::new("/w"), ChangeError::Io { path: "/w/d/f".into(), cause })
        };
        // EACCES and ENAMETOOLONG; EIO, ENFILE and EMFILE.
        for code in [13, 36] {
            assert!(matches!(failed(code), ChangeError::Refused { path, .. } if path == "d/f"), "{code}");
        }
        for code in [5, 23, 24] {
            assert!(matches!(failed(code), ChangeError::Io { .. }), "{code}");
        }
        let (_root, base, workspace) = folders(&[], &[]);
        std::fs::remove_dir(&base).expect("removed");
        assert!(matches!(Changes::between(&base, &workspace), Err(ChangeError::Io { .. })));
    }
}
