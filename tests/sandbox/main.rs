//! Sandboxes seen from outside: how programs end, what limits do, what nothing inside can reach.
#![cfg(target_os = "linux")]

mod escape;
mod lifecycle;
mod limits;
mod programs;
mod users;
mod weak;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lego::sandbox::{Backend, Choice, Exec, Exit, Limits, Mount, Options, Sandbox, Spec, select_with};

const LEGO: &str = env!("CARGO_BIN_EXE_lego");
const MIB: u64 = 1 << 20;

async fn backend() -> Arc<dyn Backend> {
    choose(Choice::Embedded).await
}

async fn choose(choice: Choice) -> Arc<dyn Backend> {
    let options =
        Options { choice, allow_weak: choice == Choice::Weak, binary: LEGO.into(), ..Options::default() };
    select_with(&options).await.expect("this machine can make sandboxes")
}

async fn sandbox(limits: Limits) -> Box<dyn Sandbox> {
    backend().await.create(Spec { limits, ..Spec::default() }).await.unwrap()
}

fn mount(host: &Path, inside: &str, is_writable: bool) -> Mount {
    Mount { host: host.into(), inside: inside.into(), is_writable }
}

fn exec(argv: &[&str]) -> Exec {
    Exec {
        argv: argv.iter().map(Into::into).collect(),
        env: vec![("PATH".into(), "/usr/bin:/bin".into()), ("HOME".into(), "/tmp".into())],
        cwd: "/tmp".into(),
        stdin: Vec::new(),
        max_output_bytes: 1 << 20,
        timeout: Duration::from_secs(120),
    }
}

fn shell(script: &str) -> Exec {
    exec(&["/bin/sh", "-c", script])
}

fn python(script: &str) -> Exec {
    exec(&["/usr/bin/python3", "-I", "-c", script])
}

fn out(exit: &Exit) -> String {
    String::from_utf8_lossy(&exit.stdout).trim().to_owned()
}

/// Waits for a condition that another process brings about.
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let limit = std::time::Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(std::time::Instant::now() < limit, "still waiting until {what}");
        std::thread::yield_now();
    }
}
