//! `lego capture lineages`.

use std::io::Write;
use std::path::PathBuf;

use serde_json::json;

use super::texts::Texts;
use super::{Folder, Where};
use crate::cli::Usage;
use crate::ledger;
use crate::record::SessionId;
use crate::trajectory::{Break, LineageRow};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    folder: Folder,
    /// Only those of this session.
    #[arg(long, value_name = "SESSION")]
    session: Option<SessionId>,
    #[command(flatten)]
    r#where: Where,
    /// Folder with the model's tokenizer.json: with texts of ids more can be told [default: that of the run's policy, if
    /// it is the embedded engine's].
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// One JSON object a lineage.
    #[arg(long)]
    json: bool,
}

/// Prints the table, a row a lineage.
pub(super) fn run(out: &mut dyn Write, args: &Args) -> anyhow::Result<()> {
    let dir = args.folder.captures()?;
    let filter = args.r#where.filter.as_ref();
    if filter.is_some() && args.session.is_some() {
        let remedy = "--session and --where do not go together: name the session in the predicate";
        anyhow::bail!(Usage(remedy.to_owned()));
    }
    let texts = Texts::find(args.tokenizer.as_deref(), dir.dir())?;
    let texts = texts.as_ref().map(|texts| &texts.ids);
    let mut rows = 0;
    let mut each = |row: &LineageRow| -> anyhow::Result<()> {
        if args.json {
            writeln!(out, "{}", as_json(row))?;
        } else {
            if rows == 0 {
                writeln!(out, "{HEAD}")?;
            }
            writeln!(out, "{}", line(row))?;
        }
        rows += 1;
        Ok(())
    };
    let left_out = match &args.session {
        None => ledger::table(&dir, filter, texts, &mut each)?,
        Some(session) => {
            let (rows, left_out) = ledger::session_table(&dir, session, texts)?;
            rows.iter().try_for_each(each)?;
            left_out
        }
    };
    super::warn(&left_out);
    match &args.session {
        Some(session) if rows == 0 => anyhow::bail!(
            "no call of session {session} with token ids is in {}: `lego capture ls` lists what there is",
            dir.shown()
        ),
        _ if rows == 0 => errln!("no call with token ids is in {}", dir.shown()),
        _ => {}
    }
    Ok(())
}

const HEAD: &str = "SESSION                   #  KIND        CALLS   TOKENS  SAMPLED  COMES FROM";

fn line(row: &LineageRow) -> String {
    let session = row.session_id.as_str();
    let LineageRow { index, calls, tokens, sampled_tokens, .. } = row;
    let from = comes_from(row);
    format!(
        "{session:<24} {index:>2}  {:<10} {calls:>6} {tokens:>8} {sampled_tokens:>8}  {from}",
        row.kind.as_str()
    )
}

/// What a lineage comes from, and why it does not go on from that: for people.
pub(super) fn comes_from(row: &LineageRow) -> String {
    let parent = row.parent.map(|parent| format!("{} ({})", parent.call_id, parent.by.as_str()));
    let broke = row.broke.map(|broke| {
        let message = broke.message.map_or_else(String::new, |message| format!(", message {message}"));
        let from = match row.parent {
            Some(parent) if parent.call_id == broke.from => String::new(),
            _ => format!(" of {}", broke.from),
        };
        format!("{} at token {}{message}{from}", broke.reason.as_str(), broke.token.index())
    });
    let both: Vec<String> = parent.into_iter().chain(broke).collect();
    if both.is_empty() { "-".to_owned() } else { both.join(": ") }
}

fn as_json(row: &LineageRow) -> serde_json::Value {
    let broke = row.broke.map(|Break { reason, from, token, message }| {
        json!({"reason": reason.as_str(), "from_call_id": from, "token": token.index(), "message": message})
    });
    let parent = row.parent.map(|parent| json!({"call_id": parent.call_id, "by": parent.by.as_str()}));
    json!({
        "session_id": row.session_id, "lineage": row.index, "kind": row.kind.as_str(), "calls": row.calls,
        "shared_calls": row.shared_calls, "first_call_id": row.first_call_id, "last_call_id": row.last_call_id,
        "tokens": row.tokens, "sampled_tokens": row.sampled_tokens, "parent": parent, "break": broke,
    })
}
