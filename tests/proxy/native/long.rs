//! Long replies of the native endpoint, whose copies may wait in a file.

use lego::capture::Spill;
use lego::proxy::ProxyOptions;
use lego::record::CallStatus;
use serde_json::{Value, json};

use super::server::Style;
use super::{Rig, post};
use crate::spill::said;

const EVENTS: usize = 60;
const TOKENS_PER_EVENT: usize = 20;
const OUTPUTS: usize = 2;

/// The events of a long reply.
fn script(incremental: bool) -> Vec<String> {
    let mut events = Vec::new();
    for number in 0..EVENTS {
        for output in 0..OUTPUTS {
            let end = (number + 1) * TOKENS_PER_EVENT;
            let tokens = (if incremental { end - TOKENS_PER_EVENT } else { 0 })..end;
            let ids: Vec<usize> = tokens.map(|at| OUTPUTS * at + output).collect();
            let pairs: Vec<Value> = ids.iter().map(|id| json!([-0.5, id, null])).collect();
            let text: String = ids.iter().map(|id| format!(" {id}")).collect();
            let reason =
                if number + 1 == EVENTS { json!({"type": "length", "length": end}) } else { Value::Null };
            let meta = json!({"id": "r", "finish_reason": reason, "prompt_tokens": 2, "completion_tokens": end,
                "cached_tokens": 0, "weight_version": "v", "output_token_logprobs": pairs});
            let event = json!({"index": output, "text": text, "output_ids": ids, "meta_info": meta});
            events.push(event.to_string());
        }
    }
    events
}

/// What is wrong with a reply is told by its first event that cannot be read; what later events say again is not kept.
#[tokio::test]
async fn a_long_reply_with_events_that_cannot_be_read_is_kept_once_too() {
    let oops: fn(&mut Vec<String>) = |events| events[20] = "oops".to_owned();
    let now_and_then: fn(&mut Vec<String>) =
        |events| (0..EVENTS).step_by(8).for_each(|at| events[20 + at] = "oops".to_owned());
    // One output's ids change, and stay what they are then.
    let rewritten: fn(&mut Vec<String>) = |events| {
        for event in events.iter_mut().skip(20).step_by(OUTPUTS) {
            *event = event.replace("\"output_ids\":[0,", "\"output_ids\":[7,");
        }
    };
    // For one event, in what came since the first that could not be read: without those between it could be.
    let contradicted: fn(&mut Vec<String>) = |events| {
        events[20] = "oops".to_owned();
        events[40] = events[40].replace(",600,", ",601,");
    };
    for (name, spoil) in [
        ("oops", oops),
        ("now and then", now_and_then),
        ("rewritten", rewritten),
        ("contradicted", contradicted),
    ] {
        let mut events = script(false);
        spoil(&mut events);
        let mut all = Vec::new();
        for most in [None, Some(1), Some(20_000)] {
            let dir = tempfile::tempdir().expect("folder");
            let mut options = ProxyOptions::stand_alone();
            options.spill = most.map(|_| Spill::in_folder(dir.path()));
            options.capture_buffer_bytes = most.unwrap_or(1);
            let style = Style { script: Some(events.clone()), ..Style::default() };
            let rig = Rig::new(options, style, false).await;
            let body = json!({"input_ids": [1, 2], "sampling_params": {"n": OUTPUTS}, "stream": true});
            let reply = crate::setup::text(post(&rig.url("/generate"), &body).await).await;
            // The client has all of it.
            assert_eq!(reply.windows(2).filter(|two| two == b"\n\n").count(), events.len() + 1, "{name}");
            let mut calls = rig.setup.sink.calls(OUTPUTS).await;
            calls.sort_by_key(|call| call.choice_index);
            assert!(calls.iter().all(|call| call.status == CallStatus::ParseError && !call.trainable));
            let records: Vec<Value> = calls.iter().map(said).collect();
            let kept = records[1]["response"].as_array().expect("events").len();
            assert!((OUTPUTS + 1..=2 * OUTPUTS + 2).contains(&kept), "{name}: {kept} events");
            // The output with which nothing is wrong is there to its end.
            let ids = records[1]["completion_token_ids"].as_array().expect("ids").len();
            assert_eq!(ids, EVENTS * TOKENS_PER_EVENT, "{name}");
            all.push(records);
        }
        assert!(all.iter().all(|records| *records == all[0]), "{name}");
    }
}

#[tokio::test]
async fn a_long_replys_record_is_the_same_with_its_copy_in_a_file() {
    let completions =
        ("/v1/completions", json!({"model": "toy", "prompt": [1, 2], "n": OUTPUTS, "stream": true}));
    let native =
        ("/generate", json!({"input_ids": [1, 2], "sampling_params": {"n": OUTPUTS}, "stream": true}));
    for (path, body) in [completions, native] {
        for (incremental, is_cut) in [(false, false), (false, true), (true, false), (true, true)] {
            let about = format!("{path}, incremental: {incremental}, cut: {is_cut}");
            let mut events = script(incremental);
            if is_cut {
                events.truncate(EVENTS);
            }
            let count = events.len();
            let mut all = Vec::new();
            // In memory; in many small parts, in whole slots.
            for most in [None, Some(1), Some(20_000)] {
                let dir = tempfile::tempdir().expect("folder");
                let mut options = ProxyOptions::stand_alone();
                options.spill = most.map(|_| Spill::in_folder(dir.path()));
                options.capture_buffer_bytes = most.unwrap_or(1);
                let style = Style { incremental, script: Some(events.clone()), ..Style::default() };
                let rig = Rig::new(options, style, false).await;
                let mut response = post(&rig.url(path), &body).await;
                let mut reply = Vec::new();
                while let Ok(Some(piece)) = response.chunk().await {
                    reply.extend_from_slice(&piece);
                }
                let mut calls = rig.setup.sink.calls(OUTPUTS).await;
                calls.sort_by_key(|call| call.choice_index);
                let status = if is_cut { CallStatus::Truncated } else { CallStatus::Ok };
                assert!(calls.iter().all(|call| call.status == status), "{about}: {:?}", calls[0].error);
                let records: Vec<Value> = calls.iter().map(said).collect();
                let tokens = count / OUTPUTS * TOKENS_PER_EVENT;
                assert_eq!(
                    records[1]["completion_token_ids"].as_array().expect("ids").len(),
                    tokens,
                    "{about}"
                );
                assert_eq!(records[1]["completion_logprobs"].as_array().expect("log-probs").len(), tokens);
                // Of what repeats itself only the last event of each output is there.
                let told = if incremental { count } else { OUTPUTS };
                assert_eq!(records[1]["response"].as_array().expect("events").len(), told, "{about}");
                all.push((most, records));
            }
            let (_, in_memory) = &all[0];
            for (most, records) in &all[1..] {
                assert!(records == in_memory, "{about}, with {most:?} bytes in memory");
            }
        }
    }
}
