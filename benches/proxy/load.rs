//! The loads: many streams at once, and a steady load for a long time. What they assert are counts and memory.

use std::path::Path;
use std::time::{Duration, Instant};

use lego::capture::{Query, Reader};
use lego::record::CallStatus;
use tokio::task::JoinSet;

use super::client::{Client, Seen, Target};
use super::mock::{Mock, Shape, token_id};
use super::process::{Process, captures};

const MIB: f64 = (1 << 20) as f64;

/// What `streams` at once cost.
#[allow(dead_code, reason = "the bench prints them, the test judges them")]
#[derive(Debug, Clone, Copy)]
pub struct Growth {
    /// Resident bytes before.
    pub before: u64,
    /// With every stream open and its first event delivered.
    pub open: u64,
    /// The most while the replies came.
    pub peak: u64,
    /// After the last had ended and its record was durable.
    pub after: u64,
}

/// Opens that many streams at once, then lets all of them go on to their end. Every byte is checked, and every record.
pub async fn streams(streams: usize, shape: Shape, dir: &Path) -> Growth {
    let mock = Mock::start(shape).await;
    let lego = Process::lego(&mock.url(), dir, "power_loss");
    let calls_before = 16;
    for _ in 0..calls_before {
        let seen = Client::new(&lego.target).call(true).await.expect("a reply");
        assert_eq!((seen.bytes, seen.checksum), mock.wanted());
    }
    let before = lego.resident();
    mock.hold_until(streams);
    let started = Instant::now();
    let mut calls = JoinSet::new();
    for _ in 0..streams {
        let mut client = Client::new(&lego.target);
        calls.spawn(async move { client.call(true).await });
    }
    mock.is_open(streams).await;
    let open = lego.resident();
    println!("{streams} streams are open after {:.1} s", started.elapsed().as_secs_f64());
    mock.release();
    let (mut peak, mut failed) = (open, Vec::new());
    let mut sample = tokio::time::interval(Duration::from_millis(100));
    loop {
        tokio::select! {
            done = calls.join_next() => match done {
                None => break,
                Some(seen) => match seen.expect("no panic") {
                    Ok(seen) => assert_eq!((seen.bytes, seen.checksum), mock.wanted(), "other bytes"),
                    Err(error) => failed.push(error),
                },
            },
            _ = sample.tick() => peak = peak.max(lego.resident()),
        }
    }
    println!("all ended after {:.1} s, {} with an error", started.elapsed().as_secs_f64(), failed.len());
    assert!(failed.is_empty(), "{} of {streams} failed, the first: {}", failed.len(), failed[0]);
    let after = settled(&lego, before, peak).await;
    lego.end();
    let records = check_records(dir, shape);
    assert_eq!(records, streams + calls_before);
    let growth = Growth { before, open, peak, after };
    println!(
        "{streams} streams of {} tokens: {:.0} MiB before, {:.0} open, {:.0} at most, {:.0} after; {:.1} kB a stream, {:.1} kB at most; {records} records",
        shape.tokens,
        before as f64 / MIB,
        open as f64 / MIB,
        peak as f64 / MIB,
        after as f64 / MIB,
        (open.saturating_sub(before)) as f64 / 1000.0 / streams as f64,
        (peak.saturating_sub(before)) as f64 / 1000.0 / streams as f64,
    );
    growth
}

/// Resident bytes when they no longer change: connections and Parquet files end in the background.
async fn settled(lego: &Process, before: u64, peak: u64) -> u64 {
    let mut least = lego.resident();
    for _ in 0..300 {
        if least <= before + (peak - before) / 4 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        least = least.min(lego.resident());
    }
    least
}

/// Every record must be whole; gives how many there are.
fn check_records(dir: &Path, shape: Shape) -> usize {
    let query = Query { without_bodies: true, ..Query::default() };
    let mut count = 0;
    for call in Reader::open(&captures(dir), query).expect("readable") {
        let call = call.expect("readable");
        assert_eq!((call.status, &call.error), (CallStatus::Ok, &None));
        let ids = call.completion_token_ids.expect("ids");
        assert_eq!(ids.len(), shape.tokens);
        // The mock repeats its events, each with the same tokens.
        assert!(ids.iter().take(256).enumerate().all(|(at, id)| *id == token_id(at)));
        assert_eq!(call.completion_logprobs.expect("log-probs").len(), shape.tokens);
        assert_eq!(call.usage.expect("usage").completion_tokens, shape.tokens as u64);
        count += 1;
    }
    count
}

/// Keeps that many streams going for this long; gives resident bytes each second.
pub async fn soak(streams: usize, shape: Shape, time: Duration, dir: &Path) -> Vec<u64> {
    let mock = Mock::start(shape).await;
    let lego = Process::lego(&mock.url(), dir, "power_loss");
    let end = Instant::now() + time;
    let mut clients = JoinSet::new();
    for _ in 0..streams {
        let (target, wanted) = (lego.target.clone(), mock.wanted());
        clients.spawn(async move { calls_until(&target, end, wanted).await });
    }
    let mut resident = Vec::new();
    let mut second = tokio::time::interval(Duration::from_secs(1));
    let mut calls = 0;
    loop {
        tokio::select! {
            done = clients.join_next() => match done {
                None => break,
                Some(made) => calls += made.expect("every call succeeds"),
            },
            _ = second.tick() => resident.push(lego.resident()),
        }
    }
    assert_eq!(mock.asked(), calls, "calls that the upstream got");
    lego.end();
    let records = check_records(dir, shape);
    assert_eq!(records, calls, "records and calls");
    println!("{calls} calls in {:.0} s, {records} records", time.as_secs_f64());
    resident
}

async fn calls_until(target: &Target, end: Instant, wanted: (usize, u32)) -> usize {
    let mut client = Client::new(target);
    let mut calls = 0;
    while Instant::now() < end {
        let Seen { bytes, checksum, .. } = client.call(true).await.expect("a reply");
        assert_eq!((bytes, checksum), wanted, "other bytes");
        calls += 1;
    }
    calls
}

/// The median of a part of the samples: compacting and such make single ones high.
pub fn median(samples: &[u64]) -> u64 {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or(0)
}
