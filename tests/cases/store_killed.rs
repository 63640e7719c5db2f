//! kill -9 of the real proxy under load: what a client was given to act on is in the store, once.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use lego::capture::{Finding, Query, Reader, Watch, verify};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::mock::{Mock, Part, Script};
use crate::process::Process;
use crate::setup::{client, request};
use crate::speech;
use crate::support::{chunk, done, finish, stream, usage};

/// Ids of calls whose held event a client saw, and how many there are.
#[derive(Clone)]
struct Log {
    seen: Arc<Mutex<BTreeSet<String>>>,
    count: watch::Sender<usize>,
}

/// Whether a client may act on a call of which it has got this.
fn may_act(route: &str, text: &str) -> bool {
    match route {
        "messages" => {
            let ended_tool = text
                .split_once(r#""type":"tool_use""#)
                .is_some_and(|(_, rest)| rest.contains("event: content_block_stop\n"));
            ended_tool || text.contains("event: message_delta\n")
        }
        "responses" => text.contains("event: response.output_item.done\n"),
        _ => text.contains(r#""finish_reason":""#),
    }
}

/// Calls one after another until the proxy is gone.
async fn call_on(url: String, route: &'static str, body: Value, log: Log) {
    let client = client();
    loop {
        let request = client.post(&url).header("content-type", "application/json").body(body.to_string());
        let Ok(mut response) = request.send().await else { return };
        assert_eq!(response.status(), 200);
        let id = response.headers()["x-lego-call-id"].to_str().expect("text").to_owned();
        let (mut text, mut is_told) = (Vec::new(), false);
        let is_whole = loop {
            match response.chunk().await {
                Err(_) => break false,
                Ok(None) => break true,
                Ok(Some(piece)) => text.extend_from_slice(&piece),
            }
            let is_stream = body["stream"] == true;
            if is_stream && !is_told && may_act(route, &String::from_utf8_lossy(&text)) {
                is_told = true;
                log.tell(&id);
            }
        };
        if is_whole && !is_told {
            log.tell(&id);
        }
    }
}

impl Log {
    fn tell(&self, id: &str) {
        self.seen.lock().expect("log").insert(id.to_owned());
        self.count.send_modify(|count| *count += 1);
    }
}

/// Two tool calls: a client may act on the first while the second is being sampled.
fn two_tools() -> Script {
    let call = |index: u32| {
        let function = json!({"name": "view", "arguments": format!(r#"{{"path": "{}"}}"#, "a".repeat(300))});
        let call = json!([{"index": index, "id": format!("call_{index}"), "type": "function", "function": function}]);
        chunk(json!({"tool_calls": call}), None)
    };
    let parts: Vec<Part> = vec![call(0), call(1), finish("tool_calls"), usage(3, 5), done()];
    Script { bytes_per_write: Some(50), ..stream(parts) }
}

fn text() -> Script {
    Script { bytes_per_write: Some(97), ..Script::default() }
}

struct Found(Vec<String>);

impl Watch for Found {
    fn found(&mut self, finding: &Finding) -> ControlFlow<()> {
        self.0.push(format!("{} {}: {}", finding.invariant, finding.file.display(), finding.found));
        ControlFlow::Continue(())
    }

    fn progress(&mut self, _: u64, _: u64) {}
}

/// What `lego capture verify` finds in the files, whatever the records say.
fn findings(dir: &Path) -> Vec<String> {
    let mut found = Found(vec![]);
    verify(dir, None, &mut found).expect("readable");
    let of_files = ["journal_", "parquet_", "record_readable", "schema_version", "day ", "once "];
    found.0.retain(|found| of_files.iter().any(|invariant| found.starts_with(invariant)));
    found.0
}

/// Every call that the clients saw is there once, and none twice.
fn check(dir: &Path, log: &Log, round: usize) {
    let mut stored: BTreeMap<String, u32> = BTreeMap::new();
    let mut reader = Reader::open(dir, Query { without_bodies: true, ..Query::default() }).expect("readable");
    for call in reader.by_ref() {
        *stored.entry(call.expect("whole").call_id.to_string()).or_default() += 1;
    }
    assert_eq!(reader.skipped(), [] as [String; 0], "round {round}");
    let twice: Vec<_> = stored.iter().filter(|(_, count)| **count > 1).collect();
    assert!(twice.is_empty(), "round {round}: {twice:?}");
    let seen = log.seen.lock().expect("log");
    let lost: Vec<_> = seen.iter().filter(|id| !stored.contains_key(*id)).collect();
    assert!(lost.is_empty(), "round {round}: {} of {} are lost: {lost:?}", lost.len(), seen.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_any_moment_the_proxy_has_stored_what_its_clients_could_act_on() {
    let is_long = std::env::var_os("LEGO_TEST_FULL").is_some();
    let kills = if is_long { 1000 } else { 50 };
    let mock = Mock::start(text()).await;
    let log = Log { seen: Arc::default(), count: watch::Sender::new(0) };
    let mut folder = tempfile::tempdir().expect("temporary folder");
    let (mut torn, mut dice) = (0, 7_u64);
    for round in 0..kills {
        mock.set(if round % 2 == 0 { text() } else { two_tools() });
        let process = Process::start_in(folder, &mock.url(), &json!({}), &[]).await;
        // What was running is recorded by now, and what was written in part was said.
        if torn > 0 {
            process.says("torn tail of the journal cut off").await;
        }
        let dir = process.folder.path().join("captures");
        let is_looked_at = !is_long || round % 25 == 0;
        if is_looked_at {
            check(&dir, &log, round);
        }
        let mut clients = JoinSet::new();
        for (route, body) in [
            ("chat/completions", request(true)),
            ("messages", speech::messages(true)),
            ("responses", speech::responses(true)),
            ("chat/completions", request(false)),
            ("messages", speech::messages(true)),
        ] {
            // The mock answers with its events only where it is asked for a stream.
            clients.spawn(call_on(process.url(route), route, body, log.clone()));
        }
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let count = *log.count.borrow() + 1 + (dice >> 33) as usize % 60;
        let mut counted = log.count.subscribe();
        counted.wait_for(|now| *now >= count).await.expect("calls are answered");
        process.signal(Signal::SIGKILL);
        while let Some(ended) = clients.join_next().await {
            ended.expect("a client saw a reply that is wrong");
        }
        folder = process.end().await.2;
        torn = 0;
        if is_looked_at {
            let found = findings(&folder.path().join("captures"));
            let (tails, other): (Vec<_>, Vec<_>) =
                found.into_iter().partition(|found| found.starts_with("journal_torn_tail"));
            assert_eq!(other, [] as [String; 0], "round {round}");
            torn = tails.iter().filter(|tail| !tail.contains("/drafts/")).count();
        }
    }
    let process = Process::start_in(folder, &mock.url(), &json!({}), &[]).await;
    process.signal(Signal::SIGTERM);
    let (code, said, folder) = process.end().await;
    assert_eq!(code, Some(0), "{said}");
    let dir = folder.path().join("captures");
    check(&dir, &log, kills);
    assert_eq!(findings(&dir), [] as [String; 0]);
    println!("{} calls seen by clients, {kills} kills", log.seen.lock().expect("log").len());
}
