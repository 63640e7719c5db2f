//! A conversation as turns of `human` and `gpt`.
//!
//! The form has two sides and text. Results of tools are the human's, each in `<tool_response>`; calls of tools are the
//! model's, each in `<tool_call>`, with the arguments as they were.

use serde_json::{Value, json};

use super::messages::text;

/// The turns, a system prompt first where there is one.
///
/// # Errors
/// Why the form has no place for the conversation.
pub(super) fn turns(messages: &[Value]) -> Result<Vec<Value>, &'static str> {
    let mut turns: Vec<(&'static str, String)> = vec![];
    let mut add = |side: &'static str, value: String| match turns.last_mut() {
        Some((last, text)) if *last == side => {
            text.push('\n');
            text.push_str(&value);
        }
        _ => turns.push((side, value)),
    };
    let mut rest = messages.iter().peekable();
    // What the model called since another side spoke.
    let mut called: Vec<&Value> = vec![];
    let (mut was_model, mut is_front) = (false, true);
    while let Some(message) = rest.next() {
        let content = &message["content"];
        match message["role"].as_str() {
            // The form has one, in front; what a harness puts between turns is told to the model all the same.
            Some("system" | "developer") if is_front => add("system", text(content)?),
            Some("system" | "developer" | "user") => add("human", text(content)?),
            Some("assistant") => {
                if !was_model {
                    called.clear();
                }
                called.extend(message["tool_calls"].as_array().into_iter().flatten());
                add("gpt", said(message)?);
            }
            Some("tool") => {
                // Those that follow each other, in the order of their calls.
                let mut results = vec![result(message, &called)?];
                while let Some(next) = rest.next_if(|next| next["role"] == "tool") {
                    results.push(result(next, &called)?);
                }
                results.sort_by_key(|(place, _)| *place);
                if results.windows(2).any(|pair| pair[0].0 == pair[1].0) {
                    return Err("two results of one tool call");
                }
                results.into_iter().for_each(|(_, text)| add("human", text));
            }
            _ => return Err("a message of another role"),
        }
        was_model = message["role"] == "assistant";
        is_front &= matches!(message["role"].as_str(), Some("system" | "developer"));
    }
    let sides: Vec<&str> = turns.iter().map(|(side, _)| *side).collect();
    let sides = sides.strip_prefix(&["system"]).unwrap_or(&sides);
    let alternates = sides.chunks(2).all(|pair| pair == ["human", "gpt"]);
    if !alternates || sides.is_empty() {
        return Err("turns that do not alternate");
    }
    Ok(turns.into_iter().map(|(side, value)| json!({"from": side, "value": value})).collect())
}

fn said(message: &Value) -> Result<String, &'static str> {
    let mut said = vec![];
    if let Some(reasoning) = message["reasoning_content"].as_str().filter(|text| !text.is_empty()) {
        said.push(format!("<think>\n{reasoning}\n</think>\n"));
    }
    let own = text(&message["content"])?;
    if !own.is_empty() {
        said.push(own);
    }
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let function = &call["function"];
        let arguments = match function["arguments"].as_str() {
            // As they are, where they are JSON.
            Some(text) if serde_json::from_str::<&serde_json::value::RawValue>(text).is_ok() => {
                text.to_owned()
            }
            _ => function["arguments"].to_string(),
        };
        said.push(format!(
            "<tool_call>\n{{\"name\": {}, \"arguments\": {arguments}}}\n</tool_call>",
            function["name"]
        ));
    }
    Ok(said.join("\n"))
}

/// The result of a tool, and which call of the turn before it is of.
fn result(message: &Value, called: &[&Value]) -> Result<(usize, String), &'static str> {
    let place = place(message, called).ok_or("a tool result whose call is not known")?;
    Ok((place, format!("<tool_response>\n{}\n</tool_response>", text(&message["content"])?)))
}

/// The one call that a result names.
pub(super) fn place(message: &Value, called: &[&Value]) -> Option<usize> {
    let id = message["tool_call_id"].as_str()?;
    let mut found = called.iter().enumerate().filter(|(_, call)| call["id"] == id);
    let (place, _) = found.next()?;
    found.next().is_none().then_some(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str, name: &str, arguments: &str) -> Value {
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
    }

    fn told(messages: Value) -> Result<Vec<String>, &'static str> {
        let turns = turns(messages.as_array().expect("messages"))?;
        Ok(turns
            .iter()
            .map(|turn| {
                format!("{}: {}", turn["from"].as_str().unwrap_or(""), turn["value"].as_str().unwrap_or(""))
            })
            .collect())
    }

    #[test]
    fn sides_are_merged_and_results_stand_in_the_order_of_their_calls() {
        let turns = told(json!([
            {"role": "system", "content": "be brief"}, {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
            {"role": "assistant", "content": "so", "tool_calls": [call("1", "ls", "{\"p\":1.0}"), call("2", "ls", "no")]},
            {"role": "tool", "tool_call_id": "2", "content": "two"}, {"role": "tool", "tool_call_id": "1", "content": "one"},
            {"role": "system", "content": "d"}, {"role": "assistant", "content": "e"}, {"role": "assistant", "content": "f"},
        ]));
        let expected = [
            "system: be brief",
            "human: a\nb\nc",
            "gpt: so\n<tool_call>\n{\"name\": \"ls\", \"arguments\": {\"p\":1.0}}\n</tool_call>\n<tool_call>\n{\"name\": \
             \"ls\", \"arguments\": \"no\"}\n</tool_call>",
            "human: <tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\nd",
            "gpt: e\nf",
        ];
        assert_eq!(turns.expect("turns"), expected);
    }

    #[test]
    fn what_does_not_alternate_or_cannot_be_matched_is_left_out() {
        let user = json!({"role": "user", "content": "a"});
        let assistant = |calls: Value| json!({"role": "assistant", "content": "b", "tool_calls": calls});
        let tool = |id: &str| json!({"role": "tool", "name": "ls", "tool_call_id": id, "content": "r"});
        for (messages, why) in [
            (json!([assistant(json!([])), user]), "turns that do not alternate"),
            (json!([user]), "turns that do not alternate"),
            (
                json!([user, {"role": "assistant", "content": [{"type": "image_url"}]}]),
                "content that is not text",
            ),
            // A name alone matches nothing.
            (
                json!([user, assistant(json!([call("1", "ls", "{}")])), tool("2"), assistant(json!([]))]),
                "a tool result whose call is not known",
            ),
            (
                json!([
                    user,
                    assistant(json!([call("1", "ls", "{}"), call("1", "ls", "{}")])),
                    tool("1"),
                    assistant(json!([]))
                ]),
                "a tool result whose call is not known",
            ),
            (
                json!([
                    user,
                    assistant(json!([call("1", "ls", "{}")])),
                    tool("1"),
                    tool("1"),
                    assistant(json!([]))
                ]),
                "two results of one tool call",
            ),
        ] {
            assert_eq!(told(messages.clone()), Err(why), "{messages}");
        }
    }
}
