//! Crash points: after each step of a merge every call is there once, and the next compaction ends it.

use super::*;
use crate::capture::{Reader, Writer, WriterOptions};
use crate::record::{CallSink as _, example};

const DATE: &str = "1970-01-01";

async fn store(dir: &Path) -> Vec<String> {
    for file in 0..4 {
        let writer = Writer::open(dir, WriterOptions::default()).expect("free folder");
        for number in 0..5 {
            let session = format!("s{}", (file + 3 * number) % 7);
            let of =
                serde_json::json!({"session_id": session, "received_at": 100 - file, "response": [number]});
            writer.append(vec![example::call(of)]).await.expect("room");
        }
        assert_eq!(writer.close().await.left_in_journal, [] as [String; 0]);
    }
    read(dir)
}

fn json(call: Result<Call, CaptureError>) -> String {
    serde_json::to_string(&call.expect("whole")).expect("JSON")
}

fn read(dir: &Path) -> Vec<String> {
    let mut reader = Reader::open(dir, Query::default()).expect("readable");
    let mut calls: Vec<String> = reader.by_ref().map(json).collect();
    assert_eq!(reader.skipped(), [] as [String; 0]);
    calls.sort();
    calls
}

fn sources(dir: &Path) -> Vec<Source> {
    let files = layout::day_files(&layout::day_folder(dir, DATE)).expect("listed").into_iter();
    let sources = files.filter_map(|(path, name)| match name? {
        DayFileName::Segment(name) => Some(Source { path, name }),
        DayFileName::Merged(_) => None,
    });
    sources.collect()
}

fn compacted(dir: &Path) -> Vec<CompactedDay> {
    let mut days = vec![];
    compact_days(dir, &mut |day| days.push(day)).expect("compacted");
    days
}

/// One file is left, sorted by session, and nothing else.
fn is_done(dir: &Path, wanted: &[String]) {
    assert_eq!(read(dir), wanted);
    let files = layout::day_files(&layout::day_folder(dir, DATE)).expect("listed");
    assert!(matches!(files[..], [(_, Some(DayFileName::Merged(_)))]), "{files:?}");
    assert_eq!(layout::file_names(&layout::journal_dir(dir)).expect("listed"), [] as [String; 0]);
    let calls = ParquetCalls::open(&files[0].0, &Query::default()).expect("a file");
    let calls: Vec<Call> = calls.collect::<Result<_, _>>().expect("whole");
    assert!(calls.is_sorted_by(|a, b| key(a) <= key(b)));
}

#[tokio::test]
async fn a_crash_at_any_step_neither_loses_nor_doubles_a_call() {
    for step in 0..4 {
        let dir = tempfile::tempdir().expect("folder");
        let dir = dir.path();
        let wanted = store(dir).await;
        assert_eq!(wanted.len(), 20);
        let sources = sources(dir);
        // Each call is a run of its own.
        let merged = write_merged(&Files::default(), dir, DATE, &sources, 1).expect("written");
        assert_eq!(merged.runs.len(), 20);
        assert_eq!(read(dir), wanted, "before the rename");
        match step {
            0 => drop(merged),
            _ => merged.publish(&Files::default(), dir).expect("renamed"),
        }
        assert_eq!(read(dir), wanted, "after the rename");
        if step >= 2 {
            for source in sources.iter().take(step - 1) {
                fs::remove_file(&source.path).expect("deleted");
                assert_eq!(read(dir), wanted, "some are deleted");
            }
        }
        let days = compacted(dir);
        assert_eq!((days.len(), days[0].files_after), (1, 1), "{days:?}");
        is_done(dir, &wanted);
        assert_eq!(compacted(dir), [], "there is nothing left to do");
    }
}

#[tokio::test]
async fn a_reader_that_began_before_reads_to_its_end_and_what_it_reads_stays() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let wanted = store(dir).await;
    let mut reader = Reader::open(dir, Query::default()).expect("readable");
    let mut calls = vec![json(reader.next().expect("one"))];
    let days = compacted(dir);
    assert!(days[0].left[0].contains("until nobody reads the day"), "{days:?}");
    assert_eq!(days[0].files_after, 5);
    // One that begins now reads the merged file, and nothing of the others.
    assert_eq!(read(dir), wanted);
    calls.extend(reader.by_ref().map(json));
    calls.sort();
    assert_eq!((calls, reader.skipped().len()), (wanted.clone(), 0));
    drop(reader);
    assert_eq!(compacted(dir)[0].files_after, 1);
    is_done(dir, &wanted);
}

#[tokio::test]
async fn damaged_files_are_left_as_they_are() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    store(dir).await;
    let damaged = sources(dir).remove(1).path;
    let mut bytes = fs::read(&damaged).expect("read");
    bytes[100] ^= 1;
    fs::write(&damaged, &bytes).expect("written");
    let days = compacted(dir);
    assert!(days[0].left.len() == 1 && days[0].left[0].contains("CRC-32C"), "{days:?}");
    assert_eq!(days[0].files_after, 2);
    assert_eq!(fs::read(&damaged).expect("it is there"), bytes);
}

#[tokio::test]
async fn files_are_put_together_up_to_a_size_and_a_call_in_two_of_them_comes_once() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let wanted = store(dir).await;
    // As after a folder was restored over another.
    let first = sources(dir).remove(0);
    let copy = SegmentName { number: 9, salt: [7; 8] }.parquet_path(dir, DATE);
    fs::copy(&first.path, copy).expect("copied");
    let size = fs::metadata(&first.path).expect("there").len();
    let mut left = vec![];
    compact_day(&Files::default(), dir, DATE, 3 * size + size / 2, &mut left).expect("compacted");
    assert_eq!((super::size(dir, DATE).expect("listed").0, left.len()), (2, 0));
    compact_day(&Files::default(), dir, DATE, u64::MAX, &mut left).expect("compacted");
    is_done(dir, &wanted);
    // A writer numbers its segments on from there.
    assert_eq!(layout::last_number(dir).expect("listed"), Some(9));
}

#[tokio::test]
async fn a_merged_file_that_was_damaged_costs_nothing_while_its_sources_are_there() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let wanted = store(dir).await;
    let reader = Reader::open(dir, Query::default()).expect("readable");
    compacted(dir);
    let folder = layout::day_folder(dir, DATE);
    let merged = || {
        let files = layout::day_files(&folder).expect("listed").into_iter();
        files.filter(|(_, name)| matches!(name, Some(DayFileName::Merged(_)))).map(|(path, _)| path).next()
    };
    let spoiled = merged().expect("a merged file");
    let mut bytes = fs::read(&spoiled).expect("read");
    bytes[100] ^= 1;
    fs::write(&spoiled, &bytes).expect("written");
    drop(reader);
    let days = compacted(dir);
    assert!(days[0].left[0].contains("it goes, and what it was made of stays"), "{days:?}");
    is_done(dir, &wanted);
    // Where a source is gone the others are all that is left of it.
    let whole = merged().expect("a merged file");
    fs::copy(&whole, dir.join("whole")).expect("copied");
    let source = parquet_calls::replaces(&parquet_calls::open(&whole).expect("a file")).remove(0);
    fs::copy(&whole, folder.join(format!("{source}.parquet"))).expect("copied");
    let mut bytes = fs::read(&whole).expect("read");
    bytes[100] ^= 1;
    fs::write(&whole, &bytes).expect("written");
    let days = compacted(dir);
    assert!(days[0].left[0].contains("so what is left of its sources stays"), "{days:?}");
    assert!(folder.join(format!("{source}.parquet")).exists() && whole.exists());
}

#[tokio::test]
async fn what_is_in_the_journal_as_well_is_not_merged() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let wanted = store(dir).await;
    let first = sources(dir).remove(0);
    let journal = first.name.journal_path(dir);
    fs::write(&journal, frame::header(first.name.salt)).expect("written");
    let mut left = vec![];
    compact_day(&Files::default(), dir, DATE, u64::MAX, &mut left).expect("compacted");
    assert!(left.len() == 1 && left[0].contains("still in the journal"), "{left:?}");
    assert!(first.path.exists());
    fs::remove_file(&journal).expect("removed");
    assert_eq!(read(dir), wanted);
}
