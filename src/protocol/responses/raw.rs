//! JSON text put together from pieces of other JSON text: what passes through keeps its bytes.
//!
//! Text goes from one protocol to the other as the JSON string it is, without being decoded: whatever a client
//! escaped stays escaped, and a text that no UTF-8 string can hold (a lone surrogate) is passed on as well.

use serde_json::Value;

use crate::protocol::json::{self, Member};

/// A text as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// The decoded text of a JSON string; `None` for anything else.
pub(super) fn decoded(raw: &str) -> Option<String> {
    serde_json::from_str(raw).ok()
}

/// The elements of an array's text; `None` if it is no array.
pub(super) fn elements(raw: &str) -> Option<Vec<&str>> {
    let spans = json::elements(raw.as_bytes(), 0).ok()?;
    spans.into_iter().map(|span| raw.get(span)).collect()
}

/// The text of a list from the texts of its elements.
pub(super) fn list<T: AsRef<str>>(elements: &[T]) -> String {
    let mut out = String::from("[");
    for (index, element) in elements.iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        out.push_str(element.as_ref());
    }
    out.push(']');
    out
}

/// The same JSON without white space between its tokens: one line.
pub(super) fn compact(raw: &str) -> String {
    let mut out = String::with_capacity(raw.len());
    let mut is_string = false;
    let mut is_escaped = false;
    for character in raw.chars() {
        if is_string {
            is_string = is_escaped || character != '"';
            is_escaped = character == '\\' && !is_escaped;
        } else if matches!(character, ' ' | '\t' | '\n' | '\r') {
            continue;
        } else {
            is_string = character == '"';
        }
        out.push(character);
    }
    out
}

/// The members of an object's text.
pub(super) struct Fields<'a> {
    text: &'a str,
    members: Vec<Member>,
}

impl<'a> Fields<'a> {
    /// `None` if the text is no object.
    pub fn read(text: &'a str) -> Option<Self> {
        let members = json::members(text.as_bytes(), 0).ok()?;
        Some(Self { text, members })
    }

    /// The text of a member's value; `None` if it is absent or null.
    pub fn get(&self, name: &str) -> Option<&'a str> {
        let member = json::find(self.text.as_bytes(), &self.members, name)?;
        self.text.get(member.value.clone()).filter(|value| *value != "null")
    }

    /// The decoded text of a member; `None` if it is no string.
    pub fn string(&self, name: &str) -> Option<String> {
        self.get(name).and_then(decoded)
    }

    /// The JSON string of a member; `None` if it is no string.
    pub fn text(&self, name: &str) -> Option<&'a str> {
        self.get(name).filter(|value| value.starts_with('"'))
    }

    pub fn is_true(&self, name: &str) -> bool {
        self.get(name) == Some("true")
    }
}

/// An object being written.
pub(super) struct Object(String);

impl Object {
    pub fn new() -> Self {
        Self(String::from("{"))
    }

    /// Adds a member whose value is JSON text.
    pub fn raw(mut self, name: &str, value: &str) -> Self {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        self.0.push('"');
        self.0.push_str(name);
        self.0.push_str("\":");
        self.0.push_str(value);
        self
    }

    /// Adds a member whose value is a text.
    pub fn text(self, name: &str, value: &str) -> Self {
        self.raw(name, &quoted(value))
    }

    /// Adds a member if there is a value.
    pub fn maybe(self, name: &str, value: Option<&str>) -> Self {
        match value {
            Some(value) => self.raw(name, value),
            None => self,
        }
    }

    pub fn end(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

/// The inside of a JSON string that is put together from other JSON strings.
#[derive(Default)]
pub(super) struct Joined(String);

impl Joined {
    /// Adds a JSON string.
    pub fn push(&mut self, quoted: &str) {
        let inside = quoted.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
        self.0.push_str(inside.unwrap_or_default());
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The JSON string.
    pub fn quoted(&self) -> String {
        format!("\"{}\"", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn compact_changes_nothing_that_json_means(
            texts in prop::collection::vec("[ \"\\\\\n\t{}é]{0,8}", 0..5),
        ) {
            let value = serde_json::json!({"a b": texts, "c": [1, true, null]});
            let pretty = serde_json::to_string_pretty(&value).unwrap();
            prop_assert_eq!(compact(&pretty), value.to_string());
        }
    }

    #[test]
    fn joined_strings_keep_their_escapes() {
        let mut joined = Joined::default();
        joined.push(r#""a\n""#);
        joined.push(r#""\ud83d""#);
        assert_eq!(joined.quoted(), r#""a\n\ud83d""#);
    }
}
