//! The weak sandbox: what it still holds.

use lego::sandbox::{Choice, Options, SandboxError, Spec, select_with};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{LEGO, choose, exec, mount, out, python, shell};

#[tokio::test]
async fn it_is_only_used_when_it_is_allowed() {
    let options = Options { choice: Choice::Weak, binary: LEGO.into(), ..Options::default() };
    let error = select_with(&options).await.err().unwrap();
    assert!(matches!(&error, SandboxError::Unsupported { .. }));
    assert!(error.to_string().contains("--weak-sandbox"), "{error}");
}

#[tokio::test]
async fn files_network_and_privileges_are_held() {
    let backend = choose(Choice::Weak).await;
    assert!(!backend.capabilities().is_isolated);
    let work = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    std::fs::write(other.path().join("secret"), "secret").unwrap();
    let host = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let spec = Spec {
        mounts: vec![mount(work.path(), "/workspace", true)],
        listen_port: Some(18080),
        ..Spec::default()
    };
    let mut sandbox = backend.create(spec).await.unwrap();
    let listener = sandbox.take_listener().unwrap();
    let server = tokio::spawn(async move {
        let (mut connection, _) = listener.accept().await.unwrap();
        let mut request = [0; 4];
        connection.read_exact(&mut request).await.unwrap();
        connection.write_all(b"pong").await.unwrap();
    });
    let script = format!(
        r#"
import os, socket, sys, tempfile, subprocess
def attempt(what, act):
    try: print(what, act())
    except OSError as error: print(what, 'refused')
def talk():
    s = socket.create_connection(('127.0.0.1', int(sys.argv[1].rsplit(':')[-1])))
    s.sendall(b'ping')
    return s.recv(4).decode()
attempt('secret', lambda: open('{secret}').read())
attempt('home', lambda: os.listdir('/root'))
attempt('proc', lambda: open('/proc/1/cmdline').read())
attempt('usr', lambda: open('/usr/x', 'w'))
attempt('host', lambda: socket.create_connection(('127.0.0.1', {port}), 2))
attempt('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
attempt('unix', lambda: socket.socket(socket.AF_UNIX))
attempt('kill', lambda: os.kill({pid}, 0))
attempt('talk', talk)
open('made', 'w').write('made')
print(open(sys.argv[2]).read(), os.path.exists(tempfile.mkdtemp()))
print(subprocess.run(['true']).returncode)
"#,
        secret = other.path().join("secret").display(),
        port = host.local_addr().unwrap().port(),
        pid = std::process::id(),
    );
    let mut program = python(&script);
    program.argv.extend(["127.0.0.1:18080".into(), "/workspace/made".into()]);
    program.cwd = "/workspace".into();
    let exit = sandbox.exec(program).await.unwrap();
    assert_eq!(
        out(&exit),
        "secret refused\nhome refused\nproc refused\nusr refused\nhost refused\nudp refused\nunix refused\n\
         kill refused\ntalk pong\nmade True\n0",
        "{}",
        String::from_utf8_lossy(&exit.stderr)
    );
    server.await.unwrap();
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn everything_that_was_started_can_be_ended() {
    let backend = choose(Choice::Weak).await;
    let mut sandbox = backend.create(Spec::default()).await.unwrap();
    let exit = sandbox
        .exec(shell("(setsid sh -c 'echo $$; exec sleep 1000 > /dev/null' &) | head -1"))
        .await
        .unwrap();
    let pid: i32 = out(&exit).parse().unwrap();
    // SAFETY: signal 0 only asks.
    assert_eq!(unsafe { libc::kill(pid, 0) }, 0);
    sandbox.kill_all().await.unwrap();
    // SAFETY: signal 0 only asks.
    assert_ne!(unsafe { libc::kill(pid, 0) }, 0);
    assert_eq!(sandbox.exec(exec(&["true"])).await.unwrap().evidence.code, Some(0));
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn no_other_way_to_connect_gets_past_landlock() {
    let backend = choose(Choice::Weak).await;
    let host = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    host.set_nonblocking(true).unwrap();
    let script = r#"
import errno, socket, sys
address = ('127.0.0.1', int(sys.argv[1]))
FAST_OPEN, MPTCP, SCTP, DCCP, UDPLITE, SMC = 0x20000000, 262, 132, 33, 136, 43
def attempt(what, act):
    try: print(what, act())
    except OSError as error: print(what, errno.errorcode[error.errno])
def tcp(): return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
def deferred():
    s = tcp()
    s.setsockopt(socket.IPPROTO_TCP, 30, 1)
    s.connect(address)
    s.send(b'x')
attempt('sendto', lambda: tcp().sendto(b'x', FAST_OPEN, address))
attempt('sendto, flags', lambda: tcp().sendto(b'x', FAST_OPEN | socket.MSG_NOSIGNAL, address))
attempt('sendmsg', lambda: tcp().sendmsg([b'x'], [], FAST_OPEN, address))
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def sendmmsg():
    if libc.sendmmsg(tcp().fileno(), None, 0, FAST_OPEN) < 0:
        raise OSError(ctypes.get_errno(), '')
attempt('sendmmsg', sendmmsg)
attempt('deferred', deferred)
for family in (socket.AF_INET, socket.AF_INET6):
    for kind, protocol in ((1, MPTCP), (1, SCTP), (5, SCTP), (2, 0), (2, UDPLITE), (3, 1), (3, 255), (6, DCCP), (10, 0)):
        attempt(f'{kind} {protocol}', lambda: socket.socket(family, kind, protocol).close())
for family in (SMC, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET, 40):
    attempt(f'family {family:d}', lambda: socket.socket(family, 1).close())
s = tcp()
attempt('a plain send', lambda: s.send(b'x'))
"#;
    let mut program = python(script);
    program.argv.push(host.local_addr().unwrap().port().to_string().into());
    let mut sandbox = backend.create(Spec::default()).await.unwrap();
    let exit = sandbox.exec(program).await.unwrap();
    let said = out(&exit);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 5 + 18 + 5 + 1, "{said}\n{}", String::from_utf8_lossy(&exit.stderr));
    for line in &lines[..lines.len() - 1] {
        let expected = if line.starts_with("deferred") { "EACCES" } else { "EPERM" };
        assert!(line.ends_with(expected), "{line}");
    }
    assert_eq!(lines[lines.len() - 1], "a plain send EPIPE", "an ordinary send is not refused");
    let nobody = host.accept().unwrap_err();
    assert_eq!(nobody.kind(), std::io::ErrorKind::WouldBlock, "somebody connected");
    sandbox.stop().await.unwrap();
}
