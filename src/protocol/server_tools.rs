//! Tools that the vendor's own servers run (web search and the like), which no upstream here has: left out of a
//! request, or a reason to refuse it.

use bytes::Bytes;

use super::error::{ApiError, ErrorType};
use super::json;

/// How the types of such tools begin in Messages.
pub(super) const OF_MESSAGES: [&str; 5] =
    ["web_search", "web_fetch", "code_execution", "mcp_toolset", "advisor"];

/// The same in Responses: those that the translation leaves out by itself, and those that it refuses.
const OF_RESPONSES: ([&str; 2], [&str; 3]) =
    (["web_search", "image_generation"], ["file_search", "code_interpreter", "mcp"]);

/// A request's tools: type, name and text of each.
struct Tool<'a> {
    kind: String,
    name: String,
    text: &'a [u8],
}

impl Tool<'_> {
    fn is_of(&self, kinds: &[&str]) -> bool {
        kinds.iter().any(|kind| self.kind.starts_with(kind))
    }
}

/// `None` where there is no list of objects: that has its own reason to be refused.
fn tools(body: &[u8]) -> Option<Vec<Tool<'_>>> {
    let members = json::members(body, 0).ok()?;
    let list = &json::find(body, &members, "tools")?.value;
    let tool = |span: std::ops::Range<usize>| {
        let text = &body[span];
        let fields = json::members(text, 0).ok()?;
        let string = |name| {
            let field = json::find(text, &fields, name)?;
            serde_json::from_slice::<String>(field.text(text)).ok()
        };
        Some(Tool {
            kind: string("type").unwrap_or_default(),
            name: string("name").unwrap_or_default(),
            text,
        })
    };
    json::elements(body, list.start).ok()?.into_iter().map(tool).collect()
}

fn refuse(message: String) -> ApiError {
    ApiError::new(400, ErrorType::InvalidRequest, "unsupported", message)
}

/// The request with the list `kept` as its tools.
fn with_tools(body: &[u8], kept: &[&Tool<'_>], remove: &[&str]) -> Option<Bytes> {
    let texts: Vec<&[u8]> = kept.iter().map(|tool| tool.text).collect();
    let list = [b"[".as_slice(), &texts.join(&b','), b"]"].concat();
    let list = String::from_utf8(list).ok()?;
    json::set_members(body, &[("tools", list)], remove).ok().map(Bytes::from)
}

/// A Messages request without them, and without MCP servers; `None` if it has none.
///
/// # Errors
/// 400 where one of them must be called.
pub fn dropped_from_messages(body: &Bytes) -> Result<Option<Bytes>, ApiError> {
    let tools = tools(body).unwrap_or_default();
    let (dropped, kept): (Vec<&Tool<'_>>, Vec<&Tool<'_>>) =
        tools.iter().partition(|tool| tool.is_of(&OF_MESSAGES));
    let members = json::members(body, 0).unwrap_or_default();
    let has_servers = json::find(body, &members, "mcp_servers").is_some();
    if let Some(choice) = json::find(body, &members, "tool_choice")
        && let Ok(choice) = serde_json::from_slice::<serde_json::Value>(choice.text(body))
        && let Some(name) = choice["name"].as_str()
        && dropped.iter().any(|tool| tool.name == name)
        && !kept.iter().any(|tool| tool.name == name)
    {
        return Err(refuse(format!(
            "tool_choice: it asks for the tool {name:?}, which proxy.server_tools = \"drop\" leaves out"
        )));
    }
    if dropped.is_empty() && !has_servers {
        return Ok(None);
    }
    let edited = match dropped.is_empty() {
        true => json::set_members(body, &[], &["mcp_servers"]).ok().map(Bytes::from),
        false => with_tools(body, &kept, &["mcp_servers"]),
    };
    Ok(edited)
}

/// A Responses request without those that its translation refuses; `None` if it has none.
#[must_use]
pub fn dropped_from_responses(body: &Bytes) -> Option<Bytes> {
    let tools = tools(body)?;
    let kept: Vec<&Tool<'_>> = tools.iter().filter(|tool| !tool.is_of(&OF_RESPONSES.1)).collect();
    if kept.len() == tools.len() { None } else { with_tools(body, &kept, &[]) }
}

/// Refuses a Responses request that has one.
///
/// # Errors
/// 400 with its place.
pub fn none_in_responses(body: &Bytes) -> Result<(), ApiError> {
    let tools = tools(body).unwrap_or_default();
    let found = tools.iter().position(|tool| tool.is_of(&OF_RESPONSES.0));
    found.map_or(Ok(()), |index| {
        Err(refuse(format!(
            "tools[{index}] is a tool of type {:?}, which the vendor's servers run and this upstream has not: turn it \
             off in the harness, or set proxy.server_tools = \"drop\"",
            tools[index].kind
        )))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Bytes {
        Bytes::copy_from_slice(text.as_bytes())
    }

    #[test]
    fn only_server_tools_go_and_all_other_bytes_stay() {
        let body = bytes(
            r#"{"model":"m", "tools": [{"type": "web_search_20250305","name":"web_search"}, {"name":"f", "input_schema":{ }} ,{"type":"mcp_toolset"}],"mcp_servers":[{}],"messages":[1, 2]}"#,
        );
        let expected = r#"{"model":"m", "tools": [{"name":"f", "input_schema":{ }}],"messages":[1, 2]}"#;
        assert_eq!(dropped_from_messages(&body).ok().flatten().expect("some"), expected.as_bytes());
        let body = bytes(r#"{"tools":[{"type":"mcp"},{"type":"web_search"}], "input":"hi"}"#);
        let expected = r#"{"tools":[{"type":"web_search"}], "input":"hi"}"#;
        assert_eq!(dropped_from_responses(&body).expect("some"), expected.as_bytes());
        assert!(none_in_responses(&body).is_err_and(|error| error.message.contains("tools[1]")));
        for without in
            ["", "[]", "{", r#"{"tools":3}"#, r#"{"tools":[3]}"#, r#"{"tools":[{"type":"function"}]}"#]
        {
            let without = bytes(without);
            assert!(matches!(dropped_from_messages(&without), Ok(None)));
            assert!(dropped_from_responses(&without).is_none() && none_in_responses(&without).is_ok());
        }
    }

    #[test]
    fn a_choice_of_a_tool_that_goes_is_refused() {
        let with = |choice: &str| {
            let text = format!(
                r#"{{"tools":[{{"type":"web_search_1","name":"s"}},{{"name":"f"}}],"tool_choice":{choice}}}"#
            );
            dropped_from_messages(&bytes(&text))
        };
        let refused = with(r#"{"type":"tool","name":"s"}"#).map(drop).expect_err("gone");
        assert!(refused.message.contains("\"s\"") && refused.message.contains("proxy.server_tools"));
        for fine in [r#"{"type":"tool","name":"f"}"#, r#"{"type":"auto"}"#, "3"] {
            assert!(with(fine).is_ok_and(|edited| edited.is_some()), "{fine}");
        }
    }
}
