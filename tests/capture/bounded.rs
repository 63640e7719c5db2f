//! A session that is larger than memory is looked into call by call.

use std::path::Path;
use std::process::{Command, Stdio};

use lego::capture::{Writer, WriterOptions};
use lego::record::{Call, CallSink, JsonText};
use serde_json::json;

use crate::calls::call;

/// Calls of the session, and bytes of the body of each.
const CALLS: u32 = 160;
const BODY_BYTES: usize = 2 << 20;
/// Memory of the process, in KiB: less than the bodies take.
const MOST_KIB: u32 = 200 << 10;

/// A call of one of two agents that take turns.
fn turn(number: u32) -> Call {
    let agent = number % 2;
    let said = |turn: u32| {
        let text = format!("Agent {agent} has looked at file number {turn} and goes on.");
        [json!({"role": "assistant", "content": text}), json!({"role": "user", "content": "Go on."})]
    };
    let mut messages = vec![
        json!({"role": "system", "content": format!("You are agent {agent}.")}),
        json!({"role": "user", "content": "Repair it, please."}),
    ];
    messages.extend((0..number / 2).flat_map(said));
    let prompt: Vec<u32> = [agent].into_iter().chain((0..number / 2 * 3).map(|id| id + 10)).collect();
    let next = number / 2 * 3 + 10;
    let mut one = call("large", &prompt, &[next, next + 1]);
    one.received_at += i64::from(number);
    one.client_request = JsonText::new(json!({"messages": messages}).to_string()).ok();
    one.text = messages_text(&said(number / 2)[0]);
    one.tool_calls = None;
    // It is small on disk.
    one.response =
        JsonText::new(format!("{{\"number\":{number},\"body\":\"{}\"}}", "x".repeat(BODY_BYTES))).ok();
    one
}

fn messages_text(message: &serde_json::Value) -> Option<String> {
    message["content"].as_str().map(str::to_owned)
}

fn within(dir: &Path, arguments: &[&str]) -> usize {
    let script = format!("ulimit -d {MOST_KIB}; exec \"$0\" \"$@\"");
    let mut command = Command::new("bash");
    command.args(["-c", &script]).arg(env!("CARGO_BIN_EXE_lego")).arg("capture").args(arguments);
    command.arg("--capture-dir").arg(dir).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("bash runs");
    let mut counted = Counted(0);
    std::io::copy(&mut child.stdout.take().expect("piped"), &mut counted).expect("read");
    let output = child.wait_with_output().expect("ended");
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    counted.0
}

/// Counts lines.
struct Counted(usize);

impl std::io::Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.iter().filter(|byte| **byte == b'\n').count();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_session_with_large_bodies_is_shown_and_listed_in_less_memory_than_it_has() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
    for number in 0..CALLS {
        writer.append(vec![turn(number)]).await.expect("room");
    }
    writer.close().await;
    assert!(2 * CALLS as usize * BODY_BYTES > 3 * 1024 * MOST_KIB as usize, "the bodies are larger");
    let dir = dir.path();
    assert!(within(dir, &["show", "large"]) > 4 * CALLS as usize);
    assert_eq!(within(dir, &["show", "large", "--json"]), CALLS as usize);
    assert_eq!(within(dir, &["lineages", "--session", "large", "--json"]), 2);
    assert_eq!(within(dir, &["lineages", "--json"]), 2);
    assert_eq!(within(dir, &["ls", "--session", "large", "--json"]), CALLS as usize);
    assert_eq!(within(dir, &["ls", "--session", "large", "--json", "--limit", "3"]), 3);
}
