//! `lego capture sql`: the answers are what the reader gives, and nothing but questions is run.

#[path = "../common/calls.rs"]
mod calls;

mod answers;
mod bounds;
mod documentation;
mod refused;

use std::path::Path;
use std::process::{Command, Output};

use lego::capture::{Query, Reader, Writer, WriterOptions};
use lego::record::{Call, CallSink, CallStatus, CapturedToolCall, JsonText, Usage};
use serde_json::Value;

use calls::{call, failed_call, routing};

fn sql(dir: &Path, query: &str, options: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    command.args(["capture", "sql", query]).arg(dir).args(options).output().expect("lego runs")
}

/// The rows of an answer with which nothing is wrong.
fn rows(dir: &Path, query: &str) -> Vec<Value> {
    let output = sql(dir, query, &["--json"]);
    assert!(output.status.success() && output.stderr.is_empty(), "{query}: {output:?}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// What a query that fails says, and its exit code.
fn failure(dir: &Path, query: &str, options: &[&str]) -> (i32, String) {
    let output = sql(dir, query, options);
    (output.status.code().expect("it ends by itself"), String::from_utf8(output.stderr).expect("UTF-8"))
}

/// What the reader gives, in its order.
fn read(dir: &Path) -> Vec<Call> {
    let calls = Reader::open(dir, Query::default()).expect("folder");
    calls.collect::<Result<_, _>>().expect("whole files")
}

/// Six sessions on three days, in three Parquet files and the journal: all that can be odd in a call.
/// What the last writer wrote is in the journal, as long as it is there.
async fn store(dir: &Path) -> Writer {
    let mut last = None;
    for file in 0..4_u32 {
        let writer = Writer::open(dir, WriterOptions::default()).expect("free folder");
        for number in 0..3 {
            let session = format!("s{}", file / 2 * 3 + number);
            let mut one = call(&session, &[1, 2, file, number], &vec![7; ((file + number) % 3) as usize]);
            one.received_at += i64::from(file) * 43_200_000_000 + i64::from(number) * 1_000_000;
            one.status = CallStatus::ALL[(file + number) as usize % 3];
            one.harness = (number != 1).then(|| format!("h'{file}_%"));
            one.ttft_us = (number != 2).then_some(u64::from(file));
            one.routing = (number == 0).then(|| routing(0, 3, file));
            one.tool_calls = [None, Some(vec![]), one.tool_calls][number as usize].clone();
            one.usage = [None, Some(Usage { cached_tokens: Some(u64::MAX), ..Usage::default() }), one.usage]
                [number as usize];
            one.text = [None, Some(String::new()), Some("héllo 😀\n\u{1b}[31mred".to_owned())]
                [number as usize]
                .clone();
            if let Some(logprobs) = &mut one.completion_logprobs {
                logprobs.iter_mut().skip(1).for_each(|logprob| *logprob = None);
            }
            writer.append(vec![one, failed_call(&format!("f{file}"))]).await.expect("room");
        }
        match file {
            3 => last = Some(writer),
            _ => drop(writer.close().await),
        }
    }
    last.expect("the last one")
}

/// A call with arguments of a tool and a body that JSON text has to escape.
fn odd_texts() -> Call {
    let mut odd = call("odd", &[], &[u32::MAX]);
    odd.client_request =
        JsonText::new(r#"{"messages": [{"role": "user", "content": "\ud83d\ude00 😀 \"q\" \\ \n"}]}"#).ok();
    odd.tool_calls = Some(vec![CapturedToolCall {
        id: "call_1".to_owned(),
        name: "édit".to_owned(),
        arguments: "{\"a\": \"\u{7f}'\\".to_owned(),
        arguments_valid_json: false,
    }]);
    odd
}
