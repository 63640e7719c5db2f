//! Held-out evaluation: graded trials to solve rates.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{RunError, TokenAccount};
use crate::record::TaskId;

/// One graded evaluation trial. `reward` is `None` for a trial that infrastructure failed.
#[derive(Debug, Clone)]
pub struct EvaluationTrial {
    pub task_id: TaskId,
    /// Bug family, or another label of the dataset; `unlabelled` if it has none.
    pub family: String,
    pub is_greedy: bool,
    pub reward: Option<f64>,
    /// Model calls answered.
    pub turns: usize,
}

/// Rates over a set of tasks. Shares are in `[0, 1]`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    pub tasks: usize,
    /// Mean over tasks of the share of sampled trials solved; `None` without sampled trials.
    pub solve_rate: Option<f64>,
    /// Share of tasks that greedy decoding solves; `None` without greedy trials.
    pub greedy: Option<f64>,
    /// Share of tasks that at least one of the sampled trials solves; `None` without sampled trials.
    pub pass_at_k: Option<f64>,
}

/// An evaluation of one policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Optimizer steps the policy had taken.
    pub step: u64,
    pub samples_per_task: usize,
    pub rates: Rates,
    pub by_family: BTreeMap<String, Rates>,
    /// Mean model calls of a sampled trial.
    pub mean_turns: f64,
    /// Trials that infrastructure failed; they count nowhere else.
    pub invalid_trials: usize,
    /// What became of the tokens it sampled: none trains.
    pub tokens: TokenAccount,
    /// Rewards of the sampled trials by task, then the greedy one.
    pub per_task: Vec<TaskScore>,
}

/// What one task's trials got.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskScore {
    pub task_id: TaskId,
    pub family: String,
    pub sampled: Vec<f64>,
    pub greedy: Option<f64>,
}

impl Evaluation {
    /// A reward of 1 counts as solved; partial credit does not.
    #[must_use]
    pub fn of(step: u64, samples_per_task: usize, trials: &[EvaluationTrial]) -> Self {
        let mut scores: BTreeMap<&TaskId, TaskScore> = BTreeMap::new();
        let (mut turns, mut sampled_trials) = (0, 0);
        for trial in trials {
            let score = scores.entry(&trial.task_id).or_insert_with(|| TaskScore {
                task_id: trial.task_id.clone(),
                family: trial.family.clone(),
                sampled: Vec::new(),
                greedy: None,
            });
            let Some(reward) = trial.reward else { continue };
            if trial.is_greedy {
                score.greedy = Some(reward);
            } else {
                score.sampled.push(reward);
                turns += trial.turns;
                sampled_trials += 1;
            }
        }
        let per_task: Vec<TaskScore> = scores.into_values().collect();
        let mut families: BTreeMap<String, Vec<&TaskScore>> = BTreeMap::new();
        for score in &per_task {
            families.entry(score.family.clone()).or_default().push(score);
        }
        Self {
            step,
            samples_per_task,
            rates: rates(&per_task.iter().collect::<Vec<_>>()),
            by_family: families.into_iter().map(|(family, scores)| (family, rates(&scores))).collect(),
            mean_turns: if sampled_trials == 0 { 0.0 } else { turns as f64 / f64::from(sampled_trials) },
            invalid_trials: trials.iter().filter(|trial| trial.reward.is_none()).count(),
            tokens: TokenAccount::default(),
            per_task,
        }
    }
}

fn rates(scores: &[&TaskScore]) -> Rates {
    let is_solved = |reward: &f64| *reward >= 1.0;
    let sampled: Vec<&&TaskScore> = scores.iter().filter(|score| !score.sampled.is_empty()).collect();
    let greedy: Vec<f64> = scores.iter().filter_map(|score| score.greedy).collect();
    let mean = |sum: f64, count: usize| (count > 0).then(|| sum / count as f64);
    let share = |score: &&&TaskScore| {
        score.sampled.iter().filter(|r| is_solved(r)).count() as f64 / score.sampled.len() as f64
    };
    Rates {
        tasks: scores.len(),
        solve_rate: mean(sampled.iter().map(share).sum(), sampled.len()),
        greedy: mean(greedy.iter().filter(|r| is_solved(r)).count() as f64, greedy.len()),
        pass_at_k: mean(
            sampled.iter().filter(|score| score.sampled.iter().any(is_solved)).count() as f64,
            sampled.len(),
        ),
    }
}

/// Deletes the evaluations in `reports` of steps after `step`: a resumed run takes those steps again, and its policy
/// there may be another.
///
/// # Errors
/// A folder or file that cannot be read or deleted.
pub fn forget_after(reports: &Path, step: u64) -> Result<(), RunError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| RunError::Io { path, source }
    };
    for entry in fs::read_dir(reports).map_err(io(reports))? {
        let path = entry.map_err(io(reports))?.path();
        let is_evaluation =
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("evaluation-"));
        let of_step = || {
            let text = fs::read(&path).ok()?;
            Some(serde_json::from_slice::<Evaluation>(&text).ok()?.step)
        };
        if is_evaluation && of_step().is_some_and(|of_step| of_step > step) {
            fs::remove_file(&path).map_err(io(&path))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(task: &str, family: &str, is_greedy: bool, reward: Option<f64>) -> EvaluationTrial {
        EvaluationTrial {
            task_id: task.parse().expect("id"),
            family: family.to_owned(),
            is_greedy,
            reward,
            turns: 2,
        }
    }

    #[test]
    fn rates_count_tasks_and_leave_broken_trials_out() {
        let evaluation = Evaluation::of(
            3,
            2,
            &[
                trial("a", "compare", false, Some(1.0)),
                trial("a", "compare", false, Some(0.5)),
                trial("a", "compare", true, Some(1.0)),
                trial("b", "logic", false, Some(0.0)),
                trial("b", "logic", false, None),
                trial("b", "logic", true, Some(0.0)),
            ],
        );
        assert_eq!(
            evaluation.rates,
            Rates { tasks: 2, solve_rate: Some(0.25), greedy: Some(0.5), pass_at_k: Some(0.5) }
        );
        assert_eq!(evaluation.invalid_trials, 1);
        assert_eq!(evaluation.by_family["compare"].solve_rate, Some(0.5));
    }

    #[test]
    fn a_resumed_run_keeps_the_evaluations_up_to_its_step() {
        let reports = tempfile::tempdir().expect("folder");
        let write = |label: &str, step: u64| {
            let evaluation = Evaluation::of(step, 1, &[]);
            let text = serde_json::to_vec(&evaluation).expect("json");
            fs::write(reports.path().join(format!("evaluation-{label}.json")), text).expect("written");
        };
        let steps = [("before", 0), ("step-10", 10), ("step-12", 12), ("after", 12)];
        steps.iter().for_each(|(label, step)| write(label, *step));
        fs::write(reports.path().join("report.json"), "{\"step\": 99}").expect("written");
        forget_after(reports.path(), 10).expect("readable");
        let mut left: Vec<_> = fs::read_dir(reports.path())
            .expect("readable")
            .map(|entry| entry.expect("readable").file_name().into_string().expect("text"))
            .collect();
        left.sort();
        assert_eq!(left, ["evaluation-before.json", "evaluation-step-10.json", "report.json"]);
    }
}
