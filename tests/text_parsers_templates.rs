//! Assistant turns that the chat templates of real models render, read back: the same reasoning, content and calls. The
//! templates are third-party texts in `../shared`; without them this skips.

use std::path::Path;

use lego::text::parsers::{Forms, Piece, ReplyEvent, ReplyParser, ToolForm, ToolSchemas};
use lego::text::{ChatInput, ChatTemplate};
use serde_json::{Map, Value, json};

/// What begins and what ends an assistant's turn, in the families of templates that have a form.
const TURNS: [(&str, &[&str]); 4] = [
    ("<|im_start|>assistant\n", &["<|im_end|>"]),
    ("<|start_header_id|>assistant<|end_header_id|>\n\n", &["<|eot_id|>"]),
    ("<|assistant|>", &["<|observation|>", "<|user|>"]),
    ("<｜Assistant｜>", &["<｜end▁of▁sentence｜>"]),
];

fn golden() -> Option<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/golden/chat_templates.json");
    let Ok(bytes) = std::fs::read(&path) else {
        println!("skipped: {} is not there", path.display());
        return None;
    };
    Some(serde_json::from_slice(&bytes).expect("JSON"))
}

/// The assistant's turns of a rendering.
fn turns(rendered: &str) -> Vec<&str> {
    let Some((begin, ends)) = TURNS.iter().find(|(begin, _)| rendered.contains(begin)) else {
        return Vec::new();
    };
    let turns = rendered.split(begin).skip(1);
    turns
        .map(|turn| &turn[..ends.iter().filter_map(|end| turn.find(end)).min().unwrap_or(turn.len())])
        .collect()
}

#[derive(Debug, Default, PartialEq)]
struct Reply {
    reasoning: String,
    text: String,
    calls: Vec<(String, Value)>,
    malformed: usize,
}

fn read(forms: Forms, schemas: &ToolSchemas, turn: &str) -> Reply {
    let mut parser = ReplyParser::new(forms.tools, forms.reasoning, false, schemas);
    let mut events = Vec::new();
    for (at, character) in turn.char_indices() {
        parser.push(Piece::text(&turn[at..at + character.len_utf8()]), &mut events);
    }
    parser.finish(&mut events);
    let mut reply = Reply::default();
    let mut arguments = String::new();
    for event in events {
        match event {
            ReplyEvent::Reasoning(text) => reply.reasoning += &text,
            ReplyEvent::Text(text) => reply.text += &text,
            ReplyEvent::CallStart { name, .. } => reply.calls.push((name, Value::Null)),
            ReplyEvent::CallArguments { text, .. } => arguments += &text,
            ReplyEvent::CallEnd { .. } => {
                let parsed = serde_json::from_str(&std::mem::take(&mut arguments)).expect("JSON");
                reply.calls.last_mut().expect("begun").1 = parsed;
            }
            ReplyEvent::Malformed { .. } => reply.malformed += 1,
            ReplyEvent::Markup(_) => {}
        }
    }
    reply
}

fn is_training(name: &str) -> bool {
    name.ends_with("_training")
}

#[test]
fn rendered_turns_are_read_back() {
    let Some(golden) = golden() else { return };
    let mut read_back: Vec<(&str, ToolForm)> = Vec::new();
    for case in golden["cases"].as_array().expect("cases") {
        let name = case["tpl"].as_str().expect("name");
        let source = golden["templates"][name].as_str().expect("source");
        let forms = Forms::of_template(source);
        let (Some(form), Some(rendered)) = (forms.tools, case["ok"].as_str()) else { continue };
        if case["gen"] == true {
            // The prompt's last turn is not a reply.
            continue;
        }
        let declared = case["ctx"]["tools"].as_array().cloned().unwrap_or_default();
        let messages = case["ctx"]["messages"].as_array().expect("messages");
        let spoken = messages.iter().filter(|message| message["role"] == "assistant");
        for (message, turn) in spoken.zip(turns(rendered)) {
            let reply = read(forms, &ToolSchemas::new(&declared), turn);
            assert_eq!(reply.malformed, 0, "{name}: {turn}");
            let calls: Vec<(String, Value)> = message["tool_calls"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|call| {
                    let function = &call["function"];
                    (function["name"].as_str().expect("name").to_owned(), function["arguments"].clone())
                })
                .collect();
            // R1's template leaves out calls beside content; only the schema tells a number from its digits.
            let has_calls = turn.contains("run_shell");
            if has_calls && (!declared.is_empty() || form != ToolForm::Qwen3Coder) {
                assert_eq!(reply.calls, calls, "{name}: {turn}");
                read_back.push((name, form));
            }
            // Content may hold its reasoning itself; templates cut it off, or write it where it belongs.
            let content = message["content"].as_str().unwrap_or_default();
            let (thought, said) = match content.split_once("</think>").filter(|_| forms.reasoning.is_some()) {
                Some((thought, said)) => (thought.strip_prefix("<think>"), said),
                None => (message["reasoning_content"].as_str(), content),
            };
            // Some write a block of their own before content that holds one.
            let is_said = [said.trim(), content.trim()].contains(&reply.text.trim());
            assert!(is_said, "{name}: {turn:?} gave {:?}", reply.text);
            if !reply.reasoning.trim().is_empty() {
                assert_eq!(Some(reply.reasoning.trim()), thought.map(str::trim), "{name}");
            }
        }
    }
    for form in [ToolForm::Hermes, ToolForm::Qwen3Coder, ToolForm::Llama3Json, ToolForm::Glm45] {
        assert!(read_back.iter().filter(|(_, read)| *read == form).count() >= 8, "{form:?}");
    }
    let mut names: Vec<&str> = read_back.into_iter().map(|(name, _)| name).collect();
    names.sort_unstable();
    names.dedup();
    assert!(names.len() >= 20, "{names:?}");
}

/// Arguments as the texts that were sampled: where a template prints them as they are, the same bytes come back.
#[test]
fn sampled_arguments_come_back() {
    let Some(golden) = golden() else { return };
    let arguments = r#"{"cmd": "ls \"a\" <b> é\n",  "env":[] ,"timeout":2.50}"#;
    let call = json!({"type": "function", "function": {"name": "run_shell", "arguments": arguments}});
    let mut read_back = Vec::new();
    for (name, source) in golden["templates"].as_object().expect("templates") {
        let source = source.as_str().expect("source");
        let forms = Forms::of_template(source);
        let prints_text =
            source.contains("arguments'] +") || source.contains("tool_call.arguments is string");
        if is_training(name) || forms.tools.is_none() || !prints_text {
            continue;
        }
        let template = ChatTemplate::from_source(source, Map::new()).expect("parses");
        // R1's template writes calls only without content, and two at least.
        let content = if name.contains("r1") { Value::Null } else { json!("Look.") };
        let messages = [
            json!({"role": "user", "content": "list"}),
            json!({"role": "assistant", "content": content, "tool_calls": [call, call]}),
        ];
        let input = ChatInput {
            messages: &messages,
            tools: None,
            add_generation_prompt: false,
            template_kwargs: None,
        };
        let rendered = template.render_input(&input).expect("renders");
        let turn = turns(&rendered)[0];
        let mut parser = ReplyParser::new(forms.tools, forms.reasoning, false, &ToolSchemas::default());
        let mut events = Vec::new();
        parser.push(Piece::text(turn), &mut events);
        parser.finish(&mut events);
        let given = events.iter().filter_map(|event| match event {
            ReplyEvent::CallArguments { text, .. } => Some(text.as_str()),
            _ => None,
        });
        assert_eq!(given.collect::<Vec<_>>(), [arguments, arguments], "{name}: {turn}");
        assert_eq!(parser.calls(), 2, "{name}");
        read_back.push((name.as_str(), forms.tools));
    }
    assert!(read_back.iter().any(|(_, form)| *form == Some(ToolForm::DeepSeekV3)), "{read_back:?}");
    assert!(read_back.len() >= 5, "{read_back:?}");
}

/// Which form each template shows.
#[test]
fn templates_show_their_forms() {
    let Some(golden) = golden() else { return };
    for (name, source) in golden["templates"].as_object().expect("templates") {
        let forms = Forms::of_template(source.as_str().expect("source"));
        let tools = forms.tools.map(ToolForm::name);
        let base = name.trim_end_matches("_training").trim_start_matches("npm_");
        let expected = match base {
            "qwen2_5" | "qwen3" | "qwen3_instruct_2507" | "qwen3_vl" => Some("hermes"),
            name if name.starts_with("qwen3_") || name.starts_with("nemotron_3_") => Some("qwen3_coder"),
            "llama3_1" | "llama3_2" if !name.starts_with("npm_") => Some("llama3_json"),
            "deepseekv3" | "deepseek_r1_distill" => Some("deepseek_v3"),
            "glm4moe" => Some("glm45"),
            _ => None,
        };
        assert_eq!(tools, expected, "{name}");
        let reasoning = forms.reasoning.map(|form| form.name());
        let expected = match base {
            "qwen3" => Some("qwen3"),
            name if name.starts_with("qwen3_") && !matches!(name, "qwen3_instruct_2507" | "qwen3_vl") => {
                Some("qwen3")
            }
            name if name.starts_with("nemotron_3_") || name.starts_with("lfm2_2_5") => Some("qwen3"),
            "deepseekv3" | "deepseek_r1_distill" => Some("deepseek_r1"),
            "glm4moe" => Some("glm45"),
            _ => None,
        };
        assert_eq!(reasoning, expected, "{name}");
    }
}
