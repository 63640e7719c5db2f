//! `lego capture`: look into a capture folder.

#[cfg(feature = "sql")]
mod answer;
mod compact;
mod export;
mod ledger;
mod lineages;
mod list;
mod prune;
mod show;
mod sql;
mod tail;
mod texts;
mod turns;
mod verify;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use clap::Subcommand;
use clap::builder::PossibleValuesParser;
use clap::builder::TypedValueParser as _;
use indicatif::{ProgressBar, ProgressStyle};

use crate::capture::{Filter, Place};
use crate::cli::Usage;
use crate::record::{CallKind, SessionId};

/// Look into captures, also while a run writes them.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List sessions, or the calls of one session, oldest first.
    Ls(ListArgs),
    /// Show a session's conversation, or one call.
    Show(ShowArgs),
    /// List the newest calls, and with -f those that follow, as they are captured.
    Tail(tail::Args),
    /// Check every file and every record; what is wrong is listed, and the exit code is 1.
    Verify(verify::Args),
    /// Where every sampled token went; if that does not add up, the calls are listed, and the exit code is 1.
    Ledger(ledger::Args),
    /// Which calls go on from which, whose they are, and why a history was rewritten (docs/lineages.md).
    Lineages(lineages::Args),
    /// Ask in SQL: `SELECT session_id, count(*) FROM calls GROUP BY 1` (docs/sql.md).
    Sql(sql::Args),
    /// Write calls in the form of another trainer, or of a conversation data set.
    Export(export::Args),
    /// Remove old days whole; those that calls which stay go on from are kept.
    Prune(prune::Args),
    /// Make Parquet of what a writer that died left in the journal, and merge small files of each day.
    Compact(compact::Args),
}

/// The folder that a command works on.
#[derive(Debug, clap::Args)]
struct Folder {
    /// Folder or URL of captures (the proxy's `capture_dir`), or a run's folder [default: ./captures].
    #[arg(value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The same, as `ls` and `show` take it.
    #[arg(long, value_name = "DIR", conflicts_with = "dir")]
    capture_dir: Option<PathBuf>,
    #[command(flatten)]
    local: Local,
}

/// What goes with a URL.
#[derive(Debug, clap::Args)]
struct Local {
    /// Of captures in object storage: folder on this machine with those that are not there yet [default: as for
    /// `proxy.capture_local_dir`].
    #[arg(long, value_name = "DIR")]
    local_dir: Option<PathBuf>,
}

impl Folder {
    /// The folder that was named.
    fn named(&self) -> &Path {
        self.dir.as_deref().or(self.capture_dir.as_deref()).unwrap_or(Path::new("./captures"))
    }

    fn captures(&self) -> anyhow::Result<Place> {
        captures(self.named(), &self.local)
    }
}

/// A predicate on columns.
#[derive(Debug, clap::Args)]
struct Where {
    /// Only calls for which this is true, as `status = 'ok' and completion_tokens > 100` (docs/captures.md).
    #[arg(long = "where", value_name = "PREDICATE")]
    filter: Option<Filter>,
}

#[derive(Debug, clap::Args)]
struct ListArgs {
    /// Folder or URL of captures (the proxy's `capture_dir`), or a run's folder.
    #[arg(long, default_value = "./captures", value_name = "DIR")]
    capture_dir: PathBuf,
    #[command(flatten)]
    local: Local,
    /// List the calls of this session.
    #[arg(long, value_name = "SESSION")]
    session: Option<SessionId>,
    /// Only calls of this kind.
    #[arg(long, value_name = "KIND", value_parser = kinds())]
    kind: Option<CallKind>,
    /// Only the newest N, still oldest first.
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Only calls of the last days, as `7d`: those of earlier days (UTC) are not read. What is left is what
    /// `prune --older-than` of as many days would leave.
    #[arg(long, value_name = "DAYS", value_parser = days)]
    last: Option<u32>,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    r#where: Where,
}

#[derive(Debug, clap::Args)]
struct ShowArgs {
    /// Session id or call id.
    id: String,
    /// Folder or URL of captures, or a run's folder.
    #[arg(long, default_value = "./captures", value_name = "DIR")]
    capture_dir: PathBuf,
    #[command(flatten)]
    local: Local,
    /// Show token ids with their log-probs and weight versions.
    #[arg(long)]
    tokens: bool,
    /// Folder with the model's tokenizer.json and chat template: with --tokens each id's text is shown too; for calls of
    /// the token-in relay, how their prompts differ from what the template renders [default: that of the run's
    /// policy, for what the embedded engine sampled].
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// One JSON object a choice, everything that was captured.
    #[arg(long)]
    json: bool,
}

fn kinds() -> impl clap::builder::TypedValueParser<Value = CallKind> {
    let names = PossibleValuesParser::new(CallKind::ALL.iter().map(|kind| kind.as_str()));
    names.map(|name| CallKind::from_name(&name).unwrap_or(CallKind::Unknown))
}

/// Runs the command.
///
/// # Errors
/// The folder cannot be read, or has nothing by that id.
pub fn run(args: Args) -> anyhow::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let shown = match &args.command {
        Command::Ls(args) => list::list(&mut out, args),
        Command::Show(args) => show::show(&mut out, args),
        Command::Tail(args) => tail::run(&mut out, args),
        Command::Verify(args) => verify::run(&mut out, args),
        Command::Ledger(args) => ledger::run(&mut out, args),
        Command::Lineages(args) => lineages::run(&mut out, args),
        Command::Sql(args) => sql::run(&mut out, args),
        Command::Export(args) => export::run(&mut out, args),
        Command::Prune(args) => prune::run(&mut out, args),
        Command::Compact(args) => compact::run(&mut out, args),
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

/// The captures that are meant: a URL, a folder, or those of the run whose folder it is.
fn captures(named: &Path, local: &Local) -> anyhow::Result<Place> {
    let place = Place::named(named, local.local_dir.as_deref())?;
    if place.is_remote() {
        return Ok(place);
    }
    anyhow::ensure!(
        local.local_dir.is_none(),
        Usage("--local-dir goes with a URL of object storage".to_owned())
    );
    let inside = named.join("captures");
    let is_run = inside.is_dir() && !named.join("journal").is_dir();
    Ok(Place::from(if is_run { inside.as_path() } else { named }))
}

fn warn(left_out: &[String]) {
    for what in left_out {
        errln!("warning: left out {what}");
    }
}

/// `YYYY-MM-DD HH:MM:SS`, UTC.
fn time(us: i64) -> String {
    let seconds = us.div_euclid(1_000_000).rem_euclid(86_400);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{} {hours:02}:{minutes:02}:{:02}", crate::capture::date_of(us), seconds % 60)
}

/// A century.
const MOST_DAYS: u32 = 36_525;

/// A number of days, as `30d`.
fn days(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix('d').and_then(|number| number.parse().ok());
    let number = number.filter(|number| *number <= MOST_DAYS);
    number.ok_or_else(|| format!("a number of days up to {MOST_DAYS} is to stand here, as 30d"))
}

/// When the day (UTC) so many days ago began, µs since the Unix epoch.
fn start_of_day(days_ago: u32) -> anyhow::Result<i64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    let today = i64::try_from(now.as_secs() / 86_400).context("the clock is far in the future")?;
    Ok((today - i64::from(days_ago)) * 86_400_000_000)
}

/// How far a long work is: on a terminal, for bytes.
fn progress(verb: &'static str) -> ProgressBar {
    let bar = ProgressBar::new(0).with_message(verb);
    match ProgressStyle::with_template("{msg} {bar:40} {bytes}/{total_bytes}, {elapsed}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
