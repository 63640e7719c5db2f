//! lego beside others in interleaved rounds: what a token costs, and what it is late by.

use std::path::Path;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::client::{Client, Target};
use super::mock::{Mock, Shape};
use super::process::Process;

struct Round {
    peer: usize,
    cpu_us_a_token: f64,
    ttft_us: f64,
    gap_us: f64,
    calls_a_second: f64,
}

/// Runs one load against every peer, `rounds` times, and prints the medians side by side.
pub async fn compare(name: &str, clients: usize, shape: Shape, rounds: usize, time: Duration, dir: &Path) {
    let mock = Mock::start(shape).await;
    let url = mock.url();
    let folder = |name: &str| {
        let folder = dir.join(name);
        std::fs::create_dir_all(&folder).expect("folder");
        folder
    };
    let direct = Target { address: mock.address.to_string(), path: "/v1/chat/completions".to_owned() };
    let mut peers: Vec<(&str, Target, Option<Process>)> = vec![("direct", direct, None)];
    let others = [
        ("nginx", Process::nginx(&url, &folder("nginx")).await),
        ("rllm-model-gateway", Process::rllm(&url, &folder("rllm")).await),
        ("lego", Some(Process::lego(&url, &folder("lego"), "power_loss"))),
        ("lego, no sync", Some(Process::lego(&url, &folder("unsynced"), "process_kill"))),
    ];
    for (peer, process) in others {
        match process {
            Some(process) => peers.push((peer, process.target.clone(), Some(process))),
            None => println!("{peer}: not installed"),
        }
    }
    let mut seen = Vec::new();
    for _ in 0..rounds {
        for (peer, (_, target, process)) in peers.iter().enumerate() {
            let round = round(target, process.as_ref(), &mock, clients, shape, time).await;
            let round = round.unwrap_or_else(|error| panic!("{}: {error}", peers[peer].0));
            seen.push(Round { peer, ..round });
        }
    }
    println!(
        "\n{name}: {clients} clients, {} tokens a reply, {rounds} rounds of {} s",
        shape.tokens,
        time.as_secs()
    );
    println!("| peer | CPU µs/token | x nginx | x lego | TTFT ms | + | gap p50 ms | + | calls/s |");
    println!("|---|---|---|---|---|---|---|---|---|");
    let of = |peer: usize, value: fn(&Round) -> f64| {
        let mut values: Vec<f64> = seen.iter().filter(|round| round.peer == peer).map(value).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let cpu = |name: &str| {
        peers.iter().position(|(peer, ..)| *peer == name).map(|peer| of(peer, |round| round.cpu_us_a_token))
    };
    let ratio = |value: f64, of: Option<f64>| of.map_or("-".to_owned(), |of| format!("{:.2}", value / of));
    for (peer, (name, ..)) in peers.iter().enumerate() {
        let (ttft, gap) = (of(peer, |round| round.ttft_us) / 1e3, of(peer, |round| round.gap_us) / 1e3);
        let used = of(peer, |round| round.cpu_us_a_token);
        println!(
            "| {name} | {used:.2} | {} | {} | {ttft:.2} | {:+.2} | {gap:.3} | {:+.3} | {:.0} |",
            ratio(used, cpu("nginx")),
            ratio(used, cpu("lego")),
            ttft - of(0, |round| round.ttft_us) / 1e3,
            gap - of(0, |round| round.gap_us) / 1e3,
            of(peer, |round| round.calls_a_second)
        );
    }
}

async fn round(
    target: &Target,
    process: Option<&Process>,
    mock: &Mock,
    clients: usize,
    shape: Shape,
    time: Duration,
) -> Result<Round, String> {
    let cpu = process.map(Process::cpu);
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..clients {
        let (target, wanted) = (target.clone(), mock.wanted());
        tasks.spawn(async move {
            let mut client = Client::timed(&target);
            let mut seen = Vec::new();
            while started.elapsed() < time {
                let call = client.call(shape.is_stream).await?;
                // rllm takes ids out of what it passes on.
                assert!(target.path.starts_with("/sessions") || (call.bytes, call.checksum) == wanted);
                seen.push(call);
            }
            Ok::<_, String>(seen)
        });
    }
    let calls = tasks.join_all().await.into_iter().collect::<Result<Vec<_>, _>>()?.concat();
    let wall = started.elapsed();
    let used = process.zip(cpu).map_or(Duration::ZERO, |(process, before)| process.cpu() - before);
    let tokens = (calls.len() * shape.tokens) as f64;
    let p50 = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(0.0)
    };
    Ok(Round {
        peer: 0,
        cpu_us_a_token: used.as_secs_f64() * 1e6 / tokens,
        ttft_us: p50(calls.iter().map(|call| call.ttft.as_secs_f64() * 1e6).collect()),
        gap_us: p50(calls.iter().flat_map(|call| &call.gaps).map(|gap| gap.as_secs_f64() * 1e6).collect()),
        calls_a_second: calls.len() as f64 / wall.as_secs_f64(),
    })
}
