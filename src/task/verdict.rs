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
    /// 1 if resolved, else 0; with partial credit the share of tests that passed.
    pub reward: f64,
    /// Every test of `FAIL_TO_PASS` and `PASS_TO_PASS` passed, and nothing speaks against it.
    pub resolved: bool,
    /// Each of them by name.
    pub tests: BTreeMap<String, TestResult>,
    /// What speaks against the results alone, or why there are none.
    pub note: Option<String>,
    /// Test files and folders that the diff touched and that were put back.
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
            resolved: false,
            tests,
            note: Some(note),
            restored_paths: Vec::new(),
            evidence: None,
        }
    }

    /// The share of tests that passed; 1 only if resolved.
    fn passed_share(&self) -> f64 {
        let passed = self.tests.values().filter(|&&result| result == TestResult::Passed).count();
        if passed == self.tests.len() {
            return f64::from(u8::from(self.resolved));
        }
        // Counts of tests are far below 2^52.
        #[expect(clippy::cast_precision_loss)]
        let share = passed as f64 / self.tests.len() as f64;
        share
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
    let has_all_passed = tests.values().all(|&result| result == TestResult::Passed);
    let note = objection(output, evidence);
    let mut verdict = Verdict {
        reward: 0.0,
        resolved: has_all_passed && note.is_none(),
        tests,
        note,
        restored_paths: Vec::new(),
        evidence: Some(evidence.clone()),
    };
    if verdict.resolved || has_partial_credit {
        verdict.reward = verdict.passed_share();
    }
    verdict
}

/// How the runner ended, where its results do not explain it.
fn objection(output: &RunnerOutput, evidence: &ExitEvidence) -> Option<String> {
    if evidence.timed_out {
        return Some("the tests did not finish in time".to_owned());
    }
    if evidence.oom_kills.is_some_and(|kills| kills > 0) {
        return Some("the tests ran out of memory".to_owned());
    }
    let expected = i32::from(!output.tests.values().all(|&passed| passed));
    if evidence.code == Some(expected) {
        return None;
    }
    let ended = match (evidence.code, evidence.signal) {
        (Some(code), _) => format!("code {code}"),
        (None, signal) => format!("signal {}", signal.unwrap_or(0)),
    };
    Some(format!("the runner ended with {ended}, which its results do not explain"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task() -> Task {
        Task { fail_to_pass: vec!["a".into(), "b".into()], pass_to_pass: vec!["c".into()], ..Task::example() }
    }

    fn graded(stdout: &str, code: i32) -> Verdict {
        let evidence = ExitEvidence { code: Some(code), ..ExitEvidence::default() };
        grade(&task(), &parse(stdout.as_bytes(), "n0"), &evidence, true)
    }

    #[test]
    fn only_lines_under_the_nonce_count() {
        let all = "n0 ready\nn0 PASS a\nn0 PASS b\nn0 PASS c\n";
        assert!(graded(all, 0).resolved);
        let fake = "n1 ready\nPASS a\nPASS b\nn0PASS c\n";
        assert!(!parse(fake.as_bytes(), "n0").is_ready);
        assert_eq!(graded(fake, 0).reward, 0.0);
    }

    #[test]
    fn a_missing_result_is_a_failed_test() {
        let verdict = graded("n0 ready\nn0 PASS a\nn0 PASS c\n", 0);
        assert!(!verdict.resolved);
        assert_eq!(verdict.tests["b"], TestResult::Missing);
        assert!((verdict.reward - 2.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn a_test_reported_twice_has_failed_if_it_failed_once() {
        let verdict = graded("n0 FAIL a\nn0 PASS a\nn0 PASS b\nn0 PASS c\n", 1);
        assert_eq!(verdict.tests["a"], TestResult::Failed);
    }

    #[test]
    fn the_exit_code_has_to_agree() {
        let all = "n0 ready\nn0 PASS a\nn0 PASS b\nn0 PASS c\n";
        for code in [1, 137] {
            let verdict = graded(all, code);
            assert!(!verdict.resolved && verdict.note.is_some());
            assert_eq!(verdict.reward, 0.0, "all passed, but nobody believes it");
        }
        assert!(graded("n0 PASS a\nn0 FAIL b\nn0 PASS c\n", 1).note.is_none());
        let evidence = ExitEvidence { timed_out: true, signal: Some(9), ..ExitEvidence::default() };
        assert!(!grade(&task(), &parse(all.as_bytes(), "n0"), &evidence, false).resolved);
    }
}
