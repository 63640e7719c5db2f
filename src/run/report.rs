//! `reports/report.json`, and what a person reads at the end.

use std::fmt;

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
            "{} steps in {:.0} s; {} tokens sampled, {} trained; {} invalid trajectories",
            self.steps,
            self.wall_seconds,
            self.tokens.sampled,
            self.tokens.trained,
            self.invalid_trajectories
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
        Ok(())
    }
}
