//! Old days away, whole.
//!
//! A day goes only if nothing that stays needs it: no call of a day that is kept goes on from expert routing that lies in
//! it, and none of the journal from that or from a part of its history. Where that cannot be known the day stays, and the
//! reason is told. A day is renamed before it is deleted, so that a crash leaves no half of a day to readers. Objects
//! cannot be renamed: of a day in object storage some calls may be left, which the next `prune` removes.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::error::CaptureError;
use super::layout::{self, date_of, sync_folder};
use super::listing::{ListedFile, remote_day};
use super::lock::{self, Lock};
use super::mark::Mark;
use super::parquet_calls;
use super::place::Place;
use super::remote::{Object, Remote, Stored};
use super::segment::SegmentCalls;
use crate::record::{CallId, Routing};

/// How long a day is waited for that somebody reads, and how often it is looked at.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// What became of a day that is old enough.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pruned {
    /// `YYYY-MM-DD`.
    pub date: String,
    pub files: usize,
    pub bytes: u64,
    /// It is gone, or would be.
    pub is_removed: bool,
    /// Why it stays.
    pub reason: Option<String>,
    /// It stays although nobody is known to need it: it is read, or something of it or of what stays is not known.
    pub is_refused: bool,
}

/// Removes the days before `before` (`YYYY-MM-DD`) from `dir`, or with `is_dry` only tells which.
///
/// # Errors
/// The folder is missing, or what stays cannot be read: then nobody knows what it needs, and nothing is removed.
pub fn prune(dir: impl Into<Place>, before: &str, is_dry: bool) -> Result<Vec<Pruned>, CaptureError> {
    let place = &dir.into();
    let dir = place.dir();
    place.require()?;
    let writer = lock::writer(dir)?;
    // No writer is to begin meanwhile.
    let _lock = if writer.is_none() && !is_dry && dir.is_dir() { Some(Lock::take(dir)?) } else { None };
    if !is_dry {
        let half = layout::half_pruned(dir)?.into_iter();
        for folder in half.filter(|(date, _)| is_date(date)).map(|(_, folder)| folder) {
            fs::remove_dir_all(&folder).map_err(CaptureError::io("delete", &folder))?;
        }
    }
    let mut days: BTreeSet<String> = layout::days(dir)?.into_iter().collect();
    days.extend(place.remote().map_or(Ok(vec![]), Remote::days)?);
    let (old, kept): (Vec<String>, Vec<String>) =
        days.into_iter().partition(|date| is_date(date) && date.as_str() < before);
    let mut work = Work { place, writer, before, needed: HashSet::new() };
    work.needs_of_journal()?;
    for date in kept {
        for file in work.day(&date)?.files {
            work.needs_of(&file)?;
        }
    }
    let mut days: Vec<Day> = vec![];
    for date in old {
        let day = work.day(&date)?;
        // What was uploaded leaves an empty folder.
        if !(place.is_remote() && day.names.is_empty() && day.objects.is_empty()) {
            days.push(day);
        }
    }
    // From the newest on: what stays may need what is older, and then that stays as well.
    loop {
        let mut is_changed = false;
        for day in days.iter_mut().rev().filter(|day| day.pruned.reason.is_none()) {
            if let Some((reason, is_refused)) = work.why_kept(day)? {
                (day.pruned.reason, day.pruned.is_refused) = (Some(reason), is_refused);
                for file in &day.files {
                    // One that cannot be read is a reason to keep the day, and its needs are not known.
                    work.needs_of(file)?;
                }
                is_changed = true;
            }
        }
        if !is_changed {
            break;
        }
    }
    for day in &mut days {
        if day.pruned.reason.is_none() && !is_dry {
            day.pruned.reason = work.remove(day)?;
            day.pruned.is_refused = day.pruned.reason.is_some();
        }
        day.pruned.is_removed = day.pruned.reason.is_none();
    }
    Ok(days.into_iter().map(|day| day.pruned).collect())
}

/// `YYYY-MM-DD`. Other folders are not lego's.
fn is_date(text: &str) -> bool {
    let is_digit = |at: usize| text.as_bytes()[at].is_ascii_digit();
    text.len() == 10
        && text.is_ascii()
        && (0..10).all(|at| if matches!(at, 4 | 7) { &text[at..=at] == "-" } else { is_digit(at) })
}

struct Work<'a> {
    place: &'a Place,
    writer: Option<String>,
    before: &'a str,
    /// Calls that must stay because others go on from them.
    needed: HashSet<CallId>,
}

/// A day that is old enough.
struct Day {
    pruned: Pruned,
    files: Vec<ListedFile>,
    /// Names of all that is in the folder.
    names: Vec<String>,
    /// All that is in object storage.
    objects: Vec<Object>,
    has_routing: bool,
}

impl Work<'_> {
    fn day(&self, date: &str) -> Result<Day, CaptureError> {
        let folder = layout::day_folder(self.place.dir(), date);
        let names = layout::file_names(&folder)?;
        let mut files = vec![];
        if let Some(mark) = Mark::share(&folder)?.map(Arc::new) {
            for (path, _) in layout::day_files(&folder)? {
                files.push(ListedFile::here(path, date, &mark));
            }
        }
        let objects = self.place.remote().map_or(Ok(vec![]), |remote| remote.objects(date))?;
        files.extend(self.place.remote().map_or(Ok(vec![]), |remote| remote_day(remote, date))?);
        let bytes = files.iter().map(ListedFile::bytes).sum();
        let (date, count) = (date.to_owned(), files.len());
        let pruned = Pruned { date, files: count, bytes, is_removed: false, reason: None, is_refused: false };
        Ok(Day { pruned, files, names, objects, has_routing: false })
    }

    fn needs_of_journal(&mut self) -> Result<(), CaptureError> {
        for name in layout::segments(self.place.dir())? {
            let path = name.journal_path(self.place.dir());
            let calls = match SegmentCalls::open(&path, None) {
                Ok(calls) => calls,
                // It is Parquet by now.
                Err(CaptureError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                    continue;
                }
                Err(error) => return Err(error),
            };
            for call in calls {
                let call = call?;
                let rows = call.routing.as_ref().and_then(Routing::base);
                let history = call.shared.as_ref().and_then(|shared| shared.base);
                self.needed.extend([rows, history].into_iter().flatten().map(|base| base.call_id));
            }
        }
        Ok(())
    }

    /// What a file that stays needs of others.
    fn needs_of(&mut self, file: &ListedFile) -> Result<(), CaptureError> {
        let needs = file.look(|stored| self.needs_in(stored))?;
        needs.map_err(|reason| {
            let reason = format!("{reason}; what it needs is not known, so nothing is removed");
            CaptureError::corrupt(&file.path, reason)
        })
    }

    fn needs_in(&mut self, file: &Stored) -> Result<(), String> {
        let (before, needed) = (self.before, &mut self.needed);
        let mut failed = None;
        parquet_calls::bases(file, &mut |_, base, _| match base.map(str::parse::<CallId>) {
            // Most go on from calls of their own day, which stays.
            Some(Ok(base)) if made_on(base).is_none_or(|date| date.as_str() <= before) => {
                needed.insert(base);
            }
            Some(Err(error)) => failed = Some(format!("column routing_base_call_id: {error}")),
            _ => {}
        })?;
        failed.map_or(Ok(()), Err)
    }

    /// Why a day must stay, and whether that is for want of knowledge.
    fn why_kept(&self, day: &mut Day) -> Result<Option<(String, bool)>, CaptureError> {
        let here = day.names.iter().filter(|_| self.place.is_remote()).count();
        if here > 0 {
            let reason = format!(
                "{here} files of it are on this machine, in {}: they are uploaded first (lego proxy, or lego capture \
                 compact)",
                self.place.dir().display()
            );
            return Ok(Some((reason, true)));
        }
        let names = day.names.iter().chain(day.objects.iter().map(|object| &object.name));
        let foreign = names.into_iter().find(|name| !name.ends_with(".parquet"));
        if let Some(name) = foreign {
            return Ok(Some((format!("{name} in it is not lego's: take it away first"), true)));
        }
        let mut reason = None;
        for file in &day.files {
            let (has_routing, needed) = (&mut day.has_routing, &self.needed);
            let tell = &mut |id: &str, _: Option<&str>, is_routed| {
                *has_routing |= is_routed;
                if id.parse::<CallId>().is_ok_and(|id| needed.contains(&id)) && reason.is_none() {
                    reason = Some(format!("calls that stay go on from call {id} in it"));
                }
            };
            let read = file.look(|stored| parquet_calls::bases(stored, tell))?;
            read.map_err(|reason| {
                let reason = format!("{reason}; whether it may go is not known, so nothing is removed");
                CaptureError::corrupt(&file.path, reason)
            })?;
        }
        if let Some(reason) = reason {
            return Ok(Some((reason, false)));
        }
        let yesterday = now_us().saturating_sub(layout::DAY_US);
        if let Some(pid) = self.writer.as_ref().filter(|_| day.pruned.date >= date_of(yesterday)) {
            let reason = format!("process {pid} writes, and calls received on that day may still run");
            return Ok(Some((reason, true)));
        }
        if let Some(pid) = self.writer.as_ref().filter(|_| day.has_routing) {
            let reason = format!(
                "process {pid} writes, and its next call may go on from routing in it: stop it first"
            );
            return Ok(Some((reason, true)));
        }
        Ok(None)
    }

    /// Removes a day; or says why it stays.
    fn remove(&self, day: &mut Day) -> Result<Option<String>, CaptureError> {
        // It holds a mark itself.
        day.files.clear();
        if let Some(remote) = self.place.remote() {
            // What replaces others goes last: what is left after a crash has every call once, or not at all.
            day.objects.sort_by_key(|object| object.name.starts_with("merged-"));
            remote.delete_objects(&day.objects)?;
            // It is empty, if it is there.
            let _ = fs::remove_dir(layout::day_folder(self.place.dir(), &day.pruned.date));
            return Ok(None);
        }
        let dir = self.place.dir();
        let folder = layout::day_folder(dir, &day.pruned.date);
        // A writer that puts its small files together reads it for a moment.
        let until = Instant::now() + PATIENCE;
        let _mark = loop {
            match Mark::alone(&folder)? {
                Some(mark) => break mark,
                None if Instant::now() < until && folder.exists() => std::thread::sleep(LOOK_AGAIN),
                None => return Ok(Some("it is being read: try again when that is over".to_owned())),
            }
        };
        let aside = layout::pruned_folder(dir, &day.pruned.date);
        fs::rename(&folder, &aside).map_err(CaptureError::io("rename", &folder))?;
        // From here on no writer adds to it. What one added before was not looked at.
        if layout::file_names(&aside)? != day.names {
            fs::rename(&aside, &folder).map_err(CaptureError::io("rename", &aside))?;
            return Ok(Some("a writer is adding to it: try again".to_owned()));
        }
        sync_folder(dir).map_err(CaptureError::io("sync", dir))?;
        fs::remove_dir_all(&aside).map_err(CaptureError::io("delete", &aside))?;
        Ok(None)
    }
}

fn now_us() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.ok().and_then(|since| i64::try_from(since.as_micros()).ok()).unwrap_or(0)
}

/// The day on which a call's id was made; `None` if the id does not tell.
fn made_on(id: CallId) -> Option<String> {
    let (seconds, _) = id.0.get_timestamp()?.to_unix();
    Some(date_of(i64::try_from(seconds).ok()?.checked_mul(1_000_000)?))
}
