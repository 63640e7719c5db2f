//! `<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
//! <|tool_calls_section_end|>`: Kimi K2. What stands before the arguments is the call's id, and holds its name.

use super::section::{Section, Spelling};

pub(super) fn new() -> Section {
    Section::new(Spelling {
        tags: &[
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ],
        open: &["<|tool_calls_section_begin|>"],
        between: &["<|tool_call_begin|>", "<|tool_calls_section_end|>"],
        header_end: &["<|tool_call_argument_begin|>"],
        fence: None,
        close: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
        header: |id| {
            let (name, number) = id.rsplit_once(':')?;
            let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then_some((name.strip_prefix("functions.").unwrap_or(name), Some(id)))
        },
    })
}
