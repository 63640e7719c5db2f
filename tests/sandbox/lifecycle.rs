//! Nothing stays behind, however a sandbox or lego ends.

use std::process::{Child, Command, Stdio};

use lego::sandbox::{Limits, SandboxError, Spec};

use super::{LEGO, MIB, backend, exec, out, sandbox, shell, wait_until};

/// Pids of processes with this text in their command line.
fn processes_with(text: &str) -> Vec<i32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if line.split(|&byte| byte == 0).any(|argument| argument == text.as_bytes()) {
            found.push(pid);
        }
    }
    found
}

/// Control groups made by the lego with this pid.
fn groups_of(pid: u32) -> usize {
    let prefix = format!("lego-{pid}-");
    let mut pending = vec![std::path::PathBuf::from("/sys/fs/cgroup")];
    let mut count = 0;
    while let Some(directory) = pending.pop() {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                count += usize::from(entry.file_name().to_string_lossy().starts_with(&prefix));
                pending.push(entry.path());
            }
        }
    }
    count
}

fn children_of(pid: u32) -> Vec<i32> {
    let mut found = Vec::new();
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    for task in tasks {
        let text = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        found.extend(text.split_whitespace().map(|pid| pid.parse::<i32>().unwrap()));
    }
    found
}

fn parent_of(pid: i32) -> i32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    parent.unwrap().trim().parse().unwrap()
}

fn kill(pid: i32) {
    // SAFETY: plain numbers; the process is one that this test started.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
}

/// A lego whose sandbox runs `sleep` with a number that is ours alone.
fn start_sleeper(number: &str) -> Child {
    let child = Command::new(LEGO)
        .args(["sandbox", "run", "--memory", "100", "--", "/bin/sh", "-c"])
        .arg(format!("setsid sleep {number} & sleep {number}"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("both sleepers run", || processes_with(number).len() == 2);
    child
}

#[test]
fn kill_9_of_lego_leaves_no_process_and_no_group() {
    let number = format!("91{}", std::process::id());
    let mut lego = start_sleeper(&number);
    kill(lego.id() as i32);
    lego.wait().unwrap();
    wait_until("the sleepers are gone", || processes_with(&number).is_empty());
    wait_until("the groups are gone", || groups_of(lego.id()) == 0);
}

#[test]
fn ctrl_c_ends_the_sandbox_and_lego() {
    let number = format!("92{}", std::process::id());
    let mut lego = start_sleeper(&number);
    // SAFETY: plain numbers; the process is one that this test started.
    unsafe { libc::kill(lego.id() as i32, libc::SIGINT) };
    assert_eq!(lego.wait().unwrap().code(), Some(1));
    assert!(processes_with(&number).is_empty());
    assert_eq!(groups_of(lego.id()), 0);
}

#[test]
fn a_dead_nursery_takes_nothing_along_and_a_dead_helper_its_sandbox() {
    let number = format!("93{}", std::process::id());
    let mut lego = start_sleeper(&number);
    let nursery = children_of(lego.id());
    assert_eq!(nursery.len(), 1);
    let helper = children_of(nursery[0] as u32);
    assert_eq!(helper.len(), 1);
    kill(nursery[0]);
    assert_eq!(processes_with(&number).len(), 2);
    kill(helper[0]);
    let code = lego.wait().unwrap().code();
    assert_eq!(code, Some(1), "a lost sandbox is an error");
    wait_until("the sleepers are gone", || processes_with(&number).is_empty());
}

#[tokio::test]
async fn dropping_a_sandbox_ends_its_processes() {
    let number = format!("94{}", std::process::id());
    let mut sandbox = sandbox(Limits { memory_bytes: Some(64 * MIB), ..Limits::default() }).await;
    sandbox.exec(shell(&format!("sleep {number} &"))).await.unwrap();
    wait_until("it runs", || processes_with(&number).len() == 1);
    drop(sandbox);
    wait_until("it is gone", || processes_with(&number).is_empty());
}

#[tokio::test]
async fn a_backend_outlives_its_nursery_and_leaves_no_mounts_and_no_groups() {
    let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap().lines().count();
    let before = mounts();
    let backend = backend().await;
    let spec =
        || Spec { limits: Limits { memory_bytes: Some(64 * MIB), ..Limits::default() }, ..Spec::default() };
    let number = format!("96{}", std::process::id());
    for _ in 0..2 {
        let mut sandbox = backend.create(spec()).await.unwrap();
        sandbox.exec(shell(&format!("sleep {number} &"))).await.unwrap();
        wait_until("it runs", || processes_with(&number).len() == 1);
        // The sleeper, pid 1, the helper, the nursery.
        let nursery = parent_of(parent_of(parent_of(processes_with(&number)[0])));
        kill(nursery);
        let exit = sandbox.exec(shell("echo up")).await.unwrap();
        assert_eq!(out(&exit), "up");
        sandbox.stop().await.unwrap();
        assert!(processes_with(&number).is_empty());
    }
    assert_eq!(mounts(), before);
}

#[tokio::test]
async fn a_stopped_init_is_a_lost_sandbox() {
    let mut sandbox = sandbox(Limits::default()).await;
    let number = format!("95{}", std::process::id());
    sandbox.exec(shell(&format!("sleep {number} &"))).await.unwrap();
    wait_until("it runs", || processes_with(&number).len() == 1);
    let sleeper = processes_with(&number)[0];
    // The sleeper was orphaned inside, so its parent is pid 1 there.
    kill(parent_of(sleeper));
    let error = sandbox.exec(exec(&["true"])).await.unwrap_err();
    assert!(matches!(error, SandboxError::Lost(_)), "{error}");
    wait_until("it is gone", || processes_with(&number).is_empty());
    sandbox.stop().await.unwrap();
}

/// A raised limit is for lego's own files: programs that walk through all possible ones would take long.
#[tokio::test]
async fn programs_have_the_limit_of_open_files_that_lego_began_with_whatever_nursery_starts_them() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (before, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let soft = before.min(hard - 1);
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    let backend = backend().await;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let number = format!("97{}", std::process::id());
    for _ in 0..2 {
        let mut sandbox = backend.create(Spec::default()).await.unwrap();
        let exit = sandbox.exec(shell("ulimit -Sn; ulimit -Hn")).await.unwrap();
        assert_eq!(out(&exit), format!("{soft}\n{hard}"));
        sandbox.exec(shell(&format!("sleep {number} &"))).await.unwrap();
        wait_until("it runs", || processes_with(&number).len() == 1);
        // The next sandbox has a new one.
        kill(parent_of(parent_of(parent_of(processes_with(&number)[0]))));
        sandbox.stop().await.unwrap();
    }
}
