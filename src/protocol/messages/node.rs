//! A value of a JSON text, read in place, that knows where in the body it lies.
//!
//! Strings stay as they came: a [`Literal`] is the text between the quotes, escapes and all. Long texts and images
//! are so copied once and never decoded, and a lone surrogate that a client wrote as `\ud83d` reaches the upstream.

use std::fmt;

use serde_json::value::RawValue;

use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::json::{self, Member};

/// Where a value lies: `messages[3].content[0].text`.
#[derive(Debug, Clone, Copy)]
pub(super) enum Path<'p> {
    Root,
    Key(&'p Path<'p>, &'static str),
    Index(&'p Path<'p>, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => f.write_str("the request body"),
            Self::Key(Self::Root, name) => f.write_str(name),
            Self::Key(parent, name) => write!(f, "{parent}.{name}"),
            Self::Index(parent, index) => write!(f, "{parent}[{index}]"),
        }
    }
}

/// An error of the client's that names a place in the body.
pub(super) fn refuse(path: Path<'_>, problem: impl fmt::Display) -> ApiError {
    ApiError::new(400, ErrorType::InvalidRequest, "bad_request", format!("{path}: {problem}"))
}

/// The text between the quotes of a JSON string, not decoded.
pub(super) type Literal<'a> = &'a str;

/// A value.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node<'a, 'p> {
    /// Valid JSON without white space around it.
    pub text: &'a str,
    pub path: Path<'p>,
}

/// An object's members.
#[derive(Debug)]
pub(super) struct Object<'a, 'p> {
    text: &'a str,
    pub path: Path<'p>,
    members: Vec<Member>,
}

impl<'a> Node<'a, 'static> {
    /// The root of a body.
    pub fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        let raw: &RawValue = serde_json::from_slice(body)
            .map_err(|error| refuse(Path::Root, format_args!("it is not JSON: {error}")))?;
        Ok(Self { text: raw.get(), path: Path::Root })
    }
}

impl<'a, 'p> Node<'a, 'p> {
    /// The error that this value has another shape.
    pub fn wrong(&self, expected: &str) -> ApiError {
        refuse(self.path, format_args!("expected {expected}"))
    }

    pub fn is_string(&self) -> bool {
        self.text.starts_with('"')
    }

    pub fn is_list(&self) -> bool {
        self.text.starts_with('[')
    }

    pub fn object(&self) -> Result<Object<'a, 'p>, ApiError> {
        let members = json::members(self.text.as_bytes(), 0).map_err(|_| self.wrong("an object"))?;
        Ok(Object { text: self.text, path: self.path, members })
    }

    /// Texts of the elements; [`Node::element`] gives them their place.
    pub fn list(&self) -> Result<Vec<&'a str>, ApiError> {
        let spans = json::elements(self.text.as_bytes(), 0).map_err(|_| self.wrong("a list"))?;
        Ok(spans.into_iter().map(|span| &self.text[span]).collect())
    }

    pub const fn element(&self, index: usize, text: &'a str) -> Node<'a, '_> {
        Node { text, path: Path::Index(&self.path, index) }
    }

    pub fn literal(&self) -> Result<Literal<'a>, ApiError> {
        let inner = self.text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
        inner.ok_or_else(|| self.wrong("a string"))
    }

    /// The string, decoded: for names and ids.
    pub fn string(&self) -> Result<String, ApiError> {
        serde_json::from_str(self.text).map_err(|_| self.wrong("a string of whole characters"))
    }

    pub fn bool(&self) -> Result<bool, ApiError> {
        match self.text {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(self.wrong("true or false")),
        }
    }

    /// The text of a number.
    pub fn number(&self) -> Result<&'a str, ApiError> {
        let is_number = self.text.starts_with(|first: char| first == '-' || first.is_ascii_digit());
        if is_number { Ok(self.text) } else { Err(self.wrong("a number")) }
    }

    /// The text of a whole number that is not negative.
    pub fn count(&self) -> Result<&'a str, ApiError> {
        match self.text.parse::<u64>() {
            Ok(_) => Ok(self.text),
            Err(_) => Err(self.wrong("a whole number, 0 or more")),
        }
    }
}

impl<'a, 'p> Object<'a, 'p> {
    /// A member; `None` if it is absent or null.
    pub fn get(&self, name: &'static str) -> Option<Node<'a, '_>> {
        let member = json::find(self.text.as_bytes(), &self.members, name)?;
        let text = &self.text[member.value.clone()];
        (text != "null").then_some(Node { text, path: Path::Key(&self.path, name) })
    }

    /// A member that must be there.
    pub fn need(&self, name: &'static str) -> Result<Node<'a, '_>, ApiError> {
        self.get(name).ok_or_else(|| refuse(Path::Key(&self.path, name), "the field is required"))
    }

    pub fn is_true(&self, name: &'static str) -> Result<bool, ApiError> {
        self.get(name).map_or(Ok(false), |node| node.bool())
    }

    /// The `type` member.
    pub fn kind(&self) -> Result<String, ApiError> {
        self.need("type")?.string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_place() {
        let body = br#" {"a":[{"b":"x\ud83d"},{"b":7}],"n":null} "#;
        let root = Node::parse(body).expect("JSON");
        let object = root.object().expect("object");
        let list = object.get("a").expect("a");
        let items = list.list().expect("list");
        let first = list.element(0, items[0]);
        let first = first.object().expect("object");
        assert_eq!(first.need("b").expect("b").literal().expect("string"), "x\\ud83d");
        assert!(first.need("b").expect("b").string().is_err());
        let second = list.element(1, items[1]);
        let second = second.object().expect("object");
        let error = second.need("b").expect("b").literal().expect_err("a number");
        assert_eq!((error.status, error.message.as_str()), (400, "a[1].b: expected a string"));
        let error = second.need("c").expect_err("absent");
        assert_eq!(error.message, "a[1].c: the field is required");
        assert!(object.get("n").is_none());
        let error = Node::parse(b"{").expect_err("cut");
        assert!(error.message.starts_with("the request body: it is not JSON"), "{}", error.message);
    }
}
