//! `lego capture ledger`.

use std::io::Write;

use anyhow::bail;
use clap::ValueEnum;
use indicatif::ProgressBar;
use serde_json::json;

use super::{Folder, Where};
use crate::ledger::{Account, By, Ledger};
use crate::run::count;
use crate::telemetry::RunBooks;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    folder: Folder,
    /// What to keep an account of.
    #[arg(long, value_enum, default_value_t = ByName::Run)]
    by: ByName,
    #[command(flatten)]
    r#where: Where,
    /// One JSON object an account, one each of what does not add up, and a last one of all together.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ByName {
    Run,
    Session,
    Trial,
}

impl ByName {
    const fn column(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Session => "session_id",
            Self::Trial => "trial_id",
        }
    }
}

impl From<ByName> for By {
    fn from(name: ByName) -> Self {
        match name {
            ByName::Run => Self::Run,
            ByName::Session => Self::Session,
            ByName::Trial => Self::Trial,
        }
    }
}

/// Prints the accounts.
pub(super) fn run(out: &mut dyn Write, args: &Args) -> anyhow::Result<()> {
    let dir = args.folder.captures()?;
    let filter = args.r#where.filter.as_ref();
    let of_run = Some(dir.dir()).filter(|folder| folder.is_dir() && !dir.is_remote());
    let books = of_run.map_or(Ok(None), RunBooks::of)?;
    let bar = ProgressBar::new(0);
    let mut progress = |done, all| {
        bar.set_length(all);
        bar.set_position(done);
    };
    let ledger = crate::ledger::ledger(&dir, books.as_ref(), args.by.into(), filter, &mut progress);
    bar.finish_and_clear();
    let ledger = ledger?;
    let name = of_run.and_then(|folder| folder.canonicalize().ok());
    let name = name.map_or_else(
        || dir.shown(),
        |name| if books.is_some() { name.parent().unwrap_or(&name) } else { &name }.display().to_string(),
    );
    if args.json {
        print_json(out, &ledger, args.by)?
    } else {
        print(out, &ledger, &name)?
    }
    out.flush()?;
    if books.is_none() {
        errln!("these captures belong to no run: nothing says which of the samples were trained");
    }
    if !ledger.offences.is_empty() || !ledger.total.is_balanced() {
        bail!(
            "{} in {name}",
            count(ledger.offences.len() as u64, "thing does not add up", "things do not add up")
        );
    }
    Ok(())
}

fn print_json(out: &mut dyn Write, ledger: &Ledger, by: ByName) -> anyhow::Result<()> {
    for (name, account) in &ledger.accounts {
        let mut line = serde_json::to_value(account)?;
        line[by.column()] = json!(name);
        writeln!(out, "{line}")?;
    }
    for offence in &ledger.offences {
        writeln!(out, "{}", json!({"offence": offence}))?;
    }
    writeln!(out, "{}", json!({"total": ledger.total, "is_balanced": is_balanced(ledger)}))?;
    Ok(())
}

fn is_balanced(ledger: &Ledger) -> bool {
    ledger.offences.is_empty() && ledger.total.is_balanced()
}

fn print(out: &mut dyn Write, ledger: &Ledger, name: &str) -> anyhow::Result<()> {
    for (name, account) in &ledger.accounts {
        print_account(out, name, account)?;
    }
    print_account(out, if ledger.accounts.is_empty() { name } else { "all together" }, &ledger.total)?;
    for offence in &ledger.offences {
        let id = |name: &str, id: Option<String>| id.map_or_else(String::new, |id| format!("{name} {id}: "));
        let call = id("call", offence.call_id.map(|id| id.to_string()));
        let session = id("session", offence.session_id.as_ref().map(ToString::to_string));
        let trial = id("trial", offence.trial_id.as_ref().map(ToString::to_string));
        writeln!(out, "does not add up: {session}{trial}{call}{}", offence.found)?;
    }
    Ok(())
}

fn print_account(out: &mut dyn Write, name: &str, account: &Account) -> anyhow::Result<()> {
    writeln!(out, "{name}: {}, {}", count(account.calls, "call", "calls"), tokens(account.booked))?;
    for (bucket, tokens) in &account.buckets {
        writeln!(out, "  {tokens:>12}  {bucket}")?;
    }
    let reported = match account.without_usage {
        0 => String::new(),
        ids => format!(", and {ids} ids of calls without usage"),
    };
    let verdict = if account.is_balanced() { "balanced" } else { "NOT balanced" };
    writeln!(out, "  {verdict}: the upstreams reported {}{reported}", tokens(account.usage))?;
    Ok(())
}

fn tokens(number: u64) -> String {
    count(number, "token", "tokens")
}
