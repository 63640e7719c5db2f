//! `lego capture prune`.

use std::io::Write;

use anyhow::bail;
use indicatif::HumanBytes;

use super::{Folder, days, start_of_day};
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

/// Removes days, and says which.
pub(super) fn run(out: &mut dyn Write, args: &Args) -> anyhow::Result<()> {
    let dir = args.folder.captures()?;
    let before = date_of(start_of_day(args.older_than)?);
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
