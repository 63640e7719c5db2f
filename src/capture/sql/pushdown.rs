//! Which predicates of SQL the reader can test, so that row groups without a match are not read and the rest of a row only
//! where it matches.
//!
//! Invariant: what is handed over means the same there as in SQL, of every call. All else is DataFusion's to test: what has
//! another value once the reader has put a call together (routing, and `trainable` with it), and what the filter's grammar
//! does not have.

use datafusion::arrow::datatypes::{DataType, Schema};
use datafusion::logical_expr::expr::{Between, InList};
use datafusion::logical_expr::{BinaryExpr, Expr, Like, Operator};
use datafusion::scalar::ScalarValue;

use crate::capture::{Filter, columns};
use crate::record::CallId;

/// The same predicate for the reader; `None` where there is none.
pub(super) fn filter(expr: &Expr, schema: &Schema) -> Option<Filter> {
    // The parser checks it against the filter's own columns.
    text(expr, schema)?.parse().ok()
}

fn text(expr: &Expr, schema: &Schema) -> Option<String> {
    let text_of = |expr: &Expr| text(expr, schema);
    Some(match expr {
        Expr::BinaryExpr(BinaryExpr { left, op: Operator::And, right }) => {
            format!("({}) and ({})", text_of(left)?, text_of(right)?)
        }
        Expr::BinaryExpr(BinaryExpr { left, op: Operator::Or, right }) => {
            format!("({}) or ({})", text_of(left)?, text_of(right)?)
        }
        Expr::BinaryExpr(BinaryExpr { left, op, right }) => {
            format!("{} {} {}", column(left, schema)?, sign(*op)?, literal(right)?)
        }
        Expr::Between(Between { expr, negated, low, high }) => {
            let (column, low, high) = (column(expr, schema)?, literal(low)?, literal(high)?);
            format!("{}({column} >= {low} and {column} <= {high})", not(*negated))
        }
        Expr::InList(InList { expr, list, negated }) => {
            let values = list.iter().map(literal).collect::<Option<Vec<_>>>()?;
            format!("{}({} in ({}))", not(*negated), column(expr, schema)?, values.join(", "))
        }
        Expr::Like(Like { negated, expr, pattern, escape_char: None, case_insensitive: false }) => {
            // What a backslash does before an ordinary character is not the same everywhere.
            let pattern = literal(pattern).filter(|pattern| !pattern.contains('\\'))?;
            format!("{}({} like {pattern})", not(*negated), column(expr, schema)?)
        }
        Expr::IsNull(expr) => format!("{} is null", column(expr, schema)?),
        Expr::IsNotNull(expr) => format!("{} is not null", column(expr, schema)?),
        Expr::Not(expr) => format!("not ({})", text_of(expr)?),
        Expr::Column(_) => format!("{} = true", column(expr, schema)?),
        _ => return None,
    })
}

const fn not(is_negated: bool) -> &'static str {
    if is_negated { "not " } else { "" }
}

const fn sign(op: Operator) -> Option<&'static str> {
    Some(match op {
        Operator::Eq => "=",
        Operator::NotEq => "!=",
        Operator::Lt => "<",
        Operator::LtEq => "<=",
        Operator::Gt => ">",
        Operator::GtEq => ">=",
        _ => return None,
    })
}

/// A column whose value in the store is the one that the reader gives, and small.
fn column<'a>(expr: &'a Expr, schema: &Schema) -> Option<&'a str> {
    let Expr::Column(column) = expr else {
        return None;
    };
    let name = column.name.as_str();
    let is_plain = match schema.field_with_name(name).ok()?.data_type() {
        DataType::Utf8 | DataType::Int32 | DataType::UInt64 | DataType::Timestamp(..) => true,
        // `trainable` is taken back where rows of routing turn out to be gone.
        DataType::Boolean => name != "trainable",
        _ => false,
    };
    let is_put_together = columns::BODIES.contains(&name)
        || columns::ROUTINGS.contains(&name)
        || columns::SHARED.contains(&name)
        || columns::declared().iter().any(|declared| declared.name() == name);
    (is_plain && !is_put_together).then_some(name)
}

/// As it stands in a filter.
fn literal(expr: &Expr) -> Option<String> {
    let Expr::Literal(value, _) = expr else {
        return None;
    };
    Some(match value {
        ScalarValue::Boolean(Some(value)) => value.to_string(),
        ScalarValue::Int32(Some(value)) => value.to_string(),
        ScalarValue::Int64(Some(value)) => value.to_string(),
        ScalarValue::UInt64(Some(value)) => value.to_string(),
        ScalarValue::TimestampMicrosecond(Some(us), _) => us.to_string(),
        ScalarValue::Utf8(Some(text))
        | ScalarValue::Utf8View(Some(text))
        | ScalarValue::LargeUtf8(Some(text)) => {
            // The filter takes any spelling of a call's id, SQL only its own.
            let is_respelt = text.parse::<CallId>().is_ok_and(|id| id.to_string() != *text);
            return (!is_respelt).then(|| format!("'{}'", text.replace('\'', "''")));
        }
        _ => return None,
    })
}
