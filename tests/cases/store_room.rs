//! A folder at its bound, and a disk that is full: calls are refused before they are sampled, in their own protocol's
//! words, and served again by themselves.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use lego::record::CallStatus;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::mock::{Mock, Part, Script};
use crate::process::{Process, captured};
use crate::setup::{client, post, read, request, text as whole};
use crate::speech;
use crate::support::{done, finish, stream, text};

/// A value of the metrics page.
async fn metric(process: &Process, name: &str) -> f64 {
    let page = client().get(format!("http://{}/metrics", process.address)).send().await.expect("an answer");
    let page = String::from_utf8(whole(page).await.to_vec()).expect("text");
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} is not in {page}")).parse().expect("a number")
}

/// Bytes of the files below a folder.
fn size(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry"));
    entries
        .map(|entry| {
            if entry.path().is_dir() { size(&entry.path()) } else { entry.metadata().expect("a file").len() }
        })
        .sum()
}

/// A chat request of about this many bytes, which no other one has and no compression makes much smaller.
fn large(bytes: usize) -> Value {
    static SEED: AtomicU64 = AtomicU64::new(1);
    let mut state = SEED.fetch_add(1, Ordering::Relaxed);
    let mut letter = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(b'0' + ((state >> 40) % 75) as u8)
    };
    let mut body = request(true);
    body["messages"][0]["content"] = json!((0..bytes).map(|_| letter()).collect::<String>());
    body
}

/// Calls until one is refused, or for as long as a test waits until one is not.
async fn until(process: &Process, body: &Value, status: u16) -> Value {
    let waiting = async {
        loop {
            let response = post(&process.url("chat/completions"), body).await;
            let is_it = response.status().as_u16() == status;
            let (bytes, _) = read(response).await;
            if is_it {
                return serde_json::from_slice(&bytes).unwrap_or_default();
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(crate::setup::PATIENCE, waiting).await.expect("in time")
}

#[tokio::test]
async fn at_its_bound_a_folder_takes_what_runs_and_nothing_more_until_there_is_room() {
    let parts = vec![text("a"), Part::Gate, text("b"), finish("stop"), done()];
    let mock = Mock::start(stream(parts)).await;
    let settings =
        json!({"capture_alarm_bytes": 100_000, "capture_max_bytes": 200_000, "capture_min_free_bytes": 0});
    let process = Process::start(&mock.url(), &settings, &[]).await;
    let captures = process.folder.path().join("captures");
    assert_eq!(metric(&process, "lego_capture_folder_bytes").await, size(&captures) as f64);
    // One runs while the others fill the folder.
    let running = post(&process.url("chat/completions"), &request(true)).await;
    mock.started(1).await;
    mock.set(Script::default());
    let refused = until(&process, &large(30_000), 507).await;
    let asked = mock.asked().len();
    let message = refused["error"]["message"].as_str().expect("words").to_owned();
    for part in ["capture_max_bytes", "allows 200000", "captures", "lego capture prune", "raise the key"] {
        assert!(message.contains(part), "{part} in {message}");
    }
    assert_eq!(refused["error"]["code"], "capture_full", "{refused}");
    let alarm = process.says("have grown to").await;
    assert!(alarm.contains("capture_alarm_bytes = 100000") && alarm.contains("WARN"), "{alarm}");
    process.says("calls are refused").await;
    for (route, body) in [
        ("completions", json!({"model": "toy", "prompt": "hi"})),
        ("responses", speech::responses(true)),
        ("messages", speech::messages(false)),
    ] {
        let response = post(&process.url(route), &body).await;
        assert_eq!(response.status().as_u16(), 507, "{route}");
        let error: Value = serde_json::from_slice(&whole(response).await).expect("JSON");
        assert!(error["error"]["message"].as_str().expect("words").contains("capture_max_bytes"), "{error}");
        assert_eq!(error["type"] == "error", route == "messages", "{error}");
    }
    assert_eq!(mock.asked().len(), asked, "none of them was sent upstream");
    assert_eq!(metric(&process, "lego_capture_folder_bytes").await, size(&captures) as f64);

    // What ran is recorded.
    mock.open_gate();
    assert!(whole(running).await.ends_with(b"data: [DONE]\n\n"));
    // Another process makes room.
    std::fs::create_dir_all(captures.join("date=2020-01-01")).expect("a folder");
    let ballast = captures.join("date=2020-01-01/calls-00000001-0011223344556677.parquet");
    std::fs::write(&ballast, vec![0; 100]).expect("written");
    process.signal(Signal::SIGTERM);
    let (_, _, folder) = process.end().await;
    std::fs::remove_file(&ballast).expect("removed");
    let calls = captured(&folder);
    assert!(calls.iter().any(|call| call.text.as_deref() == Some("ab") && call.status == CallStatus::Ok));
    assert_eq!(calls.len(), asked);
}

#[tokio::test]
async fn calls_are_served_again_when_another_process_makes_room() {
    let mock = Mock::start(Script::default()).await;
    let folder = tempfile::tempdir().expect("a folder");
    let old = folder.path().join("captures/date=2020-01-01");
    std::fs::create_dir_all(&old).expect("a folder");
    std::fs::write(old.join("old.parquet"), vec![0; 500_000]).expect("written");
    let settings = json!({"capture_max_bytes": 400_000, "capture_min_free_bytes": 0});
    let process = Process::start_in(folder, &mock.url(), &settings, &[]).await;
    until(&process, &request(true), 507).await;
    assert_eq!(mock.asked().len(), 0);
    let old = process.folder.path().join("captures/date=2020-01-01");
    std::fs::remove_dir_all(old).expect("removed");
    until(&process, &request(true), 200).await;
    process.says("there is room for captures").await;
}

/// A file system of its own, gone with this value.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

impl Mounted {
    fn new(folder: &Path) -> Option<Self> {
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=16m", "tmpfs"]).arg(folder).output();
        if mounted.as_ref().is_ok_and(|output| output.status.success()) {
            return Some(Self(folder.to_owned()));
        }
        println!("skipped: a file system cannot be mounted here (that takes root): {mounted:?}");
        None
    }

    fn grow(&self) {
        let status = Command::new("mount").args(["-o", "remount,size=64m"]).arg(&self.0).status();
        assert!(status.is_ok_and(|status| status.success()));
    }
}

/// Fills a disk of sixteen megabytes by calls: those that were answered are there once, those refused are told why, and
/// it goes on when the disk is larger.
async fn fill(settings: &Value, says: &str) {
    let disk = tempfile::tempdir().expect("a folder");
    let Some(mounted) = Mounted::new(disk.path()) else { return };
    let mock = Mock::start(Script::default()).await;
    let mut settings = settings.clone();
    settings["capture_dir"] = json!(disk.path().join("captures"));
    let process = Process::start(&mock.url(), &settings, &[]).await;
    let url = process.url("chat/completions");
    let mut acted = Vec::new();
    let refused = loop {
        let response = post(&url, &large(300_000)).await;
        let status = response.status().as_u16();
        let id = response.headers().get("x-lego-call-id").map(|id| id.to_str().expect("text").to_owned());
        let (bytes, is_whole) = read(response).await;
        let said = String::from_utf8_lossy(&bytes).into_owned();
        if said.contains(r#""finish_reason":"stop""#) {
            acted.push(id.expect("an id"));
            assert!(acted.len() < 100, "the disk is never full");
        } else if status == 507 {
            break said;
        } else {
            // Sampled before anybody knew, and not kept: its client is told.
            assert!(!is_whole && said.contains("capture_failed") && said.contains("no space left"), "{said}");
        }
    };
    let place = disk.path().display().to_string();
    for part in [says, &place, "lego capture prune", "capture_full"] {
        assert!(refused.contains(part), "{part} in {refused}");
    }
    let asked = mock.asked().len();
    assert_eq!(post(&url, &large(300_000)).await.status().as_u16(), 507);
    assert_eq!(mock.asked().len(), asked, "nothing is sampled that cannot be kept");
    mounted.grow();
    until(&process, &large(300_000), 200).await;
    process.signal(Signal::SIGTERM);
    let (code, said, _folder) = process.end().await;
    assert_eq!(code, Some(0), "{said}");
    let reader = lego::capture::Reader::open(&disk.path().join("captures"), lego::capture::Query::default());
    let stored: Vec<String> =
        reader.expect("readable").map(|call| call.expect("whole").call_id.to_string()).collect();
    for id in &acted {
        assert_eq!(stored.iter().filter(|stored| *stored == id).count(), 1, "{id}");
    }
    drop(mounted);
}

#[tokio::test]
async fn a_full_disk_refuses_calls_keeps_what_was_answered_and_goes_on_when_it_is_larger() {
    fill(&json!({"capture_min_free_bytes": 0}), "no space left").await;
    fill(&json!({}), "are to stay free (proxy.capture_min_free_bytes)").await;
}
