//! How programs run and end.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use lego::sandbox::{Limits, SandboxError, Spec};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{backend, exec, mount, out, python, sandbox, shell};

#[tokio::test]
async fn codes_signals_and_output_are_reported() {
    let mut sandbox = sandbox(Limits::default()).await;
    let exit = sandbox.exec(shell("echo out; echo err >&2; exit 7")).await.unwrap();
    assert_eq!(exit.evidence.code, Some(7));
    assert_eq!((out(&exit).as_str(), exit.stderr.as_slice()), ("out", b"err\n".as_slice()));
    let exit = sandbox.exec(shell("kill -TERM $$")).await.unwrap();
    assert_eq!((exit.evidence.code, exit.evidence.signal), (None, Some(libc::SIGTERM)));
    let exit = sandbox.exec(python("sum(range(3_000_000))")).await.unwrap();
    assert!(exit.evidence.cpu_us > 0 && exit.evidence.memory_peak_bytes > Some(1 << 20));
    assert!(!exit.evidence.timed_out && !exit.evidence.host_oom);
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn input_arguments_and_environment_arrive_as_they_are() {
    let mut sandbox = sandbox(Limits::default()).await;
    let text: Vec<u8> = (0..300_000u32).map(|i| b'a' + (i % 26) as u8).collect();
    let exit = sandbox.exec(lego::sandbox::Exec { stdin: text.clone(), ..exec(&["cat"]) }).await.unwrap();
    assert_eq!(exit.stdout, text);
    let unread = lego::sandbox::Exec { stdin: text, ..exec(&["true"]) };
    assert_eq!(sandbox.exec(unread).await.unwrap().evidence.code, Some(0));
    let exit = sandbox.exec(exec(&["env"])).await.unwrap();
    assert_eq!(out(&exit), "PATH=/usr/bin:/bin\nHOME=/tmp");
    let exit = sandbox.exec(exec(&["printf", "%s", "ä\u{1} \" \\"])).await.unwrap();
    assert_eq!(exit.stdout, "ä\u{1} \" \\".as_bytes());
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn a_program_that_cannot_start_is_an_error_and_the_sandbox_goes_on() {
    let mut sandbox = sandbox(Limits::default()).await;
    let error = sandbox.exec(exec(&["/no/such/program"])).await.unwrap_err();
    assert!(matches!(&error, SandboxError::Exec { program, .. } if program == "/no/such/program"));
    let error = sandbox.exec(exec(&["no-such-program"])).await.unwrap_err();
    assert!(matches!(error, SandboxError::Exec { .. }), "{error}");
    let elsewhere = lego::sandbox::Exec { cwd: "/not/there".into(), ..exec(&["true"]) };
    let error = sandbox.exec(elsewhere).await.unwrap_err();
    assert!(error.to_string().contains("/not/there"), "{error}");
    let long = "x".repeat(200_000);
    let error = sandbox.exec(exec(&["echo", &long])).await.unwrap_err();
    assert!(matches!(error, SandboxError::Exec { .. }), "{error}");
    assert_eq!(sandbox.exec(exec(&["true"])).await.unwrap().evidence.code, Some(0));
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn output_over_the_cap_is_counted_and_never_blocks() {
    let mut sandbox = sandbox(Limits::default()).await;
    let noisy = lego::sandbox::Exec {
        max_output_bytes: 1000,
        ..shell("head -c 5000000 /dev/zero; head -c 7 /dev/zero >&2")
    };
    let exit = sandbox.exec(noisy).await.unwrap();
    assert_eq!(exit.evidence.code, Some(0));
    assert_eq!((exit.stdout.len(), exit.stderr.len()), (1000, 7));
    assert_eq!(exit.discarded_output_bytes, 4_999_000);
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn a_timeout_kills_all_and_the_sandbox_stays_usable() {
    let mut sandbox = sandbox(Limits::default()).await;
    let slow = lego::sandbox::Exec {
        timeout: Duration::from_millis(300),
        ..shell("setsid sleep 1000 & trap '' TERM INT HUP; echo started; sleep 1000")
    };
    let exit = sandbox.exec(slow).await.unwrap();
    assert!(exit.evidence.timed_out);
    assert_eq!(exit.evidence.signal, Some(libc::SIGKILL));
    assert_eq!(out(&exit), "started");
    let left = sandbox.exec(shell("cat /proc/[0-9]*/comm | grep -c sleep")).await.unwrap();
    assert_eq!(out(&left), "0");
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn a_background_process_does_not_hold_the_exec_and_kill_all_ends_it() {
    let mut sandbox = sandbox(Limits::default()).await;
    let exit = sandbox
        .exec(shell("sleep 1000 & while ! grep -q sleep /proc/$!/comm; do :; done; echo done"))
        .await
        .unwrap();
    assert_eq!(out(&exit), "done");
    let count = || shell("cat /proc/[0-9]*/comm | grep -c sleep");
    assert_eq!(out(&sandbox.exec(count()).await.unwrap()), "1");
    sandbox.kill_all().await.unwrap();
    assert_eq!(out(&sandbox.exec(count()).await.unwrap()), "0");
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn an_exec_that_is_given_up_leaves_nothing_running() {
    let mut sandbox = sandbox(Limits::default()).await;
    let given_up =
        tokio::time::timeout(Duration::from_millis(200), sandbox.exec(shell("sleep 1000 & sleep 1000")));
    assert!(given_up.await.is_err());
    let exit = sandbox.exec(shell("cat /proc/[0-9]*/comm | grep -c sleep")).await.unwrap();
    assert_eq!(out(&exit), "0");
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn the_listener_made_inside_serves_from_outside() {
    let spec = Spec { listen_port: Some(18080), ..Spec::default() };
    let mut sandbox = backend().await.create(spec).await.unwrap();
    let listener = sandbox.take_listener().unwrap();
    assert!(sandbox.take_listener().is_none());
    let server = tokio::spawn(async move {
        let (mut connection, _) = listener.accept().await.unwrap();
        let mut request = [0; 4];
        connection.read_exact(&mut request).await.unwrap();
        connection.write_all(b"pong").await.unwrap();
        request
    });
    let script = "import socket; s = socket.create_connection(('127.0.0.1', 18080)); \
                  s.sendall(b'ping'); print(s.recv(4).decode())";
    let exit = sandbox.exec(python(script)).await.unwrap();
    assert_eq!(out(&exit), "pong");
    assert_eq!(&server.await.unwrap(), b"ping");
    sandbox.stop().await.unwrap();
}

#[tokio::test]
async fn mounts_are_as_the_spec_says() {
    let directory = tempfile::tempdir().unwrap(); // readable by its owner only
    let (work, tests) = (directory.path().join("work"), directory.path().join("tests"));
    std::fs::create_dir(&work).unwrap();
    std::fs::create_dir(&tests).unwrap();
    std::fs::set_permissions(&work, std::fs::Permissions::from_mode(0o700)).unwrap();
    std::fs::write(work.join("given"), "given").unwrap();
    std::fs::write(tests.join("t.py"), "print('hidden')").unwrap();
    let spec = Spec {
        mounts: vec![
            mount(&work, "/workspace", true),
            mount(&tests, "/opt/hidden_tests", false),
            mount(&tests.join("t.py"), "/opt/lego/t.py", false),
        ],
        ..Spec::default()
    };
    let mut sandbox = backend().await.create(spec).await.unwrap();
    let script = "cat /workspace/given && echo made > /workspace/made && mkdir /workspace/d \
                  && python3 /opt/lego/t.py; echo x > /opt/hidden_tests/t.py; echo x > /opt/lego/t.py; \
                  rm /opt/hidden_tests/t.py; echo x > /usr/x; echo x > /etc/x; echo x > /x; true";
    let exit = sandbox.exec(shell(script)).await.unwrap();
    assert_eq!(out(&exit), "givenhidden", "{}", String::from_utf8_lossy(&exit.stderr));
    sandbox.stop().await.unwrap();
    assert_eq!(std::fs::read_to_string(work.join("made")).unwrap(), "made\n");
    assert_eq!(std::fs::read_to_string(tests.join("t.py")).unwrap(), "print('hidden')");
    // What was made inside is ours outside.
    let owner = |path| std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(path).unwrap());
    assert_eq!(owner(work.join("made")), owner(tests.join("t.py")));
    let spec = Spec { mounts: vec![mount(&work, "/usr/x", true)], ..Spec::default() };
    assert!(matches!(backend().await.create(spec).await, Err(SandboxError::Setup { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_at_once_do_not_see_each_other() {
    let backend = backend().await;
    let tasks: Vec<_> = (0..16)
        .map(|number| {
            let backend = backend.clone();
            tokio::spawn(async move {
                let spec = Spec { listen_port: Some(18080), ..Spec::default() };
                let mut sandbox = backend.create(spec).await.unwrap();
                let script = format!("echo {number} > /tmp/x; cat /tmp/*; set -- /proc/[0-9]*; echo $#");
                let exit = sandbox.exec(shell(&script)).await.unwrap();
                // pid 1 and the shell
                assert_eq!(out(&exit), format!("{number}\n2"));
                sandbox.stop().await.unwrap();
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}
