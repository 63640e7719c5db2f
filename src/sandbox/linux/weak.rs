//! What is special about the weak sandbox: paths and the port inside are the host's, so they are translated.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::cgroup;
use super::leftovers::remove_tree;
use super::wire::Shown;

/// Host files that a weak sandbox needs in place of lego's own.
const ETC: [&str; 4] = ["/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf"];

/// What a weak sandbox may read besides the allow-list.
pub fn extra_system() -> Vec<Shown> {
    ETC.map(PathBuf::from)
        .into_iter()
        .filter(|path| path.exists())
        .map(|path| Shown { host: path.clone(), inside: path, is_writable: false, is_directory: false })
        .collect()
}

/// A directory that stands for /tmp; removed on drop.
#[derive(Debug)]
pub struct PrivateTmp {
    path: PathBuf,
    /// Locked while it is in use: a lego in another container cannot see that this one lives.
    _lock: fs::File,
}

impl PrivateTmp {
    /// A new one, readable by its owner only.
    pub fn create(name: &str) -> io::Result<Self> {
        let path = std::env::temp_dir().join(name);
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        let lock = fs::File::open(&path)?;
        lock.lock()?;
        Ok(Self { path, _lock: lock })
    }

    /// Removes what legos that were killed have left.
    pub fn sweep() {
        sweep(&std::env::temp_dir());
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for PrivateTmp {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.path) {
            tracing::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// Best effort, of this user's own folders in a place that others may write to.
fn sweep(parent: &Path) {
    let user = nix::unistd::geteuid().as_raw();
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_left = entry.file_name().to_str().is_some_and(cgroup::is_of_the_dead);
        let is_ours = entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == user);
        if is_left
            && is_ours
            && let Ok(folder) = fs::File::open(entry.path())
            && folder.try_lock().is_ok()
            && let Err(error) = remove_tree(&entry.path())
        {
            tracing::warn!("cannot remove {}: {error}", entry.path().display());
        }
    }
}

/// Replaces what a [`Spec`](crate::sandbox::Spec) calls a path or address by what it is on the host.
#[derive(Debug, Default)]
pub struct Translation(Vec<(Vec<u8>, Vec<u8>)>);

impl Translation {
    /// Of the mounts, and of 127.0.0.1 at the port that was asked for.
    pub fn new(mounts: &[Shown], port: Option<(u16, u16)>) -> Self {
        let mut pairs: Vec<_> = mounts
            .iter()
            .map(|shown| {
                let bytes = |path: &Path| path.as_os_str().as_bytes().to_vec();
                (bytes(&shown.inside), bytes(&shown.host))
            })
            .collect();
        if let Some((asked, actual)) = port {
            for host in ["127.0.0.1", "localhost"] {
                let at = |port: u16| format!("{host}:{port}").into_bytes();
                pairs.push((at(asked), at(actual)));
            }
        }
        // The longest match first: a mount inside another one wins.
        pairs.sort_by_key(|(inside, _)| std::cmp::Reverse(inside.len()));
        Self(pairs)
    }

    /// Every whole occurrence in `text`, in one pass.
    pub fn apply(&self, text: &OsStr) -> OsString {
        let text = text.as_bytes();
        let mut result = Vec::with_capacity(text.len());
        let mut at = 0;
        while at < text.len() {
            let found = self.0.iter().find(|(inside, _)| {
                let before = at.checked_sub(1).map(|before| text[before]);
                let after = text.get(at + inside.len());
                text[at..].starts_with(inside)
                    && before.is_none_or(|byte| !(is_name(byte) || byte == b'/' && inside[0] == b'/'))
                    && after.is_none_or(|&byte| !is_name(byte))
            });
            match found {
                Some((inside, host)) => {
                    result.extend_from_slice(host);
                    at += inside.len();
                }
                None => {
                    result.push(text[at]);
                    at += 1;
                }
            }
        }
        OsString::from_vec(result)
    }
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.') || byte >= 0x80
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_of_dead_legos_are_swept() {
        let parent = tempfile::tempdir().unwrap();
        let living = format!("{}0", cgroup::own_prefix());
        let names = ["lego-4294967295-1-0-0", "lego-4294967295-1-0-1", &living, "lego-x", "other"];
        for name in names {
            fs::create_dir(parent.path().join(name)).unwrap();
            fs::write(parent.path().join(name).join("file"), "").unwrap();
        }
        // In use, by one whose process is out of sight.
        let lock = fs::File::open(parent.path().join(names[1])).unwrap();
        lock.lock().unwrap();
        std::os::unix::fs::symlink(parent.path().join("other"), parent.path().join("lego-4294967295-1-0-2"))
            .unwrap();
        sweep(parent.path());
        let is_there = names.map(|name| parent.path().join(name).join("file").exists());
        assert_eq!(is_there, [false, true, true, true, true]);
    }

    #[test]
    fn whole_paths_and_the_address_are_translated() {
        let shown = |inside: &str, host: &str| Shown {
            host: host.into(),
            inside: inside.into(),
            is_writable: true,
            is_directory: true,
        };
        let mounts = [shown("/workspace", "/r/1"), shown("/workspace/.x", "/r/2"), shown("/tmp", "/tmp/t")];
        let translation = Translation::new(&mounts, Some((18080, 4000)));
        for (text, expected) in [
            ("/workspace", "/r/1"),
            ("/workspace/a", "/r/1/a"),
            ("/workspace/.x/a", "/r/2/a"),
            ("A=/workspace:/tmp/b", "A=/r/1:/tmp/t/b"),
            ("/workspaces", "/workspaces"),
            ("/home/workspace", "/home/workspace"),
            ("B=http://127.0.0.1:18080/v1", "B=http://127.0.0.1:4000/v1"),
            ("127.0.0.1:180801", "127.0.0.1:180801"),
        ] {
            assert_eq!(translation.apply(text.as_ref()), expected);
        }
    }
}
