//! Copies of long replies that wait in a file: records and what a client that comes back gets are those of copies in
//! memory, little is held, and nothing stays behind.

use lego::capture::Spill;
use lego::proxy::ProxyOptions;
use lego::record::{Call, CallStatus, UpstreamKind};
use serde_json::{Value, json};

use crate::mock::{Part, Script};
use crate::rejoin::{direct, left, patient, without_ids};
use crate::setup::{PATIENCE, Setup, broken, post, request, text};

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
    setup_with(ProxyOptions::stand_alone(), script, dir, most).await
}

async fn setup_with(
    mut options: ProxyOptions,
    script: Script,
    dir: Option<&tempfile::TempDir>,
    most: usize,
) -> Setup {
    options.spill = dir.map(|dir| Spill::in_folder(dir.path()));
    options.capture_buffer_bytes = most;
    Setup::with(options, UpstreamKind::Vllm, script).await
}

/// What a record says, less what differs from call to call.
pub fn said(call: &Call) -> Value {
    let mut said = serde_json::to_value(call).expect("JSON");
    for name in ["call_id", "session_id", "received_at", "ttft_us", "duration_us", "rejoined"] {
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

/// Within the reply it waits for the first step, before its end for the second.
fn in_steps(mut parts: Vec<Part>) -> Vec<Part> {
    parts.insert(parts.len() - 3, Part::Until(2));
    parts.insert(700, Part::Until(1));
    parts
}

/// Reads so many events of a stream.
async fn take(response: &mut reqwest::Response, events: usize) -> Vec<u8> {
    let mut seen = Vec::new();
    while seen.windows(2).filter(|two| two == b"\n\n").count() < events {
        let piece = tokio::time::timeout(PATIENCE, response.chunk()).await.expect("in time");
        seen.extend_from_slice(&piece.expect("piece").expect("more"));
    }
    seen
}

#[tokio::test]
async fn a_client_that_comes_back_is_given_a_long_reply_from_the_file() {
    for is_over_before in [false, true] {
        let dir = tempfile::tempdir().expect("folder");
        let setup = setup_with(patient(), script(in_steps), Some(&dir), 50_000).await;
        let body = request(true);
        let mut response = setup.post(&body).await;
        let first = take(&mut response, 700).await;
        assert!(is_empty(&dir), "it has no name");
        drop(response);
        left(&setup, 1).await;
        // It leaves again within what it is given again, and goes on all the same.
        response = setup.post(&body).await;
        let again = take(&mut response, 20).await;
        assert!(first.starts_with(&again[..first.len().min(again.len())]));
        drop(response);
        left(&setup, 1).await;
        let mut seen;
        if is_over_before {
            setup.mock.step(2);
            response = setup.post(&body).await;
            seen = Vec::new();
        } else {
            response = setup.post(&body).await;
            // Live: what the upstream has not sent yet is not waited for.
            seen = take(&mut response, 700).await;
            assert!(seen == first);
            setup.mock.step(2);
        }
        seen.extend_from_slice(&text(response).await);
        assert_eq!(setup.mock.asked().len(), 1);
        let call = setup.sink.calls(1).await.remove(0);
        assert_eq!((call.status, call.rejoined), (CallStatus::Ok, 2));
        assert!(seen == direct(&setup, &body).await, "over before: {is_over_before}");
        text(setup.post(&body).await).await;
        let undisturbed = &setup.sink.calls(2).await[1];
        assert_eq!(undisturbed.completion_token_ids.as_ref().expect("ids").len(), TOKENS);
        assert!(said(&call) == said(undisturbed));
        assert!(is_empty(&dir));
    }
}

#[tokio::test]
async fn a_client_of_another_protocol_comes_back_to_a_long_reply() {
    let body = json!({"model": "claude-x", "max_tokens": TOKENS, "stream": true,
        "messages": [{"role": "user", "content": "hi"}]});
    let dir = tempfile::tempdir().expect("folder");
    let setup = setup_with(patient(), script(in_steps), Some(&dir), 50_000).await;
    let url = format!("http://{}/v1/messages", setup.address);
    let mut response = post(&url, &body).await;
    take(&mut response, 650).await;
    drop(response);
    left(&setup, 1).await;
    response = post(&url, &body).await;
    setup.mock.step(2);
    let again = text(response).await;
    let again = String::from_utf8_lossy(&again);
    assert_eq!(setup.mock.asked().len(), 1);
    assert_eq!(again.matches("event: message_stop").count(), 1);
    assert_eq!(setup.sink.calls(1).await[0].rejoined, 1);
    let undisturbed = text(post(&url, &body).await).await;
    assert!(without_ids(&again) == without_ids(&String::from_utf8_lossy(&undisturbed)));
}

/// A number on the page of metrics.
fn gauge(page: &str, name: &str) -> usize {
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} is not in\n{page}")).parse::<f64>().expect("a number") as usize
}

#[tokio::test]
async fn a_reply_holds_the_same_memory_however_long_it_is() {
    const MOST: usize = 32_768;
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let page = recorder.handle();
    // Everything but the writing of the file runs on this thread.
    let _recording = metrics::set_default_local_recorder(&recorder);
    let gated: fn(Vec<Part>) -> Vec<Part> = |mut parts| {
        parts.insert(parts.len() - 3, Part::Gate);
        parts
    };
    for tokens in [1024, 4096, TOKENS] {
        let dir = tempfile::tempdir().expect("folder");
        let mut script = script(gated);
        script.tokens.truncate(tokens);
        let setup = setup(script, Some(&dir), MOST).await;
        let mut response = setup.post(&request(true)).await;
        let (mut seen, mut peak, mut events) = (0, 0, 0);
        let mut end = Vec::new();
        while events < tokens / 16 {
            let piece = tokio::time::timeout(PATIENCE, response.chunk()).await.expect("in time");
            let piece = piece.expect("piece").expect("more");
            seen += piece.len();
            end.extend_from_slice(&piece);
            events += end.windows(2).filter(|two| two == b"\n\n").count();
            end.drain(..end.len() - 1);
            peak = peak.max(gauge(&page.render(), "lego_proxy_buffered_bytes"));
        }
        // What one read of the upstream gave comes on top while it is passed on: an event is a write of the mock.
        assert!(peak < MOST + 200_000, "{tokens} tokens: {peak} bytes in memory");
        let now = page.render();
        let (buffered, spilled) =
            (gauge(&now, "lego_proxy_buffered_bytes"), gauge(&now, "lego_proxy_spilled_bytes"));
        assert!(buffered < MOST + 1, "{tokens} tokens: {buffered} bytes in memory");
        // What lego asked for in addition is not passed on, so the copy is longer than what was seen.
        assert!(spilled + buffered >= seen, "{seen} seen, {spilled} in the file, {buffered} in memory");
        assert!(spilled > 20 * tokens);
        setup.mock.open_gate();
        text(response).await;
        assert_eq!(setup.sink.calls(1).await[0].completion_token_ids.as_ref().expect("ids").len(), tokens);
        let nothing_is_left = async {
            let held = || {
                let now = page.render();
                gauge(&now, "lego_proxy_buffered_bytes") + gauge(&now, "lego_proxy_spilled_bytes")
            };
            while held() > 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, nothing_is_left).await.expect("in time");
    }
}

#[tokio::test]
async fn a_file_that_cannot_be_written_is_told_as_a_store_that_is_full() {
    let dir = tempfile::tempdir().expect("folder");
    let in_the_way = dir.path().join("journal");
    std::fs::write(&in_the_way, b"").expect("written");
    let setup = setup_with(patient(), script(|parts| parts), Some(&dir), 100_000).await;
    let reply = broken(setup.post(&request(true)).await).await;
    let reply = String::from_utf8_lossy(&reply);
    let last = reply.trim_end().rsplit("\n\n").next().expect("an event");
    assert!(last.contains("capture_failed") && last.contains(dir.path().to_str().expect("text")), "{last}");
    assert!(!reply.contains("\"finish_reason\":\"stop\"") && !reply.contains("[DONE]"));
    // The store took it, with all that had come.
    let call = &setup.sink.calls(1).await[0];
    assert_eq!(call.status, CallStatus::Aborted);
    assert!(call.error.as_ref().expect("why").contains("could not store"), "{:?}", call.error);
    assert!(!call.trainable);
    let ids = call.completion_token_ids.as_ref().expect("ids").len();
    assert!(ids > 200 && ids < TOKENS, "{ids}");
    // It goes on by itself.
    std::fs::remove_file(&in_the_way).expect("removed");
    text(setup.post(&request(true)).await).await;
    let call = &setup.sink.calls(2).await[1];
    assert_eq!(
        (call.status, call.completion_token_ids.as_ref().expect("ids").len()),
        (CallStatus::Ok, TOKENS)
    );
}
