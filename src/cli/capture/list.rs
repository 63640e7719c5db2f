//! `lego capture ls`.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::Write;

use serde_json::json;

use super::{ListArgs, captures, start_of_day, time, warn};
use crate::capture::{Order, Place, Query, Reader};
use crate::record::{Call, CallKind, CallStatus, IdsSource, SessionId};
use crate::run::count;

/// Prints the list.
pub fn list(out: &mut dyn Write, args: &ListArgs) -> anyhow::Result<()> {
    let dir = captures(&args.capture_dir, &args.local)?;
    match &args.session {
        None => list_sessions(out, &dir, args),
        Some(session) => list_calls(out, &dir, session, args),
    }
}

/// What is told of a session. lego's own probes are apart: nobody made them in a conversation.
#[derive(Default)]
struct Totals {
    trial: Option<String>,
    task: Option<String>,
    calls: u64,
    choices: u64,
    probes: u64,
    prompt_tokens: u64,
    completion_tokens: u64,
    trainable: u64,
    /// How often each reason not to train is given.
    reasons: BTreeMap<String, u64>,
    failed: u64,
    first_us: Option<i64>,
    last_us: i64,
}

impl Totals {
    fn add(&mut self, call: &Call, asked: Option<CallKind>) {
        let first = self.first_us.get_or_insert(call.received_at);
        *first = call.received_at.min(*first);
        self.last_us = self.last_us.max(call.received_at + call.duration_us as i64);
        if call.kind == CallKind::Probe && asked != Some(CallKind::Probe) {
            self.probes += 1;
            return;
        }
        self.choices += 1;
        if call.choice_index == 0 {
            self.calls += 1;
            self.prompt_tokens += call.prompt_tokens().unwrap_or(0);
        }
        self.completion_tokens += call.sampled_ids().map_or(0, <[u32]>::len) as u64;
        self.trainable += u64::from(call.trainable);
        for reason in &call.not_trainable_reasons {
            *self.reasons.entry(reason.clone()).or_default() += 1;
        }
        self.failed += u64::from(call.status != CallStatus::Ok);
        self.trial = self.trial.take().or(call.trial_id.as_ref().map(ToString::to_string));
        self.task = self.task.take().or(call.task_id.as_ref().map(ToString::to_string));
    }
}

impl Totals {
    /// The reason not to train that is given most often, and how many others there are.
    fn reason(&self) -> String {
        // Of those that are as frequent, the first by name.
        let Some((reason, times)) = self.reasons.iter().max_by_key(|(name, times)| (**times, Reverse(*name)))
        else {
            return String::new();
        };
        match self.reasons.len() - 1 {
            0 => format!("{reason} ({times})"),
            others => format!("{reason} ({times}), {others} more"),
        }
    }
}

/// Leaves the newest `limit` of a list in time, and says how many there were.
fn newest<T>(mut all: Vec<T>, limit: Option<usize>) -> (Vec<T>, usize) {
    let found = all.len();
    all.drain(..found.saturating_sub(limit.unwrap_or(found)));
    (all, found)
}

/// What a list needs of each call: how many ids a prompt has, and not which.
pub(super) fn lean() -> Query {
    Query { without_bodies: true, without_routing: true, as_stored: true, ..Query::default() }
}

/// What a list asks for.
fn query(args: &ListArgs) -> anyhow::Result<Query> {
    let since = args.last.map(start_of_day).transpose()?;
    Ok(Query { since, filter: args.r#where.filter.clone(), ..lean() })
}

fn list_sessions(out: &mut dyn Write, dir: &Place, args: &ListArgs) -> anyhow::Result<()> {
    let mut sessions: BTreeMap<SessionId, Totals> = BTreeMap::new();
    let mut reader = Reader::open(dir, query(args)?)?;
    for call in reader.by_ref() {
        let call = call?;
        if args.kind.is_none_or(|kind| kind == call.kind) {
            sessions.entry(call.session_id.clone()).or_default().add(&call, args.kind);
        }
    }
    warn(&reader.left_out());
    let mut sessions: Vec<_> = sessions.into_iter().collect();
    sessions.sort_by_key(|(_, totals)| totals.first_us);
    let (sessions, found) = newest(sessions, args.limit);
    let trial = |totals: &Totals| totals.trial.clone().unwrap_or_else(|| "-".to_owned());
    let trials = sessions.iter().map(|(_, totals)| trial(totals).len()).fold("trial".len(), usize::max);
    if !args.json {
        let head =
            ("session", "calls", "prompt", "sampled", "trainable", "failed", "first call (UTC)", "trial");
        writeln!(
            out,
            "{:<36} {:>6} {:>10} {:>10} {:>9} {:>6}  {:<20} {:<trials$}  why not trainable",
            head.0, head.1, head.2, head.3, head.4, head.5, head.6, head.7
        )?;
    }
    for (session, t) in &sessions {
        if args.json {
            let line = json!({
                "session_id": session, "trial_id": t.trial, "task_id": t.task, "calls": t.calls,
                "choices": t.choices, "probes": t.probes, "prompt_tokens": t.prompt_tokens,
                "completion_tokens": t.completion_tokens, "trainable": t.trainable,
                "not_trainable_reasons": t.reasons, "failed": t.failed, "first_us": t.first_us, "last_us": t.last_us,
            });
            writeln!(out, "{line}")?;
        } else {
            let line = format!(
                "{:<36} {:>6} {:>10} {:>10} {:>9} {:>6}  {:<20} {:<trials$}  {}",
                session.as_str(),
                t.calls,
                t.prompt_tokens,
                t.completion_tokens,
                t.trainable,
                t.failed,
                t.first_us.map_or_else(String::new, time),
                trial(t),
                t.reason()
            );
            writeln!(out, "{}", line.trim_end())?;
        }
    }
    if !args.json {
        let sum = |of: fn(&Totals) -> u64| sessions.iter().map(|(_, totals)| of(totals)).sum::<u64>();
        let tokens = count(sum(|totals| totals.completion_tokens), "sampled token", "sampled tokens");
        write!(out, "{}, {tokens}", count(sessions.len() as u64, "session", "sessions"))?;
        if sum(|totals| totals.probes) > 0 {
            let probes = count(sum(|totals| totals.probes), "probe", "probes");
            write!(out, "; {probes} of lego's own (--kind probe) not counted")?;
        }
        if sessions.len() < found {
            write!(out, "; the newest of {found}")?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn list_calls(out: &mut dyn Write, dir: &Place, session: &SessionId, args: &ListArgs) -> anyhow::Result<()> {
    let is_filtered = args.r#where.filter.is_some() || args.last.is_some();
    let stored = Query { session_id: Some(session.clone()), ..query(args)? };
    let is_wanted = |call: &Call| args.kind.is_none_or(|kind| kind == call.kind);
    let mut is_there = false;
    let order = Order::read(dir, &stored, &mut |call| {
        is_there = true;
        is_wanted(call)
    })?;
    let found = order.len();
    anyhow::ensure!(is_filtered || is_there, "no session {session} in {}", dir.shown());
    if !args.json {
        writeln!(out, "{}", call_head())?;
    }
    let order = order.newest(args.limit.unwrap_or(found));
    let (mut shown, mut has_local) = (0, false);
    let mut give = |call: Call| {
        (shown, has_local) = (shown + 1, has_local || is_local(&call));
        if args.json {
            return Ok(writeln!(out, "{}", serde_json::to_string(&call)?)?);
        }
        Ok::<(), anyhow::Error>(writeln!(out, "{}", call_line(&call))?)
    };
    warn(&order.give(dir, &Query { as_stored: !args.json, ..stored }, &mut give)?);
    if !args.json && has_local {
        writeln!(out, "~: ids of a local tokenizer, not the model's own")?;
    }
    if !args.json && shown < found {
        writeln!(out, "the newest {shown} of {found}")?;
    }
    Ok(())
}

fn is_local(call: &Call) -> bool {
    [call.prompt_ids_source, call.completion_ids_source].contains(&IdsSource::LocalTokenizer)
}

/// What stands above lines of calls.
pub(super) fn call_head() -> String {
    format!(
        "{:<36} {:>2} {:<8} {:<17} {:>7} {:>7} {:>9}  {:<12} trainable",
        "call", "#", "kind", "status", "prompt", "sampled", "ms", "finish"
    )
}

/// A call in a line.
pub(super) fn call_line(call: &Call) -> String {
    let reasons = call.not_trainable_reasons.join(", ");
    format!(
        "{:<36} {:>2} {:<8} {:<17} {:>7} {:>7} {:>9.1}  {:<12} {}",
        call.call_id.to_string(),
        call.choice_index,
        call.kind.as_str(),
        call.status.as_str(),
        ids(call.prompt_tokens(), call.prompt_ids_source),
        ids(call.completion_token_ids.as_ref().map(|ids| ids.len() as u64), call.completion_ids_source),
        call.duration_us as f64 / 1000.0,
        call.finish_reason.as_deref().unwrap_or("-"),
        if call.trainable { "yes" } else { &reasons }
    )
}

/// How many ids there are; those that the model has not told are marked.
fn ids(ids: Option<u64>, source: IdsSource) -> String {
    let mark = if source == IdsSource::LocalTokenizer { "~" } else { "" };
    ids.map_or("-".to_owned(), |ids| format!("{mark}{ids}"))
}
