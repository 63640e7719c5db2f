//! The loads of `benches/proxy` at a twentieth of their size, against the binary: every byte, every record, and memory.
#![cfg(target_os = "linux")]
#![allow(dead_code)]

#[path = "../benches/proxy/client.rs"]
mod client;
#[path = "../benches/proxy/load.rs"]
mod load;
#[path = "../benches/proxy/mock.rs"]
mod mock;
#[path = "../benches/proxy/process.rs"]
mod process;

use std::time::Duration;

use mock::Shape;

const STREAMS: usize = 250;
/// What a stream may hold that is open and has had its first event, and what any number of them costs.
const OPEN: (u64, u64) = (50_000, 5_000_000);
/// At the peak the thread that makes Parquet has a row group of 32 MiB in several forms, and records of 16 MiB are being
/// made at once, whatever the number of streams.
const PEAK_FIXED: u64 = 80_000_000;
/// What is left when all are gone: arenas of the allocator, connections at rest, what Parquet keeps between files.
const AFTER: u64 = 60_000_000;

fn shape(tokens: usize, at_once: usize) -> Shape {
    Shape { tokens, at_once, pace: Duration::ZERO, is_stream: true }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_streams_at_once_lose_nothing_and_hold_little() {
    process::raise_open_files();
    let streams = STREAMS as u64;
    for (shape, peak_of_stream) in [(shape(256, 1), 160_000), (shape(16_384, 8), 1_200_000)] {
        let dir = tempfile::tempdir().expect("folder");
        let growth = load::streams(STREAMS, shape, dir.path()).await;
        let grown = |now: u64| now.saturating_sub(growth.before);
        assert!(grown(growth.open) <= OPEN.0 * streams + OPEN.1, "{growth:?}");
        assert!(grown(growth.peak) <= peak_of_stream * streams + PEAK_FIXED, "{growth:?}");
        assert!(grown(growth.after) <= AFTER, "{growth:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_steady_load_leaves_a_record_a_call() {
    // .ci/run has the time for a twentieth of half an hour.
    let seconds = std::env::var("LEGO_LOAD_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5);
    let dir = tempfile::tempdir().expect("folder");
    let paced = Shape { pace: Duration::from_millis(20), ..shape(256, 1) };
    let resident = load::soak(13, paced, Duration::from_secs(seconds), dir.path()).await;
    let tenth = resident.len() / 10 + 1;
    let (early, late) = (resident.len() / 6, resident.len() - tenth);
    let early = load::median(&resident[early..(early + tenth).min(resident.len())]);
    let late = load::median(&resident[late..]);
    assert!(late <= early + 10_000_000, "{early} bytes, then {late}");
}
