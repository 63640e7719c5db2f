//! Parts of prompts that change from call to call without meaning anything: nonces, counters, dates.
//!
//! Rules look at the texts of system prompts and of users, never at what a model said or a tool returned. Texts in
//! which nothing matches keep their bytes, and so does everything around them.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use regex::Regex;

use super::json::{self, Edit, ScanError};
use super::messages::is_billing_header;

/// The protocol that a request's body is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Chat,
    Messages,
    Responses,
}

/// Whose texts a rule applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    System,
    User,
    Any,
}

/// What is looked for.
#[derive(Debug, Clone)]
pub enum Pattern {
    /// Claude Code's billing line, at the beginning of a system text.
    BillingHeader,
    /// Whatever this matches becomes `replacement`, in which `$1` is its first group.
    Text { regex: Regex, replacement: String },
}

/// One rule.
#[derive(Debug, Clone)]
pub struct Rule {
    pub role: Role,
    pub pattern: Pattern,
    /// It changes what is sent, not only how calls are compared.
    pub is_removed: bool,
}

/// Rules, in the order in which they apply.
#[derive(Debug, Clone, Default)]
pub struct Rules(Vec<Rule>);

impl FromIterator<Rule> for Rules {
    fn from_iter<I: IntoIterator<Item = Rule>>(rules: I) -> Self {
        Self(rules.into_iter().collect())
    }
}

/// What becomes of one text.
enum Changed {
    Text(String),
    /// It is a volatile part as a whole.
    Gone,
}

impl Rules {
    /// A request's body without what the rules remove; `None` if nothing is.
    ///
    /// # Errors
    /// [`ScanError`] when the body is not a request of this protocol.
    pub fn removed(&self, shape: Shape, body: &[u8]) -> Result<Option<Bytes>, ScanError> {
        without(&self.0.iter().filter(|rule| rule.is_removed).collect::<Vec<_>>(), shape, body)
    }

    /// A request's body as it is compared with others: without what any rule matches.
    #[must_use]
    pub fn compared_body<'a>(&self, shape: Shape, body: &'a [u8]) -> Cow<'a, [u8]> {
        let without = without(&self.0.iter().collect::<Vec<_>>(), shape, body);
        // What cannot be read is compared as it is.
        without.ok().flatten().map_or(Cow::Borrowed(body), |body| Cow::Owned(body.into()))
    }

    /// A chat message as it is compared with others: without what any rule matches.
    #[must_use]
    pub fn compared<'a>(&self, message: &'a [u8]) -> Cow<'a, [u8]> {
        let rules: Vec<&Rule> = self.0.iter().collect();
        let mut edits = Vec::new();
        if rules.is_empty() || one_message(&rules, message, 0, &mut edits).is_err() || edits.is_empty() {
            return Cow::Borrowed(message);
        }
        Cow::Owned(json::apply(message, &edits))
    }
}

/// A body without what `rules` match; `None` if nothing is.
fn without(rules: &[&Rule], shape: Shape, body: &[u8]) -> Result<Option<Bytes>, ScanError> {
    if rules.is_empty() {
        return Ok(None);
    }
    let mut edits = Vec::new();
    for member in json::members(body, 0)? {
        let at = member.value.clone();
        match shape {
            Shape::Messages if member.is_named(body, "system") => {
                content(rules, body, Role::System, at, b"[]", &mut edits)?;
            }
            Shape::Responses if member.is_named(body, "instructions") => {
                content(rules, body, Role::System, at, b"[]", &mut edits)?;
            }
            Shape::Responses if member.is_named(body, "input") && body[at.start] == b'"' => {
                content(rules, body, Role::User, at, b"[]", &mut edits)?;
            }
            Shape::Chat | Shape::Messages if member.is_named(body, "messages") => {
                messages(rules, body, at, &mut edits)?;
            }
            Shape::Responses if member.is_named(body, "input") => {
                messages(rules, body, at, &mut edits)?;
            }
            _ => {}
        }
    }
    Ok((!edits.is_empty()).then(|| json::apply(body, &edits).into()))
}

fn messages(
    rules: &[&Rule],
    body: &[u8],
    list: Range<usize>,
    edits: &mut Vec<Edit>,
) -> Result<(), ScanError> {
    if body[list.start] != b'[' {
        return Ok(());
    }
    for message in json::elements(body, list.start)? {
        one_message(rules, body, message.start, edits)?;
    }
    Ok(())
}

fn one_message(rules: &[&Rule], body: &[u8], at: usize, edits: &mut Vec<Edit>) -> Result<(), ScanError> {
    if body.get(json::skip_space(body, at)) != Some(&b'{') {
        return Ok(());
    }
    let members = json::members(body, at)?;
    let role = match json::find(body, &members, "role").map(|role| role.text(body)) {
        Some(b"\"system\"" | b"\"developer\"") => Role::System,
        Some(b"\"user\"") => Role::User,
        _ => return Ok(()),
    };
    match json::find(body, &members, "content") {
        Some(text) => content(rules, body, role, text.value.clone(), b"\"\"", edits),
        None => Ok(()),
    }
}

/// A text, or a list of parts of which some are texts. `empty` stands for a list of which nothing is left.
fn content(
    rules: &[&Rule],
    body: &[u8],
    role: Role,
    at: Range<usize>,
    empty: &'static [u8],
    edits: &mut Vec<Edit>,
) -> Result<(), ScanError> {
    if body[at.start] == b'"' {
        match changed(rules, body, role, &at) {
            Some(Changed::Text(text)) => edits.push(put(at, &text)),
            Some(Changed::Gone) => edits.push(put(at, "")),
            None => {}
        }
        return Ok(());
    }
    if body[at.start] != b'[' {
        return Ok(());
    }
    let parts = json::elements(body, at.start)?;
    let mut gone = vec![false; parts.len()];
    let before = edits.len();
    for (index, part) in parts.iter().enumerate() {
        if body[part.start] != b'{' {
            continue;
        }
        let members = json::members(body, part.start)?;
        let is_text = json::find(body, &members, "type")
            .is_none_or(|kind| matches!(kind.text(body), b"\"text\"" | b"\"input_text\""));
        let text =
            json::find(body, &members, "text").filter(|text| is_text && body[text.value.start] == b'"');
        let Some(text) = text else { continue };
        match changed(rules, body, role, &text.value) {
            Some(Changed::Text(new)) => edits.push(put(text.value.clone(), &new)),
            Some(Changed::Gone) => gone[index] = true,
            None => {}
        }
    }
    if !gone.is_empty() && gone.iter().all(|is_gone| *is_gone) {
        edits.push(Edit::replace(at, empty));
        return Ok(());
    }
    cut_parts(&parts, &gone, edits);
    edits[before..].sort_by_key(|edit| edit.span.start);
    Ok(())
}

/// Cuts parts of a list that keeps some, with their commas.
fn cut_parts(parts: &[Range<usize>], gone: &[bool], edits: &mut Vec<Edit>) {
    let first_kept = gone.iter().position(|is_gone| !is_gone).unwrap_or_default();
    if first_kept > 0 {
        edits.push(Edit::cut(parts[0].start..parts[first_kept].start));
    }
    for index in first_kept + 1..parts.len() {
        if gone[index] {
            edits.push(Edit::cut(parts[index - 1].end..parts[index].end));
        }
    }
}

fn put(span: Range<usize>, text: &str) -> Edit {
    Edit::replace(span, serde_json::Value::from(text).to_string().into_bytes())
}

/// The text after all rules; `None` if it stays.
fn changed(rules: &[&Rule], body: &[u8], role: Role, span: &Range<usize>) -> Option<Changed> {
    let literal = &body[span.clone()];
    let mut own: Option<String> = None;
    let mut is_changed = false;
    for rule in rules.iter().filter(|rule| rule.role == Role::Any || rule.role == role) {
        // Nothing in the billing line's name needs an escape: other texts are not read for it.
        let is_billing = matches!(rule.pattern, Pattern::BillingHeader);
        if is_billing && own.is_none() && !literal.starts_with(b"\"x-anthropic-billing-") {
            continue;
        }
        let text = match own.take() {
            Some(text) => text,
            None => serde_json::from_slice(literal).ok()?,
        };
        let new = match &rule.pattern {
            Pattern::BillingHeader if !is_billing_header(&text) => text.clone(),
            Pattern::BillingHeader => {
                let end = billing_end(&text);
                if end == text.len() {
                    return Some(Changed::Gone);
                }
                text[end..].to_owned()
            }
            Pattern::Text { regex, replacement } => {
                regex.replace_all(&text, replacement.as_str()).into_owned()
            }
        };
        is_changed |= new != text;
        own = Some(new);
    }
    own.filter(|_| is_changed).map(Changed::Text)
}

/// Where the billing line ends, its line end included: `x-anthropic-billing-header: key=value; key=value;`, which some
/// clients join with the text that follows it. 0 if it is not of that form.
fn billing_end(text: &str) -> usize {
    let Some(colon) = text.find(':') else { return 0 };
    let mut end = colon + 1;
    loop {
        let rest = text[end..].trim_start_matches(' ');
        let start = text.len() - rest.len();
        let Some((key, after)) = rest.split_once('=') else { break };
        if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            break;
        }
        let length = after.find([';', '\n', ' ']).unwrap_or(after.len());
        let value_end = start + key.len() + 1 + length;
        match after.as_bytes().get(length) {
            Some(b';') => end = value_end + 1,
            Some(b'\n') | None => {
                end = value_end;
                break;
            }
            // What has a space behind it is a sentence that begins so.
            Some(_) => break,
        }
    }
    if end == colon + 1 {
        return 0;
    }
    end + usize::from(text[end..].starts_with('\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "x-anthropic-billing-header: cc_version=2.1.332.d60; cc_entrypoint=cli; cch=0af3;";

    fn billing(is_removed: bool) -> Rule {
        Rule { role: Role::System, pattern: Pattern::BillingHeader, is_removed }
    }

    fn date(role: Role) -> Rule {
        let regex = Regex::new("Today is ([a-z]+ )?[0-9-]+").expect("a pattern");
        Rule {
            role,
            pattern: Pattern::Text { regex, replacement: "Today is ${1}X".to_owned() },
            is_removed: true,
        }
    }

    fn sent(rules: Vec<Rule>, shape: Shape, body: &str) -> Option<String> {
        let removed = Rules::from_iter(rules).removed(shape, body.as_bytes()).expect("a request");
        removed.map(|body| String::from_utf8(body.to_vec()).expect("text"))
    }

    #[test]
    fn b10_the_billing_line_goes_in_every_form_and_nothing_else_does() {
        let block = format!(r#"{{ "text":"{LINE}", "type": "text" }}"#);
        for (shape, body, expected) in [
            (
                Shape::Messages,
                format!(
                    r#"{{"system": [{block} , {{"type":"text","text":"be brief\u0021"}}], "messages":[{{"role":"user","content":"{LINE}"}}]}}"#
                ),
                Some(format!(
                    r#"{{"system": [{{"type":"text","text":"be brief\u0021"}}], "messages":[{{"role":"user","content":"{LINE}"}}]}}"#
                )),
            ),
            (
                Shape::Messages,
                format!(r#"{{"system":"{LINE}\nbe brief","messages":[]}}"#),
                Some(r#"{"system":"be brief","messages":[]}"#.to_owned()),
            ),
            (Shape::Messages, format!(r#"{{"system":[{block}]}}"#), Some(r#"{"system":[]}"#.to_owned())),
            (
                Shape::Chat,
                format!(
                    r#"{{"messages":[{{"role":"system","content":"{LINE}be brief"}},{{"role":"user","content":"a"}}]}}"#
                ),
                Some(
                    r#"{"messages":[{"role":"system","content":"be brief"},{"role":"user","content":"a"}]}"#
                        .to_owned(),
                ),
            ),
            (
                Shape::Chat,
                format!(
                    r#"{{"messages":[{{"role":"system","content":[{{"type":"text","text":"a"}},{block}]}}]}}"#
                ),
                Some(r#"{"messages":[{"role":"system","content":[{"type":"text","text":"a"}]}]}"#.to_owned()),
            ),
            (
                Shape::Chat,
                format!(r#"{{"messages":[{{"role":"developer","content":[{block}]}}]}}"#),
                Some(r#"{"messages":[{"role":"developer","content":""}]}"#.to_owned()),
            ),
            (
                Shape::Responses,
                format!(r#"{{"instructions":"{LINE}","input":"{LINE}"}}"#),
                Some(format!(r#"{{"instructions":"","input":"{LINE}"}}"#)),
            ),
            // A chat request has no system prompt of its own.
            (Shape::Chat, format!(r#"{{"system":"{LINE}","messages":[]}}"#), None),
            (Shape::Chat, format!(r#"{{"messages":[{{"role":"assistant","content":"{LINE}"}}]}}"#), None),
            (
                Shape::Messages,
                r#"{"system":"x-anthropic-billing-header is a header","messages":[]}"#.to_owned(),
                None,
            ),
        ] {
            assert_eq!(sent(vec![billing(true)], shape, &body), expected, "{body}");
            assert_eq!(sent(vec![billing(false)], shape, &body), None);
        }
    }

    #[test]
    fn a_rules_pattern_is_looked_for_in_its_roles_texts_only() {
        let body = r#"{"messages":[{"role":"system","content":"Today is 2026-01-01, \u00e9"},{"role":"user","content":[{"type":"text","text":"Today is may 3. Today is 4"},{"type":"image_url","text":"Today is 5"}]},{"role":"tool","content":"Today is 6"}]}"#;
        let system = body.replace(r"Today is 2026-01-01, \u00e9", "Today is X, é");
        let user = body.replace("Today is may 3. Today is 4", "Today is may X. Today is X");
        assert_eq!(sent(vec![date(Role::System)], Shape::Chat, body), Some(system.clone()));
        assert_eq!(sent(vec![date(Role::User)], Shape::Chat, body), Some(user));
        let both = system.replace("Today is may 3. Today is 4", "Today is may X. Today is X");
        assert_eq!(sent(vec![date(Role::Any)], Shape::Chat, body), Some(both));
        assert_eq!(sent(Vec::new(), Shape::Chat, body), None);
    }

    #[test]
    fn calls_are_compared_without_what_any_rule_matches() {
        let rules = Rules::from_iter([billing(false), date(Role::System)]);
        let message = |line: &str, day: u8| {
            format!(r#"{{"role":"system","content":"{line}be brief. Today is {day}."}}"#)
        };
        let other = LINE.replace("0af3", "beef");
        let (one, two) = (message(LINE, 1), message(&other, 2));
        assert_eq!(rules.compared(one.as_bytes()), rules.compared(two.as_bytes()));
        assert_ne!(rules.compared(one.as_bytes()), one.as_bytes());
        let user = one.replace("system", "user");
        assert_eq!(rules.compared(user.as_bytes()), user.as_bytes());
        for odd in ["", "{", "[]", "3", r#"{"role":"system"}"#, r#"{"role":"system","content":{}}"#] {
            assert_eq!(rules.compared(odd.as_bytes()), odd.as_bytes());
        }
    }

    #[test]
    fn where_the_billing_line_ends() {
        for (text, rest) in [
            ("x-anthropic-billing-header: a=b; c=d;You are", "You are"),
            ("x-anthropic-billing-header: a=b; c=d;\nYou are", "You are"),
            ("x-anthropic-billing-header: a=b; c=d\nYou are", "You are"),
            ("x-anthropic-billing-header: a=b; c=d", ""),
            ("x-anthropic-billing-header: a=b; x=1 is", " x=1 is"),
            ("x-anthropic-billing-header: it is", "x-anthropic-billing-header: it is"),
            ("x-anthropic-billing-header", "x-anthropic-billing-header"),
        ] {
            assert_eq!(&text[billing_end(text)..], rest);
        }
    }
}
