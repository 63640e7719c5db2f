//! The bundled dataset is what its generator makes, and held-out functions are nowhere in training.

use std::path::Path;
use std::process::Command;

fn python(args: &[&str]) -> String {
    let output = Command::new("python3")
        .arg("-B")
        .args(args)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("python3");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn the_generator_makes_the_same_bytes() {
    let folder = tempfile::tempdir().expect("folder");
    let out = folder.path().to_str().expect("utf-8");
    python(&["data/generate.py", "--out", out]);
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
    let mut files = vec!["swebench_mini.jsonl".to_owned()];
    for entry in std::fs::read_dir(data.join("repos")).expect("repos") {
        files.push(format!("repos/{}", entry.expect("entry").file_name().to_string_lossy()));
    }
    assert_eq!(files.len(), 21);
    for file in files {
        let (made, kept) = (folder.path().join(&file), data.join(&file));
        assert!(
            std::fs::read(made).expect("made") == std::fs::read(kept).expect("kept"),
            "{file} differs; run python3 data/generate.py"
        );
    }
}

#[test]
fn no_heldout_function_is_a_training_function() {
    let said = python(&["tests/task_data/disjoint.py", "data"]);
    assert!(said.trim().ends_with(" 0 in common"), "{said}");
}
