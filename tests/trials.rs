//! Trials from outside, with harnesses that crash, hang, say nothing, and one that searches for the answer.

#![cfg(target_os = "linux")]

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use lego::task::{Dataset, TaskStore};
use serde_json::{Value, json};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Runs one step of eight trials with the harness `command`, and gives the run folder.
fn run_with(dir: &Path, command: &[&str], timeout: u64) -> (PathBuf, Output) {
    // The searching harness prints all it finds.
    run_in(dir, command, timeout, "max_output_bytes = 67108864")
}

/// The same with this in the table of `sandbox.toml`.
fn run_in(dir: &Path, command: &[&str], timeout: u64, sandbox_keys: &str) -> (PathBuf, Output) {
    let train = dir.join("train.toml");
    let text = format!(
        "[training]\nmax_steps = 1\ngroup_size = 4\nbatch_size = 8\nrollout_batch_size = 8\nmax_turns = 3\n\
         max_new_tokens = 96\neval_samples = 0\neval_greedy = false\nlearning_rate = 1e-4\n\
         [training.async]\nlong_tail_timeout_sec = {timeout}\n\
         [policy]\nupstream = \"embedded\"\nmodel_path = \"models/lego-tiny\"\n"
    );
    fs::write(&train, text).expect("config");
    let proxy = dir.join("proxy_config.json");
    let text = json!({
        "proxy": {"upstream_base_url": "embedded"},
        "harness": {
            "type": "mini",
            "command": command,
            "llm_config_override": {"model": "vendor/another-name", "auth_type": "api_key"},
        },
    });
    fs::write(&proxy, text.to_string()).expect("config");
    let sandbox = dir.join("sandbox.toml");
    fs::write(&sandbox, format!("[sandbox]\n{sandbox_keys}\n")).expect("config");
    let run = dir.join("run");
    let output = Command::new(env!("CARGO_BIN_EXE_lego"))
        .current_dir(ROOT)
        .args(["train", "--dataset", "data/swebench_mini.jsonl", "--config"])
        .arg(&train)
        .arg("--proxy-config")
        .arg(&proxy)
        .arg("--sandbox-config")
        .arg(&sandbox)
        .arg("--output-dir")
        .arg(&run)
        .env("LEGO_TEST_CANARY", CANARY)
        .stdin(Stdio::null())
        .output()
        .expect("lego runs");
    (run, output)
}

const CANARY: &str = "canary-5f0c2b7e-not-to-be-found";

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Calls the policy once through the only door there is.
const CALL: &str = r#"
import json, os, urllib.request
assert os.environ["OPENAI_MODEL"] == "vendor/another-name", os.environ
assert os.environ["LLM_AUTH_TYPE"] == "api_key", os.environ
def call():
    body = {"model": os.environ["OPENAI_MODEL"], "max_tokens": 8,
            "messages": [{"role": "user", "content": "hello"}]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))
"#;

#[test]
fn a_harness_that_never_calls_the_policy_is_filtered_not_scored() {
    for (command, timeout, cause) in [
        (vec!["sh", "-c", "exit 3"], 60, "exited with code 3 without a model call"),
        (vec!["true"], 60, "exited with code 0 without a model call"),
        (vec!["sleep", "1000"], 1, "hung until its time was up, without a model call"),
        (vec!["/no/such/program"], 60, "/no/such/program"),
    ] {
        let temp = tempfile::tempdir().expect("temp");
        let (run, output) = run_with(temp.path(), &command, timeout);
        let text = stderr(&output);
        assert!(!output.status.success(), "{command:?}: {text}");
        assert!(text.contains("every trial failed by broken machinery"), "{command:?}: {text}");
        assert!(text.contains(cause), "{command:?}: {text}");
        assert!(text.contains("filtered 8 invalid trajectories due to sandbox termination"), "{text}");
        let log = fs::read_to_string(run.join("train.log")).expect("train.log");
        assert!(log.matches("invalid_trajectory").count() >= 8, "{log}");
        for entry in fs::read_dir(run.join("trials")).expect("trials").flatten() {
            let result = fs::read(entry.path().join("result.json")).expect("result");
            let result: Value = serde_json::from_slice(&result).expect("JSON");
            assert_eq!(result["reward"], Value::Null, "never a zero for broken machinery: {result}");
        }
    }
}

#[test]
fn a_harness_that_crashes_or_hangs_after_calls_is_graded() {
    for (end, timeout, termination) in
        [("raise SystemExit(7)", 60, "non_zero_exit"), ("import time; time.sleep(1000)", 5, "agent_timeout")]
    {
        let temp = tempfile::tempdir().expect("temp");
        let script = format!("{CALL}\ncall()\n{end}\n");
        let (run, output) = run_with(temp.path(), &["/usr/bin/python3", "-c", &script], timeout);
        assert!(output.status.success(), "{}", stderr(&output));
        for entry in fs::read_dir(run.join("trials")).expect("trials").flatten() {
            let result = fs::read(entry.path().join("result.json")).expect("result");
            let result: Value = serde_json::from_slice(&result).expect("JSON");
            assert_eq!(result["termination"], termination, "{result}");
            assert_eq!(result["reward"], 0.0, "{result}");
        }
    }
}

/// Tries the proxy's other doors through the one that it has, and goes on working.
const OTHER_DOORS: &str = r#"
import socket, urllib.error
root = os.environ["OPENAI_BASE_URL"].rsplit("/v1", 1)[0]
def tried(method, path, headers={}):
    body = b"{}" if method == "POST" else None
    request = urllib.request.Request(root + path, body, {"content-type": "application/json", **headers}, method=method)
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        return error.code
for path in ("/admin", "/admin/state", "/metrics", "/healthz", "/sessions/other/v1/models", "/v1/../admin/state"):
    print("TRIED GET", path, tried("GET", path))
for path in ("/admin/pause", "/admin/policy-version", "/sessions/other/end", "/sessions/other/v1/chat/completions"):
    for key in ("", "Bearer sk-lego-other.secret"):
        print("TRIED POST", path, tried("POST", path, {"authorization": key}))
body = {"model": os.environ["OPENAI_MODEL"], "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
forged = {"content-type": "application/json", "x-session-done": "1", "x-session-id": "other"}
request = urllib.request.Request(root + "/v1/chat/completions", json.dumps(body).encode(), forged)
print("FORGED", urllib.request.urlopen(request).status)
call()
print("CALLED AGAIN")
raise SystemExit(7)
"#;

#[test]
fn a_harness_that_tries_the_proxys_other_doors_finds_none() {
    let temp = tempfile::tempdir().expect("temp");
    let script = format!("{CALL}{OTHER_DOORS}");
    let (run, output) = run_with(temp.path(), &["/usr/bin/python3", "-c", &script], 60);
    assert!(output.status.success(), "{}", stderr(&output));
    let mut trials = 0;
    for entry in fs::read_dir(run.join("trials")).expect("trials").flatten() {
        let said = fs::read_to_string(entry.path().join("stdout.log")).expect("stdout");
        let tried: Vec<&str> = said.lines().filter(|line| line.starts_with("TRIED")).collect();
        assert_eq!(tried.len(), 14, "{said}");
        assert!(tried.iter().all(|line| line.ends_with(" 404")), "{said}");
        assert!(said.contains("FORGED 200\nCALLED AGAIN"), "a forged end ends nothing: {said}");
        trials += 1;
    }
    assert_eq!(trials, 8);
}

/// Reads every file it can reach, and its own environment, and prints all of it that is text.
const SEARCH: &str = r#"
import os, sys
call()
seen = set()
def show(path):
    try:
        with open(path, "rb") as file:
            data = file.read(4 << 20)
    except OSError:
        return
    sys.stdout.buffer.write(data)
for top in ["/"]:
    for folder, folders, files in os.walk(top):
        # The system's own files are the same on every machine; devices and kernel files may block.
        folders[:] = [f for f in folders if os.path.join(folder, f) not in
                      ("/usr", "/sys", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/dev")]
        for name in files:
            show(os.path.join(folder, name))
for process in os.listdir("/proc"):
    if process.isdigit():
        for name in ("environ", "cmdline", "maps", "mountinfo"):
            show(f"/proc/{process}/{name}")
for root in ("/dev/shm", "/root", "/home", "/work", "/tmp", "/var", "/opt", "/mnt", "/srv", "/data", "/run"):
    for folder, _, files in os.walk(root):
        for name in files:
            show(os.path.join(folder, name))
print("SEARCHED")
"#;

/// The files that a patch changes, as the agent gets them and as the patch leaves them.
fn before_and_after(task: &Value, patch: &str) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let dataset = Dataset::load(&Path::new(ROOT).join("data/swebench_mini.jsonl")).expect("dataset");
    let task = dataset.tasks.iter().find(|known| known.instance_id.as_str() == task).expect("task");
    let temp = tempfile::tempdir().expect("temp");
    let workspace = temp.path().join("workspace");
    let store = TaskStore::new(&dataset, &temp.path().join("cache"));
    store.prepare(task, &workspace).expect("workspace");
    let files: Vec<PathBuf> = patch
        .lines()
        .filter_map(|line| line.strip_prefix("+++ b/"))
        .map(|path| workspace.join(path))
        .collect();
    assert!(!files.is_empty(), "{patch}");
    let read = || files.iter().map(|file| fs::read(file).expect("file")).collect::<Vec<_>>();
    let before = read();
    let patch_file = temp.path().join("patch");
    fs::write(&patch_file, patch).expect("write");
    let applied = Command::new("git").current_dir(&workspace).arg("apply").arg(&patch_file).status();
    assert!(applied.expect("git").success());
    let after = read();
    assert_ne!(before, after);
    (before, after)
}

#[test]
fn a_harness_that_reads_all_it_can_reach_finds_neither_answer_nor_key() {
    let temp = tempfile::tempdir().expect("temp");
    let script = format!("{CALL}{SEARCH}");
    let (run, output) = run_with(temp.path(), &["/usr/bin/python3", "-c", &script], 60);
    assert!(output.status.success(), "{}", stderr(&output));

    let dataset = fs::read_to_string(format!("{ROOT}/data/swebench_mini.jsonl")).expect("dataset");
    let tasks: Vec<Value> = dataset.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let mut found_by_trial = 0;
    for entry in fs::read_dir(run.join("trials")).expect("trials").flatten() {
        let seen = fs::read(entry.path().join("stdout.log")).expect("stdout");
        assert!(seen.ends_with(b"SEARCHED\n"), "the search did not end");
        let contains = |needle: &[u8]| seen.windows(needle.len()).any(|window| window == needle);
        assert!(!contains(CANARY.as_bytes()), "the host's environment is reachable");
        let result = fs::read(entry.path().join("result.json")).expect("result");
        let result: Value = serde_json::from_slice(&result).expect("JSON");
        let task = tasks.iter().find(|task| task["instance_id"] == result["task_id"]).expect("task");
        // The fixed line as the patch has it, and the hidden cases: what the agent must not see.
        let patch = task["patch"].as_str().expect("patch");
        let tests = task["test_patch"].as_str().expect("tests");
        let hidden: Vec<String> = tests
            .lines()
            .filter_map(|line| line.strip_prefix('+'))
            .filter(|line| line.contains("test_hidden_"))
            .map(str::to_owned)
            .collect();
        assert!(!hidden.is_empty());
        let mut secrets: HashSet<&[u8]> =
            hidden.iter().flat_map(|line| line.as_bytes().windows(40)).collect();
        secrets.extend(patch.as_bytes().windows(40).filter(|piece| piece.contains(&b'+')));
        // The fixed file as it stands, too: what of it the agent was not given.
        let (base, fixed) = before_and_after(&result["task_id"], patch);
        let given: HashSet<&[u8]> = base.iter().flat_map(|file| file.windows(40)).collect();
        secrets.extend(fixed.iter().flat_map(|file| file.windows(40)).filter(|piece| !given.contains(piece)));
        let leaked = seen.windows(40).find(|piece| secrets.contains(piece));
        let leaked = leaked.map(|piece| String::from_utf8_lossy(piece).into_owned());
        assert_eq!(leaked, None, "trial {:?} reached a piece of its answer", entry.file_name());
        for line in &hidden {
            assert!(!contains(line.as_bytes()), "a hidden test is reachable: {line}");
        }
        found_by_trial += 1;
    }
    assert_eq!(found_by_trial, 8);
}

fn results(run: &Path) -> Vec<Value> {
    let trials = fs::read_dir(run.join("trials")).expect("trials").flatten();
    let read = |path: PathBuf| serde_json::from_slice(&fs::read(path).expect("result")).expect("JSON");
    trials.map(|entry| read(entry.path().join("result.json"))).collect()
}

#[test]
fn masked_trials_keep_their_rewards_and_a_wave_of_them_ends_well() {
    let temp = tempfile::tempdir().expect("temp");
    let script = format!("{CALL}\ncall()\nheld = b'x' * (400 << 20)\nimport time; time.sleep(1000)\n");
    let command = ["/usr/bin/python3", "-c", &script];
    let (run, output) = run_in(temp.path(), &command, 120, "memory_mb = 128\nagent_oom = \"mask\"");
    assert!(output.status.success(), "{}", stderr(&output));
    let results = results(&run);
    assert_eq!(results.len(), 8);
    for result in results {
        assert_eq!(
            (&result["termination"], &result["attempt"]),
            (&json!("agent_oom"), &json!(2)),
            "{result}"
        );
        assert_eq!(result["reward"], 0.0, "{result}");
    }
    let report = fs::read(run.join("reports/report.json")).expect("report");
    let report: Value = serde_json::from_slice(&report).expect("JSON");
    let tokens = &report["tokens"];
    assert_eq!(tokens["trained"], 0, "{tokens}");
    assert!(tokens["left_out"]["masked: agent_oom"].as_u64() > Some(0), "{tokens}");
    assert_eq!(report["invalid_trajectories"], 0, "{report}");
}
