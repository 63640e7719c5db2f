//! The calls of several files in one order. Files that are sorted are read side by side; of others parts that fit into
//! memory are sorted, and lie compressed on disk until then.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeSet, BinaryHeap};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};

use parquet::file::metadata::ParquetMetaData;
use zstd::stream::{read::Decoder, write::Encoder};

use super::{Beside, Source};
use crate::capture::compact::{DayFile, key, memory_bytes};
use crate::capture::error::CaptureError;
use crate::capture::layout::{self, SegmentName};
use crate::capture::parquet_calls::{self, ParquetCalls};
use crate::capture::storage::Storage;
use crate::capture::summed::Summed;
use crate::capture::{columns, payload};
use crate::record::Call;

/// Bytes of rows that are decoded at a time of each of the files.
const BATCH_BYTES: i64 = 4 << 20;

/// Files that nobody needs any more unless one of them gets another name: dropping them deletes them.
struct Temporary<'a> {
    storage: &'a dyn Storage,
    paths: Vec<PathBuf>,
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        for path in self.paths.iter().filter(|path| path.exists()) {
            // The next writer deletes it.
            let _ = self.storage.remove(path);
        }
    }
}

/// A merged file that has no name yet.
pub(super) struct Merged<'a> {
    file: DayFile,
    path: PathBuf,
    temporary: Temporary<'a>,
}

impl Merged<'_> {
    /// From here on it counts, and the files that it replaces do not.
    pub(super) fn publish(self, dir: &Path) -> Result<(), CaptureError> {
        self.file.finish(self.temporary.storage, dir, &self.path)
    }

    #[cfg(test)]
    pub(super) fn runs(&self) -> usize {
        self.temporary.paths.len() - 1
    }
}

/// Whether the calls of a file lie in the order of their [`key`]s.
fn is_sorted(source: &Source, metadata: &ParquetMetaData) -> bool {
    source.is_merged || parquet_calls::key_value(metadata, columns::SORTED_KEY).is_some()
}

/// Writes the calls of some files into one. `None`: it was not to go on.
pub(super) fn write<'a>(
    storage: &'a dyn Storage,
    dir: &'a Path,
    date: &'a str,
    sources: &[Source],
    run_bytes: usize,
    beside: &mut dyn Beside,
) -> Result<Option<Merged<'a>>, CaptureError> {
    let salt = uuid::Uuid::new_v4().into_bytes();
    let number = sources.iter().map(|source| source.name.number).max().unwrap_or(0);
    let name = SegmentName { number, salt: std::array::from_fn(|i| salt[i] ^ salt[i + 8]) };
    let temporary = Temporary { storage, paths: vec![] };
    let mut sorter =
        Sorter { temporary, dir, date, name, pending: vec![], bytes: 0, run_bytes, runs: vec![] };
    let (mut rows, mut doubled, mut files): (u64, u64, Vec<Calls>) = (0, 0, vec![]);
    let mut replaced: BTreeSet<String> = BTreeSet::new();
    for source in sources {
        let path = &source.path;
        let corrupt = |reason: String| CaptureError::corrupt(path, reason);
        let file = parquet_calls::open(path).map_err(corrupt)?;
        let footer = file.footer().map_err(|error| corrupt(error.to_string()))?;
        rows += u64::try_from(footer.metadata().file_metadata().num_rows()).unwrap_or(0);
        replaced.extend(parquet_calls::replaces(&file).all());
        let calls = ParquetCalls::some_at_a_time(path, &file, BATCH_BYTES).map_err(corrupt)?;
        if is_sorted(source, footer.metadata()) {
            files.push(Box::new(calls));
            continue;
        }
        for call in calls {
            doubled += sorter.push(call?)?;
            if !beside.goes_on() {
                return Ok(None);
            }
        }
    }
    doubled += sorter.spill()?;
    let Sorter { mut temporary, runs, .. } = sorter;
    for run in runs {
        files.push(Box::new(run.open()?));
    }
    let path = name.temporary_path(dir, date);
    temporary.paths.push(path.clone());
    let mut file = DayFile::create(storage, path)?;
    let stems = sources.iter().filter_map(|source| source.path.file_stem()?.to_str());
    file.say(columns::REPLACES_KEY, stems.collect::<Vec<_>>().join(","));
    if !replaced.is_empty() {
        file.say(columns::REPLACED_KEY, replaced.into_iter().collect::<Vec<_>>().join(","));
    }
    let merged = merge(files, &mut |call| {
        file.push(call)?;
        Ok(beside.goes_on())
    })?;
    let Some(merged) = merged else {
        return Ok(None);
    };
    if merged + doubled != rows {
        let reason = format!("{merged} of {rows} records could be read");
        return Err(CaptureError::corrupt(&layout::day_folder(dir, date), reason));
    }
    file.seal()?;
    Ok(Some(Merged { file, path: name.merged_path(dir, date), temporary }))
}

/// Calls in order.
type Calls = Box<dyn Iterator<Item = Result<Call, CaptureError>>>;

/// Sorts calls in parts that fit into memory.
struct Sorter<'a> {
    temporary: Temporary<'a>,
    dir: &'a Path,
    date: &'a str,
    name: SegmentName,
    pending: Vec<Call>,
    bytes: usize,
    run_bytes: usize,
    runs: Vec<Run>,
}

impl Sorter<'_> {
    /// Says how many calls were there twice.
    fn push(&mut self, call: Call) -> Result<u64, CaptureError> {
        self.bytes += memory_bytes(&call);
        self.pending.push(call);
        if self.bytes >= self.run_bytes { self.spill() } else { Ok(0) }
    }

    /// Writes what is in memory as a run.
    fn spill(&mut self) -> Result<u64, CaptureError> {
        if self.pending.is_empty() {
            return Ok(0);
        }
        self.pending.sort_by(|a, b| key(a).cmp(&key(b)));
        let rows = self.pending.len();
        self.pending.dedup_by(|a, b| key(a) == key(b));
        let calls = self.pending.len();
        let path = self.name.run_path(self.dir, self.date, self.runs.len());
        self.temporary.paths.push(path.clone());
        let failed = || CaptureError::io("write", &path);
        let disk = Summed::new(self.temporary.storage.create(&path).map_err(failed())?);
        let mut file = Encoder::new(BufWriter::with_capacity(1 << 18, disk), 1).map_err(failed())?;
        file.include_checksum(true).map_err(failed())?;
        for call in self.pending.drain(..) {
            let encoded = payload::encode(vec![call]);
            let payload = encoded.map_err(|error| CaptureError::corrupt(&path, error.to_string()))?;
            file.write_all(&(payload.len() as u64).to_le_bytes()).map_err(failed())?;
            for part in payload.parts() {
                file.write_all(part).map_err(failed())?;
            }
        }
        file.finish().and_then(|mut file| file.flush()).map_err(failed())?;
        (self.pending, self.bytes) = (vec![], 0);
        self.runs.push(Run { path, calls });
        Ok((rows - calls) as u64)
    }
}

/// Sorted calls on disk: as payloads of the journal, each behind its length.
struct Run {
    path: PathBuf,
    calls: usize,
}

struct OpenRun {
    path: PathBuf,
    left: usize,
    file: Decoder<'static, BufReader<File>>,
}

impl Run {
    fn open(self) -> Result<OpenRun, CaptureError> {
        let Self { path, calls } = self;
        let file = File::open(&path).and_then(Decoder::new).map_err(CaptureError::io("open", &path))?;
        Ok(OpenRun { path, left: calls, file })
    }
}

impl OpenRun {
    fn read(&mut self) -> io::Result<Vec<u8>> {
        let mut length = [0; 8];
        self.file.read_exact(&mut length)?;
        let mut payload = vec![];
        let length = u64::from_le_bytes(length);
        let read = self.file.by_ref().take(length).read_to_end(&mut payload)?;
        if read as u64 == length { Ok(payload) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

impl Iterator for OpenRun {
    type Item = Result<Call, CaptureError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let payload = self.read().map_err(CaptureError::io("read", &self.path));
        let calls = payload.and_then(|payload| {
            payload::decode(&payload.into()).map_err(|reason| CaptureError::corrupt(&self.path, reason))
        });
        calls.map(|calls| calls.into_iter().next()).transpose()
    }
}

/// The next call of a file.
struct Head {
    call: Call,
    file: usize,
}

impl PartialEq for Head {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Head {}

impl PartialOrd for Head {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Head {
    fn cmp(&self, other: &Self) -> Ordering {
        key(&self.call).cmp(&key(&other.call)).then(self.file.cmp(&other.file))
    }
}

/// Gives the calls of all files in order, each once, until it is not to go on. Returns how many there were, those that
/// are there twice counted twice.
fn merge(
    mut files: Vec<Calls>,
    give: &mut dyn FnMut(Call) -> Result<bool, CaptureError>,
) -> Result<Option<u64>, CaptureError> {
    let mut heads = BinaryHeap::new();
    for (file, calls) in files.iter_mut().enumerate() {
        if let Some(call) = calls.next() {
            heads.push(Reverse(Head { call: call?, file }));
        }
    }
    let (mut last, mut count) = (None, 0);
    while let Some(Reverse(Head { call, file })) = heads.pop() {
        count += 1;
        if let Some(next) = files[file].next() {
            heads.push(Reverse(Head { call: next?, file }));
        }
        let id = Some((call.call_id, call.choice_index));
        if last != id {
            last = id;
            if !give(call)? {
                return Ok(None);
            }
        }
    }
    Ok(Some(count))
}
