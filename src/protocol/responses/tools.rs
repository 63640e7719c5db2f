//! Tools: what the model is shown, and the way back from the name it calls.
//!
//! | Responses | chat |
//! |---|---|
//! | `function` | the same function, nested |
//! | `custom` | a function with one string parameter `input`; a grammar is told in the description, and is no constraint any more |
//! | `local_shell` | a function `local_shell` with the action's members as parameters |
//! | `namespace` | its tools, each named `<namespace>__<name>`; in the namespace `functions`, which is where tools without one live, by their own names |
//! | `web_search`, `tool_search`, `image_generation` | dropped: the upstream cannot run them, and Codex sends them with every request |

use std::collections::HashMap;

use super::raw::{Fields, Object, elements, list, quoted};
use super::refuse::{invalid, unsupported};
use crate::protocol::error::ApiError;

/// The function name that stands for the tool `local_shell`.
pub(super) const LOCAL_SHELL: &str = "local_shell";

/// What a call of a function becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Function,
    Custom,
    LocalShell,
}

/// The tool that a function name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub kind: Kind,
    pub namespace: Option<String>,
    pub name: String,
}

/// The tools of a request.
#[derive(Default)]
pub(super) struct Tools {
    /// Chat tools, in order.
    chat: Vec<String>,
    targets: HashMap<String, Target>,
}

impl Tools {
    /// Reads the request's `tools`.
    ///
    /// # Errors
    /// 400 for a tool without a chat form, and for two tools that the model could not tell apart.
    pub fn read(raw: Option<&str>) -> Result<Self, ApiError> {
        let mut tools = Self::default();
        let Some(raw) = raw else { return Ok(tools) };
        let Some(list) = elements(raw) else {
            return Err(invalid("tools", "is not a list"));
        };
        for (index, tool) in list.into_iter().enumerate() {
            tools.add(tool, None, &format!("tools[{index}]"))?;
        }
        Ok(tools)
    }

    pub fn is_empty(&self) -> bool {
        self.chat.is_empty()
    }

    /// The chat request's `tools`.
    pub fn chat(&self) -> String {
        list(&self.chat)
    }

    /// The way back from the model's names.
    pub fn into_targets(self) -> HashMap<String, Target> {
        self.targets
    }

    fn add(&mut self, raw: &str, namespace: Option<&str>, path: &str) -> Result<(), ApiError> {
        let Some(tool) = Fields::read(raw) else {
            return Err(invalid(path, "is not an object"));
        };
        let kind = tool.string("type").unwrap_or_default();
        let name = |kind: &str| {
            let name = tool.string("name").filter(|name| !name.is_empty());
            name.ok_or_else(|| invalid(path, &format!("is a {kind} without a `name`")))
        };
        match kind.as_str() {
            "function" => {
                let name = name("function")?;
                let shown = shown(namespace, &name);
                let function = Object::new()
                    .text("name", &shown)
                    .maybe("description", tool.get("description"))
                    .maybe("parameters", tool.get("parameters"))
                    .maybe("strict", tool.get("strict"));
                self.insert(shown, Kind::Function, namespace, name, &function.end(), path)
            }
            "custom" => {
                let name = name("custom tool")?;
                let shown = shown(namespace, &name);
                let function = custom(&tool, &shown);
                self.insert(shown, Kind::Custom, namespace, name, &function, path)
            }
            "local_shell" => {
                let name = LOCAL_SHELL.to_owned();
                self.insert(name.clone(), Kind::LocalShell, None, name, &local_shell(), path)
            }
            "namespace" if namespace.is_none() => {
                let namespace = name("namespace")?;
                let Some(tools) = tool.get("tools").and_then(elements) else {
                    return Err(invalid(path, "is a namespace without a list `tools`"));
                };
                for (index, inner) in tools.into_iter().enumerate() {
                    self.add(inner, Some(&namespace), &format!("{path}.tools[{index}]"))?;
                }
                Ok(())
            }
            "tool_search" | "image_generation" => Ok(()),
            kind if kind.starts_with("web_search") => Ok(()),
            "" => Err(invalid(path, "has no `type`")),
            other => {
                Err(unsupported(path, &format!("is a tool of type {other:?}, which the upstream cannot run")))
            }
        }
    }

    fn insert(
        &mut self,
        shown: String,
        kind: Kind,
        namespace: Option<&str>,
        name: String,
        function: &str,
        path: &str,
    ) -> Result<(), ApiError> {
        let target = Target { kind, namespace: namespace.map(str::to_owned), name };
        match self.targets.get(&shown) {
            Some(other) if *other != target => {
                let problem = format!("is shown to the model as {shown:?}, as another tool is: rename one");
                return Err(unsupported(path, &problem));
            }
            _ => self.targets.insert(shown, target),
        };
        self.chat.push(Object::new().text("type", "function").raw("function", function).end());
        Ok(())
    }

    /// The chat request's `tool_choice`; `None` where there is nothing to say.
    ///
    /// # Errors
    /// 400 for a choice that forces a tool which is not there.
    pub fn choice(&self, raw: Option<&str>) -> Result<Option<String>, ApiError> {
        let path = "tool_choice";
        let Some(raw) = raw else { return Ok(None) };
        if raw.starts_with('"') {
            return match raw {
                _ if !self.is_empty() => Ok(Some(raw.to_owned())),
                "\"auto\"" | "\"none\"" => Ok(None),
                _ => Err(unsupported(path, "asks for a tool call, and no tool is left to call")),
            };
        }
        let Some(choice) = Fields::read(raw) else {
            return Err(invalid(path, "is neither a string nor an object"));
        };
        if choice.string("type").as_deref() == Some("allowed_tools") {
            let Some(allowed) = choice.get("tools").and_then(elements) else {
                return Err(invalid(path, "allows no list `tools`"));
            };
            let mut functions = Vec::with_capacity(allowed.len());
            for (index, tool) in allowed.into_iter().enumerate() {
                functions.push(self.named(tool, &format!("{path}.tools[{index}]"))?);
            }
            let mode = choice.get("mode").unwrap_or("\"auto\"");
            let allowed = Object::new().raw("mode", mode).raw("tools", &list(&functions)).end();
            let choice = Object::new().text("type", "allowed_tools").raw("allowed_tools", &allowed);
            return Ok(Some(choice.end()));
        }
        self.named(raw, path).map(Some)
    }

    fn named(&self, raw: &str, path: &str) -> Result<String, ApiError> {
        let Some(choice) = Fields::read(raw) else {
            return Err(invalid(path, "is not an object"));
        };
        let kind = choice.string("type").unwrap_or_default();
        let name = match kind.as_str() {
            "function" | "custom" => {
                shown(choice.string("namespace").as_deref(), &choice.string("name").unwrap_or_default())
            }
            LOCAL_SHELL => LOCAL_SHELL.to_owned(),
            other => {
                return Err(unsupported(path, &format!("is {other:?}, a tool that the upstream cannot run")));
            }
        };
        if !self.targets.contains_key(&name) {
            return Err(invalid(path, &format!("names {name:?}, which is not among the tools")));
        }
        let function = Object::new().text("name", &name).end();
        Ok(Object::new().text("type", "function").raw("function", &function).end())
    }
}

/// The name by which the model knows a tool. It depends on nothing but the tool, so that it is the same in every
/// turn.
pub(super) fn shown(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        None | Some("" | "functions") => name.to_owned(),
        Some(namespace) if namespace.ends_with("__") => format!("{namespace}{name}"),
        Some(namespace) => format!("{namespace}__{name}"),
    }
}

fn custom(tool: &Fields<'_>, shown: &str) -> String {
    let mut description = tool.string("description").unwrap_or_default();
    if let Some(format) = tool.get("format").and_then(Fields::read)
        && let Some(definition) = format.string("definition")
    {
        let syntax = format.string("syntax").unwrap_or_default();
        if !description.is_empty() {
            description.push_str("\n\n");
        }
        description.push_str(&format!("`input` must match this grammar ({syntax}):\n{definition}"));
    }
    let description = (!description.is_empty()).then(|| quoted(&description));
    Object::new()
        .text("name", shown)
        .maybe("description", description.as_deref())
        .raw(
            "parameters",
            r#"{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],"additionalProperties":false}"#,
        )
        .end()
}

fn local_shell() -> String {
    let properties = Object::new()
        .raw(
            "command",
            r#"{"type":"array","items":{"type":"string"},"description":"The program and its arguments."}"#,
        )
        .raw("timeout_ms", r#"{"type":"integer","description":"Time limit in milliseconds."}"#)
        .raw("working_directory", r#"{"type":"string","description":"Folder to run in."}"#)
        .raw(
            "env",
            r#"{"type":"object","additionalProperties":{"type":"string"},"description":"Environment variables to set."}"#,
        )
        .end();
    let parameters = Object::new()
        .text("type", "object")
        .raw("properties", &properties)
        .raw("required", r#"["command"]"#)
        .raw("additionalProperties", "false")
        .end();
    Object::new()
        .text("name", LOCAL_SHELL)
        .text("description", "Runs a command on the local machine and returns its output.")
        .raw("parameters", &parameters)
        .end()
}
