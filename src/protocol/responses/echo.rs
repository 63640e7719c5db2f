//! The response object: what the client asked, said back, with how it went.

use super::names::response_id;
use super::raw::{Fields, Object, compact, list};
use crate::protocol::chat::ReplyUsage;
use crate::protocol::translate::ReplyNames;

/// The members of a response object that do not change: before and after those that do.
pub(super) struct Echo {
    head: Vec<(&'static str, String)>,
    tail: Vec<(&'static str, String)>,
}

/// How far a response is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct State {
    pub status: &'static str,
    /// JSON; `None` is null.
    pub error: Option<String>,
    /// JSON; `None` is null.
    pub incomplete_details: Option<String>,
    pub usage: Option<ReplyUsage>,
}

impl Echo {
    pub fn new(request: &Fields<'_>, names: &ReplyNames) -> Self {
        let echo = |name: &'static str, default: &str| {
            (name, request.get(name).map_or_else(|| default.to_owned(), compact))
        };
        // What was not sent is null: the engine's own defaults are not known here.
        let head = vec![
            ("id", super::raw::quoted(&response_id(&names.call_id))),
            ("object", "\"response\"".to_owned()),
            ("created_at", names.created.to_string()),
            ("background", "false".to_owned()),
            ("completed_at", "null".to_owned()),
            echo("conversation", "null"),
            echo("instructions", "null"),
            echo("max_output_tokens", "null"),
            echo("max_tool_calls", "null"),
            ("model", super::raw::quoted(&names.model)),
        ];
        let tail = vec![
            echo("parallel_tool_calls", "true"),
            echo("previous_response_id", "null"),
            echo("prompt_cache_key", "null"),
            echo("reasoning", r#"{"effort":null,"summary":null}"#),
            echo("safety_identifier", "null"),
            echo("service_tier", "null"),
            echo("store", "true"),
            echo("temperature", "null"),
            echo("text", r#"{"format":{"type":"text"}}"#),
            echo("tool_choice", "\"auto\""),
            echo("tools", "[]"),
            ("top_logprobs", "0".to_owned()),
            echo("top_p", "null"),
            echo("truncation", "\"disabled\""),
            echo("user", "null"),
            echo("metadata", "{}"),
        ];
        Self { head, tail }
    }

    /// The response object; `output` are whole items.
    pub fn response(&self, state: &State, output: &[String]) -> String {
        let mut object = Object::new();
        for (name, value) in &self.head {
            object = object.raw(name, value);
            if *name == "created_at" {
                object = object.text("status", state.status);
            }
        }
        object = object
            .raw("error", state.error.as_deref().unwrap_or("null"))
            .raw("incomplete_details", state.incomplete_details.as_deref().unwrap_or("null"))
            .raw("output", &list(output));
        for (name, value) in &self.tail {
            object = object.raw(name, value);
        }
        object.raw("usage", &usage(state.usage)).end()
    }
}

fn usage(usage: Option<ReplyUsage>) -> String {
    let Some(usage) = usage else { return "null".to_owned() };
    // Clients read these counts as numbers: what the upstream did not say is 0 here, and null in the capture.
    let cached = usage.cached_tokens.unwrap_or(0);
    let reasoning = usage.reasoning_tokens.unwrap_or(0);
    let input_details =
        Object::new().raw("cached_tokens", &cached.to_string()).raw("cache_write_tokens", "0");
    Object::new()
        .raw("input_tokens", &usage.prompt_tokens.to_string())
        .raw("input_tokens_details", &input_details.end())
        .raw("output_tokens", &usage.completion_tokens.to_string())
        .raw("output_tokens_details", &Object::new().raw("reasoning_tokens", &reasoning.to_string()).end())
        .raw("total_tokens", &usage.prompt_tokens.saturating_add(usage.completion_tokens).to_string())
        .end()
}
