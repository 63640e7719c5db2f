//! What changed between a base tree and a workspace, as a text diff.
//!
//! Files are read and compared here; git never sees what the agent left behind, so that no configuration,
//! attribute or hook of its making can run or rewrite anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::store::StoreError;

/// Files and folders that a workspace may have beyond those of the base tree.
const MAX_NEW_ENTRIES: usize = 10_000;
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

/// The regular files and the folders of a tree by path. What is wrong with the agent's tree is the agent's own doing,
/// unless the machine itself fails; what is wrong with the base tree never is.
#[derive(Debug)]
struct Tree<'a> {
    root: &'a Path,
    is_agents: bool,
    files: BTreeMap<String, Entry>,
    folders: BTreeSet<String>,
}

impl Changes {
    /// Compares regular files. `.git` at the top and Python's byte code are left out. The limits hold for what was
    /// changed: the base tree may have any file.
    ///
    /// # Errors
    /// [`ChangeError::Refused`] for links, devices, changed files that are binary or very large, names that a patch
    /// cannot hold, and what cannot be read because of what the agent did to it.
    pub fn between(base: &Path, workspace: &Path) -> Result<Self, ChangeError> {
        let before = Tree::list(base, None)?;
        let after = Tree::list(workspace, Some(&before))?;
        let paths: BTreeSet<&String> = before.files.keys().chain(after.files.keys()).collect();
        let mut changes = Self::default();
        for path in paths {
            if before.has_same(&after, path)? {
                continue;
            }
            if !can_be_in_a_patch(path) {
                return refuse(path, "is changed, and a patch cannot hold its name");
            }
            if path.len() > MAX_PATH_BYTES {
                return refuse(
                    path,
                    &format!("is changed, and its path is longer than {MAX_PATH_BYTES} bytes"),
                );
            }
            let (old, new) = (before.side(path)?, after.side(path)?);
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

impl<'a> Tree<'a> {
    /// Lists a tree without following links: the base tree, or with `base` the agent's.
    fn list(root: &'a Path, base: Option<&Tree<'_>>) -> Result<Self, ChangeError> {
        let is_agents = base.is_some();
        let mut tree = Self { root, is_agents, files: BTreeMap::new(), folders: BTreeSet::new() };
        let is_in_base =
            |path: &str| base.is_none_or(|base| base.files.contains_key(path) || base.folders.contains(path));
        let mut folders = vec![String::new()];
        let mut new_entries = 0;
        while let Some(folder) = folders.pop() {
            let failed = |cause| tree.failed(&folder, cause);
            let listing = std::fs::read_dir(root.join(&folder)).map_err(failed)?;
            let entries = listing.collect::<Result<Vec<_>, _>>().map_err(failed)?;
            for entry in entries {
                let name = entry.file_name();
                let path = format!("{folder}{}", name.to_string_lossy());
                if path == ".git" || name == "__pycache__" {
                    continue;
                }
                if name.to_str().is_none() {
                    let cause = io::Error::new(io::ErrorKind::InvalidFilename, "the name is not UTF-8");
                    return Err(tree.failed(&path, cause));
                }
                if !is_in_base(&path) {
                    new_entries += 1;
                    if new_entries > MAX_NEW_ENTRIES {
                        return refuse(&path, &format!("more than {MAX_NEW_ENTRIES} files are new"));
                    }
                    if !can_be_in_a_patch(&path) {
                        return refuse(&path, "a patch cannot hold this name");
                    }
                }
                let meta = entry.metadata().map_err(|cause| tree.failed(&path, cause))?;
                let kind = meta.file_type();
                if kind.is_dir() {
                    folders.push(format!("{path}/"));
                    tree.folders.insert(path);
                } else if kind.is_file() {
                    let is_executable = meta.permissions().mode() & 0o100 != 0;
                    tree.files.insert(path, Entry { bytes: meta.len(), is_executable });
                } else {
                    return refuse(&path, "is not a regular file");
                }
            }
        }
        Ok(tree)
    }

    /// Have both trees the same file here, or none?
    fn has_same(&self, other: &Self, path: &str) -> Result<bool, ChangeError> {
        let (mine, theirs) = (self.files.get(path), other.files.get(path));
        if mine.is_none() || mine != theirs {
            return Ok(mine == theirs);
        }
        let (mut mine, mut theirs) = (self.open(path)?, other.open(path)?);
        let (mut a, mut b) = ([0; 16 * 1024], [0; 16 * 1024]);
        loop {
            let read = fill(&mut mine, &mut a).map_err(|cause| self.failed(path, cause))?;
            if read != fill(&mut theirs, &mut b).map_err(|cause| other.failed(path, cause))?
                || a[..read] != b[..read]
            {
                return Ok(false);
            }
            if read == 0 {
                return Ok(true);
            }
        }
    }

    /// A file that is changed.
    fn side(&self, path: &str) -> Result<Option<Side>, ChangeError> {
        let Some(entry) = self.files.get(path) else {
            return Ok(None);
        };
        if entry.bytes > MAX_FILE_BYTES {
            return refuse(path, &format!("is changed and larger than {MAX_FILE_BYTES} bytes"));
        }
        let mut content = Vec::new();
        self.open(path)?.read_to_end(&mut content).map_err(|cause| self.failed(path, cause))?;
        Ok(Some(Side { content, is_executable: entry.is_executable }))
    }

    fn open(&self, path: &str) -> Result<File, ChangeError> {
        File::open(self.root.join(path)).map_err(|cause| self.failed(path, cause))
    }

    /// Whose fault it is that something cannot be read. The workspace itself is lego's to keep.
    fn failed(&self, path: &str, cause: io::Error) -> ChangeError {
        let is_gone = path.is_empty() && cause.kind() == io::ErrorKind::NotFound;
        if self.is_agents && !is_gone && !is_the_machines(&cause) {
            let (path, reason) = (path.to_owned(), format!("cannot be read: {cause}"));
            return ChangeError::Refused { path, reason };
        }
        ChangeError::Io { path: self.root.join(path), cause }
    }
}

/// Errors that nothing in a workspace brings about.
fn is_the_machines(cause: &io::Error) -> bool {
    use io::ErrorKind::{OutOfMemory, QuotaExceeded, StaleNetworkFileHandle, StorageFull};
    /// EIO, ENFILE and EMFILE, which have no kind.
    const WITHOUT_A_KIND: [i32; 3] = [5, 23, 24];
    matches!(cause.kind(), OutOfMemory | QuotaExceeded | StaleNetworkFileHandle | StorageFull)
        || cause.raw_os_error().is_some_and(|code| WITHOUT_A_KIND.contains(&code))
}

fn can_be_in_a_patch(path: &str) -> bool {
    let is_plain = |c: char| !c.is_control() && !matches!(c, '"' | '\\' | '\u{fffd}');
    path.chars().all(is_plain) && !path.ends_with(' ') && !path.split('/').any(|name| name == ".git")
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
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
    fn limits_hold_for_what_was_changed_and_not_for_the_base() {
        let huge = "x".repeat(usize::try_from(MAX_FILE_BYTES).expect("size") + 1);
        let files = [("a.py", "x\n"), ("huge.txt", huge.as_str()), ("l.bin", "\0"), ("odd \"name\"/a ", "x")];
        let (_root, base, workspace) = folders(&files, &files);
        for number in 0..=MAX_NEW_ENTRIES {
            for folder in [&base, &workspace] {
                File::create(folder.join(format!("n{number}"))).expect("file");
            }
        }
        assert_eq!(Changes::between(&base, &workspace).expect("nothing changed"), Changes::default());
        write(&workspace, &[("a.py", "y\n")]);
        assert_eq!(Changes::between(&base, &workspace).expect("one changed").paths, ["a.py"]);
        for path in ["huge.txt", "l.bin", "odd \"name\"/a "] {
            let kept = std::fs::read(workspace.join(path)).expect("file");
            // The same size, so that the content decides.
            write(&workspace, &[(path, &"z".repeat(kept.len()))]);
            match Changes::between(&base, &workspace) {
                Err(ChangeError::Refused { path: refused, .. }) => assert_eq!(refused, path),
                other => panic!("{path:?}: {other:?}"),
            }
            std::fs::write(workspace.join(path), kept).expect("write");
        }
    }

    /// Folders so deep that no path names the last one.
    fn nest(root: &Path) {
        let name = "d".repeat(240);
        let made = std::process::Command::new("/bin/sh")
            .args(["-c", "for i in $(seq 30); do mkdir $0 && cd -P ./$0 || exit 1; done", &name])
            .current_dir(root)
            .status();
        assert!(made.expect("sh").success());
    }

    #[test]
    fn what_an_agent_makes_unreadable_is_its_own_doing_and_a_failing_machine_is_not() {
        let (_root, base, workspace) = folders(&[("a.py", "x\n")], &[("a.py", "x\n")]);
        nest(&workspace);
        let refused = Changes::between(&base, &workspace);
        assert!(matches!(refused, Err(ChangeError::Refused { .. })), "{refused:?}");
        // The same in the base tree is not the agent's.
        let broken = Changes::between(&workspace, &base);
        assert!(matches!(broken, Err(ChangeError::Io { .. })), "{broken:?}");
        let gone = Changes::between(&base, &workspace.join("none"));
        assert!(matches!(gone, Err(ChangeError::Io { .. })), "{gone:?}");

        let tree = Tree { root: &base, is_agents: true, files: BTreeMap::new(), folders: BTreeSet::new() };
        // ENAMETOOLONG, ELOOP, EACCES, ENOENT, ENOTDIR; ENOSPC, EIO, EMFILE, ENOMEM.
        for code in [36, 40, 13, 2, 20] {
            let error = tree.failed("a.py", io::Error::from_raw_os_error(code));
            assert!(matches!(error, ChangeError::Refused { .. }), "{error:?}");
        }
        for code in [28, 5, 24, 12] {
            let error = tree.failed("a.py", io::Error::from_raw_os_error(code));
            assert!(matches!(error, ChangeError::Io { .. }), "{error:?}");
        }
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
}
