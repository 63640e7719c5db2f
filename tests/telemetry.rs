//! What a run writes about itself, read back from outside.

use std::fs;
use std::path::Path;

use lego::record::{Outcome, PolicyVersion, Termination};
use lego::telemetry::{
    COLUMNS, Event, EventLog, MetricValue, PROMETHEUS, RunMetrics, TelemetryError, install_prometheus,
    log_to_file, read_column, read_scalars, reference_markdown, start,
};

fn event_files(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(folder.join("tensorboard")).expect("folder");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("entry").path()).collect();
    files.sort();
    files
}

#[test]
fn rows_are_there_after_each_step_and_missing_is_null() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("metrics.parquet");
    let mut metrics = RunMetrics::open(folder.path(), None).expect("opened");
    assert_eq!(read_column(&path, "loss").expect("column"), []);
    metrics.push(1, &[("loss", 0.5.into()), ("trials", 64_u64.into())]).expect("written");
    metrics.push(2, &[("loss", (-0.25).into())]).expect("written");
    let column = |name| read_column(&path, name).expect("column");
    assert_eq!(column("step"), [Some(MetricValue::Integer(1)), Some(MetricValue::Integer(2))]);
    assert_eq!(column("loss"), [Some(MetricValue::Float(0.5)), Some(MetricValue::Float(-0.25))]);
    assert_eq!(column("trials"), [Some(MetricValue::Integer(64)), None]);
    assert_eq!(column("kl"), [None, None]);

    let scalars = read_scalars(&event_files(folder.path())[0]).expect("readable");
    let points: Vec<_> = scalars.iter().map(|point| (point.step, point.tag.as_str(), point.value)).collect();
    assert_eq!(points, [(1, "loss/loss", 0.5), (1, "trials/trials", 64.0), (2, "loss/loss", -0.25)]);
}

#[test]
fn the_same_values_give_the_same_file() {
    let write = || {
        let folder = tempfile::tempdir().expect("temporary folder");
        let mut metrics = RunMetrics::open(folder.path(), None).expect("opened");
        for step in 1..20 {
            metrics.push(step, &[("loss", (step as f64 / 7.0).into())]).expect("written");
        }
        fs::read(folder.path().join("metrics.parquet")).expect("read")
    };
    assert!(write() == write());
}

#[test]
fn a_resume_drops_what_came_after_its_checkpoint() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("metrics.parquet");
    let mut metrics = RunMetrics::open(folder.path(), None).expect("opened");
    for step in 1..=5 {
        metrics.push(step, &[("loss", (step as f64).into())]).expect("written");
    }
    drop(metrics);
    // A kill in the middle of a write leaves the temporary file; the metrics themselves are whole.
    fs::write(folder.path().join("metrics.parquet.tmp"), b"PAR1 torn").expect("written");
    let refusal = RunMetrics::open(folder.path(), None).expect_err("refused");
    assert!(matches!(refusal, TelemetryError::Broken { .. }), "{refusal}");
    let mut metrics = RunMetrics::open(folder.path(), Some(3)).expect("opened");
    assert_eq!(metrics.steps(), [1, 2, 3]);
    metrics.push(4, &[("loss", 40.0.into())]).expect("written");
    let losses = read_column(&path, "loss").expect("column");
    assert_eq!(losses, [1.0, 2.0, 3.0, 40.0].map(|loss| Some(MetricValue::Float(loss))));
    assert_eq!(event_files(folder.path()).len(), 2);
}

#[test]
fn what_comes_after_a_step_is_added_to_its_row_once() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("metrics.parquet");
    let mut metrics = RunMetrics::open(folder.path(), None).expect("opened");
    for step in 1..=2 {
        metrics.push(step, &[("loss", 0.5.into())]).expect("written");
    }
    metrics.amend(1, &[("heldout_greedy", 0.25.into())]).expect("written");
    // As after a resume, which reads what was evaluated before.
    metrics.amend(1, &[("heldout_greedy", 0.75.into()), ("loss", 9.0.into())]).expect("written");
    metrics.amend(7, &[("heldout_greedy", 1.0.into())]).expect("no such row");
    assert!(matches!(metrics.amend(1, &[("lost", 1.0.into())]), Err(TelemetryError::UnknownMetric(_))));
    let column = |name| read_column(&path, name).expect("column");
    assert_eq!(column("heldout_greedy"), [Some(MetricValue::Float(0.25)), None]);
    assert_eq!(column("loss"), [Some(MetricValue::Float(0.5)); 2]);
    let points = read_scalars(&event_files(folder.path())[0]).expect("readable");
    let last = points.last().expect("points");
    assert_eq!((last.step, last.tag.as_str(), points.len()), (1, "heldout/heldout_greedy", 3));
}

#[test]
fn steps_go_forward_and_names_are_declared() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let mut metrics = RunMetrics::open(folder.path(), None).expect("opened");
    metrics.push(2, &[]).expect("written");
    assert!(matches!(metrics.push(2, &[]), Err(TelemetryError::StepOrder { step: 2, last: 2 })));
    assert!(matches!(metrics.push(3, &[("lost", 1.0.into())]), Err(TelemetryError::UnknownMetric(_))));
    for (index, column) in COLUMNS.iter().enumerate() {
        assert!(COLUMNS[..index].iter().all(|other| other.name != column.name), "{}", column.name);
    }
}

#[test]
fn an_event_file_with_a_flipped_bit_is_refused_and_a_torn_one_is_read_to_its_last_record() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let mut metrics = RunMetrics::open(folder.path(), None).expect("opened");
    for step in 1..=3 {
        metrics.push(step, &[("loss", 1.0.into())]).expect("written");
    }
    let path = &event_files(folder.path())[0];
    let whole = fs::read(path).expect("read");
    for length in 0..whole.len() {
        fs::write(path, &whole[..length]).expect("written");
        assert!(read_scalars(path).expect("a torn tail is left out").len() < 3);
    }
    for position in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[position] ^= 1;
        fs::write(path, &flipped).expect("written");
        assert!(read_scalars(path).is_err(), "byte {position}");
    }
}

#[test]
fn events_are_typed_lines_and_a_torn_one_is_cut_off() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("events.jsonl");
    let finished = Event::TrialFinished {
        trial_id: "t-1".parse().expect("id"),
        task_id: "task-1".parse().expect("id"),
        policy_version: PolicyVersion(3),
        outcome: Outcome::Valid { termination: Termination::Completed },
        reward: Some(1.0),
        turns: 2,
        sampled_tokens: 50,
        seconds: 0.5,
    };
    EventLog::open(&path).expect("opened").write(&finished).expect("written");
    let whole = fs::read(&path).expect("read");
    let torn = [whole.as_slice(), b"{\"at\":\"2026"].concat();
    fs::write(&path, torn).expect("written");
    EventLog::open(&path).expect("opened").write(&Event::Interrupted { step: 4 }).expect("written");
    let text = fs::read_to_string(&path).expect("read");
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 2);
    let line: serde_json::Value = serde_json::from_str(lines[0]).expect("JSON");
    assert_eq!(line["event"], "trial_finished");
    assert!(line["at"].as_str().expect("time").ends_with('Z'));
    assert_eq!(serde_json::from_value::<Event>(line).expect("the same event"), finished);
    assert!(lines[1].contains("interrupted"));
}

#[test]
fn the_process_logs_to_its_file_and_counts() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("train.log");
    start().expect("first subscriber");
    assert!(start().is_err());
    let file = log_to_file(&path).expect("opened");
    tracing::info!(step = 3, "filtered 2 invalid trajectories due to sandbox termination");
    drop(file);
    tracing::info!("after the run");
    let text = fs::read_to_string(&path).expect("read");
    assert!(text.contains("filtered 2 invalid trajectories due to sandbox termination step=3"), "{text}");
    assert!(!text.contains("after the run") && !text.contains('\u{1b}'), "{text}");

    let page = install_prometheus().expect("first recorder");
    assert!(install_prometheus().is_err());
    metrics::counter!(PROMETHEUS[0].name).increment(2);
    assert!(page.render().contains(&format!("{} 2", PROMETHEUS[0].name)), "{}", page.render());
}

#[test]
fn the_reference_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md");
    let committed = fs::read_to_string(path).expect("committed");
    assert!(committed == reference_markdown(), "run: cargo run -- config docs --metrics > docs/metrics.md");
}
