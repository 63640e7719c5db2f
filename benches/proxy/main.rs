//! What the capture proxy costs, and what it holds under load. Everything is on loopback, and every byte is checked.
//!
//! ```text
//! cargo bench --bench proxy                                  # compare: lego, direct, nginx, rllm-model-gateway
//! cargo bench --bench proxy -- compare [ROUNDS [SECONDS]]
//! cargo bench --bench proxy -- streams [STREAMS [TOKENS [TOKENS-AN-EVENT [TOKENS-A-SECOND]]]]
//! cargo bench --bench proxy -- soak [MINUTES [STREAMS]]
//! ```
//! nginx and rllm-model-gateway (`LEGO_BENCH_RLLM`: its path) are compared with where they are installed.
//! `LEGO_BENCH_BINARY`: another lego than the one built with this.

mod client;
mod compare;
mod load;
mod mock;
mod process;

use std::time::Duration;

use mock::Shape;

#[tokio::main]
async fn main() {
    process::raise_open_files();
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let number = |at: usize, default: f64| {
        arguments
            .get(at)
            .map_or(default, |text| text.parse().expect("a number: see the head of benches/proxy/main.rs"))
    };
    let count = |at: usize, default: f64| number(at, default) as usize;
    let dir = tempfile::Builder::new().prefix("lego-bench").tempdir().expect("folder");
    let shape = Shape { tokens: 256, at_once: 1, pace: Duration::ZERO, is_stream: true };
    match arguments.first().map_or("compare", String::as_str) {
        "compare" => {
            let (rounds, time) = (count(1, 5.0), Duration::from_secs_f64(number(2, 4.0)));
            let paced = Shape { tokens: 64, pace: Duration::from_millis(20), ..shape };
            let whole = Shape { is_stream: false, ..shape };
            compare::compare("a token each 20 ms", 64, paced, rounds, time, &dir.path().join("paced")).await;
            compare::compare("as fast as it goes", 64, shape, rounds, time, &dir.path().join("flat")).await;
            compare::compare("not streamed", 64, whole, rounds, time, &dir.path().join("whole")).await;
        }
        "streams" => {
            let rate = number(4, 0.0);
            let at_once = count(3, 1.0);
            let pace =
                if rate > 0.0 { Duration::from_secs_f64(at_once as f64 / rate) } else { Duration::ZERO };
            let shape = Shape { tokens: count(2, 256.0), at_once, pace, ..shape };
            load::streams(count(1, 5000.0), shape, dir.path()).await;
        }
        "soak" => {
            let paced = Shape { pace: Duration::from_millis(20), ..shape };
            let time = Duration::from_secs_f64(number(1, 30.0) * 60.0);
            let resident = load::soak(count(2, 256.0), paced, time, dir.path()).await;
            let tenth = resident.len() / 10 + 1;
            let sixth = (resident.len() / 6).saturating_sub(tenth / 2);
            let early = load::median(&resident[sixth..(sixth + tenth).min(resident.len())]);
            let late = load::median(&resident[resident.len() - tenth..]);
            println!(
                "resident: {:.1} MB around a sixth of the time, {:.1} MB in the last tenth; at most {:.1} MB",
                early as f64 / 1e6,
                late as f64 / 1e6,
                resident.iter().max().copied().unwrap_or(0) as f64 / 1e6
            );
        }
        other => panic!("no load {other:?}: see the head of benches/proxy/main.rs"),
    }
}
