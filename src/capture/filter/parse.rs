//! Text to a checked predicate.

use super::column::{self, Column, Kind, Value};
use super::{Comparison, FilterError, Node, Op, Pattern, Test};

/// Parentheses and `not`s within each other.
const MAX_DEPTH: usize = 64;

#[derive(Debug, Clone, PartialEq)]
enum Token {
    /// A column or a word of the grammar.
    Word(String),
    Text(String),
    Number(String),
    Sign(&'static str),
    End,
}

impl Token {
    fn is(&self, word: &str) -> bool {
        matches!(self, Self::Word(found) if found.eq_ignore_ascii_case(word))
    }

    fn describe(&self) -> String {
        match self {
            Self::Word(word) => word.clone(),
            Self::Text(text) => format!("'{text}'"),
            Self::Number(number) => number.clone(),
            Self::Sign(sign) => (*sign).to_owned(),
            Self::End => "the end".to_owned(),
        }
    }
}

const SIGNS: [&str; 10] = ["!=", "<>", "<=", ">=", "=", "<", ">", "(", ")", ","];

pub(super) fn parse(text: &str) -> Result<Node, FilterError> {
    let mut parser = Parser { tokens: tokens(text)?, next: 0, depth: 0 };
    let node = parser.any()?;
    match parser.peek() {
        Token::End => Ok(node),
        other => Err(parser.wrong(format!("{} is too much: join tests by and, or", other.describe()))),
    }
}

fn tokens(text: &str) -> Result<Vec<(usize, Token)>, FilterError> {
    let characters: Vec<char> = text.chars().collect();
    let (mut found, mut at) = (vec![], 0);
    while let Some(&first) = characters.get(at) {
        let start = at;
        let run = |from: usize, is: fn(char) -> bool| {
            from + characters[from..].iter().take_while(|c| is(**c)).count()
        };
        let rest = &characters[at..];
        let token = if first.is_whitespace() {
            at += 1;
            continue;
        } else if first == '\'' {
            let mut inside = String::new();
            at += 1;
            loop {
                match (characters.get(at), characters.get(at + 1)) {
                    (Some('\''), Some('\'')) => {
                        inside.push('\'');
                        at += 2;
                    }
                    (Some('\''), _) => break,
                    (Some(other), _) => {
                        inside.push(*other);
                        at += 1;
                    }
                    (None, _) => {
                        let problem = "this text has no end: close it with '".to_owned();
                        return Err(FilterError { at: start + 1, problem });
                    }
                }
            }
            at += 1;
            Token::Text(inside)
        } else if first.is_ascii_digit() || (matches!(first, '-' | '+' | '.') && rest.len() > 1) {
            at = run(at + 1, |c| c.is_ascii_alphanumeric() || c == '.');
            // The sign of an exponent.
            if characters[at - 1].eq_ignore_ascii_case(&'e') && matches!(characters.get(at), Some('-' | '+'))
            {
                at = run(at + 1, |c| c.is_ascii_digit());
            }
            Token::Number(characters[start..at].iter().collect())
        } else if first.is_alphabetic() || first == '_' {
            at = run(at, |c| c.is_alphanumeric() || matches!(c, '_' | '.'));
            Token::Word(characters[start..at].iter().collect())
        } else if let Some(sign) =
            SIGNS.iter().find(|sign| sign.chars().eq(rest.iter().copied().take(sign.len())))
        {
            at += sign.len();
            Token::Sign(sign)
        } else {
            let hint = if first == '"' { ": texts stand between '…'" } else { "" };
            return Err(FilterError { at: start + 1, problem: format!("{first} has no meaning here{hint}") });
        };
        found.push((start + 1, token));
    }
    found.push((characters.len() + 1, Token::End));
    Ok(found)
}

struct Parser {
    /// Each with where it begins; the last one is the end.
    tokens: Vec<(usize, Token)>,
    next: usize,
    depth: usize,
}

impl Parser {
    fn peek(&self) -> &Token {
        &self.tokens[self.next].1
    }

    fn take(&mut self) -> Token {
        let token = self.peek().clone();
        self.next = (self.next + 1).min(self.tokens.len() - 1);
        token
    }

    fn wrong(&self, problem: impl Into<String>) -> FilterError {
        FilterError { at: self.tokens[self.next].0, problem: problem.into() }
    }

    fn takes(&mut self, word: &str) -> bool {
        let takes = self.peek().is(word) || matches!(self.peek(), Token::Sign(sign) if *sign == word);
        if takes {
            self.take();
        }
        takes
    }

    fn needs(&mut self, word: &str) -> Result<(), FilterError> {
        if self.takes(word) {
            return Ok(());
        }
        Err(self.wrong(format!("{word} is missing before {}", self.peek().describe())))
    }

    fn any(&mut self) -> Result<Node, FilterError> {
        let mut nodes = vec![self.all()?];
        while self.takes("or") {
            nodes.push(self.all()?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Any(nodes) })
    }

    fn all(&mut self) -> Result<Node, FilterError> {
        let mut nodes = vec![self.one()?];
        while self.takes("and") {
            nodes.push(self.one()?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::All(nodes) })
    }

    fn one(&mut self) -> Result<Node, FilterError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.wrong(format!("more than {MAX_DEPTH} parentheses and nots within each other")));
        }
        let node = if self.takes("not") {
            Node::Not(Box::new(self.one()?))
        } else if self.takes("(") {
            let node = self.any()?;
            self.needs(")")?;
            node
        } else {
            self.test()?
        };
        self.depth -= 1;
        Ok(node)
    }

    fn column(&mut self) -> Result<&'static Column, FilterError> {
        let name = match self.peek() {
            Token::Word(name) => name.clone(),
            other => return Err(self.wrong(format!("a column is to stand here, not {}", other.describe()))),
        };
        let column = column::find(&name).ok_or_else(|| {
            self.wrong(format!("no column {name}; the nearest are {}", column::nearest(&name).join(", ")))
        })?;
        self.take();
        Ok(column)
    }

    fn test(&mut self) -> Result<Node, FilterError> {
        let column = self.column()?;
        let test = |op| Node::Test(Test { column, op });
        let negated = |node, is_negated| if is_negated { Node::Not(Box::new(node)) } else { node };
        if self.takes("is") {
            let is_negated = self.takes("not");
            self.needs("null")?;
            return Ok(negated(test(Op::IsNull), is_negated));
        }
        if column.kind == Kind::Opaque {
            return Err(self.wrong(format!("{} has parts: it can only be tested by is null", column.name)));
        }
        let is_negated = self.takes("not");
        if self.takes("in") {
            self.needs("(")?;
            let mut values = vec![self.literal(column)?];
            while self.takes(",") {
                values.push(self.literal(column)?);
            }
            self.needs(")")?;
            return Ok(negated(test(Op::In(values)), is_negated));
        }
        if self.takes("like") {
            if !matches!(column.kind, Kind::Text | Kind::Name(_) | Kind::CallId) {
                return Err(self.wrong(format!("{} is no text: like does not fit it", column.name)));
            }
            return match self.take() {
                Token::Text(text) => Ok(negated(test(Op::Like(Pattern::new(&text))), is_negated)),
                other => Err(self.wrong(format!("like takes a text between '…', not {}", other.describe()))),
            };
        }
        let comparison = match self.peek() {
            _ if is_negated => return Err(self.wrong("behind not stands in (…) or like")),
            Token::Sign("=") => Comparison::Equal,
            Token::Sign("!=" | "<>") => Comparison::NotEqual,
            Token::Sign("<") => Comparison::Less,
            Token::Sign("<=") => Comparison::LessOrEqual,
            Token::Sign(">") => Comparison::Greater,
            Token::Sign(">=") => Comparison::GreaterOrEqual,
            other => {
                let problem = format!(
                    "behind {} stands =, !=, <, <=, >, >=, in (…), like or is null, not {}",
                    column.name,
                    other.describe()
                );
                return Err(self.wrong(problem));
            }
        };
        let is_order = !matches!(comparison, Comparison::Equal | Comparison::NotEqual);
        if is_order && matches!(column.kind, Kind::Bool | Kind::Name(_)) {
            return Err(self.wrong(format!("{} has no order: compare it by = or !=", column.name)));
        }
        self.take();
        let value = self.literal(column)?;
        Ok(test(Op::Compare(comparison, value)))
    }

    /// A literal that fits the column.
    fn literal(&mut self, column: &Column) -> Result<Value<'static>, FilterError> {
        let token = self.peek().clone();
        let (wanted, value) = match (column.kind, &token) {
            (Kind::Bool, token) if token.is("true") => ("", Some(Value::Bool(true))),
            (Kind::Bool, token) if token.is("false") => ("", Some(Value::Bool(false))),
            (Kind::Bool, _) => ("true or false", None),
            (Kind::Int, Token::Number(number)) => ("a whole number", number.parse().ok().map(Value::Int)),
            (Kind::Int, _) => ("a whole number", None),
            (Kind::Float, Token::Number(number)) => {
                ("a number", number.parse().ok().filter(|value: &f64| value.is_finite()).map(Value::Float))
            }
            (Kind::Float, _) => ("a number", None),
            (Kind::Text, Token::Text(text)) => ("", Some(Value::Text(text.clone().into()))),
            (Kind::Text, _) => ("a text between '…'", None),
            (Kind::Name(names), Token::Text(text)) => {
                if !names.contains(&text.as_str()) {
                    let problem = format!("{} is one of {}, not '{text}'", column.name, names.join(", "));
                    return Err(self.wrong(problem));
                }
                ("", Some(Value::Text(text.clone().into())))
            }
            (Kind::Name(_), _) => ("a name between '…'", None),
            (Kind::CallId, Token::Text(text)) => {
                let id = text.parse::<crate::record::CallId>().ok();
                ("the whole id of a call between '…'", id.map(|id| Value::Text(id.to_string().into())))
            }
            (Kind::CallId, _) => ("the id of a call between '…'", None),
            (Kind::Time, Token::Text(text)) => {
                ("a time (UTC) as '2026-11-29' or '2026-11-29 23:59:59'", time(text).map(Value::Int))
            }
            (Kind::Time, Token::Number(number)) => ("µs since 1970", number.parse().ok().map(Value::Int)),
            (Kind::Time, _) => ("a time (UTC) as '2026-11-29' or '2026-11-29 23:59:59'", None),
            (Kind::Opaque, _) => ("nothing", None),
        };
        let Some(value) = value else {
            let found = token.describe();
            return Err(self.wrong(format!("{} is compared with {wanted}, not {found}", column.name)));
        };
        self.take();
        Ok(value)
    }
}

/// µs since the Unix epoch of `2026-11-29[ 23:59[:59[.123456]]][Z]`, UTC; a `T` may stand for the space.
fn time(text: &str) -> Option<i128> {
    let text = text.trim_end_matches('Z');
    let (date, clock) = text.split_once([' ', 'T']).unwrap_or((text, "00:00"));
    let number = |part: &str, digits: usize| {
        let is_number = part.len() == digits && part.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| part.parse::<i64>().ok()).flatten()
    };
    let mut parts = date.splitn(3, '-');
    let year = number(parts.next()?, 4)?;
    let (month, day) = (number(parts.next()?, 2)?, number(parts.next()?, 2)?);
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, "0"));
    let mut parts = clock.split(':');
    let (hours, minutes) = (number(parts.next()?, 2)?, number(parts.next()?, 2)?);
    let seconds = parts.next().map_or(Some(0), |part| number(part, 2))?;
    if parts.next().is_some() || hours > 23 || minutes > 59 || seconds > 59 || fraction.len() > 6 {
        return None;
    }
    let micros = number(&format!("{fraction:0<6}"), 6)?;
    // Days from civil date: H. Hinnant, "chrono-compatible low-level date algorithms", `days_from_civil`.
    let year_from_march = if month <= 2 { year - 1 } else { year };
    let era = year_from_march.div_euclid(400);
    let year_of_era = year_from_march.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let days =
        era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468;
    let at = ((days * 24 + hours) * 60 + minutes) * 60_000_000 + seconds * 1_000_000 + micros;
    // A month with no such day.
    (crate::capture::layout::date_of(at) == date).then_some(at.into())
}
