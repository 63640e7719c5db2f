//! `lego agent`: the small harness. A client of `/v1/chat/completions` and nothing else.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;

use crate::harness::mini::{Agent, AgentOptions, Client, DEFAULT_TEST_COMMAND, TestCommand};

/// Fix an issue in a workspace with a model, by editing and running the tests.
///
/// Reads OPENAI_BASE_URL and OPENAI_API_KEY. Exit codes: 0, the model submitted or used up its turns (stdout
/// says which); 1, the model could not be asked or the workspace could not be used; 2, wrong usage.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder to work in.
    #[arg(long)]
    workspace: PathBuf,
    /// File with the issue's text; - reads it from stdin.
    #[arg(long)]
    issue_file: PathBuf,
    /// Model to ask for.
    #[arg(long, env = "OPENAI_MODEL", default_value = "default")]
    model: String,
    /// Base URL of the endpoint.
    #[arg(long, env = "OPENAI_BASE_URL")]
    base_url: String,
    /// Model calls at most.
    #[arg(long, default_value_t = 30)]
    max_turns: u32,
    /// Tokens of one reply at most.
    #[arg(long)]
    max_tokens: Option<u32>,
    /// Seconds to wait for one reply.
    #[arg(long, default_value_t = 600)]
    reply_timeout: u64,
    /// Shell command that runs the tests; prints PASS, or a line that starts with FAIL.
    #[arg(long, default_value = DEFAULT_TEST_COMMAND)]
    test_command: String,
}

/// Runs the agent; prints one line of JSON with how it ended.
///
/// # Errors
/// When the model cannot be asked, or the issue or workspace cannot be read.
pub fn run(args: Args) -> anyhow::Result<()> {
    let statement =
        read_issue(&args.issue_file).with_context(|| format!("issue {}", args.issue_file.display()))?;
    let key = std::env::var("OPENAI_API_KEY").unwrap_or_default();
    let client = Client::new(&args.base_url, &key, Duration::from_secs(args.reply_timeout))?;
    let options = AgentOptions {
        workspace: args.workspace,
        statement,
        model: args.model,
        max_turns: args.max_turns,
        max_tokens: args.max_tokens,
        tests: TestCommand(args.test_command),
    };
    // One thread starts faster than a pool, and the agent does one thing at a time.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let report = runtime.block_on(async { Agent::new(options, client)?.run().await })?;
    outln!("{}", serde_json::json!(report));
    Ok(())
}

fn read_issue(path: &Path) -> std::io::Result<String> {
    if path.as_os_str() == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        return Ok(text);
    }
    std::fs::read_to_string(path)
}
