//! A Messages request as a chat request.
//!
//! Unknown fields, betas and cache marks are accepted and left out. `metadata.user_id` is left out too: it holds
//! account and device ids, and no engine has a use for it.

use std::fmt::Write;

use bytes::Bytes;

use super::node::{Node, Object, refuse};
use super::tools;
use super::turns::{LastTurn, Turns};
use crate::protocol::error::ApiError;
use crate::protocol::translate::chat_effort;

/// The chat request's body.
///
/// # Errors
/// [`ApiError`] with status 400 that names the place of what is wrong or has no counterpart.
pub(super) fn to_chat(body: &Bytes) -> Result<Bytes, ApiError> {
    let root = Node::parse(body)?;
    let request = root.object()?;
    let mut chat = Chat::begin(&request, body.len())?;
    let messages = request.need("messages")?;
    match chat.conversation(&request, messages)? {
        LastTurn::Open => {}
        LastTurn::Prefill => {
            chat.set("continue_final_message", "true");
            chat.set("add_generation_prompt", "false");
        }
        LastTurn::Calls => {
            return Err(refuse(
                messages.path,
                "the last turn has tool_use blocks; add a user turn with their tool_result blocks",
            ));
        }
    }
    if let Some(choice) = request.get("tool_choice") {
        let choice = tools::choice(choice, chat.has_tools)?;
        if let Some(choice) = &choice.choice {
            chat.set("tool_choice", choice);
        }
        if choice.is_single {
            chat.set("parallel_tool_calls", "false");
        }
    }
    chat.set("max_tokens", request.need("max_tokens")?.count()?);
    for name in ["temperature", "top_p"] {
        if let Some(value) = request.get(name) {
            chat.set(name, value.number()?);
        }
    }
    if let Some(value) = request.get("top_k") {
        chat.set("top_k", value.count()?);
    }
    stop_sequences(&request, &mut chat)?;
    effort(&request, &mut chat)?;
    if let Some(format) = format(&request)? {
        chat.set("response_format", &format);
    }
    if let Some(servers) = request.get("mcp_servers")
        && !servers.list()?.is_empty()
    {
        return Err(refuse(
            servers.path,
            "MCP servers are called by Anthropic's servers, which this upstream has not; let the harness call them",
        ));
    }
    if request.is_true("stream")? {
        chat.set("stream", "true");
        chat.set("stream_options", "{\"include_usage\":true}");
    }
    Ok(chat.end())
}

/// The body of vLLM's `/tokenize` that counts the prompt of this request. `max_tokens` need not be there.
///
/// # Errors
/// As [`super::translate`].
pub fn count_request(body: &Bytes) -> Result<Bytes, ApiError> {
    let root = Node::parse(body)?;
    let request = root.object()?;
    let mut chat = Chat::begin(&request, body.len())?;
    let end = chat.conversation(&request, request.need("messages")?)?;
    if end == LastTurn::Prefill {
        chat.set("continue_final_message", "true");
    }
    chat.set("add_generation_prompt", if end == LastTurn::Prefill { "false" } else { "true" });
    Ok(chat.end())
}

/// A chat body in the making.
struct Chat {
    out: String,
    has_tools: bool,
}

impl Chat {
    fn begin(request: &Object<'_, '_>, size: usize) -> Result<Self, ApiError> {
        let model = request.need("model")?;
        // It is written as it came, and must be a name that can be read.
        model.string()?;
        let mut out = String::with_capacity(size + size / 8 + 256);
        out.push_str("{\"model\":");
        out.push_str(model.text);
        Ok(Self { out, has_tools: false })
    }

    /// What the prompt is rendered from.
    fn conversation(
        &mut self,
        request: &Object<'_, '_>,
        messages: Node<'_, '_>,
    ) -> Result<LastTurn, ApiError> {
        let mut turns = Turns::default();
        if let Some(system) = request.get("system") {
            turns.system(system)?;
        }
        let end = turns.turns(messages)?;
        // A `String` takes every write.
        let _ = write!(self.out, ",\"messages\":[{}]", turns.messages);
        if let Some(node) = request.get("tools")
            && let Some(list) = tools::tools(node)?
        {
            self.has_tools = true;
            let _ = write!(self.out, ",\"tools\":[{list}]");
        }
        Ok(end)
    }

    fn set(&mut self, name: &str, value: &str) {
        let _ = write!(self.out, ",\"{name}\":{value}");
    }

    fn end(mut self) -> Bytes {
        self.out.push('}');
        Bytes::from(self.out)
    }
}

fn stop_sequences(request: &Object<'_, '_>, chat: &mut Chat) -> Result<(), ApiError> {
    let Some(node) = request.get("stop_sequences") else {
        return Ok(());
    };
    let texts = node.list()?;
    for (index, text) in texts.iter().enumerate() {
        node.element(index, text).literal()?;
    }
    if !texts.is_empty() {
        chat.set("stop", node.text);
    }
    Ok(())
}

/// How much the model should think.
fn effort(request: &Object<'_, '_>, chat: &mut Chat) -> Result<(), ApiError> {
    let mut effort = None;
    if let Some(config) = request.get("output_config")
        && let Some(node) = config.object()?.get("effort")
    {
        let level = node.string()?;
        let is_level = !matches!(level.as_str(), "none" | "minimal");
        effort = chat_effort(&level).filter(|_| is_level);
        if effort.is_none() {
            return Err(node.wrong("\"low\", \"medium\", \"high\", \"xhigh\" or \"max\""));
        }
    }
    if let Some(thinking) = request.get("thinking") {
        let thinking = thinking.object()?;
        let kind = thinking.need("type")?;
        match kind.string()?.as_str() {
            "enabled" => chat.set("thinking_token_budget", thinking.need("budget_tokens")?.count()?),
            "disabled" => effort = Some("\"none\""),
            // The model decides, as it does anyway.
            "adaptive" => {}
            _ => return Err(kind.wrong("\"enabled\", \"disabled\" or \"adaptive\"")),
        }
    }
    if let Some(effort) = effort {
        chat.set("reasoning_effort", effort);
    }
    Ok(())
}

/// `response_format` for `output_config.format`, or for `output_format`, as an earlier beta called it.
fn format(request: &Object<'_, '_>) -> Result<Option<String>, ApiError> {
    if let Some(config) = request.get("output_config")
        && let Some(format) = config.object()?.get("format")
    {
        return json_schema(format).map(Some);
    }
    request.get("output_format").map(json_schema).transpose()
}

fn json_schema(node: Node<'_, '_>) -> Result<String, ApiError> {
    let format = node.object()?;
    let kind = format.need("type")?;
    if kind.string()? != "json_schema" {
        return Err(kind.wrong("\"json_schema\""));
    }
    let schema = format.need("schema")?;
    schema.object()?;
    Ok(format!(
        "{{\"type\":\"json_schema\",\"json_schema\":{{\"name\":\"output\",\"strict\":true,\"schema\":{}}}}}",
        schema.text
    ))
}
