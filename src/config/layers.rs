//! Values as they were set, before they become types: unknown keys, `${VAR}`, overrides, origins.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::load::Tables;
use super::read::{nearest, substitute, suggest};
use super::schema::Schema;
use super::{ConfigError, Environment, FileKind, Origin};

/// `[policy]` keys and the keys of `[proxy]` that they override.
const POLICY_OVERRIDES: [(&str, &str); 4] = [
    ("policy.upstream", "proxy.upstream_kind"),
    ("policy.base_url", "proxy.upstream_base_url"),
    ("policy.api_key_env", "proxy.upstream_api_key_env"),
    ("policy.model_path", "proxy.model_path"),
];

/// Values as they were set, by key path; a key that is not in here has its default.
#[derive(Debug, Clone, Default)]
pub(super) struct Layers {
    /// With `${VAR}` replaced.
    pub effective: Map<String, Value>,
    /// As written: what may be shown and stored.
    pub shown: BTreeMap<String, Value>,
    pub origins: BTreeMap<String, Origin>,
    /// The values are those that a run was started with: nothing overrides them.
    pub is_resolved: bool,
    /// File names for messages.
    pub files: BTreeMap<FileKind, String>,
}

impl Layers {
    pub fn file(&self, key: &str) -> String {
        match self.origins.get(key) {
            Some(Origin::Flag(flag)) => return flag.clone(),
            Some(Origin::Env(variable)) => return format!("environment {variable}"),
            Some(Origin::Policy { file, .. }) => return file.clone(),
            Some(Origin::File(_) | Origin::Default | Origin::Inherited(_)) | None => {}
        }
        let Some(kind) = FileKind::of_key(key) else {
            return "config".to_owned();
        };
        let Some(file) = self.files.get(&kind) else {
            return format!("{} (no such file, so the default holds)", kind.file_name());
        };
        if self.is_set(key) {
            file.clone()
        } else {
            format!("{file} (does not set it, so the default holds)")
        }
    }

    /// True if a file, a flag or the environment says something about a key, or about one in its table.
    fn is_set(&self, key: &str) -> bool {
        let of_table = |other: &String| other.strip_prefix(key).is_some_and(|rest| rest.starts_with('.'));
        self.origins.contains_key(key) || self.origins.keys().any(of_table)
    }

    pub fn set(&mut self, key: &str, value: Value, shown: Value, origin: Origin) {
        insert(&mut self.effective, key, value);
        self.shown.insert(key.to_owned(), shown);
        self.origins.insert(key.to_owned(), origin);
    }

    fn get(&self, key: &str) -> Option<&Value> {
        let (first, rest) = key.split_once('.')?;
        at(self.effective.get(first)?, rest)
    }

    /// `[policy]` overrides the upstream of `[proxy]`.
    pub fn apply_policy(&mut self) {
        for (from, to) in POLICY_OVERRIDES {
            let Some(value) = self.get(from).filter(|value| !value.is_null()).cloned() else {
                continue;
            };
            let shown = self.shown.get(from).cloned().unwrap_or_default();
            let origin = Origin::Policy { file: self.file(from), key: from.to_owned() };
            if from == "policy.upstream" && value == "embedded" && self.get("policy.base_url").is_none() {
                self.set("proxy.upstream_base_url", value.clone(), value.clone(), origin.clone());
            }
            self.set(to, value, shown, origin);
        }
    }

    pub fn add_file(
        &mut self,
        schema: &Schema,
        tables: &[&str],
        path: &Path,
        tree: Map<String, Value>,
        environment: &Environment,
        errors: &mut Vec<ConfigError>,
    ) {
        let file = path.display().to_string();
        for (key, value) in tree {
            // JSON has no comments: editors put the schema's address here.
            if key == "$schema" {
                continue;
            }
            if !tables.contains(&key.as_str()) {
                let remedy = match FileKind::of_key(&key) {
                    Some(kind) => format!("The table {key} belongs in {}.", kind.file_name()),
                    None => suggest(schema, tables, &key, tables.iter().copied()),
                };
                errors.push(ConfigError::UnknownKey { file: file.clone(), key, remedy });
                continue;
            }
            self.add(schema, &file, &key, value, environment, errors);
        }
    }

    fn add(
        &mut self,
        schema: &Schema,
        file: &str,
        path: &str,
        value: Value,
        environment: &Environment,
        errors: &mut Vec<ConfigError>,
    ) {
        let value = match value {
            Value::Object(table) if schema.is_table_of_tables(path) => {
                for (name, value) in table {
                    if !is_name(&name) {
                        errors.push(ConfigError::Value {
                            file: file.to_owned(),
                            key: path.to_owned(),
                            value: Value::from(name).to_string(),
                            problem: "not a name that can stand here".to_owned(),
                            remedy: "Use letters, digits, - and _ only.".to_owned(),
                        });
                        continue;
                    }
                    let inner = format!("{path}.{name}");
                    self.origins.insert(path.to_owned(), Origin::File(file.to_owned()));
                    self.add(schema, file, &inner, value, environment, errors);
                }
                return;
            }
            value => value,
        };
        let (keys, table) = match (schema.keys(path), value) {
            (Some(keys), Value::Object(table)) => (keys, table),
            (_, value) => {
                match substitute(schema, path, &value, environment) {
                    Ok(effective) => self.set(path, effective, value, Origin::File(file.to_owned())),
                    Err(variable) => errors.push(ConfigError::MissingVariable {
                        file: file.to_owned(),
                        key: path.to_owned(),
                        variable,
                    }),
                }
                return;
            }
        };
        // It is there even if it sets nothing: `"pinned_sampling": {}` pins by the defaults.
        if path.split('.').try_fold(&self.effective, |table, key| table.get(key)?.as_object()).is_none() {
            insert(&mut self.effective, path, Value::Object(Map::new()));
        }
        for (key, value) in table {
            let inner = format!("{path}.{key}");
            if keys.contains(&key.as_str()) {
                self.add(schema, file, &inner, value, environment, errors);
            } else {
                let remedy = suggest(
                    schema,
                    FileKind::of_key(path).map_or(&[], FileKind::tables),
                    &key,
                    keys.iter().copied(),
                );
                errors.push(ConfigError::UnknownKey { file: file.to_owned(), key: inner, remedy });
            }
        }
    }

    pub fn deserialize(&self, schema: &Schema) -> Result<Tables, ConfigError> {
        let tree = Value::Object(self.effective.clone());
        serde_path_to_error::deserialize(tree).map_err(|error| {
            let path: String = error.path().iter().fold(String::new(), |path, segment| match segment {
                serde_path_to_error::Segment::Seq { index } => format!("{path}[{index}]"),
                segment if path.is_empty() => segment.to_string(),
                segment => format!("{path}.{segment}"),
            });
            let key = path.split('[').next().unwrap_or_default().to_owned();
            // serde's own message may quote a value that came from the environment.
            let kind = schema.kind(&key);
            let shown = self.shown.get(&key).cloned().unwrap_or_default();
            let choices = schema.choices(&key);
            let nearest =
                shown.as_str().and_then(|text| nearest(text, choices.iter().map(|(name, _)| name.as_str())));
            let remedy = match nearest {
                Some(name) => format!("Did you mean {name:?}?"),
                None => format!("Set {key} to {kind}."),
            };
            ConfigError::Value {
                file: self.file(&key),
                key: path,
                value: shown.to_string(),
                problem: format!("expected {kind}"),
                remedy,
            }
        })
    }
}

/// True for names that a table of names may have: they are parts of key paths and labels of metrics.
fn is_name(name: &str) -> bool {
    let is_fine = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    !name.is_empty() && name.len() <= 64 && name.bytes().all(is_fine)
}

pub(super) fn one_or_several(mut errors: Vec<ConfigError>) -> ConfigError {
    match errors.len() {
        1 => errors.remove(0),
        _ => ConfigError::Several(errors),
    }
}

pub(super) fn at<'a>(tree: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(tree, |node, key| node.get(key))
}

pub(super) fn insert(tree: &mut Map<String, Value>, path: &str, value: Value) {
    match path.split_once('.') {
        None => {
            tree.insert(path.to_owned(), value);
        }
        Some((first, rest)) => {
            let inner = tree.entry(first).or_insert_with(|| Value::Object(Map::new()));
            if !inner.is_object() {
                *inner = Value::Object(Map::new());
            }
            if let Value::Object(inner) = inner {
                insert(inner, rest, value);
            }
        }
    }
}
