//! Readers fetch what they need of an object and no more, and get over what the network does.

use std::path::Path;

use hyper::Method;

use super::server::{Fault, Server};
use super::writer::{Process, lego, read};

/// Bytes of objects that were fetched since this was last asked.
fn fetched(server: &Server) -> usize {
    let seen = server.seen().into_iter().filter(|seen| seen.method == Method::GET);
    let objects = seen.filter(|seen| seen.path.contains(".parquet"));
    objects.inspect(|seen| assert!(seen.range.is_some(), "{seen:?}")).map(|seen| seen.received).sum()
}

/// Three files of over 3 MB, each of one session, and a small one.
async fn filled(dir: &Path) -> Server {
    let server = Server::start().await;
    let mut process = Process::start(&server, "x", dir);
    for session in ["one", "two", "three"] {
        process.ask(&format!("big {session} 3000000"));
    }
    process.ask("append small 3 0");
    assert_eq!(process.close(), [] as [String; 0]);
    server.seen();
    server
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn only_the_columns_and_row_groups_that_are_needed_are_fetched() {
    let folder = tempfile::tempdir().expect("folder");
    let dir = folder.path().join("local");
    let server = filled(&dir).await;
    let url = server.url("x");
    let mut sizes = vec![];
    for key in server.keys().await {
        sizes.push(server.get(&key).await.len());
    }
    let all: usize = sizes.iter().sum();
    assert!(all > 4_500_000 && sizes.len() == 4, "{sizes:?}");
    let ask = async |arguments: &[&str]| {
        let output = lego(&server, &dir, arguments).await;
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        (String::from_utf8(output.stdout).expect("UTF-8"), fetched(&server))
    };
    // All sessions, without bodies.
    let (text, bytes) = ask(&["ls", "--capture-dir", &url]).await;
    assert!(["one", "two", "three", "small"].iter().all(|session| text.contains(session)), "{text}");
    assert!(bytes < 600_000, "{bytes} of {all}");
    // One session whole: its file, and of the others what rules them out.
    let (text, bytes) = ask(&["show", "two", "--json", "--capture-dir", &url]).await;
    assert!(text.len() > 3_000_000 && text.lines().count() == 1);
    assert!(bytes < all / 3 + 600_000, "{bytes} of {all}");
    // Nothing: the footers alone, which say so.
    let none = ["ls", "--where", "received_at < '2001-01-01'", "--json", "--capture-dir", &url];
    let (text, bytes) = ask(&none).await;
    assert!(text.is_empty() && bytes <= 4 * (64 << 10), "{bytes}: {text}");
    let none = ["ls", "--where", "client_request like '%no such text%'", "--json", "--capture-dir", &url];
    let (text, bytes) = ask(&none).await;
    assert!(text.is_empty() && bytes > all * 9 / 10, "{bytes}: {text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn small_files_are_fetched_side_by_side_and_keep_their_order() {
    let folder = tempfile::tempdir().expect("folder");
    let dir = folder.path().join("local");
    let server = Server::start().await;
    let mut process = Process::start(&server, "x", &dir);
    let acked = process.ask("append s 60 0");
    assert_eq!(process.close(), [] as [String; 0]);
    assert!(server.keys().await.len() > 10);
    server.most_at_once();
    server.fail(Method::GET, ".parquet", 1000, Fault::Late);
    let list = ["ls", "--session", "s", "--json", "--capture-dir", &server.url("x")];
    let output = lego(&server, &dir, &list).await;
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let ids = text.lines().map(|line| {
        let call: serde_json::Value = serde_json::from_str(line).expect("JSON");
        call["call_id"].as_str().expect("an id").parse().expect("an id")
    });
    assert_eq!(ids.collect::<Vec<lego::record::CallId>>(), acked);
    let most = server.most_at_once();
    assert!((4..=16).contains(&most), "{most}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_the_network_does_is_got_over_or_told() {
    let folder = tempfile::tempdir().expect("folder");
    let dir = folder.path().join("local");
    let server = filled(&dir).await;
    let url = server.url("x");
    for fault in
        [Fault::Internal, Fault::SlowDown, Fault::DropBefore, Fault::DropAfter, Fault::Truncate, Fault::Late]
    {
        let before = server.hits();
        server.fail(Method::GET, ".parquet", 2, fault);
        server.fail(Method::GET, "list-type", 1, fault);
        assert_eq!(read(&server, "x", &dir).await.len(), 6, "{fault:?}");
        assert_eq!(server.hits(), before + 3, "{fault:?}");
    }
    // No file is left out for want of the network.
    for (fault, part) in [
        (Fault::SlowDown, "503 Service Unavailable (SlowDown)"),
        (Fault::Truncate, "cannot read s3://"),
        (Fault::Denied, "access is denied (AccessDenied)"),
    ] {
        server.fail(Method::GET, ".parquet", 1000, fault);
        let output = lego(&server, &dir, &["ls", "--capture-dir", &url]).await;
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(part) && !text.contains("left out"), "{text}");
        assert!(text.lines().count() == 1 && !text.contains("canary") && !text.contains("CANARY"), "{text}");
        server.forget();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn verify_sees_what_changed_in_the_bucket() {
    let folder = tempfile::tempdir().expect("folder");
    let dir = folder.path().join("local");
    let server = filled(&dir).await;
    let url = server.url("x");
    let key = server.keys().await.remove(0);
    let mut damaged = server.get(&key).await.to_vec();
    damaged[1000] ^= 1;
    server.put(&key, damaged).await;
    let output = lego(&server, &dir, &["verify", &url]).await;
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1));
    let start = format!("s3://{}/{key}: parquet_checksum: ", server.bucket);
    assert!(text.lines().any(|line| line.starts_with(&start)), "{text}");
    server.put(&key, b"PAR1 no more".to_vec()).await;
    let output = lego(&server, &dir, &["ls", "--capture-dir", &url]).await;
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains(&format!("left out s3://{}/{key}", server.bucket)),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tail_follows_what_other_machines_upload() {
    use tokio::io::{AsyncBufReadExt as _, BufReader};

    let folder = tempfile::tempdir().expect("folder");
    let (dir, elsewhere) = (folder.path().join("local"), folder.path().join("elsewhere"));
    let server = Server::start().await;
    let mut process = Process::start(&server, "x", &dir);
    let mut acked = process.ask("append s 30 0");
    let mut tail = tokio::process::Command::new(env!("CARGO_BIN_EXE_lego"))
        .args(["capture", "tail", &server.url("x"), "-f", "-n", "100", "--json", "--local-dir"])
        .arg(&dir)
        .envs(server.environment())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("lego starts");
    let mut lines = BufReader::new(tail.stdout.take().expect("piped")).lines();
    let mut other = Process::start(&server, "x", &elsewhere);
    acked.extend(process.ask("append s 30 0"));
    acked.extend(other.ask("append t 30 0"));
    assert_eq!((process.close(), other.close()), (vec![], vec![]));
    let mut told: Vec<lego::record::CallId> = vec![];
    while told.len() < acked.len() {
        let line = tokio::time::timeout(std::time::Duration::from_secs(60), lines.next_line()).await;
        let line = line.expect("in time").expect("text").expect("it goes on");
        let call: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        told.push(call["call_id"].as_str().expect("an id").parse().expect("an id"));
    }
    told.sort();
    acked.sort();
    assert_eq!(told, acked);
}
