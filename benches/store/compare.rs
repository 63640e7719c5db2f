//! The same records in lego's store, as lines of JSON and in SQLite, in turn.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Command;

use lego::capture::{Query, Reader, Writer, WriterOptions};
use lego::record::{Call, CallSink, LayerAxis, Routing, RoutingDtype, RoutingShape};
use nix::sys::resource::{UsageWho, getrusage};

use crate::sizes;
use crate::trial::{Reply, trial};

/// Calls that are appended, or committed, at a time.
const BATCH: usize = 64;
// A mixture of experts.
const LAYERS: u32 = 4;
const TOP_K: u32 = 2;
const EXPERTS: u32 = 16;

/// What one way of keeping calls came to.
#[derive(Default, Clone)]
struct Figures {
    /// CPU seconds until all is acknowledged.
    write: f64,
    /// CPU seconds until the store is closed, all of it in Parquet.
    closed: f64,
    /// CPU seconds for ids and log-probs of all calls.
    read: f64,
    bytes: u64,
}

/// CPU seconds of this process.
fn cpu() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("usage");
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    seconds(usage.user_time()) + seconds(usage.system_time())
}

fn size(dir: &Path, ending: &str) -> u64 {
    sizes::files(dir, ending).iter().map(|file| fs::metadata(file).expect("a file").len()).sum()
}

fn sampled(calls: &[Call]) -> u64 {
    calls.iter().map(|call| call.sampled_ids().map_or(0, <[u32]>::len) as u64).sum()
}

/// Trials side by side, as a proxy sees them.
fn records(trials: usize, turns: usize, tokens: usize) -> Vec<Call> {
    let reply = Reply { tokens, bytes_read: 3_600 };
    let trials: Vec<Vec<Call>> = (0..trials).map(|n| trial(&format!("trial-{n}"), turns, reply)).collect();
    (0..turns).flat_map(|turn| trials.iter().map(move |trial| trial[turn].clone())).collect()
}

/// The rows that each call brings; those before are its session's.
fn with_routing(calls: &[Call]) -> Vec<Call> {
    let mut state = 7_u64;
    let mut expert = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) % u64::from(EXPERTS)) as u32
    };
    let mut last: std::collections::HashMap<String, (u32, lego::record::ChoiceId)> =
        std::collections::HashMap::new();
    let mut routed = calls.to_vec();
    for call in &mut routed {
        let ids = call.prompt_token_ids.as_ref().map_or(0, Vec::len)
            + call.completion_token_ids.as_ref().map_or(0, Vec::len);
        let before = last.get(call.session_id.as_str()).copied();
        let (start, rows) = (before.map_or(0, |(rows, _)| rows), ids as u32 - 1);
        let shape = RoutingShape {
            start,
            rows: rows - start,
            layers: LAYERS,
            layer_axis: LayerAxis::MoeOnly,
            top_k: TOP_K,
            dtype: RoutingDtype::U8,
        };
        let experts: Vec<u32> = (0..(rows - start) * LAYERS * TOP_K).map(|_| expert()).collect();
        let routing = Routing::pack(shape, &experts).expect("so many ids");
        call.routing = Some(routing.based_on(before.map(|(_, choice)| choice)));
        last.insert(call.session_id.to_string(), (rows, call.choice()));
    }
    routed
}

fn lego(dir: &Path, calls: &[Call]) -> Figures {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let mut figures = Figures::default();
    let parts: Vec<Vec<Call>> = calls.chunks(BATCH).map(<[Call]>::to_vec).collect();
    runtime.block_on(async {
        let writer = Writer::open(dir, WriterOptions::default()).expect("a free folder");
        let started = cpu();
        for part in parts {
            let appends = part.into_iter().map(|call| writer.append(vec![call]));
            for done in futures_util::future::join_all(appends).await {
                done.expect("room");
            }
        }
        figures.write = cpu() - started;
        writer.close().await;
        figures.closed = cpu() - started;
    });
    figures.bytes = size(dir, "parquet");
    let started = cpu();
    let query = Query { without_bodies: true, without_routing: true, as_stored: true, ..Query::default() };
    let read = Reader::open(dir, query).expect("captures").map(|call| call.expect("a call"));
    let tokens: u64 = read
        .map(|call| {
            assert_eq!(
                call.completion_token_ids.as_ref().map(Vec::len),
                call.completion_logprobs.as_ref().map(Vec::len)
            );
            call.sampled_ids().map_or(0, <[u32]>::len) as u64
        })
        .sum();
    figures.read = cpu() - started;
    assert_eq!(tokens, sampled(calls));
    figures
}

/// Two columns of the files by Arrow alone, as a program that needs no calls reads them.
fn arrow(dir: &Path, tokens: u64) -> f64 {
    use arrow::array::{Array, AsArray as _};
    use parquet::arrow::ProjectionMask;
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
    let started = cpu();
    let mut found = 0;
    for file in sizes::files(dir, "parquet") {
        let builder =
            ParquetRecordBatchReaderBuilder::try_new(File::open(file).expect("a file")).expect("Parquet");
        let names = ["completion_token_ids", "completion_logprobs"];
        let mask = ProjectionMask::columns(builder.parquet_schema(), names);
        for batch in builder.with_projection(mask).with_batch_size(1024).build().expect("columns") {
            let batch = batch.expect("a batch");
            let lists = batch.columns().iter().map(|column| column.as_list::<i32>().values().len() as u64);
            found += lists.sum::<u64>();
        }
    }
    assert_eq!(found, 2 * tokens);
    cpu() - started
}

fn json(path: &Path, calls: &[Call]) -> Figures {
    let mut figures = Figures::default();
    let started = cpu();
    let mut file = File::create(path).expect("a file");
    for part in calls.chunks(BATCH) {
        let mut lines = vec![];
        for call in part {
            serde_json::to_writer(&mut lines, call).expect("JSON");
            lines.push(b'\n');
        }
        file.write_all(&lines).expect("room");
        file.sync_data().expect("synced");
    }
    figures.write = cpu() - started;
    figures.closed = figures.write;
    figures.bytes = fs::metadata(path).expect("a file").len();
    let started = cpu();
    let lines = BufReader::with_capacity(1 << 20, File::open(path).expect("a file")).lines();
    let tokens: u64 = lines
        .map(|line| {
            let call: Call = serde_json::from_str(&line.expect("a line")).expect("a call");
            call.sampled_ids().map_or(0, <[u32]>::len) as u64
        })
        .sum();
    figures.read = cpu() - started;
    assert_eq!(tokens, sampled(calls));
    figures
}

fn sqlite(dir: &Path, lines: &Path) -> Option<Figures> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/store/sqlite.py");
    let database = dir.join("calls.sqlite");
    let run = |work: &str| {
        let output = Command::new("python3")
            .arg(&script)
            .arg(work)
            .arg(&database)
            .arg(lines)
            .arg(BATCH.to_string())
            .output()
            .ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    };
    let write = run("write")?;
    let bytes = fs::metadata(&database).ok()?.len();
    Some(Figures { write, closed: write, read: run("read")?, bytes })
}

/// Prints the figures of all in turn, medians of `rounds`.
pub fn compare(rounds: usize, trials: usize, turns: usize, tokens: usize) {
    let calls = records(trials, turns, tokens);
    let routed = with_routing(&calls);
    let count = sampled(&calls);
    let prompt: u64 = calls.iter().filter_map(Call::prompt_tokens).sum();
    println!("{} calls: {count} sampled tokens, {prompt} of prompts", calls.len());
    let mut found: Vec<(&str, Vec<Figures>)> =
        vec![("lego", vec![]), ("lego, routing", vec![]), ("JSON lines", vec![]), ("SQLite", vec![])];
    let (mut columns, mut parquet, mut routing) = (0, vec![], 0);
    for _ in 0..rounds {
        let dir = tempfile::Builder::new().prefix("lego-bench").tempdir().expect("folder");
        let at = |name: &str| dir.path().join(name);
        found[0].1.push(lego(&at("lego"), &calls));
        columns = sizes::of_tokens(&sizes::columns(&at("lego")));
        parquet.push(arrow(&at("lego"), count));
        found[1].1.push(lego(&at("routed"), &routed));
        routing = sizes::columns(&at("routed"))["routing"];
        found[2].1.push(json(&at("calls.jsonl"), &calls));
        found[3].1.extend(sqlite(dir.path(), &at("calls.jsonl")));
    }
    let median = |figures: &[Figures], of: fn(&Figures) -> f64| {
        let mut values: Vec<f64> = figures.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    println!(
        "medians of {rounds} rounds      tokens written a CPU s  with Parquet made  read back a CPU s  bytes a token"
    );
    for (name, figures) in found.iter().filter(|(_, figures)| !figures.is_empty()) {
        let rate = |of| count as f64 / median(figures, of);
        println!(
            "{name:<24} {:>24.0} {:>18.0} {:>18.0} {:>14.1}",
            rate(|figures| figures.write),
            rate(|figures| figures.closed),
            rate(|figures| figures.read),
            median(figures, |figures| figures.bytes as f64) / count as f64
        );
    }
    parquet.sort_by(f64::total_cmp);
    println!(
        "ids and log-probs of the Parquet files by Arrow alone: {:.0} tokens a CPU s",
        count as f64 / parquet[rounds / 2]
    );
    println!("ids and log-probs: {:.2} bytes a sampled token", columns as f64 / count as f64);
    let rows: u64 =
        routed.iter().filter_map(|call| Some(u64::from(call.routing.as_ref()?.shape().rows))).sum();
    let packed = rows as f64 * f64::from(LAYERS * TOP_K) * f64::from(EXPERTS.ilog2()) / 8.0;
    println!(
        "routing: {:.2} bytes a row, {:.2} x bit-packed",
        routing as f64 / rows as f64,
        routing as f64 / packed
    );
}
