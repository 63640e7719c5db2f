//! `lego capture`: look into a capture folder.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Subcommand;
use serde_json::json;

use crate::capture::{Query, Reader};
use crate::record::{Call, SessionId};

/// Look into captures, also while a run writes them.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List sessions, or the calls of one session.
    Ls {
        /// Folder with captures (the proxy's `capture_dir`, or a run's `captures`).
        #[arg(long, default_value = "./captures", value_name = "DIR")]
        capture_dir: PathBuf,
        /// List the calls of this session.
        #[arg(long, value_name = "SESSION")]
        session: Option<SessionId>,
        /// One JSON object a line.
        #[arg(long)]
        json: bool,
    },
    /// Show a session's conversation, or one call.
    Show {
        /// Session id or call id.
        id: String,
        /// Folder with captures.
        #[arg(long, default_value = "./captures", value_name = "DIR")]
        capture_dir: PathBuf,
        /// Show token ids with their log-probs and weight versions.
        #[arg(long)]
        tokens: bool,
        /// One JSON object a choice, everything that was captured.
        #[arg(long)]
        json: bool,
    },
}

/// Runs the command.
///
/// # Errors
/// The folder cannot be read, or has nothing by that id.
pub fn run(args: Args) -> anyhow::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let shown = match args.command {
        Command::Ls { capture_dir, session: None, json } => list_sessions(&mut out, &capture_dir, json),
        Command::Ls { capture_dir, session: Some(session), json } => {
            list_calls(&mut out, &capture_dir, session, json)
        }
        Command::Show { id, capture_dir, tokens, json } => show(&mut out, &capture_dir, &id, tokens, json),
    };
    let shown = shown.and_then(|()| Ok(out.flush()?));
    match shown {
        Err(error) if is_closed_pipe(&error) => Ok(()),
        shown => shown,
    }
}

/// Whoever read the output (`head`) has seen enough.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

#[derive(Default)]
struct Totals {
    trial: Option<String>,
    task: Option<String>,
    calls: u64,
    choices: u64,
    prompt_tokens: u64,
    completion_tokens: u64,
    trainable: u64,
    failed: u64,
    first_us: i64,
    last_us: i64,
}

impl Totals {
    fn add(&mut self, call: &Call) {
        let tokens = |ids: &Option<Vec<u32>>| ids.as_ref().map_or(0, Vec::len) as u64;
        self.choices += 1;
        if call.choice_index == 0 {
            self.calls += 1;
            self.prompt_tokens += tokens(&call.prompt_token_ids);
        }
        self.completion_tokens += tokens(&call.completion_token_ids);
        self.trainable += u64::from(call.trainable);
        self.failed += u64::from(call.status != crate::record::CallStatus::Ok);
        self.trial = self.trial.take().or(call.trial_id.as_ref().map(ToString::to_string));
        self.task = self.task.take().or(call.task_id.as_ref().map(ToString::to_string));
        let is_first = self.choices == 1;
        self.first_us = if is_first { call.received_at } else { self.first_us.min(call.received_at) };
        self.last_us = self.last_us.max(call.received_at + call.duration_us as i64);
    }
}

fn list_sessions(out: &mut dyn Write, dir: &std::path::Path, json: bool) -> anyhow::Result<()> {
    let mut sessions: BTreeMap<SessionId, Totals> = BTreeMap::new();
    let mut reader =
        Reader::open(dir, Query { without_bodies: true, without_routing: true, ..Query::default() })?;
    for call in reader.by_ref() {
        let call = call?;
        sessions.entry(call.session_id.clone()).or_default().add(&call);
    }
    warn_skipped(&reader);
    let mut sessions: Vec<_> = sessions.into_iter().collect();
    sessions.sort_by_key(|(_, totals)| totals.first_us);
    if !json {
        let head = ("session", "calls", "prompt", "sampled", "trainable", "failed", "first call (UTC)");
        writeln!(
            out,
            "{:<36} {:>6} {:>10} {:>10} {:>9} {:>6}  {:<20} trial",
            head.0, head.1, head.2, head.3, head.4, head.5, head.6
        )?;
    }
    for (session, t) in &sessions {
        if json {
            let line = json!({
                "session_id": session, "trial_id": t.trial, "task_id": t.task, "calls": t.calls,
                "choices": t.choices, "prompt_tokens": t.prompt_tokens,
                "completion_tokens": t.completion_tokens, "trainable": t.trainable,
                "failed": t.failed, "first_us": t.first_us, "last_us": t.last_us,
            });
            writeln!(out, "{line}")?;
        } else {
            writeln!(
                out,
                "{:<36} {:>6} {:>10} {:>10} {:>9} {:>6}  {:<20} {}",
                session.as_str(),
                t.calls,
                t.prompt_tokens,
                t.completion_tokens,
                t.trainable,
                t.failed,
                time(t.first_us),
                t.trial.as_deref().unwrap_or("-")
            )?;
        }
    }
    if !json {
        let tokens: u64 = sessions.iter().map(|(_, totals)| totals.completion_tokens).sum();
        writeln!(out, "{} sessions, {tokens} sampled tokens", sessions.len())?;
    }
    Ok(())
}

fn list_calls(
    out: &mut dyn Write,
    dir: &std::path::Path,
    session: SessionId,
    json: bool,
) -> anyhow::Result<()> {
    let name = session.to_string();
    let calls = load(dir, Query { without_bodies: true, without_routing: true, ..Query::session(session) })?;
    anyhow::ensure!(!calls.is_empty(), "no session {name} in {}", dir.display());
    if !json {
        writeln!(
            out,
            "{:<36} {:>2} {:<8} {:<17} {:>7} {:>7} {:>9}  {:<12} trainable",
            "call", "#", "kind", "status", "prompt", "sampled", "ms", "finish"
        )?;
    }
    for call in &calls {
        let tokens = |ids: &Option<Vec<u32>>| ids.as_ref().map_or("-".to_owned(), |i| i.len().to_string());
        if json {
            writeln!(out, "{}", serde_json::to_string(call)?)?;
            continue;
        }
        let reasons = call.not_trainable_reasons.join(", ");
        writeln!(
            out,
            "{:<36} {:>2} {:<8} {:<17} {:>7} {:>7} {:>9.1}  {:<12} {}",
            call.call_id.to_string(),
            call.choice_index,
            call.kind.as_str(),
            call.status.as_str(),
            tokens(&call.prompt_token_ids),
            tokens(&call.completion_token_ids),
            call.duration_us as f64 / 1000.0,
            call.finish_reason.as_deref().unwrap_or("-"),
            if call.trainable { "yes" } else { &reasons }
        )?;
    }
    Ok(())
}

fn show(
    out: &mut dyn Write,
    dir: &std::path::Path,
    id: &str,
    tokens: bool,
    json: bool,
) -> anyhow::Result<()> {
    let mut calls = match id.parse() {
        Ok(session) => load(dir, Query::session(session))?,
        Err(_) => vec![],
    };
    if let (true, Ok(call_id)) = (calls.is_empty(), id.parse()) {
        calls = load(dir, Query { call_id: Some(call_id), ..Query::default() })?;
    }
    anyhow::ensure!(
        !calls.is_empty(),
        "no session or call {id} in {}: `lego capture ls` lists them",
        dir.display()
    );
    let mut told = 0;
    for call in &calls {
        if json {
            writeln!(out, "{}", serde_json::to_string(call)?)?;
        } else {
            told = show_call(out, call, told, tokens)?;
        }
    }
    Ok(())
}

/// Prints one call; of its messages only those after the first `told`, which the call before had too.
/// Returns how many messages it had.
fn show_call(out: &mut dyn Write, call: &Call, told: usize, tokens: bool) -> anyhow::Result<usize> {
    let request: serde_json::Value = match &call.client_request {
        Some(body) => serde_json::from_str(body.get()).context("client_request")?,
        None => serde_json::Value::Null,
    };
    let messages = request["messages"].as_array().map(Vec::as_slice).unwrap_or_default();
    writeln!(
        out,
        "── call {} #{} · {} · {} · {} · {}",
        call.call_id,
        call.choice_index,
        time(call.received_at),
        call.kind.as_str(),
        call.model_served.as_deref().unwrap_or(&call.model_requested),
        call.status.as_str(),
    )?;
    let new = if told < messages.len() { told } else { 0 };
    if new > 0 {
        writeln!(out, "   ({new} messages as before)")?;
    }
    for message in &messages[new..] {
        writeln!(out, "[{}] {}", message["role"].as_str().unwrap_or("?"), content(message))?;
    }
    if let Some(error) = &call.error {
        writeln!(out, "[error] {error}")?;
    }
    writeln!(out, "[reply] {}", call.text.as_deref().unwrap_or(""))?;
    for tool in call.tool_calls.iter().flatten() {
        writeln!(out, "[reply calls] {}({})", tool.name, tool.arguments)?;
    }
    let count = |ids: &Option<Vec<u32>>| ids.as_ref().map_or("no".to_owned(), |i| i.len().to_string());
    let sum: Option<f32> = call.completion_logprobs.as_ref().and_then(|l| l.iter().copied().sum());
    writeln!(
        out,
        "   {} prompt ids ({}), {} sampled ids ({}), log-prob {} ({}), weights {}, finish {}, {}",
        count(&call.prompt_token_ids),
        call.prompt_ids_source.as_str(),
        count(&call.completion_token_ids),
        call.completion_ids_source.as_str(),
        sum.map_or("unknown".to_owned(), |sum| format!("{sum:.3}")),
        call.logprob_semantics.as_str(),
        versions(call),
        call.finish_reason.as_deref().unwrap_or("-"),
        if call.trainable {
            "trainable".to_owned()
        } else {
            format!("not trainable: {}", call.not_trainable_reasons.join(", "))
        }
    )?;
    if tokens {
        show_tokens(out, call)?;
    }
    Ok(messages.len())
}

fn show_tokens(out: &mut dyn Write, call: &Call) -> anyhow::Result<()> {
    if let Some(prompt) = &call.prompt_token_ids {
        writeln!(out, "   prompt ids {prompt:?}")?;
    }
    let spans = call.weight_spans.as_deref().unwrap_or_default();
    writeln!(out, "   {:>6} {:>8} {:>14}  weights", "#", "id", "log-prob")?;
    for (i, id) in call.completion_token_ids.iter().flatten().enumerate() {
        let logprob = call.completion_logprobs.as_ref().and_then(|l| l.get(i).copied().flatten());
        let at = i as u32;
        let version = spans.iter().find(|span| (span.start..span.end).contains(&at));
        writeln!(
            out,
            "   {i:>6} {id:>8} {:>14}  {}",
            logprob.map_or("null".to_owned(), |value| value.to_string()),
            version.map_or("null", |span| &span.version)
        )?;
    }
    Ok(())
}

fn versions(call: &Call) -> String {
    match call.weight_spans.as_deref() {
        None | Some([]) => "unknown".to_owned(),
        Some([one]) => one.version.clone(),
        Some(several) => several.iter().fold(String::new(), |mut text, span| {
            let _ = write!(text, "{}[{},{}) ", span.version, span.start, span.end);
            text
        }),
    }
}

/// A message's text: plain, or its text parts; tool calls as they were sent.
fn content(message: &serde_json::Value) -> String {
    let mut text = match &message["content"] {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Array(parts) => {
            parts.iter().map(|part| part["text"].as_str().unwrap_or("[not text]")).collect()
        }
        _ => String::new(),
    };
    if let Some(calls) = message["tool_calls"].as_array() {
        for call in calls {
            let function = &call["function"];
            let name = function["name"].as_str().unwrap_or("?");
            let _ = write!(text, " → {name}({})", function["arguments"].as_str().unwrap_or(""));
        }
    }
    text
}

/// Calls in the order they were made.
fn load(dir: &std::path::Path, query: Query) -> anyhow::Result<Vec<Call>> {
    let mut reader = Reader::open(dir, query)?;
    let mut calls = reader.by_ref().collect::<Result<Vec<_>, _>>()?;
    warn_skipped(&reader);
    calls.sort_by_key(|call| (call.received_at, call.call_id, call.choice_index));
    Ok(calls)
}

fn warn_skipped(reader: &Reader) {
    for file in reader.skipped() {
        eprintln!("warning: left out {file}");
    }
}

/// `YYYY-MM-DD HH:MM:SS`, UTC.
fn time(us: i64) -> String {
    let seconds = us.div_euclid(1_000_000).rem_euclid(86_400);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{} {hours:02}:{minutes:02}:{:02}", crate::capture::date_of(us), seconds % 60)
}
