//! What a row group's statistics and Bloom filters say about a predicate.

use std::cmp::Ordering;

use super::column::{Kind, Value};
use super::{Comparison, Filter, Node, Op, Test};

/// What is known of a column's values in a row group.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::capture) struct Range<'a> {
    /// No value that is not null is smaller.
    pub(in crate::capture) min: Option<Value<'a>>,
    /// None is larger.
    pub(in crate::capture) max: Option<Value<'a>>,
    pub(in crate::capture) nulls: Option<u64>,
    pub(in crate::capture) rows: u64,
}

/// A row group, as its file's footer describes it.
pub(in crate::capture) trait Group {
    /// `None`: nothing is known of this column.
    fn range(&self, column: &str) -> Option<Range<'_>>;
    /// Whether the column's Bloom filter leaves it open that a row has this text.
    fn may_contain(&self, column: &str, text: &str) -> bool;
}

/// Which of the two answers a row of the group may give.
#[derive(Debug, Clone, Copy)]
struct May {
    be_true: bool,
    be_false: bool,
}

const OPEN: May = May { be_true: true, be_false: true };

impl Filter {
    /// Whether a row of the group may match. True where nothing is known.
    pub(in crate::capture) fn may_hold(&self, group: &impl Group) -> bool {
        self.root.may(group).be_true
    }
}

impl Node {
    fn may(&self, group: &impl Group) -> May {
        match self {
            // A row may give what no part rules out, and an `and` is false as soon as one part is.
            Self::All(nodes) => nodes.iter().map(|node| node.may(group)).fold(
                May { be_true: true, be_false: false },
                |all, may| May { be_true: all.be_true & may.be_true, be_false: all.be_false | may.be_false },
            ),
            Self::Any(nodes) => nodes.iter().map(|node| node.may(group)).fold(
                May { be_true: false, be_false: true },
                |any, may| May { be_true: any.be_true | may.be_true, be_false: any.be_false & may.be_false },
            ),
            Self::Not(node) => {
                let may = node.may(group);
                May { be_true: may.be_false, be_false: may.be_true }
            }
            Self::Test(test) => test.may(group),
        }
    }
}

impl Test {
    fn may(&self, group: &impl Group) -> May {
        // A day is read from a column of times, a count from a list: their ranges are of something else.
        if self.column.name != self.column.stored {
            return OPEN;
        }
        let name = self.column.name;
        let range = group.range(name);
        let has_bloom = matches!(self.column.kind, Kind::Text | Kind::CallId | Kind::Name(_));
        let may_equal = |value: &Value<'_>| {
            let is_inside = range.as_ref().is_none_or(|range| range.may_have(value));
            is_inside && (!has_bloom || value.text().is_none_or(|text| group.may_contain(name, text)))
        };
        // All that is not null is this one value.
        let is_only = |value: &Value<'_>| {
            let is = |bound: &Option<Value<'_>>| {
                bound.as_ref().and_then(|bound| bound.compare(value)) == Some(Ordering::Equal)
            };
            range.as_ref().is_some_and(|range| is(&range.min) && is(&range.max))
        };
        match &self.op {
            Op::Compare(Comparison::Equal, value) => {
                May { be_true: may_equal(value), be_false: !is_only(value) }
            }
            Op::Compare(Comparison::NotEqual, value) => {
                May { be_true: !is_only(value), be_false: may_equal(value) }
            }
            Op::Compare(comparison, value) => {
                range.as_ref().map_or(OPEN, |range| range.ordered(*comparison, value))
            }
            Op::In(values) => {
                May { be_true: values.iter().any(may_equal), be_false: !values.iter().any(is_only) }
            }
            Op::InTexts(texts) => {
                let may = texts.iter().any(|text| may_equal(&Value::Text(text.as_str().into())));
                May { be_true: may, be_false: true }
            }
            Op::Like(pattern) => {
                let prefix = pattern.prefix();
                let is_outside = range.as_ref().is_some_and(|range| range.is_outside_prefix(&prefix));
                May { be_true: !is_outside, be_false: true }
            }
            Op::IsNull => {
                let nulls = range.as_ref().and_then(|range| Some((range.nulls?, range.rows)));
                nulls.map_or(OPEN, |(nulls, rows)| May { be_true: nulls > 0, be_false: nulls < rows })
            }
        }
    }
}

impl Range<'_> {
    fn may_have(&self, value: &Value<'_>) -> bool {
        let order = |bound: &Option<Value<'_>>| bound.as_ref().and_then(|bound| bound.compare(value));
        order(&self.min) != Some(Ordering::Greater) && order(&self.max) != Some(Ordering::Less)
    }

    /// For `<` and its like: the smallest and the largest value decide.
    fn ordered(&self, comparison: Comparison, value: &Value<'_>) -> May {
        let holds = |bound: &Option<Value<'_>>| {
            let order = bound.as_ref().and_then(|bound| bound.compare(value));
            order.map(|order| comparison.holds(order))
        };
        let (least, most) = match comparison {
            Comparison::Less | Comparison::LessOrEqual => (holds(&self.max), holds(&self.min)),
            _ => (holds(&self.min), holds(&self.max)),
        };
        // `most`: of the value for which it holds most easily; `least`: of that for which it fails most easily.
        May { be_true: most != Some(false), be_false: least != Some(true) }
    }

    fn is_outside_prefix(&self, prefix: &str) -> bool {
        let text =
            |bound: &Option<Value<'_>>| bound.as_ref().and_then(|bound| bound.text().map(str::to_owned));
        let is_above = text(&self.min).is_some_and(|min| min.as_str() > prefix && !min.starts_with(prefix));
        let is_below = text(&self.max).is_some_and(|max| max.as_str() < prefix);
        is_above || is_below
    }
}
