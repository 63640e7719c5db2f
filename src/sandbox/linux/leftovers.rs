//! Files that a sandbox's programs leave behind, in whatever modes, names and depths: read, and removed.
//!
//! Invariants:
//! - No link is followed: what is changed or removed lies in the tree.
//! - Neither the stack nor the number of open descriptors grows with the tree's depth.
//! - An owner who is no root gets as far as root does: programs can lock their folders, but not keep them.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

/// What the owner of a folder needs to change it.
const FOLDER_MODE: u32 = 0o700;
/// What the owner of a file needs to read it.
const FILE_MODE: u32 = 0o400;

/// Gives the owner of a tree the permissions to read it. What stays out of reach (a path longer than the system
/// takes) is left as it is: whoever reads it gets the error.
pub fn make_readable(root: &Path) {
    let mut folders = vec![root.to_owned()];
    while let Some(path) = folders.pop() {
        let Ok(folder) = Held::open(AT_FDCWD, path.as_os_str(), OFlag::O_DIRECTORY) else { continue };
        if folder.permit(FOLDER_MODE).is_err() {
            continue;
        }
        for entry in fs::read_dir(folder.path()).into_iter().flatten().flatten() {
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() {
                folders.push(path.join(entry.file_name()));
            } else if kind.is_file()
                && let Ok(file) = Held::open(&folder.0, &entry.file_name(), OFlag::empty())
            {
                // A file that stays unreadable is told of by whoever reads it.
                let _ = file.permit(FILE_MODE);
            }
        }
    }
}

/// Removes a tree, whatever its permissions; one that is not there is removed already.
///
/// A folder that is not empty is moved to the top and its turn comes there, so that depth costs nothing.
///
/// # Errors
/// What cannot be removed; `DirectoryNotEmpty` where somebody still writes into it.
pub fn remove_tree(root: &Path) -> io::Result<()> {
    let top = match Held::open(AT_FDCWD, root.as_os_str(), OFlag::O_DIRECTORY) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    top.permit(FOLDER_MODE)?;
    let mut moved = 0_u64;
    loop {
        let names = top.names()?;
        if names.is_empty() {
            break;
        }
        for name in names {
            if top.remove(&name)? {
                continue;
            }
            let Some(folder) = top.inner(&name)? else { continue };
            for inner in folder.names()? {
                // Moving a folder writes into it: its `..` changes.
                if !folder.remove(&inner)? && folder.inner(&inner)?.is_some() {
                    move_up(&folder, &inner, &top, &mut moved)?;
                }
            }
            top.remove(&name)?;
        }
    }
    match fs::remove_dir(root) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Moves a folder into `top`, under a name that is free there.
fn move_up(from: &Held, name: &OsStr, top: &Held, moved: &mut u64) -> io::Result<()> {
    loop {
        *moved += 1;
        match renameat(&from.0, name, &top.0, format!("moved-{moved}").as_str()) {
            Ok(()) | Err(Errno::ENOENT) => return Ok(()),
            Err(Errno::ENOTEMPTY | Errno::EEXIST | Errno::ENOTDIR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A file or folder held by a descriptor that needs no permission on it.
struct Held(OwnedFd);

impl Held {
    fn open(folder: impl AsFd, name: &OsStr, kind: OFlag) -> io::Result<Self> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | kind;
        Ok(Self(openat(folder, name, flags, Mode::empty())?))
    }

    /// A folder in this one, made changeable; `None` if it is gone.
    fn inner(&self, name: &OsStr) -> io::Result<Option<Self>> {
        match Self::open(&self.0, name, OFlag::O_DIRECTORY) {
            Ok(folder) => folder.permit(FOLDER_MODE).map(|()| Some(folder)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A path that means this very file, wherever it lies.
    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }

    /// Adds permissions that are missing.
    fn permit(&self, mode: u32) -> io::Result<()> {
        let path = self.path();
        let found = fs::metadata(&path)?.mode() & 0o7777;
        if found & mode == mode {
            return Ok(());
        }
        fs::set_permissions(path, Permissions::from_mode(found | mode))
    }

    /// What is in a folder; nothing if it is gone.
    fn names(&self) -> io::Result<Vec<OsString>> {
        let names = fs::read_dir(self.path())
            .and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<_>>());
        match names {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            names => names,
        }
    }

    /// Removes a file or an empty folder; false for a folder that is not empty.
    fn remove(&self, name: &OsStr) -> io::Result<bool> {
        match unlinkat(&self.0, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => return Ok(true),
            Err(Errno::EISDIR) => {}
            Err(error) => return Err(error.into()),
        }
        match unlinkat(&self.0, name, UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(true),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Runs `test` as an ordinary user, in a folder of that user. The file system id is the thread's own.
#[cfg(test)]
pub fn as_ordinary_user(test: impl FnOnce(&Path) + Send + 'static) {
    std::thread::spawn(move || {
        if nix::unistd::geteuid().is_root() {
            nix::unistd::setfsgid(12345.into());
            nix::unistd::setfsuid(12345.into());
        }
        let folder = tempfile::tempdir().expect("folder");
        test(&folder.path().canonicalize().expect("path"));
    })
    .join()
    .expect("as an ordinary user");
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn lock(path: &Path) {
        fs::set_permissions(path, Permissions::from_mode(0o0)).expect("mode");
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).expect("there").mode() & 0o7777
    }

    /// A locked tree beside a file that its links point to.
    fn locked(folder: &Path) -> PathBuf {
        let root = folder.join("tree");
        fs::create_dir_all(root.join("d/e")).expect("folders");
        fs::write(folder.join("outside"), "x").expect("file");
        fs::set_permissions(folder.join("outside"), Permissions::from_mode(0o200)).expect("mode");
        symlink(folder.join("outside"), root.join("d/link")).expect("link");
        symlink(folder, root.join("d/e/up")).expect("link");
        fs::write(root.join("d/e/f"), "text").expect("file");
        fs::write(root.join("d/run"), "text").expect("file");
        fs::set_permissions(root.join("d/run"), Permissions::from_mode(0o100)).expect("mode");
        for path in ["d/e/f", "d/e", "d", ""] {
            lock(&root.join(path));
        }
        root
    }

    #[test]
    fn a_locked_tree_is_read_and_nothing_outside_of_it_changes() {
        as_ordinary_user(|folder| {
            let root = locked(folder);
            let error = fs::read_dir(&root).expect_err("an ordinary user is locked out");
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            make_readable(&root);
            assert_eq!(fs::read_to_string(root.join("d/e/f")).expect("readable"), "text");
            assert_eq!(mode(&root.join("d/run")), 0o500, "it is still a program");
            assert_eq!(mode(&folder.join("outside")), 0o200, "a link is not followed");
        });
    }

    #[test]
    fn a_locked_tree_is_removed_and_nothing_outside_of_it() {
        as_ordinary_user(|folder| {
            let root = locked(folder);
            assert!(fs::remove_dir_all(&root).is_err(), "an ordinary user is locked out");
            remove_tree(&root).expect("removed");
            assert!(!root.exists());
            assert_eq!(mode(&folder.join("outside")), 0o200);
            remove_tree(&root).expect("one that is not there");
        });
    }

    #[test]
    fn a_tree_deeper_than_a_path_or_a_stack_holds_is_removed() {
        as_ordinary_user(|folder| {
            let root = folder.join("tree");
            fs::create_dir(&root).expect("folder");
            fs::write(root.join("moved-1"), "taken").expect("file");
            let mut deepest = Held::open(AT_FDCWD, root.as_os_str(), OFlag::O_DIRECTORY).expect("root");
            for _ in 0..3000 {
                fs::create_dir(deepest.path().join("d")).expect("folder");
                let below = Held::open(&deepest.0, OsStr::new("d"), OFlag::O_DIRECTORY).expect("below");
                fs::write(deepest.path().join("f"), "x").expect("file");
                fs::set_permissions(deepest.path(), Permissions::from_mode(0o500)).expect("mode");
                deepest = below;
            }
            make_readable(&root);
            remove_tree(&root).expect("removed");
            assert!(!root.exists());
        });
    }

    #[test]
    fn a_link_in_the_place_of_a_tree_is_refused() {
        let folder = tempfile::tempdir().expect("folder");
        fs::create_dir(folder.path().join("real")).expect("folder");
        fs::write(folder.path().join("real/f"), "x").expect("file");
        symlink(folder.path().join("real"), folder.path().join("link")).expect("link");
        remove_tree(&folder.path().join("link")).expect_err("not a folder");
        assert!(folder.path().join("real/f").exists());
    }
}
