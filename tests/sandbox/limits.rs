//! What limits do, and how their work is told from a program's own end.

use lego::sandbox::{Enforcement, Limits};

use super::{MIB, backend, out, python, sandbox, shell};

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
