//! What the mock upstream answers, as vLLM words it.

use serde_json::{Map, Value, json};

pub const PROMPT_IDS: [u32; 4] = [151_644, 872, 198, 77_091];

/// How members that nobody asked for are written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// vLLM: null.
    Vllm,
    /// The embedded engine: left out.
    Absent,
}

/// One part of a stream.
#[derive(Clone, Debug)]
pub enum Part {
    Event(String),
    Raw(Vec<u8>),
    /// Waits until the mock's gate is open.
    Gate,
    /// Waits until the test has come to this step.
    Until(usize),
    /// Breaks the connection.
    Cut,
}

/// What the mock does.
#[derive(Clone)]
pub struct Script {
    pub style: Style,
    /// Tokens of the answer: text and log-prob.
    pub tokens: Vec<(&'static str, f64)>,
    pub tokens_per_chunk: usize,
    /// As the embedded engine: no chunk for an empty text unless ids or log-probs are asked for.
    pub is_quiet: bool,
    pub has_tool_call: bool,
    pub gives_ids: bool,
    pub gives_versions: bool,
    /// Added to the completion tokens that usage tells.
    pub usage_error: i64,
    /// Answers with this instead.
    pub error: Option<(u16, String)>,
    /// The first requests are answered with these instead, and these headers.
    pub first_errors: Vec<(u16, &'static str, Vec<(&'static str, &'static str)>)>,
    /// Refuses `logprobs`.
    pub refuses_logprobs: bool,
    /// Members that it does not know, and refuses: all that there are, or only the first.
    pub unknown: &'static [&'static str],
    pub names_one: bool,
    /// It serves `/v1/responses` too.
    pub has_responses: bool,
    /// Never answers.
    pub is_silent: bool,
    /// A stream's parts, whatever was asked.
    pub parts: Option<Vec<Part>>,
    /// A body, whatever was asked.
    pub body: Option<Vec<u8>>,
    /// Changes a stream's parts.
    pub spoil: Option<fn(Vec<Part>) -> Vec<Part>>,
    /// Changes a body.
    pub spoil_body: Option<fn(String) -> Vec<u8>>,
    pub headers: Vec<(&'static str, &'static str)>,
    pub bytes_per_write: Option<usize>,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            style: Style::Vllm,
            tokens: vec![("Hello", -0.25), (" 北京", -1.5), ("", -0.125), ("🌍", -2.0), ("<|im_end|>", -0.5)],
            tokens_per_chunk: 1,
            is_quiet: false,
            has_tool_call: false,
            gives_ids: true,
            gives_versions: true,
            usage_error: 0,
            error: None,
            first_errors: Vec::new(),
            refuses_logprobs: false,
            unknown: &[],
            names_one: false,
            has_responses: false,
            is_silent: false,
            parts: None,
            body: None,
            spoil: None,
            spoil_body: None,
            headers: Vec::new(),
            bytes_per_write: None,
        }
    }
}

pub fn id_of(index: usize) -> u32 {
    u32::try_from(1000 + index).expect("small")
}

struct Wants {
    ids: bool,
    logprobs: bool,
    versions: bool,
    usage: bool,
    n: u64,
}

fn wants(script: &Script, request: &Value) -> Wants {
    Wants {
        ids: script.gives_ids && request["return_token_ids"] == true,
        logprobs: request["logprobs"] == true,
        versions: script.gives_versions && request["return_weight_versions"] == true,
        usage: request["stream_options"]["include_usage"] == true,
        n: request["n"].as_u64().unwrap_or(1),
    }
}

fn logprobs(tokens: &[(&str, f64)]) -> Value {
    let entry = |(text, logprob): &(&str, f64)| json!({"token": text, "logprob": logprob, "bytes": text.as_bytes(), "top_logprobs": []});
    json!({"content": tokens.iter().map(entry).collect::<Vec<_>>()})
}

/// Sets a member that was asked for, or what the style writes when it was not.
fn put(object: &mut Map<String, Value>, name: &str, style: Style, asked: bool, value: Value) {
    if asked {
        object.insert(name.to_owned(), value);
    } else if style == Style::Vllm {
        object.insert(name.to_owned(), Value::Null);
    }
}

fn usage(script: &Script, n: u64) -> Value {
    let sampled = i64::try_from(script.tokens.len() as u64 * n).expect("small") + script.usage_error;
    json!({"prompt_tokens": PROMPT_IDS.len(), "total_tokens": PROMPT_IDS.len() as i64 + sampled, "completion_tokens": sampled})
}

fn versions(count: usize) -> Value {
    json!([{"version": "3", "start": 0, "end": count}])
}

/// The events of a stream, `[DONE]` included.
pub fn events(script: &Script, request: &Value) -> Vec<String> {
    let wants = wants(script, request);
    let head = json!({"id": "chatcmpl-mock", "object": "chat.completion.chunk", "created": 1_796_000_000, "model": request["model"]});
    let chunk = |choices: Value| {
        let mut chunk = head.as_object().expect("object").clone();
        chunk.insert("choices".into(), choices);
        chunk
    };
    let mut events = Vec::new();
    for index in 0..wants.n {
        let mut role = chunk(
            json!([{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null}]),
        );
        put(&mut role, "prompt_token_ids", script.style, wants.ids, json!(PROMPT_IDS));
        events.push(Value::Object(role).to_string());
    }
    let total = script.tokens.len();
    for (number, tokens) in script.tokens.chunks(script.tokens_per_chunk).enumerate() {
        let start = number * script.tokens_per_chunk;
        let is_last = start + tokens.len() == total;
        for index in 0..wants.n {
            let text: String =
                tokens.iter().map(|(text, _)| *text).filter(|text| !text.starts_with("<|")).collect();
            let ids: Vec<u32> = (start..start + tokens.len()).map(id_of).collect();
            let delta = if !script.has_tool_call {
                json!({"content": text})
            } else if number == 0 {
                // The parser swallowed the marker: no delta.
                json!({})
            } else if number == 1 {
                json!({"tool_calls": [{"index": 0, "id": "chatcmpl-tool-1", "type": "function", "function": {"name": "view", "arguments": ""}}]})
            } else {
                json!({"tool_calls": [{"index": 0, "function": {"arguments": text}}]})
            };
            // Without ids or log-probs asked for, an engine sends no chunk for swallowed tokens.
            let is_empty = delta == json!({}) || (script.is_quiet && delta == json!({"content": ""}));
            if is_empty && !wants.ids && !is_last {
                continue;
            }
            let mut choice = Map::new();
            choice.insert("index".into(), json!(index));
            choice.insert("delta".into(), delta);
            choice.insert("logprobs".into(), if wants.logprobs { logprobs(tokens) } else { Value::Null });
            let reason = if script.has_tool_call { "tool_calls" } else { "stop" };
            choice.insert("finish_reason".into(), if is_last { json!(reason) } else { Value::Null });
            if is_last {
                choice.insert("stop_reason".into(), Value::Null);
            }
            put(&mut choice, "token_ids", script.style, wants.ids, json!(ids));
            if is_last && wants.versions {
                choice.insert("weight_versions".into(), versions(total));
            }
            events.push(Value::Object(chunk(json!([choice]))).to_string());
        }
    }
    if wants.usage {
        let mut last = chunk(json!([]));
        last.insert("usage".into(), usage(script, wants.n));
        events.push(Value::Object(last).to_string());
    }
    events.push("[DONE]".to_owned());
    events
}

/// A body.
pub fn whole(script: &Script, request: &Value) -> String {
    let wants = wants(script, request);
    let text: String =
        script.tokens.iter().map(|(text, _)| *text).filter(|text| !text.starts_with("<|")).collect();
    let ids: Vec<u32> = (0..script.tokens.len()).map(id_of).collect();
    let mut choices = Vec::new();
    for index in 0..wants.n {
        let mut message = json!({"role": "assistant", "content": text, "refusal": null, "reasoning": null});
        if script.has_tool_call {
            message["content"] = Value::Null;
            // After the marker and the name.
            let arguments: String = script.tokens[2..]
                .iter()
                .map(|(text, _)| *text)
                .filter(|text| !text.starts_with("<|"))
                .collect();
            message["tool_calls"] = json!([{"id": "chatcmpl-tool-1", "type": "function", "function": {"name": "view", "arguments": arguments}}]);
        }
        let mut choice = Map::new();
        choice.insert("index".into(), json!(index));
        choice.insert("message".into(), message);
        choice.insert("logprobs".into(), if wants.logprobs { logprobs(&script.tokens) } else { Value::Null });
        choice
            .insert("finish_reason".into(), json!(if script.has_tool_call { "tool_calls" } else { "stop" }));
        put(&mut choice, "token_ids", script.style, wants.ids, json!(ids));
        put(&mut choice, "weight_versions", script.style, wants.versions, versions(ids.len()));
        choices.push(Value::Object(choice));
    }
    let mut body = json!({"id": "chatcmpl-mock", "object": "chat.completion", "created": 1_796_000_000, "model": request["model"],
        "choices": choices, "usage": usage(script, wants.n), "prompt_logprobs": null});
    let object = body.as_object_mut().expect("object");
    put(object, "prompt_token_ids", script.style, wants.ids, json!(PROMPT_IDS));
    object.insert("kv_transfer_params".into(), Value::Null);
    // As a pretty-printing server would, so that spacing is seen to be kept.
    serde_json::to_string_pretty(&body).expect("JSON")
}
