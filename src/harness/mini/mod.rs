//! The small harness: `lego agent`, a plain tool-calling loop over `/v1/chat/completions`.
//!
//! The agent knows nothing of lego. Its first message is the statement and the numbered lines of the
//! function that the statement names; its tools are `view`, `edit`, `run_tests` and `submit`. An edit that
//! fails the visible tests is rolled back. What its tools answer depends on the workspace alone.

mod agent;
mod client;
mod listing;
mod tests_run;
mod tools;

use std::ffi::OsString;
use std::path::PathBuf;

pub use agent::{Agent, AgentError, AgentOptions, Ended, Report};
pub use client::{Client, ClientError};
pub use tests_run::{DEFAULT_TEST_COMMAND, TestCommand};
pub use tools::Tools;

use super::{BASE_URL, Harness, Launch, PLACEHOLDER_KEY, TrialInput, WORKSPACE};
use crate::sandbox::{Exec, Mount};

/// Where the binary is mounted inside a sandbox.
const BINARY: &str = "/opt/lego/lego";

/// Starts `lego agent`.
#[derive(Debug, Clone)]
pub struct Mini {
    /// The lego binary on the host.
    pub binary: PathBuf,
    /// Model calls a trial.
    pub max_turns: u32,
    /// `max_tokens` of each call; `None` leaves it out.
    pub max_tokens: Option<u32>,
}

impl Mini {
    /// The running binary as the agent.
    ///
    /// # Errors
    /// When the system does not tell where the binary is.
    pub fn this_binary(max_turns: u32, max_tokens: Option<u32>) -> std::io::Result<Self> {
        Ok(Self { binary: std::env::current_exe()?, max_turns, max_tokens })
    }
}

impl Harness for Mini {
    fn name(&self) -> &'static str {
        "mini"
    }

    fn version(&self) -> String {
        env!("CARGO_PKG_VERSION").to_owned()
    }

    fn launch(&self, trial: &TrialInput<'_>) -> Launch {
        let mut argv: Vec<OsString> = vec![BINARY.into(), "agent".into()];
        argv.extend(["--workspace".into(), WORKSPACE.into(), "--issue-file".into(), "-".into()]);
        argv.extend(["--model".into(), trial.model.into()]);
        argv.extend(["--max-turns".into(), self.max_turns.to_string().into()]);
        if let Some(max_tokens) = self.max_tokens {
            argv.extend(["--max-tokens".into(), max_tokens.to_string().into()]);
        }
        let env = [
            ("PATH", "/usr/local/bin:/usr/bin:/bin"),
            ("HOME", "/tmp"),
            ("LANG", "C.UTF-8"),
            ("OPENAI_BASE_URL", BASE_URL),
            ("OPENAI_API_KEY", PLACEHOLDER_KEY),
        ];
        Launch {
            mounts: vec![Mount { host: self.binary.clone(), inside: BINARY.into(), is_writable: false }],
            exec: Exec {
                argv,
                env: env.into_iter().map(|(key, value)| (key.into(), value.into())).collect(),
                cwd: WORKSPACE.into(),
                stdin: trial.statement.as_bytes().to_vec(),
                max_output_bytes: trial.max_output_bytes,
                timeout: trial.timeout,
            },
        }
    }

    fn used_up_turns(&self, stdout: &[u8]) -> bool {
        let line = stdout.trim_ascii_end().rsplit(|&byte| byte == b'\n').next().unwrap_or_default();
        serde_json::from_slice::<Report>(line).is_ok_and(|report| report.ended == Ended::MaxTurns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_its_output_says_how_it_ended() {
        let mini = Mini { binary: "lego".into(), max_turns: 3, max_tokens: None };
        let said = |ended, turns| format!("{}\n", serde_json::json!(Report { ended, turns }));
        assert!(mini.used_up_turns(said(Ended::MaxTurns, 3).as_bytes()));
        assert!(mini.used_up_turns(format!("hello\n{}", said(Ended::MaxTurns, 3)).as_bytes()));
        assert!(!mini.used_up_turns(said(Ended::Submitted, 3).as_bytes()), "in its last turn");
        assert!(!mini.used_up_turns(b"") && !mini.used_up_turns(b"max_turns"));
    }
}
