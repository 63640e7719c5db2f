//! The calls of one Parquet file. Row groups that cannot hold what is asked for are not read.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array as _, BooleanArray, StringArray};
use arrow::error::ArrowError;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowPredicate, ArrowPredicateFn, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder, RowFilter,
    RowSelectionPolicy,
};
use parquet::bloom_filter::Sbbf;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::statistics::Statistics;

use super::error::CaptureError;
use super::filter::{Filter, Group, Range, TextTest, Value};
use super::listing::ListedFile;
use super::reader::Query;
use super::remote::{Footer, Stored, Tally};
use super::{columns, decode, footer};
use crate::record::{Call, SCHEMA_VERSION};

/// Most rows decoded at a time.
const BATCH_ROWS: usize = 64;
/// Rows decoded at a time hold about this much: bodies and routing can be tens of MB a row.
const BATCH_BYTES: i64 = 32 << 20;

pub(super) struct ParquetCalls {
    path: PathBuf,
    file: Stored,
    query: Query,
    batches: Option<ParquetRecordBatchReader>,
    ready: VecDeque<Call>,
}

impl ParquetCalls {
    /// Opens a file; the error says why it is not one of ours.
    pub(super) fn open(path: &Path, query: &Query) -> Result<Self, String> {
        Self::start(path, &open(path)?, query, BATCH_BYTES)
    }

    /// All calls of one that is open, and no more than `bytes` of them decoded at a time, or one.
    pub(super) fn some_at_a_time(path: &Path, file: &Stored, bytes: i64) -> Result<Self, String> {
        Self::start(path, file, &Query { as_stored: true, ..Query::default() }, bytes)
    }

    /// The same of one that may be in object storage.
    ///
    /// # Errors
    /// That could not be reached.
    pub(super) fn of(listed: &ListedFile, query: &Query) -> Result<Result<Self, String>, CaptureError> {
        listed.look(|file| Self::start(&listed.path, file, query, BATCH_BYTES))
    }

    fn start(path: &Path, file: &Stored, query: &Query, batch_bytes: i64) -> Result<Self, String> {
        let builder = builder(file)?;
        check_version(builder.metadata())?;
        let batches = plan(file, builder, query, batch_bytes).map_err(|error| error.to_string())?;
        let (path, query, ready) = (path.to_owned(), query.clone(), VecDeque::new());
        Ok(Self { path, file: file.clone(), query, batches: Some(batches), ready })
    }

    fn refill(&mut self) -> Result<bool, CaptureError> {
        while self.ready.is_empty() {
            let Some(batch) = self.batches.as_mut().and_then(Iterator::next) else {
                return Ok(false);
            };
            let corrupt = |reason: String| {
                self.file.failure().unwrap_or_else(|| CaptureError::corrupt(&self.path, reason))
            };
            let batch = batch.map_err(|error| corrupt(error.to_string()))?;
            let calls = decode::calls(&batch).map_err(corrupt)?;
            self.ready = calls.into_iter().filter(|call| self.query.may_want(call)).collect();
        }
        Ok(true)
    }
}

impl Iterator for ParquetCalls {
    type Item = Result<Call, CaptureError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.refill() {
            Ok(true) => self.ready.pop_front().map(Ok),
            Ok(false) => None,
            Err(error) => {
                self.batches = None;
                Some(Err(error))
            }
        }
    }
}

/// What `query` asks for, as one predicate.
fn predicate(query: &Query) -> Option<Filter> {
    let wanted = [
        ("session_id", query.session_id.as_ref().map(ToString::to_string)),
        ("trial_id", query.trial_id.as_ref().map(ToString::to_string)),
        ("call_id", query.call_id.map(|id| id.to_string())),
    ];
    let wanted = wanted.into_iter().filter_map(|(name, value)| Filter::equals(name, value?));
    wanted.chain(query.filter.clone()).reduce(Filter::and)
}

fn plan(
    file: &Stored,
    builder: ParquetRecordBatchReaderBuilder<Stored>,
    query: &Query,
    batch_bytes: i64,
) -> parquet::errors::Result<ParquetRecordBatchReader> {
    let wanted = predicate(query);
    let groups = (0..builder.metadata().num_row_groups()).filter(|&index| {
        wanted.as_ref().is_none_or(|wanted| wanted.may_hold(&RowGroup::new(&builder, index)))
    });
    let groups: Vec<usize> = groups.collect();
    let schema = builder.parquet_schema();
    let uses = |names: &[&str]| query.filter.as_ref().is_some_and(|filter| filter.uses(names));
    let leaves = schema.columns().iter().enumerate().filter(|(_, column)| {
        let name = column.path().parts().first().map_or("", String::as_str);
        let is_body = columns::BODIES.contains(&name) || columns::SPLICES.contains(&name);
        let is_body = query.without_bodies && is_body && !uses(&columns::BODIES) && !uses(&columns::SPLICES);
        let is_routing = query.without_routing && name == columns::ROUTING && !uses(&columns::ROUTINGS);
        !is_body && !is_routing
    });
    let leaves: Vec<usize> = leaves.map(|(leaf, _)| leaf).collect();
    let mask = ProjectionMask::leaves(schema, leaves.iter().copied());
    // What is cheap to look at first; the rest of a row is then read only where it may be wanted.
    let has = |test: &TextTest| schema.columns().iter().any(|leaf| leaf.path().string() == test.column());
    let texts = wanted.iter().flat_map(Filter::texts).filter(has).map(|test| {
        let only = ProjectionMask::columns(schema, [test.column()]);
        let predicate = ArrowPredicateFn::new(only, move |batch| {
            let name = test.column();
            let column = batch.column(0).as_any().downcast_ref::<StringArray>();
            let column = column.ok_or_else(|| ArrowError::SchemaError(format!("{name} is no text")))?;
            Ok(BooleanArray::from_iter(column.iter().map(|text| Some(test.is_true_of(text)))))
        });
        Box::new(predicate) as Box<dyn ArrowPredicate>
    });
    let filter = RowFilter::new(texts.collect());
    let leaf = |column: &str| schema.columns().iter().position(|leaf| leaf.path().string() == column);
    let first: Vec<usize> =
        wanted.iter().flat_map(Filter::texts).filter_map(|test| leaf(test.column())).collect();
    file.expect(builder.metadata(), &groups, &mask, &first);
    let rows = rows_of(batch_bytes, builder.metadata(), &groups);
    // Where few rows are wanted only their pages are read.
    let builder = if first.is_empty() {
        builder
    } else {
        let paged = footer::with_pages(file, &file.footer()?, &groups, leaves.into_iter().chain(first))?;
        ParquetRecordBatchReaderBuilder::new_with_metadata(file.clone(), paged)
            .with_row_selection_policy(RowSelectionPolicy::Selectors)
    };
    let builder = builder.with_batch_size(rows).with_row_groups(groups);
    builder.with_projection(mask).with_row_filter(filter).build()
}

/// Rows of these row groups that are decoded at a time.
pub(super) fn batch_rows(metadata: &ParquetMetaData, groups: &[usize]) -> usize {
    rows_of(BATCH_BYTES, metadata, groups)
}

/// As many rows as hold about so many bytes.
fn rows_of(bytes: i64, metadata: &ParquetMetaData, groups: &[usize]) -> usize {
    let row_bytes = groups.iter().map(|&group| {
        let group = metadata.row_group(group);
        group.total_byte_size() / group.num_rows().max(1)
    });
    let rows = bytes / row_bytes.max().unwrap_or(1).max(1);
    usize::try_from(rows).unwrap_or(BATCH_ROWS).clamp(1, BATCH_ROWS)
}

/// A row group of an open file.
pub(super) struct RowGroup<'a> {
    builder: &'a ParquetRecordBatchReaderBuilder<Stored>,
    index: usize,
    /// Bloom filters by column, read once. One that is not there, or cannot be read, rules nothing out.
    blooms: RefCell<HashMap<usize, Option<Sbbf>>>,
}

impl<'a> RowGroup<'a> {
    pub(super) fn new(builder: &'a ParquetRecordBatchReaderBuilder<Stored>, index: usize) -> Self {
        Self { builder, index, blooms: RefCell::default() }
    }

    fn leaf(&self, column: &str) -> Option<usize> {
        self.builder.parquet_schema().columns().iter().position(|leaf| leaf.path().string() == column)
    }
}

impl Group for RowGroup<'_> {
    fn range(&self, column: &str) -> Option<Range<'_>> {
        let group = self.builder.metadata().row_group(self.index);
        let statistics = group.column(self.leaf(column)?).statistics()?;
        let rows = u64::try_from(group.num_rows()).ok()?;
        let text = |bytes: Option<&'_ [u8]>| {
            let text = std::str::from_utf8(bytes?).ok()?;
            Some(Value::Text(text.to_owned().into()))
        };
        let (min, max) = match statistics {
            Statistics::ByteArray(range) => {
                // One that was cut short is no bound unless it was made larger, and then it may be no text.
                let max = range.max_bytes_opt().filter(|_| range.max_is_exact());
                (text(range.min_bytes_opt().filter(|_| range.min_is_exact())), text(max))
            }
            Statistics::Int64(range) => {
                let int = |value: Option<&i64>| value.map(|value| Value::Int((*value).into()));
                (int(range.min_opt()), int(range.max_opt()))
            }
            _ => (None, None),
        };
        Some(Range { min, max, nulls: statistics.null_count_opt(), rows })
    }

    fn may_contain(&self, column: &str, text: &str) -> bool {
        let Some(leaf) = self.leaf(column) else {
            return true;
        };
        let mut blooms = self.blooms.borrow_mut();
        let bloom = blooms.entry(leaf).or_insert_with(|| {
            self.builder.get_row_group_column_bloom_filter(self.index, leaf).ok().flatten()
        });
        bloom.as_ref().is_none_or(|bloom| bloom.check(text))
    }
}

/// Files, without their ending, whose calls are all in a merged one.
#[derive(Debug, Default)]
pub(super) struct Replaces {
    /// Those that it was made of.
    pub(super) sources: Vec<String>,
    /// Those that these had replaced. Files of older legos do not tell.
    earlier: Vec<String>,
}

impl Replaces {
    pub(super) fn all(&self) -> impl Iterator<Item = String> {
        self.sources.iter().chain(&self.earlier).cloned()
    }
}

/// What a file replaces. Nothing where that cannot be read: then it is no file of ours, or its calls cannot be read
/// either.
pub(super) fn replaces(file: &Stored) -> Replaces {
    let Ok(footer) = file.footer() else {
        return Replaces::default();
    };
    let names = |key: &str| -> Vec<String> {
        let names = key_value(footer.metadata(), key).unwrap_or_default();
        names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
    };
    Replaces { sources: names(columns::REPLACES_KEY), earlier: names(columns::REPLACED_KEY) }
}

/// A file of this machine.
pub(super) fn open(path: &Path) -> Result<Stored, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    Ok(Stored::here(file, &Tally::default(), &Footer::default()))
}

fn builder(file: &Stored) -> Result<ParquetRecordBatchReaderBuilder<Stored>, String> {
    let footer = file.footer().map_err(|error| error.to_string())?;
    Ok(ParquetRecordBatchReaderBuilder::new_with_metadata(file.clone(), footer))
}

/// A file's footer; the error says why there is none.
pub(super) fn metadata(path: &Path) -> Result<Arc<ParquetMetaData>, String> {
    let footer = open(path)?.footer().map_err(|error| error.to_string())?;
    Ok(Arc::clone(footer.metadata()))
}

/// Tells of each row of a file the id of its call, and that of the call whose rows of routing it goes on from; and
/// whether it has routing.
///
/// # Errors
/// Why the file cannot be read.
pub(super) fn bases(file: &Stored, tell: &mut dyn FnMut(&str, Option<&str>, bool)) -> Result<(), String> {
    let builder = builder(file)?;
    check_version(builder.metadata())?;
    let names = ["call_id", "routing_base_call_id", "routing_rows"];
    let mask = ProjectionMask::columns(builder.parquet_schema(), names);
    let groups: Vec<usize> = (0..builder.metadata().num_row_groups()).collect();
    file.expect(builder.metadata(), &groups, &mask, &[]);
    let batches = builder.with_projection(mask).build().map_err(|error| error.to_string())?;
    for batch in batches {
        let batch = batch.map_err(|error| error.to_string())?;
        let texts = |name: &str| batch.column_by_name(name)?.as_any().downcast_ref::<StringArray>().cloned();
        let ids = texts("call_id").ok_or("column call_id is no text")?;
        let (bases, rows) = (texts("routing_base_call_id"), batch.column_by_name("routing_rows"));
        for row in 0..batch.num_rows() {
            let base = bases.as_ref().filter(|bases| bases.is_valid(row)).map(|bases| bases.value(row));
            tell(ids.value(row), base, rows.is_some_and(|rows| rows.is_valid(row)));
        }
    }
    Ok(())
}

/// What a file's metadata has under a key.
pub(super) fn key_value<'a>(metadata: &'a ParquetMetaData, key: &str) -> Option<&'a str> {
    let pairs = metadata.file_metadata().key_value_metadata()?;
    pairs.iter().find(|pair| pair.key == key)?.value.as_deref()
}

/// Why a file is not one of ours, or cannot be read by this lego.
pub(super) fn check_version(metadata: &ParquetMetaData) -> Result<(), String> {
    let version = key_value(metadata, columns::VERSION_KEY).and_then(|version| version.parse::<u16>().ok());
    let version = version.ok_or_else(|| format!("it has no {} in its metadata", columns::VERSION_KEY))?;
    if version > SCHEMA_VERSION {
        return Err(format!("its schema {version} is newer than this lego's {SCHEMA_VERSION}"));
    }
    Ok(())
}
