//! Streams written by hand, the readers of each protocol, and counters of one test.

use std::sync::Arc;

use lego::config::Samples;
use lego::proxy::ProxyOptions;
use lego::record::{Call, UpstreamKind};
use lego::trajectory::{Built, lineages, samples};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use serde_json::{Value, json};

use crate::mock::{Part, Script};
use crate::setup::Setup;
use crate::speech;

/// A chunk of a chat stream.
pub fn chunk(delta: Value, finish_reason: Option<&str>) -> Part {
    choice(json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason}))
}

/// A chunk with this choice.
pub fn choice(choice: Value) -> Part {
    Part::Event(head(json!([choice])).to_string())
}

/// A chunk with these choices.
pub fn head(choices: Value) -> Value {
    json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "toy", "choices": choices})
}

pub fn text(content: &str) -> Part {
    chunk(json!({"content": content}), None)
}

pub fn finish(reason: &str) -> Part {
    chunk(json!({}), Some(reason))
}

/// The event that has nothing but usage.
pub fn usage(prompt: u64, completion: u64) -> Part {
    let mut event = head(json!([]));
    event["usage"] = numbers(prompt, completion);
    Part::Event(event.to_string())
}

pub fn numbers(prompt: u64, completion: u64) -> Value {
    json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion})
}

pub fn done() -> Part {
    Part::Event("[DONE]".to_owned())
}

pub fn stream(parts: Vec<Part>) -> Script {
    Script { parts: Some(parts), ..Script::default() }
}

/// The bytes of a stream.
pub fn raw(parts: &[Part]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts {
        match part {
            Part::Event(data) => bytes.extend_from_slice(format!("data: {data}\n\n").as_bytes()),
            Part::Raw(raw) => bytes.extend_from_slice(raw),
            Part::Gate | Part::Until(_) | Part::Cut => {}
        }
    }
    bytes
}

/// In front of a server that speaks Messages itself.
pub async fn of_messages(script: Script) -> Setup {
    Setup::with(ProxyOptions::stand_alone(), UpstreamKind::Anthropic, script).await
}

/// A client's stream in each protocol: the route, and a request for a stream.
pub fn protocols() -> [(&'static str, Value); 3] {
    [
        ("chat/completions", crate::setup::request(true)),
        ("messages", speech::messages(true)),
        ("responses", speech::responses(true)),
    ]
}

pub fn url(setup: &Setup, route: &str) -> String {
    format!("http://{}/v1/{route}", setup.address)
}

/// Event names, and the data behind each: for the protocols whose clients need the `event:` line.
pub fn strict_events(stream: &[u8]) -> Vec<(String, Value)> {
    let stream = std::str::from_utf8(stream).expect("text");
    let mut events = Vec::new();
    for block in stream.split("\n\n").filter(|block| !block.is_empty()) {
        let lines: Vec<&str> = block.lines().collect();
        let [name, data] = lines.as_slice() else { panic!("not one name and one line of data: {block:?}") };
        let name = name.strip_prefix("event: ").unwrap_or_else(|| panic!("no event line: {block:?}"));
        let data = data.strip_prefix("data: ").unwrap_or_else(|| panic!("no data line: {block:?}"));
        let data: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(data["type"], name, "{block}");
        events.push((name.to_owned(), data));
    }
    events
}

/// Text and finish reason of a stream, as a client of its protocol reads it, and how many ends it has.
pub fn read(route: &str, stream: &[u8]) -> (String, String, usize) {
    let lines = std::str::from_utf8(stream).expect("text").lines();
    let (mut content, mut reason, mut ends) = (String::new(), String::new(), 0);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    if route == "chat/completions" {
        for line in lines.filter_map(|line| line.strip_prefix("data: ")) {
            if line == "[DONE]" {
                ends += 1;
                continue;
            }
            let event: Value = serde_json::from_str(line).expect("JSON");
            content += &text(&event["choices"][0]["delta"]["content"]);
            let said = text(&event["choices"][0]["finish_reason"]);
            reason = if said.is_empty() { reason } else { said };
        }
        return (content, reason, ends);
    }
    for (name, data) in strict_events(stream) {
        match name.as_str() {
            "content_block_delta" => content += &text(&data["delta"]["text"]),
            "message_delta" => reason = text(&data["delta"]["stop_reason"]),
            "response.output_text.delta" => content += &text(&data["delta"]),
            "message_stop" => ends += 1,
            "response.completed" | "response.incomplete" | "response.failed" => {
                reason = text(&data["response"]["status"]);
                ends += 1;
            }
            _ => {}
        }
    }
    (content, reason, ends)
}

/// What a trainer makes of these calls.
pub fn trained(calls: &[Call]) -> Built {
    let calls: Vec<Arc<Call>> = calls.iter().cloned().map(Arc::new).collect();
    let built = samples(&lineages(&calls), None, &Samples::default());
    built.check(&calls).expect("every token in one bucket");
    built
}

/// Counts what happens in this test alone: its runtime has one thread.
pub struct Counters {
    handle: PrometheusHandle,
    _guard: metrics::LocalRecorderGuard<'static>,
}

impl Counters {
    pub fn new() -> Self {
        let recorder = Box::leak(Box::new(PrometheusBuilder::new().build_recorder()));
        Self { handle: recorder.handle(), _guard: metrics::set_default_local_recorder(recorder) }
    }

    pub fn page(&self) -> String {
        self.handle.render()
    }

    /// The value of a series; 0 if it is not there.
    pub fn get(&self, series: &str) -> f64 {
        let page = self.page();
        let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().expect("a number"))
    }
}

/// Calls in a training session, one after another; what each client got, and the records.
pub async fn session(turns: Vec<(Script, Value)>) -> (Vec<bytes::Bytes>, Vec<Call>) {
    let setup = Setup::trainer(Script::default()).await;
    let session = setup.proxy.open_session(crate::setup::spec("s1")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
    let mut replies = Vec::new();
    for (script, body) in turns {
        setup.mock.set(script);
        replies.push(crate::setup::text(crate::setup::post(&url, &body).await).await);
    }
    let calls = session.close().await.calls.iter().map(|call| (**call).clone()).collect();
    (replies, calls)
}

/// One frame of a sampled stream: its text, its ids, and its log-probs as JSON.
pub type Frame<'a> = (&'a str, &'a [u32], &'a [&'a str]);

fn frame((content, ids, logprobs): Frame<'_>) -> Value {
    let entry =
        |logprob: &&str| format!(r#"{{"token":"t","logprob":{logprob},"bytes":[116],"top_logprobs":[]}}"#);
    let entries: Vec<String> = logprobs.iter().map(entry).collect();
    // Written by hand, since engines print numbers that JSON has not.
    let logprobs = if entries.is_empty() {
        "null".to_owned()
    } else {
        format!(r#"{{"content":[{}]}}"#, entries.join(","))
    };
    json!({"index": 0, "delta": {"content": content}, "logprobs": format!("@{logprobs}@"), "finish_reason": null, "token_ids": ids})
}

/// As text, with the log-probs as they were written.
pub fn bare(value: &Value) -> String {
    value.to_string().replace("\"@", "").replace("@\"", "").replace("\\\"", "\"")
}

/// A stream of vLLM's: the prompt's ids in the first frame, the sampled ones in each.
pub fn sampled(prompt: &[u32], frames: &[Frame<'_>], reason: &str) -> Script {
    let mut first = head(
        json!([{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null}]),
    );
    first["prompt_token_ids"] = json!(prompt);
    let mut parts = vec![Part::Event(first.to_string())];
    let total: usize = frames.iter().map(|(_, ids, _)| ids.len()).sum();
    for (number, one) in frames.iter().enumerate() {
        let mut choice = frame(*one);
        if number + 1 == frames.len() {
            choice["finish_reason"] = json!(reason);
            choice["weight_versions"] = json!([{"version": "3", "start": 0, "end": total}]);
        }
        parts.push(Part::Event(bare(&head(json!([choice])))));
    }
    parts.extend([usage(prompt.len() as u64, total as u64), done()]);
    stream(parts)
}
