//! Replies of upstreams, and what they say: read event by event with nothing of lego's.

use std::collections::BTreeMap;

use lego::record::{CallStatus, UpstreamKind};
use serde::Serialize;
use serde_json::{Value, json};

use super::wire::Reply;

/// Every reply of `tests/fixtures/wire`; the rest of that folder is the expectation of one of them.
pub const ALL: [&str; 20] = [
    "anthropic_stream.sse",
    "anthropic_stream_error.sse",
    "anthropic_tools_stream.sse",
    "openai_chat_stream_nologprobs.sse",
    "responses_stream.sse",
    "sglang_chat.json",
    "sglang_chat_stream_sglext.sse",
    "sglang_generate.json",
    "sglang_generate_stream.sse",
    "sglang_generate_stream_incremental.sse",
    "sse_corner_cases.sse",
    "vllm_chat.json",
    "vllm_chat_routed.json",
    "vllm_chat_stream.sse",
    "vllm_chat_stream_abort.sse",
    "vllm_chat_stream_error.sse",
    "vllm_chat_tools_stream.sse",
    "vllm_inference_generate.json",
    "vllm_completions_stream.sse",
    "vllm_completions.json",
];

/// A fixture of the folder. Completions, of which it has none, are made here in vLLM's shapes.
pub fn bytes(name: &str) -> Vec<u8> {
    match name {
        "vllm_completions_stream.sse" => completions_stream().into_bytes(),
        "vllm_completions.json" => pretty(&completions_body()),
        "vllm_chat_two_choices.sse" => two_choices().into_bytes(),
        // What the stream ends with.
        "responses.json" => {
            let (end, _) = events(&bytes("responses_stream.sse")).pop().expect("an end");
            pretty(&end["response"])
        }
        _ => {
            let path = format!("{}/tests/fixtures/wire/{name}", env!("CARGO_MANIFEST_DIR"));
            std::fs::read(path).expect("fixture")
        }
    }
}

/// The reply, and what the engine would have sent to who asked for nothing.
pub fn reply(name: &str, kind: UpstreamKind) -> Reply {
    let body = bytes(name);
    let is_stream = name.ends_with(".sse");
    let is_known = name.starts_with("vllm_c") || name.starts_with("sglang_c") || name.starts_with("openai");
    let is_native = name.starts_with("sglang_generate") && kind == UpstreamKind::Sglang;
    let is_known = is_known || is_native;
    let plain = if !is_known || kind == UpstreamKind::Anthropic {
        body.clone()
    } else if is_stream {
        plain_stream(&String::from_utf8(body.clone()).expect("text"), kind).into_bytes()
    } else {
        let mut value: Value = serde_json::from_slice(&body).expect("JSON");
        make_plain(&mut value, kind, false);
        pretty(&value)
    };
    Reply { status: 200, is_stream, body, plain }
}

/// As the fixtures are spaced.
fn pretty(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b" ");
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter)).expect("JSON");
    out.push(b'\n');
    out
}

pub fn plain_stream(text: &str, kind: UpstreamKind) -> String {
    let mut out = String::new();
    for block in text.split_inclusive("\n\n") {
        let data = block.strip_prefix("data: ").map(str::trim_end);
        let Some(data) = data.filter(|data| *data != "[DONE]") else {
            out.push_str(block);
            continue;
        };
        let mut event: Value = serde_json::from_str(data).expect("JSON");
        let has_usage = event.get("usage").is_some_and(|usage| !usage.is_null());
        let is_for_ids = event["choices"].as_array().is_some_and(|choices| {
            let is_for_ids = |choice: &Value| {
                choice["delta"] == json!({})
                    && choice["finish_reason"].is_null()
                    && choice["token_ids"].is_array()
            };
            !choices.is_empty() && choices.iter().all(is_for_ids)
        });
        if has_usage || is_for_ids {
            continue;
        }
        make_plain(&mut event, kind, true);
        out.push_str(&format!("data: {event}\n\n"));
    }
    out
}

/// Takes out what only comes when it is asked for.
fn make_plain(value: &mut Value, kind: UpstreamKind, is_stream: bool) {
    if let Some(meta) = value.get_mut("meta_info") {
        let is_own = |name: &String| !name.contains("logprobs");
        return meta.as_object_mut().expect("object").retain(|name, _| is_own(name));
    }
    if is_stream {
        value.as_object_mut().expect("object").shift_remove("usage");
    }
    let mut objects: Vec<&mut Value> = Vec::new();
    let (mut top, mut choices) = (Value::Null, Vec::new());
    std::mem::swap(&mut top, value);
    if let Some(list) = top.get_mut("choices").and_then(Value::as_array_mut) {
        choices.append(list);
    }
    objects.extend(choices.iter_mut());
    objects.push(&mut top);
    for object in objects {
        let object = object.as_object_mut().expect("object");
        for name in ["logprobs", "token_ids", "response_token_ids", "prompt_token_ids", "weight_versions"] {
            let is_left_out =
                name != "logprobs" && kind == UpstreamKind::Sglang || name == "weight_versions" && is_stream;
            match object.get_mut(name) {
                Some(value) if !value.is_null() && is_left_out => drop(object.shift_remove(name)),
                Some(value) => *value = Value::Null,
                None => {}
            }
        }
    }
    if top.get("choices").is_some() {
        top["choices"] = choices.into();
    }
    *value = top;
}

/// What a reply says of one choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Said {
    pub text: String,
    pub ids: Option<Vec<u32>>,
    pub logprobs: Option<Vec<Option<f32>>>,
    /// The arguments of each tool call.
    pub calls: Vec<String>,
    pub finish: Option<String>,
}

/// What a reply says.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Told {
    pub choices: BTreeMap<u16, Said>,
    pub prompt_ids: Option<Vec<u32>>,
    pub usage: Option<(u64, u64)>,
    pub has_error: bool,
}

impl Told {
    /// How the call of a reply that ends like this is recorded, if `n` choices were asked for.
    pub fn status(&self, n: usize) -> CallStatus {
        let finished = self.choices.values().filter(|choice| choice.finish.is_some()).count();
        let is_aborted = self.choices.values().any(|choice| choice.finish.as_deref() == Some("abort"));
        match (self.has_error || is_aborted, finished >= n) {
            (true, _) => CallStatus::UpstreamError,
            (false, true) => CallStatus::Ok,
            (false, false) => CallStatus::Truncated,
        }
    }
}

/// What the first `length` bytes say: an event counts when its blank line is there, a body when it is whole.
pub fn told(body: &[u8], is_stream: bool, length: usize) -> Told {
    let mut told = Told::default();
    if !is_stream {
        if let Ok(value) = serde_json::from_slice::<Value>(&body[..length]) {
            tell(&mut told, &value);
        }
        return told;
    }
    for (event, end) in events(body) {
        if end <= length {
            tell(&mut told, &event);
        }
    }
    told
}

/// The events that are JSON, each with the offset of its end.
pub fn events(body: &[u8]) -> Vec<(Value, usize)> {
    let mut end = 0;
    let mut events = Vec::new();
    for block in body.split_inclusive(|byte| *byte == b'\n') {
        end += block.len();
        if let Some(data) = block.strip_prefix(b"data: ")
            && let Ok(event) = serde_json::from_slice(data)
        {
            // With its blank line.
            events.push((event, end + 1));
        }
    }
    events
}

fn tell(told: &mut Told, event: &Value) {
    told.has_error |= event["error"].is_object();
    let ids = |value: &Value| {
        let list = value.as_array()?;
        Some(list.iter().map(|id| id.as_u64().expect("an id") as u32).collect::<Vec<u32>>())
    };
    told.prompt_ids = told.prompt_ids.take().or_else(|| ids(&event["prompt_token_ids"]));
    let count = |name: &str| event["usage"][name].as_u64();
    if let (Some(prompt), Some(completion)) = (count("prompt_tokens"), count("completion_tokens")) {
        told.usage = Some((prompt, completion));
    }
    for choice in event["choices"].as_array().into_iter().flatten() {
        let said = told.choices.entry(choice["index"].as_u64().expect("an index") as u16).or_default();
        told.prompt_ids = told.prompt_ids.take().or_else(|| ids(&choice["prompt_token_ids"]));
        let message = choice.get("delta").or(choice.get("message")).unwrap_or(choice);
        for name in ["content", "text"] {
            said.text.push_str(message[name].as_str().unwrap_or_default());
        }
        for name in ["token_ids", "response_token_ids"] {
            if let Some(more) = ids(&choice[name]) {
                said.ids.get_or_insert_default().extend(more);
            }
        }
        let chat =
            choice["logprobs"]["content"].as_array().into_iter().flatten().map(|entry| &entry["logprob"]);
        let completions = choice["logprobs"]["token_logprobs"].as_array().into_iter().flatten();
        for value in chat.chain(completions) {
            said.logprobs.get_or_insert_default().push(value.as_f64().map(|value| value as f32));
        }
        for (position, call) in message["tool_calls"].as_array().into_iter().flatten().enumerate() {
            let index = call["index"].as_u64().map_or(position, |index| index as usize);
            said.calls.resize(said.calls.len().max(index + 1), String::new());
            said.calls[index].push_str(call["function"]["arguments"].as_str().unwrap_or_default());
        }
        said.finish = said.finish.take().or(choice["finish_reason"].as_str().map(str::to_owned));
    }
    if let (Some(more), Some(said)) = (ids(&event["sglext"]["output_ids"][0]), told.choices.get_mut(&0)) {
        said.ids = Some(more);
        told.prompt_ids = told.prompt_ids.take().or_else(|| ids(&event["sglext"]["input_ids"]));
    }
    tell_of_messages(told, event);
    tell_of_responses(told, event);
    tell_of_native(told, event);
}

/// The same of an event of `/generate`, which tells everything so far or what is new.
fn tell_of_native(told: &mut Told, event: &Value) {
    let meta = &event["meta_info"];
    let Some(total) = meta["completion_tokens"].as_u64() else { return };
    let said = told.choices.entry(0).or_default();
    let ids = event["output_ids"].as_array().expect("ids");
    if ids.len() as u64 == total {
        *said = Said::default();
    }
    said.text.push_str(event["text"].as_str().expect("text"));
    said.ids.get_or_insert_default().extend(ids.iter().map(|id| id.as_u64().expect("an id") as u32));
    for pair in meta["output_token_logprobs"].as_array().into_iter().flatten() {
        said.logprobs.get_or_insert_default().push(pair[0].as_f64().map(|value| value as f32));
    }
    said.finish = meta["finish_reason"]["type"].as_str().map(str::to_owned);
    told.usage = Some((meta["prompt_tokens"].as_u64().expect("a number"), total));
}

/// The same of an event of Messages.
fn tell_of_messages(told: &mut Told, event: &Value) {
    match event["type"].as_str() {
        Some("message_start") => drop(told.choices.insert(0, Said::default())),
        Some("content_block_start") if event["content_block"]["type"] == "tool_use" => {
            told.choices.get_mut(&0).expect("begun").calls.push(String::new());
        }
        Some("content_block_delta") => {
            let said = told.choices.get_mut(&0).expect("begun");
            said.text.push_str(event["delta"]["text"].as_str().unwrap_or_default());
            if let (Some(more), Some(call)) = (event["delta"]["partial_json"].as_str(), said.calls.last_mut())
            {
                call.push_str(more);
            }
        }
        Some("message_delta") => {
            let said = told.choices.get_mut(&0).expect("begun");
            said.finish = event["delta"]["stop_reason"].as_str().map(str::to_owned);
            let count = |name: &str| event["usage"][name].as_u64().unwrap_or(0);
            let prompt = ["input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"];
            told.usage = Some((prompt.iter().map(|name| count(name)).sum(), count("output_tokens")));
        }
        _ => {}
    }
}

/// The same of an event of Responses, or of a whole response.
fn tell_of_responses(told: &mut Told, event: &Value) {
    let arguments = |item: &Value| item["arguments"].as_str().or(item["input"].as_str()).map(str::to_owned);
    let is_call = |item: &Value| item["call_id"].is_string();
    match event["type"].as_str() {
        Some("response.created") => drop(told.choices.insert(0, Said::default())),
        Some("response.output_item.added") if is_call(&event["item"]) => {
            told.choices.get_mut(&0).expect("begun").calls.push(String::new());
        }
        Some("response.output_text.delta") => {
            let said = told.choices.get_mut(&0).expect("begun");
            said.text.push_str(event["delta"].as_str().expect("text"));
        }
        Some("response.function_call_arguments.delta" | "response.custom_tool_call_input.delta") => {
            let calls = &mut told.choices.get_mut(&0).expect("begun").calls;
            calls.last_mut().expect("a call").push_str(event["delta"].as_str().expect("text"));
        }
        Some("response.completed") => end_of_response(told, &event["response"]),
        None if event["object"] == "response" => {
            let items = event["output"].as_array().expect("items");
            let parts = items.iter().filter(|item| item["type"] == "message");
            let text = parts.map(|item| item["content"][0]["text"].as_str().expect("text")).collect();
            let calls = items.iter().filter_map(arguments).collect();
            told.choices.insert(0, Said { text, calls, ..Said::default() });
            end_of_response(told, event);
        }
        _ => {}
    }
}

fn end_of_response(told: &mut Told, response: &Value) {
    told.choices.get_mut(&0).expect("begun").finish = response["status"].as_str().map(str::to_owned);
    let count = |name: &str| response["usage"][name].as_u64().expect("a number");
    told.usage = Some((count("input_tokens"), count("output_tokens")));
}

fn completions_stream() -> String {
    let head = r#""id":"cmpl-5a5b","object":"text_completion","created":1796000000,"model":"toy-moe-8x""#;
    let chunk = |text: &str, id: u32, logprob: f64, more: &str, finish: &str| {
        let text = Value::from(text);
        format!(
            r#"data: {{{head},"choices":[{{"index":0,"text":{text},"logprobs":{{"text_offset":[0],"token_logprobs":[{logprob}],"tokens":[{text}],"top_logprobs":[{{}}]}},"finish_reason":{finish},"stop_reason":null,"token_ids":[{id}]{more}}}]}}"#
        ) + "\n\n"
    };
    [
        chunk(" b", 293, -0.5, r#","prompt_token_ids":[64,11]"#, "null"),
        chunk("", 144_848, -1.25, "", "null"),
        chunk("🎉", 144_849, -0.125, "", "null"),
        chunk("", 151_645, -2.0, r#","weight_versions":[{"version":"step-42","start":0,"end":4}]"#, r#""stop""#),
        format!(r#"data: {{{head},"choices":[],"usage":{{"prompt_tokens":2,"total_tokens":6,"completion_tokens":4}}}}"#)
            + "\n\n",
        "data: [DONE]\n\n".to_owned(),
    ]
    .concat()
}

fn completions_body() -> Value {
    json!({
        "id": "cmpl-5a5b", "object": "text_completion", "created": 1_796_000_000, "model": "toy-moe-8x",
        "choices": [{"index": 0, "text": " b🎉", "logprobs": {"text_offset": [0, 2, 2, 3],
            "token_logprobs": [-0.5, -1.25, -0.125, -2.0], "tokens": [" b", "", "🎉", ""], "top_logprobs": [{}, {}, {}, {}]},
            "finish_reason": "stop", "stop_reason": null, "token_ids": [293, 144_848, 144_849, 151_645],
            "prompt_token_ids": [64, 11], "prompt_logprobs": null, "weight_versions": null}],
        "usage": {"prompt_tokens": 2, "total_tokens": 6, "completion_tokens": 4}, "kv_transfer_params": null
    })
}

/// Two choices that take turns; the first ends well before the second.
fn two_choices() -> String {
    let chunk = |index: u32, delta: Value, ids: &[u32], finish: Value| {
        let entry = |id: &u32| json!({"token": "x", "logprob": -f64::from(*id) / 8.0, "bytes": [120], "top_logprobs": []});
        let logprobs = if ids.is_empty() {
            Value::Null
        } else {
            json!({"content": ids.iter().map(entry).collect::<Vec<_>>()})
        };
        let mut choice =
            json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish});
        if !ids.is_empty() {
            choice["token_ids"] = json!(ids);
        }
        let mut event = json!({"id": "chatcmpl-two", "object": "chat.completion.chunk", "created": 1, "model": "toy", "choices": [choice]});
        if ids.is_empty() {
            event["prompt_token_ids"] = json!([1, 2, 3]);
        }
        format!("data: {event}\n\n")
    };
    let usage = json!({"id": "chatcmpl-two", "object": "chat.completion.chunk", "created": 1, "model": "toy", "choices": [],
        "usage": {"prompt_tokens": 3, "total_tokens": 10, "completion_tokens": 7}});
    [
        chunk(0, json!({"role": "assistant", "content": ""}), &[], Value::Null),
        chunk(1, json!({"role": "assistant", "content": ""}), &[], Value::Null),
        chunk(0, json!({"content": "a"}), &[10], Value::Null),
        chunk(1, json!({"content": "b"}), &[20, 21], Value::Null),
        chunk(0, json!({"content": ""}), &[11], json!("stop")),
        chunk(1, json!({"content": "c"}), &[22], Value::Null),
        chunk(1, json!({"content": "d"}), &[23, 24], json!("length")),
        format!("data: {usage}\n\ndata: [DONE]\n\n"),
    ]
    .concat()
}
