//! A sealed segment to Parquet: one file a UTC day, written aside, synced, renamed; only then the segment goes.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::ArrowWriterOptions;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{BloomFilterPosition, EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;

use super::error::CaptureError;
use super::journal::Sealed;
use super::layout::{damaged_path, date_of, journal_dir};
use super::segment::SegmentCalls;
use super::storage::{Storage, make_folder};
use super::summed::Summed;
use super::{columns, encode, footer};
use crate::record::{Call, CallId, SCHEMA_VERSION, SessionId};

/// Bytes of calls in memory that are encoded at once. What is encoded is a fraction of that.
const BATCH_BYTES: usize = 4 << 20;
/// Bytes of what calls hold, as it is in memory, that make a row group.
const ROW_GROUP_BYTES: usize = 64 << 20;
/// Calls that make a row group. Each row group costs some 10 kB of the footer, which whoever looks for anything reads.
const ROW_GROUP_ROWS: usize = 1 << 18;
/// Calls of a page: who wants one of them reads all.
const PAGE_ROWS: usize = 8192;
/// Sessions of a row group that its Bloom filter is made for.
const SESSIONS: u64 = 1 << 16;

/// Writes the segment's calls to Parquet and deletes it; one with damage is set aside instead, for a person to see.
/// Repeating it after a crash at any point gives the same files. The files' paths are returned.
///
/// # Errors
/// The segment stays, and stays readable.
pub(super) fn compact(
    storage: &dyn Storage,
    dir: &Path,
    sealed: Sealed,
) -> Result<Vec<PathBuf>, CaptureError> {
    let segment = sealed.name.journal_path(dir);
    let mut files: BTreeMap<String, DayFile> = BTreeMap::new();
    let damaged_bytes = match write_days(storage, dir, sealed, &segment, &mut files) {
        Ok(damaged_bytes) => damaged_bytes,
        Err(error) => {
            for file in files.values() {
                let _ = storage.remove(&file.temporary);
            }
            return Err(error);
        }
    };
    let mut paths = vec![];
    for (date, file) in files {
        let path = sealed.name.parquet_path(dir, &date);
        file.finish(storage, dir, &path)?;
        paths.push(path);
    }
    if damaged_bytes == 0 {
        storage.remove(&segment).map_err(CaptureError::io("delete", &segment))?;
    } else {
        let aside = damaged_path(&segment);
        storage.rename(&segment, &aside).map_err(CaptureError::io("rename", &segment))?;
        metrics::counter!("lego_capture_damaged_bytes_total").increment(damaged_bytes);
        tracing::error!(
            path = %aside.display(), damaged_bytes,
            "acknowledged calls in a segment cannot be read: the disk changed what was written. The others are in \
             Parquet, the segment is set aside"
        );
    }
    let journal = journal_dir(dir);
    storage.sync_folder(&journal).map_err(CaptureError::io("sync", &journal))?;
    Ok(paths)
}

/// Returns how many bytes of the segment hold no call although they should.
fn write_days(
    storage: &dyn Storage,
    dir: &Path,
    sealed: Sealed,
    segment: &Path,
    files: &mut BTreeMap<String, DayFile>,
) -> Result<u64, CaptureError> {
    let mut seen = HashSet::new();
    let mut calls = SegmentCalls::sorted(segment, sealed.length)?;
    for call in calls.by_ref() {
        let call = call?;
        if !seen.insert((call.call_id, call.choice_index)) {
            continue;
        }
        let date = date_of(call.received_at);
        if !files.contains_key(&date) {
            let temporary = sealed.name.temporary_path(dir, &date);
            files.insert(date.clone(), DayFile::create(storage, temporary)?);
        }
        if let Some(file) = files.get_mut(&date) {
            file.push(call)?;
        }
    }
    for file in files.values_mut() {
        file.seal()?;
    }
    Ok(calls.damaged_bytes)
}

pub(super) struct DayFile {
    temporary: PathBuf,
    writer: ArrowWriter<Summed>,
    pending: Vec<Call>,
    pending_bytes: usize,
    /// Of the row group, what is pending included.
    group_bytes: usize,
    /// Of the row group, as far as it is encoded.
    group_rows: usize,
    /// The call that came last, while each came in order of its [`key`].
    last: Option<(SessionId, i64, CallId, u16)>,
    is_sorted: bool,
}

/// Calls in this order are sorted.
pub(super) fn key(call: &Call) -> (&SessionId, i64, CallId, u16) {
    (&call.session_id, call.received_at, call.call_id, call.choice_index)
}

impl DayFile {
    pub(super) fn create(storage: &dyn Storage, temporary: PathBuf) -> Result<Self, CaptureError> {
        let file = storage.create(&temporary).map_err(CaptureError::io("create", &temporary))?;
        let file = Summed::new(file);
        // The Parquet schema says the same as Arrow's, which would be a third of a small file's footer.
        let options = ArrowWriterOptions::new().with_properties(properties()).with_skip_arrow_metadata(true);
        let writer = ArrowWriter::try_new_with_options(file, columns::schema(), options)
            .map_err(CaptureError::parquet(&temporary))?;
        let (pending, pending_bytes) = (vec![], 0);
        let (group_bytes, group_rows, last, is_sorted) = (0, 0, None, true);
        Ok(Self { temporary, writer, pending, pending_bytes, group_bytes, group_rows, last, is_sorted })
    }

    pub(super) fn push(&mut self, call: Call) -> Result<(), CaptureError> {
        let held = held_bytes(&call);
        if self.is_sorted {
            let (session, received_at, call_id, choice) = key(&call);
            let last = self.last.as_ref().map(|(session, at, id, choice)| (session, *at, *id, *choice));
            self.is_sorted = last.is_none_or(|last| last <= key(&call));
            self.last = Some((session.clone(), received_at, call_id, choice));
        }
        self.group_bytes += held;
        self.pending_bytes += size_of::<Call>() + held;
        self.pending.push(call);
        let rows = self.group_rows + self.pending.len();
        let is_full = self.group_bytes >= ROW_GROUP_BYTES || rows >= ROW_GROUP_ROWS;
        if self.pending_bytes >= BATCH_BYTES {
            self.encode()?;
        }
        if !is_full {
            return Ok(());
        }
        self.end_group()?;
        // So that the journal never waits for much of another file.
        self.writer.sync().map_err(CaptureError::io("write", &self.temporary))?;
        self.writer.inner_mut().sync().map_err(CaptureError::io("sync", &self.temporary))
    }

    /// What comes is of another row group.
    pub(super) fn end_group(&mut self) -> Result<(), CaptureError> {
        self.encode()?;
        (self.group_bytes, self.group_rows) = (0, 0);
        self.writer.flush().map_err(CaptureError::parquet(&self.temporary))
    }

    /// Adds what is pending to the row group.
    fn encode(&mut self) -> Result<(), CaptureError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let calls = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
        self.group_rows += calls.len();
        let batch = encode::batch(&calls)
            .map_err(|error| CaptureError::corrupt(&self.temporary, error.to_string()))?;
        // The batch has it all.
        drop(calls);
        self.writer.write(&batch).map_err(CaptureError::parquet(&self.temporary))
    }

    /// Adds to the file's metadata.
    pub(super) fn say(&mut self, key: &str, value: String) {
        self.writer.append_key_value_metadata(KeyValue::new(key.to_owned(), value));
    }

    /// Ends the file and syncs it.
    pub(super) fn seal(&mut self) -> Result<(), CaptureError> {
        self.end_group()?;
        if self.is_sorted {
            self.say(columns::SORTED_KEY, columns::SORTED.to_owned());
        }
        // What the library still holds back is to be in the sum.
        self.writer.sync().map_err(CaptureError::io("write", &self.temporary))?;
        let sum = self.writer.inner().key_value();
        self.writer.append_key_value_metadata(sum);
        let groups = self.writer.flushed_row_groups().len();
        self.writer.append_key_value_metadata(footer::unsigned(groups));
        self.writer.inner_mut().hold();
        self.writer.finish().map_err(CaptureError::parquet(&self.temporary))?;
        let end = self.writer.inner_mut();
        end.release().map_err(CaptureError::io("write", &self.temporary))?;
        end.sync().map_err(CaptureError::io("sync", &self.temporary))
    }

    /// Gives the file its name.
    pub(super) fn finish(self, storage: &dyn Storage, dir: &Path, path: &Path) -> Result<(), CaptureError> {
        let day = path.parent().unwrap_or(dir);
        make_folder(storage, day).map_err(CaptureError::io("create", day))?;
        storage.rename(&self.temporary, path).map_err(CaptureError::io("rename", &self.temporary))?;
        storage.sync_folder(day).map_err(CaptureError::io("sync", day))
    }
}

/// About what a call takes in memory.
pub(super) fn memory_bytes(call: &Call) -> usize {
    size_of::<Call>() + held_bytes(call)
}

/// About what its texts, ids and numbers take of that.
fn held_bytes(call: &Call) -> usize {
    let bodies = [&call.client_request, &call.upstream_request, &call.response];
    let bodies: usize = bodies.into_iter().flatten().map(|body| body.get().len()).sum();
    let ids = [&call.prompt_token_ids, &call.completion_token_ids];
    let ids: usize = ids.into_iter().flatten().map(|ids| 4 * ids.len()).sum();
    let logprobs = call.completion_logprobs.as_ref().map_or(0, |values| 8 * values.len());
    let routing = call.routing.as_ref().map_or(0, |routing| routing.data().len());
    bodies + ids + logprobs + routing + call.text.as_ref().map_or(0, String::len)
}

fn properties() -> WriterProperties {
    let version = KeyValue::new(columns::VERSION_KEY.to_owned(), SCHEMA_VERSION.to_string());
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_created_by(concat!("lego ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_key_value_metadata(Some(vec![version]))
        .set_max_row_group_row_count(None)
        .set_data_page_row_count_limit(PAGE_ROWS)
        // Within what is summed.
        .set_bloom_filter_position(BloomFilterPosition::AfterRowGroup)
        .set_statistics_enabled(EnabledStatistics::None)
        .set_statistics_truncate_length(Some(64))
        .set_column_index_truncate_length(Some(64));
    for name in ["session_id", "trial_id"] {
        let path = path(name);
        properties = properties
            .set_column_statistics_enabled(path.clone(), EnabledStatistics::Page)
            .set_column_bloom_filter_enabled(path.clone(), true)
            .set_column_bloom_filter_max_ndv(path, SESSIONS);
    }
    for name in ["call_id", "received_at"] {
        properties = properties.set_column_statistics_enabled(path(name), EnabledStatistics::Page);
    }
    for leaf in columns::UNIQUE {
        properties = properties.set_column_dictionary_enabled(path(leaf), false);
    }
    for (leaf, encoding) in
        [("call_id", Encoding::DELTA_BYTE_ARRAY), ("received_at", Encoding::DELTA_BINARY_PACKED)]
    {
        properties = properties.set_column_encoding(path(leaf), encoding);
    }
    // Sampled ids and their log-probs hardly repeat: their bytes compress better one plane after the other.
    for leaf in ["completion_token_ids.list.element", "completion_logprobs.list.element"] {
        properties = properties.set_column_encoding(path(leaf), Encoding::BYTE_STREAM_SPLIT);
    }
    properties.build()
}

/// A leaf's, of its names between dots.
fn path(leaf: &str) -> ColumnPath {
    ColumnPath::new(leaf.split('.').map(str::to_owned).collect())
}

/// The schema as users see it: column names and types, for the documentation's test.
pub fn column_names() -> Vec<String> {
    let schema = Arc::clone(&columns::schema());
    schema.fields().iter().map(|field| field.name().clone()).collect()
}

#[cfg(test)]
mod tests;
