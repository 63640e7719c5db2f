//! Law 4 as the kernel sees it: between the write of a call's record and the event that its client may act on lies a
//! finished `fdatasync` of the journal.

use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::mock::{Mock, Script};
use crate::process::Process;
use crate::setup::{post, request, text};
use crate::speech;

/// One system call of a trace.
struct Traced<'a> {
    name: &'a str,
    arguments: &'a str,
    /// Where it began, and where it ended.
    lines: (usize, usize),
}

/// The system calls of `strace -f`, those that another thread's lines interrupt included.
fn traced(trace: &str) -> Vec<Traced<'_>> {
    let mut calls = Vec::new();
    let mut open: Vec<(&str, &str, &str, usize)> = Vec::new();
    for (number, line) in trace.lines().enumerate() {
        let (thread, rest) = line.trim_start().split_once(' ').unwrap_or_default();
        let rest = rest.trim_start();
        if let Some(resumed) = rest.strip_prefix("<... ") {
            let name = resumed.split(' ').next().unwrap_or_default();
            if let Some(at) = open.iter().position(|(of, what, ..)| *of == thread && *what == name) {
                let (_, name, arguments, began) = open.remove(at);
                calls.push(Traced { name, arguments, lines: (began, number) });
            }
            continue;
        }
        let Some((name, arguments)) = rest.split_once('(') else { continue };
        if arguments.ends_with("<unfinished ...>") {
            open.push((thread, name, arguments, number));
        } else {
            calls.push(Traced { name, arguments, lines: (number, number) });
        }
    }
    calls
}

/// Whether each of four calls had its record synced before its held event was sent; `None` where nothing can be traced.
async fn synced(settings: &Value) -> Option<Vec<bool>> {
    let temp = tempfile::tempdir().expect("a folder");
    let trace = temp.path().join("trace");
    let probe = Command::new("strace").args(["-f", "-o"]).arg(&trace).arg("true").output();
    if !probe.as_ref().is_ok_and(|output| output.status.success()) {
        println!("skipped: strace is not there or may not trace (apt-get install strace): {probe:?}");
        return None;
    }
    let mock = Mock::start(Script::default()).await;
    let wanted = "trace=write,writev,pwrite64,pwritev,fdatasync,fsync,sendto,sendmsg";
    let file = trace.to_str().expect("text");
    let arguments = ["-f", "-y", "-s", "100000", "-e", wanted, "-o", file];
    let process = Process::under("strace", &arguments, &mock.url(), settings).await;
    let mut calls = Vec::new();
    for (route, body, held) in [
        ("chat/completions", request(true), r#"finish_reason\":\"stop"#),
        ("messages", speech::messages(true), "message_delta"),
        ("responses", speech::responses(true), "response.output_item.done"),
        ("chat/completions", request(false), r#"finish_reason\": \"stop"#),
    ] {
        let response = post(&process.url(route), &body).await;
        let id = response.headers()["x-lego-call-id"].to_str().expect("text").to_owned();
        text(response).await;
        calls.push((id, held));
    }
    // Those that trace it end with it.
    let pid = std::fs::read_to_string(process.folder.path().join("captures/LOCK")).expect("a lock");
    let pid = nix::unistd::Pid::from_raw(pid.trim().parse().expect("a pid"));
    nix::sys::signal::kill(pid, Signal::SIGTERM).expect("sent");
    process.end().await;
    let trace = std::fs::read_to_string(&trace).expect("a trace");
    let traced = traced(&trace);
    let is_journal = |call: &Traced<'_>| {
        call.arguments.split_once('>').is_some_and(|(file, _)| file.ends_with(".journal"))
    };
    let mut synced = Vec::new();
    for (number, (id, held)) in calls.iter().enumerate() {
        let record = traced.iter().position(|call| {
            matches!(call.name, "write" | "writev" | "pwrite64" | "pwritev")
                && is_journal(call)
                && call.arguments.contains(id)
        });
        let record = &traced[record.unwrap_or_else(|| panic!("{id} is not written to the journal"))];
        // The calls come one after another: the first event of this kind after the record's is this call's.
        let sends = traced
            .iter()
            .filter(|call| call.arguments.contains("TCP:[") || call.arguments.contains("socket:["));
        let mut sends =
            sends.filter(|call| call.arguments.contains(held) && !call.arguments.contains("\"POST "));
        let before = sends.clone().filter(|call| call.lines.0 < record.lines.0).count();
        let held_before = calls[..number].iter().filter(|(_, earlier)| earlier == held).count();
        assert!(before <= held_before, "{held} of {id} was sent before its record was written");
        let send = sends
            .find(|call| call.lines.0 > record.lines.1)
            .unwrap_or_else(|| panic!("{held} of {id} is not sent"));
        synced.push(traced.iter().any(|call| {
            call.name == "fdatasync"
                && is_journal(call)
                && call.lines.0 > record.lines.1
                && call.lines.1 < send.lines.0
        }));
    }
    Some(synced)
}

#[tokio::test]
async fn an_fdatasync_lies_between_a_record_and_its_held_event() {
    let Some(synced_first) = synced(&json!({})).await else { return };
    assert_eq!(synced_first, [true; 4]);
    // The trace would tell: where no sync is asked for there is none.
    assert_eq!(synced(&json!({"durability": "process_kill"})).await, Some(vec![false; 4]));
}
