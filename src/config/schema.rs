//! The tables' JSON schema, read back: which keys exist, their documentation, type and default.

use serde_json::{Map, Value};

use super::load::Tables;

/// JSON schema of all tables, as schemars derives it from the types.
pub(super) struct Schema(Value);

/// Stands for any name in the path of a key.
pub(super) const ANY_NAME: &str = "<name>";

/// One key that holds a value.
pub(super) struct Leaf {
    /// `training.async.enable`.
    pub path: String,
    /// What its value may be, for people.
    pub kind: String,
    /// The doc comment of its field, as one paragraph.
    pub description: String,
    /// Named values with their documentation.
    pub choices: Vec<(String, String)>,
}

/// One table of keys.
pub(super) struct Table {
    pub path: String,
    pub description: String,
    pub leaves: Vec<Leaf>,
}

impl Schema {
    pub fn new() -> Self {
        Self(schemars::schema_for!(Tables).to_value())
    }

    /// The schema with its reference followed and its `null` alternative taken off.
    fn resolve<'a>(&'a self, mut node: &'a Value) -> &'a Value {
        loop {
            if let Some(name) = node["$ref"].as_str().and_then(|path| path.strip_prefix("#/$defs/")) {
                node = &self.0["$defs"][name];
            } else if let Some(one) = node["anyOf"]
                .as_array()
                .filter(|options| options.iter().any(|option| option["type"] == "null"))
                .and_then(|options| options.iter().find(|option| option["type"] != "null"))
            {
                node = one;
            } else {
                return node;
            }
        }
    }

    fn properties<'a>(&'a self, node: &'a Value) -> Option<&'a Map<String, Value>> {
        self.resolve(node)["properties"].as_object()
    }

    /// The schema at this key path; `None` if there is no such key.
    fn node(&self, path: &str) -> Option<&Value> {
        let mut node = &self.0;
        for key in path.split('.').filter(|key| !key.is_empty()) {
            node = match self.properties(node) {
                Some(properties) => properties.get(key)?,
                // A table of names: all its values are alike.
                None => self.resolve(node).get("additionalProperties").filter(|value| value.is_object())?,
            };
        }
        Some(node)
    }

    /// True if the value at this path is a table of names, each with a table of keys.
    pub fn is_table_of_tables(&self, path: &str) -> bool {
        self.keys(path).is_none() && self.keys(&format!("{path}.{ANY_NAME}")).is_some()
    }

    /// Keys of the table at this path; `None` if it is no table.
    pub fn keys(&self, path: &str) -> Option<Vec<&str>> {
        Some(self.properties(self.node(path)?)?.keys().map(String::as_str).collect())
    }

    /// What the value at this path may be, for people.
    pub fn kind(&self, path: &str) -> String {
        self.node(path).map_or_else(String::new, |node| self.kind_of(node))
    }

    /// True if the value at this path is not text, so that `${VAR}` there is parsed.
    pub fn is_number_or_bool(&self, path: &str) -> bool {
        self.node(path).is_some_and(|node| {
            let kind = &self.resolve(node)["type"];
            ["integer", "number", "boolean"].iter().any(|name| {
                kind == name || kind.as_array().is_some_and(|kinds| kinds.contains(&Value::from(*name)))
            })
        })
    }

    /// Names that the value at this path is chosen from.
    pub fn choices(&self, path: &str) -> Vec<(String, String)> {
        self.node(path).map(|node| self.choices_of(node)).unwrap_or_default()
    }

    fn choices_of(&self, node: &Value) -> Vec<(String, String)> {
        let node = self.resolve(node);
        let documented = node["oneOf"].as_array().into_iter().flatten().filter_map(|option| {
            Some((option["const"].as_str()?.to_owned(), paragraph(&option["description"])))
        });
        let plain = node["enum"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|option| Some((option.as_str()?.to_owned(), String::new())));
        documented.chain(plain).collect()
    }

    fn kind_of(&self, node: &Value) -> String {
        let choices = self.choices_of(node);
        if !choices.is_empty() {
            let names: Vec<_> = choices.iter().map(|(name, _)| format!("`{name}`")).collect();
            return format!("one of {}", names.join(", "));
        }
        let node = self.resolve(node);
        if let Some(options) = node["anyOf"].as_array() {
            let kinds: Vec<_> = options.iter().map(|option| self.kind_of(option)).collect();
            return kinds.join(" or ");
        }
        let name = match &node["type"] {
            Value::Array(names) => names.iter().find(|name| *name != "null").and_then(Value::as_str),
            name => name.as_str(),
        };
        match name {
            Some("string") => "text".to_owned(),
            Some("boolean") => "`true` or `false`".to_owned(),
            Some("number") => "number".to_owned(),
            Some("integer") => match (node["minimum"].as_i64(), node["maximum"].as_i64()) {
                (Some(low), Some(high)) => format!("whole number, {low} to {high}"),
                (Some(low), None) => format!("whole number, at least {low}"),
                _ => "whole number".to_owned(),
            },
            Some("array") => match (node["minItems"].as_u64(), self.kind_of(&node["items"])) {
                (Some(count), kind) => format!("list of {count}: {kind}"),
                (None, kind) => format!("list: {kind}"),
            },
            Some("object") if node["properties"].is_object() => "table".to_owned(),
            Some("object") => format!("table of names to {}", self.kind_of(&node["additionalProperties"])),
            _ => "any value".to_owned(),
        }
    }

    /// Every table with its own keys, in the order of the types.
    pub fn tables(&self) -> Vec<Table> {
        let mut tables = Vec::new();
        for key in self.keys("").unwrap_or_default() {
            self.collect(key, &mut tables);
        }
        tables
    }

    fn collect(&self, path: &str, tables: &mut Vec<Table>) {
        let Some(node) = self.node(path) else { return };
        let mut table =
            Table { path: path.to_owned(), description: paragraph(&node["description"]), leaves: Vec::new() };
        if table.description.is_empty() {
            table.description = paragraph(&self.resolve(node)["description"]);
        }
        let mut inner = Vec::new();
        for key in self.keys(path).unwrap_or_default() {
            let path = format!("{path}.{key}");
            if self.keys(&path).is_some() {
                inner.push(path);
                continue;
            }
            let Some(node) = self.node(&path) else {
                continue;
            };
            if self.is_table_of_tables(&path) {
                inner.push(format!("{path}.{ANY_NAME}"));
            }
            table.leaves.push(Leaf {
                kind: self.kind_of(node),
                description: paragraph(&node["description"]),
                choices: self.choices_of(node),
                path,
            });
        }
        tables.push(table);
        for path in inner {
            self.collect(&path, tables);
        }
    }

    /// Every key path that holds a value.
    pub fn leaf_paths(&self) -> Vec<String> {
        self.tables().into_iter().flat_map(|table| table.leaves).map(|leaf| leaf.path).collect()
    }
}

fn paragraph(text: &Value) -> String {
    text.as_str().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}
