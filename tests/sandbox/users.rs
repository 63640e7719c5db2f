//! The same for an ordinary user. Run by root, these tests take another user's id.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use super::LEGO;

/// lego as user 12345 with a place of its own; `None`: we are no root, so the other tests have shown it.
struct User {
    directory: tempfile::TempDir,
}

impl User {
    const ID: u32 = 12345;

    fn new() -> Option<Self> {
        // SAFETY: geteuid cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let user = Self { directory };
        std::fs::set_permissions(user.directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::copy(LEGO, user.binary()).unwrap();
        let work = user.work();
        std::fs::create_dir(&work).unwrap();
        std::os::unix::fs::chown(&work, Some(Self::ID), Some(Self::ID)).unwrap();
        Some(user)
    }

    fn binary(&self) -> PathBuf {
        self.directory.path().join("lego")
    }

    fn work(&self) -> PathBuf {
        self.directory.path().join("work")
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let id = Self::ID.to_string();
        Command::new("setpriv")
            .args(["--reuid", &id, "--regid", &id, "--clear-groups"])
            .arg(self.binary())
            .args(arguments)
            .current_dir(self.work())
            .env("TMPDIR", self.work())
            .output()
            .unwrap()
    }
}

#[test]
fn an_ordinary_user_gets_the_same_sandbox() {
    let Some(user) = User::new() else { return };
    let mount = format!("{}:/workspace:rw", user.work().display());
    let script = "id -u; echo made > /workspace/made; cat /proc/self/status | grep -E 'CapEff|Seccomp:'; \
                  ls / ; unshare -U true 2>/dev/null && echo nested; exit 5";
    let arguments = ["sandbox", "run", "--mount", &mount, "--", "/bin/sh", "-c", script];
    let output = user.run(&arguments);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(5), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.starts_with("0\nCapEff:\t0000000000000000\nSeccomp:\t2\n"), "{text}");
    assert!(!text.contains("nested") && !text.contains("home"), "{text}");
    assert_eq!(std::fs::read_to_string(user.work().join("made")).unwrap(), "made\n");
}

#[test]
fn without_control_groups_memory_is_watched_and_processes_are_limited() {
    let Some(user) = User::new() else { return };
    // Eight processes, each under the limit of a single one.
    let script = "import os, time\nfor i in range(8):\n  if os.fork() == 0: break\nx = b'x' * (60 << 20)\ntime.sleep(100)";
    let arguments = ["sandbox", "run", "--memory", "200", "--", "/usr/bin/python3", "-c", script];
    let output = user.run(&arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(137), "{errors}");
    assert!(errors.contains("out of memory"), "{errors}");
    let script = "import os, time\nn = 0\ntry:\n  while n < 500:\n    if os.fork() == 0: time.sleep(100)\n    n += 1\nexcept OSError: print(n)";
    let arguments = ["sandbox", "run", "--processes", "30", "--", "/usr/bin/python3", "-c", script];
    let output = user.run(&arguments);
    let count: u32 = String::from_utf8_lossy(&output.stdout).trim().parse().unwrap();
    assert!((20..=30).contains(&count), "{count}");
}

#[test]
fn the_weak_sandbox_works_for_an_ordinary_user() {
    let Some(user) = User::new() else { return };
    let mount = format!("{}:/workspace:rw", user.work().display());
    let script = "echo made > /workspace/made; cat /etc/shadow /proc/1/status 2>/dev/null; ls /; pwd; exit 5";
    let output = user.run(&[
        "sandbox",
        "run",
        "--backend",
        "weak",
        "--weak-sandbox",
        "--mount",
        &mount,
        "--cwd",
        "/workspace",
        "--",
        "/bin/sh",
        "-c",
        script,
    ]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{errors}");
    assert!(errors.contains("weak sandbox"), "{errors}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text.trim(), user.work().display().to_string());
    assert_eq!(std::fs::read_to_string(user.work().join("made")).unwrap(), "made\n");
}
