//! `lego task`: look at a dataset, and prove that its tasks are what they claim to be.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::{Subcommand, ValueEnum};
use futures_util::{StreamExt as _, stream};
use indicatif::{ProgressBar, ProgressStyle};

use crate::sandbox::{self, Backend, Choice};
use crate::task::{Dataset, Split, Task, TaskStore, TestResult, Verdict, Verifier, VerifierOptions};

/// List, show and check the tasks of a dataset.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List tasks: id, split, kind of bug, statement.
    Ls(Ls),
    /// Show one task with its reference patch and hidden tests.
    Show(Show),
    /// Prove for every task that doing nothing fails it and the reference patch passes it.
    Verify(Verify),
}

#[derive(Debug, clap::Args)]
struct Source {
    /// Dataset to read, a JSONL file in SWE-bench's schema.
    #[arg(long, value_name = "FILE", default_value = "data/swebench_mini.jsonl")]
    dataset: PathBuf,
}

#[derive(Debug, clap::Args)]
struct Ls {
    #[command(flatten)]
    source: Source,
    /// Only the tasks of this split.
    #[arg(long)]
    split: Option<SplitName>,
}

#[derive(Debug, clap::Args)]
struct Show {
    #[command(flatten)]
    source: Source,
    /// The task's instance_id.
    id: String,
}

#[derive(Debug, clap::Args)]
struct Verify {
    #[command(flatten)]
    source: Source,
    /// Only the tasks of this split.
    #[arg(long)]
    split: Option<SplitName>,
    /// Tasks at once.
    #[arg(long, value_name = "N", default_value_t = default_jobs())]
    jobs: usize,
    /// Folder for the tasks' files, kept between runs.
    #[arg(long, value_name = "DIR", default_value = ".lego-cache/tasks")]
    cache: PathBuf,
    /// Which sandbox backend to use.
    #[arg(long, value_name = "auto|embedded|weak", default_value = "auto")]
    backend: Choice,
    /// Allow the weak sandbox (Landlock and seccomp only) where no other works.
    #[arg(long)]
    weak_sandbox: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum SplitName {
    Train,
    Heldout,
}

impl From<SplitName> for Split {
    fn from(name: SplitName) -> Self {
        match name {
            SplitName::Train => Self::Train,
            SplitName::Heldout => Self::Heldout,
        }
    }
}

fn default_jobs() -> usize {
    std::thread::available_parallelism().map_or(2, std::num::NonZero::get)
}

/// Runs the command.
///
/// # Errors
/// When the dataset cannot be used, or a task is not what it claims to be.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Ls(ls) => list(&ls),
        Command::Show(show) => print_task(&show),
        Command::Verify(verify) => super::block_on(verify_all(verify)),
    }
}

fn select(dataset: &Dataset, split: Option<SplitName>) -> Vec<Task> {
    let split = split.map(Split::from);
    let is_wanted = |task: &&Task| split.is_none_or(|split| task.split == split);
    dataset.tasks.iter().filter(is_wanted).cloned().collect()
}

fn list(ls: &Ls) -> anyhow::Result<()> {
    let dataset = Dataset::load(&ls.source.dataset)?;
    for task in select(&dataset, ls.split) {
        let statement = task.problem_statement.lines().next().unwrap_or_default();
        outln!(
            "{}\t{}\t{}\t{statement}",
            task.instance_id,
            task.split.as_str(),
            task.bug_family().unwrap_or("-")
        );
    }
    Ok(())
}

fn print_task(show: &Show) -> anyhow::Result<()> {
    let dataset = Dataset::load(&show.source.dataset)?;
    let task = dataset.tasks.iter().find(|task| task.instance_id.as_str() == show.id);
    let task = task.with_context(|| {
        format!("{} has no task {:?}; lego task ls lists them", show.source.dataset.display(), show.id)
    })?;
    outln!("{}  ({}, {})", task.instance_id, task.split.as_str(), task.bug_family().unwrap_or("-"));
    outln!("{} at {}\n", task.repo, task.base_commit);
    outln!("{}\n", task.problem_statement);
    outln!("Reference patch:\n{}", task.patch);
    outln!("Hidden tests:\n{}", task.test_patch);
    outln!("Fail before, pass after: {}", task.fail_to_pass.join(" "));
    outln!("Pass before and after: {}", task.pass_to_pass.join(" "));
    Ok(())
}

async fn verify_all(args: Verify) -> anyhow::Result<()> {
    let dataset = Dataset::load(&args.source.dataset)?;
    let tasks = select(&dataset, args.split);
    if tasks.is_empty() {
        bail!("{} has no task of this split", args.source.dataset.display());
    }
    let backend = sandbox::select(args.backend, args.weak_sandbox).await?;
    let store = Arc::new(TaskStore::new(&dataset, &args.cache));
    let verifier = Verifier::new(store, VerifierOptions::new(&args.cache.join("scratch")));
    let bar = progress(tasks.len());
    let results = stream::iter(tasks)
        .map(|task| check_on_a_task(verifier.clone(), backend.clone(), task, bar.clone()))
        .buffered(args.jobs.max(1));
    let complaints: Vec<String> = results.collect::<Vec<_>>().await.into_iter().flatten().collect();
    let count = bar.length().unwrap_or_default();
    bar.finish_and_clear();
    for complaint in &complaints {
        outln!("{complaint}");
    }
    outln!(
        "{count} tasks, {} good, {} bad ({})",
        count - complaints.len() as u64,
        complaints.len(),
        describe(backend.as_ref())
    );
    if complaints.is_empty() {
        Ok(())
    } else {
        bail!("{} tasks are not what they claim to be", complaints.len())
    }
}

fn progress(count: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} tasks, {elapsed} {msg}");
    let bar = ProgressBar::new(count as u64);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn describe(backend: &dyn Backend) -> String {
    let capabilities = backend.capabilities();
    format!("sandbox: {}, {}", capabilities.backend, capabilities.mode)
}

/// On a task of the runtime, so that all cores are used. What is wrong with the task, if anything.
async fn check_on_a_task(
    verifier: Verifier,
    backend: Arc<dyn Backend>,
    task: Task,
    bar: ProgressBar,
) -> Option<String> {
    let id = task.instance_id.clone();
    let checked = tokio::spawn(async move { check(&verifier, backend.as_ref(), &task).await }).await;
    bar.inc(1);
    let complaint = checked.unwrap_or_else(|error| Err(error.to_string())).err();
    complaint.map(|complaint| format!("{id}: {complaint}"))
}

async fn check(verifier: &Verifier, backend: &dyn Backend, task: &Task) -> Result<(), String> {
    let verify = async |diff: &[u8]| {
        let verdict = verifier.verify(backend, task, diff).await;
        verdict.map_err(|failure| format!("cannot be verified: {failure:?}"))
    };
    let untouched = verify(b"").await?;
    let is_as_claimed = |id: &String, wanted: TestResult| untouched.tests.get(id) == Some(&wanted);
    if untouched.resolved {
        return Err("doing nothing solves it".to_owned());
    }
    if let Some(id) = task.fail_to_pass.iter().find(|id| !is_as_claimed(id, TestResult::Failed)) {
        return Err(format!("test {id} of FAIL_TO_PASS does not fail at base_commit"));
    }
    if let Some(id) = task.pass_to_pass.iter().find(|id| !is_as_claimed(id, TestResult::Passed)) {
        return Err(format!("test {id} of PASS_TO_PASS does not pass at base_commit"));
    }
    // What a trial hands in is read from its workspace: a solution that cannot be read from one is none.
    let solved = verify(&verifier.reference_diff(task).await?).await?;
    if !solved.resolved {
        return Err(format!("the reference patch does not solve it: {}", explain(&solved)));
    }
    Ok(())
}

fn explain(verdict: &Verdict) -> String {
    if let Some(note) = &verdict.note {
        return note.clone();
    }
    let failed = verdict.tests.iter().filter(|(_, result)| **result != TestResult::Passed);
    let names: Vec<&str> = failed.map(|(name, _)| name.as_str()).collect();
    format!("{} did not pass", names.join(", "))
}
