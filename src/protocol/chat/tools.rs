//! Tool calls put together from their fragments, whatever the server does to `index` and `id`.

use serde::Deserialize;

/// A tool call. `arguments` are the bytes that were sampled.
#[derive(Debug, Clone, Default)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    pub arguments: String,
    /// How its fragments were numbered: no part of the call itself.
    index: Option<u64>,
}

impl ToolCall {
    /// A call that is not from a chat stream: it has no index there.
    pub fn new(id: impl Into<String>, name: impl Into<String>, arguments: impl Into<String>) -> Self {
        Self { id: id.into(), name: name.into(), arguments: arguments.into(), index: None }
    }
}

impl PartialEq for ToolCall {
    fn eq(&self, other: &Self) -> bool {
        (&self.id, &self.name, &self.arguments) == (&other.id, &other.name, &other.arguments)
    }
}

impl Eq for ToolCall {}

/// One element of `tool_calls`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(in crate::protocol) struct Fragment {
    index: Option<u64>,
    id: Option<String>,
    function: Option<Function>,
}

impl Fragment {
    /// More arguments of a call that an earlier one began.
    pub(super) fn of_arguments(index: Option<u64>, arguments: String) -> Self {
        Self { index, id: None, function: Some(Function { name: None, arguments: Some(arguments) }) }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Function {
    name: Option<String>,
    arguments: Option<String>,
}

/// Adds a fragment to the call it belongs to. Servers leave `index` out, send 0 for every call, repeat `id` on each
/// fragment or leave it blank on later ones; a fragment opens a new call when its id or name says so. Gives the place
/// of the call.
pub(in crate::protocol) fn add(calls: &mut Vec<ToolCall>, fragment: Fragment) -> usize {
    let id = fragment.id.filter(|id| !id.trim().is_empty());
    let function = fragment.function.unwrap_or_default();
    let name = function.name.filter(|name| !name.is_empty());
    let by_index = fragment.index.and_then(|index| calls.iter().rposition(|call| call.index == Some(index)));
    let at = match &id {
        Some(id) => calls.iter().rposition(|call| &call.id == id),
        None => match (by_index, &name) {
            // A second head on the same index: another call.
            (Some(at), Some(name)) => {
                let open = &calls[at];
                let is_repeat = open.name == *name && !is_complete(&open.arguments);
                (is_repeat || open.name.is_empty()).then_some(at)
            }
            (Some(at), None) => Some(at),
            (None, Some(_)) => None,
            // A tail whose index nobody opened belongs to the call that is open.
            (None, None) => calls.len().checked_sub(1),
        },
    };
    // A head without an id may have opened the call that this id names.
    let at = at.or_else(|| by_index.filter(|&at| id.is_some() && calls[at].id.is_empty()));
    let at = at.unwrap_or_else(|| {
        calls.push(ToolCall { index: fragment.index, ..ToolCall::default() });
        calls.len() - 1
    });
    let call = &mut calls[at];
    if let Some(id) = id {
        call.id = id;
    }
    if let Some(name) = name
        && call.name.is_empty()
    {
        call.name = name;
    }
    call.arguments.push_str(function.arguments.as_deref().unwrap_or_default());
    at
}

fn is_complete(arguments: &str) -> bool {
    !arguments.trim().is_empty() && serde_json::from_str::<serde::de::IgnoredAny>(arguments).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn assemble(fragments: serde_json::Value) -> Vec<(String, String)> {
        let mut calls = Vec::new();
        for fragment in fragments.as_array().expect("list") {
            add(&mut calls, serde_json::from_value(fragment.clone()).expect("fragment"));
        }
        calls.into_iter().map(|call| (call.name, call.arguments)).collect()
    }

    #[test]
    fn a16_fragments_find_their_call() {
        let expected =
            vec![("f".to_owned(), "{\"a\":1}".to_owned()), ("g".to_owned(), "{\"b\":2}".to_owned())];
        let f = |name: &str, arguments: &str| json!({"name": name, "arguments": arguments});
        let shapes = [
            json!([
                {"index": 0, "id": "x", "function": f("f", "")}, {"index": 0, "function": {"arguments": "{\"a\":"}},
                {"index": 1, "id": "y", "function": f("g", "")}, {"index": 0, "function": {"arguments": "1}"}},
                {"index": 1, "function": {"arguments": "{\"b\":2}"}}
            ]),
            json!([
                {"id": "x", "function": f("f", "{\"a\":")}, {"function": {"arguments": "1}"}},
                {"id": "y", "function": f("g", "{\"b\":")}, {"function": {"arguments": "2}"}}
            ]),
            json!([
                {"index": 0, "id": "x", "function": f("f", "{\"a\":1}")},
                {"index": 0, "id": "y", "function": f("g", "{\"b\":2}")}
            ]),
            json!([
                {"index": 0, "function": f("f", "{\"a\":1}")}, {"index": 0, "function": f("g", "{\"b\":2}")}
            ]),
            json!([
                {"index": 0, "id": "x", "function": f("f", "")},
                {"index": 0, "id": "", "function": {"name": "", "arguments": "{\"a\":1}"}},
                {"index": 1, "id": "y", "function": f("g", "")},
                {"index": 1, "id": " ", "function": {"name": null, "arguments": "{\"b\":2}"}}
            ]),
            json!([
                {"index": 0, "id": "x", "function": f("f", "{\"a\":1}")},
                {"index": 0, "id": "y", "function": f("g", "")}, {"index": 1, "function": {"arguments": "{\"b\":2}"}}
            ]),
            json!([
                {"index": 0, "id": "x", "function": f("f", "{\"a\":")},
                {"index": 0, "id": "x", "function": f("f", "1}")},
                {"index": 1, "id": "y", "function": f("g", "{\"b\":")},
                {"index": 1, "id": "y", "function": f("g", "2}")}
            ]),
            json!([
                {"index": 0, "function": f("f", "")}, {"index": 0, "id": "x", "function": {"arguments": "{\"a\":1}"}},
                {"index": 1, "function": f("g", "")}, {"index": 1, "id": "y", "function": {"arguments": "{\"b\":2}"}}
            ]),
        ];
        for shape in shapes {
            assert_eq!(assemble(shape.clone()), expected, "{shape}");
        }
    }
}
