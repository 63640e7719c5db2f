//! What the real `lego proxy` process says of itself: its logs at their loudest, its captures, its errors and its
//! metrics. None of it may hold a secret (cases G04, G05), whatever goes wrong.

#[path = "common/mock.rs"]
#[allow(unused_imports, reason = "other tests use more of it")]
mod mock;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::Duration;

use lego::capture::{Query, Reader};
use lego::telemetry::{Kind, PROMETHEUS};
use mock::{Mock, Part, Script};
use serde_json::{Value, json};

/// Everything must happen well within this; a test that reaches it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// All secrets have this word in them.
const CANARY: &str = "canary";
const UPSTREAM_KEY: &str = "sk-upstream-canary";
const CLIENT_TOKEN: &str = "client-token-canary";
const ADMIN_TOKEN: &str = "admin-token-canary";

/// The running process.
struct Lego {
    child: Child,
    lines: Receiver<String>,
    reading: Option<JoinHandle<String>>,
    url: String,
    admin: String,
    folder: tempfile::TempDir,
}

impl Lego {
    fn start(upstream: &str, settings: Value) -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let mut proxy = json!({
            "listen_port": 0, "upstream_base_url": upstream, "upstream_kind": "vllm",
            "upstream_api_key_env": "LEGO_TEST_UPSTREAM_KEY", "client_token_env": "LEGO_TEST_CLIENT_TOKEN",
            "admin_listen_port": 0, "admin_token_env": "LEGO_TEST_ADMIN_TOKEN", "capture_dir": "captures",
            "max_retries": 0, "probe_upstream": false,
        });
        for (name, value) in settings.as_object().expect("settings") {
            proxy[name] = value.clone();
        }
        let path = folder.path().join("proxy_config.json");
        std::fs::write(&path, json!({"proxy": proxy}).to_string()).expect("written");
        let mut child = Command::new(env!("CARGO_BIN_EXE_lego"))
            .args(["proxy", "--log-json"])
            .current_dir(folder.path())
            .env("RUST_LOG", "trace")
            .env("LEGO_TEST_UPSTREAM_KEY", UPSTREAM_KEY)
            .env("LEGO_TEST_CLIENT_TOKEN", CLIENT_TOKEN)
            .env("LEGO_TEST_ADMIN_TOKEN", ADMIN_TOKEN)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("lego runs");
        let stderr = child.stderr.take().expect("piped");
        let (sender, lines) = mpsc::sync_channel(256);
        let reading = std::thread::spawn(move || {
            let mut all = String::new();
            for line in BufReader::new(stderr).lines() {
                let line = line.expect("UTF-8");
                all.push_str(&line);
                all.push('\n');
                // After the start nobody waits for lines any more.
                let _ = sender.try_send(line);
            }
            all
        });
        let mut lego =
            Self { child, lines, reading: Some(reading), url: String::new(), admin: String::new(), folder };
        lego.url = lego.address("lego proxy: http://").trim_end_matches("/v1").to_owned();
        lego.admin = lego.address("lego proxy: admin at http://");
        lego
    }

    /// The address on the line that begins so.
    fn address(&self, beginning: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).expect("lego says where it listens");
            if let Some(rest) = line.strip_prefix(beginning) {
                return format!("http://{}", rest.split_whitespace().next().expect("an address"));
            }
        }
    }

    fn captures(&self) -> PathBuf {
        self.folder.path().join("captures")
    }

    /// Stops it as an operator does. Gives what it logged.
    fn stop(&mut self) -> String {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().expect("kill runs").success());
        let log = self.reading.take().expect("once").join().expect("read");
        assert!(self.child.wait().expect("ends").success(), "{log}");
        log
    }
}

impl Drop for Lego {
    fn drop(&mut self) {
        // Only a test that failed leaves it running.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn client() -> reqwest::Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let policy = reqwest::redirect::Policy::none();
    reqwest::Client::builder().no_proxy().redirect(policy).timeout(PATIENCE).build().expect("client")
}

/// Status, headers and body; of a reply that breaks off, what came of it.
async fn answer(request: reqwest::RequestBuilder) -> (u16, String, Option<String>) {
    let mut response = request.send().await.expect("an answer");
    let call_id = response.headers().get("x-lego-call-id").map(|id| id.to_str().expect("text").to_owned());
    let mut seen = format!("{:?}\n", response.headers());
    let status = response.status().as_u16();
    while let Ok(Some(piece)) = response.chunk().await {
        seen.push_str(&String::from_utf8_lossy(&piece));
    }
    (status, seen, call_id)
}

fn requests(stream: bool) -> [(&'static str, Value); 4] {
    let messages = json!([{"role": "user", "content": "hi"}]);
    [
        (
            "/v1/chat/completions",
            json!({"model": "user-chosen-name", "messages": messages, "stream": stream}),
        ),
        (
            "/v1/messages",
            json!({"model": "user-chosen-name", "messages": messages, "max_tokens": 9, "stream": stream}),
        ),
        ("/v1/responses", json!({"model": "user-chosen-name", "input": "hi", "stream": stream})),
        ("/v1/completions", json!({"model": "user-chosen-name", "prompt": "hi", "stream": stream})),
    ]
}

/// Everything that can go wrong upstream, with the key in what it says.
fn scripts() -> Vec<(&'static str, Script)> {
    let error =
        |status: u16, text: &str| Script { error: Some((status, text.to_owned())), ..Script::default() };
    let stream = |spoil: fn(Vec<Part>) -> Vec<Part>| Script { spoil: Some(spoil), ..Script::default() };
    let body = |spoil: fn(String) -> Vec<u8>| Script { spoil_body: Some(spoil), ..Script::default() };
    let in_band = r#"{"error":{"message":"no such key: sk-upstream-canary","type":"auth"}}"#;
    vec![
        ("well", Script::default()),
        ("refused key", error(401, in_band)),
        ("forbidden", error(403, "sk-upstream-canary may not")),
        ("bad request", error(400, in_band)),
        ("too many", error(429, in_band)),
        ("broken", error(500, "<html>Bearer sk-upstream-canary</html>")),
        ("redirect", Script { headers: vec![("location", "http://127.0.0.1:9/")], ..error(302, in_band) }),
        ("compressed", Script { headers: vec![("content-encoding", "gzip")], ..Script::default() }),
        (
            "error in the stream",
            stream(|mut parts| {
                let error = r#"{"error":{"message":"no such key: sk-upstream-canary","type":"auth"}}"#;
                parts.splice(2.., [Part::Event(error.to_owned())]);
                parts
            }),
        ),
        (
            "cut",
            stream(|mut parts| {
                parts.splice(2.., [Part::Cut]);
                parts
            }),
        ),
        (
            "no end",
            stream(|mut parts| {
                parts.truncate(3);
                parts
            }),
        ),
        (
            "not JSON",
            stream(|mut parts| {
                parts.insert(2, Part::Event("{oops".to_owned()));
                parts
            }),
        ),
        (
            "error in the body",
            body(|_| br#"{"error":{"message":"no such key: sk-upstream-canary","type":"auth"}}"#.to_vec()),
        ),
        ("half a body", body(|text| text.as_bytes()[..text.len() / 2].to_vec())),
    ]
}

fn assert_clean(what: &str, text: &str) {
    if let Some(at) = text.find(CANARY) {
        let around = text.get(at.saturating_sub(200)..(at + 50).min(text.len())).unwrap_or(text);
        panic!("{what} has a secret: …{around}…");
    }
}

/// All files below a folder, as they are, and all records in them.
fn captured(dir: &Path) -> (String, usize) {
    let mut seen = String::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("folder") {
            let path = entry.expect("entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(bytes) = std::fs::read(&path) {
                seen.push_str(&String::from_utf8_lossy(&bytes));
            }
        }
    }
    let mut records = 0;
    for call in Reader::open(dir, Query::default()).expect("captures") {
        let call = call.expect("a record");
        seen.push_str(&serde_json::to_string(&call).expect("JSON"));
        records += 1;
    }
    (seen, records)
}

#[tokio::test(flavor = "multi_thread")]
async fn g04_g05_no_secret_is_in_logs_captures_errors_or_metrics_and_all_is_counted() {
    let mock = Mock::start(Script::default()).await;
    let mut lego = Lego::start(&mock.url(), json!({}));
    let client = client();
    let mut call_ids = Vec::new();
    let mut streams = 0;
    for (number, (name, script)) in scripts().into_iter().enumerate() {
        mock.set(script);
        for stream in [false, true] {
            for (route, body) in requests(stream) {
                let path = match number % 3 {
                    0 => format!("{}{route}", lego.url),
                    1 => format!("{}/sessions/by-path{route}", lego.url),
                    _ => format!(
                        "{}/sessions/sk-lego-by-key.path-secret-canary{route}?key=query-canary",
                        lego.url
                    ),
                };
                let request =
                    client.post(path).header("content-type", "application/json").body(body.to_string());
                let request = match number % 2 {
                    0 => request.header("authorization", format!("Bearer {CLIENT_TOKEN}")),
                    _ => request.header("x-api-key", CLIENT_TOKEN),
                };
                let request = request
                    .header("cookie", "id=cookie-canary")
                    .header("proxy-authorization", "proxy-canary");
                let (status, seen, call_id) = answer(request).await;
                assert_clean(&format!("{name}: the reply of {route}"), &seen);
                if name == "well" && route != "/v1/completions" {
                    assert_eq!(status, 200, "{route} {seen}");
                    streams += usize::from(stream);
                }
                call_ids.extend(call_id);
            }
        }
    }
    assert!(
        mock.asked().iter().all(|asked| asked.headers["authorization"] == format!("Bearer {UPSTREAM_KEY}"))
    );
    for (key, expected) in [(Some("wrong-canary"), 401), (None, 401)] {
        let (route, body) = requests(false)[0].clone();
        let request = client.post(format!("{}{route}", lego.url)).body(body.to_string());
        let request = match key {
            Some(key) => request.header("x-api-key", key),
            None => request.header("authorization", "Basic basic-canary"),
        };
        let (status, seen, _) = answer(request).await;
        assert_eq!(status, expected, "{seen}");
        assert_clean("a refusal", &seen);
    }
    for (token, expected) in [(ADMIN_TOKEN, 200), ("wrong-canary", 401)] {
        for (route, body) in [("pause", ""), ("resume", ""), ("policy-version", r#"{"version":"step-1"}"#)] {
            let request = client.post(format!("{}/{route}", lego.admin)).bearer_auth(token);
            let (status, seen, _) =
                answer(request.header("content-type", "application/json").body(body)).await;
            assert_eq!(status, expected, "{route} {seen}");
            assert_clean("the admin's answer", &seen);
        }
    }
    let page = client.get(format!("{}/metrics", lego.url)).bearer_auth(CLIENT_TOKEN);
    let (status, page, _) = answer(page).await;
    assert_eq!(status, 200);
    assert_clean("the metrics", &page);
    check_metrics(&page, call_ids.len(), streams);

    let (journal, in_journal) = captured(&lego.captures());
    assert_clean("the journal", &journal);
    let log = lego.stop();
    let (parquet, in_parquet) = captured(&lego.captures());
    assert_clean("the Parquet files", &parquet);
    assert_eq!((in_journal, in_parquet), (call_ids.len(), call_ids.len()), "a record for each call");
    assert_clean("the log", &log);
    check_log(&log, &call_ids);
}

/// Lines are JSON; those of a call have its id.
fn check_log(log: &str, call_ids: &[String]) {
    let events: Vec<Value> = log
        .lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    let ended: Vec<&Value> = events.iter().filter(|event| event["message"] == "a call ended").collect();
    assert_eq!(ended.len(), call_ids.len());
    for event in ended {
        assert_eq!(event["span"]["request_id"], event["call_id"]);
        assert!(call_ids.iter().any(|id| event["call_id"] == id.as_str()), "{event}");
    }
    assert!(events.iter().any(|event| event["level"] == "DEBUG"), "the loud levels are on");
    // At any level that is not off: which call failed, and how.
    let is_warning = |event: &&Value| {
        event["level"] == "WARN"
            && event["message"].as_str().is_some_and(|text| text.starts_with("a call failed"))
    };
    let failed: Vec<&Value> = events.iter().filter(is_warning).collect();
    for event in &failed {
        assert!(event["span"]["request_id"].is_string() && event["span"]["api"].is_string(), "{event}");
        assert!(event["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{event}");
    }
    assert!(failed.iter().any(|event| event["status"] == "upstream_error"), "{failed:?}");
}

fn check_metrics(page: &str, calls: usize, streams: usize) {
    assert!(
        !page.contains("user-chosen-name") && !page.contains("by-path") && !page.contains("by-key"),
        "{page}"
    );
    let known: BTreeSet<&str> = PROMETHEUS.iter().map(|metric| metric.name).collect();
    let typed: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_whitespace().next()).collect();
    assert!(typed.is_subset(&known), "not in the catalog: {:?}", typed.difference(&known));
    // What never happened is not there yet, unless it is told apart by words that are all known.
    let late = [
        "lego_capture_damaged_bytes_total",
        "lego_capture_failed_commits_total",
        "lego_capture_merged_files_total",
        "lego_capture_parquet_files_total",
        // With object storage only.
        "lego_capture_failed_uploads_total",
        "lego_capture_uploaded_bytes_total",
        "lego_capture_uploads_total",
        "lego_capture_waiting_bytes",
        "lego_capture_waiting_files",
        "lego_proxy_calls_without_client",
        "lego_proxy_refused_total",
        "lego_proxy_rejoined_total",
        "lego_proxy_resumed_replies_total",
        "lego_proxy_route_calls_total",
        "lego_proxy_sessions_expired_total",
        "lego_trainer_lineage_breaks_total",
    ];
    for name in &known {
        assert!(typed.contains(name) || late.contains(name), "{name} is missing");
    }
    for metric in PROMETHEUS.iter().filter(|metric| metric.label.is_none() && metric.kind != Kind::Histogram)
    {
        let labelled = page.lines().any(|line| line.starts_with(&format!("{}{{", metric.name)));
        assert!(!labelled, "{} has labels that the catalog has not", metric.name);
    }
    let value = |line: &str| -> f64 {
        let found = page.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(' '));
        found.unwrap_or_else(|| panic!("{line} is not in\n{page}")).parse().expect("a number")
    };
    let total = |name: &str| -> f64 {
        let lines = page.lines().filter(|line| line.starts_with(&format!("{name}{{")));
        lines.map(|line| line.rsplit(' ').next().expect("a value").parse::<f64>().expect("a number")).sum()
    };
    assert_eq!(total("lego_proxy_calls_total"), calls as f64);
    assert_eq!(total("lego_proxy_records_total"), calls as f64);
    for status in ["ok", "truncated", "upstream_error", "parse_error"] {
        assert!(value(&format!("lego_proxy_records_total{{status=\"{status}\"}}")) > 0.0, "{status}");
    }
    for never in ["client_disconnect", "aborted", "timeout"] {
        assert_eq!(value(&format!("lego_proxy_records_total{{status=\"{never}\"}}")), 0.0);
    }
    assert!(value("lego_proxy_not_trainable_total{reason=\"status_truncated\"}") > 0.0);
    assert_eq!(value("lego_proxy_not_trainable_total{reason=\"other\"}"), 0.0);
    assert!(value("lego_proxy_ttft_seconds_count") >= streams as f64);
    assert!(value("lego_proxy_inter_token_seconds_count") > streams as f64);
    assert_eq!(value("lego_proxy_call_seconds_count"), calls as f64);
    assert_eq!(value("lego_proxy_added_seconds_count{side=\"request\"}"), calls as f64);
    assert!(value("lego_proxy_added_seconds_count{side=\"reply\"}") > streams as f64);
    assert_eq!(value("lego_capture_lag_seconds_count"), calls as f64);
    assert!(value("lego_capture_fsync_seconds_count") > 0.0);
    assert!(
        page.contains("lego_capture_fsync_seconds_bucket{le=\"0.0002\"}"),
        "short times have fine buckets"
    );
    for gauge in [
        "lego_proxy_open_streams",
        "lego_proxy_buffered_bytes",
        "lego_proxy_calls_in_flight",
        "lego_proxy_paused",
    ] {
        assert_eq!(value(gauge), 0.0, "{gauge}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn g04_no_secret_is_told_of_an_upstream_that_does_not_answer() {
    let client = client();
    let mock = Mock::start(Script { is_silent: true, ..Script::default() }).await;
    for (upstream, expected) in [(mock.url(), 504), ("http://127.0.0.1:1".to_owned(), 502)] {
        let mut lego = Lego::start(&upstream, json!({"first_byte_timeout_secs": 1}));
        for stream in [false, true] {
            for (route, body) in &requests(stream)[..3] {
                let request = client.post(format!("{}{route}", lego.url)).bearer_auth(CLIENT_TOKEN);
                let (status, seen, _) =
                    answer(request.header("content-type", "application/json").body(body.to_string())).await;
                assert!(status == expected || *route == "/v1/messages", "{route} {status} {seen}");
                assert_clean("the reply", &seen);
            }
        }
        let (journal, records) = captured(&lego.captures());
        assert_eq!(records, 6);
        assert_clean("the journal", &journal);
        assert_clean("the log", &lego.stop());
    }
}
