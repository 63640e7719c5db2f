//! Byte spans of JSON members, and edits on them: text is changed without being re-serialised.
//!
//! The scanner finds where values begin and end. It does not validate: what a JSON parser refuses (`NaN`,
//! `-Infinity`) still has a span here, so that an engine's bad number cannot stop a reply from being forwarded.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;

/// The text is not the shape that was asked for at this offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected} at byte {at}")]
pub struct ScanError {
    pub expected: &'static str,
    pub at: usize,
}

/// One `"key": value` of an object, as spans of the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// With its quotes.
    pub key: Range<usize>,
    pub value: Range<usize>,
}

impl Member {
    /// True if the key, escapes resolved, is `name`.
    #[must_use]
    pub fn is_named(&self, text: &[u8], name: &str) -> bool {
        let quoted = &text[self.key.clone()];
        if quoted.contains(&b'\\') {
            return serde_json::from_slice::<String>(quoted).is_ok_and(|key| key == name);
        }
        &quoted[1..quoted.len() - 1] == name.as_bytes()
    }

    /// The value's text.
    #[must_use]
    pub fn text<'a>(&self, text: &'a [u8]) -> &'a [u8] {
        &text[self.value.clone()]
    }
}

/// A span of a text to be replaced; with nothing: cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edit {
    pub span: Range<usize>,
    pub with: Cow<'static, [u8]>,
}

impl Edit {
    /// Cuts `span`.
    #[must_use]
    pub const fn cut(span: Range<usize>) -> Self {
        Self { span, with: Cow::Borrowed(b"") }
    }

    /// Puts `with` in the place of `span`.
    #[must_use]
    pub fn replace(span: Range<usize>, with: impl Into<Cow<'static, [u8]>>) -> Self {
        Self { span, with: with.into() }
    }
}

/// The text with `edits`, in ascending order and disjoint, applied.
#[must_use]
pub fn apply(text: &[u8], edits: &[Edit]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut copied = 0;
    for edit in edits {
        out.extend_from_slice(&text[copied..edit.span.start]);
        out.extend_from_slice(&edit.with);
        copied = edit.span.end;
    }
    out.extend_from_slice(&text[copied..]);
    out
}

/// Offset of the first byte at or after `at` that is not JSON white space.
#[must_use]
pub fn skip_space(text: &[u8], mut at: usize) -> usize {
    while text.get(at).is_some_and(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')) {
        at += 1;
    }
    at
}

/// Members of the object that begins at or after `at`, in order, duplicates included.
///
/// # Errors
/// [`ScanError`] when there is no whole object.
pub fn members(text: &[u8], at: usize) -> Result<Vec<Member>, ScanError> {
    let mut found = Vec::with_capacity(16);
    let mut at = open(text, at, b'{', "an object")?;
    if text.get(at) == Some(&b'}') {
        return Ok(found);
    }
    loop {
        if text.get(at) != Some(&b'"') {
            return Err(ScanError { expected: "a key", at });
        }
        let key = at..skip_string(text, at)?;
        at = skip_space(text, key.end);
        if text.get(at) != Some(&b':') {
            return Err(ScanError { expected: "':'", at });
        }
        at = skip_space(text, at + 1);
        let value = at..skip_value(text, at)?;
        at = skip_space(text, value.end);
        found.push(Member { key, value });
        match text.get(at) {
            Some(b',') => at = skip_space(text, at + 1),
            Some(b'}') => return Ok(found),
            _ => {
                return Err(ScanError { expected: "',' or '}'", at });
            }
        }
    }
}

/// Elements of the array that begins at or after `at`.
///
/// # Errors
/// [`ScanError`] when there is no whole array.
pub fn elements(text: &[u8], at: usize) -> Result<Vec<Range<usize>>, ScanError> {
    let mut found = Vec::new();
    let mut at = open(text, at, b'[', "an array")?;
    if text.get(at) == Some(&b']') {
        return Ok(found);
    }
    loop {
        let value = at..skip_value(text, at)?;
        at = skip_space(text, value.end);
        found.push(value);
        match text.get(at) {
            Some(b',') => at = skip_space(text, at + 1),
            Some(b']') => return Ok(found),
            _ => {
                return Err(ScanError { expected: "',' or ']'", at });
            }
        }
    }
}

/// The last member with this name: the one that JSON parsers keep.
#[must_use]
pub fn find<'a>(text: &[u8], members: &'a [Member], name: &str) -> Option<&'a Member> {
    members.iter().rev().find(|member| member.is_named(text, name))
}

/// Adds the cuts that take the members for which `is_removed` holds, and their commas, out of one object.
pub fn remove_members(members: &[Member], edits: &mut Vec<Edit>, is_removed: impl Fn(&Member) -> bool) {
    let mut index = 0;
    while index < members.len() {
        if !is_removed(&members[index]) {
            index += 1;
            continue;
        }
        let first = index;
        while index < members.len() && is_removed(&members[index]) {
            index += 1;
        }
        let span = match (members.get(index), first.checked_sub(1)) {
            (Some(next), _) => members[first].key.start..next.key.start,
            (None, Some(previous)) => members[previous].value.end..members[index - 1].value.end,
            (None, None) => members[first].key.start..members[index - 1].value.end,
        };
        edits.push(Edit::cut(span));
    }
}

/// An object's text with members set and removed.
///
/// # Errors
/// [`ScanError`] if `text` is not an object.
pub fn set_members(text: &[u8], set: &[(&str, String)], remove: &[&str]) -> Result<Vec<u8>, ScanError> {
    let members = members(text, 0)?;
    let is_removed = |member: &Member| remove.iter().any(|name| member.is_named(text, name));
    let mut edits = Vec::new();
    remove_members(&members, &mut edits, is_removed);
    let mut appended = String::new();
    let mut keeps_any = members.iter().any(|member| !is_removed(member));
    for (name, value) in set {
        let mut is_present = false;
        for member in members.iter().filter(|member| member.is_named(text, name)) {
            is_present = true;
            if member.text(text) != value.as_bytes() {
                edits.push(Edit::replace(member.value.clone(), value.clone().into_bytes()));
            }
        }
        if !is_present {
            if keeps_any {
                appended.push(',');
            }
            keeps_any = true;
            appended.push_str(&serde_json::Value::from(*name).to_string());
            appended.push(':');
            appended.push_str(value);
        }
    }
    if !appended.is_empty() {
        let last = members.last().map_or(skip_space(text, 0) + 1, |member| member.value.end);
        edits.push(Edit::replace(last..last, appended.into_bytes()));
    }
    edits.sort_by_key(|edit| (edit.span.start, edit.span.end));
    Ok(apply(text, &edits))
}

/// A copy in which numbers that JSON or an `f64` cannot hold are `null`, for reading; `None` if there are none.
#[must_use]
pub fn without_bad_numbers(text: &[u8]) -> Option<Vec<u8>> {
    let mut edits = Vec::new();
    let mut at = 0;
    while at < text.len() {
        match text[at] {
            b'"' => at = skip_string(text, at).ok()?,
            b'N' | b'I' | b'-' | b'+' | b'0'..=b'9' => {
                let end = scalar_end(text, at);
                let number = std::str::from_utf8(&text[at..end]).ok()?;
                if !number.parse::<f64>().is_ok_and(f64::is_finite) {
                    edits.push(Edit::replace(at..end, &b"null"[..]));
                }
                at = end.max(at + 1);
            }
            b't' | b'f' | b'n' => at = scalar_end(text, at),
            _ => at += 1,
        }
    }
    (!edits.is_empty()).then(|| apply(text, &edits))
}

/// JSON text as one line, its values as they are.
#[must_use]
pub fn one_line(text: &[u8]) -> Bytes {
    let mut out = Vec::with_capacity(text.len());
    push_compact(&mut out, text);
    out.into()
}

/// Appends JSON text on one line: white space between values goes, and what a reader of lines could take for a line
/// end inside a string (control characters, U+0085, U+2028, U+2029) is escaped. Values stay the same.
pub fn push_compact(out: &mut Vec<u8>, text: &[u8]) {
    let mut is_string = false;
    let mut is_escaped = false;
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        let rest = &text[at..];
        let escape = match byte {
            _ if !is_string => None,
            0..=0x1f => Some((format!("\\u{byte:04x}"), 1)),
            0xc2 if rest.starts_with("\u{85}".as_bytes()) => Some(("\\u0085".to_owned(), 2)),
            0xe2 if rest.starts_with("\u{2028}".as_bytes()) => Some(("\\u2028".to_owned(), 3)),
            0xe2 if rest.starts_with("\u{2029}".as_bytes()) => Some(("\\u2029".to_owned(), 3)),
            _ => None,
        };
        if let Some((escape, length)) = escape {
            out.extend_from_slice(escape.as_bytes());
            is_escaped = false;
            at += length;
            continue;
        }
        if is_string {
            is_string = is_escaped || byte != b'"';
            is_escaped = byte == b'\\' && !is_escaped;
            out.push(byte);
        } else if !matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
            is_string = byte == b'"';
            out.push(byte);
        }
        at += 1;
    }
}

fn open(text: &[u8], at: usize, bracket: u8, expected: &'static str) -> Result<usize, ScanError> {
    let at = skip_space(text, at);
    if text.get(at) == Some(&bracket) {
        Ok(skip_space(text, at + 1))
    } else {
        Err(ScanError { expected, at })
    }
}

fn skip_value(text: &[u8], at: usize) -> Result<usize, ScanError> {
    match text.get(at) {
        Some(b'"') => skip_string(text, at),
        Some(b'{' | b'[') => skip_container(text, at),
        _ => {
            let end = scalar_end(text, at);
            if end == at { Err(ScanError { expected: "a value", at }) } else { Ok(end) }
        }
    }
}

fn skip_container(text: &[u8], start: usize) -> Result<usize, ScanError> {
    let mut depth = 0_usize;
    let mut at = start;
    while let Some(byte) = text.get(at) {
        match byte {
            b'"' => {
                at = skip_string(text, at)?;
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => {
                depth -= 1;
                if depth == 0 {
                    return Ok(at + 1);
                }
            }
            _ => {}
        }
        at += 1;
        at += distance(&text[at..], |byte| matches!(byte, b'"' | b'{' | b'}' | b'[' | b']'));
    }
    Err(ScanError { expected: "the end of a value", at })
}

fn skip_string(text: &[u8], start: usize) -> Result<usize, ScanError> {
    let mut at = start + 1;
    while at < text.len() {
        at += distance(&text[at..], |byte| matches!(byte, b'"' | b'\\'));
        match text.get(at) {
            Some(b'"') => return Ok(at + 1),
            Some(_) => at += 2,
            None => break,
        }
    }
    Err(ScanError { expected: "the end of a string", at: text.len() })
}

/// Bytes before the first that is wanted, all if none is. Blocks without one are passed with vector instructions.
#[inline(always)]
fn distance(text: &[u8], is_wanted: impl Fn(u8) -> bool + Copy) -> usize {
    let mut at = 0;
    while let Some(block) = text.get(at..at + 16) {
        if block.iter().fold(false, |any, byte| any | is_wanted(*byte)) {
            break;
        }
        at += 16;
    }
    text[at..].iter().position(|byte| is_wanted(*byte)).map_or(text.len(), |more| at + more)
}

fn scalar_end(text: &[u8], start: usize) -> usize {
    let is_end = |byte: &u8| matches!(byte, b',' | b'}' | b']' | b':' | b' ' | b'\t' | b'\n' | b'\r' | b'"');
    text[start..].iter().position(is_end).map_or(text.len(), |length| start + length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[ -~é\u{1F389}\\\\\"\n]{0,12}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 32, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::vec(("[a-e\\\\\"]{0,3}", inner), 0..5)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn cutting_then_parsing_equals_parsing_then_deleting(
            members_in in prop::collection::vec(("[a-f\\\\\"é]{1,2}", value()), 0..8),
            removed in prop::collection::vec(any::<bool>(), 8),
            is_pretty in any::<bool>(),
        ) {
            let object: Map<String, Value> = members_in.into_iter().collect();
            let text = if is_pretty {
                serde_json::to_vec_pretty(&object).unwrap()
            } else {
                serde_json::to_vec(&object).unwrap()
            };
            let names: Vec<&String> =
                object.keys().zip(&removed).filter(|(_, gone)| **gone).map(|(key, _)| key).collect();
            let spans = members(&text, 0).unwrap();
            prop_assert_eq!(spans.len(), object.len());
            let mut edits = Vec::new();
            remove_members(&spans, &mut edits, |m| names.iter().any(|name| m.is_named(&text, name)));
            let mut expected = object.clone();
            for name in &names {
                expected.shift_remove(*name);
            }
            let cut: Map<String, Value> = serde_json::from_slice(&apply(&text, &edits)).unwrap();
            prop_assert_eq!(&cut, &expected);
            if !is_pretty {
                prop_assert_eq!(apply(&text, &edits), serde_json::to_vec(&expected).unwrap());
            }
        }

        #[test]
        fn compact_text_is_one_line_with_the_same_value(value in value(), odd in "[\u{85}\u{2028}\u{2029}é]{0,4}") {
            let value = Value::from(vec![value, Value::from(odd)]);
            let mut out = Vec::new();
            push_compact(&mut out, &serde_json::to_vec_pretty(&value).unwrap());
            prop_assert_eq!(&serde_json::from_slice::<Value>(&out).unwrap(), &value);
            let text = String::from_utf8(out).unwrap();
            let has_line_end = text.contains(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']);
            prop_assert!(!has_line_end);
        }

        #[test]
        fn scanning_arbitrary_bytes_never_panics(text in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = members(&text, 0);
            let _ = elements(&text, 0);
            let _ = without_bad_numbers(&text);
            push_compact(&mut Vec::new(), &text);
        }
    }

    #[test]
    fn c07_numbers_that_are_not_json_become_null_in_the_copy_that_is_read() {
        let text = br#"{"a":-Infinity,"b":[NaN,1e999,-0.5,"NaN"],"c":null,"d":true}"#;
        let clean = without_bad_numbers(text).expect("bad numbers");
        assert_eq!(
            serde_json::from_slice::<Value>(&clean).expect("JSON"),
            serde_json::json!({"a": null, "b": [null, null, -0.5, "NaN"], "c": null, "d": true})
        );
        assert_eq!(without_bad_numbers(br#"{"a":-1.5e3,"b":"NaN"}"#), None);
    }

    #[test]
    fn a_removed_last_member_and_an_appended_one_do_not_collide() {
        let cases: [(&[u8], &str); 4] = [
            (br#"{"a":1,"x":2}"#, r#"{"a":1,"k":0}"#),
            (br#"{"x":2}"#, r#"{"k":0}"#),
            (br"{}", r#"{"k":0}"#),
            (br#"{"k":1,"x":2,"k":3}"#, r#"{"k":0,"k":0}"#),
        ];
        for (text, expected) in cases {
            let out = set_members(text, &[("k", "0".into())], &["x"]).expect("object");
            assert_eq!(String::from_utf8(out).expect("text"), expected);
        }
    }
}
