//! `lego capture verify`.

use std::io::{self, Write};
use std::ops::ControlFlow;

use anyhow::bail;
use indicatif::ProgressBar;
use serde_json::json;

use super::{Folder, Where, progress};
use crate::capture::{Finding, Verified, Watch};
use crate::run::count;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    folder: Folder,
    #[command(flatten)]
    r#where: Where,
    /// One JSON object a finding, and a last one that says what was looked at.
    #[arg(long)]
    json: bool,
}

/// Prints what is wrong.
pub(super) fn run(out: &mut dyn Write, args: &Args) -> anyhow::Result<()> {
    let dir = args.folder.captures()?;
    let mut list = List { out, is_json: args.json, failed: None, bar: progress("verifying") };
    let verified = crate::capture::verify(&dir, args.r#where.filter.as_ref(), &mut list);
    list.bar.finish_and_clear();
    if let Some(error) = list.failed {
        return Err(error.into());
    }
    let verified = verified?;
    if args.json {
        writeln!(out, "{}", json!({"verified": verified}))?;
    }
    out.flush()?;
    errln!("{}", summary(&verified));
    match verified.findings {
        0 => Ok(()),
        findings => bail!("{} in {}", count(findings, "finding", "findings"), dir.shown()),
    }
}

fn summary(verified: &Verified) -> String {
    let mut text = format!(
        "{} in {} and {} looked at",
        count(verified.records, "record", "records"),
        count(verified.parquet_files, "Parquet file", "Parquet files"),
        count(verified.segments, "segment of the journal", "segments of the journal"),
    );
    if verified.files_without_checksum > 0 {
        let files = count(verified.files_without_checksum, "file is", "files are");
        text += &format!("; {files} from before there were checksums, and only decoded");
    }
    if let Some(pid) = &verified.writer {
        text +=
            &format!("; process {pid} writes, {} of its last write not counted", bytes(verified.open_bytes));
    }
    if verified.findings == 0 { text + ": nothing found" } else { text }
}

fn bytes(number: u64) -> String {
    count(number, "byte", "bytes")
}

struct List<'a> {
    out: &'a mut dyn Write,
    is_json: bool,
    failed: Option<io::Error>,
    bar: ProgressBar,
}

impl List<'_> {
    fn write(&mut self, finding: &Finding) -> io::Result<()> {
        if self.is_json {
            return writeln!(self.out, "{}", serde_json::to_string(finding)?);
        }
        let Finding { call_id, choice_index, file, invariant, found, .. } = finding;
        write!(self.out, "{}: ", file.display())?;
        if let Some(id) = call_id {
            write!(self.out, "call {id}")?;
            if let Some(index) = choice_index {
                write!(self.out, " choice {index}")?;
            }
            write!(self.out, ": ")?;
        }
        writeln!(self.out, "{invariant}: {found}")
    }
}

impl Watch for List<'_> {
    fn found(&mut self, finding: &Finding) -> ControlFlow<()> {
        match self.write(finding) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.failed = Some(error);
                ControlFlow::Break(())
            }
        }
    }

    fn progress(&mut self, done: u64, all: u64) {
        self.bar.set_length(all);
        self.bar.set_position(done);
    }
}
