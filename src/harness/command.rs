//! Any harness that a command line starts.

use std::ffi::OsString;

use super::{BASE_URL, Harness, Launch, PLACEHOLDER_KEY, TrialInput, WORKSPACE};
use crate::sandbox::Exec;

/// A harness given by the config: `harness.command` and `harness.env`.
///
/// The program runs in the workspace, gets the task's statement on standard input, and finds the policy by
/// `OPENAI_BASE_URL`, `OPENAI_API_KEY` (a placeholder) and `OPENAI_MODEL`; `LLM_AUTH_TYPE` is there where the config
/// gives one. It is looked up in the sandbox, so it must be one of the system's or lie in the task's repository.
#[derive(Debug, Clone)]
pub struct CommandLine {
    /// Name in records: the config's `harness.type`.
    pub name: &'static str,
    pub argv: Vec<String>,
    /// In place of [`BASE_URL`].
    pub base_url: Option<String>,
    pub auth_type: Option<String>,
    /// Added to, and stronger than, lego's own variables.
    pub env: Vec<(String, String)>,
}

impl Harness for CommandLine {
    fn name(&self) -> &'static str {
        self.name
    }

    fn version(&self) -> String {
        "command".to_owned()
    }

    fn launch(&self, trial: &TrialInput<'_>) -> Launch {
        let mut env: Vec<(OsString, OsString)> = [
            ("PATH", "/usr/local/bin:/usr/bin:/bin"),
            ("HOME", "/tmp"),
            ("LANG", "C.UTF-8"),
            ("OPENAI_BASE_URL", self.base_url.as_deref().unwrap_or(BASE_URL)),
            ("OPENAI_API_KEY", PLACEHOLDER_KEY),
            ("OPENAI_MODEL", trial.model),
        ]
        .into_iter()
        .chain(self.auth_type.as_deref().map(|kind| ("LLM_AUTH_TYPE", kind)))
        .filter(|(name, _)| !self.env.iter().any(|(set, _)| set == name))
        .map(|(name, value)| (name.into(), value.into()))
        .collect();
        env.extend(self.env.iter().map(|(name, value)| (name.into(), value.into())));
        Launch {
            mounts: Vec::new(),
            exec: Exec {
                argv: self.argv.iter().map(OsString::from).collect(),
                env,
                cwd: WORKSPACE.into(),
                stdin: trial.statement.as_bytes().to_vec(),
                max_output_bytes: trial.max_output_bytes,
                timeout: trial.timeout,
            },
        }
    }
}
