//! What must hold of every form of replies: nothing lost, cuts do not matter, the work is linear.

#[path = "../fuzz/targets/mod.rs"]
#[expect(dead_code, reason = "one target's checks of all")]
mod targets;

use lego::text::parsers::{Piece, ReasoningForm, ReplyEvent, ToolForm};
use proptest::prelude::*;
use targets::replies::{Way, check, check_tokens};

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
            ", \"arguments\": {}",
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
        ToolForm::Harmony => &[
            "<|start|>",
            "assistant",
            "<|channel|>",
            "<|channel|>analysis<|message|>",
            "<|channel|>final<|message|>",
            " to=functions.f",
            "<|channel|>commentary json<|message|>",
            "{}",
            "<|call|>",
            "<|end|>",
            "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{\"a\": 1}<|call|>",
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
        let part = prop::sample::select(fragments(way.tools));
        (Just(way), prop::collection::vec(part, 0..14))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_and_cuts_do_not_matter((way, parts) in way_and_parts()) {
        let sampled = parts.concat();
        check(way, &sampled);
        let events = way.read([Piece::text(&sampled)]);
        for (at, _) in sampled.char_indices() {
            let cut = way.read([&sampled[..at], &sampled[at..]].map(Piece::text));
            prop_assert_eq!(&cut, &events, "{:?} {:?} cut at {}", way, sampled, at);
        }
    }

    #[test]
    fn with_tokens_nothing_is_lost_either((way, parts) in way_and_parts(), controls in any::<u16>()) {
        let parts = parts.iter().enumerate();
        let pieces: Vec<Piece<'_>> =
            parts.map(|(at, text)| Piece { text, is_control: controls >> at & 1 == 1 }).collect();
        check_tokens(way, &pieces);
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
        ToolForm::Harmony => format!(
            "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{{\"text\": \"{value}\"}}<|call|>"
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
