//! Tasks from outside: datasets, workspaces, and the verifier in real sandboxes.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lego::record::{ExitEvidence, InfraFailure};
use lego::sandbox::{
    Backend, Capabilities, Choice, Exec, Exit, Options, Sandbox, SandboxError, Spec, select_with,
};
use lego::task::{
    ChangeError, Dataset, Split, Task, TaskStore, TestResult, Verdict, Verifier, VerifierOptions,
};

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data")
}

fn dataset() -> Dataset {
    Dataset::load(&data().join("swebench_mini.jsonl")).expect("dataset")
}

/// A store over the bundled tasks, and a verifier with short limits.
struct Bench {
    root: tempfile::TempDir,
    store: Arc<TaskStore>,
    verifier: Verifier,
    task: Task,
}

fn bench() -> Bench {
    let dataset = dataset();
    let root = tempfile::tempdir().expect("folder");
    let store = Arc::new(TaskStore::new(&dataset, &root.path().join("cache")));
    let mut options = VerifierOptions::new(&root.path().join("scratch"));
    options.timeout = Duration::from_secs(5);
    let verifier = Verifier::new(store.clone(), options);
    // One whose target is the first function of its file, so that tests can replace it.
    let is_first = |task: &&Task| task.patch.contains("@@ -1,");
    let task = dataset.tasks.iter().find(is_first).expect("task").clone();
    Bench { root, store, verifier, task }
}

impl Bench {
    fn workspace(&self) -> PathBuf {
        let folder = self.root.path().join("workspace");
        self.store.prepare(&self.task, &folder).expect("workspace");
        folder
    }

    fn file(&self) -> &str {
        self.task.extra["entry_file"].as_str().expect("entry_file")
    }

    /// The verdict on what `change` does to a fresh workspace.
    async fn grade(&self, change: impl FnOnce(&Path)) -> Verdict {
        let workspace = self.workspace();
        change(&workspace);
        let changes = self.store.changes(&self.task, &workspace).expect("changes");
        std::fs::remove_dir_all(&workspace).expect("remove");
        self.verify(&changes.diff).await
    }

    async fn verify(&self, diff: &[u8]) -> Verdict {
        let backend = backend().await;
        self.verifier.verify(backend.as_ref(), &self.task, diff).await.expect("verdict")
    }

    /// The verdict on a file that is the fixed one after this prologue.
    async fn grade_fixed_with(&self, prologue: &str) -> Verdict {
        self.grade(|workspace| {
            let status = Command::new("git")
                .args(["apply", "-"])
                .current_dir(workspace)
                .stdin(patch_file(self.root.path(), &self.task.patch))
                .status();
            assert!(status.expect("git").success());
            let path = workspace.join(self.file());
            let fixed = std::fs::read_to_string(&path).expect("file");
            std::fs::write(&path, format!("{prologue}\n{fixed}")).expect("write");
        })
        .await
    }
}

fn patch_file(root: &Path, patch: &str) -> std::fs::File {
    let path = root.join("reference.patch");
    std::fs::write(&path, patch).expect("write");
    std::fs::File::open(path).expect("open")
}

async fn backend() -> Arc<dyn Backend> {
    let options =
        Options { choice: Choice::Embedded, binary: env!("CARGO_BIN_EXE_lego").into(), ..Options::default() };
    select_with(&options).await.expect("this machine can make sandboxes")
}

#[test]
fn the_bundled_dataset_has_both_splits_and_its_bundles() {
    let dataset = dataset();
    assert_eq!(dataset.split(Split::Train).count(), 400);
    assert_eq!(dataset.split(Split::Heldout).count(), 240);
    let families = |split| {
        let mut names: Vec<_> = dataset.split(split).filter_map(Task::bug_family).collect();
        names.sort_unstable();
        names.dedup();
        names.len()
    };
    assert_eq!((families(Split::Train), families(Split::Heldout)), (8, 8));
}

#[test]
fn a_bad_line_is_named_with_file_line_and_field() {
    let folder = tempfile::tempdir().expect("folder");
    std::fs::create_dir(folder.path().join("repos")).expect("repos");
    let text = std::fs::read_to_string(data().join("swebench_mini.jsonl")).expect("dataset");
    let good: serde_json::Value = serde_json::from_str(text.lines().next().expect("line")).expect("json");
    let bundle = good["bundle"].as_str().expect("bundle");
    std::fs::copy(data().join(bundle), folder.path().join(bundle)).expect("copy");
    let path = folder.path().join("d.jsonl");
    let load = |lines: &[String]| {
        std::fs::write(&path, lines.join("\n")).expect("write");
        Dataset::load(&path).map(|dataset| dataset.tasks).map_err(|error| error.to_string())
    };
    let with = |field: &str, value: Option<serde_json::Value>| {
        let mut line = good.clone();
        let fields = line.as_object_mut().expect("object");
        fields.insert("instance_id".into(), "other-1".into());
        match value {
            Some(value) => fields.insert(field.into(), value),
            None => fields.shift_remove(field),
        };
        line.to_string()
    };
    let complaint = |line: String| {
        let message = load(&[good.to_string(), String::new(), line]).expect_err("bad line");
        assert!(message.contains("d.jsonl, line 3: "), "{message}");
        message
    };
    for (field, value) in [
        ("patch", None),
        ("base_commit", Some("main".into())),
        ("FAIL_TO_PASS", Some(3.into())),
        ("FAIL_TO_PASS", Some("[]".into())),
        ("FAIL_TO_PASS", Some("[\"a\"".into())),
        ("split", Some("test".into())),
        ("bundle", Some("repos/none.bundle".into())),
        ("repo", Some(1.into())),
        ("instance_id", Some("a/b".into())),
        ("instance_id", Some(good["instance_id"].clone())),
        ("test_format", Some("pytest".into())),
    ] {
        let message = complaint(with(field, value.clone()));
        assert!(message.contains(field), "{field} = {value:?}: {message}");
    }
    assert!(complaint("{\"instance_id\": ".to_owned()).contains("not JSON"));
    assert!(load(&[]).expect_err("empty").contains("no tasks"));

    let encoded = with("PASS_TO_PASS", Some("[\"x\", \"y\"]".into()));
    let tasks = load(&[encoded]).expect("lists may be JSON in a string");
    assert_eq!(tasks[0].pass_to_pass, ["x", "y"]);
    let missing = Dataset::load(&folder.path().join("none.jsonl")).expect_err("missing");
    assert!(missing.to_string().contains("none.jsonl"), "{missing}");
}

#[test]
fn a_workspace_has_one_commit_and_no_secrets() {
    let bench = bench();
    let workspace = bench.workspace();
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).current_dir(&workspace).output().expect("git");
        assert!(output.status.success(), "git {args:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(git(&["rev-list", "--all", "--count"]).trim(), "1");
    assert_eq!(git(&["status", "--porcelain"]), "");
    assert_eq!(git(&["fsck", "--unreachable", "--no-progress"]), "");
    let objects = git(&["cat-file", "--batch-all-objects", "--batch"]);
    assert!(!objects.contains("test_hidden_01"));
    for line in bench.task.patch.lines().filter(|line| line.starts_with('+')).skip(1) {
        assert!(!objects.contains(&line[1..]), "{line}");
    }
}

#[test]
fn any_number_of_threads_share_one_cache() {
    let bench = bench();
    std::thread::scope(|scope| {
        for number in 0..8 {
            let (bench, folder) = (&bench, bench.root.path().join(format!("w{number}")));
            scope.spawn(move || bench.store.prepare(&bench.task, &folder).expect("workspace"));
        }
    });
    let cache = std::fs::read_dir(bench.root.path().join("cache")).expect("cache");
    assert_eq!(cache.count(), 1, "one entry and no left-overs");
}

#[tokio::test]
async fn nothing_fails_and_the_reference_passes() {
    let bench = bench();
    let untouched = bench.grade(|_| {}).await;
    assert!(!untouched.resolved);
    for id in &bench.task.fail_to_pass {
        assert_eq!(untouched.tests[id], TestResult::Failed, "{id}");
    }
    for id in &bench.task.pass_to_pass {
        assert_eq!(untouched.tests[id], TestResult::Passed, "{id}");
    }
    let solved = bench.grade_fixed_with("").await;
    assert!(solved.resolved, "{solved:?}");
    assert_eq!(solved.tests.len(), 14);
    let reference = bench.verify(bench.task.patch.as_bytes()).await;
    assert!(reference.resolved, "{reference:?}");
}

#[tokio::test]
async fn programs_that_end_hang_or_explode_are_graded_not_excused() {
    let bench = bench();
    for prologue in [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "while True: pass",
        "import time; time.sleep(1000)",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "x = [0] * (1 << 34)",
        "import os\nwhile True: os.fork()",
        "def (",
    ] {
        let verdict = bench.grade_fixed_with(prologue).await;
        assert!(!verdict.resolved, "{prologue}");
    }
}

#[tokio::test]
async fn printed_results_do_not_count() {
    let bench = bench();
    let prologue = "import os, sys\n\
        for n in range(1, 15):\n    \
            for to in (1, 2):\n        os.write(to, b'PASS test_hidden_%02d\\nready\\n' % n)\n\
        os._exit(0)";
    let verdict = bench.grade_fixed_with(prologue).await;
    assert!(!verdict.resolved);
    assert!(verdict.tests.values().all(|&result| result != TestResult::Passed));
}

#[tokio::test]
async fn tests_are_the_datasets_whatever_the_diff_says() {
    let bench = bench();
    let verdict = bench
        .grade(|workspace| {
            std::fs::write(workspace.join("tests/run.py"), "print('PASS')\n").expect("write");
            let stem = bench.file().trim_end_matches(".py");
            let hidden = workspace.join(format!("tests/test_{stem}_hidden.py"));
            std::fs::write(hidden, "CASES = {}\n").expect("write");
            std::fs::write(workspace.join("sitecustomize.py"), "import os; os._exit(0)\n").expect("write");
        })
        .await;
    assert!(!verdict.resolved);
    assert_eq!(verdict.restored_paths, ["tests"]);
    assert_eq!(verdict.tests[&bench.task.fail_to_pass[0]], TestResult::Failed);
}

#[tokio::test]
async fn diffs_that_reach_out_or_do_not_apply_are_graded() {
    let bench = bench();
    let outside =
        "diff --git a/../x b/../x\nnew file mode 100644\n--- /dev/null\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n";
    let link = "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc/passwd\n\\ No newline at end of file\n";
    let stale = bench.task.patch.replace("\n-", "\n-  ");
    for diff in [outside, link, &stale, "not a diff"] {
        let verdict = bench.verify(diff.as_bytes()).await;
        assert!(!verdict.resolved);
        assert!(verdict.note.is_some(), "{diff}");
    }
    assert!(!bench.root.path().join("x").exists());
    let workspace = bench.workspace();
    std::os::unix::fs::symlink("/etc/passwd", workspace.join("l")).expect("link");
    let refused = bench.store.changes(&bench.task, &workspace);
    assert!(matches!(refused, Err(ChangeError::Refused { .. })), "{refused:?}");
}

/// A backend whose sandboxes end each program in one way.
struct Broken {
    capabilities: Capabilities,
    end: fn() -> Result<Exit, SandboxError>,
}

#[async_trait]
impl Backend for Broken {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn create(&self, _spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        Ok(Box::new(BrokenSandbox(self.end)))
    }
}

struct BrokenSandbox(fn() -> Result<Exit, SandboxError>);

#[async_trait]
impl Sandbox for BrokenSandbox {
    fn take_listener(&mut self) -> Option<tokio::net::TcpListener> {
        None
    }

    async fn exec(&mut self, _exec: Exec) -> Result<Exit, SandboxError> {
        (self.0)()
    }

    async fn kill_all(&mut self) -> Result<(), SandboxError> {
        Ok(())
    }

    async fn stop(self: Box<Self>) -> Result<(), SandboxError> {
        Ok(())
    }
}

fn exit(evidence: ExitEvidence) -> Result<Exit, SandboxError> {
    Ok(Exit { evidence, ..Exit::default() })
}

#[tokio::test]
async fn broken_machinery_is_never_a_reward_of_zero() {
    let capabilities = backend().await.capabilities().clone();
    let bench = bench();
    let ends: [fn() -> Result<Exit, SandboxError>; 5] = [
        || Err(SandboxError::Lost("gone".into())),
        || Err(SandboxError::Exec { program: "python3".into(), cause: "not found".into() }),
        || exit(ExitEvidence { code: Some(127), ..ExitEvidence::default() }),
        || exit(ExitEvidence { timed_out: true, signal: Some(9), ..ExitEvidence::default() }),
        || exit(ExitEvidence { host_oom: true, signal: Some(9), ..ExitEvidence::default() }),
    ];
    for (number, end) in ends.into_iter().enumerate() {
        let backend = Broken { capabilities: capabilities.clone(), end };
        let verdict = bench.verifier.verify(&backend, &bench.task, b"").await;
        assert!(verdict.is_err(), "{number}: {verdict:?}");
    }
    let scratch = std::fs::read_dir(bench.root.path().join("scratch")).expect("scratch");
    assert_eq!(scratch.count(), 0, "trees under test are removed");

    let mut gone = bench.task.clone();
    gone.base_commit = "0".repeat(40);
    let backend = Broken { capabilities, end: || exit(ExitEvidence::default()) };
    let failure = bench.verifier.verify(&backend, &gone, b"").await;
    assert!(matches!(failure, Err(InfraFailure::Task(_))), "{failure:?}");
}

/// A dataset of one task, whose repository has a file larger than any diff may hold.
fn large_repository(folder: &Path, patch: &str) -> Dataset {
    let repository = folder.join("repository");
    std::fs::create_dir_all(&repository).expect("folder");
    std::fs::write(repository.join("a.py"), "x = 1\n").expect("file");
    std::fs::write(repository.join("large.txt"), "line\n".repeat(500_000)).expect("file");
    let git = |args: &[&str]| {
        let output = Command::new("git")
            .args([
                "-c",
                "user.name=t",
                "-c",
                "user.email=t@example.invalid",
                "-c",
                "init.defaultBranch=main",
            ])
            .args(args)
            .current_dir(&repository)
            .output()
            .expect("git");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    };
    git(&["init", "-q"]);
    git(&["add", "."]);
    git(&["commit", "-q", "-m", "base"]);
    git(&["bundle", "create", "-q", "../repository.bundle", "main"]);
    let line = serde_json::json!({
        "instance_id": "large-1", "repo": "large", "base_commit": git(&["rev-parse", "HEAD"]),
        "problem_statement": "x", "patch": patch, "split": "train", "bundle": "repository.bundle",
        "test_patch": "--- /dev/null\n+++ b/tests/t.py\n@@ -0,0 +1,1 @@\n+CASES = {}\n",
        "FAIL_TO_PASS": ["a"], "PASS_TO_PASS": [], "test_format": "cases/1",
    });
    let path = folder.join("dataset.jsonl");
    std::fs::write(&path, format!("{line}\n")).expect("dataset");
    Dataset::load(&path).expect("dataset")
}

#[tokio::test]
async fn a_large_file_that_nobody_touches_is_no_fault_and_a_solution_in_it_is_the_tasks() {
    let small = "--- a/a.py\n+++ b/a.py\n@@ -1,1 +1,1 @@\n-x = 1\n+x = 2\n";
    let large = "--- a/large.txt\n+++ b/large.txt\n@@ -1,4 +1,4 @@\n-line\n+LINE\n line\n line\n line\n";
    for (patch, cause) in [(small, None), (large, Some("large.txt: is changed and larger than"))] {
        let root = tempfile::tempdir().expect("folder");
        let dataset = large_repository(root.path(), patch);
        let store = Arc::new(TaskStore::new(&dataset, &root.path().join("cache")));
        let verifier = Verifier::new(store.clone(), VerifierOptions::new(&root.path().join("scratch")));
        match (verifier.reference_diff(&dataset.tasks[0]).await, cause) {
            (Ok(diff), None) => assert!(String::from_utf8_lossy(&diff).contains("+x = 2")),
            (Err(error), Some(cause)) => assert!(error.contains(cause), "{error}"),
            (found, _) => panic!("{cause:?}: {found:?}"),
        }
        let left = std::fs::read_dir(root.path().join("scratch")).expect("scratch");
        assert_eq!(left.count(), 0, "workspaces are removed");
        // What an agent does beside it has a diff.
        let workspace = root.path().join("workspace");
        store.prepare(&dataset.tasks[0], &workspace).expect("workspace");
        std::fs::write(workspace.join("b.py"), "y = 1\n").expect("write");
        assert_eq!(store.changes(&dataset.tasks[0], &workspace).expect("changes").paths, ["b.py"]);
    }
}
