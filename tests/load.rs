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
/// What a stream may hold that is open and has had its first event.
const STREAM_BYTES: u64 = 100_000;

fn shape(tokens: usize, at_once: usize) -> Shape {
    Shape { tokens, at_once, pace: Duration::ZERO, is_stream: true }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_streams_at_once_lose_nothing_and_hold_little() {
    process::raise_open_files();
    // Most of the peak is records being made and Parquet being written, whatever the number of streams. About twice what
    // was seen, since a faster machine has more replies in flight.
    for (shape, most_at_peak) in [(shape(256, 1), 200_000_000), (shape(16_384, 8), 900_000_000)] {
        let dir = tempfile::tempdir().expect("folder");
        let growth = load::streams(STREAMS, shape, dir.path()).await;
        assert!(growth.open.saturating_sub(growth.before) <= STREAM_BYTES * STREAMS as u64, "{growth:?}");
        assert!(growth.peak.saturating_sub(growth.before) <= most_at_peak, "{growth:?}");
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
