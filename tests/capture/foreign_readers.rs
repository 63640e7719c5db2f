//! The Parquet files in other people's tools.

use lego::capture::{Writer, WriterOptions};
use lego::record::CallSink;

use crate::calls::{call, failed_call, routing};
use crate::python;

#[tokio::test]
async fn pandas_polars_duckdb_and_pyarrow_read_the_same_values() {
    let python = python::venv(&["duckdb", "polars", "pyarrow", "pandas", "pytz"]);
    let dir = tempfile::tempdir().expect("folder");
    // One file where every optional column is null, one where none is: the schemas must agree (F08).
    for calls in
        [vec![failed_call("nothing")], vec![call("a", &[1, 2, u32::MAX], &[3, 4]), call("b", &[5], &[])]]
    {
        let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
        writer.append(calls).await.expect("room");
        writer.close().await;
    }
    let mut null_inside = call("c", &[1], &[2, 3, 4]);
    null_inside.routing = Some(routing(1, 2, 254));
    null_inside.completion_logprobs = Some(vec![Some(-0.5), None, Some(-0.25)]);
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    writer.append(vec![null_inside]).await.expect("room");
    writer.close().await;
    let folder = dir.path().to_str().expect("text");
    let output = python::script(&python, "read_captures.py", &[folder]);
    assert_eq!(output.trim(), "pyarrow pandas polars duckdb");
}
