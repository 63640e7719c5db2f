//! `lego capture prune`.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use indicatif::HumanBytes;

use super::Folder;
use crate::capture::date_of;
use crate::run::count;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    folder: Folder,
    /// Age in days (UTC) from which on a day is removed, as `30d`.
    #[arg(long, value_name = "DAYS", value_parser = days)]
    older_than: u32,
    /// Only say what would be removed.
    #[arg(long)]
    dry_run: bool,
    /// One JSON object a day.
    #[arg(long)]
    json: bool,
}

/// A century.
const MOST_DAYS: u32 = 36_525;

fn days(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix('d').and_then(|number| number.parse().ok());
    let number = number.filter(|number| *number <= MOST_DAYS);
    number.ok_or_else(|| format!("a number of days up to {MOST_DAYS} is to stand here, as 30d"))
}

/// Removes days, and says which.
pub(super) fn run(out: &mut dyn Write, args: &Args) -> anyhow::Result<()> {
    let dir = args.folder.captures()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    let now = i64::try_from(now.as_micros()).context("the clock is far in the future")?;
    let before = date_of(now - i64::from(args.older_than) * 86_400_000_000);
    let pruned = crate::capture::prune(&dir, &before, args.dry_run)?;
    for day in &pruned {
        if args.json {
            writeln!(out, "{}", serde_json::to_string(day)?)?;
            continue;
        }
        let verb = match (&day.reason, args.dry_run) {
            (Some(_), _) => "kept",
            (None, true) => "would be removed",
            (None, false) => "removed",
        };
        let files = count(day.files as u64, "file", "files");
        write!(out, "{} {verb}: {files}, {}", day.date, HumanBytes(day.bytes))?;
        writeln!(out, "{}", day.reason.as_ref().map_or_else(String::new, |reason| format!("; {reason}")))?;
    }
    out.flush()?;
    let removed = pruned.iter().filter(|day| day.is_removed);
    let (days, bytes) = (removed.clone().count() as u64, removed.map(|day| day.bytes).sum());
    let would = if args.dry_run { "would be " } else { "" };
    errln!("{} before {before}, {}, {would}removed", count(days, "day", "days"), HumanBytes(bytes));
    match pruned.iter().filter(|day| day.is_refused).count() as u64 {
        0 => Ok(()),
        refused => bail!("{} could not be removed", count(refused, "day", "days")),
    }
}
