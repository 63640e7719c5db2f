//! Small Parquet files of a day into larger ones, sorted by session: all of them (`lego capture compact`), or beside a
//! writer those of one size once there are several ([`merge_due`]).
//!
//! ```text
//! sources ─▶ merged file (journal/….tmp) ─▶ renamed into the day ─▶ sources deleted
//!     └─▶ where they are not sorted: sorted runs (journal/….tmp) ─▶
//! ```
//! The merged file says in its footer which files it replaces, and readers leave those out. So the rename is the one
//! moment at which the new file counts and the old ones do not: a crash before it leaves what was there, one after it
//! leaves files that nobody reads and the next compaction deletes. They are deleted only when nobody reads the day.

mod sorted;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::error::CaptureError;
use super::layout::{self, DayFileName, SegmentName};
use super::lock::Lock;
use super::mark::Mark;
use super::parquet_calls;
use super::recovery;
use super::storage::{Files, Storage};
use super::summed::{self, Sum};

/// A file of this size is large enough; smaller ones are put together up to it.
const TARGET_BYTES: u64 = 256 << 20;
/// Files that are read side by side.
const SIDE_BY_SIDE: usize = 32;
/// Bytes of calls that are sorted in memory.
const RUN_BYTES: usize = 32 << 20;
/// Beside a writer so many files become one, if the same power of [`TIER`] is the largest within the bytes of each. So a
/// byte is written again once for each power, and there are never many files.
const TIER_FILES: usize = 8;
const TIER: u64 = 8;
/// Beside a writer a file of so many bytes is large enough: it has whole row groups, which a larger one has as well.
const BESIDE_BYTES: u64 = 16 << 20;

/// Work that goes before a merge.
pub(super) trait Beside {
    /// Asked again and again while files are merged, and may take its time to answer. False: it is to be left.
    fn goes_on(&mut self) -> bool;
    /// Somebody reads the day: whether to look again. May take its time.
    fn waits(&mut self) -> bool;
    /// Whether files of so many bytes may be made for a while.
    fn has_room(&self, bytes: u64) -> bool;
}

/// A merge with nothing beside it.
pub(super) struct Alone;

impl Beside for Alone {
    fn goes_on(&mut self) -> bool {
        true
    }

    fn waits(&mut self) -> bool {
        false
    }

    fn has_room(&self, _: u64) -> bool {
        true
    }
}

/// What was done to a day.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CompactedDay {
    /// `YYYY-MM-DD`.
    pub date: String,
    pub files_before: usize,
    pub bytes_before: u64,
    pub files_after: usize,
    pub bytes_after: u64,
    /// What was left as it is, and why.
    pub left: Vec<String>,
}

/// Merges the files of each day of `dir`; `tell` hears of each day that has several.
///
/// # Errors
/// A writer has the folder, or it cannot be read or written. What was done before stays done.
pub fn compact_days(dir: &Path, tell: &mut dyn FnMut(CompactedDay)) -> Result<(), CaptureError> {
    compact_on(&Files::default(), dir, tell)
}

pub(super) fn compact_on(
    storage: &dyn Storage,
    dir: &Path,
    tell: &mut dyn FnMut(CompactedDay),
) -> Result<(), CaptureError> {
    if !dir.is_dir() {
        return Err(CaptureError::NoFolder { dir: dir.to_owned() });
    }
    let _lock = Lock::take(dir)?;
    recovery::remove_temporary(storage, dir)?;
    for date in layout::days(dir)? {
        let mut day = CompactedDay { date: date.clone(), ..CompactedDay::default() };
        (day.files_before, day.bytes_before) = size(dir, &date)?;
        day.left = compact_day(storage, dir, &date, TARGET_BYTES)?;
        (day.files_after, day.bytes_after) = size(dir, &date)?;
        if day.files_before > 1 || !day.left.is_empty() {
            tell(day);
        }
    }
    Ok(())
}

/// Files and bytes of a day.
fn size(dir: &Path, date: &str) -> Result<(usize, u64), CaptureError> {
    let folder = layout::day_folder(dir, date);
    let files = layout::day_files(&folder)?;
    let length = |path: &Path| fs::metadata(path).map(|metadata| metadata.len());
    let bytes = files.iter().map(|(path, _)| length(path)).sum::<Result<u64, _>>();
    Ok((files.len(), bytes.map_err(CaptureError::io("read", &folder))?))
}

/// Merges the files of a day up to a size, a few at a time. Says what was left as it is, and why.
fn compact_day(
    storage: &dyn Storage,
    dir: &Path,
    date: &str,
    target: u64,
) -> Result<Vec<String>, CaptureError> {
    let mut alone = Alone;
    let mut day = Day::new(storage, dir, date, &mut alone);
    loop {
        match day.delete_replaced()? {
            Replaced::Gone => {}
            Replaced::Read(files) => {
                let remedy = "until nobody reads the day: compact it again then";
                day.left.push(format!("{files} merged files stay {remedy}"));
                return Ok(day.left);
            }
            Replaced::Damaged => return Ok(day.left),
        }
        let mut groups: Vec<(Vec<Source>, u64)> = vec![];
        let (sources, in_journal) = day.sources(target)?;
        for path in in_journal {
            day.leave(&path, "its segment is still in the journal");
        }
        for source in sources {
            let bytes = source.bytes;
            match groups.last_mut() {
                Some((group, sum)) if *sum + bytes <= target && group.len() < SIDE_BY_SIDE => {
                    group.push(source);
                    *sum += bytes;
                }
                _ => groups.push((vec![source], bytes)),
            }
        }
        groups.retain(|(group, _)| group.len() > 1);
        if groups.is_empty() {
            return Ok(day.left);
        }
        for (group, _) in groups {
            day.merge(&group)?;
        }
    }
}

/// What [`merge_due`] left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// Something that has to wait: for readers, or for room.
    Later,
}

/// Merges those files of a day of which there are enough of one size, beside a writer. `passed` are files that are never
/// to be looked at again; those with damage come to them, and `left` tells why.
pub(super) fn merge_due(
    storage: &dyn Storage,
    dir: &Path,
    date: &str,
    passed: &mut HashSet<PathBuf>,
    left: &mut Vec<String>,
    beside: &mut dyn Beside,
) -> Result<Due, CaptureError> {
    let mut day = Day::new(storage, dir, date, beside);
    day.passed = std::mem::take(passed);
    let due = day.merge_due();
    (*passed, *left) = (day.passed, day.left);
    due
}

/// A file to be merged.
struct Source {
    path: PathBuf,
    name: SegmentName,
    is_merged: bool,
    bytes: u64,
}

/// What became of files whose calls are in a merged one.
enum Replaced {
    Gone,
    /// So many stay: somebody reads the day.
    Read(usize),
    /// Some stay: the merged one is not what was written.
    Damaged,
}

/// A day whose files are merged.
struct Day<'a> {
    storage: &'a dyn Storage,
    dir: &'a Path,
    date: &'a str,
    folder: PathBuf,
    beside: &'a mut dyn Beside,
    /// Files that stay as they are.
    passed: HashSet<PathBuf>,
    /// Why.
    left: Vec<String>,
}

impl<'a> Day<'a> {
    fn new(storage: &'a dyn Storage, dir: &'a Path, date: &'a str, beside: &'a mut dyn Beside) -> Self {
        let folder = layout::day_folder(dir, date);
        Self { storage, dir, date, folder, beside, passed: HashSet::new(), left: vec![] }
    }

    fn leave(&mut self, path: &Path, reason: &str) {
        if self.passed.insert(path.to_owned()) {
            self.left.push(format!("{}: {reason}", path.display()));
        }
    }

    /// The files that are smaller than this; and those of them whose segments are still in the journal. Of such a segment
    /// a part could not be made into Parquet: it is done again, under the same name.
    fn sources(&self, most: u64) -> Result<(Vec<Source>, Vec<PathBuf>), CaptureError> {
        let (mut sources, mut in_journal) = (vec![], vec![]);
        for (path, name) in layout::day_files(&self.folder)? {
            let is_merged = matches!(name, Some(DayFileName::Merged(_)));
            let Some(DayFileName::Segment(name) | DayFileName::Merged(name)) = name else {
                continue;
            };
            let bytes = fs::metadata(&path).map_err(CaptureError::io("read", &path))?.len();
            if bytes >= most || self.passed.contains(&path) {
                continue;
            }
            if name.journal_path(self.dir).exists() {
                in_journal.push(path);
            } else {
                sources.push(Source { path, name, is_merged, bytes });
            }
        }
        Ok((sources, in_journal))
    }

    fn merge_due(&mut self) -> Result<Due, CaptureError> {
        loop {
            match self.delete_replaced()? {
                Replaced::Gone => {}
                Replaced::Read(_) => return Ok(Due::Later),
                Replaced::Damaged => return Ok(Due::Nothing),
            }
            let mut tiers: BTreeMap<u32, Vec<Source>> = BTreeMap::new();
            for source in self.sources(BESIDE_BYTES)?.0 {
                tiers.entry(source.bytes.max(1).ilog(TIER)).or_default().push(source);
            }
            let Some(mut group) = tiers.into_values().find(|tier| tier.len() >= TIER_FILES) else {
                return Ok(Due::Nothing);
            };
            group.truncate(TIER_FILES);
            // Runs are less compressed than files.
            let bytes = group.iter().map(|source| 4 * source.bytes).sum();
            if !self.beside.has_room(bytes) {
                return Ok(Due::Later);
            }
            let passed = self.passed.len();
            if !self.merge(&group)? {
                return Ok(Due::Later);
            }
            if self.passed.len() == passed {
                metrics::counter!("lego_capture_merged_files_total").increment(group.len() as u64);
            }
        }
    }

    /// Puts files together; those with damage are left, and it is done without them the next time. False: it is to be
    /// left for now.
    fn merge(&mut self, group: &[Source]) -> Result<bool, CaptureError> {
        // Bytes that are not what was written must not get a new checksum.
        let passed = self.passed.len();
        for source in group {
            if let Err(reason) = sound(&source.path, source.is_merged) {
                self.leave(&source.path, &reason);
            }
        }
        if self.passed.len() > passed {
            return Ok(true);
        }
        // It is not removed meanwhile.
        let Some(reading) = Mark::share(&self.folder)? else {
            return Ok(false);
        };
        let (storage, dir, date) = (self.storage, self.dir, self.date);
        let Some(merged) = sorted::write(storage, dir, date, group, RUN_BYTES, self.beside)? else {
            return Ok(false);
        };
        drop(reading);
        self.publish(merged, group)
    }

    /// Gives a merged file its name and deletes what it was made of, while nobody reads the day. If somebody reads it for
    /// long, that is deleted later.
    fn publish(&mut self, merged: sorted::Merged<'_>, group: &[Source]) -> Result<bool, CaptureError> {
        let alone = loop {
            match Mark::alone(&self.folder)? {
                None if self.folder.exists() && self.beside.waits() => {}
                alone => break alone,
            }
        };
        let sharing = if alone.is_none() { Mark::share(&self.folder)? } else { None };
        // That their segments are gone must have come to disk before what was made of these files is all there is.
        let journal = layout::journal_dir(self.dir);
        self.storage.sync_folder(&journal).map_err(CaptureError::io("sync", &journal))?;
        // Somebody may have removed the day meanwhile.
        if !group.iter().all(|source| source.path.exists()) {
            return Ok(false);
        }
        merged.publish(self.dir)?;
        if alone.is_some() {
            self.remove(group.iter().map(|source| &source.path))?;
        }
        drop((alone, sharing));
        Ok(true)
    }

    fn remove<'p>(&self, paths: impl IntoIterator<Item = &'p PathBuf>) -> Result<(), CaptureError> {
        for path in paths {
            self.storage.remove(path).map_err(CaptureError::io("delete", path))?;
        }
        self.storage.sync_folder(&self.folder).map_err(CaptureError::io("sync", &self.folder))
    }

    /// Deletes the files whose calls are in a merged one. They stay if somebody reads the day, or if the merged one is not
    /// what was written; one of which all sources are there is deleted itself then.
    fn delete_replaced(&mut self) -> Result<Replaced, CaptureError> {
        let mut replaced: BTreeSet<PathBuf> = BTreeSet::new();
        let mut outcome = Replaced::Gone;
        for (path, name) in layout::day_files(&self.folder)? {
            if !matches!(name, Some(DayFileName::Merged(_))) {
                continue;
            }
            let replaces =
                parquet_calls::open(&path).map(|file| parquet_calls::replaces(&file)).unwrap_or_default();
            let in_folder = |stem: String| self.folder.join(format!("{stem}.parquet"));
            let sources: Vec<PathBuf> = replaces.sources.iter().cloned().map(in_folder).collect();
            let there: Vec<PathBuf> = replaces.all().map(in_folder).filter(|path| path.exists()).collect();
            if there.is_empty() {
                continue;
            }
            let Err(reason) = sound(&path, true) else {
                replaced.extend(there);
                continue;
            };
            if !sources.is_empty() && sources.iter().all(|source| sound(source, false).is_ok()) {
                self.left
                    .push(format!("{}: {reason}; it goes, and what it was made of stays", path.display()));
                replaced.insert(path);
            } else {
                self.left.push(format!("{}: {reason}; so what is left of its sources stays", path.display()));
                outcome = Replaced::Damaged;
            }
        }
        if replaced.is_empty() {
            return Ok(outcome);
        }
        let Some(_mark) = Mark::alone(&self.folder)? else {
            return Ok(Replaced::Read(replaced.len()));
        };
        self.remove(&replaced)?;
        Ok(outcome)
    }
}

/// Whether a file is what was written. One that was merged has a checksum.
pub(super) fn sound(path: &Path, is_merged: bool) -> Result<(), String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let metadata = parquet_calls::metadata(path)?;
    parquet_calls::check_version(&metadata)?;
    match summed::check(&file, metadata.file_metadata().key_value_metadata()) {
        Ok(Sum::Absent) if is_merged => Err("it has lost its checksum".to_owned()),
        Ok(Sum::Right | Sum::Absent) => Ok(()),
        Ok(Sum::Wrong(found)) => Err(found),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests;
