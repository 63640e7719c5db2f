//! A learning rate at which training comes to numbers that are none, and the run that goes on at a lower one.

use super::*;

#[test]
fn a_version_that_cannot_be_trained_on_is_not_saved_and_resume_takes_it_again() {
    if is_full() {
        // It takes a configuration of its own.
        return;
    }
    let temp = test_folder();
    let config = config(temp.path(), "seed = 7");
    let text = fs::read_to_string(&config).expect("config");
    let text = text.replace("max_steps = 3", "max_steps = 4").replace("= 3e-4", "= 0.9");
    let text = text.replace("\nbatch_size = 8", "\nbatch_size = 4");
    // No checkpoint but that of the end: what a failed run leaves is its own doing.
    let text = text.replace("checkpoint_interval = 1", "checkpoint_interval = 0\nkeep_checkpoints = 0");
    fs::write(&config, text).expect("config");
    let run = temp.path().join("run");
    let failed = train(&config, &run, &[]).output().expect("lego runs");
    let text = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && text.contains("the run failed: training: "), "{text}");
    let steps = || read_column(&run.join("metrics.parquet"), "step").expect("steps").len();
    let before = steps();
    assert!((1..4).contains(&before), "some versions were trained on: {text}");
    let checkpoints = || -> Vec<String> {
        let entries = fs::read_dir(run.join("checkpoints")).expect("folder").flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    assert_eq!(checkpoints(), Vec::<String>::new(), "{text}");

    let resolved = run.join("config.resolved.toml");
    let text = fs::read_to_string(&resolved).expect("config");
    fs::write(&resolved, text.replace("learning_rate = 0.9", "learning_rate = 0.0003")).expect("config");
    finished(&mut train(&config, &run, &["--resume"]));
    assert_eq!((steps(), checkpoints()), (4, vec!["step_4".to_owned()]));
    let report = report(&run);
    let left_out = report["tokens"]["left_out"].as_object().expect("buckets").values();
    let left_out: u64 = left_out.filter_map(Value::as_u64).sum();
    let trained = report["tokens"]["trained"].as_u64().expect("a number");
    assert_eq!(report["tokens"]["sampled"].as_u64(), Some(trained + left_out));
}
