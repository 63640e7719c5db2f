//! Conversations on which a template is tried.

use serde_json::{Value, json};

/// In every text of a probe that is not the template's own.
pub(super) const PROBE: &str = "probe";

/// The forms that a template must be able to continue one of, or it is of no use here.
pub(super) const FORMS_NEEDED: [&str; 2] = ["an answer, then a question", "a call, then results"];

/// A conversation, and how much of it a lineage stands for.
pub(super) struct Probe {
    /// What it tries, in words: its form, behind what history, with what else.
    pub(super) name: String,
    /// The turn, and what follows it.
    pub(super) form: String,
    pub(super) messages: Vec<Value>,
    pub(super) tools: Option<Vec<Value>>,
    /// `messages[answered - 1]` is the turn that was sampled.
    pub(super) answered: usize,
    /// What the sampled turn ends with, as the template writes it before it closes the turn.
    pub(super) last_words: &'static str,
}

const ANSWER: &str = "probe answer";
const VALUE: &str = "probe value";

/// The probes, those of one form together: every form of turn, followed by every form of new messages, alone and behind a longer history, each
/// with and without system text and tools.
pub(super) fn probes() -> Vec<Probe> {
    let answers = [("an answer", answer())];
    let called = [
        ("a call", calls(1, "")),
        ("a call with words", calls(1, "probe words")),
        ("two calls", calls(2, "")),
    ];
    let histories = [
        ("", vec![]),
        ("behind an answer, ", vec![question(0), answer()]),
        (
            "behind answers with reasoning, ",
            vec![question(0), reasoned(answer()), question(2), reasoned(answer())],
        ),
        (
            "behind a loop of calls, ",
            vec![question(0), calls(1, ""), result(1), reasoned(calls(1, "")), result(1), answer()],
        ),
    ];
    let loops = [
        ("", vec![]),
        ("in a loop of calls, ", vec![calls(1, ""), result(1), reasoned(calls(1, "")), result(1)]),
    ];
    let mut found = Vec::new();
    for (history_name, history) in &histories {
        for (loop_name, steps) in &loops {
            let before = [&history[..], &[question(1)], &steps[..]].concat();
            let mut add = |turn_name: &str, turn: &Value, last_words, news: &[(&str, Vec<Value>)]| {
                for (news_name, news) in news {
                    let form = format!("{turn_name}, then {news_name}");
                    for (reasoning, turn) in
                        [("", turn.clone()), ("with reasoning, ", reasoned(turn.clone()))]
                    {
                        let name = format!("{history_name}{loop_name}{reasoning}{form}");
                        let messages = [&before[..], &[turn], &news[..]].concat();
                        found.push((name, form.clone(), messages, before.len() + 1, last_words));
                    }
                }
            };
            for (name, turn) in &answers {
                add(name, turn, ANSWER, &after_answers());
            }
            for (name, turn) in &called {
                let count = turn["tool_calls"].as_array().map_or(0, Vec::len);
                add(name, turn, VALUE, &after_calls(count));
            }
        }
    }
    // Stable: within a form, the shortest history comes first.
    found.sort_by(|a, b| a.1.cmp(&b.1));
    let variants = [(false, false), (true, false), (false, true), (true, true)];
    let mut probes = Vec::with_capacity(found.len() * variants.len());
    for (name, form, messages, answered, last_words) in found {
        // Behind a longer history, both or none.
        let is_short = messages.len() <= 5;
        for (has_system, has_tools) in
            variants.into_iter().filter(|(system, tools)| is_short || system == tools)
        {
            let system = has_system.then(|| json!({"role": "system", "content": "probe system"}));
            let with = match (has_system, has_tools) {
                (false, false) => "",
                (true, false) => " (with system text)",
                (false, true) => " (with tools)",
                (true, true) => " (with system text and tools)",
            };
            probes.push(Probe {
                name: format!("{name}{with}"),
                form: form.clone(),
                answered: answered + usize::from(has_system),
                messages: system.into_iter().chain(messages.iter().cloned()).collect(),
                tools: has_tools.then(tools),
                last_words,
            });
        }
    }
    probes
}

fn after_answers() -> Vec<(&'static str, Vec<Value>)> {
    vec![
        ("a question", vec![question(3)]),
        ("two questions", vec![question(3), question(4)]),
        (
            "a system message and a question",
            vec![json!({"role": "system", "content": "probe reminder"}), question(3)],
        ),
        (
            "a question and a system message",
            vec![question(3), json!({"role": "system", "content": "probe reminder"})],
        ),
        ("nothing new", vec![]),
    ]
}

fn after_calls(count: usize) -> Vec<(&'static str, Vec<Value>)> {
    let results: Vec<Value> = (1..=count).map(result).collect();
    let and = |message: Value| [&results[..], &[message]].concat();
    vec![
        ("results", results.clone()),
        ("results and a question", and(question(3))),
        ("results and a system message", and(json!({"role": "system", "content": "probe reminder"}))),
        ("a question", vec![question(3)]),
    ]
}

fn question(number: usize) -> Value {
    json!({"role": "user", "content": format!("probe question {number}")})
}

fn answer() -> Value {
    json!({"role": "assistant", "content": ANSWER})
}

fn reasoned(mut turn: Value) -> Value {
    turn["reasoning_content"] = json!("probe reasoning");
    turn
}

fn calls(count: usize, content: &str) -> Value {
    let calls: Vec<Value> = (1..=count)
        .map(|number| {
            json!({"id": format!("probe{number:04}"), "type": "function",
                "function": {"name": "probe_tool", "arguments": "{\"probe_key\": \"probe value\"}"}})
        })
        .collect();
    json!({"role": "assistant", "content": content, "tool_calls": calls})
}

fn result(number: usize) -> Value {
    json!({"role": "tool", "name": "probe_tool", "tool_call_id": format!("probe{number:04}"),
        "content": format!("probe result {number}")})
}

fn tools() -> Vec<Value> {
    vec![json!({"type": "function", "function": {"name": "probe_tool", "description": "probe description",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe parameter"}},
            "required": ["probe_key"]}}})]
}
