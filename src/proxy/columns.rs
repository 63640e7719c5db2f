//! Values of a record's columns.

use crate::protocol::chat::{Choice, ToolCall};
use crate::record::CapturedToolCall;

/// The calls as they are recorded.
pub(super) fn tool_calls(choice: &Choice) -> Vec<CapturedToolCall> {
    let capture = |call: &ToolCall| CapturedToolCall {
        id: call.id.clone(),
        name: call.name.clone(),
        arguments_valid_json: serde_json::from_str::<serde::de::IgnoredAny>(&call.arguments).is_ok(),
        arguments: call.arguments.clone(),
    };
    choice.tool_calls.iter().map(capture).collect()
}
