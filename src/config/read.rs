//! Text to plain values: JSON and TOML syntax, `${VAR}`, and the nearest name to a misspelt one.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::schema::Schema;
use super::{ConfigError, Environment, FileKind};

/// Reads a file: JSON if its name ends so, else TOML.
pub(super) fn read(path: &Path) -> Result<Map<String, Value>, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|cause| ConfigError::Read { file: path.to_owned(), cause: cause.to_string() })?;
    let syntax = |cause: String| ConfigError::Syntax { file: path.to_owned(), cause };
    if path.extension().is_some_and(|extension| extension == "json") {
        match serde_json::from_str(&text).map(|Once(value)| value) {
            Ok(Value::Object(tree)) => Ok(tree),
            Ok(_) => Err(syntax("the file holds no JSON object".to_owned())),
            Err(error) => Err(syntax(error.to_string())),
        }
    } else {
        let tree: toml::Table = toml::from_str(&text).map_err(|error| {
            let before = error.span().map_or("", |span| text.get(..span.start).unwrap_or_default());
            let line = before.matches('\n').count() + 1;
            let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
            let key = error.span().and_then(|span| key_of(&text, span));
            let key = key.map_or_else(String::new, |key| format!("{key}: "));
            syntax(format!("{key}{} at line {line} column {column}", error.message()))
        })?;
        Ok(tree.into_iter().map(|(key, value)| (key, from_toml(value))).collect())
    }
}

/// The key whose value is this part of a TOML text, with which nothing else is wrong.
fn key_of(text: &str, span: Range<usize>) -> Option<String> {
    // In its place there is a text that no config has.
    const MARK: &str = "\u{1}here";
    let (before, after) = (text.get(..span.start)?, text.get(span.end..)?);
    let marked: toml::Table = toml::from_str(&format!("{before}\"\\u0001here\"{after}")).ok()?;
    let path = path_of(&toml::Value::Table(marked), MARK)?;
    Some(path.join("."))
}

/// The keys that lead to this text.
fn path_of(value: &toml::Value, text: &str) -> Option<Vec<String>> {
    match value {
        toml::Value::String(own) => (own == text).then(Vec::new),
        toml::Value::Array(values) => values.iter().find_map(|value| path_of(value, text)),
        toml::Value::Table(table) => table.iter().find_map(|(key, value)| {
            let mut path = path_of(value, text)?;
            path.insert(0, key.clone());
            Some(path)
        }),
        _ => None,
    }
}

/// A JSON value in which no object has a key twice: readers differ in which of the two counts. TOML has no such.
struct Once(Value);

impl<'de> Deserialize<'de> for Once {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OnceVisitor;

        impl<'de> Visitor<'de> for OnceVisitor {
            type Value = Value;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a JSON value")
            }

            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut values = Vec::new();
                while let Some(Once(value)) = seq.next_element()? {
                    values.push(value);
                }
                Ok(values.into())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut table = Map::new();
                while let Some((key, Once(value))) = map.next_entry::<String, Once>()? {
                    if table.contains_key(&key) {
                        return Err(A::Error::custom(format!("the key {key} is there twice")));
                    }
                    table.insert(key, value);
                }
                Ok(table.into())
            }
        }

        deserializer.deserialize_any(OnceVisitor).map(Self)
    }
}

fn from_toml(value: toml::Value) -> Value {
    match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(number) => number.into(),
        // NaN and infinity have no JSON form; as text they fail the type check by name.
        toml::Value::Float(number) => {
            serde_json::Number::from_f64(number).map_or_else(|| number.to_string().into(), Value::Number)
        }
        toml::Value::Boolean(value) => value.into(),
        toml::Value::Datetime(value) => value.to_string().into(),
        toml::Value::Array(values) => values.into_iter().map(from_toml).collect(),
        toml::Value::Table(table) => {
            table.into_iter().map(|(key, value)| (key, from_toml(value))).collect::<Map<_, _>>().into()
        }
    }
}

/// The value with every `${VAR}` replaced; parsed if the key wants a number or a boolean.
///
/// # Errors
/// The name of a variable that is not set.
pub(super) fn substitute(
    schema: &Schema,
    path: &str,
    value: &Value,
    environment: &Environment,
) -> Result<Value, String> {
    match value {
        Value::String(text) => {
            let replaced = replace_variables(text, environment)?;
            if replaced != *text
                && schema.is_number_or_bool(path)
                && let Ok(parsed) = serde_json::from_str(&replaced)
            {
                return Ok(parsed);
            }
            Ok(replaced.into())
        }
        Value::Array(values) => {
            values.iter().map(|value| substitute(schema, path, value, environment)).collect()
        }
        Value::Object(table) => table
            .iter()
            .map(|(key, value)| Ok((key.clone(), substitute(schema, path, value, environment)?)))
            .collect::<Result<Map<_, _>, _>>()
            .map(Value::Object),
        other => Ok(other.clone()),
    }
}

fn replace_variables(text: &str, environment: &Environment) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        out.push_str(before);
        match after.split_once('}') {
            Some((name, tail)) if is_variable_name(name) => {
                out.push_str(environment.get(name).ok_or(name)?);
                rest = tail;
            }
            _ => {
                out.push_str("${");
                rest = after;
            }
        }
    }
    out.push_str(rest);
    Ok(out)
}

/// True for names that an environment variable can have.
pub(super) fn is_variable_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|first: char| first.is_ascii_digit())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// The candidate most like a misspelt name, if one is close.
pub(super) fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .map(|candidate| (strsim::jaro_winkler(name, candidate), candidate))
        .filter(|(likeness, _)| *likeness > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

/// The remedy for an unknown key among `siblings`.
pub(super) fn suggest<'a>(
    schema: &Schema,
    tables: &[&str],
    key: &str,
    siblings: impl Iterator<Item = &'a str> + Clone,
) -> String {
    let is_own = |path: &String| path.split('.').next().is_some_and(|table| tables.contains(&table));
    // Keys of this file first, those at the top of a table before others.
    let distance = |path: &String| (!is_own(path), path.matches('.').count());
    let named = |path: &String| path.rsplit('.').next() == Some(key);
    let elsewhere = || schema.leaf_paths().into_iter().filter(named).min_by_key(distance);
    if let Some(path) = elsewhere() {
        return match FileKind::of_key(&path) {
            Some(kind) if !is_own(&path) => {
                format!("That key is {path}, in {}.", kind.file_name())
            }
            _ => format!("That key is {path}."),
        };
    }
    if let Some(name) = nearest(key, siblings.clone()) {
        return format!("Did you mean {name}?");
    }
    format!("Take it out; the keys here are {}.", siblings.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_toml_cannot_hold_is_told_with_its_key() {
        let file = tempfile::Builder::new().suffix(".toml").tempfile().expect("file");
        let told = |text: &str| {
            std::fs::write(file.path(), text).expect("written");
            read(file.path()).expect_err("refused").to_string()
        };
        let huge = "99999999999999999999";
        for (text, key) in [
            (format!("[training]\nmax_steps = {huge} # for ever\n"), "training.max_steps: "),
            (
                format!("training.async = {{ enable = true, max_staleness = {huge} }}"),
                "training.async.max_staleness: ",
            ),
            (format!("[sandbox]\nports = [1, {huge}]"), "sandbox.ports: "),
        ] {
            let error = told(&text);
            assert!(error.contains(key) && error.contains(" at line "), "{error}");
        }
        // Nothing is said of a key where more is wrong.
        let error = told("[training]\nbatch_size = = 3\n");
        assert!(error.contains("line 2") && !error.contains("batch_size: "), "{error}");
    }
}
