//! Sampled text to events, a target a form of tool calls.

use lego::text::parsers::{Piece, ReasoningForm, ReplyEvent, ReplyParser, ToolForm, ToolSchemas};
use serde::de::IgnoredAny;
use serde_json::json;

use super::{hash, pieces};

pub fn reply_hermes(data: &[u8]) {
    reply(ToolForm::Hermes, data);
}

pub fn reply_qwen3_coder(data: &[u8]) {
    reply(ToolForm::Qwen3Coder, data);
}

pub fn reply_llama3_json(data: &[u8]) {
    reply(ToolForm::Llama3Json, data);
}

pub fn reply_mistral(data: &[u8]) {
    reply(ToolForm::Mistral, data);
}

pub fn reply_deepseek_v3(data: &[u8]) {
    reply(ToolForm::DeepSeekV3, data);
}

pub fn reply_deepseek_v31(data: &[u8]) {
    reply(ToolForm::DeepSeekV31, data);
}

pub fn reply_kimi_k2(data: &[u8]) {
    reply(ToolForm::KimiK2, data);
}

pub fn reply_glm45(data: &[u8]) {
    reply(ToolForm::Glm45, data);
}

pub fn reply_openai(data: &[u8]) {
    reply(ToolForm::Harmony, data);
}

/// Nothing is lost, cuts do not matter, calls are well-formed, the work is linear; which reasoning, and which pieces are
/// control tokens, the bytes decide.
fn reply(form: ToolForm, data: &[u8]) {
    let sampled = String::from_utf8_lossy(data);
    let bits = hash(data);
    let reasoning = ReasoningForm::ALL.get(bits as usize % 8).copied();
    let way = Way { reasoning, starts_in_reasoning: bits >> 8 & 1 == 1, ..Way::of(form) };
    check(way, &sampled);
    let (mut end, mut from) = (0, 0);
    let mut cut = Vec::new();
    for piece in pieces(sampled.as_bytes()) {
        end += piece.len();
        let to = (end..).find(|at| sampled.is_char_boundary(*at)).expect("the end is a boundary");
        cut.push(Piece::text(&sampled[from..to]));
        from = to;
    }
    assert_eq!(way.read(cut), way.read([Piece::text(&sampled)]));
    check_tokens(way, &tags_apart(&sampled, bits >> 16));
}

/// The text with what may be tags as pieces of their own, some of them as control tokens.
fn tags_apart(sampled: &str, bits: u64) -> Vec<Piece<'_>> {
    let ends = sampled.char_indices().filter(|(_, c)| matches!(c, '>' | ']')).map(|(at, _)| at + 1);
    let starts = sampled.char_indices().filter(|(_, c)| matches!(c, '<' | '[')).map(|(at, _)| at);
    let mut cuts: Vec<usize> = ends.chain(starts).chain([0, sampled.len()]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let spans = cuts.windows(2).enumerate();
    spans
        .map(|(number, span)| {
            let text = &sampled[span[0]..span[1]];
            let is_tag = text.starts_with(['<', '[']) && text.ends_with(['>', ']']);
            Piece { text, is_control: is_tag && bits >> (number % 48) & 1 == 0 }
        })
        .collect()
}

/// Bytes that reading may look at or move, for each byte of the text: with each character its own piece, a beginning of
/// a tag is looked at again with each.
const MOST_WORK: usize = 50;

fn schemas() -> ToolSchemas {
    let parameters = json!({"type": "object", "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "list": {"type": "array"},
        "note": {"type": ["string", "null"]},
    }});
    ToolSchemas::new(&[json!({"type": "function", "function": {"name": "f", "parameters": parameters}})])
}

/// How a reply is read.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    pub tools: ToolForm,
    pub reasoning: Option<ReasoningForm>,
    pub starts_in_reasoning: bool,
    pub is_whole: bool,
    pub needs_tokens: bool,
}

impl Way {
    pub fn of(tools: ToolForm) -> Self {
        Self { tools, reasoning: None, starts_in_reasoning: false, is_whole: false, needs_tokens: false }
    }

    pub fn parser(self) -> ReplyParser {
        let parser = ReplyParser::new(Some(self.tools), self.reasoning, self.starts_in_reasoning, &schemas());
        let parser = if self.is_whole { parser.with_whole_calls() } else { parser };
        if self.needs_tokens { parser.with_token_tags(|_| true) } else { parser }
    }

    /// All events, neighbouring ones of a kind joined.
    pub fn read<'a>(self, pieces: impl IntoIterator<Item = Piece<'a>>) -> Vec<ReplyEvent> {
        let mut parser = self.parser();
        let mut all = Vec::new();
        let mut events = Vec::new();
        let mut bytes = 0;
        for piece in pieces {
            bytes += piece.text.len();
            parser.push(piece, &mut events);
            events.drain(..).for_each(|event| join(&mut all, event));
        }
        parser.finish(&mut events);
        events.drain(..).for_each(|event| join(&mut all, event));
        assert!(parser.work() <= MOST_WORK * bytes, "{} for {bytes} bytes", parser.work());
        all
    }
}

fn join(all: &mut Vec<ReplyEvent>, event: ReplyEvent) {
    match (all.last_mut(), event) {
        (Some(ReplyEvent::Text(last)), ReplyEvent::Text(text))
        | (Some(ReplyEvent::Reasoning(last)), ReplyEvent::Reasoning(text))
        | (Some(ReplyEvent::Markup(last)), ReplyEvent::Markup(text)) => last.push_str(&text),
        (
            Some(ReplyEvent::CallArguments { index: last_index, text: last }),
            ReplyEvent::CallArguments { index, text },
        ) if *last_index == index => last.push_str(&text),
        (_, event) => all.push(event),
    }
}

/// The sampled text that the events stand for. Calls are cut out of `sampled` by their spans.
fn restored(events: &[ReplyEvent], sampled: &str) -> String {
    let mut text = String::new();
    for event in events {
        match event {
            ReplyEvent::Text(part) | ReplyEvent::Reasoning(part) | ReplyEvent::Markup(part) => text += part,
            ReplyEvent::CallEnd { span, .. } => {
                assert_eq!(span.start, text.len());
                text += &sampled[span.clone()];
            }
            ReplyEvent::Malformed { span, raw, .. } => {
                assert_eq!(span.start, text.len());
                assert_eq!(raw, &sampled[span.clone()]);
                text += raw;
            }
            ReplyEvent::CallStart { .. } | ReplyEvent::CallArguments { .. } => {}
        }
    }
    text
}

/// Calls start, get arguments and end in order; ended ones have a JSON object, in the JSON forms sampled bytes.
fn check_calls(way: Way, events: &[ReplyEvent], sampled: &str) {
    let mut open: Option<(u32, String)> = None;
    let mut next = 0;
    for event in events {
        match event {
            ReplyEvent::CallStart { index, name, .. } => {
                assert!(open.is_none() && *index == next && !name.is_empty(), "{events:?}");
                open = Some((*index, String::new()));
                next += 1;
            }
            ReplyEvent::CallArguments { index, text } => {
                let (open, arguments) = open.as_mut().expect("a call has begun");
                assert_eq!(open, index);
                *arguments += text;
            }
            ReplyEvent::CallEnd { index, span } => {
                let (open, arguments) = open.take().expect("a call has begun");
                assert_eq!(open, *index);
                // Of any size: 1e999 is a number too.
                serde_json::from_str::<IgnoredAny>(&arguments).expect("arguments are JSON");
                assert!(arguments.trim_start().starts_with('{'));
                let is_plain = matches!(way.tools, ToolForm::Qwen3Coder | ToolForm::Glm45);
                assert!(is_plain || sampled[span.clone()].contains(&arguments), "{arguments} of {sampled}");
            }
            ReplyEvent::Malformed { index, .. } => {
                assert_eq!(*index, open.take().map(|(index, _)| index));
                assert!(!way.is_whole || index.is_none());
            }
            _ => assert!(open.is_none(), "nothing comes within a call"),
        }
    }
    assert!(open.is_none(), "a call ends or is malformed: {events:?}");
}

/// What must hold of a reply as text.
pub fn check(way: Way, sampled: &str) {
    let events = way.read([Piece::text(sampled)]);
    assert_eq!(restored(&events, sampled), sampled, "{way:?}");
    check_calls(way, &events, sampled);
    let characters: Vec<&str> =
        sampled.char_indices().map(|(at, c)| &sampled[at..at + c.len_utf8()]).collect();
    let one_by_one = way.read(characters.iter().map(|text| Piece::text(text)));
    assert_eq!(one_by_one, events, "{way:?} {sampled:?}");
    check_whole(way, &events, sampled);
}

/// What must hold of a reply whose control tokens are known. Ordinary tokens may be cut, control tokens are whole.
pub fn check_tokens(way: Way, pieces: &[Piece<'_>]) {
    let way = Way { needs_tokens: true, ..way };
    let sampled: String = pieces.iter().map(|piece| piece.text).collect();
    let events = way.read(pieces.iter().copied());
    assert_eq!(restored(&events, &sampled), sampled, "{way:?}");
    check_calls(way, &events, &sampled);
    let characters = pieces.iter().flat_map(|piece| {
        let cut = piece.text.char_indices().filter(|_| !piece.is_control);
        let cut = cut.map(|(at, c)| Piece::text(&piece.text[at..at + c.len_utf8()]));
        cut.chain(Some(*piece).filter(|piece| piece.is_control))
    });
    assert_eq!(way.read(characters), events, "{way:?} {pieces:?}");
}

/// Whole calls are the streamed ones that end; the rest is the same but for their numbers.
fn check_whole(way: Way, streamed: &[ReplyEvent], sampled: &str) {
    let whole = Way { is_whole: true, ..way };
    let events = whole.read([Piece::text(sampled)]);
    assert_eq!(restored(&events, sampled), sampled, "{way:?}");
    check_calls(whole, &events, sampled);
    let ends = |events: &[ReplyEvent]| -> Vec<_> {
        let span = |event: &ReplyEvent| match event {
            ReplyEvent::CallEnd { span, .. } => Some((span.clone(), None)),
            ReplyEvent::Malformed { span, what, .. } => Some((span.clone(), Some(*what))),
            _ => None,
        };
        events.iter().filter_map(span).collect()
    };
    assert_eq!(ends(&events), ends(streamed));
}
