//! F02: a Parquet file has its name only once it is whole and on disk.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::super::journal::Journal;
use super::super::parquet_calls::{self, ParquetCalls};
use super::super::payload;
use super::super::reader::Query;
use super::super::storage::Files;
use super::super::storage::machine::{Did, Fault, Machine};
use super::super::writer::WriterOptions;
use super::*;
use crate::record::example;

/// A folder with a segment that is full.
fn sealed() -> (TempDir, Sealed) {
    let dir = tempfile::tempdir().expect("a folder");
    fs::create_dir(journal_dir(dir.path())).expect("a folder");
    let storage = Arc::new(Files::default());
    let mut journal = Journal::new(dir.path().to_owned(), WriterOptions::default(), 1, storage);
    for number in 0..20 {
        let call = example::call(serde_json::json!({"attempt": number, "response": vec![number; 40]}));
        let payload = payload::encode(vec![call]).expect("a payload");
        journal.commit(&[&payload], &mut vec![]).expect("room");
    }
    let sealed = journal.seal().expect("a segment");
    (dir, sealed)
}

#[test]
fn calls_lie_session_by_session_in_each_as_they_were_received() {
    let dir = tempfile::tempdir().expect("a folder");
    fs::create_dir(journal_dir(dir.path())).expect("a folder");
    let storage = Arc::new(Files::default());
    let mut journal = Journal::new(dir.path().to_owned(), WriterOptions::default(), 1, storage);
    let day = 86_400_000_000_i64;
    for number in 0..90 {
        // Of two days; not in the order of their times.
        let received_at = if number % 2 == 0 { 1_000 - number } else { day + 1_000 - number };
        let of = serde_json::json!({
            "session_id": format!("s{}", number * 7 % 10), "received_at": received_at, "attempt": number,
        });
        let payload = payload::encode(vec![example::call(of)]).expect("a payload");
        journal.commit(&[&payload], &mut vec![]).expect("room");
    }
    let segment = journal.seal().expect("a segment");
    let paths = compact(&Files::default(), dir.path(), segment).expect("compacted");
    assert_eq!(paths.len(), 2);
    for path in paths {
        let calls = ParquetCalls::open(&path, &Query::default()).expect("a file");
        let calls: Vec<Call> = calls.collect::<Result<_, _>>().expect("whole");
        assert_eq!(calls.len(), 45);
        assert!(calls.is_sorted_by(|a, b| key(a) <= key(b)), "{}", path.display());
        let metadata = parquet_calls::metadata(&path).expect("a footer");
        assert_eq!(parquet_calls::key_value(&metadata, columns::SORTED_KEY), Some(columns::SORTED));
    }
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let day = dir.join("date=1970-01-01");
    let entries = fs::read_dir(&day).into_iter().flatten();
    entries.map(|entry| entry.expect("an entry").path()).collect()
}

fn readable(dir: &Path) -> usize {
    let calls = crate::capture::Reader::open(dir, crate::capture::Query::default()).expect("a folder");
    calls.inspect(|call| assert!(call.is_ok(), "{call:?}")).count()
}

#[test]
fn f02_a_file_that_cannot_be_written_to_its_last_byte_never_has_its_name() {
    let (whole, segment) = sealed();
    let path = compact(&Files::default(), whole.path(), segment).expect("compacted").remove(0);
    let length = fs::metadata(path).expect("a file").len();
    let (dir, segment) = sealed();
    // Salts and times differ: the length is about that of the other.
    for missing in (1..4096.min(length)).step_by(97) {
        let machine = Machine::new(dir.path());
        machine.has_room(length - missing.min(length));
        let failed = compact(&machine, dir.path(), segment);
        if failed.is_ok() {
            assert!(missing < 97, "{missing} bytes too few");
            return;
        }
        assert_eq!(files(dir.path()), [] as [PathBuf; 0], "{missing} bytes too few");
        assert_eq!(readable(dir.path()), 20, "the segment is there");
        let left = fs::read_dir(journal_dir(dir.path())).expect("a folder").count();
        assert_eq!(left, 1, "{missing} bytes too few: nothing stays beside the segment");
    }
    let again = compact(&Files::default(), dir.path(), segment).expect("room again");
    assert_eq!((again.len(), readable(dir.path())), (1, 20));
}

#[test]
fn f02_a_file_is_synced_then_renamed_then_its_folder_is_synced_and_only_then_its_segment_goes() {
    let (dir, segment) = sealed();
    let machine = Machine::new(dir.path());
    compact(&machine, dir.path(), segment).expect("compacted");
    let (day, journal) = (dir.path().join("date=1970-01-01"), journal_dir(dir.path()));
    let temporary = segment.name.temporary_path(dir.path(), "1970-01-01");
    let wanted = [
        Did::Synced(temporary.clone()),
        Did::MadeFolder(day.clone()),
        Did::SyncedFolder(dir.path().to_owned()),
        Did::Renamed(temporary.clone()),
        Did::SyncedFolder(day),
        Did::Removed(segment.name.journal_path(dir.path())),
        Did::SyncedFolder(journal),
    ];
    let done = machine.done();
    let written = done.iter().rposition(|did| *did == Did::Written(temporary.clone())).expect("written");
    assert_eq!(done[written + 1..], wanted, "in this order, and nothing else");

    // One that fails at any of them leaves the segment, or the whole file.
    let steps = done.len() as u64;
    for at in 0..steps {
        let (dir, segment) = sealed();
        let machine = Machine::new(dir.path());
        machine.fail_after(at, 0, Fault::Device);
        let failed = compact(&machine, dir.path(), segment);
        assert!(failed.is_err(), "step {at} of {steps}");
        assert_eq!(readable(dir.path()), 20, "step {at} of {steps}");
        compact(&machine, dir.path(), segment)
            .or_else(|error| {
                // All was done but the last sync.
                if segment.name.journal_path(dir.path()).exists() { Err(error) } else { Ok(vec![]) }
            })
            .expect("it is tried again");
        assert_eq!((readable(dir.path()), files(dir.path()).len()), (20, 1), "step {at} of {steps}");
    }
}
