//! `lego eval`.

use std::path::PathBuf;

use anyhow::Context as _;

use super::train::ConfigArgs;
use crate::config::Config;
use crate::run::{self, EvalOptions};
use crate::task::Split;

/// Measure a policy's solve rate on tasks, without training.
///
/// Trials run as in training: an agent in a sandbox, graded by hidden tests in a fresh one. The policy is a model folder
/// (a run's checkpoint is one) or any chat server. A table goes to stderr; --json prints the report on stdout.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Model folder to evaluate, such as runs/<name>/checkpoints/step_100.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["upstream", "model_name"])]
    model_path: Option<PathBuf>,
    /// Base URL of the server to evaluate.
    #[arg(long, value_name = "URL", requires = "model_name")]
    upstream: Option<String>,
    /// What that server is.
    #[arg(long, value_name = "KIND", requires = "upstream", default_value = "auto", value_parser = ["auto", "vllm", "sglang", "openai"])]
    upstream_kind: String,
    /// The model's name at that server.
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,
    /// Tasks of this split.
    #[arg(long, value_enum, default_value_t = SplitName::Heldout)]
    split: SplitName,
    /// The first N tasks of the split; 0: all [default: training.eval_tasks].
    #[arg(long, value_name = "N")]
    tasks: Option<usize>,
    /// Samples of each task [default: training.eval_samples].
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
    /// Whether each task is also tried greedily [default: training.eval_greedy].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    greedy: Option<bool>,
    /// Sampling temperature [default: training.temperature].
    #[arg(long, value_name = "T")]
    temperature: Option<f64>,
    /// Seed of the sampling.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Folder of captures, trials and report [default: a new one under runs/].
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
    /// Allow the weak sandbox where no isolated one can be made: trials then share this machine's files.
    #[arg(long)]
    weak_sandbox: bool,
    /// Print the report as JSON on stdout.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum SplitName {
    Heldout,
    Train,
}

/// # Errors
/// A config that cannot be used, or what stopped the evaluation.
pub fn run(args: Args) -> anyhow::Result<()> {
    let mut config: Config = args.config.load()?;
    let text = |path: PathBuf| path.to_string_lossy().into_owned();
    let kind = match (&args.model_path, &args.upstream) {
        (Some(_), _) => Some("embedded".to_owned()),
        (None, Some(_)) => Some(args.upstream_kind),
        (None, None) => None,
    };
    for (key, value, flag) in [
        ("policy.upstream", kind.map(Into::into), "--upstream-kind"),
        ("policy.base_url", args.upstream.map(Into::into), "--upstream"),
        ("policy.model_path", args.model_path.map(|path| text(path).into()), "--model-path"),
        ("policy.model_name", args.model_name.map(Into::into), "--model-name"),
        ("training.eval_tasks", args.tasks.map(Into::into), "--tasks"),
        ("training.eval_samples", args.samples.map(Into::into), "--samples"),
        ("training.eval_greedy", args.greedy.map(Into::into), "--greedy"),
        ("training.temperature", args.temperature.map(Into::into), "--temperature"),
        ("training.seed", args.seed.map(Into::into), "--seed"),
    ] {
        if let Some(value) = value {
            config = config.set(key, value, flag)?;
        }
    }
    let observability = &config.training.observability;
    crate::telemetry::configure(observability.log_level.as_str(), observability.log_json);
    let options = EvalOptions {
        output_dir: args.output_dir,
        split: match args.split {
            SplitName::Heldout => Split::Heldout,
            SplitName::Train => Split::Train,
        },
        allow_weak_sandbox: args.weak_sandbox,
    };
    let report = super::block_on(async {
        let stop = super::stop_on_signal();
        Ok(run::eval(config, options, stop).await?)
    })
    .context("lego eval")?;
    errln!("\n{report}");
    if args.json {
        outln!("{}", serde_json::to_string_pretty(&report)?);
    }
    Ok(())
}
