//! Rows of expert routing whose bases are damaged.

use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use lego::capture::{CaptureError, Query, Reader, Writer, WriterOptions};
use lego::record::{Call, CallSink, ChoiceId};

use crate::calls::{call, routing};

/// Three calls of a session: the second has rows of the first one, the third has its own only.
fn calls() -> Vec<Call> {
    let mut calls = vec![call("a", &[1], &[2]), call("a", &[1], &[2]), call("a", &[1], &[2])];
    let base = ChoiceId { call_id: calls[0].call_id, choice_index: 0 };
    calls[0].routing = Some(routing(0, 3, 0));
    calls[1].routing = Some(routing(0, 6, 0).without_first(3, base));
    calls[2].routing = Some(routing(0, 2, 0));
    calls
}

async fn write(dir: &Path, calls: &[Call]) -> Writer {
    let writer = Writer::open(dir, WriterOptions::default()).expect("free folder");
    for call in calls {
        writer.append(vec![call.clone()]).await.expect("room");
    }
    writer
}

/// What comes of the last two calls.
fn is_told(read: &[Call], calls: &[Call]) {
    let [second, third] = read else { panic!("{} calls", read.len()) };
    assert_eq!((second.call_id, third.call_id), (calls[1].call_id, calls[2].call_id));
    assert_eq!((second.routing.as_ref(), second.trainable), (None, false));
    assert_eq!(second.not_trainable_reasons, ["routing_base_missing"]);
    assert_eq!((third.routing.as_ref(), third.trainable), (calls[2].routing.as_ref(), true));
}

#[tokio::test]
async fn a_base_that_was_damaged_in_the_journal_costs_its_own_rows() {
    let dir = tempfile::tempdir().expect("folder");
    let calls = calls();
    let writer = write(dir.path(), &calls).await;
    let segment = fs::read_dir(dir.path().join("journal")).expect("folder").find_map(|entry| {
        let path = entry.expect("an entry").path();
        path.extension().is_some_and(|kind| kind != "lock").then_some(path)
    });
    let segment = segment.expect("a segment");
    let mut file = fs::OpenOptions::new().write(true).open(&segment).expect("a file");
    file.seek(SeekFrom::Start(60)).expect("within the first frame");
    file.write_all(b"damage").expect("written");
    for query in [Query::default(), Query::session("a".parse().expect("id"))] {
        let mut reader = Reader::open(dir.path(), query).expect("readable");
        let read: Vec<Call> = reader.by_ref().collect::<Result<_, _>>().expect("no error");
        is_told(&read, &calls);
        assert!(reader.damaged_bytes() > 0);
    }
    drop(file);
    drop(writer);
}

/// The Parquet file of a folder that has one.
fn parquet_file(dir: &Path) -> PathBuf {
    let day = fs::read_dir(dir).expect("folder").find_map(|entry| {
        let path = entry.expect("an entry").path();
        path.file_name()?.to_str()?.starts_with("date=").then_some(path)
    });
    fs::read_dir(day.expect("a day")).expect("folder").next().expect("a file").expect("an entry").path()
}

#[tokio::test]
async fn a_file_that_cannot_be_opened_is_an_error_and_no_call_is_said_to_lack_anything() {
    let dir = tempfile::tempdir().expect("folder");
    let calls = calls();
    write(dir.path(), &calls[..1]).await.close().await;
    let file = parquet_file(dir.path());
    write(dir.path(), &calls[1..]).await.close().await;
    let whole = fs::read(&file).expect("readable");
    // What needs no privilege to take away: a name that leads to itself.
    fs::remove_file(&file).expect("removed");
    std::os::unix::fs::symlink(&file, &file).expect("a link");
    let of_session = Query::session(calls[1].session_id.clone());
    for query in [Query::default(), of_session, Query { call_id: Some(calls[2].call_id), ..Query::default() }]
    {
        let mut reader = Reader::open(dir.path(), query).expect("a folder");
        let failed = reader.by_ref().find_map(Result::err).expect("an error");
        assert!(matches!(&failed, CaptureError::Io { .. }), "{failed:?}");
        assert!(failed.to_string().contains(file.to_str().expect("text")), "{failed}");
        // Whoever reads on all the same gets no call that lacks what the file has.
        let on: Vec<_> = reader.by_ref().collect();
        let mut whole = on.iter().flatten();
        assert!(whole.all(|call| call.trainable && call.call_id == calls[2].call_id), "{on:?}");
        assert_eq!(reader.skipped(), [] as [String; 0]);
    }
    fs::remove_file(&file).expect("removed");
    fs::write(&file, whole).expect("written");
    let read: Vec<Call> = Reader::open(dir.path(), Query::default())
        .expect("readable")
        .collect::<Result<_, _>>()
        .expect("whole");
    assert!(read.iter().all(|call| call.not_trainable_reasons.is_empty()), "{read:?}");
}

#[tokio::test]
async fn a_base_whose_file_cannot_be_read_ends_nobody_elses_read() {
    let dir = tempfile::tempdir().expect("folder");
    let calls = calls();
    write(dir.path(), &calls[..1]).await.close().await;
    let file = parquet_file(dir.path());
    let mut bytes = fs::read(&file).expect("readable");
    let footer = u32::from_le_bytes(bytes[bytes.len() - 8..][..4].try_into().expect("four")) as usize;
    let pages = bytes.len() - 8 - footer;
    bytes[4..pages].fill(0xff);
    fs::write(&file, &bytes).expect("written");
    write(dir.path(), &calls[1..]).await.close().await;
    // The file's own error is told once; what lies elsewhere is read.
    let items: Vec<_> = Reader::open(dir.path(), Query::default()).expect("readable").collect();
    let read: Vec<Call> = items.iter().flatten().cloned().collect();
    is_told(&read, &calls);
    assert_eq!(items.len() - read.len(), 1, "{items:?}");
    for (call, rows) in [(&calls[1], None), (&calls[2], Some(2))] {
        let query = Query { call_id: Some(call.call_id), ..Query::default() };
        let read: Vec<_> =
            Reader::open(dir.path(), query).expect("readable").filter_map(Result::ok).collect();
        assert_eq!(read.len(), 1);
        assert_eq!(read[0].routing.as_ref().map(|routing| routing.shape().rows), rows);
    }
}
