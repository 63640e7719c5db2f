//! Replies as models write them, to reasoning, content and calls: a table of texts with their events, and what the chat
//! templates of real models render.

use std::path::{Path, PathBuf};

use lego::text::parsers::{Forms, Piece, ReasoningForm, ReplyEvent, ReplyParser, ToolForm, ToolSchemas};
use lego::text::{Decoder, Tokenizer};
use serde_json::{Value, json};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text")
}

fn table() -> Vec<Value> {
    let text = std::fs::read(folder().join("replies.json")).expect("fixture");
    serde_json::from_slice(&text).expect("a list")
}

fn parser(case: &Value) -> ReplyParser {
    let tools: Option<ToolForm> = case["tools"].as_str().map(|name| name.parse().expect("a form"));
    let reasoning: Option<ReasoningForm> =
        case["reasoning"].as_str().map(|name| name.parse().expect("a form"));
    let parameters = json!({"type": "object", "properties": case["schema"]});
    let declared = [json!({"type": "function", "function": {"name": "f", "parameters": parameters}})];
    ReplyParser::new(tools, reasoning, case["starts_in_reasoning"] == true, &ToolSchemas::new(&declared))
}

/// The events as the table writes them: neighbours joined, a call that ended as one entry.
fn read<'a>(mut parser: ReplyParser, pieces: impl IntoIterator<Item = Piece<'a>>) -> Vec<Value> {
    let mut events = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut events);
    }
    parser.finish(&mut events);
    let mut all: Vec<Value> = Vec::new();
    let mut call: Option<(String, Option<String>, String)> = None;
    let join = |all: &mut Vec<Value>, kind: &str, text: &str| match all.last_mut() {
        Some(last) if last[0] == kind => {
            last[1] = Value::from(format!("{}{text}", last[1].as_str().expect("text")))
        }
        _ => all.push(json!([kind, text])),
    };
    for event in events {
        match event {
            ReplyEvent::Text(text) => join(&mut all, "text", &text),
            ReplyEvent::Reasoning(text) => join(&mut all, "reasoning", &text),
            ReplyEvent::Markup(text) => join(&mut all, "markup", &text),
            ReplyEvent::CallStart { id, name, .. } => call = Some((name, id, String::new())),
            ReplyEvent::CallArguments { text, .. } => call.as_mut().expect("begun").2 += &text,
            ReplyEvent::CallEnd { .. } => {
                let (name, id, arguments) = call.take().expect("begun");
                all.push(id.map_or_else(
                    || json!(["call", name, arguments]),
                    |id| json!(["call", name, arguments, id]),
                ));
            }
            ReplyEvent::Malformed { raw, what, .. } => {
                all.push(json!(["malformed", raw, what.to_string(), call.take().is_some()]));
            }
        }
    }
    all
}

#[test]
fn replies_are_read_as_the_table_says() {
    let table = table();
    assert!(table.len() > 70);
    for form in ToolForm::ALL {
        assert!(table.iter().filter(|case| case["tools"] == form.name()).count() > 3, "{form:?}");
    }
    for case in &table {
        let (name, text) = (case["name"].as_str().expect("name"), case["text"].as_str().expect("text"));
        let whole = read(parser(case), [Piece::text(text)]);
        assert_eq!(Value::from(whole), case["events"], "{name}");
        for (at, _) in text.char_indices() {
            let cut = read(parser(case), [&text[..at], &text[at..]].map(Piece::text));
            assert_eq!(Value::from(cut), case["events"], "{name}, cut at {at}");
        }
    }
}

/// What is given as whole calls is what is streamed, but for calls that have begun and turn out malformed.
#[test]
fn whole_calls_are_the_streamed_ones() {
    for case in &table() {
        let text = case["text"].as_str().expect("text");
        let mut expected = case["events"].clone();
        for event in expected.as_array_mut().expect("events").iter_mut().filter(|e| e[0] == "malformed") {
            event[3] = json!(false);
        }
        let whole = read(parser(case).with_whole_calls(), text.split_inclusive(' ').map(Piece::text));
        assert_eq!(Value::from(whole), expected, "{}", case["name"]);
    }
}

/// The tokens of a text: their texts, and whether they are control tokens.
fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<(String, bool)> {
    let mut decoder = Decoder::new(false);
    let mut pieces = Vec::new();
    for id in tokenizer.encode(text).expect("encodes") {
        let mut piece = String::new();
        decoder.push(tokenizer, id, &mut piece);
        pieces.push((piece, tokenizer.is_control(id)));
    }
    pieces
}

#[test]
fn tokens_are_read_as_their_text_is() {
    let tokenizer = Tokenizer::load(&folder()).expect("tokenizer");
    assert!(tokenizer.token_to_id("<tool_call>").is_some());
    for case in &table() {
        let tokens = tokens(&tokenizer, case["text"].as_str().expect("text"));
        let pieces = || tokens.iter().map(|(text, is_control)| Piece { text, is_control: *is_control });
        assert_eq!(Value::from(read(parser(case), pieces())), case["events"], "{}", case["name"]);
        // In these texts the tokenizer makes tokens of tags that were not meant as such.
        if case["tags_are_not_all_tokens"] != true {
            let exact = parser(case).with_token_tags(|tag| tokenizer.token_to_id(tag).is_some());
            assert_eq!(Value::from(read(exact, pieces())), case["events"], "{}", case["name"]);
        }
    }
}

#[test]
fn tags_in_ordinary_tokens_are_text_where_tokens_are_known() {
    let control = |text| Piece::control(text);
    let parser = |tools| {
        ReplyParser::new(Some(tools), Some(ReasoningForm::Qwen3), false, &ToolSchemas::default())
            .with_token_tags(|tag| tag != "<function=")
    };
    let call = "{\"name\":\"f\",\"arguments\":{}}";
    let pieces = [
        Piece::text("<think>"),
        Piece::text(" and <tool_call>"),
        Piece::text(call),
        Piece::text("</tool_call>\n"),
        control("<tool_call>"),
        Piece::text(call),
        control("</tool_call>"),
    ];
    let expected =
        json!([["text", format!("<think> and <tool_call>{call}</tool_call>")], ["call", "f", "{}"]]);
    assert_eq!(Value::from(read(parser(ToolForm::Hermes), pieces)), expected);

    // A file about the form, in a value; and a reply whose reasoning speaks of the closing tag.
    let pieces = [
        control("<think>"),
        Piece::text("close with </think>\n"),
        control("</think>"),
        Piece::text("\n\n"),
        control("<tool_call>"),
        Piece::text("f\n"),
        control("<arg_key>"),
        Piece::text("text"),
        control("</arg_key>"),
        control("<arg_value>"),
        Piece::text("a</arg_value></tool_call> b"),
        control("</arg_value>"),
        control("</tool_call>"),
    ];
    let expected = json!([
        ["markup", "<think>"],
        ["reasoning", "close with </think>"],
        ["markup", "\n</think>\n\n"],
        ["call", "f", "{\"text\": \"a</arg_value></tool_call> b\"}"],
    ]);
    assert_eq!(Value::from(read(parser(ToolForm::Glm45), pieces)), expected);

    // A closing token cannot stand within JSON: the call is broken there, and the next one is not swallowed.
    let pieces = [
        control("<tool_call>"),
        Piece::text("{\"name\":\"f\",\"arguments\":{\"a\":\"b"),
        control("</tool_call>"),
        control("<tool_call>"),
        Piece::text(call),
        control("</tool_call>"),
    ];
    let expected = json!([
        ["malformed", "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":\"b", "the call is not JSON", true],
        ["text", "</tool_call>"],
        ["call", "f", "{}"],
    ]);
    assert_eq!(Value::from(read(parser(ToolForm::Hermes), pieces)), expected);
}

#[test]
fn names_are_vllms() {
    for form in ToolForm::ALL {
        assert_eq!(form.name().parse(), Ok(form));
    }
    for form in ReasoningForm::ALL {
        assert_eq!(form.name().parse(), Ok(form));
    }
    let error = "pythonic".parse::<ToolForm>().expect_err("unknown").to_string();
    assert_eq!(
        error,
        "\"pythonic\" is not a parser that lego has; give one of hermes, qwen3_coder, llama3_json, mistral, \
         deepseek_v3, deepseek_v31, kimi_k2, glm45"
    );
}

#[test]
fn forms_are_recognised_in_templates() {
    let kimi = "{{'<|tool_calls_section_begin|>'}}<|tool_call_begin|>";
    let v31 =
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments </think> <think>";
    for (source, tools, reasoning) in [
        (kimi, Some(ToolForm::KimiK2), None),
        (v31, Some(ToolForm::DeepSeekV31), Some(ReasoningForm::DeepSeekR1)),
        ("[TOOL_CALLS] [THINK] [/THINK]", Some(ToolForm::Mistral), Some(ReasoningForm::Mistral)),
        ("<|im_start|>{{ message.content }}", None, None),
    ] {
        assert_eq!(Forms::of_template(source), Forms { tools, reasoning }, "{source}");
    }
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/lego-tiny/chat_template.jinja");
    let tiny = std::fs::read_to_string(tiny).expect("template");
    assert_eq!(Forms::of_template(&tiny), Forms { tools: Some(ToolForm::Hermes), reasoning: None });
    for prompt in ["a<think>\n", "a<think>", "a</think><think>\n\n"] {
        assert!(ReasoningForm::Qwen3.is_open_at_end(prompt), "{prompt:?}");
    }
    for prompt in ["a", "<think>\n\n</think>\n\n", "<think> a"] {
        assert!(!ReasoningForm::Qwen3.is_open_at_end(prompt), "{prompt:?}");
    }
}
