//! From the runner's output to a verdict: pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Task;
use crate::record::ExitEvidence;

/// How one hidden test ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TestResult {
    Passed,
    Failed,
    /// No result: counts as failed.
    Missing,
}

/// What the hidden tests said of a trial's diff.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// 1 if solved, else 0; with partial credit the share of tests that passed.
    pub reward: f64,
    /// Every test of `FAIL_TO_PASS` and `PASS_TO_PASS` passed.
    pub is_solved: bool,
    /// Each of them by name.
    pub tests: BTreeMap<String, TestResult>,
    /// Why it is not what the test results alone would say, or why there are none.
    pub note: Option<String>,
    /// Test files that the diff touched and that were put back.
    pub restored_paths: Vec<String>,
    /// How the runner ended, if it ran.
    pub evidence: Option<ExitEvidence>,
}

impl Verdict {
    /// The verdict on a diff that never came to the tests.
    #[must_use]
    pub fn rejected(task: &Task, note: String) -> Self {
        let tests = ids(task).map(|id| (id.clone(), TestResult::Missing)).collect();
        Self {
            reward: 0.0,
            is_solved: false,
            tests,
            note: Some(note),
            restored_paths: Vec::new(),
            evidence: None,
        }
    }
}

fn ids(task: &Task) -> impl Iterator<Item = &String> {
    task.fail_to_pass.iter().chain(&task.pass_to_pass)
}

/// What the runner printed under its nonce.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct RunnerOutput {
    /// The runner had read its tests; before that nothing of the program ran.
    pub is_ready: bool,
    /// Results by test name.
    pub tests: BTreeMap<String, bool>,
}

/// Reads the lines that start with the nonce; whatever else is printed does not count.
pub(super) fn parse(stdout: &[u8], nonce: &str) -> RunnerOutput {
    let mut output = RunnerOutput::default();
    for line in String::from_utf8_lossy(stdout).lines() {
        let Some(rest) = line.strip_prefix(nonce).and_then(|rest| rest.strip_prefix(' ')) else {
            continue;
        };
        match rest.split_once(' ') {
            None if rest == "ready" => output.is_ready = true,
            Some(("PASS", name)) => {
                // A test that was reported twice has failed if it failed once.
                output.tests.entry(name.to_owned()).or_insert(true);
            }
            Some(("FAIL", name)) => {
                output.tests.insert(name.to_owned(), false);
            }
            _ => {}
        }
    }
    output
}

/// Grades a run of the hidden tests: a missing result is a failed test, and the exit code has to agree.
pub(super) fn grade(
    task: &Task,
    output: &RunnerOutput,
    evidence: &ExitEvidence,
    has_partial_credit: bool,
) -> Verdict {
    let tests: BTreeMap<String, TestResult> = ids(task)
        .map(|id| {
            let result = match output.tests.get(id) {
                Some(true) => TestResult::Passed,
                Some(false) => TestResult::Failed,
                None => TestResult::Missing,
            };
            (id.clone(), result)
        })
        .collect();
    let passed = tests.values().filter(|&&result| result == TestResult::Passed).count();
    let has_all_passed = passed == tests.len();
    let expected_code = i32::from(!output.tests.values().all(|&passed| passed));
    let note = if evidence.timed_out {
        Some("the tests did not finish in time".to_owned())
    } else if evidence.oom_kills.is_some_and(|kills| kills > 0) {
        Some("the tests ran out of memory".to_owned())
    } else if evidence.code != Some(expected_code) {
        let ended = match (evidence.code, evidence.signal) {
            (Some(code), _) => format!("code {code}"),
            (None, signal) => format!("signal {}", signal.unwrap_or(0)),
        };
        Some(format!("the runner ended with {ended}, which its results do not explain"))
    } else {
        None
    };
    let is_solved = has_all_passed && note.is_none();
    let share = || {
        // Counts of tests are far below 2^52.
        #[expect(clippy::cast_precision_loss)]
        let share = passed as f64 / tests.len() as f64;
        share
    };
    let reward = match (is_solved, has_partial_credit && !has_all_passed) {
        (true, _) => 1.0,
        (false, true) => share(),
        (false, false) => 0.0,
    };
    Verdict {
        reward,
        is_solved,
        tests,
        note,
        restored_paths: Vec::new(),
        evidence: Some(evidence.clone()),
    }
}
