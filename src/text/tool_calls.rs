//! Tool calls in sampled text, in the form of Hermes and Qwen.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// A piece of a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolEvent {
    /// Content text.
    Text(String),
    /// A whole tool call.
    Call {
        /// Name of the function.
        name: String,
        /// The sampled bytes of its arguments, a JSON object.
        arguments: String,
    },
}

/// Streaming parser of `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>`.
///
/// A call is given once it is complete: until then nobody knows whether it is one, and what was sent as a call cannot
/// be taken back. What turns out not to be a call is given as text, markup included. The line break before a call's
/// markup and white space after it belong to the markup. At the end of the text a complete call counts without its
/// closing tag. A closing tag inside a string of the arguments does not end the call.
#[derive(Debug, Clone, Default)]
pub struct ToolCallParser {
    state: State,
    has_call: bool,
    /// Nothing but white space since the last call.
    is_after_call: bool,
}

#[derive(Debug, Clone)]
enum State {
    /// Text not given yet: what may be the beginning of a call's markup.
    Text { held: String },
    /// Within a call: `lead` is the white space before it, `body` what followed the opening tag.
    Call { lead: String, body: String, searched: usize },
}

impl Default for State {
    fn default() -> Self {
        Self::Text { held: String::new() }
    }
}

#[derive(Deserialize)]
struct CallBody<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    arguments: &'a RawValue,
}

enum Parsed {
    Call(ToolEvent),
    /// JSON that goes on after the end of the text.
    Unfinished,
    Malformed,
}

impl ToolCallParser {
    /// A parser at the beginning of a completion.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether a call has been given.
    #[must_use]
    pub fn has_call(&self) -> bool {
        self.has_call
    }

    /// Takes the next text; appends to `events` what is known by then.
    pub fn push(&mut self, text: &str, events: &mut Vec<ToolEvent>) {
        match &mut self.state {
            State::Text { held } => held.push_str(text),
            State::Call { body, .. } => body.push_str(text),
        }
        while self.advance(events) {}
    }

    /// The end of the completion: gives what was held back.
    pub fn finish(&mut self, events: &mut Vec<ToolEvent>) {
        // Text given back by a malformed call is read again, and may end within a call again.
        loop {
            match std::mem::take(&mut self.state) {
                State::Text { held } => {
                    if !(self.is_after_call && held.trim().is_empty()) {
                        push_text(events, &held);
                    }
                    return;
                }
                State::Call { lead, body, .. } => {
                    if let Parsed::Call(call) = parse(&body) {
                        events.push(call);
                        self.has_call = true;
                        self.is_after_call = true;
                        return;
                    }
                    self.give_back(&lead, &body, events);
                    while self.advance(events) {}
                }
            }
        }
    }

    /// One step; `true` if there may be more to do with the text at hand.
    fn advance(&mut self, events: &mut Vec<ToolEvent>) -> bool {
        match &mut self.state {
            State::Text { held } => {
                if let Some(at) = held.find(OPEN) {
                    let lead = lead_length(&held[..at], self.is_after_call);
                    self.is_after_call &= at == lead;
                    push_text(events, &held[..at - lead]);
                    let body = held[at + OPEN.len()..].to_owned();
                    let lead = held[at - lead..at].to_owned();
                    self.state = State::Call { lead, body, searched: 0 };
                    return true;
                }
                let text = &held[..held.len() - partial_tag(held)];
                let given = text.len() - lead_length(text, self.is_after_call);
                self.is_after_call &= given == 0;
                push_text(events, &held[..given]);
                held.drain(..given);
                false
            }
            State::Call { lead, body, searched } => {
                let Some(at) = body[*searched..].find(CLOSE).map(|at| at + *searched) else {
                    let mut from = body.len().saturating_sub(CLOSE.len() - 1).max(*searched);
                    while !body.is_char_boundary(from) {
                        from -= 1;
                    }
                    *searched = from;
                    return false;
                };
                match parse(&body[..at]) {
                    Parsed::Call(call) => {
                        events.push(call);
                        self.has_call = true;
                        self.is_after_call = true;
                        self.state = State::Text { held: body[at + CLOSE.len()..].to_owned() };
                    }
                    Parsed::Unfinished => *searched = at + CLOSE.len(),
                    Parsed::Malformed => {
                        let (lead, body) = (std::mem::take(lead), std::mem::take(body));
                        self.give_back(&lead, &body, events);
                    }
                }
                true
            }
        }
    }

    /// What looked like a call is text, up to its first closing tag; what follows is read again.
    fn give_back(&mut self, lead: &str, body: &str, events: &mut Vec<ToolEvent>) {
        let end = body.find(CLOSE).map_or(body.len(), |at| at + CLOSE.len());
        push_text(events, &format!("{lead}{OPEN}{}", &body[..end]));
        self.is_after_call = false;
        self.state = State::Text { held: body[end..].to_owned() };
    }
}

fn push_text(events: &mut Vec<ToolEvent>, text: &str) {
    if text.is_empty() {
        return;
    }
    if let Some(ToolEvent::Text(last)) = events.last_mut() {
        last.push_str(text);
    } else {
        events.push(ToolEvent::Text(text.to_owned()));
    }
}

/// How many bytes at the end of `text` belong to the markup of a call that may follow.
fn lead_length(text: &str, is_after_call: bool) -> usize {
    if is_after_call && text.trim().is_empty() { text.len() } else { usize::from(text.ends_with('\n')) }
}

/// How many bytes at the end of `text` may be the beginning of an opening tag.
fn partial_tag(text: &str) -> usize {
    (1..OPEN.len()).rev().find(|&length| text.ends_with(&OPEN[..length])).unwrap_or(0)
}

fn parse(body: &str) -> Parsed {
    match serde_json::from_str::<CallBody<'_>>(body.trim()) {
        Ok(call) if !call.name.is_empty() && call.arguments.get().starts_with('{') => {
            Parsed::Call(ToolEvent::Call {
                name: call.name.into_owned(),
                arguments: call.arguments.get().to_owned(),
            })
        }
        Err(error) if error.is_eof() => Parsed::Unfinished,
        Ok(_) | Err(_) => Parsed::Malformed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All text, and all calls, in order; neighbouring text joined.
    fn read<'a>(pieces: impl IntoIterator<Item = &'a str>) -> Vec<ToolEvent> {
        let mut parser = ToolCallParser::new();
        let mut all: Vec<ToolEvent> = Vec::new();
        let mut events = Vec::new();
        let mut collect = |events: &mut Vec<ToolEvent>| {
            for event in events.drain(..) {
                match event {
                    ToolEvent::Text(text) => push_text(&mut all, &text),
                    call => all.push(call),
                }
            }
        };
        for piece in pieces {
            parser.push(piece, &mut events);
            collect(&mut events);
        }
        parser.finish(&mut events);
        collect(&mut events);
        all
    }

    fn text(text: &str) -> ToolEvent {
        ToolEvent::Text(text.to_owned())
    }

    fn call(name: &str, arguments: &str) -> ToolEvent {
        ToolEvent::Call { name: name.to_owned(), arguments: arguments.to_owned() }
    }

    #[test]
    fn arguments_are_the_sampled_bytes() {
        let sampled = "Let me look.\n<tool_call>\n{\"name\": \"view\", \"arguments\": {\"a\" :1.0,  \"b\":\"\\u00e9\"} }\n</tool_call>\n                       <tool_call>\n{\"arguments\":{}, \"name\":\"run\"}\n</tool_call>\n";
        let expected =
            vec![text("Let me look."), call("view", "{\"a\" :1.0,  \"b\":\"\\u00e9\"}"), call("run", "{}")];
        assert_eq!(read([sampled]), expected);
    }

    #[test]
    fn what_is_not_a_call_stays_text() {
        for malformed in [
            "a\n<tool_call>\n{\"name\": \"view\"}\n</tool_call> b",
            "<tool_call>not JSON</tool_call>",
            "<tool_call></tool_call>",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": \"text\"}\n</tool_call>",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": ",
            "x < y <tool_cal",
            "</tool_call>",
            "\n",
        ] {
            assert_eq!(read([malformed]), vec![text(malformed)], "{malformed:?}");
        }
    }

    #[test]
    fn a_malformed_call_does_not_swallow_the_next() {
        let good = "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>";
        for bad in
            ["<tool_call></tool_call>", "<tool_call>{\"name\": \"x</tool_call>", "<tool_call>{{</tool_call>"]
        {
            assert_eq!(read([&format!("{bad}\n{good}")[..]]), vec![text(bad), call("f", "{}")], "{bad}");
        }
    }

    #[test]
    fn a_closing_tag_inside_a_string_does_not_end_the_call() {
        let sampled = "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":\"</tool_call>\"}}</tool_call>after";
        let expected = vec![call("f", "{\"a\":\"</tool_call>\"}"), text("after")];
        assert_eq!(read([sampled]), expected);
    }

    #[test]
    fn the_end_closes_a_complete_call() {
        assert_eq!(read(["<tool_call>\n{\"name\":\"f\",\"arguments\":{}}"]), vec![call("f", "{}")]);
    }

    fn fragment() -> impl Strategy<Value = &'static str> {
        prop::sample::select(vec![
            "<tool_call>",
            "</tool_call>",
            "\n",
            " ",
            "{\"name\":\"f\",\"arguments\":{}}",
            "{\"name\":\"é🎉\"",
            ",\"arguments\":{\"x\":\"",
            "\"}}",
            "<",
            "tool",
            "<tool_call>\n{\"name\":\"g\",\"arguments\":{\"a\":1}}\n</tool_call>",
            "text",
            "🎉",
        ])
    }

    proptest! {
        #[test]
        fn text_cut_at_every_boundary_parses_the_same(fragments in prop::collection::vec(fragment(), 0..12)) {
            let whole = fragments.concat();
            let expected = read([whole.as_str()]);
            let characters: Vec<String> = whole.chars().map(String::from).collect();
            prop_assert_eq!(&read(characters.iter().map(String::as_str)), &expected);
            for (at, _) in whole.char_indices() {
                prop_assert_eq!(&read([&whole[..at], &whole[at..]]), &expected);
            }
        }
    }
}
