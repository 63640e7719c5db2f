//! Failures of stores that people have reported, each as a test named by its case (group F).
//!
//! F02 is a test of the room itself (`src/capture/compact/tests.rs`), since it takes a disk that fails; F07, F08, F13 and
//! F14 are in `foreign_readers`.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lego::capture::{Durability, Query, Reader, Writer, WriterOptions};
use lego::record::{Call, CallSink, JsonText, SCHEMA_VERSION, SinkError};
use metrics_exporter_prometheus::PrometheusBuilder;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};

use crate::calls::{as_json, call, failed_call, routing};
use crate::store::read;

const MIB: usize = 1 << 20;

/// All Parquet files of a store.
fn parquet_files(dir: &Path) -> Vec<PathBuf> {
    let days = fs::read_dir(dir).expect("a folder").map(|entry| entry.expect("an entry").path());
    let days = days.filter(|path| path.is_dir());
    let files = days.flat_map(|day| fs::read_dir(day).expect("a folder"));
    let mut files: Vec<PathBuf> = files.map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "parquet"));
    files.sort();
    files
}

fn footer(file: &Path) -> ParquetMetaData {
    let opened = File::open(file).expect("readable");
    ParquetMetaDataReader::new().parse_and_finish(&opened).expect("a footer")
}

/// A body of this many bytes that does not compress to nothing.
fn body(bytes: usize, seed: u64) -> Option<JsonText> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let text = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        char::from(b'a' + (state % 26) as u8)
    });
    let text: String = text.take(bytes - 4).collect();
    JsonText::new(format!("[\"{text}\"]")).ok()
}

#[test]
fn f01_a_crash_leaves_no_file_without_a_footer_and_broken_leftovers_are_set_aside() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut child = Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", "crash::writer_process", "--nocapture", "--test-threads=1"])
        .env(crate::crash::DIR, dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .expect("own binary starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut acked = 0;
    while acked < 100 || parquet_files(dir.path()).is_empty() {
        let line = lines.next().expect("it runs until it is killed").expect("text");
        acked += usize::from(line.contains("acked "));
    }
    child.kill().expect("SIGKILL");
    child.wait().expect("ended");
    let files = parquet_files(dir.path());
    files.iter().for_each(|file| assert!(footer(file).file_metadata().num_rows() > 0));
    let journal = dir.path().join("journal");
    let names = fs::read_dir(&journal).expect("a folder").map(|entry| entry.expect("an entry").file_name());
    let names: Vec<String> = names.map(|name| name.into_string().expect("text")).collect();
    assert!(names.iter().all(|name| name.ends_with(".journal") || name.ends_with(".tmp")), "{names:?}");
    assert!(read(dir.path(), Query::default()).len() >= 100);

    // What is no segment is kept for a person to see, and counted.
    let broken = journal.join("00000099-0011223344556677.journal");
    fs::write(&broken, "what a broken disk left of a segment").expect("written");
    let recorder = PrometheusBuilder::new().build_recorder();
    let writer = metrics::with_local_recorder(&recorder, || {
        Writer::open(dir.path(), WriterOptions::default()).expect("the lock of the dead is free")
    });
    assert_eq!(writer.recovery().quarantined, [broken.with_extension("damaged")]);
    let page = recorder.handle().render();
    assert!(page.contains("lego_capture_damaged_bytes_total 36"), "{page}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    assert_eq!(runtime.block_on(writer.close()).left_in_journal, [] as [String; 0]);
    let mut reader = Reader::open(dir.path(), Query::default()).expect("readable");
    assert!(reader.by_ref().inspect(|call| assert!(call.is_ok(), "{call:?}")).count() >= 100);
    assert_eq!(reader.skipped().len(), 1, "{:?}", reader.skipped());
}

/// A folder whose journal a dead writer left, with so many calls of 1 MiB.
async fn left_by_the_dead(calls: u64) -> tempfile::TempDir {
    let (live, dead) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let options =
        WriterOptions { durability: Durability::None, segment_bytes: u64::MAX, ..WriterOptions::default() };
    let writer = Writer::open(live.path(), options).expect("a free folder");
    for number in 0..calls {
        let mut one = call(&format!("s{}", number % 5), &[1, 2], &[3]);
        one.client_request = body(MIB, number + 1);
        writer.append(vec![one]).await.expect("room");
    }
    let journal = dead.path().join("journal");
    fs::create_dir(&journal).expect("a folder");
    for entry in fs::read_dir(live.path().join("journal")).expect("a folder") {
        let from = entry.expect("an entry").path();
        fs::hard_link(&from, journal.join(from.file_name().expect("a name"))).expect("linked");
    }
    // Its own compaction would cost as much again.
    std::mem::forget(writer);
    fs::remove_dir_all(live.keep()).expect("removed");
    dead
}

#[tokio::test]
async fn f04_f11_rows_of_a_mebibyte_become_bounded_row_groups_in_bounded_memory() {
    let rows = if std::env::var_os("LEGO_TEST_FULL").is_some() { 2100 } else { 300 };
    let dir = left_by_the_dead(rows).await;
    let mut child = Command::new(env!("CARGO_BIN_EXE_lego"))
        .args(["capture", "compact"])
        .arg(dir.path())
        .stdout(Stdio::null())
        .spawn()
        .expect("lego runs");
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0_u64;
    let ended = loop {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
        peak = peak.max(line.map_or(0, |kib| kib.trim().parse().expect("a number")));
        if let Some(ended) = child.try_wait().expect("a child") {
            break ended;
        }
        std::thread::yield_now();
    };
    assert!(ended.success(), "{ended}");
    assert!(peak > 0 && peak < 300 << 10, "a peak of {peak} KiB for {rows} MiB");
    let mut found = 0;
    for file in parquet_files(dir.path()) {
        let footer = footer(&file);
        assert!(footer.num_row_groups() > 1, "{file:?}");
        for group in footer.row_groups() {
            found += group.num_rows() as u64;
            let bytes = group.total_byte_size();
            // No array of a group comes near to the 2^31 bytes of its offsets.
            assert!(bytes < 80 << 20, "{bytes} bytes in a row group");
        }
    }
    assert_eq!(found, rows);
}

#[tokio::test]
async fn f06_the_footer_holds_nothing_of_the_bodies() {
    let dir = tempfile::tempdir().expect("a folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("a free folder");
    const MARKER: &str = "marker-in-the-middle";
    for number in 0..100 {
        let mut one = call("s", &[1], &[2]);
        let half = body(MIB / 2, number + 1).expect("JSON").get().replace(['[', ']', '"'], "");
        let text = format!("[\"é{half}{MARKER}{half}\"]");
        one.client_request = JsonText::new(text.as_str()).ok();
        one.response = one.client_request.clone();
        one.text = Some(text);
        writer.append(vec![one]).await.expect("room");
    }
    writer.close().await;
    for file in parquet_files(dir.path()) {
        let bytes = fs::read(&file).expect("readable");
        let length = u32::from_le_bytes(bytes[bytes.len() - 8..][..4].try_into().expect("four")) as usize;
        assert!(length < 64 << 10, "a footer of {length} bytes");
        let footer_bytes = &bytes[bytes.len() - 8 - length..];
        let says = |text: &str| footer_bytes.windows(text.len()).any(|window| window == text.as_bytes());
        assert!(!says(MARKER) && says("session_id"));
        for group in footer(&file).row_groups() {
            for column in group.columns() {
                let name = column.column_path().string();
                let is_body = ["client_request", "upstream_request", "response", "text"].contains(&&*name);
                assert!(!is_body || column.statistics().is_none(), "{name} has statistics");
                for bound in
                    column.statistics().into_iter().flat_map(|s| [s.min_bytes_opt(), s.max_bytes_opt()])
                {
                    assert!(bound.is_none_or(|bound| bound.len() <= 64), "{name}");
                }
            }
        }
    }
}

/// What the stores of released versions hold.
fn released() -> Vec<Call> {
    let mut calls = vec![call("a", &[1, 2, u32::MAX], &[3, 4]), failed_call("b"), call("a", &[5], &[])];
    calls[0].routing = Some(routing(0, 4, 0));
    calls[2].completion_logprobs = Some(vec![]);
    for (number, call) in calls.iter_mut().enumerate() {
        call.call_id = format!("01a22d7c-0f5f-76dd-af34-0c2dea2d11f{number}").parse().expect("an id");
    }
    calls
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/captures")
}

/// Writes what this version's store holds to the fixtures: `LEGO_WRITE_FIXTURES=1 cargo test --test capture f09`, once
/// for each version of the schema, when it is released.
async fn write_fixtures() {
    let dir = tempfile::tempdir().expect("a folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("a free folder");
    writer.append(released()).await.expect("room");
    let journal = fs::read_dir(dir.path().join("journal")).expect("a folder").next();
    let to = |ending: &str| fixtures().join(format!("schema-{SCHEMA_VERSION}.{ending}"));
    fs::copy(journal.expect("one").expect("an entry").path(), to("journal")).expect("copied");
    writer.close().await;
    fs::copy(&parquet_files(dir.path())[0], to("parquet")).expect("copied");
}

#[tokio::test]
async fn f09_stores_of_every_released_schema_are_read_together_with_todays() {
    if std::env::var_os("LEGO_WRITE_FIXTURES").is_some() {
        write_fixtures().await;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("a free folder");
    writer.append(vec![call("today", &[1], &[2])]).await.expect("room");
    writer.close().await;
    let day = dir.path().join("date=2026-11-29");
    for version in 1..SCHEMA_VERSION.max(2) {
        let at = |ending: &str| fixtures().join(format!("schema-{version}.{ending}"));
        let wanted: Vec<String> = released().iter().map(as_json).collect();
        // As Parquet, and as a segment of the journal that the next writer finds.
        let old = tempfile::tempdir().expect("a folder");
        fs::create_dir(old.path().join("journal")).expect("a folder");
        let segment = "journal/00000001-0011223344556677.journal";
        fs::copy(at("journal"), old.path().join(segment)).expect("a fixture of each version");
        fs::copy(at("parquet"), day.join(format!("calls-0000009{version}-0011223344556677.parquet")))
            .expect("a fixture of each version");
        let query = || Query::session("a".parse().expect("an id"));
        for (dir, query) in [(old.path(), Query::default()), (dir.path(), query())] {
            let read: Vec<String> = read(dir, query).iter().map(|call| told(call, version)).collect();
            let wanted: Vec<&String> = wanted
                .iter()
                .filter(|call| dir == old.path() || call.contains(r#""session_id":"a""#))
                .collect();
            assert_eq!(read.iter().collect::<Vec<_>>(), wanted, "schema {version}");
        }
    }
    let python = crate::python::venv(&["duckdb"]);
    let folder = dir.path().to_str().expect("text");
    let versions = (SCHEMA_VERSION.max(2) - 1).to_string();
    let output = crate::python::script(&python, "read_versions.py", &[folder, &versions]);
    assert_eq!(output.trim(), "read");
}

/// A call as it was made, whatever version its store says.
fn told(call: &Call, version: u16) -> String {
    assert_eq!(call.schema_version, version);
    as_json(&Call { schema_version: SCHEMA_VERSION, ..call.clone() })
}

#[tokio::test]
async fn f11_a_cell_that_no_store_takes_is_refused_with_its_call() {
    let dir = tempfile::tempdir().expect("a folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("a free folder");
    let mut large = call("s", &[1], &[2]);
    let text = format!("\"{}\"", "x".repeat((1 << 30) + 1));
    large.response = JsonText::new(text).ok();
    let id = large.call_id.to_string();
    let refused = writer.append(vec![large]).await.expect_err("too long");
    assert!(matches!(&refused, SinkError::Refused { call_id, .. } if *call_id == id), "{refused}");
    writer.append(vec![call("s", &[1], &[2])]).await.expect("the store goes on");
    writer.close().await;
    assert_eq!(read(dir.path(), Query::default()).len(), 1);
}

#[tokio::test]
async fn f17_what_is_no_capture_is_left_out_by_name_and_nothing_counts_twice() {
    let dir = tempfile::tempdir().expect("a folder");
    for _ in 0..3 {
        let writer = Writer::open(dir.path(), WriterOptions::default()).expect("a free folder");
        writer.append(vec![call("a", &[1], &[2])]).await.expect("room");
        writer.close().await;
    }
    let day = dir.path().join("date=2026-11-29");
    fs::write(day.join("empty.parquet"), b"").expect("written");
    fs::write(day.join("half.parquet"), b"PAR1 and no footer").expect("written");
    fs::write(day.join("calls.parquet.tmp"), b"x").expect("written");
    let schema = parquet::schema::parser::parse_message_type("message m { required int32 call_id; }");
    let foreign = File::create(day.join("foreign.parquet")).expect("made");
    let foreign = parquet::file::writer::SerializedFileWriter::new(
        foreign,
        schema.expect("a schema").into(),
        std::sync::Arc::default(),
    );
    foreign.expect("a writer").close().expect("closed");
    let mut reader = Reader::open(dir.path(), Query::default()).expect("readable");
    let gone =
        parquet_files(dir.path()).into_iter().find(|path| path.to_string_lossy().contains("calls-00000003"));
    // Between the list and the look.
    fs::remove_file(gone.expect("the third")).expect("removed");
    assert_eq!(reader.by_ref().inspect(|call| assert!(call.is_ok(), "{call:?}")).count(), 2);
    let skipped = reader.skipped();
    assert_eq!(skipped.len(), 4, "{skipped:?}");
    for (name, why) in [
        ("calls-00000003", "No such file"),
        ("empty.parquet", ""),
        ("foreign.parquet", "no lego.schema_version"),
        ("half.parquet", ""),
    ] {
        assert!(skipped.iter().any(|one| one.contains(name) && one.contains(why)), "{name} in {skipped:?}");
    }
    // Merged, every row is there once.
    let compacted =
        Command::new(env!("CARGO_BIN_EXE_lego")).args(["capture", "compact"]).arg(dir.path()).output();
    assert!(compacted.expect("lego runs").status.success());
    let mut reader = Reader::open(dir.path(), Query::default()).expect("readable");
    assert_eq!(reader.by_ref().inspect(|call| assert!(call.is_ok(), "{call:?}")).count(), 2);
}
