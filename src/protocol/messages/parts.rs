//! Content blocks that carry text and images, flattened to chat's parts.

use std::fmt::Write;

use super::node::{Literal, Node, Object, refuse};
use crate::protocol::error::ApiError;

/// A piece of a message's content.
#[derive(Debug)]
pub(super) enum Part<'a> {
    Text(Literal<'a>),
    /// What stands between the quotes of chat's `image_url.url`.
    Image(String),
}

/// Adds the parts of a content block of a user turn or a tool result. False: it is no such block.
pub(super) fn add<'a>(
    kind: &str,
    block: &Object<'a, '_>,
    parts: &mut Vec<Part<'a>>,
) -> Result<bool, ApiError> {
    match kind {
        "text" => parts.push(Part::Text(block.need("text")?.literal()?)),
        "image" => parts.push(Part::Image(image(block)?)),
        // The tools that a search found are in `tools`, deferred or not: their names are what the model needs.
        "tool_reference" => parts.push(Part::Text(block.need("tool_name")?.literal()?)),
        "search_result" => {
            for name in ["title", "source"] {
                if let Some(text) = block.get(name) {
                    parts.push(Part::Text(text.literal()?));
                }
            }
            add_content(block.need("content")?, parts)?;
        }
        "document" => document(block, parts)?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// Adds content that is a string or a list of blocks.
pub(super) fn add_content<'a>(content: Node<'a, '_>, parts: &mut Vec<Part<'a>>) -> Result<(), ApiError> {
    if content.is_string() {
        parts.push(Part::Text(content.literal()?));
        return Ok(());
    }
    if !content.is_list() {
        return Err(content.wrong("a string or a list of blocks"));
    }
    for (index, text) in content.list()?.into_iter().enumerate() {
        let node = content.element(index, text);
        let block = node.object()?;
        let kind = block.kind()?;
        if !add(&kind, &block, parts)? {
            return Err(unknown(&kind, &block));
        }
    }
    Ok(())
}

/// The error that a block has no place in chat.
pub(super) fn unknown(kind: &str, block: &Object<'_, '_>) -> ApiError {
    let problem = if is_of_server_tool(kind) {
        format!(
            "a `{kind}` block belongs to a tool that Anthropic's servers run, which this upstream has not; turn that tool off in the harness and begin a new conversation"
        )
    } else {
        format!(
            "a `{kind}` block cannot be given to a chat upstream here; send its content as text or images"
        )
    };
    refuse(block.path, problem)
}

fn is_of_server_tool(kind: &str) -> bool {
    let is_result = kind.ends_with("_tool_result");
    is_result || matches!(kind, "server_tool_use" | "mcp_tool_use" | "container_upload")
}

fn image(block: &Object<'_, '_>) -> Result<String, ApiError> {
    let source = block.need("source")?;
    let source = source.object()?;
    let kind = source.need("type")?;
    match kind.string()?.as_str() {
        "base64" => {
            let (media, data) = (source.need("media_type")?, source.need("data")?);
            let (media, data) = (media.literal()?, data.literal()?);
            Ok(format!("data:{media};base64,{data}"))
        }
        "url" => Ok(source.need("url")?.literal()?.to_owned()),
        "file" => Err(no_files(kind)),
        _ => Err(kind.wrong("\"base64\" or \"url\"")),
    }
}

fn document<'a>(block: &Object<'a, '_>, parts: &mut Vec<Part<'a>>) -> Result<(), ApiError> {
    let source = block.need("source")?;
    let source = source.object()?;
    let kind = source.need("type")?;
    for name in ["title", "context"] {
        if let Some(text) = block.get(name) {
            parts.push(Part::Text(text.literal()?));
        }
    }
    match kind.string()?.as_str() {
        "text" => {
            parts.push(Part::Text(source.need("data")?.literal()?));
            Ok(())
        }
        "content" => add_content(source.need("content")?, parts),
        "file" => Err(no_files(kind)),
        _ => Err(refuse(
            block.path,
            "chat upstreams read no such documents (PDF); send the pages as text or as images",
        )),
    }
}

fn no_files(kind: Node<'_, '_>) -> ApiError {
    refuse(kind.path, "lego keeps no uploaded files; send the content itself")
}

/// Appends the content of a user's message: a string if it is one text, else a list of parts. Empty texts say
/// nothing and are left out.
pub(super) fn push_content(parts: &[Part<'_>], out: &mut String) {
    let mut said = parts.iter().filter(|part| !matches!(part, Part::Text("")));
    match (said.next(), said.next()) {
        (None, _) => out.push_str("\"\""),
        (Some(Part::Text(text)), None) => push_quoted(text, out),
        _ => {
            out.push('[');
            let said = parts.iter().filter(|part| !matches!(part, Part::Text("")));
            for (index, part) in said.enumerate() {
                if index > 0 {
                    out.push(',');
                }
                // A `String` takes every write.
                let _ = match part {
                    Part::Text(text) => write!(out, "{{\"type\":\"text\",\"text\":\"{text}\"}}"),
                    Part::Image(url) => {
                        write!(out, "{{\"type\":\"image_url\",\"image_url\":{{\"url\":\"{url}\"}}}}")
                    }
                };
            }
            out.push(']');
        }
    }
}

/// Appends a literal with its quotes.
pub(super) fn push_quoted(literal: Literal<'_>, out: &mut String) {
    out.push('"');
    out.push_str(literal);
    out.push('"');
}
