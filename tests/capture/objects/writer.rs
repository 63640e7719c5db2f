//! A process that writes captures to object storage, and does as it is told on its standard input.

use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use lego::capture::{Place, Uploader, Writer, WriterOptions};
use lego::record::{Call, CallId, CallSink as _, JsonText};

use super::server::Server;
use crate::calls::call;

/// Set in that process: the URL and the folder.
const URL: &str = "LEGO_TEST_OBJECTS_URL";
const DIR: &str = "LEGO_TEST_OBJECTS_DIR";

fn say(line: &str) {
    writeln!(std::io::stdout(), "told {line}").expect("pipe");
}

/// A text that does not compress.
fn noise(bytes: usize) -> String {
    let mut text = String::new();
    while text.len() < bytes {
        text += &uuid::Uuid::new_v4().simple().to_string();
    }
    text
}

/// A call of so many days ago, with an id of then.
fn aged(session: &str, days: i64) -> Call {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    let mut call = call(session, &[1, 2, 3], &[4, 5]);
    call.received_at = now.as_micros() as i64 - days * 86_400_000_000;
    let time = uuid::Timestamp::from_unix(uuid::NoContext, (call.received_at / 1_000_000) as u64, 0);
    call.call_id = CallId(uuid::Uuid::new_v7(time));
    call
}

/// Not a test of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_writer_process() {
    let (Ok(url), Some(dir)) = (std::env::var(URL), std::env::var_os(DIR)) else {
        return;
    };
    let place = Place::named(Path::new(&url), Some(Path::new(&dir))).expect("a URL");
    let options = WriterOptions { segment_bytes: 8 << 10, ..WriterOptions::default() };
    let writer = match Writer::open(&place, options) {
        Ok(writer) => writer,
        Err(error) => return say(&format!("error {error}")),
    };
    let uploader = Uploader::start(&place).expect("a URL");
    say(&format!("open {}", writer.recovery().unfinished));
    let mut drafted = None;
    let mut lines = std::io::stdin().lines();
    while let Some(Ok(line)) = tokio::task::block_in_place(|| lines.next()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["append", session, count, days] => {
                for _ in 0..count.parse().expect("a number") {
                    let one = aged(session, days.parse().expect("a number"));
                    let id = one.call_id;
                    writer.append(vec![one]).await.expect("room");
                    say(&format!("acked {id}"));
                }
            }
            ["big", session, bytes] => {
                let mut one = aged(session, 0);
                let id = one.call_id;
                one.client_request =
                    JsonText::new(format!("{:?}", noise(bytes.parse().expect("a number")))).ok();
                writer.append(vec![one]).await.expect("room");
                say(&format!("acked {id}"));
            }
            ["draft", session] => {
                let one = aged(session, 0);
                writer.draft(vec![one.clone()]).await.expect("room");
                drafted = Some(one);
                say("drafted");
            }
            ["record"] => {
                let one = drafted.take().expect("drafted");
                let id = one.call_id;
                writer.append(vec![one]).await.expect("room");
                say(&format!("acked {id}"));
            }
            ["close"] => break,
            other => panic!("{other:?}"),
        }
        say("done");
    }
    for left in writer.close().await.left_in_journal {
        say(&format!("left {left}"));
    }
    let waiting = tokio::task::block_in_place(|| uploader.finish(Duration::from_secs(5)));
    waiting.iter().for_each(|left| say(&format!("left {left}")));
    say("closed");
}

pub struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    /// Calls of drafts that it recorded when it began.
    pub unfinished: u64,
}

impl Process {
    pub fn start(server: &Server, prefix: &str, dir: &Path) -> Self {
        Self::try_start(server, prefix, dir).expect("it opens")
    }

    pub fn try_start(server: &Server, prefix: &str, dir: &Path) -> Result<Self, String> {
        Self::run(&server.url(prefix), &server.environment(), dir)
    }

    /// One that writes to this URL, with these variables to reach it.
    pub fn run(url: &str, environment: &[(&str, String)], dir: &Path) -> Result<Self, String> {
        let mut child = Command::new(std::env::current_exe().expect("own path"))
            .args(["--exact", "objects::writer::objects_writer_process", "--nocapture", "--test-threads=1"])
            .env(URL, url)
            .env(DIR, dir)
            .envs(environment.iter().cloned())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("own binary starts");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut process = Self { child, lines, unfinished: 0 };
        let told = process.told();
        match told.split_once(' ') {
            Some(("open", number)) => process.unfinished = number.parse().expect("a number"),
            _ => return Err(told),
        }
        Ok(process)
    }

    fn told(&mut self) -> String {
        loop {
            let line = self.lines.next().expect("it goes on").expect("text");
            if let Some((_, told)) = line.split_once("told ") {
                return told.to_owned();
            }
        }
    }

    /// Has something done; gives the ids that were acknowledged.
    pub fn ask(&mut self, what: &str) -> Vec<CallId> {
        writeln!(self.child.stdin.as_mut().expect("piped"), "{what}").expect("pipe");
        let mut acked = vec![];
        loop {
            let told = self.told();
            match told.split_once(' ') {
                Some(("acked", id)) => acked.push(id.parse().expect("an id")),
                _ if told == "done" => return acked,
                _ => {}
            }
        }
    }

    /// Ends it; gives what it could not bring away.
    pub fn close(mut self) -> Vec<String> {
        writeln!(self.child.stdin.as_mut().expect("piped"), "close").expect("pipe");
        let mut left = vec![];
        loop {
            let told = self.told();
            match told.split_once(' ') {
                Some(("left", what)) => left.push(what.to_owned()),
                _ if told == "closed" => break,
                _ => {}
            }
        }
        assert!(self.child.wait().expect("ends").success());
        left
    }

    pub fn kill(mut self) {
        self.child.kill().expect("SIGKILL");
        self.child.wait().expect("gone");
    }
}

/// `lego capture …` of a bucket, on a machine with this folder.
pub async fn lego(server: &Server, dir: &Path, arguments: &[&str]) -> Output {
    lego_with(&server.environment(), dir, arguments).await
}

/// The same with these variables to reach it.
pub async fn lego_with(environment: &[(&str, String)], dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    command.arg("capture").args(arguments).arg("--local-dir").arg(dir).envs(environment.iter().cloned());
    command.current_dir(dir.parent().expect("a parent"));
    tokio::task::spawn_blocking(move || command.output().expect("lego runs")).await.expect("no panic")
}

/// The ids of all calls that are read, with the machine's folder.
pub async fn read(server: &Server, prefix: &str, dir: &Path) -> Vec<CallId> {
    let url = server.url(prefix);
    let output = lego(server, dir, &["tail", &url, "-n", "100000", "--json"]).await;
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let id = |line: &str| {
        let call: serde_json::Value = serde_json::from_str(line).expect("JSON");
        call["call_id"].as_str().expect("an id").parse().expect("an id")
    };
    text.lines().map(id).collect()
}

/// All Parquet files of a folder.
pub fn parquet(dir: &Path) -> Vec<PathBuf> {
    let mut found = vec![];
    for day in std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let files = std::fs::read_dir(day).into_iter().flatten().flatten().map(|entry| entry.path());
        found.extend(files.filter(|file| file.extension().is_some_and(|ending| ending == "parquet")));
    }
    found.sort();
    found
}
