//! `reports/report.json`, and what a person reads at the end.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::account::TokenAccount;
use super::evaluation::Evaluation;
use crate::sandbox::Capabilities;

/// One optimizer step of the training curve.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CurvePoint {
    pub step: u64,
    /// Share of the step's training trials that solved their task.
    pub solve_rate: f64,
    pub reward_mean: f64,
}

/// The result of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    pub heldout_solve_rate_before: Option<f64>,
    pub heldout_solve_rate_after: Option<f64>,
    pub heldout_greedy_before: Option<f64>,
    pub heldout_greedy_after: Option<f64>,
    /// Smallest over all steps; `None` if no step could measure it.
    pub min_prob_correlation: Option<f64>,
    /// Largest over all steps, nats.
    pub max_logprob_diff: Option<f64>,
    /// Of all starts of the run together.
    pub wall_seconds: f64,
    /// Where everything of the run lies; this report is its `reports/report.json`.
    #[serde(default)]
    pub run_folder: PathBuf,
    pub steps: u64,
    pub seed: u64,
    pub lego_version: String,
    /// What the sandboxes could enforce; `is_isolated` is false for the weak sandbox.
    pub sandbox: Capabilities,
    /// Training trials that machinery failed.
    pub invalid_trajectories: u64,
    pub tokens: TokenAccount,
    pub evaluation_before: Option<Evaluation>,
    pub evaluation_after: Option<Evaluation>,
    pub train_curve: Vec<CurvePoint>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |value: Option<f64>| match value {
            Some(value) => format!("{:5.1} %", 100.0 * value),
            None => "    -  ".to_owned(),
        };
        let row = |name: &str, before: Option<f64>, after: Option<f64>| {
            let change = match (before, after) {
                (Some(before), Some(after)) => format!("{:+5.1} points", 100.0 * (after - before)),
                _ => String::new(),
            };
            format!("  {name:<28} {}   {}   {change}", percent(before), percent(after))
        };
        let pass_at_k = |evaluation: &Option<Evaluation>| evaluation.as_ref().and_then(|e| e.rates.pass_at_k);
        let samples = self.evaluation_before.as_ref().map_or(0, |e| e.samples_per_task);
        let tasks = self.evaluation_before.as_ref().map_or(0, |e| e.rates.tasks);
        writeln!(f, "Held-out tasks: {tasks}, {samples} samples each")?;
        writeln!(f, "  {:<28}  before     after", "")?;
        writeln!(f, "{}", row("solve rate", self.heldout_solve_rate_before, self.heldout_solve_rate_after))?;
        writeln!(f, "{}", row("greedy", self.heldout_greedy_before, self.heldout_greedy_after))?;
        let name = format!("pass@{samples}");
        writeln!(f, "{}", row(&name, pass_at_k(&self.evaluation_before), pass_at_k(&self.evaluation_after)))?;
        writeln!(
            f,
            "{} in {:.0} s; {} sampled, {} trained; {}",
            count(self.steps, "step", "steps"),
            self.wall_seconds,
            count(self.tokens.sampled, "token", "tokens"),
            self.tokens.trained,
            count(self.invalid_trajectories, "invalid trajectory", "invalid trajectories"),
        )?;
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value}"));
        write!(
            f,
            "captured against recomputed log-probs: largest difference {}, smallest correlation of probabilities {}",
            number(self.max_logprob_diff),
            number(self.min_prob_correlation)
        )?;
        if !self.sandbox.is_isolated {
            write!(f, "\nThe sandbox was WEAK: trials were not isolated from this machine.")?;
        }
        write!(f, "{}", Places(&self.run_folder))
    }
}

/// The last lines that a person reads: where the rest is.
pub struct Places<'a>(pub &'a Path);

impl fmt::Display for Places<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.0.join("reports/report.json");
        write!(f, "\nrun folder: {}\nreport: {}", self.0.display(), report.display())
    }
}

/// `1 step`, `2 steps`.
pub fn count(number: u64, one: &str, several: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { several })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_say_where_everything_is_and_one_step_is_one_step() {
        let report: Report = serde_json::from_value(serde_json::json!({
            "heldout_solve_rate_before": null, "heldout_solve_rate_after": null, "heldout_greedy_before": null,
            "heldout_greedy_after": null, "min_prob_correlation": null, "max_logprob_diff": null,
            "wall_seconds": 2.0, "run_folder": "/runs/a", "steps": 1, "seed": 0, "lego_version": "0",
            "sandbox": {
                "backend": "embedded", "mode": "", "memory": "none", "processes": "none", "disk": "polled", "tmp": "exact",
                "is_isolated": true,
            },
            "invalid_trajectories": 1, "tokens": TokenAccount { sampled: 2, ..TokenAccount::default() },
            "evaluation_before": null, "evaluation_after": null, "train_curve": [],
        }))
        .expect("a report");
        let text = report.to_string();
        assert!(
            text.contains("\n1 step in 2 s; 2 tokens sampled, 0 trained; 1 invalid trajectory\n"),
            "{text}"
        );
        assert!(text.ends_with("\nrun folder: /runs/a\nreport: /runs/a/reports/report.json"), "{text}");
    }
}
