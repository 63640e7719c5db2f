//! What a sandbox costs: make one, run /bin/true, end it; and one more program in a running one.
//!
//! `cargo bench --bench sandbox [-- SECONDS]`

use std::sync::Arc;
use std::time::{Duration, Instant};

use lego::sandbox::{Backend, Exec, Limits, Options, Spec, select_with};

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
#[tokio::main]
async fn main() {
    let seconds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(3);
    let options = Options { binary: env!("CARGO_BIN_EXE_lego").into(), ..Options::default() };
    let backend = select_with(&options).await.expect("a sandbox can be made here");
    println!("{}", backend.capabilities().mode);
    for at_once in [1, 8, 32] {
        measure(&backend, at_once, Duration::from_secs(seconds)).await;
    }
    let mut sandbox = backend.create(spec()).await.expect("create");
    let started = Instant::now();
    const EXECS: u32 = 300;
    for _ in 0..EXECS {
        sandbox.exec(run_true()).await.expect("exec");
    }
    println!("exec of /bin/true in a running sandbox: {:.2} ms", millis(started.elapsed() / EXECS));
    sandbox.stop().await.expect("stop");
}

/// Keeps `at_once` sandboxes in the making for `time`.
async fn measure(backend: &Arc<dyn Backend>, at_once: usize, time: Duration) {
    let cpu = cpu_time();
    let started = Instant::now();
    let tasks: Vec<_> = (0..at_once)
        .map(|_| {
            let backend = Arc::clone(backend);
            tokio::spawn(async move {
                let mut each = Vec::new();
                while started.elapsed() < time {
                    let begun = Instant::now();
                    let mut sandbox = backend.create(spec()).await.expect("create");
                    let exit = sandbox.exec(run_true()).await.expect("exec");
                    assert_eq!(exit.evidence.code, Some(0));
                    sandbox.stop().await.expect("stop");
                    each.push(begun.elapsed());
                }
                each
            })
        })
        .collect();
    let mut each = Vec::new();
    for task in tasks {
        each.extend(task.await.expect("task"));
    }
    let wall = started.elapsed();
    each.sort();
    let count = each.len() as u32;
    println!(
        "{at_once:>2} at once: median {:.1} ms, p95 {:.1} ms, wall per sandbox {:.2} ms, CPU of the whole machine per sandbox {:.2} ms",
        millis(each[each.len() / 2]),
        millis(each[each.len() * 95 / 100]),
        millis(wall / count),
        millis((cpu_time() - cpu) / count),
    );
}

fn spec() -> Spec {
    let limits = Limits {
        memory_bytes: Some(256 << 20),
        max_processes: Some(64),
        tmp_bytes: Some(64 << 20),
        workspace_bytes: None,
        cpu_seconds: Some(60),
    };
    Spec { mounts: Vec::new(), listen_port: Some(18080), limits }
}

fn run_true() -> Exec {
    Exec {
        argv: vec!["/bin/true".into()],
        env: Vec::new(),
        cwd: "/".into(),
        stdin: Vec::new(),
        max_output_bytes: 1024,
        timeout: Duration::from_secs(60),
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Busy time of all processors since boot: the kernel's own work for a sandbox is not in any process's account.
fn cpu_time() -> Duration {
    const TICK_MS: u64 = 10;
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields: Vec<u64> =
        text.lines().next().unwrap_or("").split_whitespace().filter_map(|field| field.parse().ok()).collect();
    // user, nice, system, then idle and iowait, then irq, softirq, steal
    let busy = fields.iter().take(3).chain(fields.iter().skip(5).take(2)).sum::<u64>();
    Duration::from_millis(busy * TICK_MS)
}
