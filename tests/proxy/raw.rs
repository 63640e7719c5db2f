//! An upstream that writes exactly what a test says, when it says.

use std::time::Duration;

use lego::config::UpstreamResponses;
use lego::proxy::ProxyOptions;
use lego::record::UpstreamKind;
use lego::upstream::Upstream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::mock::{Mock, Script};
use crate::setup::{PATIENCE, Setup, timeouts};

/// What it does next.
#[derive(Clone)]
pub enum Do {
    Write(String),
    /// Waits until the test has come to this step.
    Until(usize),
    /// Writes this again and again until then.
    Repeat(String, usize),
    /// Waits until its client is gone.
    Stay,
}

/// A proxy in front of it.
pub struct Raw {
    pub setup: Setup,
    step: watch::Sender<usize>,
    left: watch::Sender<usize>,
}

impl Raw {
    /// Does this for each request, then closes the connection.
    pub async fn start(options: ProxyOptions, kind: UpstreamKind, script: Vec<Do>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let (step, left) = (watch::Sender::new(0), watch::Sender::new(0));
        let (steps, gone) = (step.clone(), left.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, script.clone(), steps.subscribe(), gone.clone()));
            }
        });
        let upstream = Upstream::http(&url, kind, Some("sk-real-canary"), timeouts()).expect("upstream");
        let upstream = upstream.with_responses(UpstreamResponses::Auto);
        let mock = Mock::in_process(Script::default());
        Self { setup: Setup::in_front_of(upstream, options, mock).await, step, left }
    }

    pub fn url(&self, route: &str) -> String {
        format!("http://{}/{route}", self.setup.address)
    }

    /// Lets it go on up to what waits for a later step.
    pub fn step(&self, step: usize) {
        self.step.send_replace(step);
    }

    /// Waits until this many clients of its were gone while it stayed.
    pub async fn left(&self, count: usize) {
        let mut left = self.left.subscribe();
        let waiting = left.wait_for(|n| *n >= count);
        tokio::time::timeout(PATIENCE, waiting).await.expect("left in time").expect("a server");
    }
}

/// A head of 200, with this content type, of a body that ends with its connection.
pub fn head(content_type: &str) -> Do {
    let told =
        if content_type.is_empty() { String::new() } else { format!("content-type: {content_type}\r\n") };
    Do::Write(format!("HTTP/1.1 200 OK\r\n{told}connection: close\r\n\r\n"))
}

/// An event of a stream.
pub fn event(data: &str) -> Do {
    Do::Write(format!("data: {data}\n\n"))
}

async fn answer(
    mut stream: TcpStream,
    script: Vec<Do>,
    mut steps: watch::Receiver<usize>,
    left: watch::Sender<usize>,
) {
    let mut asked = Vec::new();
    while !is_whole(&asked) {
        if stream.read_buf(&mut asked).await.unwrap_or(0) == 0 {
            return;
        }
    }
    for part in script {
        let written = match part {
            Do::Write(text) => stream.write_all(text.as_bytes()).await,
            Do::Until(step) => {
                steps.wait_for(|now| *now >= step).await.expect("a test");
                Ok(())
            }
            Do::Repeat(text, step) => {
                let mut pace = tokio::time::interval(Duration::from_millis(5));
                while *steps.borrow() < step && stream.write_all(text.as_bytes()).await.is_ok() {
                    pace.tick().await;
                }
                Ok(())
            }
            Do::Stay => {
                while stream.read_buf(&mut asked).await.is_ok_and(|read| read > 0) {}
                left.send_modify(|n| *n += 1);
                return;
            }
        };
        if written.is_err() {
            return;
        }
    }
}

fn is_whole(asked: &[u8]) -> bool {
    let text = String::from_utf8_lossy(asked).into_owned();
    let Some((head, _)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.to_ascii_lowercase();
    let length = length.lines().find_map(|line| line.strip_prefix("content-length:").map(str::to_owned));
    let length: usize = length.expect("a body").trim().parse().expect("a number");
    asked.len() >= head.len() + 4 + length
}
