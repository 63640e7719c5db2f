//! Many trials at once open many files.

use super::*;

/// `lego eval` of so many tasks, twice each and all at once, where the shell has set this limit.
fn eval(limit: &str, tasks: usize) -> Output {
    let temp = test_folder();
    let config = config(temp.path(), "seed = 5");
    let mut command = Command::new("sh");
    let program = temp.path().join("lego");
    command.current_dir(ROOT).arg("-c").arg(format!("ulimit {limit} && exec \"$0\" \"$@\"")).arg(program);
    command.args(["eval", "--dataset", "data/swebench_mini.jsonl", "--json", "--samples", "2"]);
    command.args(["--greedy=false", "--tasks", &tasks.to_string()]);
    command.arg("--config").arg(config).arg("--output-dir").arg(temp.path().join("run"));
    finished(command.stdin(Stdio::null()))
}

#[test]
fn a_run_takes_as_many_files_as_the_system_allows() {
    let output = eval("-Sn 120", 12);
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object on stdout");
    assert_eq!(report["evaluation"]["invalid_trials"], 0, "{report}");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!told.contains("os error 24"), "{told}");
}

#[test]
fn too_few_files_for_the_trials_are_told_at_the_start() {
    let output = eval("-n 200", 1);
    let told = String::from_utf8_lossy(&output.stderr);
    for part in ["may open 200 files", "32 trials at once (sandbox.max_concurrent)", "ulimit -Hn"] {
        assert!(told.contains(part), "{part} in {told}");
    }
}
