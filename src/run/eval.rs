//! `lego eval`: a policy's solve rate on tasks, without training.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::evaluation::Evaluation;
use super::folder::{RunFolder, RunKind, write_json};
use super::machinery::{self, Machinery};
use super::report::{Places, count};
use super::training::version_text;
use super::{RunError, policy, waves};
use crate::config::{Config, Use};
use crate::model::Model;
use crate::proxy::{LocalTokenizers, VersionSource};
use crate::record::PolicyVersion;
use crate::sandbox::Capabilities;
use crate::task::Split;
use crate::telemetry::{Event, EventLog, log_to_file, say};

/// What is not in the config files.
#[derive(Debug, Clone)]
pub struct EvalOptions {
    /// The folder of captures, trials and report; by default a new one under the log folder.
    pub output_dir: Option<PathBuf>,
    pub split: Split,
    /// The weak sandbox may be used.
    pub allow_weak_sandbox: bool,
}

/// The result of an evaluation: `reports/report.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EvalReport {
    pub split: Split,
    /// Folder or base URL of the policy.
    pub policy: String,
    pub model_name: String,
    pub temperature: f64,
    pub seed: u64,
    pub wall_seconds: f64,
    pub lego_version: String,
    /// What the sandboxes could enforce; `is_isolated` is false for the weak sandbox.
    pub sandbox: Capabilities,
    pub run_folder: PathBuf,
    pub evaluation: Evaluation,
}

/// Evaluates the policy: `eval_samples` trials a task at the temperature, and a greedy one where the config asks
/// for it. Cancelling `stop` ends it cleanly.
///
/// # Errors
/// [`RunError`]; [`RunError::Stopped`] after `stop`.
pub async fn eval(
    config: Config,
    options: EvalOptions,
    stop: CancellationToken,
) -> Result<EvalReport, RunError> {
    let started = Instant::now();
    config.refuse_unsupported(Use::Eval)?;
    let tokenizers = LocalTokenizers::load(&config)?;
    let training = &config.training;
    let dataset = waves::dataset(&config)?;
    let tasks = waves::tasks(&dataset, options.split, training.eval_tasks);
    let nothing = |cause: String| RunError::Failed { doing: "choosing trials", cause };
    if tasks.is_empty() {
        let split = options.split.as_str();
        return Err(nothing(format!(
            "the dataset has no task with split = \"{split}\": pass another --split"
        )));
    }
    if training.eval_samples == 0 && !training.eval_greedy {
        return Err(nothing("neither samples nor a greedy trial: pass --samples N or --greedy".to_owned()));
    }
    let (name, served) = if config.proxy.is_embedded() {
        let folder = config.model_path();
        let model =
            Model::load(folder).map_err(|error| RunError::failed("loading the policy")(error.into()))?;
        let (_, served) = policy::embedded(&config, folder, Arc::new(model), PolicyVersion::default())?;
        (folder.display().to_string(), served)
    } else {
        let model_name = config.policy.model_name.clone().ok_or_else(|| RunError::Failed {
            doing: "choosing the policy",
            cause: "a server is asked for a model by name: pass --model-name, or set policy.model_name"
                .to_owned(),
        })?;
        // Nobody publishes weights to it while it is evaluated.
        let version: VersionSource = Arc::new(PolicyVersion::default);
        let upstream = policy::http_upstream(&config)?;
        let renderer = tokenizers.renderer(&config.proxy.server(), config.proxy.local_tokenizer.as_deref());
        (upstream.name(), policy::ServedPolicy { upstream, model_name, version, renderer, texts: None })
    };
    let model_name = served.model_name.clone();

    let folder = match &options.output_dir {
        Some(dir) => RunFolder::create(dir, RunKind::Eval)?,
        None => RunFolder::create_in(&training.observability.log_dir, RunKind::Eval)?,
    };
    folder.keep_config(&config)?;
    let _log = log_to_file(&folder.root().join("eval.log"))
        .map_err(|error| RunError::failed("opening eval.log")(error.into()))?;
    let telemetry =
        |error: crate::telemetry::TelemetryError| RunError::failed("writing events.jsonl")(error.into());
    let weak = options.allow_weak_sandbox;
    let machinery =
        Machinery::start(&config, &dataset, served, &tokenizers, machinery::Places::of(&folder), weak).await;
    let machinery = machinery.or_else(|error| folder.leave_scratch(Err(error)))?;
    folder.begin()?;
    let mut events = EventLog::open(&folder.root().join("events.jsonl")).map_err(telemetry)?;
    events
        .write(&Event::RunStarted {
            version: version_text(),
            seed: training.seed,
            incarnation: folder.incarnation(),
            resumed_at_step: None,
        })
        .map_err(telemetry)?;
    say(&format!("run folder: {}", folder.root().display()));

    let split = options.split.as_str();
    let result = async {
        let specs =
            waves::evaluation_specs(training, &tasks, training.eval_samples, training.eval_greedy, split, 0)?;
        let at = waves::At { step: 0, version: PolicyVersion::default(), label: split };
        waves::evaluate(&machinery, specs, at, training.eval_samples, &mut events, &stop).await
    }
    .await;
    machinery.stop().await;
    let result = folder.leave_scratch(result);
    let wall_seconds = started.elapsed().as_secs_f64();
    let end = match &result {
        Ok(_) => Event::RunFinished { step: 0, seconds: wall_seconds },
        Err(RunError::Stopped) => Event::Interrupted { step: 0 },
        Err(error) => Event::RunFailed { step: 0, error: error.to_string() },
    };
    let told = events.write(&end).map_err(telemetry);
    // The first error is the one to report.
    let evaluation = result.and_then(|evaluation| told.map(|()| evaluation))?;
    let report = EvalReport {
        split: options.split,
        policy: name,
        model_name,
        temperature: training.temperature,
        seed: training.seed,
        wall_seconds,
        lego_version: version_text(),
        sandbox: machinery.env.backend.capabilities().clone(),
        run_folder: folder.root().to_owned(),
        evaluation,
    };
    write_json(&folder.reports().join("report.json"), &report)?;
    Ok(report)
}

impl fmt::Display for EvalReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Evaluation { samples_per_task: samples, rates, by_family, invalid_trials, tokens, .. } =
            &self.evaluation;
        let split = self.split.as_str();
        writeln!(f, "{}: {} tasks ({split}), {samples} samples each", self.policy, rates.tasks)?;
        let percent = |rate: f64| format!("{:5.1} %", 100.0 * rate);
        let greedy = |rate: Option<f64>| rate.map_or("    -  ".to_owned(), percent);
        let pass = format!("pass@{samples}");
        writeln!(f, "  {:<28} tasks  solve rate   greedy   {pass}", "")?;
        for (family, rates) in
            by_family.iter().map(|(name, rates)| (name.as_str(), rates)).chain([("all", rates)])
        {
            let (solved, passed) = match samples {
                0 => (greedy(None), greedy(None)),
                _ => (greedy(rates.solve_rate), greedy(rates.pass_at_k)),
            };
            writeln!(
                f,
                "  {family:<28} {:>5}     {solved}  {}  {passed}",
                rates.tasks,
                greedy(rates.greedy)
            )?;
        }
        write!(
            f,
            "{} left out because machinery failed; {} sampled; {:.0} s",
            count(*invalid_trials as u64, "trial", "trials"),
            count(tokens.sampled, "token", "tokens"),
            self.wall_seconds
        )?;
        if !self.sandbox.is_isolated {
            write!(f, "\nThe sandbox was WEAK: trials were not isolated from this machine.")?;
        }
        write!(f, "{}", Places(&self.run_folder))
    }
}
