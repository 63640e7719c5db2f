//! `lego eval`: the same rates as in training, of a folder and of a server.

use std::io::{BufRead as _, BufReader};

use serde_json::json;

use super::*;

fn eval(config: &Path, output: &Path, more: &[&str]) -> Command {
    let folder = config.parent().expect("the test's folder");
    let mut command = lego(folder, &["eval", "--dataset", "data/swebench_mini.jsonl", "--json"]);
    command.arg("--config").arg(config).arg("--output-dir").arg(output).args(more);
    command
}

fn scores(command: &mut Command) -> Value {
    let output = finished(command);
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object on stdout");
    assert_eq!(report["evaluation"]["invalid_trials"], 0, "{report}");
    // Nobody watches a bar here.
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("evaluation (heldout): 5 of 9\n"), "{told}");
    report["evaluation"]["per_task"].clone()
}

/// `lego serve` on a port of its own; killed when dropped.
struct Server(Child, String);

impl Server {
    fn start(folder: &Path) -> Self {
        let mut command = lego(folder, &["serve", "--model-path", "models/lego-tiny", "--port", "0"]);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("lego serves");
        let lines = BufReader::new(child.stderr.take().expect("stderr")).lines();
        let mut lines = lines.map(|line| line.expect("a line"));
        let url = lines
            .find_map(|line| {
                line.split_once("serving on ").map(|(_, url)| url.trim_end_matches("/v1").to_owned())
            })
            .expect("the server says where it is");
        // What it writes later must not block it.
        std::thread::spawn(move || lines.for_each(drop));
        Self(child, url)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _reaped = self.0.wait();
    }
}

#[test]
fn a_policy_has_the_same_scores_in_training_alone_and_behind_a_server() {
    let temp = test_folder();
    let config = config(temp.path(), "seed = 5");
    let run = |name: &str| temp.path().join(name);
    let more = ["--tasks", "3", "--samples", "2", "--greedy"];
    let alone = scores(&mut eval(&config, &run("alone"), &more));
    assert_eq!(alone.as_array().map(Vec::len), Some(3));
    for task in alone.as_array().expect("tasks") {
        assert_eq!(task["sampled"].as_array().map(Vec::len), Some(2), "{task}");
        assert!(task["greedy"].is_number(), "{task}");
    }
    let on_disk: Value = report(&run("alone"));
    assert_eq!(on_disk["evaluation"]["per_task"], alone);
    assert_eq!(on_disk["policy"], "models/lego-tiny");
    let usage: u64 =
        calls(&run("alone")).iter().filter_map(|call| call.usage).map(|u| u.completion_tokens).sum();
    assert_eq!(on_disk["evaluation"]["tokens"]["sampled"], json!(usage), "every token has its bucket");

    let text = fs::read_to_string(&config).expect("config").replace("max_steps = 3", "max_steps = 1");
    let text = text.replace("eval_tasks = 2\neval_samples = 1", "eval_tasks = 3\neval_samples = 2");
    let training = temp.path().join("training.toml");
    fs::write(&training, text).expect("config");
    if !is_full() {
        finished(&mut train(&training, &run("train"), &[]));
        assert_eq!(report(&run("train"))["evaluation_before"]["per_task"], alone);
    }

    let server = Server::start(temp.path());
    let more = [&more[..], &["--upstream", &server.1, "--model-name", "lego-tiny"]].concat();
    assert_eq!(scores(&mut eval(&config, &run("served"), &more)), alone);
    assert!(calls(&run("served")).iter().all(|call| call.completion_token_ids.is_some()));
}

#[test]
fn an_evaluation_refuses_bad_input_and_stops_cleanly() {
    let temp = test_folder();
    let config = config(temp.path(), "");
    let output = temp.path().join("run");
    for (more, parts) in [
        (&["--model-path", "/no/model"][..], &["/no/model", "config.json"][..]),
        (&["--samples", "0", "--greedy=false"], &["--samples N"]),
        (&["--upstream", "http://127.0.0.1:9"], &["--model-name"]),
        (&["--temperature=-1"], &["--temperature", "-1"]),
    ] {
        let refused = eval(&config, &output, more).output().expect("lego runs");
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success(), "{more:?}: {text}");
        for part in parts {
            assert!(text.contains(part), "{more:?}: {part:?} is not in: {text}");
        }
        assert!(!output.exists(), "{more:?}: a run folder was made");
    }
    // Nobody listens there: broken machinery, and no rate, long before the last of a thousand trials.
    let more = ["--tasks", "0", "--samples", "4", "--upstream", "http://127.0.0.1:9", "--model-name", "m"];
    let refused = eval(&config, &output, &more).output().expect("lego runs");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{text}");
    assert!(text.contains("every trial failed by broken machinery") && refused.stdout.is_empty(), "{text}");
    assert!(text.matches("invalid_trajectory").count() < 200, "{text}");
    let refused = train(&config, &output, &["--resume"]).output().expect("lego runs");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("holds an evaluation"), "{text}");

    let stopped = temp.path().join("stopped");
    let mut child =
        eval(&config, &stopped, &["--tasks", "0"]).stdout(Stdio::piped()).spawn().expect("lego runs");
    wait_for("calls", || stopped.join("captures").exists() && calls(&stopped).len() >= 5);
    let interrupted = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill");
    assert!(interrupted.success());
    assert_eq!(child.wait().expect("ends").code(), Some(130));
    assert_eq!(legos_of(temp.path()), Vec::<String>::new());
    assert!(!stopped.join("scratch").exists(), "workspaces are left");
}
