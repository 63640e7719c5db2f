//! `lego capture compact`.

use std::io::Write;
use std::time::Duration;

use anyhow::{bail, ensure};
use indicatif::{HumanBytes, ProgressBar};
use serde_json::json;

use super::Folder;
use crate::capture::{CaptureError, Uploader, Writer, WriterOptions, compact_days};
use crate::cli::block_on;
use crate::run::count;

/// How long uploads that fail are tried again.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    folder: Folder,
    /// One JSON object for the journal, and one a day.
    #[arg(long)]
    json: bool,
}

/// Compacts a folder, and says what was done.
pub(super) fn run(out: &mut dyn Write, args: &Args) -> anyhow::Result<()> {
    let dir = args.folder.captures()?;
    if !dir.is_remote() && !dir.dir().is_dir() {
        return Err(CaptureError::NoFolder { dir: dir.dir().to_owned() }.into());
    }
    if dir.is_remote() && !dir.dir().is_dir() {
        bail!(
            "{} has nothing for {} on this machine, and what is there is not merged",
            dir.dir().display(),
            dir.shown()
        );
    }
    let bar = ProgressBar::new_spinner().with_message("compacting");
    bar.tick();
    // A writer that opens the folder and closes it does all that is to be done to the journal.
    let writer = Writer::open(&dir, WriterOptions::default())?;
    let recovery = writer.recovery().clone();
    let uploader = Uploader::start(&dir);
    let closed = block_on(async { Ok(writer.close().await) })?;
    let torn: u64 = recovery.torn.iter().map(|tail| tail.bytes).sum();
    let damaged: u64 = recovery.damaged.iter().map(|damage| damage.bytes).sum();
    if args.json {
        let journal = json!({
            "appends": recovery.appends, "unfinished": recovery.unfinished, "torn_bytes": torn,
            "damaged_bytes": damaged, "left_in_journal": closed.left_in_journal,
        });
        writeln!(out, "{}", json!({"journal": journal}))?;
    } else if recovery != crate::capture::Recovery::default() {
        let records = count(recovery.appends, "append", "appends");
        write!(out, "journal: {records} made into Parquet")?;
        if recovery.unfinished > 0 {
            write!(out, "; {} without an end", count(recovery.unfinished, "call", "calls"))?;
        }
        if torn > 0 {
            write!(out, "; {} of a torn tail cut off", count(torn, "byte", "bytes"))?;
        }
        if damaged > 0 {
            write!(out, "; {} damaged", count(damaged, "byte", "bytes"))?;
        }
        writeln!(out)?;
    }
    let mut left = closed.left_in_journal.len();
    let mut told = Ok(());
    if let Some(uploader) = uploader {
        let waiting = uploader.finish(PATIENCE);
        bar.finish_and_clear();
        out.flush()?;
        for problem in closed.left_in_journal.iter().chain(&waiting) {
            errln!("left on this machine: {problem}");
        }
        ensure!(left == 0 && waiting.is_empty(), "not all of {} could be uploaded", dir.dir().display());
        errln!("all of {} is in {}; files there are not merged", dir.dir().display(), dir.shown());
        return Ok(());
    }
    let compacted = compact_days(dir.dir(), &mut |day| {
        bar.tick();
        left += day.left.len();
        if told.is_err() {
            return;
        }
        told = if args.json {
            serde_json::to_string(&day).map_err(Into::into).and_then(|line| writeln!(out, "{line}"))
        } else {
            let before = count(day.files_before as u64, "file", "files");
            writeln!(
                out,
                "{}: {before}, {} to {}, {}",
                day.date,
                HumanBytes(day.bytes_before),
                day.files_after,
                HumanBytes(day.bytes_after)
            )
        };
        for left in &day.left {
            errln!("left as it is: {left}");
        }
    });
    bar.finish_and_clear();
    compacted?;
    told?;
    out.flush()?;
    for segment in &closed.left_in_journal {
        errln!("left in the journal: {segment}");
    }
    match left {
        0 => Ok(()),
        left => bail!(
            "{} left as {} in {}",
            count(left as u64, "thing was", "things were"),
            if left == 1 { "it was" } else { "they were" },
            dir.shown()
        ),
    }
}
