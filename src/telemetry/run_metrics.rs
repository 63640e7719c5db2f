//! `metrics.parquet` and its TensorBoard curves: one row a step.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Float64Array, Int64Array, RecordBatch};
use arrow::compute::concat_batches;
use arrow::datatypes::{DataType, Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use super::catalog::{COLUMNS, Column, Kind};
use super::{TelemetryError, TensorBoard};

/// A value of a metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MetricValue {
    Float(f64),
    Integer(i64),
}

impl From<f64> for MetricValue {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl From<f32> for MetricValue {
    fn from(value: f32) -> Self {
        Self::Float(value.into())
    }
}

impl From<i64> for MetricValue {
    fn from(value: i64) -> Self {
        Self::Integer(value)
    }
}

impl From<u64> for MetricValue {
    fn from(value: u64) -> Self {
        Self::Integer(i64::try_from(value).unwrap_or(i64::MAX))
    }
}

impl From<usize> for MetricValue {
    fn from(value: usize) -> Self {
        (value as u64).into()
    }
}

impl MetricValue {
    fn as_f64(self) -> f64 {
        match self {
            Self::Float(value) => value,
            Self::Integer(value) => value as f64,
        }
    }
}

/// A step and a value for each of [`COLUMNS`].
type Row = (u64, Vec<Option<MetricValue>>);

/// The metrics of a run.
#[derive(Debug)]
pub struct RunMetrics {
    path: PathBuf,
    rows: Vec<Row>,
    board: TensorBoard,
}

impl RunMetrics {
    /// Opens `metrics.parquet` and a new TensorBoard file under `tensorboard/` in a run folder. With
    /// `resumed_at`, the rows up to that step stay and later ones go; without, there must be none.
    ///
    /// # Errors
    /// [`TelemetryError::Io`]; [`TelemetryError::Broken`] for a file that this run did not write.
    pub fn open(folder: &Path, resumed_at: Option<u64>) -> Result<Self, TelemetryError> {
        let path = folder.join("metrics.parquet");
        let mut rows = Vec::new();
        if path.exists() {
            let broken = |cause: String| TelemetryError::Broken { path: path.clone(), cause };
            let Some(last) = resumed_at else {
                return Err(broken("it is there before the run's first step".to_owned()));
            };
            rows = read_rows(&path)?;
            rows.retain(|(step, _)| *step <= last);
        }
        let board = TensorBoard::create(&folder.join("tensorboard"), resumed_at.map(|step| step + 1))?;
        let metrics = Self { path, rows, board };
        metrics.save()?;
        Ok(metrics)
    }

    /// Adds the row of a step: later than all before. A metric that is not named is null. When this returns,
    /// both files have it.
    ///
    /// # Errors
    /// [`TelemetryError::UnknownMetric`], [`TelemetryError::StepOrder`] or [`TelemetryError::Io`]; a failed
    /// write leaves the file as it was.
    pub fn push(&mut self, step: u64, values: &[(&str, MetricValue)]) -> Result<(), TelemetryError> {
        if let Some((last, _)) = self.rows.last()
            && *last >= step
        {
            return Err(TelemetryError::StepOrder { step, last: *last });
        }
        let mut row = vec![None; COLUMNS.len()];
        let points = fill(&mut row, values)?;
        self.rows.push((step, row));
        if let Err(error) = self.save() {
            self.rows.pop();
            return Err(error);
        }
        self.board.write(step, &points)
    }

    /// Adds values to the row of a step, where it has none yet. Nothing happens if the step has no row, as in a
    /// resumed run whose file was moved away.
    ///
    /// # Errors
    /// As [`RunMetrics::push`].
    pub fn amend(&mut self, step: u64, values: &[(&str, MetricValue)]) -> Result<(), TelemetryError> {
        let Some(index) = self.rows.iter().position(|(other, _)| *other == step) else {
            return Ok(());
        };
        let mut row = self.rows[index].1.clone();
        let points = fill(&mut row, values)?;
        if points.is_empty() {
            return Ok(());
        }
        std::mem::swap(&mut self.rows[index].1, &mut row);
        if let Err(error) = self.save() {
            self.rows[index].1 = row;
            return Err(error);
        }
        self.board.write(step, &points)
    }

    /// Steps that have a row.
    #[must_use]
    pub fn steps(&self) -> Vec<u64> {
        self.rows.iter().map(|(step, _)| *step).collect()
    }

    fn save(&self) -> Result<(), TelemetryError> {
        let temporary = self.path.with_extension("parquet.tmp");
        let broken = |error: &dyn std::fmt::Display| TelemetryError::Io {
            path: self.path.clone(),
            source: std::io::Error::other(error.to_string()),
        };
        let batch = self.batch().map_err(|error| broken(&error))?;
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_created_by("lego".to_owned())
            .build();
        let file = File::create(&temporary).map_err(TelemetryError::io(&temporary))?;
        let mut writer =
            ArrowWriter::try_new(file, batch.schema(), Some(properties)).map_err(|error| broken(&error))?;
        writer.write(&batch).map_err(|error| broken(&error))?;
        let file = writer.into_inner().map_err(|error| broken(&error))?;
        file.sync_all().map_err(TelemetryError::io(&temporary))?;
        fs::rename(&temporary, &self.path).map_err(TelemetryError::io(&self.path))?;
        let folder = self.path.parent().unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(TelemetryError::io(folder))
    }

    fn batch(&self) -> Result<RecordBatch, arrow::error::ArrowError> {
        let steps: Int64Array = self.rows.iter().map(|(step, _)| i64::try_from(*step).ok()).collect();
        let mut arrays: Vec<ArrayRef> = vec![Arc::new(steps)];
        for (index, column) in COLUMNS.iter().enumerate() {
            let values = self.rows.iter().map(|(_, row)| row[index]);
            arrays.push(if column.kind == Kind::Integer {
                Arc::new(
                    values
                        .map(|value| {
                            value.map(|value| match value {
                                MetricValue::Integer(value) => value,
                                MetricValue::Float(value) => value as i64,
                            })
                        })
                        .collect::<Int64Array>(),
                )
            } else {
                Arc::new(values.map(|value| value.map(MetricValue::as_f64)).collect::<Float64Array>())
            });
        }
        RecordBatch::try_new(schema(), arrays)
    }
}

/// Puts values where `row` has none, and gives the curves' new points.
fn fill(
    row: &mut [Option<MetricValue>],
    values: &[(&str, MetricValue)],
) -> Result<Vec<(String, f32)>, TelemetryError> {
    let mut points = Vec::with_capacity(values.len());
    for &(name, value) in values {
        let index = COLUMNS
            .iter()
            .position(|column| column.name == name)
            .ok_or_else(|| TelemetryError::UnknownMetric(name.to_owned()))?;
        if row[index].is_none() {
            row[index] = Some(value);
            points.push((COLUMNS[index].tag(), value.as_f64() as f32));
        }
    }
    Ok(points)
}

fn schema() -> Arc<Schema> {
    let data_type = |column: &Column| match column.kind {
        Kind::Integer => DataType::Int64,
        _ => DataType::Float64,
    };
    let step = Field::new("step", DataType::Int64, false);
    let columns = COLUMNS.iter().map(|column| Field::new(column.name, data_type(column), true));
    Arc::new(Schema::new(std::iter::once(step).chain(columns).collect::<Vec<_>>()))
}

fn read_batch(path: &Path) -> Result<RecordBatch, TelemetryError> {
    let broken = |error: &dyn std::fmt::Display| TelemetryError::Broken {
        path: path.to_owned(),
        cause: error.to_string(),
    };
    let file = File::open(path).map_err(TelemetryError::io(path))?;
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| broken(&error))?;
    let schema = builder.schema().clone();
    let batches: Vec<_> = builder
        .build()
        .and_then(|reader| Ok(reader.collect::<Result<_, _>>()?))
        .map_err(|error| broken(&error))?;
    concat_batches(&schema, &batches).map_err(|error| broken(&error))
}

/// Rows of a file whose columns may be fewer than today's.
fn read_rows(path: &Path) -> Result<Vec<Row>, TelemetryError> {
    let batch = read_batch(path)?;
    let broken = |cause: &str| TelemetryError::Broken { path: path.to_owned(), cause: cause.to_owned() };
    let steps = batch.column_by_name("step").ok_or_else(|| broken("it has no column step"))?;
    let steps = values(steps.as_ref()).ok_or_else(|| broken("its column step holds no numbers"))?;
    let mut rows = Vec::with_capacity(steps.len());
    for step in steps {
        let Some(MetricValue::Integer(step)) = step else {
            return Err(broken("a row has no step"));
        };
        let step = u64::try_from(step).map_err(|_| broken("a step is negative"))?;
        rows.push((step, vec![None; COLUMNS.len()]));
    }
    for (index, column) in COLUMNS.iter().enumerate() {
        let Some(array) = batch.column_by_name(column.name) else {
            continue;
        };
        let array = values(array.as_ref()).ok_or_else(|| broken("a column holds no numbers"))?;
        for ((_, row), value) in rows.iter_mut().zip(array) {
            row[index] = value;
        }
    }
    Ok(rows)
}

fn values(array: &dyn Array) -> Option<Vec<Option<MetricValue>>> {
    let any = array.as_any();
    if let Some(array) = any.downcast_ref::<Float64Array>() {
        return Some(array.iter().map(|value| value.map(MetricValue::Float)).collect());
    }
    let array = any.downcast_ref::<Int64Array>()?;
    Some(array.iter().map(|value| value.map(MetricValue::Integer)).collect())
}

/// One column of a `metrics.parquet`; null where a step has no value.
///
/// # Errors
/// [`TelemetryError::Broken`] when the file has no such column.
pub fn read_column(path: &Path, name: &str) -> Result<Vec<Option<MetricValue>>, TelemetryError> {
    let batch = read_batch(path)?;
    batch.column_by_name(name).and_then(|array| values(array.as_ref())).ok_or_else(|| {
        TelemetryError::Broken { path: path.to_owned(), cause: format!("it has no column {name}") }
    })
}
