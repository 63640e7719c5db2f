//! The end of `lego proxy`, as the process that it is.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use lego::capture::{Query, Reader};
use lego::record::{Call, CallStatus};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::mock::{Mock, Part, Script};
use crate::setup::{PATIENCE, broken, post, request, text};

fn stalls(mut parts: Vec<Part>) -> Vec<Part> {
    parts.insert(3, Part::Gate);
    parts
}

/// `lego proxy` in front of a mock.
struct Process {
    child: Child,
    errors: BufReader<std::process::ChildStderr>,
    address: SocketAddr,
    folder: tempfile::TempDir,
}

impl Process {
    fn start(mock: &Mock, shutdown_grace_ms: u64) -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let config = json!({"proxy": {
            "listen_port": 0, "upstream_base_url": mock.url(), "upstream_kind": "vllm", "probe_upstream": false,
            "capture_dir": folder.path().join("captures"), "shutdown_grace_ms": shutdown_grace_ms,
        }});
        std::fs::write(folder.path().join("proxy_config.json"), config.to_string()).expect("written");
        let mut child = Command::new(env!("CARGO_BIN_EXE_lego"))
            .arg("proxy")
            .current_dir(folder.path())
            .stderr(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .expect("lego starts");
        let mut errors = BufReader::new(child.stderr.take().expect("piped"));
        let line = line_with(&mut errors, "lego proxy: http://");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next());
        let address = address.expect("an address").parse().expect("an address");
        Self { child, errors, address, folder }
    }

    fn url(&self) -> String {
        format!("http://{}/v1/chat/completions", self.address)
    }

    /// Sends a signal, and waits until lego says that it stops.
    fn stop(&mut self, signal: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-s", signal, &pid]).status().expect("kill runs");
        assert!(sent.success());
        line_with(&mut self.errors, "stopping");
    }

    async fn refuses_connections(&self) {
        let refused = async { while TcpStream::connect(self.address).await.is_ok() {} };
        tokio::time::timeout(PATIENCE, refused).await.expect("in time");
    }

    /// The exit code, and the captures that are left.
    async fn ended(mut self) -> (Option<i32>, Vec<Call>) {
        let ending = tokio::task::spawn_blocking(move || {
            let status = self.child.wait().expect("ended");
            (status, self)
        });
        let (status, process) =
            tokio::time::timeout(PATIENCE, ending).await.expect("it ends").expect("joined");
        let captures = process.folder.path().join("captures");
        assert_eq!(journal_of(&captures), 0, "all of it is in Parquet");
        (status.code(), calls_in(&captures))
    }
}

fn calls_in(captures: &Path) -> Vec<Call> {
    let calls = Reader::open(captures, Query::default()).expect("captures");
    calls.map(|call| call.expect("whole")).collect()
}

impl Drop for Process {
    fn drop(&mut self) {
        // A test that failed leaves nothing running.
        let _ = self.child.kill();
    }
}

fn line_with(lines: &mut impl BufRead, text: &str) -> String {
    let mut line = String::new();
    while !line.contains(text) {
        line.clear();
        assert!(lines.read_line(&mut line).expect("text") > 0, "lego ended without saying {text:?}");
    }
    line
}

fn journal_of(captures: &Path) -> usize {
    std::fs::read_dir(captures.join("journal")).expect("folder").count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g05_a_stream_that_ends_within_the_limit_ends_as_it_should() {
    for signal in ["TERM", "INT"] {
        let mock = Mock::start(Script { spoil: Some(stalls), ..Script::default() }).await;
        let mut lego = Process::start(&mock, 60_000);
        let mut response = post(&lego.url(), &request(true)).await;
        let mut seen = response.chunk().await.expect("piece").expect("begun").to_vec();
        lego.stop(signal);
        // Nobody gets in any more, and the open stream goes on.
        lego.refuses_connections().await;
        mock.open_gate();
        seen.extend_from_slice(&text(response).await);
        let direct = post(&format!("{}/v1/chat/completions", mock.url()), &request(true)).await;
        assert_eq!(seen, text(direct).await);
        let (code, calls) = lego.ended().await;
        assert_eq!(code, Some(0), "{signal}");
        assert_eq!(calls.len(), 1);
        assert_eq!((calls[0].status, calls[0].error.as_deref()), (CallStatus::Ok, None));
        assert_eq!(calls[0].completion_token_ids.as_ref().expect("ids").len(), 5);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g05_a_stream_past_the_limit_is_ended_and_recorded_as_aborted() {
    let mock = Mock::start(Script { spoil: Some(stalls), ..Script::default() }).await;
    let mut lego = Process::start(&mock, 100);
    // Finished calls are in the same journal.
    for _ in 0..10 {
        text(post(&lego.url(), &request(false)).await).await;
    }
    let mut response = post(&lego.url(), &request(true)).await;
    let mut seen = String::new();
    while !seen.contains("北京") {
        seen.push_str(&String::from_utf8_lossy(&response.chunk().await.expect("piece").expect("more")));
    }
    lego.stop("TERM");
    let rest = broken(response).await;
    assert!(String::from_utf8_lossy(&rest).contains("call_aborted"));
    mock.aborted(1).await;
    let (code, mut calls) = lego.ended().await;
    assert_eq!(code, Some(0));
    assert_eq!(calls.len(), 11);
    calls.retain(|call| call.client_stream);
    assert_eq!(calls[0].status, CallStatus::Aborted);
    assert_eq!(calls[0].completion_token_ids.as_ref().expect("what arrived").len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g05_a_client_that_takes_nothing_does_not_keep_the_process_alive() {
    // More than sockets buffer.
    let endless = |parts: Vec<Part>| {
        let Part::Event(event) = &parts[1] else { unreachable!("events only") };
        let large = Part::Event(event.replace("Hello", &"x".repeat(64 << 10)));
        let many = std::iter::repeat_n(large, 1000);
        parts[..1].iter().cloned().chain(many).chain(parts[1..].iter().cloned()).collect()
    };
    let mock = Mock::start(Script { spoil: Some(endless), ..Script::default() }).await;
    let mut lego = Process::start(&mock, 100);
    let body = request(true).to_string();
    let mut stream = TcpStream::connect(lego.address).await.expect("connected");
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.expect("sent");
    let mut first = [0; 64];
    stream.read_exact(&mut first).await.expect("begun");
    lego.stop("TERM");
    let (code, calls) = lego.ended().await;
    assert_eq!(code, Some(0));
    assert_eq!(calls.len(), 1);
    assert_eq!(calls[0].status, CallStatus::Aborted);
    drop(stream);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g05_a_second_signal_ends_the_process_at_once() {
    let mock = Mock::start(Script { spoil: Some(stalls), ..Script::default() }).await;
    let mut lego = Process::start(&mock, 600_000);
    text(post(&lego.url(), &request(false)).await).await;
    let mut response = post(&lego.url(), &request(true)).await;
    response.chunk().await.expect("piece").expect("begun");
    lego.stop("TERM");
    let pid = lego.child.id().to_string();
    assert!(Command::new("kill").args(["-s", "TERM", &pid]).status().expect("kill runs").success());
    let mut process = lego;
    let status = tokio::task::spawn_blocking(move || {
        let status = process.child.wait().expect("ended");
        let mut rest = String::new();
        process.errors.read_to_string(&mut rest).expect("text");
        (status, process)
    });
    let (status, process) = tokio::time::timeout(PATIENCE, status).await.expect("it ends").expect("joined");
    assert_eq!(status.code(), Some(130));
    // What a client had is in the journal.
    let calls = calls_in(&process.folder.path().join("captures"));
    assert_eq!(calls.len(), 1);
    assert_eq!(calls[0].status, CallStatus::Ok);
}
