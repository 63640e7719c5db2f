//! How long a proxy takes to start after a crash: it reads the journal that the last one left.
//!
//! `cargo bench --bench recovery [-- MEBIBYTES]`

use std::fs;
use std::path::Path;
use std::time::Instant;

use lego::capture::{Durability, Writer, WriterOptions};
use lego::record::{Call, CallSink, JsonText};

#[path = "../tests/common/calls.rs"]
mod calls;

/// Ids of a call's prompt, and of its reply.
const IDS: (u32, u32) = (4096, 512);
/// Bytes of its request.
const BODY: usize = 24 << 10;

fn call(number: u32) -> Call {
    let (prompt, completion): (Vec<u32>, Vec<u32>) = (
        (0..IDS.0).map(|id| (id * 31).wrapping_add(number)).collect(),
        (0..IDS.1).map(|id| (id * 7).wrapping_add(number)).collect(),
    );
    let mut call = calls::call(&format!("s{}", number % 50), &prompt, &completion);
    let text: String = (0..BODY)
        .map(|at| char::from(b'a' + (at as u32 * 7).wrapping_add(number.wrapping_mul(13)) as u8 % 26))
        .collect();
    call.client_request = JsonText::new(format!("\"{text}\"")).ok();
    call
}

/// Leaves a journal of so many bytes in `dead`, as kill -9 would.
async fn leave(live: &Path, dead: &Path, bytes: u64) -> (u64, u64) {
    let options =
        WriterOptions { durability: Durability::None, segment_bytes: u64::MAX, ..WriterOptions::default() };
    let writer = Writer::open(live, options).expect("a free folder");
    let segments =
        || fs::read_dir(live.join("journal")).expect("a folder").map(|entry| entry.expect("an entry").path());
    let mut appends = 0;
    let length = loop {
        writer.append((0..8).map(|choice| call(appends as u32 * 8 + choice)).collect()).await.expect("room");
        appends += 1;
        let length = segments().map(|path| fs::metadata(path).map_or(0, |metadata| metadata.len())).sum();
        if length >= bytes {
            break length;
        }
    };
    // A call that ran: whether its record was written after all is looked up in all of the journal.
    writer.draft(vec![call(u32::MAX)]).await.expect("room");
    for folder in ["journal", "drafts/journal"] {
        fs::create_dir_all(dead.join(folder)).expect("a folder");
        for entry in fs::read_dir(live.join(folder)).expect("a folder") {
            let path = entry.expect("an entry").path();
            fs::hard_link(&path, dead.join(folder).join(path.file_name().expect("a name"))).expect("linked");
        }
    }
    // Neither closed nor made into Parquet.
    std::mem::forget(writer);
    (appends, length)
}

#[tokio::main]
async fn main() {
    let mebibytes = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(1024_u64);
    let temp = tempfile::tempdir().expect("a folder");
    let (live, dead) = (temp.path().join("live"), temp.path().join("dead"));
    let (appends, length) = leave(&live, &dead, mebibytes << 20).await;
    let began = Instant::now();
    let writer = Writer::open(&dead, WriterOptions::default()).expect("the lock of the dead is free");
    let opened = began.elapsed();
    assert_eq!((writer.recovery().appends, writer.recovery().unfinished), (appends, 1));
    println!(
        "a journal of {} MiB, {appends} appends: ready for calls after {:.2} s",
        length >> 20,
        opened.as_secs_f64()
    );
    let closed = writer.close().await;
    assert_eq!(closed.left_in_journal, [] as [String; 0]);
    println!("all of it made into Parquet after {:.2} s", began.elapsed().as_secs_f64());
}
