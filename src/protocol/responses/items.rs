//! Input items become chat messages.
//!
//! What one reply gave (reasoning, text, calls) is one assistant message again, however its items are spread. The
//! items of lego's own replies say by their ids which reply they are from; for others the order decides. Every
//! rule looks only at what came before, except that a call's output moves up to its call: so the messages of a
//! longer history begin with those of the shorter one.

use std::collections::HashMap;

use super::content::Content;
use super::names::reply_key;
use super::raw::{Fields, Joined, Object, decoded, elements, list, quoted};
use super::refuse::{invalid, unsupported};
use super::shell;
use super::tools::{LOCAL_SHELL, shown};
use crate::protocol::error::ApiError;

/// A conversation being put together.
#[derive(Default)]
pub(super) struct Conversation {
    messages: Vec<String>,
    turn: Option<Turn>,
    /// Calls of the last assistant message whose output has not come yet.
    waiting: Vec<String>,
    /// Messages that came before those outputs: chat wants the outputs first.
    held: Vec<String>,
    /// Call ids by the ids of local shell items, which older clients answer to.
    shell_calls: HashMap<String, String>,
}

/// An assistant message being put together.
#[derive(Default)]
struct Turn {
    /// The reply it came from.
    key: Option<String>,
    reasoning: Joined,
    content: Option<Content>,
    calls: Vec<String>,
    call_ids: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Reasoning,
    Message,
    Call,
}

impl Conversation {
    /// Adds a message that is one text, given as a JSON string.
    pub fn add_text(&mut self, role: &str, text: &str) {
        let message = Object::new().text("role", role).raw("content", text).end();
        self.add_message(message);
    }

    /// Adds an input item.
    ///
    /// # Errors
    /// 400 for an item that has no chat form, naming its path.
    pub fn add(&mut self, raw: &str, path: &str) -> Result<(), ApiError> {
        let Some(item) = Fields::read(raw) else {
            return Err(invalid(path, "is not an object"));
        };
        let kind = match item.string("type") {
            Some(kind) => kind,
            None if item.get("role").is_some() => "message".to_owned(),
            None => return Err(invalid(path, "has no `type`")),
        };
        match kind.as_str() {
            "message" => self.message(&item, path),
            "reasoning" => self.reasoning(&item, path),
            "function_call" => {
                let name = need(&item, "name", &kind, path)?;
                let arguments = item.text("arguments").ok_or_else(|| {
                    invalid(path, "is a function_call whose `arguments` are not a string of JSON")
                })?;
                self.call(&item, &kind, path, &name, arguments)
            }
            "custom_tool_call" => {
                let name = need(&item, "name", &kind, path)?;
                let Some(input) = item.text("input") else {
                    return Err(invalid(path, "is a custom_tool_call without a string `input`"));
                };
                // In one form whatever the client escaped, so that every turn renders it the same.
                let input = decoded(input).map_or_else(|| input.to_owned(), |text| quoted(&text));
                self.call(&item, &kind, path, &name, &quoted(&format!("{{\"input\": {input}}}")))
            }
            "local_shell_call" => {
                let Some(arguments) = item.get("action").and_then(shell::arguments) else {
                    return Err(invalid(path, "is a local_shell_call without an object `action`"));
                };
                if let (Some(id), Some(call_id)) = (item.string("id"), item.string("call_id")) {
                    self.shell_calls.insert(id, call_id);
                }
                self.call(&item, &kind, path, LOCAL_SHELL, &quoted(&arguments))
            }
            "function_call_output" | "custom_tool_call_output" | "local_shell_call_output" => {
                self.output(&item, &kind, path)
            }
            "item_reference" => Err(unsupported(
                path,
                "is an item_reference, and this proxy keeps no items by id: send the item itself",
            )),
            "compaction" | "compaction_summary" | "context_compaction" => Err(unsupported(
                path,
                &format!("is a {kind} item, whose content only the server that made it can read"),
            )),
            other if other.ends_with("_call") || other.ends_with("_output") => Err(unsupported(
                path,
                &format!("is a {other} item, of a hosted tool that the upstream cannot run"),
            )),
            other => Err(unsupported(path, &format!("is an item of type {other:?}, which is not known"))),
        }
    }

    /// The chat messages.
    pub fn end(mut self) -> Vec<String> {
        self.close_turn();
        self.messages.append(&mut self.held);
        self.messages
    }

    fn message(&mut self, item: &Fields<'_>, path: &str) -> Result<(), ApiError> {
        let role = item.string("role").unwrap_or_default();
        let content_path = format!("{path}.content");
        let content = item.get("content").ok_or_else(|| invalid(path, "is a message without `content`"))?;
        match role.as_str() {
            "assistant" => {
                let mut read = Content::default();
                read.add(content, &content_path)?;
                let turn = self.turn(Step::Message, reply_key(item));
                turn.content.get_or_insert_default().join(read);
                Ok(())
            }
            "user" | "system" | "developer" => {
                let mut read = Content::default();
                read.add(content, &content_path)?;
                // Templates know no developer.
                let role = if role == "developer" { "system" } else { role.as_str() };
                let message = Object::new().text("role", role).raw("content", &read.chat()).end();
                self.add_message(message);
                Ok(())
            }
            other => Err(invalid(
                path,
                &format!("has the role {other:?}; give user, system, developer or assistant"),
            )),
        }
    }

    fn reasoning(&mut self, item: &Fields<'_>, path: &str) -> Result<(), ApiError> {
        let turn = self.turn(Step::Reasoning, reply_key(item));
        let full = texts(item, "content", path)?;
        let full = if full.is_empty() { texts(item, "summary", path)? } else { full };
        for text in full {
            turn.reasoning.push(text);
        }
        Ok(())
    }

    /// `arguments` is a JSON string.
    fn call(
        &mut self,
        item: &Fields<'_>,
        kind: &str,
        path: &str,
        name: &str,
        arguments: &str,
    ) -> Result<(), ApiError> {
        let id = item.string("call_id").or_else(|| item.string("id"));
        let Some(id) = id else {
            return Err(invalid(path, &format!("is a {kind} without a `call_id`")));
        };
        let name = shown(item.string("namespace").as_deref(), name);
        let function = Object::new().text("name", &name).raw("arguments", arguments).end();
        let call = Object::new().text("id", &id).text("type", "function").raw("function", &function).end();
        let turn = self.turn(Step::Call, reply_key(item));
        turn.calls.push(call);
        turn.call_ids.push(id);
        Ok(())
    }

    fn output(&mut self, item: &Fields<'_>, kind: &str, path: &str) -> Result<(), ApiError> {
        let id = item.string("call_id").or_else(|| {
            let id = item.string("id").filter(|_| kind == "local_shell_call_output")?;
            Some(self.shell_calls.get(&id).cloned().unwrap_or(id))
        });
        let Some(id) = id else {
            return Err(invalid(path, &format!("is a {kind} without a `call_id`")));
        };
        let output =
            item.get("output").ok_or_else(|| invalid(path, &format!("is a {kind} without `output`")))?;
        let mut content = Content::default();
        content.add(output, &format!("{path}.output"))?;
        self.close_turn();
        let message = Object::new()
            .text("role", "tool")
            .text("tool_call_id", &id)
            .raw("content", &content.chat())
            .end();
        self.messages.push(message);
        self.waiting.retain(|waiting| *waiting != id);
        if self.waiting.is_empty() {
            self.messages.append(&mut self.held);
        }
        Ok(())
    }

    fn add_message(&mut self, message: String) {
        self.close_turn();
        if self.waiting.is_empty() {
            self.messages.push(message);
        } else {
            self.held.push(message);
        }
    }

    /// The assistant message that the next item belongs to.
    fn turn(&mut self, step: Step, key: Option<String>) -> &mut Turn {
        let continues = self.turn.as_ref().is_some_and(|turn| match (&turn.key, &key) {
            (Some(own), Some(key)) => own == key,
            // A call that has no output yet: what follows is of the same reply.
            _ if !turn.calls.is_empty() => true,
            // A reply that was cut off may be followed by the next one, which begins anew.
            _ => step == Step::Call || turn.content.is_none(),
        });
        if !continues {
            self.close_turn();
            self.waiting.clear();
            self.messages.append(&mut self.held);
        }
        let turn = self.turn.get_or_insert_default();
        turn.key = turn.key.take().or(key);
        turn
    }

    fn close_turn(&mut self) {
        let Some(turn) = self.turn.take() else { return };
        // Reasoning that only another server can read is nothing; of lego's own replies it says that there was one.
        let is_nothing = turn.reasoning.is_empty() && turn.content.is_none() && turn.calls.is_empty();
        if is_nothing && turn.key.is_none() {
            return;
        }
        let content = match &turn.content {
            Some(content) => content.chat(),
            None if turn.calls.is_empty() => quoted(""),
            None => "null".to_owned(),
        };
        let reasoning = (!turn.reasoning.is_empty()).then(|| turn.reasoning.quoted());
        let calls = (!turn.calls.is_empty()).then(|| list(&turn.calls));
        let message = Object::new()
            .text("role", "assistant")
            .raw("content", &content)
            .maybe("reasoning_content", reasoning.as_deref())
            .maybe("tool_calls", calls.as_deref());
        self.messages.push(message.end());
        self.waiting = turn.call_ids;
    }
}

fn need(item: &Fields<'_>, name: &str, kind: &str, path: &str) -> Result<String, ApiError> {
    item.string(name).ok_or_else(|| invalid(path, &format!("is a {kind} without a string `{name}`")))
}

/// The JSON strings of the text parts of a reasoning item's member.
fn texts<'a>(item: &Fields<'a>, name: &str, path: &str) -> Result<Vec<&'a str>, ApiError> {
    let Some(parts) = item.get(name) else {
        return Ok(Vec::new());
    };
    let path = format!("{path}.{name}");
    let Some(parts) = elements(parts) else {
        return Err(invalid(&path, "is not a list"));
    };
    let text = |(index, part)| {
        let text = Fields::read(part).and_then(|part: Fields<'a>| part.text("text"));
        text.ok_or_else(|| invalid(&format!("{path}[{index}]"), "is not a text part"))
    };
    parts.into_iter().enumerate().map(text).collect()
}
