//! A run's folder made up for tests, and exports of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lego::capture::{Writer, WriterOptions};
use lego::record::{Call, CallSink, JsonText};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::calls::call;

/// A run with the files that its trainer writes.
pub struct Run {
    pub folder: TempDir,
    events: Vec<Value>,
}

impl Run {
    pub fn new(group_size: usize) -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let at = |name: &str| folder.path().join(name);
        fs::write(at("run.json"), r#"{"incarnation": 1}"#).expect("written");
        let batch = 8 * group_size;
        let config = format!(
            "[training]\ngroup_size = {group_size}\nbatch_size = {batch}\nrollout_batch_size = {batch}\n"
        );
        fs::write(at("config.resolved.toml"), config + "[sandbox]\nagent_oom = \"mask\"\n").expect("written");
        Self { folder, events: vec![] }
    }

    /// A group of two, `v0-g0-0` and `v0-g0-1`, the second of which gives no row: [`unsampled`] is all of its calls.
    pub fn of_one_episode() -> Self {
        let mut run = Self::new(2);
        run.trial("v0-g0-0", 0, Some(1.0), json!({}));
        run.trial("v0-g0-1", 0, Some(0.0), json!({}));
        run
    }

    pub fn root(&self) -> &Path {
        self.folder.path()
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    /// The run was started again: trials that follow are of that start.
    pub fn restart(&mut self, incarnation: u32) {
        self.event(json!({
            "event": "run_started", "version": "1", "seed": 1, "incarnation": incarnation, "resumed_at_step": null,
        }));
    }

    fn event(&mut self, mut event: Value) {
        event["at"] = "t".into();
        self.events.push(event);
        let lines: String = self.events.iter().map(|event| format!("{event}\n")).collect();
        fs::write(self.at("events.jsonl"), lines).expect("written");
    }

    /// The trial ended, and its last attempt left this. Members of `result` are set over its `result.json`.
    pub fn trial(&mut self, trial: &str, version: u64, reward: Option<f64>, result: Value) {
        self.ended(trial, version, reward, json!({"outcome": "valid", "termination": "completed"}));
        self.result(trial, reward, result);
    }

    pub fn ended(&mut self, trial: &str, version: u64, reward: Option<f64>, outcome: Value) {
        self.event(json!({
            "event": "trial_finished", "trial_id": trial, "task_id": "t", "policy_version": version,
            "outcome": outcome, "reward": reward, "turns": 1, "sampled_tokens": 1, "seconds": 1.0,
        }));
    }

    pub fn result(&self, trial: &str, reward: Option<f64>, change: Value) {
        let folder = self.at("trials").join(trial);
        fs::create_dir_all(&folder).expect("folder");
        let mut result = json!({
            "trial_id": trial, "task_id": "t", "session_id": format!("{trial}.1"), "purpose": "training",
            "attempt": 1, "outcome": "valid", "termination": "completed", "reward": reward,
        });
        result.as_object_mut().expect("object").extend(change.as_object().cloned().unwrap_or_default());
        fs::write(folder.join("result.json"), result.to_string()).expect("written");
    }

    pub async fn capture(&self, calls: Vec<Call>) {
        write(&self.at("captures"), calls).await;
    }

    pub fn export(&self, format: &str, arguments: &[&str]) -> Exported {
        Exported::of(self.root(), format, arguments)
    }
}

pub async fn write(dir: &Path, calls: Vec<Call>) {
    let writer = Writer::open(dir, WriterOptions::default()).expect("free folder");
    writer.append(calls).await.expect("room");
    writer.close().await;
}

/// An attempt's call with these ids.
pub fn sampled(trial: &str, attempt: u32, prompt: &[u32], completion: &[u32]) -> Call {
    let mut call = call(&format!("{trial}.{attempt}"), prompt, completion);
    call.trial_id = trial.parse().ok();
    call
}

/// The call of `v0-g0-1`, which sampled nothing.
pub fn unsampled() -> Call {
    Call { completion_token_ids: None, usage: None, ..sampled("v0-g0-1", 1, &[1], &[2]) }
}

pub fn body(value: &Value) -> Option<JsonText> {
    JsonText::new(value.to_string()).ok()
}

/// What an export did.
pub struct Exported {
    pub output: Output,
    pub path: PathBuf,
    pub counts: Value,
    _folder: TempDir,
}

impl Exported {
    pub fn of(dir: &Path, format: &str, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("out");
        let output = run(dir, format, &path, &[&["--json"], arguments].concat());
        let counts = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        let exported = Self { output, path, counts, _folder: folder };
        exported.check_sums();
        exported
    }

    /// All that there is is in one bucket.
    fn check_sums(&self) {
        for what in ["rows", "calls", "sessions", "episodes", "groups"] {
            let Some(tally) = self.counts.get(what) else { continue };
            let sum: u64 = tally["by"].as_object().expect("buckets").values().filter_map(Value::as_u64).sum();
            assert_eq!(tally["all"].as_u64(), Some(sum), "{what}: {}", self.counts);
        }
    }

    pub fn words(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    pub fn ok(self) -> Self {
        assert_eq!(self.output.status.code(), Some(0), "{}", self.words());
        self
    }

    pub fn rows(&self) -> Vec<Value> {
        let text = fs::read_to_string(&self.path).unwrap_or_else(|error| panic!("{error}: {}", self.words()));
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    pub fn by(&self, what: &str) -> Value {
        self.counts[what]["by"].clone()
    }
}

pub fn run(dir: &Path, format: &str, path: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    command.args(["capture", "export"]).arg(dir).args(["--format", format, "--out"]).arg(path);
    command.args(arguments).output().expect("lego runs")
}
