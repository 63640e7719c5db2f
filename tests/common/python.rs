//! A Python virtual environment for tests that check lego from outside, made once under `target/`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The interpreter of `target/venv`, with `packages` installed. Test processes wait for one another.
///
/// # Panics
/// Python 3, its `venv` module or a package cannot be had: the message says what to install.
pub fn venv(packages: &[&str]) -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("target");
    fs::create_dir_all(&target).expect("target folder");
    let lock = File::create(target.join("venv.lock")).expect("lock file");
    lock.lock().expect("lock");
    let venv = target.join("venv");
    let python = venv.join("bin/python");
    if !venv.join("made").exists() {
        let mut make = Command::new("python3");
        make.args(["-m", "venv", "--clear"]).arg(&venv);
        run(
            make,
            "make a virtual environment: install Python 3 with its venv module (Debian, Ubuntu: apt install python3-venv)",
        );
        File::create(venv.join("made")).expect("marker");
    }
    let marker = |package: &str| venv.join(format!("has-{package}"));
    let missing: Vec<&str> = packages.iter().copied().filter(|p| !marker(p).exists()).collect();
    if !missing.is_empty() {
        let mut install = Command::new(&python);
        install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
        install.args(&missing);
        run(install, "install packages from PyPI with pip: check the network or pip's index");
        for package in missing {
            File::create(marker(package)).expect("marker");
        }
    }
    python
}

/// A folder under `target/` with these packages (`name==version`) alone, for `sys.path`: what they depend on is not
/// installed, so that definitions can be read of packages that would bring a GPU's libraries.
///
/// # Panics
/// As [`venv`].
#[allow(dead_code, reason = "not every test binary needs one")]
pub fn alone(python: &Path, packages: &[&str]) -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("target");
    let lock = File::create(target.join("venv.lock")).expect("lock file");
    lock.lock().expect("lock");
    let folder = target.join("python-alone");
    let marker = |package: &str| folder.join(format!("has-{package}"));
    let missing: Vec<&str> = packages.iter().copied().filter(|p| !marker(p).exists()).collect();
    if !missing.is_empty() {
        let mut install = Command::new(python);
        install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]);
        // Definitions may be of a package that wants a newer Python for the rest of it.
        install.args(["--ignore-requires-python", "--upgrade", "--target"]).arg(&folder).args(&missing);
        run(install, "install packages from PyPI with pip: check the network or pip's index");
        for package in missing {
            File::create(marker(package)).expect("marker");
        }
    }
    folder
}

/// Runs a script of `tests/python` and gives its standard output.
///
/// # Panics
/// It fails.
#[allow(dead_code, reason = "not every test binary runs a script")]
pub fn script(python: &Path, name: &str, arguments: &[&str]) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python").join(name);
    let mut command = Command::new(python);
    command.arg(script).args(arguments);
    run(command, "run a test script")
}

fn run(mut command: Command, what: &str) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("cannot {what}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "cannot {what}\n{command:?}: {}\n{text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}
