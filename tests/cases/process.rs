//! `lego proxy` as a process of its own, as a supervisor runs it.

use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use lego::capture::{Query, Reader};
use lego::record::Call;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::setup::PATIENCE;

pub const PROXY_VARIABLES: [&str; 9] = [
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
    "REQUEST_METHOD",
];

/// A running process.
pub struct Process {
    child: Child,
    pub address: SocketAddr,
    pub folder: TempDir,
    log: Arc<Mutex<String>>,
    lines: watch::Sender<usize>,
    reading: JoinHandle<()>,
}

impl Process {
    /// With these settings of `[proxy]` and variables; returns once it listens.
    pub async fn start(upstream: &str, settings: &Value, variables: &[(&str, &str)]) -> Self {
        Self::start_in(folder(), upstream, settings, variables).await
    }

    /// The same in the folder of an earlier process.
    pub async fn start_in(
        folder: TempDir,
        upstream: &str,
        settings: &Value,
        variables: &[(&str, &str)],
    ) -> Self {
        Self::run(Command::new(env!("CARGO_BIN_EXE_lego")), folder, upstream, settings, variables).await
    }

    /// The same as a child of this program, which begins with these arguments.
    pub async fn under(program: &str, arguments: &[&str], upstream: &str, settings: &Value) -> Self {
        let mut command = Command::new(program);
        command.args(arguments).arg(env!("CARGO_BIN_EXE_lego"));
        Self::run(command, folder(), upstream, settings, &[]).await
    }

    /// The same where the system lets the process open no more files than this.
    pub async fn with_files(upstream: &str, settings: &Value, files: u32) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {files} && exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_lego")]);
        Self::run(command, folder(), upstream, settings, &[]).await
    }

    async fn run(
        mut command: Command,
        folder: TempDir,
        upstream: &str,
        settings: &Value,
        variables: &[(&str, &str)],
    ) -> Self {
        let mut proxy = json!({"listen_port": 0, "upstream_base_url": upstream, "capture_dir": "captures",
            "probe_upstream": false, "max_retries": 0});
        for (name, value) in settings.as_object().expect("settings") {
            proxy[name] = value.clone();
        }
        let config = json!({"proxy": proxy}).to_string();
        std::fs::write(folder.path().join("proxy_config.json"), config).expect("written");
        command.arg("proxy").current_dir(folder.path()).stderr(Stdio::piped()).kill_on_drop(true);
        for name in PROXY_VARIABLES {
            command.env_remove(name);
        }
        let mut child = command.envs(variables.iter().copied()).spawn().expect("the binary runs");
        let mut stderr = BufReader::new(child.stderr.take().expect("piped")).lines();
        let (log, lines) = (Arc::new(Mutex::new(String::new())), watch::Sender::new(0));
        let (kept, counted) = (Arc::clone(&log), lines.clone());
        let reading = tokio::spawn(async move {
            while let Ok(Some(line)) = stderr.next_line().await {
                let mut log = kept.lock().expect("log");
                log.push_str(&line);
                log.push('\n');
                counted.send_modify(|lines| *lines += 1);
            }
        });
        let mut process = Self { child, address: ([127, 0, 0, 1], 0).into(), folder, log, lines, reading };
        let line = process.says("lego proxy: http://").await;
        let place = line.split("lego proxy: http://").nth(1).and_then(|rest| rest.split('/').next());
        process.address = place.expect("an address").parse().expect("an address");
        process
    }

    pub fn url(&self, route: &str) -> String {
        format!("http://{}/v1/{route}", self.address)
    }

    pub fn log(&self) -> String {
        self.log.lock().expect("log").clone()
    }

    /// Waits for a line with these words.
    pub async fn says(&self, words: &str) -> String {
        let mut lines = self.lines.subscribe();
        let found = async {
            loop {
                if let Some(line) = self.log().lines().find(|line| line.contains(words)) {
                    return line.to_owned();
                }
                lines.changed().await.expect("the process runs");
            }
        };
        let waited = tokio::time::timeout(PATIENCE, found).await;
        waited.unwrap_or_else(|_| panic!("{words:?} is not said in {}", self.log()))
    }

    /// Most bytes that were resident at once so far.
    pub fn peak(&self) -> u64 {
        let pid = self.child.id().expect("it runs");
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("readable");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
        let kibibytes = line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number");
        kibibytes * 1024
    }

    pub fn signal(&self, signal: Signal) {
        let pid = self.child.id().expect("it runs");
        kill(Pid::from_raw(i32::try_from(pid).expect("a pid")), signal).expect("sent");
    }

    /// Waits for its end: exit code, all that it said, and its folder.
    pub async fn end(mut self) -> (Option<i32>, String, TempDir) {
        let status =
            tokio::time::timeout(PATIENCE, self.child.wait()).await.expect("an end").expect("waited");
        self.reading.await.expect("read");
        let log = self.log.lock().expect("log").clone();
        (status.code(), log, self.folder)
    }
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("temporary folder")
}

/// The calls in a process's capture.
pub fn captured(folder: &TempDir) -> Vec<Call> {
    let reader = Reader::open(&folder.path().join("captures"), Query::default()).expect("readable");
    let mut calls = reader.collect::<Result<Vec<Call>, _>>().expect("whole");
    // A segment becomes Parquet session by session.
    calls.sort_by_key(|call| (call.received_at, call.call_id, call.choice_index));
    calls
}

/// Every byte of a folder's files, as text.
pub fn bytes_of(folder: &TempDir) -> String {
    let (mut text, mut folders) = (String::new(), vec![folder.path().to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("listed") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                text.push_str(&String::from_utf8_lossy(&std::fs::read(path).expect("read")));
            }
        }
    }
    text
}
