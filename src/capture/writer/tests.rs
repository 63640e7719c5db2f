//! The writer on disks that fail.

use std::path::Path;

use super::super::reader::{Query, Reader};
use super::super::storage::machine::{Fault, Machine};
use super::*;
use crate::record::example;

pub(super) fn open(dir: &Path, machine: &Machine, options: WriterOptions) -> Result<Writer, CaptureError> {
    Writer::open_on(&dir.into(), options, Arc::new(machine.clone()), Arc::default())
}

fn call(number: u16) -> Call {
    example::call(serde_json::json!({"attempt": number}))
}

fn stored(dir: &Path) -> Vec<u16> {
    let calls = Reader::open(dir, Query::default()).expect("folder");
    calls.map(|call| call.expect("whole").attempt).collect()
}

#[tokio::test]
async fn a_full_disk_refuses_and_resumes_when_there_is_room() {
    let dir = tempfile::tempdir().expect("folder");
    let machine = Machine::new(dir.path());
    machine.has_room(2000);
    let writer = open(dir.path(), &machine, WriterOptions::default()).expect("free folder");
    let mut acknowledged = vec![];
    for number in 1.. {
        match writer.append(vec![call(number)]).await {
            Ok(()) => acknowledged.push(number),
            Err(error) => {
                assert!(matches!(error, SinkError::Full { .. }), "{error}");
                assert!(error.to_string().contains("no space left"), "{error}");
                break;
            }
        }
    }
    assert!(!acknowledged.is_empty());
    assert_eq!(stored(dir.path()), acknowledged, "what was refused is not there in part");
    assert!(matches!(writer.admits(), Err(SinkError::Full { .. })), "nothing more is sampled");
    machine.has_room(u64::MAX);
    writer.append(vec![call(1000)]).await.expect("room again");
    acknowledged.push(1000);
    assert_eq!(writer.admits(), Ok(()));
    assert_eq!(stored(dir.path()), acknowledged, "journal");
    assert_eq!(writer.close().await.left_in_journal, [] as [String; 0]);
    assert_eq!(stored(dir.path()), acknowledged, "Parquet");
}

#[tokio::test]
async fn a_failed_sync_is_taken_back_and_the_segment_is_not_used_again() {
    let dir = tempfile::tempdir().expect("folder");
    let machine = Machine::new(dir.path());
    let writer = open(dir.path(), &machine, WriterOptions::default()).expect("free folder");
    writer.append(vec![call(1)]).await.expect("fine");
    // The write, then the sync.
    machine.fail_after(1, 0, Fault::Device);
    let failed = writer.append(vec![call(2)]).await;
    assert!(
        matches!(&failed, Err(SinkError::Io { reason, .. }) if reason.contains("Input/output error")),
        "{failed:?}"
    );
    writer.append(vec![call(3)]).await.expect("fine");
    let closed = writer.close().await;
    assert_eq!(stored(dir.path()), [1, 3]);
    assert_eq!((closed.appends, closed.commits), (2, 2));
    let recovered = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    assert_eq!(recovered.recovery(), &Recovery::default());
    recovered.close().await;
}

#[tokio::test]
async fn parquet_that_cannot_be_written_leaves_the_journal_readable() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    writer.append(vec![call(1)]).await.expect("fine");
    // A file where the day's folder should be.
    std::fs::write(dir.path().join("date=1970-01-01"), b"").expect("written");
    let closed = writer.close().await;
    assert_eq!(closed.left_in_journal.len(), 1, "{closed:?}");
    assert_eq!(stored(dir.path()), [1]);
    std::fs::remove_file(dir.path().join("date=1970-01-01")).expect("removed");
    let again = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    assert_eq!(again.close().await.left_in_journal, [] as [String; 0]);
    assert_eq!(stored(dir.path()), [1]);
    assert_eq!(std::fs::read_dir(dir.path().join("journal")).expect("folder").count(), 0);
}

/// The folder as kill -9 would leave it now.
fn as_killed(dir: &Path) -> tempfile::TempDir {
    fn copy(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).expect("folder");
        for entry in std::fs::read_dir(from).expect("folder").flatten() {
            let target = to.join(entry.file_name());
            if entry.path().is_dir() {
                copy(&entry.path(), &target);
            } else if entry.file_name() != "LOCK" {
                std::fs::copy(entry.path(), target).expect("copy");
            }
        }
    }
    let temp = tempfile::tempdir().expect("temp");
    copy(dir, temp.path());
    temp
}

#[tokio::test]
async fn the_last_draft_of_a_call_without_a_record_becomes_its_record() {
    let temp = tempfile::tempdir().expect("temp");
    let writer = Writer::open(temp.path(), WriterOptions::default()).expect("free folder");
    let (finished, cut) = (call(1), call(2));
    let later = |draft: &Call| Call { attempt: draft.attempt + 10, ..draft.clone() };
    for draft in [&finished, &cut] {
        writer.draft(vec![draft.clone()]).await.expect("room");
        writer.draft(vec![later(draft)]).await.expect("room");
    }
    assert_eq!(stored(temp.path()), [] as [u16; 0], "a draft is no record");
    writer.append(vec![Call { attempt: 99, ..finished.clone() }]).await.expect("room");

    let killed = as_killed(temp.path());
    for opened in 0..2 {
        let again = Writer::open(killed.path(), WriterOptions::default()).expect("free folder");
        assert_eq!(again.recovery().unfinished, u64::from(opened == 0));
        again.close().await;
        let mut found = stored(killed.path());
        found.sort_unstable();
        assert_eq!(found, [12, 99]);
    }

    writer.append(vec![later(&cut)]).await.expect("room");
    writer.close().await;
    let left = std::fs::read_dir(temp.path().join("drafts/journal")).expect("folder").count();
    assert_eq!(left, 0, "drafts of finished calls are deleted");
    assert_eq!(
        Writer::open(temp.path(), WriterOptions::default()).expect("free folder").recovery().unfinished,
        0
    );
}

/// The journal's files, and their bytes.
fn journal_files(dir: &Path, ending: &str) -> Vec<std::path::PathBuf> {
    let files = std::fs::read_dir(dir.join("journal")).expect("folder");
    let files = files.map(|entry| entry.expect("entry").path());
    files.filter(|path| path.to_string_lossy().ends_with(ending)).collect()
}

#[tokio::test]
async fn a_segment_with_damage_is_set_aside_and_what_is_whole_becomes_parquet() {
    type Spoil = fn(&mut Vec<u8>);
    let in_the_first: Spoil = |bytes| {
        let at = bytes.windows(15).position(|window| window == b"model_requested").expect("a record is JSON");
        bytes[at] ^= 1;
    };
    let spoils: [(Spoil, &[u16]); 3] = [
        (in_the_first, &[2, 3]),
        (|bytes| bytes[3] ^= 1, &[]),
        (|bytes| bytes.truncate(bytes.len() - 5), &[1, 2]),
    ];
    for (spoil, left) in spoils {
        let dir = tempfile::tempdir().expect("folder");
        let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
        for number in 1..=3 {
            writer.append(vec![call(number)]).await.expect("fine");
        }
        let segment = journal_files(dir.path(), ".journal").remove(0);
        let mut bytes = std::fs::read(&segment).expect("readable");
        spoil(&mut bytes);
        std::fs::write(&segment, &bytes).expect("written");
        assert_eq!(writer.close().await.left_in_journal, [] as [String; 0]);
        let aside = journal_files(dir.path(), ".damaged");
        assert_eq!(aside.len(), 1, "kept for a person to see");
        assert_eq!(std::fs::read(&aside[0]).expect("readable"), bytes);
        assert!(journal_files(dir.path(), ".journal").is_empty());
        let mut reader = Reader::open(dir.path(), Query::default()).expect("folder");
        let found: Vec<u16> = reader.by_ref().map(|call| call.expect("whole").attempt).collect();
        assert_eq!(found, left);
        assert!(reader.skipped()[0].contains("damaged"), "{:?}", reader.skipped());
        // The next writer leaves it where it is.
        Writer::open(dir.path(), WriterOptions::default()).expect("free folder").close().await;
        assert_eq!(journal_files(dir.path(), ".damaged"), aside);
    }
}

#[tokio::test]
async fn a_disk_that_hangs_is_told_after_a_while_and_what_waited_is_written_once_it_goes_on() {
    let dir = tempfile::tempdir().expect("folder");
    let machine = Machine::new(dir.path());
    let limits = Limits { stall: Some(Duration::from_millis(30)), ..Limits::default() };
    let options = WriterOptions { limits, ..WriterOptions::default() };
    let writer = open(dir.path(), &machine, options).expect("free folder");
    writer.append(vec![call(1)]).await.expect("fine");
    machine.hangs(true);
    for number in [2, 3] {
        let stalled = writer.append(vec![call(number)]).await;
        assert!(matches!(&stalled, Err(SinkError::Stalled { .. })), "{stalled:?}");
        assert!(stalled.unwrap_err().to_string().contains("capture_stall_timeout_secs"));
    }
    assert!(matches!(writer.admits(), Err(SinkError::Stalled { .. })), "nothing more is sampled");
    machine.hangs(false);
    while writer.admits().is_err() {
        tokio::task::yield_now().await;
    }
    writer.append(vec![call(4)]).await.expect("it goes on");
    writer.close().await;
    assert_eq!(stored(dir.path()), [1, 2, 3, 4], "what waited too");
}

#[tokio::test]
async fn a_folder_at_its_bound_takes_what_runs_and_nothing_that_begins() {
    let dir = tempfile::tempdir().expect("folder");
    let limits = Limits { max_bytes: Some(3000), ..Limits::default() };
    let options = WriterOptions { limits, ..WriterOptions::default() };
    let writer = Writer::open(dir.path(), options).expect("free folder");
    let mut number = 0;
    while writer.admits() == Ok(()) {
        number += 1;
        writer.append(vec![call(number)]).await.expect("room");
    }
    assert!(number > 1, "there was room for some");
    let told = writer.admits().expect_err("it is full").to_string();
    assert!(told.contains("capture_max_bytes allows 3000") && told.contains("prune"), "{told}");
    // Those that were sampled by then.
    writer.append(vec![call(number + 1)]).await.expect("it runs");
    writer.draft(vec![call(number + 2)]).await.expect("it runs");
    writer.close().await;
    assert_eq!(stored(dir.path()), (1..=number + 1).collect::<Vec<u16>>());
    // As large as it is, a folder opens; what is wrong is told then.
    let again = Writer::open(dir.path(), options).expect("free folder");
    assert!(matches!(again.admits(), Err(SinkError::AtCap { .. })));
    again.close().await;
}
