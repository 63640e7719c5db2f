//! What the declared tools say of their parameters: the forms that write values as plain text need it.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::Value;

/// How deep a schema's references are followed.
const MAX_DEPTH: usize = 16;

/// What a parameter's value may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A string.
    Text,
    /// A string or null.
    TextOrNull,
    /// Anything but a string.
    Json,
    /// The schema does not say, or there is none.
    Unknown,
}

/// The declared tools: names, and the types of their parameters. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ToolSchemas {
    tools: Arc<HashMap<String, HashMap<String, Kind>>>,
}

impl ToolSchemas {
    /// Of the `tools` of a request: chat completions (`function.parameters`), Responses (`parameters`), Messages
    /// (`input_schema`). What has another form declares nothing.
    #[must_use]
    pub fn new(tools: &[Value]) -> Self {
        let declared = tools.iter().filter_map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let schema = function.get("parameters").or_else(|| function.get("input_schema"));
            Some((function.get("name")?.as_str()?.to_owned(), schema.map(parameters).unwrap_or_default()))
        });
        Self { tools: Arc::new(declared.collect()) }
    }

    pub(super) fn kind(&self, tool: &str, parameter: &str) -> Kind {
        self.tools.get(tool).and_then(|tool| tool.get(parameter)).copied().unwrap_or(Kind::Unknown)
    }
}

fn parameters(schema: &Value) -> HashMap<String, Kind> {
    let properties = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
    properties
        .map(|(name, property)| {
            let mut types = Types::default();
            types.add(property, schema, 0);
            (name.clone(), types.kind())
        })
        .collect()
}

#[derive(Default)]
struct Types {
    text: bool,
    null: bool,
    other: bool,
}

impl Types {
    fn add(&mut self, schema: &Value, root: &Value, depth: usize) {
        if depth > MAX_DEPTH {
            return;
        }
        match &schema["type"] {
            Value::String(name) => self.add_type(name),
            Value::Array(names) => {
                names.iter().filter_map(Value::as_str).for_each(|name| self.add_type(name))
            }
            _ => {
                let values = schema["enum"].as_array().into_iter().flatten().chain(schema.get("const"));
                values.for_each(|value| match value {
                    Value::String(_) => self.text = true,
                    Value::Null => self.null = true,
                    _ => self.other = true,
                });
            }
        }
        for key in ["anyOf", "oneOf", "allOf"] {
            for option in schema[key].as_array().into_iter().flatten() {
                self.add(option, root, depth + 1);
            }
        }
        let reference = schema["$ref"].as_str().and_then(|reference| reference.strip_prefix('#'));
        if let Some(target) = reference.and_then(|pointer| root.pointer(pointer)) {
            self.add(target, root, depth + 1);
        }
    }

    fn add_type(&mut self, name: &str) {
        match name {
            "string" => self.text = true,
            "null" => self.null = true,
            "number" | "integer" | "boolean" | "object" | "array" => self.other = true,
            _ => {}
        }
    }

    fn kind(&self) -> Kind {
        match (self.text, self.null, self.other) {
            (true, true, _) => Kind::TextOrNull,
            (true, false, _) => Kind::Text,
            (false, false, false) => Kind::Unknown,
            (false, ..) => Kind::Json,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn kinds_follow_the_schema() {
        let parameters = json!({
            "type": "object",
            "$defs": {"Mode": {"enum": ["a", "b"]}, "Loop": {"$ref": "#/$defs/Loop"}},
            "properties": {
                "path": {"type": "string"}, "count": {"type": "integer"}, "note": {"type": ["string", "null"]},
                "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "mode": {"$ref": "#/$defs/Mode"},
                "loop": {"$ref": "#/$defs/Loop"}, "any": {}, "flag": {"const": true}, "odd": true,
            },
        });
        let tools = [
            json!({"type": "function", "function": {"name": "chat", "parameters": parameters}}),
            json!({"type": "function", "name": "responses", "parameters": parameters}),
            json!({"name": "messages", "input_schema": parameters}),
            json!({"type": "web_search"}),
            json!("not a tool"),
        ];
        let schemas = ToolSchemas::new(&tools);
        for tool in ["chat", "responses", "messages"] {
            for (parameter, kind) in [
                ("path", Kind::Text),
                ("count", Kind::Json),
                ("note", Kind::TextOrNull),
                ("either", Kind::Text),
                ("limit", Kind::Json),
                ("mode", Kind::Text),
                ("loop", Kind::Unknown),
                ("any", Kind::Unknown),
                ("flag", Kind::Json),
                ("odd", Kind::Unknown),
                ("absent", Kind::Unknown),
            ] {
                assert_eq!(schemas.kind(tool, parameter), kind, "{tool} {parameter}");
            }
        }
        assert_eq!(schemas.kind("other", "path"), Kind::Unknown);
    }
}
