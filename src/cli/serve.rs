//! `lego serve`: the embedded engine over HTTP.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::Context as _;
use axum::serve::ListenerExt as _;

use crate::engine::{Engine, EngineOptions, LogprobsMode};
use crate::model::Model;
use crate::serve::{ServeState, router};
use crate::text::parsers::{Forms, ReasoningForm, ToolForm, UnknownForm};
use crate::text::{ChatTemplate, Tokenizer};

/// Serve a model over HTTP, in the shapes of vLLM's OpenAI-compatible server.
///
/// Replies carry exact token ids (`return_token_ids`) and log-probabilities (`logprobs`). The same request with the same
/// `seed` gives the same tokens, whatever else is running.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model folder: config.json, model.safetensors, tokenizer.json, chat template.
    #[arg(long, default_value = "models/lego-tiny")]
    model_path: PathBuf,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Names that requests may call the model by (default: the name of the model's folder).
    #[arg(long, num_args = 1..)]
    served_model_name: Vec<String>,
    /// Threads for the arithmetic (default: all).
    #[arg(long)]
    threads: Option<usize>,
    /// Requests that run at once; more wait.
    #[arg(long, default_value_t = 64)]
    max_batch: usize,
    /// Tokens of prompt and completion together (default: what the model was made for).
    #[arg(long)]
    max_context: Option<usize>,
    /// Which log-probs replies carry: of the logits, or of the distribution sampled from (after temperature, top-k, top-p).
    #[arg(long, value_enum, default_value_t = Mode::RawLogprobs)]
    logprobs_mode: Mode,
    /// Form of tool calls, as vLLM names it: hermes, qwen3_coder, llama3_json, mistral, deepseek_v3, deepseek_v31, kimi_k2,
    /// glm45 (default: the one that the chat template shows).
    #[arg(long)]
    tool_call_parser: Option<ToolForm>,
    /// Form of reasoning: qwen3, deepseek_r1, glm45, mistral, or none to leave it in the content (default: the one that
    /// the chat template shows).
    #[arg(long)]
    reasoning_parser: Option<Reasoning>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    #[value(name = "raw_logprobs")]
    RawLogprobs,
    #[value(name = "processed_logprobs")]
    ProcessedLogprobs,
}

/// A value of `--reasoning-parser`.
#[derive(Debug, Clone, Copy)]
struct Reasoning(Option<ReasoningForm>);

impl FromStr for Reasoning {
    type Err = UnknownForm;

    fn from_str(name: &str) -> Result<Self, UnknownForm> {
        if name == "none" { Ok(Self(None)) } else { name.parse().map(|form| Self(Some(form))) }
    }
}

/// Runs the command until it is interrupted.
///
/// # Errors
/// A model folder that cannot be loaded, options that cannot work, an address that cannot be listened on.
pub fn run(args: Args) -> anyhow::Result<()> {
    let model = Model::load(&args.model_path)?;
    let tokenizer = Tokenizer::load(&args.model_path)?;
    let template = ChatTemplate::load(&args.model_path)?;
    let defaults = EngineOptions::for_model(&model);
    let options = EngineOptions {
        max_batch: args.max_batch,
        cache_slots: args.max_batch.saturating_mul(2),
        max_context: args.max_context.unwrap_or(defaults.max_context),
        threads: args.threads.unwrap_or(defaults.threads),
        logprobs_mode: match args.logprobs_mode {
            Mode::RawLogprobs => LogprobsMode::Raw,
            Mode::ProcessedLogprobs => LogprobsMode::Processed,
        },
        ..defaults
    };
    let mut names = args.served_model_name;
    if names.is_empty() {
        let folder = args.model_path.file_name().map(|name| name.to_string_lossy().into_owned());
        names.push(folder.unwrap_or_else(|| "policy".to_owned()));
    }
    let engine = Engine::start(Arc::new(model), options)?;
    let shown = Forms::of_template(template.source());
    let forms = Forms {
        tools: args.tool_call_parser.or(shown.tools),
        reasoning: args.reasoning_parser.map_or(shown.reasoning, |Reasoning(form)| form),
    };
    if forms.tools.is_none() {
        tracing::warn!(
            "the chat template shows no form of tool calls that lego reads: requests with tools are refused without \
             --tool-call-parser"
        );
    }
    let state = ServeState::new(engine, Arc::new(tokenizer), Arc::new(template), names, forms);
    super::block_on(listen(&args.host, args.port, state))
}

async fn listen(host: &str, port: u16, state: ServeState) -> anyhow::Result<()> {
    let listener = tokio::net::TcpListener::bind((host, port))
        .await
        .with_context(|| format!("cannot listen on {host}:{port}; choose another --host or --port"))?;
    let address: SocketAddr = listener.local_addr().context("the listener has no address")?;
    tracing::info!("serving on http://{address}/v1");
    // Events of a stream are small: none waits for the next.
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY could not be set");
        }
    });
    tokio::select! {
        served = axum::serve(listener, router(state)) => served.context("the server failed"),
        interrupted = interrupted() => interrupted,
    }
}

/// Resolves at Ctrl-C or SIGTERM; running requests end with the process.
async fn interrupted() -> anyhow::Result<()> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
        .context("cannot listen for SIGTERM")?;
    tokio::select! {
        result = tokio::signal::ctrl_c() => result.context("cannot listen for Ctrl-C"),
        _ = terminate.recv() => Ok(()),
    }
}
