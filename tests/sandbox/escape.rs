//! An agent that searches everything it can reach, and one that tries the ways out.

use std::path::{Path, PathBuf};
use std::process::Command;

use lego::sandbox::{Limits, Spec};

use super::{LEGO, backend, mount, out, python, sandbox};

/// Reads every file, link target, environment and descriptor in sight. The canary comes reversed, so that
/// the search does not find its own command line. /usr is the system's own and is searched by name only.
const SEARCH: &str = r#"
import os, stat, sys
canary = sys.argv[1][::-1].encode()
found, seen = set(), 0
def look(path):
    global seen
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode) and canary in os.readlink(path).encode():
            found.add(path)
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode):
            return
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        data = os.read(fd, 4 << 20)
        os.close(fd)
        seen += 1
        if canary in data:
            found.add(path)
    except OSError:
        pass
def walk(top):
    for directory, names, files in os.walk(top):
        if canary in directory.encode():
            found.add(directory)
        if directory.startswith('/usr'):
            if any(canary in name.encode() for name in names + files):
                found.add(directory)
            continue
        if directory.startswith('/proc'):
            names[:] = [n for n in names if n not in ('task', 'sys', 'attr', 'net')]
        for name in files + names:
            look(os.path.join(directory, name))
walk('/')
for pid in filter(str.isdigit, os.listdir('/proc')):
    for name in ('root', 'cwd'):
        try: names = os.listdir(f'/proc/{pid}/{name}/')
        except OSError: continue
        if pid != str(os.getpid()) and pid == '1': found.add(f'/proc/{pid}/{name} is open')
for name in sys.argv[2:]:
    for prefix in ('', '/proc/self/root', '/..', '/proc/self/cwd/../../../..', '/proc/thread-self/root/../..'):
        if os.path.exists(prefix + name): found.add(prefix + name)
print(seen > 50, sorted(found), sorted(os.environ))
"#;

/// Removed on drop.
struct Canary(PathBuf);

impl Canary {
    fn in_directory(directory: &Path, text: &str) -> Self {
        let path = directory.join(format!(".lego-canary-{}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

#[test]
fn an_agent_that_searches_everything_finds_no_canary() {
    let text = format!("canary-{}-5d0f7a1be6", std::process::id());
    let home = PathBuf::from(std::env::var_os("HOME").unwrap());
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).to_owned();
    let hidden = tempfile::tempdir().unwrap();
    let work = tempfile::tempdir().unwrap();
    let canaries = [&home, &checkout, hidden.path(), &std::env::temp_dir()]
        .map(|directory: &Path| Canary::in_directory(directory, &text));
    std::os::unix::fs::symlink(&canaries[0].0, work.path().join("link")).unwrap();
    std::os::unix::fs::symlink(hidden.path(), work.path().join("tests")).unwrap();
    let mut command = Command::new(LEGO);
    command
        .args(["sandbox", "run", "--mount"])
        .arg(format!("{}:/workspace:rw", work.path().display()))
        .args(["--cwd", "/workspace", "--", "/usr/bin/python3", "-I", "-c", SEARCH])
        .arg(text.chars().rev().collect::<String>())
        .args(canaries.iter().map(|canary| &canary.0))
        .args([&home, &checkout])
        .env("CANARY_KEY", &text)
        .current_dir(&checkout);
    let output = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        stdout.trim(),
        "True [] ['HOME', 'LC_CTYPE', 'PATH']",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[tokio::test]
async fn the_ways_out_are_closed() {
    let script = r#"
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    ctypes.set_errno(0)
    numbers = {'mount': 165, 'umount2': 166, 'pivot_root': 155, 'chroot': 161, 'unshare': 272, 'setns': 308,
               'ptrace': 101, 'bpf': 321, 'keyctl': 250, 'io_uring_setup': 425, 'perf_event_open': 298,
               'open_tree': 428, 'fsopen': 430, 'clone3': 435, 'clone': 56, 'process_vm_readv': 310,
               'userfaultfd': 323, 'open_by_handle_at': 304, 'init_module': 175, 'reboot': 169,
               'pidfd_getfd': 438, 'mount_setattr': 442, 'socket': 41}
    result = libc.syscall(numbers[name], *arguments)
    print(name, errno.errorcode.get(ctypes.get_errno(), result))
call('mount', b'none', b'/tmp', b'tmpfs', 0, 0)
call('umount2', b'/proc', 2)
call('pivot_root', b'.', b'.')
call('chroot', b'/tmp')
call('unshare', 0x10000000)
call('unshare', 0x20000)
call('setns', 0, 0)
call('ptrace', 16, 1, 0, 0)
call('bpf', 0, 0, 0)
call('keyctl', 0, 0, 0)
call('io_uring_setup', 1, 0)
call('perf_event_open', 0, 0, 0, 0, 0)
call('open_tree', -100, b'/', 1)
call('fsopen', b'tmpfs', 0)
call('process_vm_readv', 1, 0, 0, 0, 0, 0)
call('userfaultfd', 0)
call('open_by_handle_at', 0, 0, 0)
call('init_module', 0, 0, b'')
call('reboot', 0, 0, 0, 0)
call('pidfd_getfd', 0, 0, 0)
call('mount_setattr', -100, b'/', 0, 0, 0)
call('clone', 0x10000000 | 17, 0, 0, 0, 0)
call('socket', 40, 1, 0)
call('socket', 17, 3, 0)
call('socket', 38, 5, 0)
call('clone3', 0, 0)
"#;
    let mut sandbox = sandbox(Limits::default()).await;
    let exit = sandbox.exec(python(script)).await.unwrap();
    for line in out(&exit).lines() {
        let expected = if line.starts_with("clone3") { "ENOSYS" } else { "EPERM" };
        assert!(line.ends_with(expected), "{line}");
    }
    assert_eq!(out(&exit).lines().count(), 26, "{}", String::from_utf8_lossy(&exit.stderr));
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn there_is_no_privilege_and_no_way_to_the_init() {
    let script = r#"
import os
status = dict(map(str.strip, line.split(':', 1)) for line in open('/proc/self/status'))
print(*[status[k] for k in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'NoNewPrivs', 'Seccomp')])
for path in ('/proc/1/environ', '/proc/1/mem', '/proc/1/fd', '/proc/1/root/', '/proc/1/cwd/'):
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).read()
        print('open', path)
    except OSError: pass
for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/sys/user/max_user_namespaces',
             '/usr/bin/python3', '/etc/passwd', '/etc/ld.so.preload', '/dev/x', '/x', '/proc/1/oom_score_adj'):
    try:
        open(path, 'a').close()
        print('writable', path)
    except OSError: pass
for path in ('/dev/vda', '/dev/mem', '/dev/kmsg', '/dev/fuse', '/sys', '/home', '/root', '/run', '/var', '/mnt'):
    if os.path.exists(path): print('there', path)
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
try: os.setuid(1); print('setuid')
except OSError: pass
try: os.mknod('/tmp/d', 0o60666, os.makedev(254, 0)); print('mknod')
except OSError: pass
print('fds', sorted(os.listdir('/proc/self/fd')))
"#;
    let mut sandbox = sandbox(Limits::default()).await;
    let exit = sandbox.exec(python(script)).await.unwrap();
    let none = "0000000000000000";
    // 3 is the listing itself.
    let expected = format!("{none} {none} {none} {none} {none} 1 2\nfds ['0', '1', '2', '3']");
    assert_eq!(out(&exit), expected, "{}", String::from_utf8_lossy(&exit.stderr));
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn there_is_no_network_but_lo() {
    // Something that listens on the host must not be in reach.
    let host = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = host.local_addr().unwrap().port();
    let script = format!(
        r#"
import errno, socket
for address in (('1.1.1.1', 53), ('10.0.0.1', 80), ('127.0.0.1', {port})):
    try: socket.create_connection(address, 2); print('reached', address)
    except OSError as error: print(errno.errorcode.get(error.errno, error))
try: socket.getaddrinfo('example.com', 80); print('resolved')
except OSError: print('no name')
print([l.split(':')[0].strip() for l in open('/proc/net/dev') if ':' in l])
"#
    );
    let mut sandbox = sandbox(Limits::default()).await;
    let exit = sandbox.exec(python(&script)).await.unwrap();
    assert_eq!(out(&exit), "ENETUNREACH\nENETUNREACH\nECONNREFUSED\nno name\n['lo']");
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn links_in_a_workspace_name_nothing_of_the_host() {
    let outside = tempfile::tempdir().unwrap();
    let work = tempfile::tempdir().unwrap();
    let victim = outside.path().join("victim");
    std::fs::write(&victim, "untouched").unwrap();
    std::os::unix::fs::symlink(&victim, work.path().join("file")).unwrap();
    std::os::unix::fs::symlink(outside.path(), work.path().join("directory")).unwrap();
    // Also a mount whose place leads through such a link.
    let tests = tempfile::tempdir().unwrap();
    let spec = Spec {
        mounts: vec![
            mount(work.path(), "/workspace", true),
            mount(tests.path(), "/workspace/directory/tests", false),
        ],
        ..Spec::default()
    };
    // Either it lands inside the sandbox's own root or it is refused; the host is not touched.
    let through_link = backend().await.create(spec).await;
    drop(through_link);
    let spec = Spec { mounts: vec![mount(work.path(), "/workspace", true)], ..Spec::default() };
    let mut sandbox = backend().await.create(spec).await.unwrap();
    let script = "for p in ('file', 'directory/victim', 'directory/new'):\n  \
                  try: open('/workspace/' + p, 'w').write('x')\n  \
                  except OSError as e: print(e.strerror)";
    let exit = sandbox.exec(python(script)).await.unwrap();
    assert_eq!(out(&exit).lines().count(), 3, "{}", out(&exit));
    sandbox.stop().await.unwrap();
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "untouched");
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 1);
}
