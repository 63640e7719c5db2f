//! The calls of one Parquet file. Row groups that cannot hold what is asked for are not read.

use std::collections::VecDeque;
use std::fs::File;
use std::path::{Path, PathBuf};

use arrow::array::{BooleanArray, StringArray};
use arrow::error::ArrowError;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowPredicate, ArrowPredicateFn, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder, RowFilter,
};
use parquet::file::statistics::Statistics;

use super::error::CaptureError;
use super::reader::Query;
use super::{columns, decode};
use crate::record::{Call, SCHEMA_VERSION};

/// Most rows decoded at a time.
const BATCH_ROWS: usize = 64;
/// Rows decoded at a time hold about this much: bodies and routing can be tens of MB a row, and an Arrow column
/// holds 2 GiB at most.
const BATCH_BYTES: i64 = 128 << 20;

pub(super) struct ParquetCalls {
    path: PathBuf,
    batches: Option<ParquetRecordBatchReader>,
    ready: VecDeque<Call>,
}

impl ParquetCalls {
    /// Opens a file; the error says why it is not one of ours.
    pub(super) fn open(path: &Path, query: &Query) -> Result<Self, String> {
        let file = File::open(path).map_err(|error| error.to_string())?;
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| error.to_string())?;
        let metadata = builder.metadata().file_metadata().key_value_metadata();
        let version = metadata
            .and_then(|pairs| pairs.iter().find(|pair| pair.key == columns::VERSION_KEY))
            .and_then(|pair| pair.value.as_deref()?.parse::<u16>().ok())
            .ok_or_else(|| format!("it has no {} in its metadata", columns::VERSION_KEY))?;
        if version > SCHEMA_VERSION {
            return Err(format!("its schema {version} is newer than this lego's {SCHEMA_VERSION}"));
        }
        let batches = plan(builder, query).map_err(|error| error.to_string())?;
        Ok(Self { path: path.to_owned(), batches: Some(batches), ready: VecDeque::new() })
    }

    fn refill(&mut self) -> Result<bool, CaptureError> {
        while self.ready.is_empty() {
            let Some(batch) = self.batches.as_mut().and_then(Iterator::next) else {
                return Ok(false);
            };
            let corrupt = |reason: String| CaptureError::corrupt(&self.path, reason);
            let batch = batch.map_err(|error| corrupt(error.to_string()))?;
            self.ready = decode::calls(&batch).map_err(corrupt)?.into();
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

fn plan(
    builder: ParquetRecordBatchReaderBuilder<File>,
    query: &Query,
) -> parquet::errors::Result<ParquetRecordBatchReader> {
    let wanted = [
        ("session_id", query.session_id.as_ref().map(ToString::to_string)),
        ("trial_id", query.trial_id.as_ref().map(ToString::to_string)),
        ("call_id", query.call_id.map(|id| id.to_string())),
    ];
    let wanted = wanted.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let wanted: Vec<(&'static str, String)> = wanted.collect();
    let mut groups = vec![];
    for group in 0..builder.metadata().num_row_groups() {
        if may_hold(&builder, group, &wanted)? {
            groups.push(group);
        }
    }
    let schema = builder.parquet_schema();
    let leaves = schema.columns().iter().enumerate().filter(|(_, column)| {
        let name = column.path().parts().first().map_or("", String::as_str);
        let is_body = query.without_bodies && columns::BODIES.contains(&name);
        let is_routing = query.without_routing && name == columns::ROUTING;
        !is_body && !is_routing
    });
    let mask = ProjectionMask::leaves(schema, leaves.map(|(leaf, _)| leaf));
    let predicates = wanted.into_iter().map(|(name, value)| {
        let only = ProjectionMask::columns(schema, [name]);
        let predicate = ArrowPredicateFn::new(only, move |batch| {
            let column = batch.column(0).as_any().downcast_ref::<StringArray>();
            let column = column.ok_or_else(|| ArrowError::SchemaError(format!("{name} is no text")))?;
            Ok(BooleanArray::from_iter(column.iter().map(|v| Some(v == Some(value.as_str())))))
        });
        Box::new(predicate) as Box<dyn ArrowPredicate>
    });
    let filter = RowFilter::new(predicates.collect());
    let row_bytes = groups.iter().map(|&group| {
        let group = builder.metadata().row_group(group);
        group.total_byte_size() / group.num_rows().max(1)
    });
    let rows = BATCH_BYTES / row_bytes.max().unwrap_or(1).max(1);
    let rows = usize::try_from(rows).unwrap_or(BATCH_ROWS).clamp(1, BATCH_ROWS);
    let builder = builder.with_batch_size(rows).with_row_groups(groups);
    builder.with_projection(mask).with_row_filter(filter).build()
}

/// Whether statistics and Bloom filters leave it open that the row group has a row with these values.
fn may_hold(
    builder: &ParquetRecordBatchReaderBuilder<File>,
    group: usize,
    wanted: &[(&str, String)],
) -> parquet::errors::Result<bool> {
    for (name, value) in wanted {
        let columns = builder.parquet_schema().columns();
        let Some(leaf) = columns.iter().position(|c| c.path().string() == *name) else {
            continue;
        };
        let chunk = builder.metadata().row_group(group).column(leaf);
        if let Some(Statistics::ByteArray(range)) = chunk.statistics() {
            let value = value.as_bytes();
            let is_below = range.min_bytes_opt().is_some_and(|min| value < min);
            let is_above = range.max_is_exact() && range.max_bytes_opt().is_some_and(|max| value > max);
            if is_below || is_above {
                return Ok(false);
            }
        }
        if let Some(bloom) = builder.get_row_group_column_bloom_filter(group, leaf)?
            && !bloom.check(value.as_str())
        {
            return Ok(false);
        }
    }
    Ok(true)
}
