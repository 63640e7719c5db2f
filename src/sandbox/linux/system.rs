//! The allow-list: what of the host's system every sandbox sees, read-only, and the small files of lego's own.

use std::fs;
use std::path::{Path, PathBuf};

use super::wire::Shown;

/// Directories with programs and libraries. On a merged-usr system all but the first are links.
const PROGRAM_DIRECTORIES: [&str; 7] = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];

/// Named parts of /etc that programs need and that hold nothing of the user's.
const ETC: [&str; 9] = [
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust/extracted",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/terminfo",
];

/// Files of lego's own making, in place of the host's.
const FILES: [(&str, &str); 5] = [
    ("/etc/passwd", "root:x:0:0:root:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"),
    ("/etc/group", "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n"),
    ("/etc/hosts", "127.0.0.1 localhost sandbox\n"),
    ("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
    ("/etc/resolv.conf", ""),
];

/// What is always shown, as the plan of a sandbox takes it.
#[derive(Debug, Clone)]
pub struct System {
    pub shown: Vec<Shown>,
    /// (target, link).
    pub links: Vec<(PathBuf, PathBuf)>,
    pub files: Vec<(PathBuf, String)>,
}

impl System {
    /// Looks at this host.
    pub fn of_host() -> Self {
        let mut system = Self {
            shown: Vec::new(),
            links: vec![("/proc/mounts".into(), "/etc/mtab".into())],
            files: FILES.map(|(path, text)| (path.into(), text.to_owned())).into(),
        };
        for path in PROGRAM_DIRECTORIES.map(Path::new) {
            match fs::read_link(path) {
                Ok(target) => system.links.push((target, path.to_owned())),
                Err(_) if path.is_dir() => system.show(path),
                Err(_) => {}
            }
        }
        for path in ETC.map(Path::new) {
            system.show(path);
        }
        system.show_python();
        system
    }

    /// Distributions keep a part of Python's library in /etc, one directory a version.
    fn show_python(&mut self) {
        for entry in fs::read_dir("/etc").into_iter().flatten().flatten() {
            let name = entry.file_name();
            let version = name.to_str().and_then(|name| name.strip_prefix("python"));
            if version.is_some_and(|version| version.contains('.')) {
                self.show(&entry.path());
            }
        }
    }

    /// Adds a path under its own name, wherever on the host it leads; absent ones are left out.
    fn show(&mut self, path: &Path) {
        let Ok(host) = fs::canonicalize(path) else {
            return;
        };
        let is_directory = host.is_dir();
        let inside = path.to_owned();
        // What a link leads to under /usr is there already, without a mount of its own.
        if host != path && host.starts_with("/usr") {
            self.links.push((host, inside));
        } else {
            self.shown.push(Shown { host, inside, is_writable: false, is_directory });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_system_directories_are_shown_and_none_is_writable() {
        let system = System::of_host();
        assert!(system.shown.iter().any(|shown| shown.inside == Path::new("/usr")));
        for shown in &system.shown {
            assert!(!shown.is_writable);
            let is_allowed = ["/usr", "/bin", "/sbin", "/lib", "/etc/"]
                .iter()
                .any(|prefix| shown.host.to_str().unwrap().starts_with(prefix));
            assert!(is_allowed, "{}", shown.host.display());
        }
    }
}
