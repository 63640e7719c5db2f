//! The renderings of `tests/fixtures/trees/README.md`: a history as the text of a prompt.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

const END: &str = "<|im_end|>";

/// A message.
#[derive(Debug, Clone, Default)]
pub struct Turn {
    pub role: String,
    pub text: String,
    pub reasoning: String,
    /// Id, name and arguments.
    pub calls: Vec<(String, String, Value)>,
}

/// What arrived of a reply.
pub struct Reply {
    pub turn: Turn,
    /// The end of turn was sampled.
    pub has_ended: bool,
}

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Without `cache_control`, which no template sees.
fn plain(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let kept = members.iter().filter(|(name, _)| *name != "cache_control");
            Value::Object(kept.map(|(name, value)| (name.clone(), plain(value))).collect::<Map<_, _>>())
        }
        Value::Array(items) => items.iter().map(plain).collect(),
        other => other.clone(),
    }
}

fn text_of(content: &Value) -> String {
    match content {
        Value::Array(parts) => {
            let text =
                |part: &Value| part["text"].as_str().map_or_else(|| plain(part).to_string(), str::to_owned);
            parts.iter().map(text).collect::<Vec<_>>().join("\n")
        }
        other => string(other),
    }
}

/// A string is printed as given, an object as the `tojson` of transformers prints it.
pub fn printed(arguments: &Value) -> String {
    arguments.as_str().map_or_else(|| tojson(arguments), str::to_owned)
}

fn tojson(value: &Value) -> String {
    match value {
        Value::Object(members) => {
            let member = |(name, value): (&String, &Value)| {
                format!("{}: {}", Value::from(name.as_str()), tojson(value))
            };
            format!("{{{}}}", members.iter().map(member).collect::<Vec<_>>().join(", "))
        }
        Value::Array(items) => format!("[{}]", items.iter().map(tojson).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

fn turn(role: &str, text: String) -> Turn {
    Turn { role: role.to_owned(), text, ..Turn::default() }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> + Clone {
    value.as_array().into_iter().flatten()
}

fn chat_turn(message: &Value) -> Turn {
    let call = |call: &Value| {
        (string(&call["id"]), string(&call["function"]["name"]), call["function"]["arguments"].clone())
    };
    let reasoning = ["reasoning_content", "reasoning"].iter().map(|name| string(&message[name]));
    Turn {
        reasoning: reasoning.into_iter().find(|text| !text.is_empty()).unwrap_or_default(),
        calls: list(&message["tool_calls"]).map(call).collect(),
        ..turn(message["role"].as_str().expect("a role"), text_of(&message["content"]))
    }
}

/// An assistant message of the Messages API.
fn blocks_turn<'a>(blocks: impl Iterator<Item = &'a Value> + Clone) -> Turn {
    let of = |kind: &'static str| blocks.clone().filter(move |block| block["type"] == kind);
    let call = |block: &Value| (string(&block["id"]), string(&block["name"]), block["input"].clone());
    Turn {
        reasoning: of("thinking").map(|block| string(&block["thinking"])).collect(),
        calls: of("tool_use").map(call).collect(),
        ..turn("assistant", of("text").map(|block| string(&block["text"])).collect())
    }
}

fn messages_turns(message: &Value) -> Vec<Turn> {
    let role = message["role"].as_str().expect("a role");
    if let Some(text) = message["content"].as_str() {
        return vec![turn(role, text.to_owned())];
    }
    if role == "assistant" {
        return vec![blocks_turn(list(&message["content"]))];
    }
    let is_result = |block: &&Value| block["type"] == "tool_result";
    let results = list(&message["content"]).filter(is_result);
    let mut turns: Vec<Turn> = results.map(|block| turn("tool", text_of(&block["content"]))).collect();
    let rest: Vec<Value> = list(&message["content"]).filter(|block| !is_result(block)).cloned().collect();
    if !rest.is_empty() {
        turns.push(turn(role, text_of(&Value::from(rest))));
    }
    turns
}

/// Items of the Responses API; reasoning, message and calls in this order are one turn of the assistant.
fn items_turns(items: &[Value]) -> Vec<Turn> {
    let (mut turns, mut last): (Vec<Turn>, usize) = (vec![], 9);
    for item in items {
        let kind = item["type"].as_str().unwrap_or("message");
        if kind == "function_call_output" {
            turns.push(turn("tool", text_of(&item["output"])));
        } else if kind == "message" && item["role"] != "assistant" {
            turns.push(turn(item["role"].as_str().expect("a role"), text_of(&item["content"])));
        } else {
            let order =
                ["reasoning", "message", "function_call"].iter().position(|one| *one == kind).expect("known");
            let is_fresh = turns.last().is_none_or(|turn| turn.role != "assistant");
            if is_fresh || order < last || (kind != "function_call" && order == last) {
                turns.push(turn("assistant", String::new()));
            }
            last = order;
            let now = turns.last_mut().expect("one");
            match kind {
                "reasoning" => {
                    now.reasoning = list(&item["summary"]).map(|part| string(&part["text"])).collect()
                }
                "message" => now.text = text_of(&item["content"]),
                _ => now.calls.push((
                    string(&item["call_id"]),
                    string(&item["name"]),
                    item["arguments"].clone(),
                )),
            }
        }
    }
    turns
}

fn conversation(request: &Value, wire: &str) -> Vec<Turn> {
    match wire {
        "responses" => items_turns(request["input"].as_array().expect("items")),
        "messages" => list(&request["messages"]).flat_map(messages_turns).collect(),
        _ => list(&request["messages"]).map(chat_turn).collect(),
    }
}

fn events(text: &str) -> Vec<Value> {
    let text = text.replace("\r\n", "\n");
    let data = text.split("\n\n").map(|block| {
        let lines = block.lines().filter_map(|line| line.strip_prefix("data:"));
        lines.map(str::trim).collect::<Vec<_>>().join("\n")
    });
    let data = data.filter(|text| !text.is_empty() && text != "[DONE]");
    data.map(|text| serde_json::from_str(&text).expect("JSON")).collect()
}

fn chat_stream(events: &[Value]) -> Turn {
    let mut said = turn("assistant", String::new());
    let mut calls: BTreeMap<u64, (String, String, String)> = BTreeMap::new();
    for delta in events.iter().filter_map(|event| event["choices"].get(0)).map(|choice| &choice["delta"]) {
        let reasoning = ["reasoning_content", "reasoning"].iter().map(|name| string(&delta[name]));
        said.reasoning += &reasoning.into_iter().find(|text| !text.is_empty()).unwrap_or_default();
        said.text += &string(&delta["content"]);
        for call in list(&delta["tool_calls"]) {
            let one = calls.entry(call["index"].as_u64().expect("an index")).or_default();
            if let Some(id) = call["id"].as_str() {
                one.0 = id.to_owned();
            }
            if let Some(name) = call["function"]["name"].as_str() {
                one.1 = name.to_owned();
            }
            one.2 += &string(&call["function"]["arguments"]);
        }
    }
    said.calls =
        calls.into_values().map(|(id, name, arguments)| (id, name, Value::from(arguments))).collect();
    said
}

fn messages_stream(events: &[Value]) -> Turn {
    let mut blocks: BTreeMap<u64, Value> = BTreeMap::new();
    for event in events {
        let index = event["index"].as_u64().unwrap_or(0);
        match event["type"].as_str().expect("a type") {
            "content_block_start" => {
                let mut block = event["content_block"].clone();
                block["input"] = Value::from("");
                blocks.insert(index, block);
            }
            "content_block_delta" => {
                let (name, text) = match event["delta"]["type"].as_str().expect("a type") {
                    "thinking_delta" => ("thinking", &event["delta"]["thinking"]),
                    "text_delta" => ("text", &event["delta"]["text"]),
                    "input_json_delta" => ("input", &event["delta"]["partial_json"]),
                    _ => continue,
                };
                let block = &mut blocks.get_mut(&index).expect("begun")[name];
                *block = Value::from(string(block) + &string(text));
            }
            _ => {}
        }
    }
    blocks_turn(blocks.values())
}

/// `None`: nothing of it arrived.
pub fn reply(call: &Value, fixtures: &Path) -> Option<Reply> {
    if let Some(arrived) = call.get("arrived") {
        let begun = |one: &Value| (string(&one["id"]), string(&one["name"]), one["arguments"].clone());
        let turn = Turn {
            reasoning: string(&arrived["reasoning"]),
            calls: list(&arrived["calls"]).map(begun).collect(),
            ..turn("assistant", string(&arrived["text"]))
        };
        return Some(Reply { turn, has_ended: arrived["ended"] == true });
    }
    let path = fixtures.join(call["reply"].as_str()?);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let turn = if path.extension().is_some_and(|extension| extension == "json") {
        let reply: Value = serde_json::from_str(&text).expect("JSON");
        match reply["choices"].get(0) {
            Some(choice) => chat_turn(&choice["message"]),
            None => blocks_turn(list(&reply["content"])),
        }
    } else {
        let events = events(&text);
        let kind = events[0]["type"].as_str().unwrap_or_default();
        if events[0].get("choices").is_some() {
            chat_stream(&events)
        } else if kind.starts_with("response.") {
            let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
            items_turns(&done.map(|event| event["item"].clone()).collect::<Vec<_>>()).remove(0)
        } else {
            messages_stream(&events)
        }
    };
    Some(Reply { turn, has_ended: true })
}

/// A message of the assistant, behind its header.
pub fn assistant(turn: &Turn, keeps_reasoning: bool, has_ended: bool) -> String {
    let mut text = String::new();
    if keeps_reasoning && !turn.reasoning.is_empty() {
        text += &format!("<think>{}</think>", turn.reasoning);
    }
    text += &turn.text;
    for (number, (_, name, arguments)) in turn.calls.iter().enumerate() {
        text += &format!("<tool_call>{name} {}", printed(arguments));
        if has_ended || number + 1 < turn.calls.len() {
            text += "</tool_call>";
        }
    }
    text + if has_ended { END } else { "" }
}

/// All that the model reads.
pub fn prompt(request: &Value, wire: &str, rendering: &str) -> String {
    let turns = conversation(request, wire);
    let query = turns.iter().rposition(|turn| turn.role == "user");
    let mut text = String::new();
    if list(&request["tools"]).next().is_some() {
        text += &format!("{}\n", plain(&request["tools"]));
    }
    let system = text_of(&request["system"]);
    if !system.is_empty() {
        text += &format!("<|im_start|>system\n{system}{END}\n");
    }
    for (number, turn) in turns.iter().enumerate() {
        let keeps = match rendering {
            "as_is" => true,
            "qwen3" => query.is_none_or(|query| number > query),
            _ => false,
        };
        let said = if turn.role == "assistant" {
            assistant(turn, keeps, true)
        } else {
            format!("{}{END}", turn.text)
        };
        text += &format!("<|im_start|>{}\n{said}\n", turn.role);
    }
    text + "<|im_start|>assistant\n"
}
