//! The writer on disks that fail.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::super::journal::Disk;
use super::super::reader::{Query, Reader};
use super::*;
use crate::record::example;

/// A disk with a given room, whose sync can be made to fail.
#[derive(Default)]
struct Faults {
    used: AtomicU64,
    room: AtomicU64,
    sync_fails: AtomicBool,
}

struct FaultyDisk {
    file: File,
    faults: Arc<Faults>,
}

impl Disk for FaultyDisk {
    fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let room = self.faults.room.load(Ordering::SeqCst);
        let left = room.saturating_sub(self.faults.used.load(Ordering::SeqCst)) as usize;
        // As a real full disk does: what fits is written, then the error comes.
        let fits = bytes.len().min(left);
        self.file.write_at(at, &bytes[..fits])?;
        if fits < bytes.len() {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        self.faults.used.fetch_add(fits as u64, Ordering::SeqCst);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        match self.faults.sync_fails.load(Ordering::SeqCst) {
            true => Err(io::Error::other("the disk went away")),
            false => self.file.sync(),
        }
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.file.truncate(length)
    }
}

fn open(dir: &Path, faults: &Arc<Faults>) -> Writer {
    let faults = Arc::clone(faults);
    let create = move |path: &Path| -> io::Result<Box<dyn Disk>> {
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        Ok(Box::new(FaultyDisk { file, faults: Arc::clone(&faults) }))
    };
    Writer::open_on(&dir.into(), WriterOptions::default(), Box::new(create)).expect("free folder")
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
    let faults = Arc::new(Faults::default());
    faults.room.store(2000, Ordering::SeqCst);
    let writer = open(dir.path(), &faults);
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
    faults.room.store(u64::MAX, Ordering::SeqCst);
    writer.append(vec![call(1000)]).await.expect("room again");
    acknowledged.push(1000);
    assert_eq!(stored(dir.path()), acknowledged, "journal");
    assert_eq!(writer.close().await.left_in_journal, [] as [String; 0]);
    assert_eq!(stored(dir.path()), acknowledged, "Parquet");
}

#[tokio::test]
async fn a_failed_sync_is_taken_back_and_the_segment_is_not_used_again() {
    let dir = tempfile::tempdir().expect("folder");
    let faults = Arc::new(Faults::default());
    faults.room.store(u64::MAX, Ordering::SeqCst);
    let writer = open(dir.path(), &faults);
    writer.append(vec![call(1)]).await.expect("fine");
    faults.sync_fails.store(true, Ordering::SeqCst);
    let failed = writer.append(vec![call(2)]).await;
    assert!(matches!(&failed, Err(SinkError::Io { reason, .. }) if reason.contains("went away")));
    faults.sync_fails.store(false, Ordering::SeqCst);
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
