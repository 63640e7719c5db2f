//! What is special about the weak sandbox: paths and the port inside are the host's, so they are translated.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

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
pub struct PrivateTmp(PathBuf);

impl PrivateTmp {
    /// A new one, readable by its owner only.
    pub fn create(name: &str) -> io::Result<Self> {
        let path = std::env::temp_dir().join(name);
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for PrivateTmp {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.0) {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
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
