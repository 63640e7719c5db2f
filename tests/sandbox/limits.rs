//! What limits do, and how their work is told from a program's own end.

use lego::sandbox::{Choice, DiskLimit, Enforcement, Limits, Spec};

use super::{MIB, backend, choose, mount, out, python, sandbox, shell};

/// Takes 1 MiB at a time until it ends.
const EAT_MEMORY: &str = "x = []\nwhile True: x.append(b'x' * (1 << 20))";

#[tokio::test]
async fn out_of_memory_is_told_from_a_program_that_exits_with_137() {
    let limits = Limits { memory_bytes: Some(64 * MIB), ..Limits::default() };
    let is_cgroup = backend().await.capabilities().memory == Enforcement::Cgroup;
    let mut sandbox = sandbox(limits).await;
    let exit = sandbox.exec(shell("exit 137")).await.unwrap();
    assert_eq!((exit.evidence.code, exit.evidence.oom_kills), (Some(137), Some(0)));
    let exit = sandbox.exec(shell("kill -9 $$")).await.unwrap();
    assert_eq!((exit.evidence.signal, exit.evidence.oom_kills), (Some(9), Some(0)));
    assert!(!exit.evidence.host_oom);
    if is_cgroup {
        let exit = sandbox.exec(python(EAT_MEMORY)).await.unwrap();
        assert_eq!(exit.evidence.signal, Some(libc::SIGKILL));
        assert_eq!(exit.evidence.oom_kills, Some(1));
        assert!(!exit.evidence.host_oom);
        // A child that is killed while the main process goes on is seen too.
        let child = format!("python3 -c \"{EAT_MEMORY}\"; exit 9");
        let exit = sandbox.exec(shell(&child)).await.unwrap();
        assert_eq!((exit.evidence.code, exit.evidence.oom_kills), (Some(9), Some(1)));
        // Files in memory count. Full of them, programs are killed, but the init goes on reporting.
        let fill = shell("head -c 200000000 /dev/zero > /dev/shm/x");
        assert!(sandbox.exec(fill).await.unwrap().evidence.oom_kills >= Some(1));
        sandbox.exec(shell("true")).await.unwrap();
    } else {
        let exit = sandbox.exec(python(EAT_MEMORY)).await.unwrap();
        assert_ne!(exit.evidence.code, Some(0));
    }
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn a_fork_bomb_is_held_and_can_be_ended() {
    let limits = Limits { max_processes: Some(40), ..Limits::default() };
    let mut sandbox = sandbox(limits).await;
    let bomb = "
import os, time
count = 0
try:
    while count < 1000:
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
        count += 1
except BlockingIOError:
    pass
print(count)";
    let exit = sandbox.exec(python(bomb)).await.unwrap();
    let count: u64 = out(&exit).parse().unwrap();
    assert!((30..=40).contains(&count), "{count} processes");
    sandbox.kill_all().await.unwrap();
    let exit = sandbox.exec(shell("set -- /proc/[0-9]*; echo $#")).await.unwrap();
    assert_eq!(out(&exit), "2");
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn a_full_disk_is_an_error_inside_and_nothing_else() {
    let limits = Limits { tmp_bytes: Some(2 * MIB), ..Limits::default() };
    let mut sandbox = sandbox(limits).await;
    let script = "head -c 3000000 /dev/zero > /tmp/a; head -c 3000000 /dev/zero > /dev/shm/b; \
                  cat /tmp/a /dev/shm/b | wc -c";
    let exit = sandbox.exec(shell(script)).await.unwrap();
    assert!(String::from_utf8_lossy(&exit.stderr).contains("No space left"));
    let kept: u64 = out(&exit).parse().unwrap();
    assert!((2 * MIB..3 * MIB).contains(&kept), "{kept} bytes in both places together");
    let exit = sandbox
        .exec(python("import os\nfor i in range(100000): open(f'/tmp/n{i}', 'w').close()"))
        .await
        .unwrap();
    assert!(String::from_utf8_lossy(&exit.stderr).contains("No space left"));
    let exit = sandbox.exec(shell("rm -rf /tmp/*; echo x > /tmp/y; cat /tmp/y")).await.unwrap();
    assert_eq!(out(&exit), "x");
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn cpu_time_ends_with_its_own_signal() {
    let mut sandbox = sandbox(Limits { cpu_seconds: Some(1), ..Limits::default() }).await;
    let exit = sandbox.exec(shell("while :; do :; done")).await.unwrap();
    assert_eq!(exit.evidence.signal, Some(libc::SIGXCPU));
    sandbox.stop().await.unwrap();
}

/// Each goes on until it is ended.
const FILL_THE_WORKSPACE: [(&str, &str); 3] = [
    ("files", "i=0; while :; do dd if=/dev/zero of=$i bs=1M count=1 2>/dev/null; i=$((i+1)); done"),
    ("empty files", "i=0; while :; do : > e$i; i=$((i+1)); done"),
    ("files without a name", "exec python3 -c \"$PROGRAM\""),
];

/// Twenty files of a MiB each, deleted and open.
const WITHOUT_A_NAME: &str = "
import tempfile
files = [tempfile.TemporaryFile(dir='.', buffering=0) for _ in range(20)]
for file in files: file.write(bytes(1 << 20))
while True: pass
";

#[tokio::test]
async fn a_workspace_that_grows_too_large_ends_the_program_as_its_own_doing() {
    for choice in [Choice::Embedded, Choice::Weak] {
        let backend = choose(choice).await;
        assert_eq!(backend.capabilities().disk, DiskLimit::Polled);
        let limits = Limits { workspace_bytes: Some(16 * MIB), ..Limits::default() };
        for (name, script) in FILL_THE_WORKSPACE {
            if choice == Choice::Weak && name == "files without a name" {
                continue; // of these the weak sandbox knows nothing
            }
            let work = tempfile::tempdir().unwrap();
            // What was there does not count.
            std::fs::write(work.path().join("first"), vec![1; 20 << 20]).unwrap();
            let mounts = vec![mount(work.path(), "/workspace", true)];
            let spec = Spec { mounts, limits: limits.clone(), ..Spec::default() };
            let mut sandbox = backend.create(spec).await.unwrap();
            let exit = sandbox.exec(shell("echo x > /workspace/small")).await.unwrap();
            assert_eq!((exit.evidence.code, exit.evidence.is_over_disk_limit), (Some(0), false));
            let mut fill = shell(script);
            fill.cwd = "/workspace".into();
            fill.env.push(("PROGRAM".into(), WITHOUT_A_NAME.into()));
            let exit = sandbox.exec(fill).await.unwrap();
            let evidence = &exit.evidence;
            assert!(evidence.is_over_disk_limit, "{choice:?}, {name}: {exit:?}");
            assert_eq!(evidence.signal, Some(libc::SIGKILL), "{choice:?}, {name}: {exit:?}");
            assert!(!evidence.host_oom && !evidence.timed_out, "{exit:?}");
            assert_eq!(evidence.oom_kills.unwrap_or(0), 0, "{exit:?}");
            sandbox.stop().await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_single_file_is_held_by_the_kernel_and_what_was_written_last_is_seen() {
    let work = tempfile::tempdir().unwrap();
    let mounts = vec![mount(work.path(), "/workspace", true)];
    let limits = Limits { workspace_bytes: Some(4 * MIB), tmp_bytes: Some(MIB), ..Limits::default() };
    let mut sandbox = backend().await.create(Spec { mounts, limits, ..Spec::default() }).await.unwrap();
    let exit = sandbox.exec(shell("exec dd if=/dev/zero of=/workspace/a bs=1M count=64")).await.unwrap();
    assert_eq!(exit.evidence.signal, Some(libc::SIGXFSZ), "{exit:?}");
    assert_eq!(std::fs::metadata(work.path().join("a")).unwrap().len(), 4 * MIB);
    let exit = sandbox.exec(shell("dd if=/dev/zero of=/workspace/b bs=1M count=3; exit 7")).await.unwrap();
    assert_eq!((exit.evidence.code, exit.evidence.is_over_disk_limit), (Some(7), true), "{exit:?}");
    sandbox.stop().await.unwrap();
}
