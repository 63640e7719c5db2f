//! `lego capture show`.

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::Write;

use anyhow::Context as _;

use super::lineages::comes_from;
use super::texts::Texts;
use super::turns::{Sent, Turn, turns};
use super::{ShowArgs, captures, time, warn};
use crate::capture::{Place, Query, in_order};
use crate::ledger;
use crate::record::{Call, CallId, IdsSource, SessionId};
use crate::trajectory::LineageRow;

/// In the place of what is null in the record.
const UNKNOWN: &str = "unknown";

/// Prints a session or a call, one call at a time. A session's lineages are read of all its calls first, unless it is
/// printed as JSON.
pub fn show(out: &mut dyn Write, args: &ShowArgs) -> anyhow::Result<()> {
    let dir = captures(&args.capture_dir, &args.local)?;
    let id = &args.id;
    let texts = if args.json { None } else { Texts::find(args.tokenizer.as_deref(), dir.dir())? };
    let (mut before, is_there) = (Vec::new(), Cell::new(false));
    let mut lineages: Option<HashMap<CallId, LineageRow>> = None;
    let mut give = |call: Call| {
        is_there.set(true);
        if args.json {
            return Ok(writeln!(out, "{}", serde_json::to_string(&call)?)?);
        }
        let lineages = match &mut lineages {
            Some(known) => known,
            unknown => unknown.insert(beginnings(&dir, &call.session_id, texts.as_ref())?),
        };
        if let Some(row) = lineages.get(&call.call_id).filter(|_| call.choice_index == 0) {
            writeln!(out, "══ lineage {} · {} · {}", row.index, row.kind.as_str(), comes_from(row))?;
        }
        let now = show_call(out, &call, &before)?;
        if let Some(kept) = texts.as_ref().and_then(|texts| texts.kept(&call)) {
            writeln!(out, "   {kept}")?;
        }
        if args.tokens {
            let texts = texts.as_ref().filter(|texts| texts.ids.fits(&call));
            show_tokens(out, &call, texts)?;
        }
        if !now.is_empty() {
            before = now;
        }
        Ok::<(), anyhow::Error>(())
    };
    let session = id.parse().ok().map(Query::session);
    let call = id.parse().ok().map(|call_id| Query { call_id: Some(call_id), ..Query::default() });
    for query in [session, call].into_iter().flatten() {
        warn(&in_order(&dir, &query, &mut give)?);
        if is_there.get() {
            return Ok(());
        }
    }
    anyhow::bail!("no session or call {id} in {}: `lego capture ls` lists them", dir.shown())
}

/// What the lineages that begin in a session are, by their first calls. One that has the session to itself says nothing.
/// What is left out of the captures is told with the calls.
fn beginnings(
    dir: &Place,
    session: &SessionId,
    texts: Option<&Texts>,
) -> anyhow::Result<HashMap<CallId, LineageRow>> {
    let (rows, _) = ledger::session_table(dir, session, texts.map(|texts| &texts.ids))?;
    let is_told = rows.len() > 1;
    Ok(rows.into_iter().filter(|_| is_told).map(|row| (row.first_call_id, row)).collect())
}

/// Prints one call; what the call before had too is only counted. Returns what it was asked.
fn show_call(out: &mut dyn Write, call: &Call, before: &[Turn]) -> anyhow::Result<Vec<Turn>> {
    let request: serde_json::Value = match &call.client_request {
        Some(body) => serde_json::from_str(body.get()).context("client_request")?,
        None => serde_json::Value::Null,
    };
    let turns = self::turns(&request, call.client_api);
    writeln!(
        out,
        "── call {} #{} · {} · {} · {} · {}",
        call.call_id,
        call.choice_index,
        time(call.received_at),
        call.kind.as_str(),
        call.model_served.as_deref().unwrap_or(&call.model_requested),
        call.status.as_str(),
    )?;
    let known = if turns.starts_with(before) { before.len() } else { 0 };
    if known > 0 {
        writeln!(out, "   ({known} messages as before)")?;
    }
    let sent = match &call.upstream_request {
        Some(body) => {
            self::turns(&serde_json::from_str(body.get()).context("upstream_request")?, call.upstream_api)
        }
        None => turns.clone(),
    };
    for turn in &turns[known..] {
        let Turn { role, text, .. } = turn;
        writeln!(out, "[{role}] {text}")?;
        match turn.changed(&turns, &sent) {
            Some(Sent::As(text)) => writeln!(out, "[{role}, as it was sent] {text}")?,
            Some(Sent::Otherwise) => {
                writeln!(out, "   (it was sent in another form: `--json` has upstream_request)")?
            }
            None => {}
        }
    }
    if let Some(error) = &call.error {
        writeln!(out, "[error] {error}")?;
    }
    writeln!(out, "[reply] {}", call.text.as_deref().unwrap_or(""))?;
    for tool in call.tool_calls.iter().flatten() {
        writeln!(out, "[reply calls] {}({})", tool.name, tool.arguments)?;
    }
    let count = |ids: &Option<Vec<u32>>| ids.as_ref().map_or("no".to_owned(), |i| i.len().to_string());
    let sum: Option<f32> = call.completion_logprobs.as_ref().and_then(|l| l.iter().copied().sum());
    // Nobody knows that these were sampled.
    let of_what = match call.completion_ids_source {
        IdsSource::LocalTokenizer => "ids of the reply's text",
        _ => "sampled ids",
    };
    writeln!(
        out,
        "   {} prompt ids ({}), {} {of_what} ({}), log-prob {}, weights {}, finish {}, {}",
        count(&call.prompt_token_ids),
        call.prompt_ids_source.as_str(),
        count(&call.completion_token_ids),
        call.completion_ids_source.as_str(),
        sum.map_or(UNKNOWN.to_owned(), |sum| format!("{sum:.3} ({})", call.logprob_semantics.as_str())),
        versions(call),
        call.finish_reason.as_deref().unwrap_or("-"),
        if call.trainable {
            "trainable".to_owned()
        } else {
            format!("not trainable: {}", call.not_trainable_reasons.join(", "))
        }
    )?;
    Ok(turns)
}

fn show_tokens(out: &mut dyn Write, call: &Call, texts: Option<&Texts>) -> anyhow::Result<()> {
    if let Some(prompt) = &call.prompt_token_ids {
        writeln!(out, "   prompt ids {prompt:?}")?;
        if let Some(texts) = texts {
            writeln!(out, "   prompt text {:?}", texts.ids.tokenizer.decode(prompt, false))?;
        }
    }
    let spans = call.weight_spans.as_deref().unwrap_or_default();
    let head = if texts.is_some() { "  text" } else { "" };
    writeln!(out, "   {:>6} {:>8} {:>14}  weights{head}", "#", "id", "log-prob")?;
    for (i, id) in call.completion_token_ids.iter().flatten().enumerate() {
        let logprob = call.completion_logprobs.as_ref().and_then(|l| l.get(i).copied().flatten());
        let at = i as u32;
        let version = spans.iter().find(|span| (span.start..span.end).contains(&at));
        let version = version.map_or(UNKNOWN, |span| &span.version);
        write!(
            out,
            "   {i:>6} {id:>8} {:>14}  ",
            logprob.map_or(UNKNOWN.to_owned(), |value| value.to_string()),
        )?;
        match texts {
            Some(texts) => writeln!(out, "{version:<7}  {}", texts.of(*id))?,
            None => writeln!(out, "{version}")?,
        }
    }
    Ok(())
}

fn versions(call: &Call) -> String {
    match call.weight_spans.as_deref() {
        None | Some([]) => UNKNOWN.to_owned(),
        Some([one]) => one.version.clone(),
        Some(several) => several.iter().fold(String::new(), |mut text, span| {
            let _ = write!(text, "{}[{},{}) ", span.version, span.start, span.end);
            text
        }),
    }
}
