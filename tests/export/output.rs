//! What is at the path: all of an export or nothing, and never what was somebody else's.

use std::fs;
use std::path::Path;

use serde_json::json;

use crate::setup::{Run, run, sampled, unsampled};

async fn one_trial() -> Run {
    let run = Run::of_one_episode();
    run.capture(vec![sampled("v0-g0-0", 1, &[1], &[2]), unsampled()]).await;
    run
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("folder").map(|entry| entry.expect("entry").file_name());
    let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn what_is_there_is_replaced_by_force_alone() {
    let of_run = one_trial().await;
    let folder = tempfile::tempdir().expect("folder");
    for form in ["trl", "slime"] {
        let path = folder.path().join(form);
        assert!(run(of_run.root(), form, &path, &[]).status.success());
        let refused = run(of_run.root(), form, &path, &[]);
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && words.contains("pass --force"), "{words}");
        assert!(run(of_run.root(), form, &path, &["--force"]).status.success());
    }
    // A folder that is somebody's own is never replaced, nor is one form's by the other's.
    let own = folder.path().join("own");
    fs::create_dir(&own).expect("folder");
    fs::write(own.join("thesis.txt"), "x").expect("written");
    let (link, socket) = (folder.path().join("link"), folder.path().join("socket"));
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("bound");
    std::os::unix::fs::symlink(folder.path().join("trl"), &link).expect("linked");
    for (form, path, told) in [
        ("slime", own.clone(), "no lego-export.json"),
        ("trl", own.clone(), "is a folder, and this export is a file"),
        ("slime", folder.path().join("trl"), "is a file, and this export is a folder"),
        ("trl", link.clone(), "is a link or a device"),
        ("trl", socket.clone(), "is a link or a device"),
    ] {
        let refused = run(of_run.root(), form, &path, &["--force"]);
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && words.contains(told), "{words}");
    }
    assert_eq!(fs::read_to_string(own.join("thesis.txt")).expect("kept"), "x");
    assert_eq!(names(folder.path()), ["link", "own", "slime", "socket", "trl"], "nothing is left beside");
}

#[tokio::test]
async fn nothing_is_left_of_an_export_that_fails() {
    let of_run = one_trial().await;
    fs::write(of_run.at("trials/v0-g0-0/result.json"), "{").expect("written");
    let folder = tempfile::tempdir().expect("folder");
    for form in ["calls", "openai", "verl", "slime", "prime-rl"] {
        let failed = run(of_run.root(), form, &folder.path().join("out"), &[]);
        assert_eq!(failed.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&failed.stderr).contains("result.json"), "{failed:?}");
        assert_eq!(names(folder.path()), [""; 0], "{form}");
    }
}

#[tokio::test]
async fn two_exports_to_one_path_do_not_mix() {
    let of_run = one_trial().await;
    let folder = tempfile::tempdir().expect("folder");
    for (form, force) in [("trl", false), ("trl", true), ("prime-rl", false)] {
        let path = folder.path().join(format!("{form}-{force}"));
        let arguments: &[&str] = if force { &["--force"] } else { &[] };
        let outcomes: Vec<bool> = std::thread::scope(|scope| {
            let export = || run(of_run.root(), form, &path, arguments).status.success();
            let all: Vec<_> = (0..4).map(|_| scope.spawn(export)).collect();
            all.into_iter().map(|one| one.join().expect("ran")).collect()
        });
        let won = outcomes.iter().filter(|won| **won).count();
        assert_eq!(won, if force { 4 } else { 1 }, "{form}");
        if form == "trl" {
            let text = fs::read_to_string(&path).expect("there");
            assert_eq!(text.lines().count(), 1);
            serde_json::from_str::<serde_json::Value>(&text).expect("one whole line");
        } else {
            assert_eq!(names(&path), ["lego-export.json", "rollouts", "rows.jsonl"]);
        }
    }
    assert_eq!(names(folder.path()), ["prime-rl-false", "trl-false", "trl-true"]);
}

#[tokio::test]
async fn names_of_the_runs_own_files_are_refused() {
    let of_run = one_trial().await;
    let before = fs::read_to_string(of_run.at("events.jsonl")).expect("read");
    for name in [
        "events.jsonl",
        "train.log",
        "metrics.parquet",
        "reports/mine.jsonl",
        "captures/mine.jsonl",
        "run.json",
    ] {
        fs::create_dir_all(of_run.at("reports")).expect("folder");
        let refused = run(of_run.root(), "trl", &of_run.at(name), &["--force"]);
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && words.contains("own files"), "{name}: {words}");
    }
    assert_eq!(fs::read_to_string(of_run.at("events.jsonl")).expect("read"), before);
    // Another name in the run's folder is as good as any.
    assert!(run(of_run.root(), "trl", &of_run.at("trl.jsonl"), &[]).status.success());
    let refused = run(of_run.root(), "trl", &of_run.at("nowhere/out.jsonl"), &[]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("nowhere"), "{refused:?}");
}

#[tokio::test]
async fn ranks_take_equally_many_micro_batches() {
    let mut of_run = Run::new(3);
    for member in 0..3 {
        of_run.trial(&format!("v0-g0-{member}"), 0, Some(f64::from(member)), json!({}));
    }
    let trials = ["v0-g0-0", "v0-g0-1", "v0-g0-2"];
    of_run.capture(trials.map(|trial| sampled(trial, 1, &[1], &[2, 3])).into()).await;
    let exported = of_run.export("prime-rl", &["--ranks", "2"]).ok();
    let steps = fs::read_to_string(exported.path.join("lego-export.json")).expect("told");
    let steps: serde_json::Value = serde_json::from_str(&steps).expect("JSON");
    assert_eq!(steps["files"], json!([{"step": 0, "policy_version": 0, "rows": 3, "fillers": 1}]));
    // A list of two micro batches each.
    for rank in 0..2 {
        let file = fs::read(exported.path.join(format!("rollouts/step_0/rank_{rank}.bin"))).expect("there");
        assert_eq!(file[..5], [0xdd, 0, 0, 0, 2]);
    }
}
