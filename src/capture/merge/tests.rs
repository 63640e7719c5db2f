//! Crash points: after each step of a merge every call is there once, and the next compaction ends it.

use super::super::compact::key;
use super::super::frame;
use super::super::parquet_calls::ParquetCalls;
use super::super::reader::Query;
use super::*;
use crate::capture::{Reader, Writer, WriterOptions};
use crate::record::{Call, CallSink as _, example};

const DATE: &str = "1970-01-01";

/// Every other file is not sorted: calls that are appended together stay together.
async fn store(dir: &Path) -> Vec<String> {
    for file in 0..4 {
        store_file(dir, file).await;
    }
    read(dir)
}

async fn store_file(dir: &Path, file: i64) {
    let writer = Writer::open(dir, WriterOptions::default()).expect("free folder");
    let calls = (0..5).map(|number| {
        let session = format!("s{}", (file + 3 * number) % 7);
        let of = serde_json::json!({"session_id": session, "received_at": 100 - file, "response": [number]});
        example::call(of)
    });
    if file % 2 == 0 {
        writer.append(calls.collect()).await.expect("room");
    } else {
        for call in calls {
            writer.append(vec![call]).await.expect("room");
        }
    }
    assert_eq!(writer.close().await.left_in_journal, [] as [String; 0]);
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
    let mut alone = Alone;
    Day::new(&Files::default(), dir, DATE, &mut alone).sources(u64::MAX).expect("listed").0
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
        // Each call of a file that is not sorted is a run of its own.
        let files = Files::default();
        let merged = sorted::write(&files, dir, DATE, &sources, 1, &mut Alone).expect("written");
        let merged = merged.expect("nothing stops it");
        assert_eq!(merged.runs(), 10);
        assert_eq!(read(dir), wanted, "before the rename");
        match step {
            0 => std::mem::forget(merged),
            _ => merged.publish(dir).expect("renamed"),
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
    let least = sources(dir).iter().map(|source| source.bytes).min().expect("some");
    for (target, left) in [(least, 5), (2 * least - 1, 5)] {
        assert_eq!(compact_day(&Files::default(), dir, DATE, target).expect("compacted").len(), 0);
        assert_eq!(files(dir), left, "two are more than {target} bytes");
    }
    compact_day(&Files::default(), dir, DATE, u64::MAX).expect("compacted");
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
    let source = parquet_calls::replaces(&parquet_calls::open(&whole).expect("a file")).sources.remove(0);
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
    let left = compact_day(&Files::default(), dir, DATE, u64::MAX).expect("compacted");
    assert!(left.len() == 1 && left[0].contains("still in the journal"), "{left:?}");
    assert!(first.path.exists());
    fs::remove_file(&journal).expect("removed");
    assert_eq!(read(dir), wanted);
}

/// Stops after so many calls.
struct Stops {
    after: usize,
    has_room: bool,
    /// What reads the day, until it is asked whether to wait.
    reader: Option<Reader>,
}

impl Beside for Stops {
    fn goes_on(&mut self) -> bool {
        self.after = self.after.saturating_sub(1);
        self.after > 0
    }

    fn waits(&mut self) -> bool {
        self.reader.take().is_some()
    }

    fn has_room(&self, _: u64) -> bool {
        self.has_room
    }
}

impl Stops {
    const fn after(after: usize) -> Self {
        Self { after, has_room: true, reader: None }
    }
}

fn due(dir: &Path, beside: &mut dyn Beside) -> Due {
    let (mut passed, mut left) = (HashSet::new(), vec![]);
    let due = merge_due(&Files::default(), dir, DATE, &mut passed, &mut left, beside).expect("readable");
    assert_eq!(left, [] as [String; 0]);
    due
}

fn files(dir: &Path) -> usize {
    size(dir, DATE).expect("listed").0
}

/// Eight files of one size.
async fn tier(dir: &Path) -> Vec<String> {
    for file in 0..8 {
        assert_eq!(due(dir, &mut Stops::after(usize::MAX)), Due::Nothing);
        assert_eq!(files(dir), usize::try_from(file).expect("few"), "too few of one size");
        // The writer leaves at once, before its own thread has merged them.
        store_file(dir, file).await;
    }
    read(dir)
}

#[tokio::test]
async fn eight_files_of_one_size_become_one_whenever_it_is_stopped_before() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let wanted = tier(dir).await;
    let journal = || layout::file_names(&layout::journal_dir(dir)).expect("listed");
    // Those that are not sorted are looked at twice.
    for after in 0..=60 {
        assert_eq!(due(dir, &mut Stops::after(after)), Due::Later);
        assert_eq!((files(dir), journal().len()), (8, 0), "stopped after {after} calls");
    }
    assert_eq!(due(dir, &mut Stops { has_room: false, ..Stops::after(usize::MAX) }), Due::Later);
    assert_eq!((files(dir), read(dir)), (8, wanted.clone()));
    assert_eq!(due(dir, &mut Stops::after(usize::MAX)), Due::Nothing);
    is_done(dir, &wanted);
    // What it replaced in turn is told too.
    for file in 0..7 {
        store_file(dir, file).await;
    }
    let wanted = read(dir);
    assert_eq!((compacted(dir).len(), wanted.len()), (1, 75));
    is_done(dir, &wanted);
    let merged = layout::day_files(&layout::day_folder(dir, DATE)).expect("listed").remove(0).0;
    let replaces = parquet_calls::replaces(&parquet_calls::open(&merged).expect("a file"));
    let segments: HashSet<String> = replaces.all().filter(|stem| stem.starts_with("calls-")).collect();
    assert_eq!((replaces.sources.len(), segments.len()), (8, 15));
}

#[tokio::test]
async fn a_day_that_is_read_is_waited_for_and_its_small_files_stay_while_it_is_read_for_long() {
    for is_long in [false, true] {
        let dir = tempfile::tempdir().expect("folder");
        let dir = dir.path();
        let wanted = tier(dir).await;
        let mut reader = Reader::open(dir, Query::default()).expect("readable");
        let first = json(reader.next().expect("one"));
        let mut beside = Stops::after(usize::MAX);
        if !is_long {
            beside.reader = Some(reader);
            assert_eq!(due(dir, &mut beside), Due::Nothing);
            is_done(dir, &wanted);
            continue;
        }
        assert_eq!(due(dir, &mut beside), Due::Later);
        assert_eq!((files(dir), read(dir)), (9, wanted.clone()));
        let mut calls: Vec<String> = [first].into_iter().chain(reader.by_ref().map(json)).collect();
        calls.sort();
        assert_eq!(calls, wanted);
        drop(reader);
        assert_eq!(due(dir, &mut beside), Due::Nothing);
        is_done(dir, &wanted);
    }
}

#[tokio::test]
async fn beside_a_writer_damaged_files_are_told_once_and_the_others_are_merged() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    tier(dir).await;
    store_file(dir, 8).await;
    let damaged = sources(dir).remove(1).path;
    let mut bytes = fs::read(&damaged).expect("read");
    bytes[100] ^= 1;
    fs::write(&damaged, &bytes).expect("written");
    let (mut passed, mut left) = (HashSet::new(), vec![]);
    for told in [1, 0] {
        let mut beside = Stops::after(usize::MAX);
        let due = merge_due(&Files::default(), dir, DATE, &mut passed, &mut left, &mut beside);
        assert_eq!((due.expect("readable"), left.len()), (Due::Nothing, told), "{left:?}");
    }
    assert_eq!((files(dir), fs::read(&damaged).expect("it stays")), (2, bytes));
}
