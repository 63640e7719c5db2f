//! Predicates over columns: `status = 'ok' and completion_tokens > 100`.
//!
//! ```text
//! any      = all { "or" all }
//! all      = one { "and" one }
//! one      = "not" one | "(" any ")" | test
//! test     = column ( "=" | "!=" | "<" | "<=" | ">" | ">=" ) literal
//!          | column ["not"] "in" "(" literal { "," literal } ")"
//!          | column ["not"] "like" text          % any characters, _ one, \ takes the next as it is
//!          | column "is" ["not"] "null"
//! literal  = 'text' | number | "true" | "false"
//! ```
//! Words are those of SQL, in any case, and so is what null means: a comparison with null is neither true nor false, and
//! so is its `not`. A predicate is checked against the columns when it is made.
//!
//! Invariant: what [`Filter::matches`] says of a call's record is all that counts. Statistics and Bloom filters only
//! leave out what cannot match ([`Filter::may_hold`]).

mod column;
mod parse;
mod prune;

use std::cmp::Ordering;
use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;

use crate::record::{Call, CallId, SessionId};

pub(super) use column::Value;
pub(super) use prune::{Group, Range};

/// What is wrong with a predicate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem} (at character {at})")]
pub struct FilterError {
    /// Where, from 1.
    pub at: usize,
    /// What, and what could be written instead.
    pub problem: String,
}

/// A checked predicate.
#[derive(Debug, Clone)]
pub struct Filter {
    root: Node,
    text: String,
}

#[derive(Debug, Clone)]
enum Node {
    All(Vec<Node>),
    Any(Vec<Node>),
    Not(Box<Node>),
    Test(Test),
}

#[derive(Debug, Clone)]
struct Test {
    column: &'static column::Column,
    op: Op,
}

#[derive(Debug, Clone)]
enum Op {
    Compare(Comparison, Value<'static>),
    In(Vec<Value<'static>>),
    /// Of texts, as `In`; for sets of any size.
    InTexts(HashSet<String>),
    Like(Pattern),
    IsNull,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

impl Comparison {
    const fn holds(self, order: Ordering) -> bool {
        match self {
            Self::Equal => order.is_eq(),
            Self::NotEqual => order.is_ne(),
            Self::Less => order.is_lt(),
            Self::LessOrEqual => order.is_le(),
            Self::Greater => order.is_gt(),
            Self::GreaterOrEqual => order.is_ge(),
        }
    }
}

/// What a text may look like, one piece a character of the pattern.
#[derive(Debug, Clone)]
struct Pattern(Vec<Piece>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece {
    Is(char),
    AnyOne,
    Any,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let (mut pieces, mut characters) = (vec![], text.chars());
        while let Some(character) = characters.next() {
            pieces.push(match character {
                '%' => Piece::Any,
                '_' => Piece::AnyOne,
                '\\' => Piece::Is(characters.next().unwrap_or('\\')),
                other => Piece::Is(other),
            });
        }
        Self(pieces)
    }

    /// Time is at most the product of both lengths: after `%` only the last one is tried again.
    fn matches(&self, text: &str) -> bool {
        let text: Vec<char> = text.chars().collect();
        let (mut at, mut piece) = (0, 0);
        let mut again: Option<(usize, usize)> = None;
        while at < text.len() {
            match self.0.get(piece) {
                Some(Piece::Any) => {
                    again = Some((piece + 1, at));
                    piece += 1;
                }
                Some(Piece::AnyOne) => (at, piece) = (at + 1, piece + 1),
                Some(Piece::Is(wanted)) if *wanted == text[at] => (at, piece) = (at + 1, piece + 1),
                _ => {
                    let Some((behind, from)) = &mut again else { return false };
                    *from += 1;
                    (piece, at) = (*behind, *from);
                }
            }
        }
        self.0[piece..].iter().all(|piece| *piece == Piece::Any)
    }

    /// The text that whatever matches begins with.
    fn prefix(&self) -> String {
        self.0.iter().map_while(|piece| if let Piece::Is(c) = piece { Some(*c) } else { None }).collect()
    }
}

impl FromStr for Filter {
    type Err = FilterError;

    fn from_str(text: &str) -> Result<Self, FilterError> {
        Ok(Self { root: parse::parse(text)?, text: text.to_owned() })
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Filter {
    /// The calls of these sessions.
    #[must_use]
    pub fn sessions<'a>(sessions: impl IntoIterator<Item = &'a SessionId>) -> Self {
        let texts = sessions.into_iter().map(ToString::to_string).collect();
        let root = Node::Test(Test { column: column::session_id(), op: Op::InTexts(texts) });
        Self { root, text: "session_id in (…)".to_owned() }
    }

    /// One of these calls.
    pub(super) fn calls<'a>(calls: impl IntoIterator<Item = &'a CallId>) -> Self {
        let texts = calls.into_iter().map(ToString::to_string).collect();
        let root = Node::Test(Test { column: column::call_id(), op: Op::InTexts(texts) });
        Self { root, text: "call_id in (…)".to_owned() }
    }

    /// This text column has this value.
    pub(super) fn equals(column: &str, value: String) -> Option<Self> {
        let text = format!("{column} = …");
        let column = column::find(column)?;
        let op = Op::Compare(Comparison::Equal, Value::Text(value.into()));
        Some(Self { root: Node::Test(Test { column, op }), text })
    }

    /// Both are true.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let text = format!("({}) and ({})", self.text, other.text);
        Self { root: Node::All(vec![self.root, other.root]), text }
    }

    /// Whether it is true of a call as it lies in the store: with its bodies, and its routing.
    #[must_use]
    pub fn matches(&self, call: &Call) -> bool {
        self.root.of(call) == Some(true)
    }

    /// Whether it looks at bodies.
    #[must_use]
    pub fn uses_bodies(&self) -> bool {
        self.uses(&super::columns::BODIES)
    }

    /// Whether it looks at expert routing.
    #[must_use]
    pub fn uses_routing(&self) -> bool {
        self.uses(&super::columns::ROUTINGS)
    }

    /// Whether it looks at one of these columns of the files.
    pub(super) fn uses(&self, of: &[&str]) -> bool {
        self.root.any_test(&mut |test| of.contains(&test.column.stored))
    }
}

/// A test of a text column that must be true of every call that matches.
#[derive(Debug, Clone)]
pub(super) struct TextTest(Test);

impl TextTest {
    pub(super) const fn column(&self) -> &'static str {
        self.0.column.stored
    }

    pub(super) fn is_true_of(&self, text: Option<&str>) -> bool {
        let value = text.map_or(Value::Null, |text| Value::Text(text.into()));
        self.0.of(&value) == Some(true)
    }
}

impl Filter {
    /// The tests of columns that the files have as text, and without which nothing matches.
    pub(super) fn texts(&self) -> Vec<TextTest> {
        let mut found = vec![];
        self.root.texts(&mut found);
        found
    }
}

impl Node {
    fn texts(&self, found: &mut Vec<TextTest>) {
        match self {
            Self::All(nodes) => nodes.iter().for_each(|node| node.texts(found)),
            Self::Test(test) if test.column.is_stored_text() => found.push(TextTest(test.clone())),
            _ => {}
        }
    }

    /// True, false, or neither.
    fn of(&self, call: &Call) -> Option<bool> {
        match self {
            Self::All(nodes) => nodes
                .iter()
                .try_fold(true, |all, node| match node.of(call) {
                    // A false one decides, and so ends the fold.
                    Some(false) => Err(false),
                    of => Ok(all & of.is_some()),
                })
                .map_or_else(Some, |is_known| is_known.then_some(true)),
            Self::Any(nodes) => nodes
                .iter()
                .try_fold(true, |all, node| match node.of(call) {
                    Some(true) => Err(true),
                    of => Ok(all & of.is_some()),
                })
                .map_or_else(Some, |is_known| is_known.then_some(false)),
            Self::Not(node) => node.of(call).map(|is| !is),
            Self::Test(test) => test.of(&(test.column.get)(call)),
        }
    }

    fn any_test(&self, is: &mut impl FnMut(&Test) -> bool) -> bool {
        match self {
            Self::All(nodes) | Self::Any(nodes) => nodes.iter().any(|node| node.any_test(is)),
            Self::Not(node) => node.any_test(is),
            Self::Test(test) => is(test),
        }
    }
}

impl Test {
    fn of(&self, value: &Value<'_>) -> Option<bool> {
        let is_null = *value == Value::Null;
        match &self.op {
            Op::IsNull => Some(is_null),
            _ if is_null => None,
            Op::Compare(comparison, wanted) => value.compare(wanted).map(|order| comparison.holds(order)),
            Op::In(wanted) => Some(wanted.iter().any(|one| value.compare(one) == Some(Ordering::Equal))),
            Op::InTexts(wanted) => value.text().map(|text| wanted.contains(text)),
            Op::Like(pattern) => value.text().map(|text| pattern.matches(text)),
        }
    }
}

#[cfg(test)]
mod tests;
