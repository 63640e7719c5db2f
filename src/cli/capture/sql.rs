//! `lego capture sql`.

use std::path::PathBuf;

use super::Folder;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A query over the table `calls`, which has the columns of docs/captures.md.
    // One that begins with a comment too.
    #[arg(value_name = "QUERY", allow_hyphen_values = true)]
    query: String,
    #[command(flatten)]
    folder: Folder,
    /// One JSON object a row, every value whole.
    #[arg(long)]
    json: bool,
    /// What sorting, grouping and joining may keep in memory, in MiB.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    memory_mb: u32,
    /// Folder for what does not fit, which is removed at the end [default: such a query fails].
    #[arg(long, value_name = "DIR")]
    spill: Option<PathBuf>,
}

/// Says how to get it.
#[cfg(not(feature = "sql"))]
pub(super) fn run(_: &mut dyn std::io::Write, _: &Args) -> anyhow::Result<()> {
    let remedy = "this lego was built without SQL: cargo build --release --features sql";
    Err(crate::cli::Usage(remedy.to_owned()).into())
}

#[cfg(feature = "sql")]
pub(super) use with_sql::run;

#[cfg(feature = "sql")]
mod with_sql {
    use std::io::Write;

    use anyhow::bail;
    use futures_util::StreamExt as _;
    use tokio::sync::mpsc;

    use super::super::answer::{JsonRows, Rows, Table};
    use super::Args;
    use crate::capture::sql::{SendableRecordBatchStream, Sql, SqlError, failure};
    use crate::cli::{Signals, Usage, block_on};
    use crate::run::RunError;

    /// Prints the answer.
    pub(in super::super) fn run(out: &mut dyn Write, args: &Args) -> anyhow::Result<()> {
        let spill = args.spill.as_deref();
        if let Some(spill) = spill.filter(|spill| !spill.is_dir()) {
            return Err(Usage(format!("--spill {}: there is no such folder", spill.display())).into());
        }
        let sql = Sql::open(&args.folder.captures()?, (args.memory_mb as usize) << 20, spill)?;
        let answered = block_on(async {
            // A plan is made without a pause and leaves nothing behind: until it is there a signal just ends lego.
            let batches = sql.ask(&args.query).await.map_err(explained)?;
            let mut signals = Signals::listen();
            tokio::select! {
                () = signals.next() => Err(RunError::Stopped.into()),
                answered = answer(out, batches, args.json) => answered,
            }
        });
        let left_out = sql.left_out();
        for what in &left_out {
            errln!("warning: left out {what}");
        }
        answered?;
        if left_out.is_empty() {
            return Ok(());
        }
        bail!("calls may be missing in this answer, as told above; `lego capture verify` looks at every file")
    }

    async fn answer(
        out: &mut dyn Write,
        mut batches: SendableRecordBatchStream,
        is_json: bool,
    ) -> anyhow::Result<()> {
        let mut rows: Box<dyn Rows> = if is_json {
            Box::new(JsonRows::new(&batches.schema())?)
        } else {
            Box::new(Table::new(&batches.schema()))
        };
        // A sort or a join computes for long without a pause, in which no signal would be heard.
        let (send, mut receive) = mpsc::channel(1);
        let asked = tokio::spawn(async move {
            while let Some(batch) = batches.next().await
                && send.send(batch).await.is_ok()
            {}
        });
        while let Some(batch) = receive.recv().await {
            rows.add(out, &batch.map_err(|error| explained(failure(&error)))?)?;
        }
        // One that broke off has not answered.
        asked.await?;
        rows.end(out)?;
        Ok(out.flush()?)
    }

    /// With what to do, in this command's words.
    fn explained(error: SqlError) -> anyhow::Error {
        match error {
            SqlError::Query(_) | SqlError::NotAQuery(_) => Usage(error.to_string()).into(),
            SqlError::Memory(problem) => {
                let remedy = "give it more memory (--memory-mb), or a folder for what does not fit (--spill)";
                anyhow::anyhow!("{problem}. {remedy}, or ask for less")
            }
            other => other.into(),
        }
    }
}
