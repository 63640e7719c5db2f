//! `lego capture export`.

use std::io::Write;
use std::path::PathBuf;

use anyhow::bail;
use clap::ValueEnum;
use indicatif::ProgressBar;

use super::{Folder, Where};
use crate::export::{Counts, Format, Options};
use crate::run::count;
use crate::telemetry::RunBooks;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    folder: Folder,
    /// Whose form.
    #[arg(long, value_enum)]
    format: FormatName,
    /// The file to write; for slime and prime-rl a folder.
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    #[command(flatten)]
    r#where: Where,
    /// Replace what is at PATH.
    #[arg(long)]
    force: bool,
    /// openai, sharegpt: conversations of evaluations too, whose tasks are held out from training.
    #[arg(long)]
    with_evaluations: bool,
    /// prime-rl: data-parallel ranks of its trainer.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    ranks: u16,
    /// One JSON object that says what was written and what was left out.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum FormatName {
    /// JSON lines, one a sampled choice: ids, log-probs, expert routing.
    Calls,
    /// JSON lines, one a conversation: OpenAI's messages.
    Openai,
    /// JSON lines, one a conversation: human and gpt.
    Sharegpt,
    /// JSON lines, one a conversation: an ATIF trajectory.
    Atif,
    /// JSON lines, one a sample: what TRL's rollout_func returns.
    Trl,
    /// JSON lines, one a sample: verl's AgentLoopOutput.
    Verl,
    /// A folder of debug-rollout files.
    Slime,
    /// A folder of micro-batch files.
    PrimeRl,
}

impl From<FormatName> for Format {
    fn from(name: FormatName) -> Self {
        match name {
            FormatName::Calls => Self::Calls,
            FormatName::Openai => Self::Openai,
            FormatName::Sharegpt => Self::Sharegpt,
            FormatName::Atif => Self::Atif,
            FormatName::Trl => Self::Trl,
            FormatName::Verl => Self::Verl,
            FormatName::Slime => Self::Slime,
            FormatName::PrimeRl => Self::PrimeRl,
        }
    }
}

/// Exports, and says what became of all that there is.
pub(super) fn run(out: &mut dyn Write, args: &Args) -> anyhow::Result<()> {
    let dir = args.folder.captures()?;
    let of_run = Some(dir.dir()).filter(|folder| folder.is_dir() && !dir.is_remote());
    let books = of_run.map_or(Ok(None), RunBooks::of)?;
    let options = Options {
        format: args.format.into(),
        filter: args.r#where.filter.as_ref(),
        with_evaluations: args.with_evaluations,
        ranks: args.ranks,
        force: args.force,
    };
    let bar = ProgressBar::new(0);
    let mut progress = |done, all| {
        bar.set_length(all);
        bar.set_position(done);
    };
    let counts = crate::export::export(&dir, books.as_ref(), &args.out, options, &mut progress);
    bar.finish_and_clear();
    let counts = counts?;
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&counts)?)?;
        out.flush()?;
    } else {
        tell(&args.out, &counts);
    }
    for unread in &counts.unread {
        errln!("left out {unread}");
    }
    match counts.unread.len() as u64 {
        0 => Ok(()),
        unread => bail!(
            "{} not in {}",
            count(unread, "thing that could not be read is", "things that could not be read are"),
            args.out.display()
        ),
    }
}

fn tell(path: &std::path::Path, counts: &Counts) {
    errln!("{}: {} ({})", path.display(), count(counts.rows.written(), "row", "rows"), counts.format);
    for (what, tally) in counts.tallies().into_iter().filter(|(_, tally)| tally.all > 0) {
        let by: Vec<_> = tally.by.iter().map(|(bucket, number)| format!("{number} {bucket}")).collect();
        errln!("  {what}: {} = {}", tally.all, by.join(" + "));
    }
    if counts.routing_lost > 0 {
        errln!("  expert routing is not all there: {}", count(counts.routing_lost, "row", "rows"));
    }
    if counts.differing_rows > 0 {
        errln!(
            "  expert routing of one position differs between two calls: {} of positions; the first call's are written",
            count(counts.differing_rows, "row", "rows")
        );
    }
    for note in &counts.notes {
        errln!("  note: {note}");
    }
}
