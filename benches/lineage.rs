//! Lineages: how long they take against the length of a session, and what share of sampled tokens they train beside
//! what other ways of making rows train of the same calls.
//!
//! `cargo bench --bench lineage [-- CAPTURES...]`: shares of the captures that are named too, a folder or a run's each.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lego::capture::{Query, Reader};
use lego::config::{Samples, TrainedLineages};
use lego::record::{Call, CallId, CallKind};
use lego::trajectory::{Heard, LineageKind, lineages, samples, table};

#[path = "../tests/common/calls.rs"]
mod calls;
#[path = "../tests/common/histories.rs"]
mod histories;
#[path = "../tests/common/render.rs"]
mod render;

/// Turns of the sessions that are timed, and tokens at their ends.
const TURNS: usize = 200;
const LENGTHS: [usize; 5] = [20_000, 50_000, 200_000, 500_000, 1_000_000];
/// The best of so many runs counts.
const RUNS: u32 = 5;

/// A session of `turns` calls, the last of which ends after `tokens`: a fifth of each turn is sampled. With `forks`,
/// every tenth call is asked again with another end.
fn session(turns: usize, tokens: usize, forks: bool) -> Vec<Arc<Call>> {
    let ids: Vec<u32> = (0..tokens as u32).map(|at| at.wrapping_mul(2_654_435_761) >> 13).collect();
    let turn = tokens / turns;
    let mut made = vec![];
    for at in 1..=turns {
        let (end, sampled) = (at * turn, (turn / 5).max(1));
        let mut one = calls::call("s", &ids[..end - sampled], &ids[end - sampled..end]);
        (one.client_request, one.response) = (None, None);
        one.received_at += at as i64;
        if forks && at % 10 == 0 {
            let mut other = calls::call("s", &[&ids[..end - sampled], &[7]].concat(), &[8; 16]);
            (other.client_request, other.response) = (None, None);
            other.received_at = one.received_at;
            made.push(Arc::new(other));
        }
        made.push(Arc::new(one));
    }
    made
}

fn best<T>(mut work: impl FnMut() -> T) -> Duration {
    let timed = |_| {
        let started = Instant::now();
        std::hint::black_box(work());
        started.elapsed()
    };
    (0..RUNS).map(timed).min().unwrap_or_default()
}

fn speed() {
    println!("sessions of {TURNS} calls; prompts: the ids of all of them together; one core, best of {RUNS}");
    println!(
        "{:>10} {:>13} {:>6} {:>12} {:>22} {:>12}",
        "tokens", "prompts", "forks", "lineages ms", "of prompts, tokens/s", "samples ms"
    );
    for tokens in LENGTHS {
        for forks in [false, true] {
            let calls = session(TURNS, tokens, forks);
            let prompts: usize =
                calls.iter().filter_map(|call| call.prompt_token_ids.as_ref()).map(Vec::len).sum();
            let built = best(|| lineages(&calls));
            let found = lineages(&calls);
            let sampled = best(|| samples(&found, None, &Samples::default()));
            println!(
                "{tokens:>10} {prompts:>13} {:>6} {:>12.2} {:>22.0} {:>12.2}",
                if forks { "yes" } else { "no" },
                built.as_secs_f64() * 1e3,
                prompts as f64 / built.as_secs_f64(),
                sampled.as_secs_f64() * 1e3
            );
        }
    }
}

/// What one way makes of some calls.
#[derive(Default, Clone, Copy)]
struct Way {
    trained: u64,
    rows: u64,
    /// Of all rows, context included.
    tokens: u64,
}

impl std::ops::AddAssign for Way {
    fn add_assign(&mut self, other: Self) {
        self.trained += other.trained;
        self.rows += other.rows;
        self.tokens += other.tokens;
    }
}

const WAYS: [&str; 5] = ["lego (all)", "main agent's", "main chain", "longest chain", "row a request"];

fn of_samples(calls: &[Arc<Call>], lineages_of: TrainedLineages, only: impl Fn(&str, u32) -> bool) -> Way {
    let found = lineages(calls);
    let built = samples(&found, None, &Samples { lineages: lineages_of, ..Samples::default() });
    built.check(calls).expect("every token in one bucket");
    let session =
        |call: CallId| calls.iter().find(|one| one.call_id == call).expect("given").session_id.as_str();
    let mut way = Way::default();
    for sample in &built.samples {
        if only(session(sample.call_spans[0].choice.call_id), sample.lineage_id) {
            let trained = sample.sampled_tokens() as u64;
            way += Way { trained, rows: 1, tokens: sample.token_ids.len() as u64 };
        }
    }
    way
}

/// Sampled tokens of the calls of some sessions that an agent made, and what each way trains of them.
fn ways(calls: &[Arc<Call>]) -> (u64, [Way; 5]) {
    let found = lineages(calls);
    // The first lineage of the main agent: what a builder has that ends where its chain breaks.
    let mut first = BTreeSet::new();
    for session in found.sessions() {
        let main =
            table(session, Heard::default(), None).into_iter().find(|row| row.kind == LineageKind::Main);
        first.extend(main.map(|row| (row.session_id.to_string(), row.index)));
    }
    let all = |_: &str, _: u32| true;
    let mut requests = Way::default();
    for call in calls {
        // Alone, a call is the one that counts.
        let alone = [Arc::clone(call)];
        let is_one = calls.iter().filter(|other| other.call_id == call.call_id).count() == 1;
        assert!(is_one, "calls with several choices are not compared here");
        requests += of_samples(&alone, TrainedLineages::All, all);
    }
    let is_agents = |call: &&Arc<Call>| matches!(call.kind, CallKind::Policy | CallKind::Unknown);
    let sampled =
        calls.iter().filter(is_agents).filter_map(|call| call.sampled_ids()).map(|ids| ids.len() as u64);
    let by = [
        of_samples(calls, TrainedLineages::All, all),
        of_samples(calls, TrainedLineages::Main, all),
        of_samples(calls, TrainedLineages::All, |session, index| {
            first.contains(&(session.to_owned(), index))
        }),
        of_samples(calls, TrainedLineages::Longest, all),
        requests,
    ];
    (sampled.sum(), by)
}

fn print(name: &str, sampled: u64, ways: &[Way; 5]) {
    println!("\n{name}: {sampled} sampled tokens of agents");
    println!("{:>16} {:>9} {:>7} {:>8} {:>14}", "", "trained", "share", "rows", "tokens in rows");
    for (name, way) in WAYS.iter().zip(ways) {
        let share = 100.0 * way.trained as f64 / sampled.max(1) as f64;
        println!("{name:>16} {:>9} {share:>6.1}% {:>8} {:>14}", way.trained, way.rows, way.tokens);
    }
}

fn shares_of_histories() {
    for rendering in ["as_is", "qwen3", "drop_all"] {
        let (mut sampled, mut sums, mut sessions) = (0, [Way::default(); 5], 0);
        for tree in histories::trees() {
            if tree.tree["synthetic"] == true || tree.tree["tokens"].get(rendering).is_none() {
                continue;
            }
            let calls: Vec<Arc<Call>> =
                tree.calls().iter().map(|call| Arc::new(tree.call(call, rendering))).collect();
            let (of, ways) = ways(&calls);
            sampled += of;
            sums.iter_mut().zip(ways).for_each(|(sum, way)| *sum += way);
            sessions += 1;
        }
        print(&format!("{sessions} recorded histories, template {rendering}"), sampled, &sums);
    }
}

fn shares_of_captures(dir: &Path) {
    let inside = dir.join("captures");
    let dir = if inside.is_dir() { &inside } else { dir };
    let reader = Reader::open(dir, Query { without_routing: true, ..Query::default() }).expect("captures");
    let mut calls: Vec<Arc<Call>> = reader.map(|call| Arc::new(call.expect("a call"))).collect();
    calls.sort_by(|a, b| a.session_id.cmp(&b.session_id));
    let (mut sampled, mut sums, mut sessions) = (0, [Way::default(); 5], 0);
    for session in calls.chunk_by(|a, b| a.session_id == b.session_id) {
        let (of, ways) = ways(session);
        sampled += of;
        sums.iter_mut().zip(ways).for_each(|(sum, way)| *sum += way);
        sessions += 1;
    }
    print(&format!("{sessions} sessions of {}", dir.display()), sampled, &sums);
}

fn main() {
    // Cargo adds a switch of its own.
    let named: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    speed();
    shares_of_histories();
    named.iter().for_each(|dir| shares_of_captures(Path::new(dir)));
}
