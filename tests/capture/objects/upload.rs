//! Whatever the storage does and whenever lego dies: every call is read exactly once.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper::Method;
use lego::record::CallId;

use super::server::{Fault, Server};
use super::writer::{Process, lego, parquet, read};

/// Everything must happen well within this.
const PATIENCE: Duration = Duration::from_secs(60);

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("folder");
    let dir = folder.path().join("local");
    (folder, dir)
}

/// Waits until `is` is true.
async fn until(what: &str, mut is: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !is().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
}

async fn exactly(server: &Server, prefix: &str, dir: &Path, acked: &[CallId], when: &str) {
    let mut found = read(server, prefix, dir).await;
    let mut acked = acked.to_vec();
    found.sort();
    acked.sort();
    assert_eq!(found, acked, "{when}");
}

/// Nothing is left on the machine, and all that is in the bucket is what was acknowledged.
async fn all_there(server: &Server, prefix: &str, dir: &Path, acked: &[CallId], when: &str) {
    assert_eq!(parquet(dir), [] as [PathBuf; 0], "{when}");
    assert_eq!(std::fs::read_dir(dir.join("journal")).expect("folder").count(), 0, "{when}");
    exactly(server, prefix, &dir.with_extension("elsewhere"), acked, when).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn calls_go_to_the_bucket_and_are_read_from_anywhere() {
    for scheme in ["s3", "gs"] {
        go_and_are_read(Server::of(scheme).await).await;
    }
}

async fn go_and_are_read(server: Server) {
    let (_folder, dir) = folder();
    let mut process = Process::start(&server, "runs/a", &dir);
    let mut acked = process.ask("append s 40 0");
    exactly(&server, "runs/a", &dir, &acked, "while it writes").await;
    until("the first file is there", async || !server.keys().await.is_empty()).await;
    exactly(&server, "runs/a", &dir, &acked, "half of it uploaded").await;
    acked.extend(process.ask("append t 3 0"));
    acked.extend(process.ask(BIG));
    assert_eq!(process.close(), [] as [String; 0]);
    all_there(&server, "runs/a", &dir, &acked, "at the end").await;
    for key in server.keys().await {
        let is_named =
            key.starts_with("runs/a/date=") && key.contains("/calls-0") && key.ends_with(".parquet");
        assert!(is_named, "{key}");
    }
    let url = server.url("runs/a");
    for command in ["verify", "ledger"] {
        let output = lego(&server, &dir, &[command, &url]).await;
        assert!(output.status.success(), "{output:?}");
    }
    // The next writer's numbers go on.
    let mut process = Process::start(&server, "runs/a", &dir);
    acked.extend(process.ask("append s 1 0"));
    process.close();
    let keys = server.keys().await;
    let number =
        |key: &String| key.split("/calls-").nth(1).expect("a name")[..8].parse::<u64>().expect("a number");
    let mut numbers: Vec<u64> = keys.iter().map(number).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (1..=keys.len() as u64).collect::<Vec<_>>());
    exactly(&server, "runs/a", &dir, &acked, "two writers").await;
}

/// Longer than what is sent at once.
const BIG: &str = "big s 20000000";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_fault_costs_time_alone() {
    let faults = [
        Fault::Internal,
        Fault::SlowDown,
        Fault::DropBefore,
        Fault::DropAfter,
        Fault::Truncate,
        Fault::TruncateUpload,
        Fault::Late,
    ];
    let runtime = tokio::runtime::Handle::current();
    let tasks = faults.map(|fault| {
        let runtime = runtime.clone();
        tokio::task::spawn_blocking(move || runtime.block_on(cost(fault)))
    });
    for task in tasks {
        task.await.expect("no panic");
    }
}

async fn cost(fault: Fault) {
    let server = Server::start().await;
    for (number, (method, path)) in [
        (Method::PUT, "/calls-"),
        (Method::HEAD, "/calls-"),
        (Method::POST, "uploads"),
        (Method::PUT, "partNumber"),
        (Method::POST, "uploadId"),
    ]
    .into_iter()
    .enumerate()
    {
        if matches!(fault, Fault::Truncate | Fault::TruncateUpload) && method == Method::HEAD {
            continue;
        }
        let (prefix, when) = (format!("f{number}"), format!("{fault:?} of {method} {path}"));
        let (_folder, dir) = folder();
        let before = server.hits();
        server.fail(method, path, 2, fault);
        let mut process = Process::start(&server, &prefix, &dir);
        let mut acked = process.ask("append s 5 0");
        if number >= 2 {
            acked.extend(process.ask(BIG));
        }
        until(&when, async || server.hits() > before).await;
        exactly(&server, &prefix, &dir, &acked, &when).await;
        if !process.close().is_empty() {
            // Patience was short: the next one does it.
            assert_eq!(Process::start(&server, &prefix, &dir).close(), [] as [String; 0], "{when}");
        }
        all_there(&server, &prefix, &dir, &acked, &when).await;
        server.forget();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_etag_tells_that_it_is_there_or_else_the_bytes_read_back() {
    let server = Server::start().await;
    for (prefix, ask) in [("a", "append s 5 0"), ("b", BIG)] {
        for (fault, bytes_back) in [(None, 0..1), (Some(Fault::OtherTag), 1..usize::MAX)] {
            let (_folder, dir) = folder();
            if let Some(fault) = fault {
                server.fail(Method::HEAD, ".parquet", 100, fault);
            }
            let mut process = Process::start(&server, prefix, &dir);
            process.ask(ask);
            server.seen();
            assert_eq!(process.close(), [] as [String; 0]);
            let seen = server.seen().into_iter().filter(|seen| seen.path.contains(".parquet"));
            let (back, there): (Vec<_>, Vec<_>) = seen.partition(|seen| seen.method == Method::GET);
            let back: usize = back.iter().map(|seen| seen.received).sum();
            assert!(bytes_back.contains(&back) && !there.is_empty(), "{prefix} {fault:?}: {back}");
            server.forget();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn kill_9_between_upload_and_delete_doubles_nothing() {
    let server = Server::start().await;
    for (number, (method, path, ask)) in
        [(Method::PUT, "/calls-", "append s 7 0"), (Method::POST, "uploadId", BIG)].into_iter().enumerate()
    {
        let (prefix, (_folder, dir)) = (format!("k{number}"), folder());
        server.gate.send_replace(false);
        server.fail(method, path, 1, Fault::Gate);
        let mut process = Process::start(&server, &prefix, &dir);
        let acked = process.ask(ask);
        let filler = process.ask("append filler 40 0");
        let waiting = server.waiting.clone();
        until("it was uploaded", async || *waiting.borrow() > number).await;
        process.kill();
        server.gate.send_replace(true);
        let acked = [acked, filler].concat();
        assert!(!parquet(&dir).is_empty() && !server.keys().await.is_empty());
        exactly(&server, &prefix, &dir, &acked, "after the kill").await;
        assert_eq!(Process::start(&server, &prefix, &dir).close(), [] as [String; 0]);
        all_there(&server, &prefix, &dir, &acked, "after the next one").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn while_the_bucket_is_away_calls_are_captured_all_the_same() {
    let server = Server::start().await;
    let (_folder, dir) = folder();
    let mut process = Process::start(&server, "x", &dir);
    let mut acked = process.ask("append s 30 0");
    for fault in [Fault::NoBucket, Fault::Denied, Fault::DropBefore] {
        server.outage(Some(fault));
        let before = server.hits();
        acked.extend(process.ask("append s 30 0"));
        until("it is tried", async || server.hits() > before).await;
        server.outage(None);
        exactly(&server, "x", &dir, &acked, "here and there").await;
    }
    server.outage(Some(Fault::SlowDown));
    acked.extend(process.ask("append s 30 0"));
    let left = process.close().join("; ");
    assert!(left.contains("503 Service Unavailable") && left.contains("files"), "{left}");
    server.outage(None);
    exactly(&server, "x", &dir, &acked, "some of it waits").await;
    assert_eq!(Process::start(&server, "x", &dir).close(), [] as [String; 0]);
    all_there(&server, "x", &dir, &acked, "all of it there").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn another_object_of_the_name_is_never_replaced() {
    let server = Server::start().await;
    let (_folder, dir) = folder();
    let mut process = Process::start(&server, "x", &dir);
    server.outage(Some(Fault::Internal));
    let mut acked = process.ask("append s 5 0");
    process.close();
    server.outage(None);
    let [file] = &parquet(&dir)[..] else { panic!("{:?}", parquet(&dir)) };
    let rest = file.strip_prefix(&dir).expect("inside").to_str().expect("text").to_owned();
    let key = format!("x/{rest}");
    // As long as the file is, so that only its bytes tell.
    let mut other = std::fs::read(file).expect("a file");
    other[100] ^= 1;
    for body in [other.clone(), b"short".to_vec()] {
        server.put(&key, body.clone()).await;
        let mut process = Process::start(&server, "x", &dir);
        acked.extend(process.ask("append s 1 0"));
        let left = process.close().join("; ");
        assert!(left.contains("there is another object of this name") && left.contains(&rest), "{left}");
        assert_eq!(server.get(&key).await, body);
        // What lies here counts, and other files went their way.
        assert_eq!(parquet(&dir), std::slice::from_ref(file));
        exactly(&server, "x", &dir, &acked, "the local copy is read").await;
    }
    server.delete(&key).await;
    assert_eq!(Process::start(&server, "x", &dir).close(), [] as [String; 0]);
    all_there(&server, "x", &dir, &acked, "once it is away").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_draft_whose_record_is_in_the_bucket_is_no_call_of_its_own() {
    let server = Server::start().await;
    let (_folder, dir) = folder();
    let mut process = Process::start(&server, "x", &dir);
    let mut acked = process.ask("append before 40 0");
    process.ask("draft s");
    acked.extend(process.ask("record"));
    // Its segment becomes Parquet and goes.
    acked.extend(process.ask("append after 40 0"));
    until("nothing waits", async || parquet(&dir).is_empty() && server.keys().await.len() > 2).await;
    process.kill();
    assert!(std::fs::read_dir(dir.join("drafts/journal")).expect("folder").count() > 0);
    let process = Process::start(&server, "x", &dir);
    assert_eq!(process.unfinished, 0);
    assert_eq!(process.close(), [] as [String; 0]);
    all_there(&server, "x", &dir, &acked, "after the kill").await;
    // One without a record becomes one.
    let mut process = Process::start(&server, "x", &dir);
    process.ask("draft s");
    process.kill();
    let process = Process::start(&server, "x", &dir);
    assert_eq!(process.unfinished, 1);
    process.close();
    assert_eq!(read(&server, "x", &dir).await.len(), acked.len() + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_folder_goes_to_one_url_alone_and_damage_does_not_go() {
    let server = Server::start().await;
    let (_folder, dir) = folder();
    server.outage(Some(Fault::Internal));
    server.outage(None);
    let mut process = Process::start(&server, "x", &dir);
    server.outage(Some(Fault::Internal));
    let acked = process.ask("append s 5 0");
    process.close();
    server.outage(None);
    let error = Process::try_start(&server, "y", &dir).err().expect("refused");
    assert!(error.contains("go to s3://") && error.contains("name another folder"), "{error}");
    let file = parquet(&dir).remove(0);
    let whole = std::fs::read(&file).expect("a file");
    let mut damaged = whole.clone();
    damaged[200] ^= 4;
    std::fs::write(&file, damaged).expect("written");
    let left = Process::start(&server, "x", &dir).close().join("; ");
    assert!(left.contains("CRC-32C") && left.contains("it is not uploaded"), "{left}");
    assert_eq!(server.keys().await, [] as [String; 0]);
    std::fs::write(&file, whole).expect("written");
    assert_eq!(Process::start(&server, "x", &dir).close(), [] as [String; 0]);
    all_there(&server, "x", &dir, &acked, "once it is whole").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_machines_have_one_url() {
    let server = Server::start().await;
    let (_first, one) = folder();
    let (_second, other) = folder();
    let (mut a, mut b) = (Process::start(&server, "x", &one), Process::start(&server, "x", &other));
    let mut acked = a.ask("append s 50 0");
    acked.extend(b.ask("append t 50 0"));
    acked.extend(a.ask("append t 50 0"));
    assert_eq!((a.close(), b.close()), (vec![], vec![]));
    all_there(&server, "x", &one, &acked, "from the one").await;
    all_there(&server, "x", &other, &acked, "from the other").await;
}
