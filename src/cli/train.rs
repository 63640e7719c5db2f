//! `lego train`.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::config::{Config, ConfigPaths, Environment, FileKind, Use};
use crate::run::{self, Report, RunError, TrainOptions};

/// Train the policy by GRPO on a dataset of tasks.
///
/// Each step samples trials in sandboxes, grades them by hidden tests, and trains on the captured tokens.
/// Held-out tasks are evaluated before and after. Without flags it reads proxy_config.json, sandbox.toml
/// and train.toml in this folder, where they exist.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Optimizer steps.
    #[arg(long, value_name = "N")]
    max_steps: Option<u64>,
    /// Evaluate on held-out tasks every N steps, besides before and after. 0: only before and after.
    #[arg(long, value_name = "N")]
    eval_interval: Option<u64>,
    /// Seed of everything random.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    #[command(flatten)]
    run: RunArgs,
}

/// The files that a run is configured by, and its dataset.
#[derive(Debug, clap::Args)]
pub struct ConfigArgs {
    /// Tasks in SWE-bench's schema, one JSON object a line.
    #[arg(long, value_name = "FILE")]
    dataset: Option<PathBuf>,
    /// Trainer's config [default: train.toml, if it is there].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Proxy's config [default: proxy_config.json, if it is there].
    #[arg(long, value_name = "FILE")]
    proxy_config: Option<PathBuf>,
    /// Sandboxes' config [default: sandbox.toml, if it is there].
    #[arg(long, value_name = "FILE")]
    sandbox_config: Option<PathBuf>,
}

impl ConfigArgs {
    /// # Errors
    /// A config that cannot be used.
    pub fn load(self) -> anyhow::Result<Config> {
        let mut paths = ConfigPaths::in_folder(Path::new("."));
        for (kind, path) in [
            (FileKind::Proxy, self.proxy_config),
            (FileKind::Sandbox, self.sandbox_config),
            (FileKind::Train, self.config),
        ] {
            if let Some(path) = path {
                paths = paths.with(kind, path);
            }
        }
        let config = Config::load(&paths, Environment::from_process())?;
        Ok(match self.dataset {
            Some(path) => {
                config.set("training.dataset", path.to_string_lossy().into_owned().into(), "--dataset")?
            }
            None => config,
        })
    }
}

/// Flags of a run that are not in the config files.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// The run folder [default: a new one under runs/].
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
    /// Go on with the run in --output-dir, or with the newest one, from its last checkpoint. The run's own
    /// config is used.
    #[arg(long)]
    pub resume: bool,
    /// Allow the weak sandbox where no isolated one can be made: trials then share this machine's files.
    #[arg(long)]
    pub weak_sandbox: bool,
}

/// # Errors
/// A config that cannot be used, or what stopped the run.
pub fn run(args: Args) -> anyhow::Result<()> {
    let mut config = args.config.load()?;
    for (key, value, flag) in [
        ("training.max_steps", args.max_steps.map(Into::into), "--max-steps"),
        ("training.eval_interval", args.eval_interval.map(Into::into), "--eval-interval"),
        ("training.seed", args.seed.map(Into::into), "--seed"),
    ] {
        if let Some(value) = value {
            config = config.set(key, value, flag)?;
        }
    }
    start(config, args.run)
}

/// Runs the training and prints its report.
pub fn start(config: Config, args: RunArgs) -> anyhow::Result<()> {
    // A run that is resumed has a config of its own.
    if !args.resume {
        config.refuse_unsupported(Use::Train)?;
    }
    super::warn_of_stray_variables(&config);
    let observability = &config.training.observability;
    crate::telemetry::configure(observability.log_level.as_str(), observability.log_json);
    let options = TrainOptions {
        output_dir: args.output_dir,
        resume: args.resume,
        allow_weak_sandbox: args.weak_sandbox,
    };
    let report: Report = super::block_on(async {
        let stop = super::stop_on_signal();
        run::train(config, options, stop).await.map_err(|error| match error {
            RunError::Stopped => anyhow::Error::new(RunError::Stopped),
            other => anyhow::Error::new(other).context("the run failed"),
        })
    })
    .context("lego train")?;
    errln!("\n{report}");
    Ok(())
}
