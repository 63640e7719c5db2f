//! Copies of long replies that wait in a file: the records are those of copies in memory, and nothing stays behind.

use lego::capture::Spill;
use lego::proxy::ProxyOptions;
use lego::record::{Call, CallStatus, UpstreamKind};
use serde_json::{Value, json};

use crate::mock::{Part, Script};
use crate::setup::{Setup, request, text};

const TOKENS: usize = 16_384;

fn script(spoil: fn(Vec<Part>) -> Vec<Part>) -> Script {
    let words = [("Hello", -0.25), (" 北京", -1.5), (" \"x\\", -0.125), ("🌍", -2.0)];
    Script {
        tokens: words.into_iter().cycle().take(TOKENS).collect(),
        tokens_per_chunk: 16,
        spoil: Some(spoil),
        ..Script::default()
    }
}

/// A proxy whose copies go to a file in `dir` when they are this long; without a folder they stay in memory.
async fn setup(script: Script, dir: Option<&tempfile::TempDir>, most: usize) -> Setup {
    let mut options = ProxyOptions::stand_alone();
    options.spill = dir.map(|dir| Spill::in_folder(dir.path()));
    options.capture_buffer_bytes = most;
    Setup::with(options, UpstreamKind::Vllm, script).await
}

/// What a record says, less what differs from call to call.
fn said(call: &Call) -> Value {
    let mut said = serde_json::to_value(call).expect("JSON");
    for name in ["call_id", "session_id", "received_at", "ttft_us", "duration_us"] {
        said.as_object_mut().expect("object").remove(name);
    }
    said
}

fn is_empty(dir: &tempfile::TempDir) -> bool {
    std::fs::read_dir(dir.path().join("journal")).expect("the file was made there").count() == 0
}

#[tokio::test]
async fn a_long_replys_record_is_the_same_with_its_copy_in_a_file() {
    let untouched: fn(Vec<Part>) -> Vec<Part> = |parts| parts;
    let spoiled: fn(Vec<Part>) -> Vec<Part> = |mut parts| {
        parts.insert(40, Part::Event("no JSON, \"but text".to_owned()));
        parts.insert(
            90,
            Part::Event(
                r#" {"choices":[{"index":0,"delta":{"content":"n"},"logprobs":{"content":[{"token":"n","logprob":NaN}]}}]} "#
                    .to_owned(),
            ),
        );
        parts.insert(200, Part::Event("1,2".to_owned()));
        parts
    };
    let cut: fn(Vec<Part>) -> Vec<Part> = |mut parts| {
        parts.truncate(900);
        parts
    };
    for (spoil, status) in
        [(untouched, CallStatus::Ok), (spoiled, CallStatus::ParseError), (cut, CallStatus::Truncated)]
    {
        let mut all = Vec::new();
        // In memory; in many small parts, in whole slots, in one.
        for most in [None, Some(1), Some(20_000), Some(100_000)] {
            let dir = tempfile::tempdir().expect("folder");
            let setup = setup(script(spoil), most.map(|_| &dir), most.unwrap_or(1)).await;
            let mut body = request(true);
            body["n"] = json!(2);
            let mut response = setup.post(&body).await;
            while let Ok(Some(_)) = response.chunk().await {}
            let calls = setup.sink.calls(2).await;
            assert!(calls.iter().all(|call| call.status == status), "{:?}", calls[0].error);
            assert!(most.is_none() || is_empty(&dir));
            all.push((most, calls.iter().map(said).collect::<Vec<_>>()));
        }
        let (_, in_memory) = &all[0];
        let sampled = in_memory[1]["completion_token_ids"].as_array().expect("ids").len();
        assert!(
            if status == CallStatus::Truncated { sampled > 4096 } else { sampled == TOKENS },
            "{sampled}"
        );
        assert!(in_memory[0]["response"].as_array().expect("events").len() > 800);
        for (most, records) in &all[1..] {
            assert!(records == in_memory, "{status:?} with {most:?} bytes in memory");
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_within_a_long_reply_leaves_the_same_record() {
    let stalls: fn(Vec<Part>) -> Vec<Part> = |mut parts| {
        parts.insert(700, Part::Gate);
        parts
    };
    let mut all = Vec::new();
    for most in [None, Some(5000)] {
        let dir = tempfile::tempdir().expect("folder");
        let setup = setup(script(stalls), most.map(|_| &dir), most.unwrap_or(1)).await;
        let mut response = setup.post(&request(true)).await;
        let (mut events, mut seen) = (0, Vec::new());
        while events < 700 {
            seen.extend_from_slice(&response.chunk().await.expect("piece").expect("more"));
            events += seen.windows(6).filter(|part| part == b"data: ").count();
            seen.drain(..seen.len().saturating_sub(5));
        }
        drop(response);
        let calls = setup.sink.calls(1).await;
        assert_eq!(calls[0].status, CallStatus::ClientDisconnect);
        all.push(said(&calls[0]));
    }
    assert_eq!(all[0]["completion_token_ids"].as_array().expect("ids").len(), 699 * 16);
    assert!(all[0] == all[1]);
}

#[tokio::test]
async fn a_file_that_cannot_be_written_costs_memory_and_nothing_else() {
    let dir = tempfile::tempdir().expect("folder");
    std::fs::write(dir.path().join("journal"), b"in the way").expect("written");
    let setup = setup(script(|parts| parts), Some(&dir), 1000).await;
    let reply = text(setup.post(&request(true)).await).await;
    assert!(reply.ends_with(b"data: [DONE]\n\n"));
    let calls = setup.sink.calls(1).await;
    assert_eq!(calls[0].completion_token_ids.as_ref().expect("ids").len(), TOKENS);
    assert_eq!(calls[0].status, CallStatus::Ok);
}
