//! Which trials a step and an evaluation consist of, and how a wave of them is told to people and files.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::RunError;
use super::evaluation::{Evaluation, EvaluationTrial};
use super::machinery::Machinery;
use super::progress::Progress;
use crate::config::{Config, Training};
use crate::record::{EpisodeId, GroupId, InfraFailure, Outcome, PolicyVersion, Termination, TrialId};
use crate::rollout::{Purpose, RolloutError, TaskOrder, TrialResult, TrialSpec, derive_seed, run_wave};
use crate::task::{Dataset, Split, Task};
use crate::telemetry::{Event, EventLog};

/// When so many trials have ended and broken machinery ended each, the wave is given up.
const GIVE_UP_AFTER: usize = 64;

/// What seeds are for; numbers that must never change.
const TRAINING_SEEDS: u64 = 1;
const EVALUATION_SEEDS: u64 = 2;

/// The dataset that the config names.
///
/// # Errors
/// None is named, or it cannot be read: file and line.
pub fn dataset(config: &Config) -> Result<Dataset, RunError> {
    let path = config.training.dataset.as_ref().ok_or_else(|| RunError::Failed {
        doing: "opening the dataset",
        cause: "none is named: pass --dataset FILE or set training.dataset in train.toml".to_owned(),
    })?;
    Dataset::load(path).map_err(|error| RunError::failed("opening the dataset")(error.into()))
}

/// The first `most` tasks of a split in the dataset's order; 0: all.
pub fn tasks(dataset: &Dataset, split: Split, most: usize) -> Vec<Arc<Task>> {
    let most = if most == 0 { usize::MAX } else { most };
    dataset.split(split).take(most).cloned().map(Arc::new).collect()
}

/// Trials of one policy version: whole groups, in the order of the run's tasks.
pub fn training_specs(
    training: &Training,
    order: &TaskOrder,
    tasks: &[Arc<Task>],
    version: PolicyVersion,
    incarnation: u32,
) -> Result<Vec<TrialSpec>, RunError> {
    let groups = training.groups_per_rollout_batch();
    let first_group = version.0 * groups as u64;
    let chosen = order.groups(first_group, groups);
    let mut specs = Vec::with_capacity(training.rollout_batch_size);
    for (group, task) in (first_group..).zip(chosen) {
        for member in 0..training.group_size as u64 {
            specs.push(TrialSpec {
                trial_id: trial_id(&format!("v{}-g{group}-{member}", version.0), incarnation)?,
                task: Arc::clone(&tasks[task]),
                episode: EpisodeId(group * training.group_size as u64 + member),
                group: GroupId(group),
                purpose: Purpose::Training,
                seed: derive_seed(&[training.seed, TRAINING_SEEDS, group, member]),
                temperature: training.temperature,
                is_greedy: false,
            });
        }
    }
    Ok(specs)
}

/// Trials of a held-out evaluation: `samples` a task at `temperature`, then a greedy one if asked for.
/// Seeds do not depend on the step, so that before and after differ by the policy alone.
pub fn evaluation_specs(
    training: &Training,
    tasks: &[Arc<Task>],
    samples: usize,
    has_greedy: bool,
    label: &str,
    incarnation: u32,
) -> Result<Vec<TrialSpec>, RunError> {
    let mut specs = Vec::new();
    for (index, task) in tasks.iter().enumerate() {
        for sample in 0..samples + usize::from(has_greedy) {
            let is_greedy = sample == samples;
            specs.push(TrialSpec {
                trial_id: trial_id(&format!("eval-{label}-t{index}-{sample}"), incarnation)?,
                task: Arc::clone(task),
                episode: EpisodeId(sample as u64),
                group: GroupId(index as u64),
                purpose: Purpose::Evaluation,
                seed: derive_seed(&[training.seed, EVALUATION_SEEDS, index as u64, sample as u64]),
                temperature: if is_greedy { 0.0 } else { training.temperature },
                is_greedy,
            });
        }
    }
    Ok(specs)
}

/// A resumed run's trials have ids of their own: the killed run's calls stay in the captures.
fn trial_id(name: &str, incarnation: u32) -> Result<TrialId, RunError> {
    let suffix = if incarnation == 0 { String::new() } else { format!("-r{incarnation}") };
    format!("{name}{suffix}")
        .parse()
        .map_err(|error: crate::record::InvalidId| RunError::failed("naming a trial")(error.into()))
}

/// A wave that has ended.
pub struct Wave {
    pub results: Vec<TrialResult>,
    pub wall: Duration,
}

impl Wave {
    pub fn invalid(&self) -> usize {
        self.results.iter().filter(|result| matches!(result.outcome, Outcome::Invalid { .. })).count()
    }
}

/// Runs trials of `version`, telling of each as it ends.
///
/// # Errors
/// A wave in which machinery failed every trial, or in which the policy answered none, stops the run with the first
/// failure; so does what no trial can do without.
pub async fn wave(
    machinery: &Machinery,
    specs: Vec<TrialSpec>,
    version: PolicyVersion,
    events: &mut EventLog,
    progress: &Progress,
    stop: &CancellationToken,
) -> Result<Wave, RunError> {
    let started = Instant::now();
    let mut telemetry_error = None;
    let cancel = stop.child_token();
    let (mut ended, mut failures) = (0_usize, Vec::new());
    let results = run_wave(&machinery.env, specs, machinery.max_concurrent, &cancel, &mut |result| {
        progress.advance(1);
        let told = tell(result, version, events);
        telemetry_error = telemetry_error.take().or(told.err());
        ended += 1;
        failures.extend(why_nothing(result));
        // Nothing works: the rest would only say so again.
        if ended == GIVE_UP_AFTER && failures.len() == ended {
            cancel.cancel();
        }
    })
    .await;
    let results = match results {
        Ok(results) => results,
        Err(RolloutError::Cancelled) if !stop.is_cancelled() && !failures.is_empty() => {
            return Err(RunError::AllInvalid(failures.swap_remove(0)));
        }
        Err(RolloutError::Cancelled) => return Err(RunError::Stopped),
        Err(other) => return Err(RunError::failed("running trials")(other.into())),
    };
    if let Some(error) = telemetry_error {
        return Err(RunError::failed("writing events.jsonl")(error.into()));
    }
    let wave = Wave { results, wall: started.elapsed() };
    let invalid = wave.invalid();
    if invalid > 0 {
        tracing::warn!("filtered {invalid} invalid trajectories due to sandbox termination");
    }
    // One alone whose policy never answered is a slow policy's; a whole wave of them is an upstream that hangs.
    let is_one_graded = wave.results.len() == 1 && invalid == 0;
    match failures.first() {
        Some(failure) if failures.len() == wave.results.len() && !is_one_graded => {
            Err(RunError::AllInvalid(failure.clone()))
        }
        _ => Ok(wave),
    }
}

/// Why a trial says nothing of the policy, if so.
fn why_nothing(result: &TrialResult) -> Option<String> {
    let trial = &result.spec.trial_id;
    Some(match &result.outcome {
        Outcome::Invalid { failure } => format!("{trial}: {}", describe(failure)),
        Outcome::Valid { .. } if result.turns > 0 || result.sampled_tokens > 0 => return None,
        Outcome::Valid { termination: Termination::AgentTimeout } => {
            "the policy answered no call until the trial's time was up: see that the upstream answers, or raise \
             training.async.long_tail_timeout_sec"
                .to_owned()
        }
        Outcome::Valid { termination: Termination::AgentOom } => {
            "the harness ran out of memory before the policy had answered a call: raise sandbox.memory_mb".to_owned()
        }
        Outcome::Valid { .. } => {
            format!("the harness ended before the policy had answered a call: see trials/{trial}/stderr.log")
        }
    })
}

fn tell(
    result: &TrialResult,
    version: PolicyVersion,
    events: &mut EventLog,
) -> Result<(), crate::telemetry::TelemetryError> {
    let (trial_id, task_id) = (result.spec.trial_id.clone(), result.spec.task.instance_id.clone());
    if let Outcome::Invalid { failure } = &result.outcome {
        let text = format!("invalid_trajectory trial={trial_id} task={task_id}: {}", describe(failure));
        tracing::warn!("{text}");
        let (trial_id, task_id) = (trial_id.clone(), task_id.clone());
        events.write(&Event::InvalidTrajectory { trial_id, task_id, failure: failure.clone() })?;
    }
    events.write(&Event::TrialFinished {
        trial_id,
        task_id,
        policy_version: version,
        outcome: result.outcome.clone(),
        reward: result.reward,
        turns: result.turns as u64,
        sampled_tokens: result.sampled_tokens,
        seconds: result.wall.as_secs_f64(),
    })
}

fn describe(failure: &InfraFailure) -> String {
    match failure {
        InfraFailure::SandboxStart(cause) => format!("the sandbox could not be made: {cause}"),
        InfraFailure::SandboxLost(cause) => format!("the sandbox was lost: {cause}"),
        InfraFailure::HostOom => "the host ran out of memory".to_owned(),
        InfraFailure::Harness(cause) => format!("the harness {cause}"),
        InfraFailure::Engine(cause) => format!("the upstream failed: {cause}"),
        InfraFailure::Verifier(cause) => format!("the verifier could not run: {cause}"),
        InfraFailure::Task(cause) => cause.clone(),
        InfraFailure::Shutdown => "the run was stopped".to_owned(),
    }
}

/// What is evaluated: the policy at this step and version, under this name in messages.
#[derive(Debug, Clone, Copy)]
pub struct At<'a> {
    pub step: u64,
    pub version: PolicyVersion,
    pub label: &'a str,
}

/// Runs the trials of an evaluation, and tells its rates.
///
/// # Errors
/// As [`wave`]; [`RunError::Unbalanced`] when its tokens do not add up.
pub async fn evaluate(
    machinery: &Machinery,
    specs: Vec<TrialSpec>,
    at: At<'_>,
    samples: usize,
    events: &mut EventLog,
    stop: &CancellationToken,
) -> Result<Evaluation, RunError> {
    let At { step, version, label } = at;
    let about = format!("evaluation ({label})");
    let total = specs.len() as u64;
    let progress = Progress::start("evaluation", total).with_lines(&about, total);
    progress.line(&format!("{about}: {total} trials"));
    let wave = wave(machinery, specs, version, events, &progress, stop).await?;
    progress.finish();
    let evaluation = evaluation_of(step, samples, &wave)?;
    let rates = &evaluation.rates;
    let told = |name: &str, rate: Option<f64>| {
        rate.map(|rate| format!("{name} {:.1} %, ", 100.0 * rate)).unwrap_or_default()
    };
    progress.line(&format!(
        "{about}: {}{}{}{:.0} s",
        told("solve rate", rates.solve_rate),
        told("greedy", rates.greedy),
        told(&format!("pass@{samples}"), rates.pass_at_k),
        wave.wall.as_secs_f64(),
    ));
    let event = Event::Evaluation {
        step,
        policy_version: version,
        tasks: rates.tasks as u64,
        samples: samples as u64,
        solve_rate: rates.solve_rate,
        greedy_solve_rate: rates.greedy,
        pass_at_k: rates.pass_at_k,
    };
    events.write(&event).map_err(|error| RunError::failed("writing events.jsonl")(error.into()))?;
    Ok(evaluation)
}

/// Solve rates of an evaluation's trials.
///
/// # Errors
/// [`RunError::Unbalanced`] when its tokens do not add up.
fn evaluation_of(step: u64, samples: usize, wave: &Wave) -> Result<Evaluation, RunError> {
    let trials: Vec<EvaluationTrial> = wave
        .results
        .iter()
        .map(|result| EvaluationTrial {
            task_id: result.spec.task.instance_id.clone(),
            family: result.spec.task.bug_family().unwrap_or("unlabelled").to_owned(),
            is_greedy: result.spec.is_greedy,
            reward: result.reward,
            turns: result.turns,
        })
        .collect();
    let mut evaluation = Evaluation::of(step, samples, &trials);
    for result in &wave.results {
        evaluation.tokens.add_trial(result);
    }
    evaluation.tokens.check()?;
    Ok(evaluation)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rewards 1, 0, … in the order of the trials.
    fn rates(samples: usize, has_greedy: bool) -> super::super::evaluation::Rates {
        let training = Training { temperature: 0.0, ..Training::default() };
        let task = Arc::new(Task { split: Split::Heldout, ..Task::example() });
        let specs = evaluation_specs(&training, &[task], samples, has_greedy, "x", 0).expect("specs");
        let results = specs
            .into_iter()
            .zip([1.0, 0.0].into_iter().cycle())
            .map(|(spec, reward)| TrialResult {
                spec,
                outcome: Outcome::Valid { termination: Termination::Completed },
                reward: Some(reward),
                samples: Vec::new(),
                left_out: Vec::new(),
                breaks: Vec::new(),
                sampled_tokens: 0,
                turns: 1,
                measured_prompts: 0,
                prompt_tokens: 0,
                attempts: 1,
                wall: Duration::ZERO,
                verify: Duration::ZERO,
            })
            .collect();
        evaluation_of(0, samples, &Wave { results, wall: Duration::ZERO }).expect("balanced").rates
    }

    #[test]
    fn samples_at_temperature_0_are_samples_beside_the_greedy_trial() {
        let sampled = rates(4, false);
        assert_eq!((sampled.solve_rate, sampled.greedy, sampled.pass_at_k), (Some(0.5), None, Some(1.0)));
        let both = rates(4, true);
        assert_eq!((both.solve_rate, both.greedy), (Some(0.5), Some(1.0)));
        let greedy = rates(0, true);
        assert_eq!((greedy.solve_rate, greedy.greedy, greedy.pass_at_k), (None, Some(1.0), None));
    }
}
