//! `tools` and `tool_choice` as chat's.

use super::node::{Node, Object, refuse};
use crate::protocol::error::ApiError;
use crate::protocol::json;
use crate::protocol::server_tools::OF_MESSAGES;

/// Elements of chat's `tools`, with commas; `None` if there is no tool. Schemas go on as the bytes that came.
pub(super) fn tools(node: Node<'_, '_>) -> Result<Option<String>, ApiError> {
    let mut out = String::new();
    for (index, text) in node.list()?.into_iter().enumerate() {
        let node = node.element(index, text);
        let tool = node.object()?;
        let kind = match tool.get("type") {
            Some(kind) => kind.string()?,
            None => "custom".to_owned(),
        };
        // Deferred tools are given to the model at once, so there is nothing left to search.
        if kind.starts_with("tool_search_tool") {
            continue;
        }
        let schema = schema(&tool, &kind)?;
        if !out.is_empty() {
            out.push(',');
        }
        out.push_str("{\"type\":\"function\",\"function\":{\"name\":");
        let name = tool.need("name")?;
        name.literal()?;
        out.push_str(name.text);
        if let Some(description) = tool.get("description") {
            description.literal()?;
            out.push_str(",\"description\":");
            out.push_str(description.text);
        }
        out.push_str(",\"parameters\":");
        out.push_str(&schema);
        if let Some(strict) = tool.get("strict") {
            out.push_str(if strict.bool()? { ",\"strict\":true" } else { ",\"strict\":false" });
        }
        out.push_str("}}");
    }
    Ok((!out.is_empty()).then_some(out))
}

fn schema(tool: &Object<'_, '_>, kind: &str) -> Result<String, ApiError> {
    let Some(schema) = tool.get("input_schema") else {
        return Err(no_schema(tool, kind));
    };
    let members = schema.object()?;
    if members.get("type").is_some() {
        return Ok(schema.text.to_owned());
    }
    // A tool's input is always an object; templates and grammars look for the word.
    let typed = json::set_members(schema.text.as_bytes(), &[("type", "\"object\"".to_owned())], &[]);
    typed.ok().and_then(|text| String::from_utf8(text).ok()).ok_or_else(|| schema.wrong("an object"))
}

fn no_schema(tool: &Object<'_, '_>, kind: &str) -> ApiError {
    let name = tool.get("name").and_then(|name| name.string().ok()).unwrap_or_default();
    if kind == "custom" {
        return refuse(tool.path, format_args!("the tool \"{name}\" has no input_schema; add one"));
    }
    if OF_MESSAGES.iter().any(|prefix| kind.starts_with(prefix)) {
        return refuse(
            tool.path,
            format_args!(
                "the tool \"{name}\" ({kind}) is run by Anthropic's servers, which this upstream has not; turn it off in the harness, or set proxy.server_tools = \"drop\""
            ),
        );
    }
    refuse(
        tool.path,
        format_args!(
            "the tool \"{name}\" ({kind}) has no input_schema: only Anthropic's models know it; declare it as a custom tool with an input_schema"
        ),
    )
}

/// What `tool_choice` asks for.
#[derive(Debug, Default)]
pub(super) struct Choice {
    /// Chat's `tool_choice`, JSON.
    pub choice: Option<String>,
    pub is_single: bool,
}

/// Reads `tool_choice`. Without tools, chat servers refuse even `auto`: it is then left out.
pub(super) fn choice(node: Node<'_, '_>, has_tools: bool) -> Result<Choice, ApiError> {
    let object = node.object()?;
    let kind = object.need("type")?;
    let is_single = has_tools && object.is_true("disable_parallel_tool_use")?;
    let choice = match kind.string()?.as_str() {
        "auto" => "\"auto\"".to_owned(),
        "none" => "\"none\"".to_owned(),
        "any" | "tool" if !has_tools => {
            return Err(refuse(node.path, "it asks for a tool, but there are no tools"));
        }
        "any" => "\"required\"".to_owned(),
        "tool" => {
            let name = object.need("name")?;
            name.literal()?;
            format!("{{\"type\":\"function\",\"function\":{{\"name\":{}}}}}", name.text)
        }
        _ => return Err(kind.wrong("\"auto\", \"any\", \"tool\" or \"none\"")),
    };
    Ok(Choice { choice: has_tools.then_some(choice), is_single })
}
