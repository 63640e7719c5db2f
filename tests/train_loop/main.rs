//! `lego train` and `lego eval` from outside: real trials in real sandboxes, on the bundled policy and tasks.

#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use lego::capture::{Query, Reader};
use lego::telemetry::{COLUMNS, MetricValue, read_column};
use serde_json::{Value, json};
use tempfile::TempDir;

mod aux_calls;
mod breaks;
mod diverged;
mod evaluation;
mod files;
mod full_disk;
mod token_in;

/// Columns that must be equal between two runs of one seed, to the bit.
const REPEATABLE: [&str; 10] = [
    "loss",
    "reward_mean",
    "solve_rate",
    "kl",
    "entropy",
    "grad_norm",
    "max_logprob_diff",
    "prob_correlation",
    "sampled_tokens",
    "trained_tokens",
];

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// A small run; with `LEGO_TEST_FULL` set, the repository's own configuration for a few steps:
/// `LEGO_TEST_FULL=1 cargo test --release --test train_loop -- the_same_seed a_killed_run`.
fn config(dir: &Path, extra: &str) -> PathBuf {
    let path = dir.join("train.toml");
    if is_full() {
        let text = fs::read_to_string(format!("{ROOT}/train.toml")).expect("train.toml");
        let text = text.replace("max_steps = 100", "max_steps = 6\ncheckpoint_interval = 1");
        let text = text.replace("eval_tasks = 200", "eval_tasks = 20").replace("seed = 1", extra);
        fs::write(&path, text).expect("config");
        return path;
    }
    let text = format!(
        "[training]\nmax_steps = 3\nlearning_rate = 3e-4\ngroup_size = 4\nbatch_size = 8\n\
         rollout_batch_size = 8\nmax_turns = 3\nmax_new_tokens = 96\nkl_coef = 0.01\neval_tasks = 2\n\
         eval_samples = 1\ncheckpoint_interval = 1\nthreads = 2\n{extra}\n\
         [training.async]\nlong_tail_timeout_sec = 60\n\
         [policy]\nupstream = \"embedded\"\nmodel_path = \"models/lego-tiny\"\n"
    );
    fs::write(&path, text).expect("config");
    path
}

fn is_full() -> bool {
    std::env::var_os("LEGO_TEST_FULL").is_some()
}

/// A test's own folder, with lego under a name of its own in it: by that its processes are told from those of tests
/// beside it.
fn test_folder() -> TempDir {
    let temp = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("temp");
    fs::hard_link(env!("CARGO_BIN_EXE_lego"), temp.path().join("lego")).expect("a second name of lego");
    temp
}

/// The lego of a test's folder.
fn lego(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(folder.join("lego"));
    command.current_dir(ROOT).args(arguments).stdin(Stdio::null());
    command
}

fn train(config: &Path, output: &Path, more: &[&str]) -> Command {
    let folder = config.parent().expect("the test's folder");
    let mut command = lego(folder, &["train", "--dataset", "data/swebench_mini.jsonl"]);
    command.arg("--config").arg(config).arg("--output-dir").arg(output).args(more);
    command
}

fn finished(command: &mut Command) -> Output {
    let output = command.output().expect("lego runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// A step of four trials in which this program of Python is the harness. `keys`: of the training, and of its samples.
fn run_harness(folder: &Path, name: &str, program: &str, (training, samples): (&str, &str)) -> PathBuf {
    let config = folder.join("train.toml");
    let text = format!(
        "[training]\nmax_steps = 1\ngroup_size = 4\nbatch_size = 4\nrollout_batch_size = 4\nmax_turns = 8\n\
         max_new_tokens = 96\neval_samples = 0\neval_greedy = false\nlearning_rate = 1e-4\nseed = 3\n{training}\n\
         [training.samples]\n{samples}\n\
         [policy]\nupstream = \"embedded\"\nmodel_path = \"models/lego-tiny\"\n"
    );
    fs::write(&config, text).expect("config");
    let proxy = folder.join("proxy_config.json");
    let command = ["/usr/bin/python3", "-c", program];
    let text =
        json!({"proxy": {"upstream_base_url": "embedded"}, "harness": {"type": "mini", "command": command}});
    fs::write(&proxy, text.to_string()).expect("config");
    let run = folder.join(name);
    finished(train(&config, &run, &[]).arg("--proxy-config").arg(&proxy));
    run
}

fn columns(run: &Path) -> BTreeMap<&'static str, Vec<Option<MetricValue>>> {
    let path = run.join("metrics.parquet");
    REPEATABLE.into_iter().map(|name| (name, read_column(&path, name).expect(name))).collect()
}

fn report(run: &Path) -> Value {
    let text = fs::read(run.join("reports/report.json")).expect("report");
    serde_json::from_slice(&text).expect("report is JSON")
}

/// Processes that a test's folder has to do with: those that run its lego (nurseries, helpers, every pid 1, the small
/// harness), and those to which some of it is mounted (harnesses, verifiers).
fn legos_of(folder: &Path) -> Vec<String> {
    // Mounts are named by their place in a file system, which need not be the root's.
    let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").expect("proc").flatten() {
        let read = |file: &str| {
            String::from_utf8_lossy(&fs::read(entry.path().join(file)).unwrap_or_default()).into_owned()
        };
        let program = fs::read_link(entry.path().join("exe")).unwrap_or_default();
        if program.starts_with(folder) || read("mountinfo").contains(&name) {
            found.push(format!("{}: {}", program.display(), read("cmdline").replace('\0', " ")));
        }
    }
    found
}

/// What a lego that was killed had started ends by itself.
fn nothing_is_left(folder: &Path) {
    wait_for("end of all processes", || legos_of(folder).is_empty());
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
    while !is_so() {
        assert!(std::time::Instant::now() < deadline, "no {what} after two minutes");
        std::thread::yield_now();
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

fn calls(run: &Path) -> Vec<lego::record::Call> {
    let reader = Reader::open(&run.join("captures"), Query::default()).expect("captures");
    reader.collect::<Result<Vec<_>, _>>().expect("readable")
}

#[test]
fn the_same_seed_gives_the_same_run_to_the_bit() {
    let temp = test_folder();
    let config = config(temp.path(), "seed = 7");
    let text = fs::read_to_string(&config).expect("config");
    // Two optimizer steps a policy version, of which the last has one left; an evaluation after the first version.
    let text = text.replace("\nbatch_size = 8", "\nbatch_size = 4\neval_interval = 2");
    fs::write(&config, text).expect("config");
    let (first, second) = (temp.path().join("first"), temp.path().join("second"));
    finished(&mut train(&config, &first, &[]));
    finished(&mut train(&config, &second, &[]));
    assert_eq!(columns(&first), columns(&second));

    let report = report(&first);
    assert_eq!(report["max_logprob_diff"], 0.0, "captured and recomputed log-probs differ");
    assert_eq!(report["steps"], if is_full() { 6 } else { 3 });
    for key in [
        "heldout_solve_rate_before",
        "heldout_solve_rate_after",
        "heldout_greedy_before",
        "heldout_greedy_after",
        "min_prob_correlation",
        "wall_seconds",
        "seed",
    ] {
        assert!(report[key].is_number(), "{key}: {report}");
    }

    if !is_full() {
        rows_hold_all_that_was_measured(&first);
    }

    // Law 6, from outside: the report's buckets sum to what the engine reported for the captured calls.
    let calls = calls(&first);
    let usage: u64 = calls.iter().filter_map(|call| call.usage).map(|usage| usage.completion_tokens).sum();
    let tokens = &report["tokens"];
    let left_out: u64 =
        tokens["left_out"].as_object().expect("buckets").values().filter_map(Value::as_u64).sum();
    assert_eq!(tokens["sampled"].as_u64(), Some(usage));
    assert_eq!(tokens["trained"].as_u64().map(|trained| trained + left_out), Some(usage));
    the_ledger_agrees(&first, tokens);
    the_export_agrees(&first, tokens);
    for call in &calls {
        let ids = call.completion_token_ids.as_ref().map_or(0, Vec::len);
        assert_eq!(call.completion_logprobs.as_ref().map_or(0, Vec::len), ids);
        assert_eq!(call.sampling_sent.top_p, Some(1.0), "law 12");
    }
}

/// What `lego capture ledger` makes of captures and the run's files is what the trainer booked while it ran.
fn the_ledger_agrees(run: &Path, tokens: &Value) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lego"));
    let output = command.args(["capture", "ledger", "--json"]).arg(run).output().expect("lego runs");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let last: Value = serde_json::from_str(text.lines().last().expect("a line")).expect("JSON");
    let mut buckets = last["total"]["buckets"].clone();
    let trained = buckets.as_object_mut().expect("buckets").remove("trained");
    assert_eq!((trained.as_ref(), &buckets), (Some(&tokens["trained"]), &tokens["left_out"]));
}

/// What `lego capture export` gives another trainer is what this run trained on.
fn the_export_agrees(run: &Path, tokens: &Value) {
    let path = run.join("trl.jsonl");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lego"));
    command.args(["capture", "export", "--format", "trl", "--out"]).arg(&path).arg(run);
    let output = command.output().expect("lego runs");
    assert!(output.status.success(), "{output:?}");
    let text = fs::read_to_string(path).expect("written");
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let mask =
        |row: &Value| row["env_mask"].as_array().expect("mask").iter().filter_map(Value::as_u64).sum::<u64>();
    assert_eq!(Some(rows.iter().map(mask).sum()), tokens["trained"].as_u64());
    for row in &rows {
        let trial = run.join("trials").join(row["episode_id"].as_str().expect("a trial")).join("result.json");
        let result: Value = serde_json::from_slice(&fs::read(trial).expect("result")).expect("JSON");
        let group = format!("v{}-g{}", row["policy_version"], result["group_id"]);
        assert_eq!((&row["group_id"], &row["reward"]), (&group.into(), &result["reward"]));
        let sum: Option<f64> =
            row["group_rewards"].as_array().expect("rewards").iter().map(Value::as_f64).sum();
        let (reward, mean) = (row["reward"].as_f64().expect("graded"), sum.expect("numbers") / 4.0);
        let advantage = row["advantage"].as_f64().expect("its group is complete");
        assert!(advantage.abs() < 1e-9 || (advantage > 0.0) == (reward > mean), "{row}");
    }
}

/// Of three steps: two of a version of eight trials, evaluated, and one of a version of four.
fn rows_hold_all_that_was_measured(run: &Path) {
    let column = |name: &str| read_column(&run.join("metrics.parquet"), name).expect(name);
    for catalogued in COLUMNS {
        let values = column(catalogued.name);
        assert_eq!(values.len(), 3, "{}", catalogued.name);
        assert!(values.iter().any(Option::is_some), "{} is never written", catalogued.name);
    }
    let integers = |name: &str| -> Vec<i64> {
        let values = column(name).into_iter().flatten();
        values.filter_map(|v| if let MetricValue::Integer(v) = v { Some(v) } else { None }).collect()
    };
    assert_eq!(integers("trials"), [8, 8, 4], "the last version samples what its one step trains on");
    assert_eq!(integers("policy_version"), [0, 0, 1]);
    let is_there = |name: &str| column(name).iter().map(Option::is_some).collect::<Vec<_>>();
    assert_eq!(is_there("heldout_solve_rate"), [false, true, true], "after step 2, and after the last");
    assert_eq!(is_there("replay_seconds"), [true, true, false]);
    let evaluation: Value =
        serde_json::from_slice(&fs::read(run.join("reports/evaluation-step-2.json")).expect("evaluated"))
            .expect("JSON");
    assert_eq!(column("heldout_greedy")[1], evaluation["rates"]["greedy"].as_f64().map(MetricValue::Float));
    // Each version's tokens are in its columns.
    let of_version = |first: usize, rows: std::ops::Range<usize>| {
        let others = ["masked", "superseded", "aux", "infra_failure", "dropped", "usage_unknown", "no_ids"];
        let left_out: i64 = others.iter().map(|name| integers(&format!("{name}_tokens"))[first]).sum();
        let trained: i64 = integers("trained_tokens")[rows].iter().sum();
        assert_eq!(integers("sampled_tokens")[first], trained + left_out);
    };
    of_version(0, 0..2);
    of_version(2, 2..3);
}

#[test]
fn a_killed_run_goes_on_as_if_nothing_had_happened() {
    let temp = test_folder();
    let config = config(temp.path(), "seed = 8");
    let whole = temp.path().join("whole");
    finished(&mut train(&config, &whole, &[]));

    // At ten moments, drawn once: in the first evaluation, within steps, between them, during a resume. A run that
    // comes to its end before the tenth is looked at, and another one takes the rest of them.
    const KILLS: u64 = 10;
    let (mut kills, mut runs, mut looked_at) = (0, 0, 0);
    let mut random = 0x9E37_79B9_u64;
    while kills < KILLS {
        runs += 1;
        let killed = temp.path().join(format!("killed-{runs}"));
        while kills < KILLS {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let most = if is_full() { 400 } else { 8 << (kills % 3) };
            let calls_before_kill = usize::try_from(random >> 33).expect("small") % most;
            let is_new = !killed.join("run.json").exists();
            let more: &[&str] = if is_new { &[] } else { &["--resume"] };
            let before = if is_new { 0 } else { calls(&killed).len() };
            let mut command = train(&config, &killed, more);
            let mut child: Child = command.stderr(Stdio::null()).spawn().expect("lego runs");
            wait_for("calls", || {
                child.try_wait().expect("child").is_some()
                    || (killed.join("run.json").exists()
                        && killed.join("captures").exists()
                        && calls(&killed).len() >= before + calls_before_kill)
            });
            if let Some(status) = child.try_wait().expect("child") {
                assert!(status.success(), "{status}");
                break;
            }
            child.kill().expect("kill -9");
            // It may have ended by itself just before.
            if child.wait().expect("reaped").code().is_some() {
                break;
            }
            kills += 1;
            looked_at += every_edit_that_was_made_is_captured(&killed);
        }
        finished(&mut train(&config, &killed, &["--resume"]));
        is_the_same_run(&whole, &killed);
        nothing_is_left(temp.path());
        assert!(!killed.join("scratch").exists(), "workspaces are left");
    }
    assert_eq!(kills, KILLS);
    assert!(looked_at > 0, "no kill left a workspace to look at");
}

fn is_the_same_run(whole: &Path, killed: &Path) {
    assert_eq!(columns(whole), columns(killed));
    for evaluation in ["evaluation_before", "evaluation_after"] {
        assert_eq!(
            report(whole)[evaluation]["per_task"],
            report(killed)[evaluation]["per_task"],
            "{evaluation}"
        );
        assert_eq!(report(whole)[evaluation]["step"], report(killed)[evaluation]["step"], "{evaluation}");
    }
    let mut ids: Vec<_> = calls(killed).iter().map(|call| (call.call_id, call.choice_index)).collect();
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "a call is there twice");
}

/// A workspace whose program was changed belongs to a harness that saw a call finish: that call must be in
/// the captures, whatever killed lego.
/// Gives the number of workspaces that could be looked at.
fn every_edit_that_was_made_is_captured(run: &Path) -> usize {
    let calls = calls(run);
    let mut looked_at = 0;
    // None yet: lego was killed before the first trial.
    for entry in fs::read_dir(run.join("scratch")).into_iter().flatten().flatten() {
        let workspace = entry.path().join("workspace");
        let session = entry.file_name().to_string_lossy().into_owned();
        if !workspace.join(".git").exists() {
            continue;
        }
        // Its own repository, and never this one, in whose target/ it lies.
        let arguments = ["--git-dir", ".git", "--work-tree", ".", "diff", "-U0"];
        let diff = Command::new("git").current_dir(&workspace).args(arguments).output().expect("git");
        // Where it is not whole, lego was killed while it was made: no agent had it yet.
        if !diff.status.success() {
            continue;
        }
        looked_at += 1;
        let text = String::from_utf8_lossy(&diff.stdout).into_owned();
        let added = text.lines().filter(|line| line.starts_with('+') && !line.starts_with("+++"));
        for line in added.map(|line| line[1..].trim()) {
            let is_captured = calls
                .iter()
                .filter(|call| call.session_id.as_str() == session)
                .filter_map(|call| call.tool_calls.as_ref())
                .flatten()
                .filter_map(|tool| serde_json::from_str::<Value>(&tool.arguments).ok())
                .any(|arguments| arguments["new"].as_str().map(str::trim) == Some(line));
            assert!(is_captured, "session {session} acted on a call that is not captured: {line}");
        }
    }
    looked_at
}

#[test]
fn ctrl_c_ends_cleanly_and_resume_goes_on() {
    let temp = test_folder();
    let config = config(temp.path(), "seed = 9\neval_interval = 2");
    let run = temp.path().join("run");
    let interrupt = |more: &[&str], moment: &str, is_now: &dyn Fn() -> bool| {
        let mut child = train(&config, &run, more).stderr(Stdio::null()).spawn().expect("lego runs");
        wait_for(moment, is_now);
        let started = legos_of(temp.path());
        let has = |part: &str| started.iter().any(|process| process.contains(part));
        assert!(has("lego train") && has("__sandbox-init"), "a look that would find nothing: {started:?}");
        let interrupted =
            Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill");
        assert!(interrupted.success());
        // How long it takes depends on the machine and is not asserted. What it may wait for is counted in lego: the
        // scratch folder is tried 50 times 20 ms, threads left behind get a second, and a hang ends this wait.
        wait_for("end after Ctrl-C", || child.try_wait().expect("child").is_some());
        assert_eq!(child.wait().expect("ends").code(), Some(130));
        assert_eq!(legos_of(temp.path()), Vec::<String>::new());
    };
    interrupt(&[], "calls", &|| run.join("captures").exists() && calls(&run).len() >= 10);
    let events = fs::read_to_string(run.join("events.jsonl")).expect("events");
    assert!(events.contains("\"interrupted\""), "{events}");
    // A flag that could have no effect is refused, one that says what the run has is not.
    let refused = train(&config, &run, &["--resume", "--max-steps", "5"]).output().expect("lego runs");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("--max-steps 5 was given"), "{text}");
    let mut other = lego(temp.path(), &["train", "--dataset", "data/swebench_other.jsonl", "--resume"]);
    let refused = other.arg("--output-dir").arg(&run).output().expect("lego runs");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && text.contains("--dataset") && text.contains("its own config"),
        "{text}"
    );
    // Without the sums nobody knows what it was started with.
    let (kept, away) = (run.join("inputs.json"), run.join("inputs.away"));
    fs::rename(&kept, &away).expect("moved");
    let refused = train(&config, &run, &["--resume"]).output().expect("lego runs");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("inputs.json is gone"), "{text}");
    fs::rename(&away, &kept).expect("moved");
    // Stopped in the evaluation of step 2, which is made when the run goes on.
    interrupt(&["--resume"], "evaluation of step 2", &|| {
        let trials = fs::read_dir(run.join("trials")).into_iter().flatten().flatten();
        trials.into_iter().any(|trial| trial.file_name().to_string_lossy().starts_with("eval-step-2-"))
    });
    finished(&mut train(&config, &run, &["--resume", "--max-steps", "3"]));
    assert_eq!(report(&run)["steps"], 3);
    assert!(run.join("reports/evaluation-step-2.json").exists(), "the evaluation of step 2 is lost");
    let greedy = read_column(&run.join("metrics.parquet"), "heldout_greedy").expect("column");
    assert_eq!(greedy.iter().map(Option::is_some).collect::<Vec<_>>(), [false, true, true]);
    // A run that has ended has the same report when it is resumed, wherever that is asked for.
    let ended = report(&run);
    assert_eq!(ended["evaluation_before"]["step"], 0);
    let mut again = lego(temp.path(), &["train", "--resume", "--output-dir", "run"]);
    finished(again.current_dir(temp.path()));
    assert!(report(&run)["wall_seconds"].as_f64() > ended["wall_seconds"].as_f64(), "the time of all starts");
    for part in ["evaluation_before", "evaluation_after", "tokens", "train_curve"] {
        assert_eq!(report(&run)[part], ended[part], "{part}");
    }
    let log = fs::read_to_string(run.join("train.log")).expect("train.log");
    assert!(log.contains("step    3  solve rate") && log.contains("evaluation (after)"), "{log}");
}

#[test]
fn bad_input_is_refused_before_anything_starts() {
    let temp = test_folder();
    let config = config(temp.path(), "");
    let refused = |command: &mut Command, parts: &[&str]| {
        let output = command.output().expect("lego runs");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{text}");
        for part in parts {
            assert!(text.contains(part), "{part:?} is not in: {text}");
        }
    };
    let run = |name: &str| temp.path().join(name);

    let broken = temp.path().join("broken.jsonl");
    fs::write(&broken, "\n{\"instance_id\": 3}\n").expect("write");
    let alone = temp.path().join("alone.jsonl");
    let tasks = fs::read_to_string(format!("{ROOT}/data/swebench_mini.jsonl")).expect("dataset");
    fs::write(&alone, tasks.lines().next().expect("a line")).expect("write");
    let broken_dataset = |dataset: &Path| {
        let mut command = lego(temp.path(), &["train", "--dataset"]);
        command.arg(dataset).arg("--config").arg(&config).arg("--output-dir").arg(run("a"));
        command
    };
    refused(&mut broken_dataset(&broken), &["broken.jsonl", "line 2"]);
    refused(&mut broken_dataset(&alone), &["alone.jsonl", "line 1", "bundle"]);
    refused(&mut broken_dataset(&temp.path().join("none.jsonl")), &["none.jsonl"]);

    let model = temp.path().join("model");
    fs::create_dir(&model).expect("dir");
    for entry in fs::read_dir(format!("{ROOT}/models/lego-tiny")).expect("model").flatten() {
        if entry.path().is_file() {
            fs::copy(entry.path(), model.join(entry.file_name())).expect("copy");
        }
    }
    let weights = model.join("model.safetensors");
    let bytes = fs::read(&weights).expect("weights");
    fs::write(&weights, &bytes[..bytes.len() / 2]).expect("write");
    let text = fs::read_to_string(&config).expect("config");
    let other = temp.path().join("other.toml");
    fs::write(&other, text.replace("models/lego-tiny", &model.to_string_lossy())).expect("write");
    refused(&mut train(&other, &run("b"), &[]), &["model.safetensors"]);

    fs::write(&other, text.replace("max_turns", "max_turn")).expect("write");
    refused(&mut train(&other, &run("c"), &[]), &["other.toml", "max_turn", "max_turns"]);

    refused(&mut train(&config, &run("d"), &["--resume"]), &["no run to resume"]);

    // One that could not start is no run: the folder is there for the next try.
    fs::write(&other, text.replace("[policy]", "[policy]\nmax_batch = 1000000000")).expect("write");
    for _ in 0..2 {
        refused(&mut train(&other, &run("e"), &[]), &["policy.max_batch"]);
    }
}
