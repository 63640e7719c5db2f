//! One session, and one trial, among very many: how many of the store's bytes are read to list their calls.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lego::capture::{Query, Reader, Writer, WriterOptions, compact_days};
use lego::record::{Call, CallId, CallSink};

use crate::calls::call;
use crate::sizes;

/// Calls that are appended at once.
const TOGETHER: usize = 512;
/// Sessions that run side by side.
const SIDE_BY_SIDE: usize = 256;

/// Prints the share that is read of what a writer leaves, and after `lego capture compact`.
pub fn find(calls: usize, each: usize) {
    let dir = tempfile::Builder::new().prefix("lego-bench").tempdir().expect("folder");
    let most = most_beside(dir.path(), || write(dir.path(), calls, each));
    tell("as written", dir.path(), calls / each, each);
    println!("  most bytes of temporary files beside the writer: {most}; most memory: {}", memory());
    let began = Instant::now();
    let most = most_beside(dir.path(), || compact_days(dir.path(), &mut |_| {}).expect("merged"));
    tell("compacted", dir.path(), calls / each, each);
    let seconds = began.elapsed().as_secs();
    println!("  most bytes of temporary files: {most}, in {seconds} s; most memory: {}", memory());
}

/// The most bytes of temporary files while `work` is done.
fn most_beside(dir: &Path, work: impl FnOnce()) -> u64 {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut most = 0;
            while !is_over.load(Ordering::Relaxed) {
                let files = sizes::files(dir, "tmp").into_iter();
                most = most.max(files.filter_map(|file| Some(fs::metadata(file).ok()?.len())).sum());
                std::thread::sleep(Duration::from_millis(20));
            }
            most
        });
        work();
        is_over.store(true, Ordering::Relaxed);
        watch.join().expect("no panic")
    })
}

/// The most memory that the process had, as the system says it.
fn memory() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.map_or("unknown", str::trim).to_owned()
}

/// Nothing is being merged, and no eight files are of one size: the writer has nothing left to do.
fn is_settled(dir: &Path) -> bool {
    let mut tiers = [0; 64];
    for file in sizes::files(dir, "parquet") {
        let Ok(metadata) = fs::metadata(file) else { return false };
        if metadata.len() < 16 << 20 {
            tiers[metadata.len().max(1).ilog(8) as usize] += 1;
        }
    }
    let is_open = sizes::files(dir, "journal").len() <= 1;
    is_open && sizes::files(dir, "tmp").is_empty() && tiers.iter().all(|files| *files < 8)
}

/// Calls of metadata: no bodies, and few ids.
fn write(dir: &Path, calls: usize, each: usize) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let writer = Writer::open(dir, WriterOptions::default()).expect("a free folder");
        let mut batch = Vec::with_capacity(TOGETHER);
        for number in 0..calls {
            let (block, within) = (number / (SIDE_BY_SIDE * each), number % (SIDE_BY_SIDE * each));
            batch.push(metadata(block * SIDE_BY_SIDE + within % SIDE_BY_SIDE, number));
            if batch.len() == TOGETHER || number + 1 == calls {
                let appends = batch.drain(..).map(|call| writer.append(vec![call]));
                for done in futures_util::future::join_all(appends).await {
                    done.expect("room");
                }
            }
        }
        let began = Instant::now();
        while !is_settled(dir) {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        println!("{calls} calls written; all merged {} s later", began.elapsed().as_secs());
        writer.close().await;
    });
}

fn name(session: usize) -> String {
    // In no order, as random ids are.
    format!("{:016x}", (session as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

fn metadata(session: usize, number: usize) -> Call {
    let mut call = call(&name(session), &[1, 2, 3], &[4, 5]);
    call.call_id = CallId::now();
    call.received_at += number as i64 * 800;
    (call.client_request, call.response, call.text, call.tool_calls) = (None, None, None, None);
    // What differs from call to call.
    let random = call.call_id.0.as_u128() as u64;
    (call.duration_us, call.ttft_us) = (random % 30_000_000, Some(random / 7 % 900_000));
    if let Some(usage) = &mut call.usage {
        (usage.prompt_tokens, usage.cached_tokens) = (3, Some(random / 11 % 100_000));
    }
    call
}

fn tell(what: &str, dir: &Path, sessions: usize, each: usize) {
    let files = sizes::files(dir, "parquet");
    let all: u64 = files.iter().map(|file| fs::metadata(file).expect("a file").len()).sum();
    println!("{what}: {} files, {all} bytes", files.len());
    let session = name(sessions / 2);
    let lean = Query { without_bodies: true, without_routing: true, as_stored: true, ..Query::default() };
    let queries = [
        ("session", Query { session_id: session.parse().ok(), ..lean.clone() }),
        ("trial", Query { trial_id: format!("trial-of-{session}").parse().ok(), ..lean }),
    ];
    for (name, query) in queries {
        let mut reader = Reader::open(dir, query).expect("captures");
        let found = reader.by_ref().collect::<Result<Vec<Call>, _>>().expect("whole").len();
        assert_eq!(found, each, "calls of the {name}");
        let read = reader.parquet_bytes_read();
        println!("  one {name}: {read} bytes read, {:.3} %", 100.0 * read as f64 / all as f64);
    }
}
