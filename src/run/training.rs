//! `lego train`, top to bottom: start, evaluate, step after step, evaluate, report.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::account::TokenAccount;
use super::evaluation::Evaluation;
use super::folder::{RunFolder, RunKind, write_json};
use super::machinery::{Machinery, Places};
use super::metrics::{StepTimes, row};
use super::progress::Progress;
use super::report::{CurvePoint, Report};
use super::waves::{self, Wave};
use super::{RunError, learner, policy};
use crate::config::{Config, Environment, Use};
use crate::engine::Engine;
use crate::model::Model;
use crate::proxy::LocalTokenizers;
use crate::record::{Disposition, PolicyVersion};
use crate::rollout::{TaskOrder, derive_seed};
use crate::task::{Split, Task};
use crate::telemetry::{Event, EventLog, LogFile, RunMetrics, log_to_file};
use crate::train::{Checkpoints, Episode, Learner};

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

/// Rewards of the control are shuffled by seeds of their own.
const SHUFFLE_SEEDS: u64 = 3;

/// What a checkpoint keeps of the run beside the learner: all that the loop carries from step to step.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Carried {
    /// Optimizer steps taken.
    step: u64,
    version: PolicyVersion,
    account: TokenAccount,
    invalid_trajectories: u64,
    min_prob_correlation: Option<f64>,
    max_logprob_diff: Option<f64>,
    train_curve: Vec<CurvePoint>,
    wall_seconds: f64,
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
        let folder = match (resumed, &options.output_dir) {
            (Some(folder), _) => folder,
            (None, Some(dir)) => RunFolder::create(dir, RunKind::Train)?,
            (None, None) => RunFolder::create_in(&runs, RunKind::Train)?,
        };
        if !options.resume {
            folder.keep_config(&config)?;
        }
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
        let model = Arc::new(learner.model().clone());
        let (engine, served) = policy::embedded(&config, &model_path, model, carried.version)?;
        let weak = options.allow_weak_sandbox;
        let machinery =
            Machinery::start(&config, &dataset, served, &tokenizers, Places::of(&folder), weak).await?;
        eprintln!("run folder: {}", folder.root().display());
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
            eprintln!("going on from step {} of {}", self.carried.step, training.max_steps);
        }
        let progress = Progress::start("training", training.max_steps);
        progress.set_position(self.carried.step);
        while self.carried.step < training.max_steps {
            self.step(&progress).await?;
            if self.carried.step.is_multiple_of(training.checkpoint_interval.max(1)) {
                self.checkpoint()?;
            }
        }
        progress.finish();
        if self.saved_at != Some(self.carried.step) {
            self.checkpoint()?;
        }
        let after = self.evaluation("after").await?;
        let report = self.report(before, after);
        write_json(&self.folder.reports().join("report.json"), &report)?;
        self.event(&Event::RunFinished { step: report.steps, seconds: report.wall_seconds })?;
        Ok(report)
    }

    /// One policy version: sample, train, publish.
    async fn step(&mut self, progress: &Progress) -> Result<(), RunError> {
        let mut times = StepTimes::start();
        let version = self.carried.version;
        let training = self.config.training.clone();
        let specs = waves::training_specs(
            &training,
            &self.order,
            &self.train_tasks,
            version,
            self.folder.incarnation(),
        )?;
        let trials = Progress::start("trials", specs.len() as u64);
        let wave =
            waves::wave(&self.machinery, specs, version, &mut self.events, &trials, &self.stop).await?;
        trials.finish();
        times.rollout = wave.wall;

        let episodes = self.episodes(&wave, version);
        let steps = training.steps_per_rollout_batch();
        let started = Instant::now();
        let learner = &mut self.learner;
        learner::schedule(learner, &training, self.carried.step);
        let metrics = tokio::task::block_in_place(|| learner.train_version(&episodes, steps, version))
            .map_err(|error| RunError::failed("training")(error.into()))?;
        times.train = started.elapsed();

        let started = Instant::now();
        let model = Arc::new(self.learner.model().clone());
        self.carried.version = self
            .engine
            .publish(model)
            .map_err(|error| RunError::failed("publishing new weights")(error.into()))?;
        times.publish = started.elapsed();

        self.carried.invalid_trajectories += wave.invalid() as u64;
        for step in &metrics {
            self.carried.step += 1;
            self.carried.account.trained += step.sampled_tokens as u64;
            let least = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).reduce(f64::min);
            let most = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).reduce(f64::max);
            self.carried.min_prob_correlation =
                least(self.carried.min_prob_correlation, step.prob_correlation);
            self.carried.max_logprob_diff = most(self.carried.max_logprob_diff, step.max_logprob_diff);
            self.carried.train_curve.push(CurvePoint {
                step: self.carried.step,
                solve_rate: step.solve_rate,
                reward_mean: step.reward_mean,
            });
            self.metrics
                .push(self.carried.step, &row(step, version, &wave, &times))
                .map_err(|error| RunError::failed("writing metrics.parquet")(error.into()))?;
            let step_event = Event::Step {
                step: self.carried.step,
                policy_version: version,
                loss: step.loss,
                solve_rate: Some(step.solve_rate),
            };
            self.event(&step_event)?;
            progress.advance(1);
            progress.line(&format!(
                "step {:>4}  solve rate {:5.1} %  reward {:6.3}  loss {:+.4}  kl {:.4}  entropy {:.3}  \
                 log-prob diff {}  {:.1} s (trials {:.1}, training {:.1})",
                self.carried.step,
                100.0 * step.solve_rate,
                step.reward_mean,
                step.loss,
                step.kl.unwrap_or(0.0),
                step.entropy,
                step.max_logprob_diff.unwrap_or(0.0),
                times.total().as_secs_f64(),
                times.rollout.as_secs_f64(),
                times.train.as_secs_f64(),
            ));
        }
        self.carried.account.check()?;
        self.event(&Event::WeightsPublished {
            policy_version: self.carried.version,
            step: self.carried.step,
        })?;
        let interval = training.eval_interval;
        if interval > 0
            && self.carried.step.is_multiple_of(interval)
            && self.carried.step < training.max_steps
        {
            self.evaluation(&format!("step-{}", self.carried.step)).await?;
        }
        Ok(())
    }

    /// Graded trials as the learner takes them; every token that is not among them is booked.
    fn episodes(&mut self, wave: &Wave, version: PolicyVersion) -> Vec<Episode> {
        let mut rewards: Vec<f64> = wave.results.iter().filter_map(|result| result.reward).collect();
        if self.config.training.shuffle_rewards {
            for last in (1..rewards.len()).rev() {
                let random = derive_seed(&[self.config.training.seed, SHUFFLE_SEEDS, version.0, last as u64]);
                rewards.swap(last, (random % (last as u64 + 1)) as usize);
            }
        }
        let mut rewards = rewards.into_iter();
        let mut episodes = Vec::with_capacity(wave.results.len());
        for result in &wave.results {
            self.carried.account.add_trial(result);
            if result.reward.is_some()
                && let Some(reward) = rewards.next()
            {
                episodes.push(Episode {
                    episode_id: result.spec.episode,
                    group_id: result.spec.group,
                    reward,
                    samples: result.samples.clone(),
                });
            } else {
                let tokens = result.samples.iter().map(|s| s.sampled_tokens() as u64).sum();
                self.carried.account.add_left_out(&Disposition::Masked("no reward".to_owned()), tokens);
            }
        }
        episodes
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
        let evaluation =
            waves::evaluate(machinery, specs, at, training.eval_samples, events, &self.stop).await?;
        write_json(&path, &evaluation)?;
        Ok(Some(evaluation))
    }

    fn checkpoint(&mut self) -> Result<(), RunError> {
        let mut carried = self.carried.clone();
        carried.wall_seconds += self.started.elapsed().as_secs_f64();
        let state = serde_json::to_value(&carried)
            .map_err(|error| RunError::failed("saving a checkpoint")(error.into()))?;
        let path = self
            .checkpoints
            .save(self.carried.step, &self.learner, &self.companions, &state)
            .map_err(|error| RunError::failed("saving a checkpoint")(error.into()))?;
        self.saved_at = Some(self.carried.step);
        self.event(&Event::CheckpointSaved { step: self.carried.step, path })
    }

    /// Leaves a stopped or failed run so that `--resume` goes on from its last complete step.
    fn leave(&mut self, error: &RunError) {
        let step = self.carried.step;
        let is_ahead = step > 0 && self.saved_at != Some(step);
        // An account that is off is not carried on.
        if is_ahead
            && !matches!(error, RunError::Unbalanced { .. })
            && let Err(error) = self.checkpoint()
        {
            tracing::error!("no checkpoint of step {step}: {error}");
        }
        let event = match error {
            RunError::Stopped => Event::Interrupted { step },
            error => Event::RunFailed { step, error: error.to_string() },
        };
        if let Err(error) = self.event(&event) {
            tracing::error!("{error}");
        }
    }

    fn report(&self, before: Option<Evaluation>, after: Option<Evaluation>) -> Report {
        let solve_rate = |e: &Option<Evaluation>| e.as_ref().and_then(|e| e.rates.solve_rate);
        let greedy = |e: &Option<Evaluation>| e.as_ref().and_then(|e| e.rates.greedy);
        let mut tokens = self.carried.account.clone();
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
            wall_seconds: self.carried.wall_seconds + self.started.elapsed().as_secs_f64(),
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
