//! `lego sft`: supervised warm start.

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressStyle};

use crate::kernels::Pool;
use crate::model::{Config, Model};
use crate::run::count;
use crate::train::OptimizerOptions;
use crate::train::sft::{
    Conversation, SftMetrics, SftOptions, SourceFolder, SupervisedTrainer, TokenizerSpec, encode_all,
    read_conversations, write_folder,
};

/// Steps between lines of progress where there is no terminal.
const LINE_EVERY: u64 = 50;

/// Train a policy on conversations: the supervised warm start before reinforcement learning.
///
/// Writes a Hugging Face model folder. The same data, options and seed give the same weights to the bit.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Conversations, one a line: {"messages": [...], "tools": [...]} as in /v1/chat/completions. May be repeated.
    #[arg(long, required = true)]
    data: Vec<PathBuf>,
    /// Continue from this model folder (weights, tokenizer, chat template).
    #[arg(long, conflicts_with = "init_config", required_unless_present = "init_config")]
    model_path: Option<PathBuf>,
    /// Start from random weights of the shape in this config.json.
    #[arg(long)]
    init_config: Option<PathBuf>,
    /// Folder with tokenizer.json and chat template, for --init-config.
    #[arg(long, requires = "init_config", conflicts_with = "train_tokenizer")]
    tokenizer: Option<PathBuf>,
    /// Train a byte-level BPE tokenizer, for --init-config: vocab=768.
    #[arg(long, requires = "init_config")]
    train_tokenizer: Option<TokenizerSpec>,
    /// Conversations to train the tokenizer on (default: --data).
    #[arg(long, requires = "train_tokenizer")]
    tokenizer_data: Option<PathBuf>,
    /// Chat template of the new tokenizer (default: chat_template.jinja beside --init-config).
    #[arg(long, requires = "train_tokenizer")]
    chat_template: Option<PathBuf>,
    /// Folder to write the model to.
    #[arg(long)]
    output_dir: PathBuf,
    /// Replace the model that --output-dir holds.
    #[arg(long)]
    overwrite: bool,
    /// Optimizer steps (default: one pass over the data).
    #[arg(long)]
    steps: Option<u64>,
    /// Conversations a step.
    #[arg(long, default_value_t = 8)]
    batch_size: usize,
    /// Peak learning rate: rises over --warmup steps, holds for half the run, falls to a twentieth.
    #[arg(long, default_value_t = 3e-3)]
    lr: f64,
    /// Steps over which the learning rate rises.
    #[arg(long, default_value_t = 50)]
    warmup: u64,
    /// Loss weight of tokens that no assistant sampled; the assistant's own have 1.
    #[arg(long, default_value_t = 0.1)]
    prompt_weight: f64,
    /// AdamW's weight decay, on matrices.
    #[arg(long, default_value_t = 0.05)]
    weight_decay: f64,
    /// Decides the random weights and the order of the data.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Threads (default: all cores). Changes no result.
    #[arg(long)]
    threads: Option<usize>,
}

/// Runs `lego sft`.
///
/// # Errors
/// Bad data, a broken model folder, a folder that cannot be written.
pub fn run(args: Args) -> anyhow::Result<()> {
    let is_taken =
        ["config.json", "model.safetensors"].iter().any(|file| args.output_dir.join(file).exists());
    if is_taken && !args.overwrite {
        anyhow::bail!(super::Usage(format!(
            "{} already holds a model: give another --output-dir, or --overwrite to replace it",
            args.output_dir.display()
        )));
    }
    let threads = match args.threads {
        Some(threads) => threads.max(1),
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let pool = Pool::new(threads);
    let mut conversations = Vec::new();
    for path in &args.data {
        conversations.extend(read_conversations(path)?);
    }
    let (model, source) = start(&args, &conversations)?;
    let data = encode_all(&conversations, &source, &pool)?;
    let one_pass = data.len().div_ceil(args.batch_size.max(1)) as u64;
    let options = SftOptions {
        learning_rate: args.lr,
        warmup: args.warmup,
        steps: args.steps.unwrap_or(one_pass),
        batch_size: args.batch_size,
        prompt_weight: args.prompt_weight,
        optimizer: OptimizerOptions {
            beta2: 0.98,
            weight_decay: args.weight_decay,
            ..OptimizerOptions::default()
        },
        seed: args.seed,
        max_microbatch_tokens: 4096,
    };
    let steps = options.steps;
    errln!(
        "{} parameters, {}, {}, {}",
        model.parameters().len(),
        count(data.len() as u64, "conversation", "conversations"),
        count(steps, "step", "steps"),
        count(threads as u64, "thread", "threads"),
    );
    let mut trainer = SupervisedTrainer::new(model, data, options, pool)?;
    let mut progress = Progress::new(steps);
    while !trainer.is_done() {
        let metrics = trainer.step()?;
        progress.show(&metrics);
    }
    progress.finish();
    write_folder(trainer.model(), &source, &args.output_dir)?;
    let wrote = if is_taken { "replaced" } else { "wrote" };
    errln!("{wrote} {}", args.output_dir.display());
    Ok(())
}

/// The model and the text files to start from.
fn start(args: &Args, conversations: &[Conversation]) -> anyhow::Result<(Model, SourceFolder)> {
    if let Some(dir) = &args.model_path {
        return Ok((Model::load(dir)?, SourceFolder::load(dir)?));
    }
    let path = args.init_config.as_ref().context("give --model-path or --init-config")?;
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let json = serde_json::from_slice(&text).with_context(|| format!("{} is not JSON", path.display()))?;
    let config = Config::from_json(path, json)?;
    let source = match (&args.tokenizer, args.train_tokenizer) {
        (Some(dir), _) => SourceFolder::load(dir)?,
        (None, Some(spec)) => {
            let template = match &args.chat_template {
                Some(template) => template.clone(),
                None => path.with_file_name("chat_template.jinja"),
            };
            let other = args.tokenizer_data.as_deref().map(read_conversations).transpose()?;
            let texts = other.as_deref().unwrap_or(conversations);
            SourceFolder::with_new_tokenizer(spec, texts, &template, &args.output_dir)?
        }
        (None, None) => anyhow::bail!(super::Usage(
            "a fresh model needs a tokenizer: give --tokenizer DIR or --train-tokenizer vocab=768".to_owned()
        )),
    };
    Ok((Model::init(config, args.seed), source))
}

/// A bar on a terminal, a line now and then elsewhere.
struct Progress {
    bar: Option<ProgressBar>,
    steps: u64,
    started: Instant,
    tokens: usize,
    assistant_loss: Option<f64>,
}

impl Progress {
    fn new(steps: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:32} {pos}/{len} {msg} {eta} left")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(steps).with_style(style)
        });
        Self { bar, steps, started: Instant::now(), tokens: 0, assistant_loss: None }
    }

    fn show(&mut self, metrics: &SftMetrics) {
        self.tokens += metrics.tokens;
        let smooth = self.assistant_loss.unwrap_or(metrics.assistant_loss);
        let smooth = 0.95 * smooth + 0.05 * metrics.assistant_loss;
        self.assistant_loss = Some(smooth);
        let seconds = self.started.elapsed().as_secs_f64();
        let message = format!(
            "loss {:.3} assistant {smooth:.3} grad {:.2} lr {:.1e} {:.0} tok/s",
            metrics.loss,
            metrics.grad_norm,
            metrics.learning_rate,
            self.tokens as f64 / seconds
        );
        match &self.bar {
            Some(bar) => {
                bar.set_position(metrics.step);
                bar.set_message(message);
            }
            None if metrics.step.is_multiple_of(LINE_EVERY) || metrics.step == self.steps => {
                errln!("step {}/{} {seconds:.0} s {message}", metrics.step, self.steps);
            }
            None => {}
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
    }
}
