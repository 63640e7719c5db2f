//! A disk that fills up while a run goes on, and is made larger: a file system of twelve megabytes in a mount
//! namespace of the test's own, gone with its last process.

use super::*;

/// Mounts it, trains until it is full, makes it larger, resumes. Each part's exit code goes to a file.
const SCRIPT: &str = r#"
set -u
lego=$1; config=$2; disk=$3; logs=$4
mount -t tmpfs -o size=12m tmpfs "$disk" || exit 9
"$lego" train --dataset data/swebench_mini.jsonl --config "$config" --output-dir "$disk/run" 2>"$logs/full"
echo $? >"$logs/full.code"
mount -o remount,size=1g "$disk" || exit 9
"$lego" train --config "$config" --output-dir "$disk/run" --resume 2>"$logs/resumed"
echo $? >"$logs/resumed.code"
cp "$disk/run/reports/report.json" "$logs/"
"$lego" capture ls --json --capture-dir "$disk/run/captures" >"$logs/calls"
"#;

#[test]
fn a_full_disk_ends_the_run_with_its_name_and_resume_goes_on_when_there_is_room() {
    let temp = test_folder();
    let config = config(temp.path(), "seed = 11");
    // Captures alone must not end the run before the disk does.
    let text = fs::read_to_string(&config).expect("config").replace("max_steps = 3", "max_steps = 40");
    fs::write(&config, text).expect("config");
    let (disk, logs) = (temp.path().join("disk"), temp.path().join("logs"));
    fs::create_dir(&disk).expect("dir");
    fs::create_dir(&logs).expect("dir");
    // A user who is not root is root of a user namespace of their own.
    let output = Command::new("unshare")
        .args(["--map-root-user", "--mount", "sh", "-c", SCRIPT, "sh"])
        .arg(temp.path().join("lego"))
        .arg(&config)
        .arg(&disk)
        .arg(&logs)
        .current_dir(ROOT)
        .output()
        .expect("unshare (util-linux) runs");
    let read = |name: &str| fs::read_to_string(logs.join(name)).unwrap_or_default();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(read("full.code").trim(), "1", "{}", read("full"));
    let told = read("full");
    assert!(told.contains("No space left on device") && told.contains("disk/run"), "{told}");
    assert_eq!(read("resumed.code").trim(), "0", "{}", read("resumed"));
    let report: Value = serde_json::from_str(&read("report.json")).expect("report");
    assert_eq!(report["steps"], 40);
    assert_eq!(report["max_logprob_diff"], 0.0);
    nothing_is_left(temp.path());
}
