//! `lego train`, top to bottom: start, evaluate, step after step, evaluate, report.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::batch::{Batch, Idle};
use super::carried::{Carried, is_reached};
use super::evaluation::{self, Evaluation};
use super::folder::{RunFolder, RunKind, write_json};
use super::inputs::{self, Begun};
use super::machinery::{Machinery, Places};
use super::metrics::{StepTimes, evaluation_row, rows};
use super::progress::Progress;
use super::report::Report;
use super::waves;
use super::{RunError, learner, policy};
use crate::config::{Config, Environment, Use};
use crate::engine::Engine;
use crate::model::Model;
use crate::proxy::LocalTokenizers;
use crate::rollout::TaskOrder;
use crate::task::{Split, Task};
use crate::telemetry::{Event, EventLog, LogFile, MetricValue, RunMetrics, log_to_file, say};
use crate::train::{Checkpoints, Learner, StepMetrics, TrainError};

/// What is not in the config files.
#[derive(Debug, Clone, Default)]
pub struct TrainOptions {
    /// The run folder; by default a new one under the log folder.
    pub output_dir: Option<PathBuf>,
    /// Go on with the run in `output_dir`, or with the newest one.
    pub resume: bool,
    /// The weak sandbox may be used.
    pub allow_weak_sandbox: bool,
}

/// A run while it goes on.
struct Run {
    config: Config,
    folder: RunFolder,
    train_tasks: Vec<Arc<Task>>,
    heldout_tasks: Vec<Arc<Task>>,
    order: TaskOrder,
    learner: Learner,
    checkpoints: Checkpoints,
    companions: Vec<PathBuf>,
    engine: Engine,
    machinery: Machinery,
    metrics: RunMetrics,
    events: EventLog,
    carried: Carried,
    /// The learner is ahead of `carried`: the steps of a policy version are being taken and written down.
    is_midway: bool,
    idle: Idle,
    /// Step of the newest checkpoint.
    saved_at: Option<u64>,
    started: Instant,
    stop: CancellationToken,
    /// `train.log` gets lines as long as this lives.
    _log: LogFile,
}

/// Trains the policy and gives the report. Cancelling `stop` ends the run cleanly: sandboxes gone, captures
/// durable, a checkpoint of the last step.
///
/// # Errors
/// [`RunError`]; [`RunError::Stopped`] after `stop`.
pub async fn train(
    config: Config,
    options: TrainOptions,
    stop: CancellationToken,
) -> Result<Report, RunError> {
    let mut run = Run::start(config, options, stop).await?;
    let result = run.go().await;
    if let Err(error) = &result {
        run.leave(error);
    }
    run.machinery.stop().await;
    if let Some(then) = result.as_ref().err().and_then(RunError::resumes) {
        let folder = run.folder.root().display();
        say(&format!("`lego train --resume --output-dir {folder}` goes on with it{then}"));
    }
    run.folder.leave_scratch(result)
}

impl Run {
    async fn start(config: Config, options: TrainOptions, stop: CancellationToken) -> Result<Self, RunError> {
        let started = Instant::now();
        let runs = config.training.observability.log_dir.clone();
        // A run that is resumed has a config of its own; a new one gets a folder once its input is good.
        let resumed = match (&options.output_dir, options.resume) {
            (Some(dir), true) => Some(RunFolder::resume(dir)?),
            (None, true) => Some(RunFolder::resume(&RunFolder::newest(&runs)?)?),
            (_, false) => None,
        };
        let config = match &resumed {
            Some(folder) => {
                let own = Config::load_resolved(&folder.resolved_config(), Environment::from_process())?;
                config.flag_against(&own).map_or(Ok(()), |flag| Err(RunError::OtherConfig(flag)))?;
                let others = config.files_against(&own);
                if !others.is_empty() {
                    let others = others.join(", ");
                    tracing::warn!(
                        "the run keeps its own config; the files here set other values of {others}"
                    );
                }
                own
            }
            None => config,
        };
        config.refuse_unsupported(Use::Train)?;
        let tokenizers = LocalTokenizers::load(&config)?;

        let dataset = waves::dataset(&config)?;
        let train_tasks = waves::tasks(&dataset, Split::Train, 0);
        let heldout_tasks = waves::tasks(&dataset, Split::Heldout, config.training.eval_tasks);
        let order =
            TaskOrder::new(train_tasks.len(), config.training.seed).ok_or_else(|| RunError::Failed {
                doing: "opening the dataset",
                cause: "it has no task with split = \"train\"".to_owned(),
            })?;

        let model_path = config.model_path().to_owned();
        let model =
            Model::load(&model_path).map_err(|error| RunError::failed("loading the policy")(error.into()))?;
        let mut learner = learner::new(&config.training, model)?;
        learner.stop_with(stop.clone());
        let folder = match (resumed, &options.output_dir) {
            (Some(folder), _) => folder,
            (None, Some(dir)) => RunFolder::create(dir, RunKind::Train)?,
            (None, None) => RunFolder::create_in(&runs, RunKind::Train)?,
        };
        if !options.resume {
            folder.keep_config(&config)?;
        }
        inputs::check(folder.root(), &config, Begun::of(&folder, options.resume))?;
        let log = log_to_file(&folder.root().join("train.log"))
            .map_err(|error| RunError::failed("opening train.log")(error.into()))?;
        let checkpoints = Checkpoints::new(folder.checkpoints(), config.training.keep_checkpoints);
        let newest = checkpoints
            .latest()
            .map_err(|error| RunError::failed("looking for checkpoints")(error.into()))?;
        let mut carried = Carried::default();
        if let Some(dir) = &newest {
            let state = learner
                .restore(dir)
                .map_err(|error| RunError::failed("reading the last checkpoint")(error.into()))?;
            carried = serde_json::from_value(state)
                .map_err(|error| RunError::Broken { path: dir.clone(), cause: error.to_string() })?;
        }
        let resumed_at = options.resume.then_some(carried.step);
        if let Some(step) = resumed_at {
            evaluation::forget_after(&folder.reports(), step)?;
        }
        let model = Arc::new(learner.model().clone());
        let (engine, served) = policy::embedded(&config, &model_path, model, carried.version)?;
        let weak = options.allow_weak_sandbox;
        let machinery =
            Machinery::start(&config, &dataset, served, &tokenizers, Places::of(&folder), weak).await;
        let machinery = machinery.or_else(|error| folder.leave_scratch(Err(error)))?;
        if !options.resume {
            folder.begin()?;
        }
        let metrics = RunMetrics::open(folder.root(), resumed_at)
            .map_err(|error| RunError::failed("opening metrics.parquet")(error.into()))?;
        let mut events = EventLog::open(&folder.root().join("events.jsonl"))
            .map_err(|error| RunError::failed("opening events.jsonl")(error.into()))?;
        events
            .write(&Event::RunStarted {
                version: version_text(),
                seed: config.training.seed,
                incarnation: folder.incarnation(),
                resumed_at_step: resumed_at,
            })
            .map_err(|error| RunError::failed("writing events.jsonl")(error.into()))?;
        say(&format!("run folder: {}", folder.root().display()));
        Ok(Self {
            companions: companions(&model_path),
            saved_at: newest.map(|_| carried.step),
            config,
            folder,
            train_tasks,
            heldout_tasks,
            order,
            learner,
            checkpoints,
            engine,
            machinery,
            metrics,
            events,
            carried,
            is_midway: false,
            idle: Idle::default(),
            started,
            stop,
            _log: log,
        })
    }

    /// The whole run.
    async fn go(&mut self) -> Result<Report, RunError> {
        let before = self.evaluation("before").await?;
        let training = self.config.training.clone();
        if self.carried.step > 0 {
            say(&format!("going on from step {} of {}", self.carried.step, training.max_steps));
        }
        // One that the run was stopped in.
        self.due_evaluation().await?;
        let progress = Progress::start("training", training.max_steps);
        progress.set_position(self.carried.step);
        while self.carried.step < training.max_steps {
            let before = self.carried.step;
            self.step(&progress).await?;
            if is_reached(training.checkpoint_interval, before, self.carried.step) {
                self.checkpoint()?;
            }
            self.due_evaluation().await?;
        }
        progress.finish();
        if self.saved_at != Some(self.carried.step) {
            self.checkpoint()?;
        }
        let after = self.evaluation("after").await?;
        let wall_seconds = self.folder.keep_wall(self.started.elapsed().as_secs_f64())?;
        let report = self.report(before, after, wall_seconds);
        write_json(&self.folder.reports().join("report.json"), &report)?;
        self.event(&Event::RunFinished { step: report.steps, seconds: report.wall_seconds })?;
        Ok(report)
    }

    /// One policy version: sample, train, publish.
    async fn step(&mut self, progress: &Progress) -> Result<(), RunError> {
        let mut times = StepTimes::start();
        let (before, version) = (self.carried.step, self.carried.version);
        let training = self.config.training.clone();
        let steps = (training.steps_per_rollout_batch() as u64).min(training.max_steps - before);
        let mut specs = waves::training_specs(
            &training,
            &self.order,
            &self.train_tasks,
            version,
            self.folder.incarnation(),
        )?;
        // The run's last steps may be fewer: then so are the trials.
        specs.truncate(steps as usize * training.batch_size);
        let trials = Progress::start("trials", specs.len() as u64);
        let wave =
            waves::wave(&self.machinery, specs, version, &mut self.events, &trials, &self.stop).await?;
        trials.finish();
        times.rollout = wave.wall;
        let batch = Batch::of(&training, version, &wave.results);
        if let Some(message) = self.idle.look(&batch)? {
            tracing::warn!("{message}");
            self.event(&Event::Warning { message })?;
        }

        self.is_midway = true;
        let started = Instant::now();
        let learner = &mut self.learner;
        let rates: Vec<f64> =
            (before..before + steps).map(|step| learner::learning_rate(&training, step)).collect();
        let updates = learner.optimizer_steps();
        let trained = tokio::task::block_in_place(|| learner.train_version(&batch.episodes, &rates, version));
        let metrics = match trained {
            Ok(metrics) => metrics,
            Err(TrainError::Stopped) => {
                // Before its first update the policy is still that of the last complete step.
                self.is_midway = learner.optimizer_steps() != updates;
                return Err(RunError::Stopped);
            }
            Err(error) => return Err(RunError::failed("training")(error.into())),
        };
        times.train = started.elapsed();
        times.replay = self.learner.replay_time();

        let started = Instant::now();
        let model = Arc::new(self.learner.model().clone());
        let published = self
            .engine
            .publish(model)
            .map_err(|error| RunError::failed("publishing new weights")(error.into()))?;
        times.publish = started.elapsed();

        let mut next = self.carried.after(&metrics, batch.account, published)?;
        next.invalid_trajectories += wave.invalid() as u64;
        next.is_evaluation_due =
            is_reached(training.eval_interval, before, next.step) && next.step < training.max_steps;
        let rows = rows(&metrics, version, &wave, &times);
        for (step, (metrics, row)) in (before + 1..).zip(metrics.iter().zip(rows)) {
            self.metrics
                .push(step, &row)
                .map_err(|error| RunError::failed("writing metrics.parquet")(error.into()))?;
            self.event(&Event::Step {
                step,
                policy_version: version,
                loss: metrics.loss,
                solve_rate: Some(metrics.solve_rate),
            })?;
            progress.advance(1);
            progress.line(&step_line(step, metrics, &times));
        }
        self.event(&Event::WeightsPublished { policy_version: published, step: next.step })?;
        self.carried = next;
        self.is_midway = false;
        Ok(())
    }

    /// The evaluation between steps that comes before the next step, if one does.
    async fn due_evaluation(&mut self) -> Result<(), RunError> {
        if self.carried.is_evaluation_due {
            let evaluation = self.evaluation(&format!("step-{}", self.carried.step)).await?;
            self.carried.is_evaluation_due = false;
            if let Some(evaluation) = evaluation {
                self.carried.evaluations.merge(&evaluation.tokens);
            }
        }
        Ok(())
    }

    /// A held-out evaluation of the policy as it is; read from the run folder if it was made before.
    async fn evaluation(&mut self, label: &str) -> Result<Option<Evaluation>, RunError> {
        let training = self.config.training.clone();
        let tasks = match (label, training.eval_interval_tasks) {
            ("before" | "after", _) | (_, 0) => &self.heldout_tasks[..],
            (_, count) => &self.heldout_tasks[..count.min(self.heldout_tasks.len())],
        };
        if tasks.is_empty() || (training.eval_samples == 0 && !training.eval_greedy) {
            return Ok(None);
        }
        let path = self.folder.reports().join(format!("evaluation-{label}.json"));
        let of_step = if label == "before" { 0 } else { self.carried.step };
        if let Ok(text) = std::fs::read(&path)
            && let Ok(evaluation) = serde_json::from_slice::<Evaluation>(&text)
            && evaluation.step == of_step
        {
            self.amend_evaluated(label, &evaluation, None)?;
            return Ok(Some(evaluation));
        }
        if of_step != self.carried.step {
            // Its weights are gone: no other policy's rates may stand in their place.
            tracing::warn!("{} is missing: the report has no evaluation before training", path.display());
            return Ok(None);
        }
        let specs = waves::evaluation_specs(
            &training,
            tasks,
            training.eval_samples,
            training.eval_greedy,
            label,
            self.folder.incarnation(),
        )?;
        let at = waves::At { step: self.carried.step, version: self.carried.version, label };
        let (machinery, events) = (&self.machinery, &mut self.events);
        let started = Instant::now();
        let evaluation =
            waves::evaluate(machinery, specs, at, training.eval_samples, events, &self.stop).await?;
        write_json(&path, &evaluation)?;
        self.amend_evaluated(label, &evaluation, Some(started.elapsed()))?;
        Ok(Some(evaluation))
    }

    /// Adds an evaluation to the row of its step; the one before the first step has none.
    fn amend_evaluated(
        &mut self,
        label: &str,
        evaluation: &Evaluation,
        took: Option<Duration>,
    ) -> Result<(), RunError> {
        if label == "before" { Ok(()) } else { self.amend(&evaluation_row(evaluation, took)) }
    }

    /// Adds to the row of the last step what came after it.
    fn amend(&mut self, values: &[(&'static str, MetricValue)]) -> Result<(), RunError> {
        self.metrics
            .amend(self.carried.step, values)
            .map_err(|error| RunError::failed("writing metrics.parquet")(error.into()))
    }

    fn checkpoint(&mut self) -> Result<(), RunError> {
        let started = Instant::now();
        self.folder.keep_wall(self.started.elapsed().as_secs_f64())?;
        let state = serde_json::to_value(&self.carried)
            .map_err(|error| RunError::failed("saving a checkpoint")(error.into()))?;
        let path = self
            .checkpoints
            .save(self.carried.step, &self.learner, &self.companions, &state)
            .map_err(|error| RunError::failed("saving a checkpoint")(error.into()))?;
        self.saved_at = Some(self.carried.step);
        self.amend(&[("checkpoint_seconds", started.elapsed().as_secs_f64().into())])?;
        self.event(&Event::CheckpointSaved { step: self.carried.step, path })
    }

    /// Leaves a stopped or failed run so that `--resume` goes on from its last complete step.
    fn leave(&mut self, error: &RunError) {
        let step = self.carried.step;
        let is_ahead = step > 0 && self.saved_at != Some(step);
        // Midway there is no complete step to save: some of its updates are made and others are not, or its rows are
        // not written. It is taken again from the last checkpoint.
        if is_ahead
            && !self.is_midway
            && let Err(error) = self.checkpoint()
        {
            tracing::error!("no checkpoint of step {step}: {error}");
        }
        let event = match error {
            RunError::Stopped => Event::Interrupted { step },
            error => Event::RunFailed { step, error: error.to_string() },
        };
        let kept = self.folder.keep_wall(self.started.elapsed().as_secs_f64()).map(drop);
        if let Err(error) = self.event(&event).and(kept) {
            tracing::error!("{error}");
        }
    }

    fn report(&self, before: Option<Evaluation>, after: Option<Evaluation>, wall_seconds: f64) -> Report {
        let solve_rate = |e: &Option<Evaluation>| e.as_ref().and_then(|e| e.rates.solve_rate);
        let greedy = |e: &Option<Evaluation>| e.as_ref().and_then(|e| e.rates.greedy);
        let mut tokens = self.carried.account.clone();
        tokens.merge(&self.carried.evaluations);
        for evaluation in before.iter().chain(&after) {
            tokens.merge(&evaluation.tokens);
        }
        Report {
            heldout_solve_rate_before: solve_rate(&before),
            heldout_solve_rate_after: solve_rate(&after),
            heldout_greedy_before: greedy(&before),
            heldout_greedy_after: greedy(&after),
            min_prob_correlation: self.carried.min_prob_correlation,
            max_logprob_diff: self.carried.max_logprob_diff,
            wall_seconds,
            run_folder: self.folder.root().to_owned(),
            steps: self.carried.step,
            seed: self.config.training.seed,
            lego_version: version_text(),
            sandbox: self.machinery.env.backend.capabilities().clone(),
            invalid_trajectories: self.carried.invalid_trajectories,
            tokens,
            evaluation_before: before,
            evaluation_after: after,
            train_curve: self.carried.train_curve.clone(),
        }
    }

    fn event(&mut self, event: &Event) -> Result<(), RunError> {
        self.events.write(event).map_err(|error| RunError::failed("writing events.jsonl")(error.into()))
    }
}

/// What a person reads of a step. `-`: there was nothing to measure it on.
fn step_line(step: u64, metrics: &StepMetrics, times: &StepTimes) -> String {
    let shown = |value: Option<f64>, format: fn(f64) -> String| value.map_or("-".to_owned(), format);
    format!(
        "step {step:>4}  solve rate {:5.1} %  reward {:6.3}  loss {}  kl {}  entropy {}  log-prob diff {}  {:.1} s \
         (trials {:.1}, training {:.1})",
        100.0 * metrics.solve_rate,
        metrics.reward_mean,
        shown(metrics.loss, |loss| format!("{loss:+.4}")),
        shown(metrics.kl, |kl| format!("{kl:.4}")),
        shown(metrics.entropy, |entropy| format!("{entropy:.3}")),
        shown(metrics.max_logprob_diff, |diff| format!("{diff}")),
        times.total().as_secs_f64(),
        times.rollout.as_secs_f64(),
        times.train.as_secs_f64(),
    )
}

/// Files of the starting policy that every checkpoint needs too.
fn companions(model_path: &Path) -> Vec<PathBuf> {
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
        .iter()
        .map(|name| model_path.join(name))
        .filter(|path| path.exists())
        .collect()
}

pub fn version_text() -> String {
    format!("{} ({})", env!("CARGO_PKG_VERSION"), env!("LEGO_GIT_COMMIT"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_without_a_token_to_train_on_shows_no_numbers_of_tokens() {
        let line = |metrics: &StepMetrics| step_line(3, metrics, &StepTimes::start());
        let nothing = line(&StepMetrics::default());
        assert!(nothing.contains("loss -  kl -  entropy -  log-prob diff -  "), "{nothing}");
        let metrics = StepMetrics { loss: Some(0.25), max_logprob_diff: Some(0.0), ..StepMetrics::default() };
        let measured = line(&metrics);
        assert!(
            measured.contains("loss +0.2500  kl -  ") && measured.contains("log-prob diff 0  "),
            "{measured}"
        );
    }
}
