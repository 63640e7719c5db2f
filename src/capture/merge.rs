//! Small Parquet files of a day into larger ones, sorted by session.
//!
//! ```text
//! sources ─▶ sorted runs (journal/….tmp) ─▶ merged file (journal/….tmp) ─▶ renamed into the day ─▶ sources deleted
//! ```
//! The merged file says in its footer which files it replaces, and readers leave those out. So the rename is the one
//! moment at which the new file counts and the old ones do not: a crash before it leaves what was there, one after it
//! leaves files that nobody reads and the next compaction deletes. They are deleted only when nobody reads the day.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::compact::{DayFile, memory_bytes};
use super::error::CaptureError;
use super::frame;
use super::layout::{self, DayFileName, SegmentName};
use super::lock::Lock;
use super::mark::Mark;
use super::parquet_calls::{self, ParquetCalls};
use super::payload;
use super::reader::Query;
use super::segment::SegmentCalls;
use super::storage::{Files, Storage};
use super::summed::{self, Sum, Summed};
use super::{columns, recovery};
use crate::record::{Call, CallId, SessionId};

/// A file of this size is large enough; smaller ones are put together up to it.
const TARGET_BYTES: u64 = 256 << 20;
/// Bytes of calls that are sorted in memory.
const RUN_BYTES: usize = 64 << 20;

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
        compact_day(storage, dir, &date, TARGET_BYTES, &mut day.left)?;
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

fn compact_day(
    storage: &dyn Storage,
    dir: &Path,
    date: &str,
    target: u64,
    left: &mut Vec<String>,
) -> Result<(), CaptureError> {
    let folder = layout::day_folder(dir, date);
    if !delete_replaced(storage, &folder, left)? {
        return Ok(());
    }
    let mut groups: Vec<(Vec<Source>, u64)> = vec![];
    for (path, name) in layout::day_files(&folder)? {
        let bytes = fs::metadata(&path).map_err(CaptureError::io("read", &path))?.len();
        let is_merged = matches!(name, Some(DayFileName::Merged(_)));
        let Some(DayFileName::Segment(name) | DayFileName::Merged(name)) = name else {
            continue;
        };
        if bytes >= target {
            continue;
        }
        // What is in the journal as well is of a segment of which a part could not be made into Parquet: the next writer
        // does it again, under the same name.
        if name.journal_path(dir).exists() {
            left.push(format!("{}: its segment is still in the journal", path.display()));
            continue;
        }
        // Bytes that are not what was written must not get a new checksum.
        if let Err(reason) = sound(&path, is_merged) {
            left.push(format!("{}: {reason}", path.display()));
            continue;
        }
        match groups.last_mut() {
            Some((group, sum)) if *sum + bytes <= target => {
                group.push(Source { path, name });
                *sum += bytes;
            }
            _ => groups.push((vec![Source { path, name }], bytes)),
        }
    }
    for (group, _) in groups.into_iter().filter(|(group, _)| group.len() > 1) {
        let reading = Mark::share(&folder)?;
        let merged = write_merged(storage, dir, date, &group, RUN_BYTES)?;
        merged.publish(storage, dir)?;
        drop(reading);
        delete_replaced(storage, &folder, left)?;
    }
    Ok(())
}

/// A file to be merged.
struct Source {
    path: PathBuf,
    name: SegmentName,
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

/// Deletes the files whose calls are in a merged one; false if they have to stay: somebody reads the day, or the merged
/// one is not what was written. One of which all sources are there is deleted itself then.
fn delete_replaced(
    storage: &dyn Storage,
    folder: &Path,
    left: &mut Vec<String>,
) -> Result<bool, CaptureError> {
    let mut replaced = vec![];
    let mut is_whole = true;
    for (path, name) in layout::day_files(folder)? {
        if !matches!(name, Some(DayFileName::Merged(_))) {
            continue;
        }
        let stems = parquet_calls::open(&path)
            .map_or_else(|_| vec![], |file| parquet_calls::replaces(&file))
            .into_iter();
        let sources: Vec<PathBuf> = stems.map(|stem| folder.join(format!("{stem}.parquet"))).collect();
        if !sources.iter().any(|source| source.exists()) {
            continue;
        }
        let Err(reason) = sound(&path, true) else {
            replaced.extend(sources.into_iter().filter(|source| source.exists()));
            continue;
        };
        if sources.iter().all(|source| sound(source, false).is_ok()) {
            left.push(format!("{}: {reason}; it goes, and what it was made of stays", path.display()));
            replaced.push(path);
        } else {
            left.push(format!("{}: {reason}; so what is left of its sources stays", path.display()));
            is_whole = false;
        }
    }
    if replaced.is_empty() {
        return Ok(is_whole);
    }
    let Some(_mark) = Mark::alone(folder)? else {
        let files = replaced.len();
        left.push(format!("{files} merged files stay until nobody reads the day: compact it again then"));
        return Ok(false);
    };
    for path in replaced {
        storage.remove(&path).map_err(CaptureError::io("delete", &path))?;
    }
    storage.sync_folder(folder).map_err(CaptureError::io("sync", folder))?;
    Ok(is_whole)
}

/// Calls in this order are sorted.
fn key(call: &Call) -> (&SessionId, i64, CallId, u16) {
    (&call.session_id, call.received_at, call.call_id, call.choice_index)
}

/// A merged file that has no name yet.
struct Merged {
    file: DayFile,
    path: PathBuf,
    runs: Vec<PathBuf>,
}

impl Merged {
    /// From here on it counts, and the files that it replaces do not.
    fn publish(self, storage: &dyn Storage, dir: &Path) -> Result<(), CaptureError> {
        self.file.finish(storage, dir, &self.path)?;
        for run in &self.runs {
            storage.remove(run).map_err(CaptureError::io("delete", run))?;
        }
        Ok(())
    }
}

fn write_merged(
    storage: &dyn Storage,
    dir: &Path,
    date: &str,
    sources: &[Source],
    run_bytes: usize,
) -> Result<Merged, CaptureError> {
    let salt = uuid::Uuid::new_v4().into_bytes();
    let number = sources.iter().map(|source| source.name.number).max().unwrap_or(0);
    let name = SegmentName { number, salt: std::array::from_fn(|i| salt[i] ^ salt[i + 8]) };
    let mut sorter = Sorter {
        storage,
        dir,
        date,
        name,
        pending: vec![],
        bytes: 0,
        run_bytes,
        runs: vec![],
        rows: 0,
        doubled: 0,
    };
    let mut rows = 0;
    for Source { path, .. } in sources {
        let corrupt = |reason: String| CaptureError::corrupt(path, reason);
        let metadata = parquet_calls::metadata(path).map_err(corrupt)?;
        rows += u64::try_from(metadata.file_metadata().num_rows()).unwrap_or(0);
        for call in ParquetCalls::open(path, &Query::default()).map_err(corrupt)? {
            sorter.push(call?)?;
        }
    }
    sorter.spill()?;
    if sorter.rows != rows {
        let reason = format!("{} of {rows} records could be read", sorter.rows);
        return Err(CaptureError::corrupt(&layout::day_folder(dir, date), reason));
    }
    let temporary = name.temporary_path(dir, date);
    let mut file = DayFile::create(storage, temporary)?;
    let stems = sources.iter().filter_map(|source| source.path.file_stem()?.to_str());
    file.say(columns::REPLACES_KEY, stems.collect::<Vec<_>>().join(","));
    let mut runs = vec![];
    for path in &sorter.runs {
        runs.push(SegmentCalls::open(path, None)?);
    }
    let merged = merge(runs, &mut |call| file.push(call))?;
    if merged + sorter.doubled != rows {
        let reason = format!("{merged} of {rows} records came back from their sorted runs");
        return Err(CaptureError::corrupt(&layout::day_folder(dir, date), reason));
    }
    file.seal()?;
    Ok(Merged { file, path: name.merged_path(dir, date), runs: sorter.runs })
}

/// Sorts calls in parts that fit into memory.
struct Sorter<'a> {
    storage: &'a dyn Storage,
    dir: &'a Path,
    date: &'a str,
    name: SegmentName,
    pending: Vec<Call>,
    bytes: usize,
    run_bytes: usize,
    runs: Vec<PathBuf>,
    rows: u64,
    /// Rows that a run had already.
    doubled: u64,
}

impl Sorter<'_> {
    fn push(&mut self, call: Call) -> Result<(), CaptureError> {
        self.rows += 1;
        self.bytes += memory_bytes(&call);
        self.pending.push(call);
        if self.bytes >= self.run_bytes { self.spill() } else { Ok(()) }
    }

    /// Writes what is in memory as a run, in the journal's own form.
    fn spill(&mut self) -> Result<(), CaptureError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.pending.sort_by(|a, b| key(a).cmp(&key(b)));
        let rows = self.pending.len();
        self.pending.dedup_by(|a, b| key(a) == key(b));
        self.doubled += (rows - self.pending.len()) as u64;
        let path = self.name.run_path(self.dir, self.date, self.runs.len());
        let failed = || CaptureError::io("write", &path);
        let file = Summed::new(self.storage.create(&path).map_err(failed())?);
        let mut file = BufWriter::with_capacity(1 << 20, file);
        let salt = self.name.salt;
        file.write_all(&frame::header(salt)).map_err(failed())?;
        for call in self.pending.drain(..) {
            let encoded = payload::encode(vec![call]);
            let payload = encoded.map_err(|error| CaptureError::corrupt(&path, error.to_string()))?;
            let parts = || payload.parts().iter().map(|part| part.as_ref());
            file.write_all(&frame::head(salt, payload.len(), parts())).map_err(failed())?;
            for part in parts() {
                file.write_all(part).map_err(failed())?;
            }
        }
        file.flush().map_err(failed())?;
        (self.pending, self.bytes) = (vec![], 0);
        self.runs.push(path);
        Ok(())
    }
}

/// The next call of a run.
struct Head {
    call: Call,
    run: usize,
}

impl PartialEq for Head {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Head {}

impl PartialOrd for Head {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Head {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        key(&self.call).cmp(&key(&other.call)).then(self.run.cmp(&other.run))
    }
}

/// Gives the calls of all runs in order, each once. Returns how many there were in the runs.
fn merge(
    mut runs: Vec<SegmentCalls>,
    give: &mut dyn FnMut(Call) -> Result<(), CaptureError>,
) -> Result<u64, CaptureError> {
    let mut heads = BinaryHeap::new();
    for (run, calls) in runs.iter_mut().enumerate() {
        if let Some(call) = calls.next() {
            heads.push(Reverse(Head { call: call?, run }));
        }
    }
    let (mut last, mut count) = (None, 0);
    while let Some(Reverse(Head { call, run })) = heads.pop() {
        count += 1;
        if let Some(next) = runs[run].next() {
            heads.push(Reverse(Head { call: next?, run }));
        }
        let id = Some((call.call_id, call.choice_index));
        if last != id {
            last = id;
            give(call)?;
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests;
