//! The store's Arrow columns to DataFusion's. The two are of different versions of one library: DataFusion needs an older
//! one, and the store is not to be held back by a feature that few builds have. Arrow's IPC stream is the same in both.

use arrow::array::RecordBatch;
use arrow::datatypes::Schema;
use arrow::error::ArrowError;
use arrow::ipc::writer::StreamWriter;
use datafusion::arrow::array::{RecordBatch as Batch, RecordBatchOptions};
use datafusion::arrow::buffer::Buffer;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::arrow::ipc::reader::StreamDecoder;
use datafusion::error::{DataFusionError, Result};

/// The same columns.
pub(super) fn schema(of: &Schema) -> Result<SchemaRef> {
    let writer = StreamWriter::try_new(Vec::new(), of).map_err(not_written)?;
    let (_, decoder) = decode(writer.into_inner().map_err(not_written)?)?;
    decoder.schema().ok_or_else(|| DataFusionError::Internal("a stream without a schema".to_owned()))
}

/// The same rows.
pub(super) fn batch(of: &RecordBatch) -> Result<Batch> {
    if of.num_columns() == 0 {
        let rows = RecordBatchOptions::new().with_row_count(Some(of.num_rows()));
        return Ok(Batch::try_new_with_options(schema(of.schema_ref())?, vec![], &rows)?);
    }
    let mut writer = StreamWriter::try_new(Vec::new(), of.schema_ref()).map_err(not_written)?;
    writer.write(of).map_err(not_written)?;
    let (batch, _) = decode(writer.into_inner().map_err(not_written)?)?;
    batch.ok_or_else(|| DataFusionError::Internal("a stream without a batch".to_owned()))
}

/// The batch of a stream with one at most. Its buffers are parts of `stream`: nothing is copied again.
fn decode(stream: Vec<u8>) -> Result<(Option<Batch>, StreamDecoder)> {
    let (mut stream, mut decoder) = (Buffer::from_vec(stream), StreamDecoder::new());
    let batch = decoder.decode(&mut stream)?;
    Ok((batch, decoder))
}

fn not_written(error: ArrowError) -> DataFusionError {
    DataFusionError::External(error.into())
}
