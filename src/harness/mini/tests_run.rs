//! Runs the workspace's visible tests as a child with limits.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};

/// Runs the tests of a workspace that says nothing else.
pub const DEFAULT_TEST_COMMAND: &str = "python3 -I -S -B tests/run.py";

const CPU_SECONDS: u64 = 2;
const MEMORY_KIB: u64 = 512 * 1024;
/// Backstop for tests that wait instead of computing; the CPU limit does not depend on the machine's load.
const WALL: Duration = Duration::from_secs(30);
const MAX_OUTPUT_BYTES: u64 = 64 * 1024;
/// Characters of a failure that the model sees.
const MAX_ANSWER_CHARS: usize = 90;

/// How the visible tests are run: a shell command whose output ends in `PASS`, or has a line that starts
/// with `FAIL`.
#[derive(Debug, Clone)]
pub struct TestCommand(pub String);

impl Default for TestCommand {
    fn default() -> Self {
        Self(DEFAULT_TEST_COMMAND.to_owned())
    }
}

impl TestCommand {
    /// `PASS`, or the first failure.
    ///
    /// # Errors
    /// When the shell cannot be started.
    pub async fn run(&self, workspace: &Path) -> std::io::Result<String> {
        let script = format!("ulimit -v {MEMORY_KIB}; ulimit -t {CPU_SECONDS}; exec {}", self.0);
        let mut child = Command::new("/bin/sh")
            .args(["-c", &script])
            .current_dir(workspace)
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("LANG", "C.UTF-8")
            .env("PYTHONHASHSEED", "0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        match tokio::time::timeout(WALL, finish(&mut child)).await {
            Ok(result) => result,
            Err(_) => Ok("FAIL tests did not finish".to_owned()),
        }
    }
}

async fn finish(child: &mut Child) -> std::io::Result<String> {
    let mut output = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(MAX_OUTPUT_BYTES).read_to_end(&mut output).await?;
    }
    let status = child.wait().await?;
    let text = String::from_utf8_lossy(&output);
    if status.success() && text.lines().last() == Some("PASS") {
        return Ok("PASS".to_owned());
    }
    let failure = text.lines().find(|line| line.starts_with("FAIL"));
    Ok(match failure {
        Some(line) => line.chars().take(MAX_ANSWER_CHARS).collect(),
        None if status.code().is_none() => "FAIL tests did not finish".to_owned(),
        None => "FAIL tests broke".to_owned(),
    })
}
