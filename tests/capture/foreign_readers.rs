//! The Parquet files in other people's tools.

use lego::capture::{Writer, WriterOptions};
use lego::record::{CallSink, Usage};

use crate::calls::{call, failed_call, routing};
use crate::python;

#[tokio::test]
async fn f07_f08_f13_f14_pandas_polars_duckdb_pyarrow_and_datasets_read_the_same_values() {
    let python = python::venv(&["duckdb", "polars", "pyarrow", "pandas", "pytz", "datasets"]);
    let dir = tempfile::tempdir().expect("folder");
    // One file where every optional column is null, one where none is: the schemas must agree (F08).
    let ids = [0, 255, 32_767, 65_536, 151_935, i32::MAX as u32 + 1, u32::MAX];
    let mut only_null = call("d", &ids, &[7]);
    only_null.completion_logprobs = Some(vec![None]);
    only_null.usage = only_null.usage.map(|usage| Usage { prompt_tokens: u64::MAX, ..usage });
    let full = vec![call("a", &[1, 2, u32::MAX], &[3, 4]), call("b", &[5], &[]), only_null];
    for calls in [vec![failed_call("nothing")], full] {
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
    // Wherever the reader is, and whatever the clocks there do, an instant is the same (F14).
    for zone in ["Asia/Kolkata", "America/Denver"] {
        let output = python::script(&python, "read_captures.py", &[folder, zone]);
        assert_eq!(output.trim(), "pyarrow pandas polars datasets duckdb", "{zone}");
    }
}
