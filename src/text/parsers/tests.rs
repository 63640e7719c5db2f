//! What must hold of every form: nothing lost, cuts do not matter, the work is linear.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn schemas() -> ToolSchemas {
    let parameters = json!({"type": "object", "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "list": {"type": "array"},
        "note": {"type": ["string", "null"]},
    }});
    ToolSchemas::new(&[json!({"type": "function", "function": {"name": "f", "parameters": parameters}})])
}

/// How a reply is read.
#[derive(Debug, Clone, Copy)]
struct Way {
    tools: Option<ToolForm>,
    reasoning: Option<ReasoningForm>,
    starts_in_reasoning: bool,
    is_whole: bool,
    needs_tokens: bool,
}

impl Way {
    fn of(tools: ToolForm) -> Self {
        Self {
            tools: Some(tools),
            reasoning: None,
            starts_in_reasoning: false,
            is_whole: false,
            needs_tokens: false,
        }
    }

    fn parser(self) -> ReplyParser {
        let parser = ReplyParser::new(self.tools, self.reasoning, self.starts_in_reasoning, &schemas());
        let parser = if self.is_whole { parser.with_whole_calls() } else { parser };
        if self.needs_tokens { parser.with_token_tags(|_| true) } else { parser }
    }

    /// All events, neighbouring ones of a kind joined.
    fn read<'a>(self, pieces: impl IntoIterator<Item = Piece<'a>>) -> Vec<ReplyEvent> {
        let mut parser = self.parser();
        let mut all = Vec::new();
        let mut events = Vec::new();
        for piece in pieces {
            parser.push(piece, &mut events);
            events.drain(..).for_each(|event| join(&mut all, event));
        }
        parser.finish(&mut events);
        events.drain(..).for_each(|event| join(&mut all, event));
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
                let value: Value = serde_json::from_str(&arguments).expect("arguments are JSON");
                assert!(value.is_object());
                let is_plain = matches!(way.tools, Some(ToolForm::Qwen3Coder | ToolForm::Glm45));
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

fn check(way: Way, sampled: &str) {
    let events = way.read([Piece::text(sampled)]);
    assert_eq!(restored(&events, sampled), sampled, "{way:?}");
    check_calls(way, &events, sampled);
    let characters: Vec<String> = sampled.chars().map(String::from).collect();
    let one_by_one = way.read(characters.iter().map(|text| Piece::text(text)));
    assert_eq!(one_by_one, events, "{way:?} {sampled:?}");
    for (at, _) in sampled.char_indices() {
        let cut = way.read([&sampled[..at], &sampled[at..]].map(Piece::text));
        assert_eq!(cut, events, "{way:?} {sampled:?} cut at {at}");
    }
    if !way.is_whole {
        check_whole(way, &events, sampled);
    }
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

/// What replies in a form are made of.
fn fragments(form: ToolForm) -> Vec<&'static str> {
    let own: &[&str] = match form {
        ToolForm::Hermes => &[
            "<tool_call>",
            "</tool_call>",
            "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":1}}\n</tool_call>",
            "{\"name\": \"f\", ",
            "\"arguments\":{\"text\":\"",
            "{\"arguments\": {}, \"name\": \"g\"}",
        ],
        ToolForm::Qwen3Coder => &[
            "<tool_call>",
            "</tool_call>",
            "<function=f>",
            "<parameter=text>",
            "<parameter=count>\n",
            "<parameter=note>",
            "</parameter>",
            "</function>",
            "None",
            "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>",
        ],
        ToolForm::Llama3Json => &[
            "<|python_tag|>",
            "{\"name\": \"f\", \"parameters\": {\"a\": 1}}",
            "{\"name\": \"f\", ",
            "\"parameters\": {",
            "; ",
            "{\"answer\": 1}",
        ],
        ToolForm::Mistral => &[
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "f{\"a\": 1}",
            " [{\"name\": \"f\", \"arguments\": {}}",
            ", ",
            "]",
            "{",
        ],
        ToolForm::DeepSeekV3 | ToolForm::DeepSeekV31 => &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "function",
            "f",
            "\n```json\n",
            "\n```",
            "{}",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
        ],
        ToolForm::KimiK2 => &[
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "functions.f:0",
            "{}",
            "<|tool_call_begin|>f:1<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|>",
        ],
        ToolForm::Glm45 => &[
            "<tool_call>",
            "</tool_call>",
            "<tool_call>f\n",
            "<arg_key>text</arg_key>\n",
            "<arg_key>count</arg_key>",
            "<arg_value>",
            "</arg_value>\n",
            "</arg_value>",
            "<arg_value>1</arg_value>",
            "True",
        ],
    };
    let common = ["<think>", "</think>", "\n", " ", "\"}}", "\"", "}", "<", "te\"xt\\", "é🎉", "\\u00e9"];
    own.iter().copied().chain(common).collect()
}

fn form() -> impl Strategy<Value = ToolForm> {
    prop::sample::select(ToolForm::ALL.to_vec())
}

fn way() -> impl Strategy<Value = Way> {
    (form(), prop::option::of(prop::sample::select(ReasoningForm::ALL.to_vec())), any::<bool>()).prop_map(
        |(tools, reasoning, starts_in_reasoning)| Way { reasoning, starts_in_reasoning, ..Way::of(tools) },
    )
}

fn way_and_parts() -> impl Strategy<Value = (Way, Vec<&'static str>)> {
    way().prop_flat_map(|way| {
        let part = prop::sample::select(fragments(way.tools.expect("a form")));
        (Just(way), prop::collection::vec(part, 0..14))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_and_cuts_do_not_matter((way, parts) in way_and_parts()) {
        check(way, &parts.concat());
    }

    #[test]
    fn with_tokens_nothing_is_lost_either((way, parts) in way_and_parts(), controls in any::<u16>()) {
        let way = Way { needs_tokens: true, ..way };
        let pieces: Vec<Piece<'_>> = parts
            .iter()
            .enumerate()
            .map(|(at, text)| Piece { text, is_control: controls >> at & 1 == 1 })
            .collect();
        let sampled = parts.concat();
        let events = way.read(pieces.iter().copied());
        prop_assert_eq!(restored(&events, &sampled), sampled.as_str());
        check_calls(way, &events, &sampled);
        // Ordinary tokens may be cut, control tokens are whole.
        let characters = |piece: &Piece<'static>| match piece.is_control {
            true => vec![piece.text.to_owned()],
            false => piece.text.chars().map(String::from).collect(),
        };
        let cut: Vec<(String, bool)> = pieces
            .iter()
            .flat_map(|piece| characters(piece).into_iter().map(|text| (text, piece.is_control)))
            .collect();
        let again = way.read(cut.iter().map(|(text, is_control)| Piece { text, is_control: *is_control }));
        prop_assert_eq!(again, events);
    }
}

/// Bytes that the parser looked at or moved, for each byte of the text.
fn work(way: Way, sampled: &str) -> f64 {
    let mut parser = way.parser();
    let mut events = Vec::new();
    let mut from = 0;
    while from < sampled.len() {
        let end =
            (from + 4..=sampled.len()).find(|at| sampled.is_char_boundary(*at)).unwrap_or(sampled.len());
        parser.push(Piece::text(&sampled[from..end]), &mut events);
        events.clear();
        from = end;
    }
    parser.finish(&mut events);
    parser.work() as f64 / sampled.len() as f64
}

#[test]
fn the_work_is_linear() {
    let long = "a b\\n".repeat(40_000);
    let plain = "<a> b\n<".repeat(30_000);
    let space = "\n ".repeat(100_000);
    let call = |form: ToolForm, value: &str| match form {
        ToolForm::Hermes => {
            format!(
                "<tool_call>\n{{\"name\": \"f\", \"arguments\": {{\"text\": \"{value}\"}}}}\n</tool_call>"
            )
        }
        ToolForm::Qwen3Coder => format!(
            "<tool_call>\n<function=f>\n<parameter=text>\n{value}\n</parameter>\n</function>\n</tool_call>"
        ),
        ToolForm::Llama3Json => format!("{{\"name\": \"f\", \"parameters\": {{\"text\": \"{value}\"}}}}"),
        ToolForm::Mistral => format!("[TOOL_CALLS]f[ARGS]{{\"text\": \"{value}\"}}"),
        ToolForm::DeepSeekV3 => format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{{\"text\": \"{value}\"}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        ToolForm::DeepSeekV31 => format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{{\"text\": \"{value}\"}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        ToolForm::KimiK2 => format!(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{{\"text\": \"{value}\"}}<|tool_call_end|><|tool_calls_section_end|>"
        ),
        ToolForm::Glm45 => {
            format!("<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>")
        }
    };
    for form in ToolForm::ALL {
        let way = Way { reasoning: Some(ReasoningForm::Qwen3), ..Way::of(form) };
        let whole = call(form, &long);
        let ended = |events: &[ReplyEvent]| events.iter().any(|e| matches!(e, ReplyEvent::CallEnd { .. }));
        assert!(ended(&way.read([Piece::text(&whole)])), "{form:?}");
        let texts = [
            whole.clone(),
            // Never closed; malformed ones in a row; text that looks like markup; white space.
            whole[..whole.len() - 30].to_owned(),
            call(form, &space),
            call(form, &plain),
            plain.clone(),
            format!("{}{space}", call(form, "a")),
            format!("{}{space}b", call(form, "a")),
            space.clone(),
            format!("<think>{long}{plain}{space}"),
            call(form, "a").repeat(1000),
            call(form, "\n").repeat(1000),
            call(form, "a")[..20].repeat(5000),
        ];
        for (number, text) in texts.iter().enumerate() {
            let work = work(way, text);
            assert!(work < 40.0, "{form:?}, text {number}: {work} bytes of work a byte");
        }
    }
}

/// What reading a long text in one piece costs does not depend on how much of it is malformed.
#[test]
fn one_long_piece_is_linear_too() {
    for form in ToolForm::ALL {
        for fragment in fragments(form) {
            for other in fragments(form) {
                let text = format!("{fragment}{other}").repeat(3000);
                let mut parser = Way::of(form).parser();
                let mut events = Vec::new();
                parser.push(Piece::text(&text), &mut events);
                parser.finish(&mut events);
                let work = parser.work() as f64 / text.len() as f64;
                assert!(work < 10.0, "{form:?} {fragment:?} {other:?}: {work}");
            }
        }
    }
}
