//! One session, and one trial, among very many: how many of the store's bytes are read to list their calls.

use std::fs;
use std::path::Path;

use lego::capture::{Query, Reader, Writer, WriterOptions, compact_days};
use lego::record::{Call, CallId, CallSink};

use crate::calls::call;
use crate::sizes;

/// Calls that are appended at once.
const TOGETHER: usize = 512;
/// Sessions that run side by side.
const SIDE_BY_SIDE: usize = 256;

/// Prints the share that is read, before and after the files are merged.
pub fn find(calls: usize, each: usize) {
    let dir = tempfile::Builder::new().prefix("lego-bench").tempdir().expect("folder");
    write(dir.path(), calls, each);
    tell("as written", dir.path(), calls / each, each);
    compact_days(dir.path(), &mut |_| {}).expect("merged");
    tell("merged", dir.path(), calls / each, each);
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
