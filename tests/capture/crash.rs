//! kill -9, torn tails and crashes between the steps of compaction.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use lego::capture::{Query, Writer, WriterOptions};
use lego::record::{Call, CallId, CallSink};

use crate::calls::call;
use crate::store::{read, sorted_json};

/// Set in the process that is killed: the folder it writes to.
pub const DIR: &str = "LEGO_TEST_CAPTURE_DIR";
pub const OPTIONS: fn() -> WriterOptions =
    || WriterOptions { segment_bytes: 8 << 10, ..WriterOptions::default() };

/// Not a test of its own: the process that the next test starts and kills. Prints what was acknowledged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writer_process() {
    let Some(dir) = std::env::var_os(DIR) else {
        return;
    };
    let writer = Arc::new(Writer::open(Path::new(&dir), OPTIONS()).expect("lock of the dead is free"));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..4_u32 {
        let writer = Arc::clone(&writer);
        tasks.spawn(async move {
            for turn in 0.. {
                let mut calls = vec![call(&format!("s{task}"), &[task, turn], &[turn; 9])];
                if turn % 3 == 0 {
                    calls[0].usage.as_mut().expect("it tells").completion_tokens *= 2;
                    let second = Call { choice_index: 1, ..calls[0].clone() };
                    calls.push(second);
                }
                let (id, choices) = (calls[0].call_id, calls.len());
                writer.append(calls).await.expect("room");
                let line = format!("acked {id} {choices}\n");
                std::io::stdout().write_all(line.as_bytes()).expect("pipe");
            }
        });
    }
    tasks.join_all().await;
}

#[test]
fn kill_9_loses_nothing_acknowledged_and_doubles_nothing() {
    let dir = tempfile::tempdir().expect("folder");
    let mut acked: HashMap<CallId, usize> = HashMap::new();
    for round in 0..20_usize {
        // A different moment each round, from before the first rotation to after several.
        let acks = 1 + round * 7 % 90;
        kill_a_writer(dir.path(), &mut acked, &mut |lines| lines >= acks);
        check(dir.path(), &acked, &format!("round {round}, after the kill"));
    }
    let writer = Writer::open(dir.path(), OPTIONS()).expect("lock of the dead is free");
    assert_eq!(writer.recovery().damaged, []);
    assert_eq!(runtime().block_on(writer.close()).left_in_journal, [] as [String; 0]);
    check(dir.path(), &acked, "after recovery");
    assert_eq!(fs::read_dir(dir.path().join("journal")).expect("folder").count(), 0);
}

/// Starts a writer, and kills it once that is to be, after so many lines of it. What it acknowledged is noted.
pub fn kill_a_writer(dir: &Path, acked: &mut HashMap<CallId, usize>, is_at: &mut dyn FnMut(usize) -> bool) {
    let mut child = Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", "crash::writer_process", "--nocapture", "--test-threads=1"])
        .env(DIR, dir)
        .stdout(Stdio::piped())
        .spawn()
        .expect("own binary starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut note = |line: std::io::Result<String>| {
        let line = line.expect("text");
        let mut words = line.split_whitespace().skip_while(|word| !word.ends_with("acked")).skip(1);
        // The last line may be cut by the kill: an id that does not parse was not told whole.
        let (Some(id), Some(choices)) = (words.next(), words.next()) else {
            return;
        };
        let id = id.parse().expect("a line is whole or has no second word");
        acked.insert(id, choices.parse().expect("number"));
    };
    for read in 1.. {
        note(lines.next().expect("the writer runs until it is killed"));
        if is_at(read) {
            break;
        }
    }
    child.kill().expect("SIGKILL");
    lines.for_each(&mut note);
    child.wait().expect("gone");
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime")
}

pub fn check(dir: &Path, acked: &HashMap<CallId, usize>, when: &str) {
    let mut found: HashMap<CallId, Vec<u16>> = HashMap::new();
    for call in read(dir, Query::default()) {
        found.entry(call.call_id).or_default().push(call.choice_index);
    }
    for (id, choices) in &mut found {
        choices.sort_unstable();
        let is_whole = *choices == [0] || *choices == [0, 1];
        assert!(is_whole, "{when}: {id} has the choices {choices:?}");
    }
    for (id, choices) in acked {
        assert_eq!(found.get(id).map_or(0, Vec::len), *choices, "{when}: {id}");
    }
}

async fn small_journal(dir: &Path) -> (PathBuf, Vec<Call>) {
    let writer = Writer::open(dir, WriterOptions::default()).expect("free folder");
    let calls = vec![call("a", &[1, 2], &[3]), call("b", &[4], &[5, 6])];
    for one in &calls {
        writer.append(vec![one.clone()]).await.expect("room");
    }
    let segment = fs::read_dir(dir.join("journal")).expect("folder").next().expect("one");
    let segment = segment.expect("entry").path();
    let kept = dir.with_extension("kept");
    fs::copy(&segment, &kept).expect("copied");
    writer.close().await;
    (kept, calls)
}

#[tokio::test]
async fn a_journal_cut_at_any_byte_keeps_the_calls_before_the_cut() {
    let dir = tempfile::tempdir().expect("folder");
    let (kept, calls) = small_journal(&dir.path().join("origin")).await;
    let bytes = fs::read(&kept).expect("read");
    let name = "00000001-0011223344556677.journal";
    for cut in 0..=bytes.len() {
        let dir = dir.path().join("cut");
        fs::create_dir_all(dir.join("journal")).expect("folder");
        let segment = dir.join("journal").join(name);
        fs::write(&segment, &bytes[..cut]).expect("written");
        let before = read(&dir, Query::default());
        assert_eq!(sorted_json(&before), sorted_json(&calls[..before.len()]), "cut at {cut}");
        // Each recovery syncs several times: all cuts are read, one in 64 is also recovered.
        if cut % 64 != 0 && cut + 3 < bytes.len() {
            continue;
        }
        let options = WriterOptions::default();
        let writer = Writer::open(&dir, options).expect("a torn tail is no error");
        let recovery = writer.recovery().clone();
        assert_eq!(recovery.appends as usize, before.len(), "cut at {cut}");
        let torn: u64 = recovery.torn.iter().map(|tail| tail.bytes).sum();
        let whole = recovery.torn.first().map_or(cut as u64, |tail| tail.at);
        assert_eq!(whole + torn, cut as u64, "cut at {cut}");
        assert!(recovery.torn.iter().all(|tail| tail.segment == segment));
        writer.close().await;
        let after = sorted_json(&read(&dir, Query::default()));
        assert_eq!(after, sorted_json(&before), "cut at {cut}");
        assert_eq!(after, sorted_json(&calls[..after.len()]), "cut at {cut}");
        let is_all = cut == bytes.len();
        assert_eq!((after.len() == 2, torn == 0 && after.len() == 2), (is_all, is_all));
        fs::remove_dir_all(&dir).expect("removed");
    }
}

#[tokio::test]
async fn a_segment_whose_parquet_exists_is_counted_once() {
    let dir = tempfile::tempdir().expect("folder");
    let origin = dir.path().join("origin");
    let (kept, calls) = small_journal(&origin).await;
    let day = fs::read_dir(origin.join("date=2026-11-29")).expect("folder").next();
    let parquet = day.expect("one").expect("entry").file_name().into_string().expect("text");
    let stem = parquet.trim_start_matches("calls-").trim_end_matches(".parquet");
    // As after a crash between the rename and the deletion of the segment.
    let segment = origin.join("journal").join(format!("{stem}.journal"));
    fs::copy(&kept, &segment).expect("copied");
    fs::write(origin.join("journal").join(format!("{stem}-2026-11-29.tmp")), b"half").expect("written");
    assert_eq!(sorted_json(&read(&origin, Query::default())), sorted_json(&calls));
    let writer = Writer::open(&origin, WriterOptions::default()).expect("free folder");
    writer.close().await;
    assert_eq!(sorted_json(&read(&origin, Query::default())), sorted_json(&calls));
    assert_eq!(fs::read_dir(origin.join("journal")).expect("folder").count(), 0);
}
