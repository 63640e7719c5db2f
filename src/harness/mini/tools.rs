//! The agent's tools over a workspace, and what they answer.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use super::listing::{Subject, find_subject, indentation, is_file_of, numbered};
use super::tests_run::TestCommand;

const BAD_CALL: &str = "ERROR bad call";
const NO_CHANGE: &str = "FAIL no change";
const PASS: &str = "PASS";
/// An edited line is shorter than this, in characters.
const MAX_LINE_CHARS: usize = 160;
/// Lines that `view` shows at most.
const MAX_VIEW_LINES: usize = 200;
/// Lines of the file in the first message when the statement names no function.
const MAX_FIRST_LINES: usize = 60;

/// What a tool call led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    Text(String),
    /// The agent is done.
    Submitted,
}

/// The tools of one workspace.
#[derive(Debug)]
pub struct Tools {
    workspace: PathBuf,
    tests: TestCommand,
    subject: Option<Subject>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Edit {
    line: LineNumber,
    new: String,
    file: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct View {
    file: Option<String>,
    start: Option<LineNumber>,
    end: Option<LineNumber>,
}

/// A line number; small models often write it as a string.
#[derive(Deserialize)]
#[serde(untagged)]
enum LineNumber {
    Number(usize),
    Text(String),
}

impl LineNumber {
    fn get(&self) -> Option<usize> {
        match self {
            Self::Number(number) => Some(*number),
            Self::Text(text) => text.trim().parse().ok(),
        }
    }
}

impl Tools {
    /// The tools of a workspace for this statement, and the first user message: the statement and the
    /// numbered lines of the function it names.
    ///
    /// # Errors
    /// When the workspace cannot be read.
    pub fn new(workspace: &Path, statement: &str, tests: TestCommand) -> std::io::Result<(Self, String)> {
        std::fs::read_dir(workspace)?;
        let statement = statement.trim();
        let subject = find_subject(workspace, statement);
        let mut first = statement.to_owned();
        if let Some(Subject { file, function }) = &subject {
            let text = std::fs::read_to_string(workspace.join(file))?;
            let lines: Vec<&str> = text.lines().collect();
            let (start, end) = function.unwrap_or((0, lines.len().min(MAX_FIRST_LINES)));
            first = format!("{first}\n{}", numbered(&lines, start, end));
        }
        Ok((Self { workspace: workspace.to_owned(), tests, subject }, first))
    }

    /// The tools as requests list them.
    #[must_use]
    pub fn definitions() -> Value {
        let line = json!({"type": "integer", "description": "line number, from 1"});
        let file = json!({"type": "string", "description": "path in the workspace; the file in question if left out"});
        let tool = |name: &str, description: &str, properties: Value, required: Value| {
            json!({"type": "function", "function": {
                "name": name,
                "description": description,
                "parameters": {"type": "object", "properties": properties, "required": required},
            }})
        };
        json!([
            tool(
                "view",
                "Show numbered lines of a file.",
                json!({"file": file, "start": line, "end": line}),
                json!([])
            ),
            tool(
                "edit",
                "Replace one line (its indentation is kept) and run the tests. An edit that fails them is undone.",
                json!({"line": line, "new": {"type": "string", "description": "the line's new text"}, "file": file}),
                json!(["line", "new"])
            ),
            tool("run_tests", "Run the tests.", json!({}), json!([])),
            tool("submit", "Finish with the files as they are.", json!({}), json!([])),
        ])
    }

    /// Runs one call. A call that makes no sense is answered, not an error.
    ///
    /// # Errors
    /// When the tests cannot be started or a file cannot be written.
    pub async fn call(&mut self, name: &str, arguments: &str) -> std::io::Result<Answer> {
        let Ok(Value::Object(arguments)) = serde_json::from_str::<Value>(arguments) else {
            return Ok(Answer::Text(BAD_CALL.to_owned()));
        };
        let arguments = Value::Object(arguments);
        let text = match name {
            "submit" => return Ok(Answer::Submitted),
            "run_tests" => self.tests.run(&self.workspace).await?,
            "edit" => match serde_json::from_value(arguments) {
                Ok(edit) => self.edit(edit).await?,
                Err(_) => BAD_CALL.to_owned(),
            },
            "view" => serde_json::from_value(arguments)
                .ok()
                .and_then(|view| self.view(&view))
                .unwrap_or_else(|| BAD_CALL.to_owned()),
            _ => BAD_CALL.to_owned(),
        };
        Ok(Answer::Text(text))
    }

    /// What a reply without a tool call is answered.
    #[must_use]
    pub fn no_call() -> String {
        BAD_CALL.to_owned()
    }

    async fn edit(&mut self, edit: Edit) -> std::io::Result<String> {
        let Some((path, before, after)) = self.edited(&edit) else {
            return Ok(BAD_CALL.to_owned());
        };
        if before == after {
            return Ok(NO_CHANGE.to_owned());
        }
        std::fs::write(&path, &after)?;
        let answer = self.tests.run(&self.workspace).await?;
        if answer != PASS {
            std::fs::write(&path, &before)?;
        }
        Ok(answer)
    }

    /// Path, text before and text after; `None` if the edit makes no sense.
    fn edited(&self, edit: &Edit) -> Option<(PathBuf, String, String)> {
        let path = self.path(edit.file.as_deref())?;
        let before = std::fs::read_to_string(&path).ok()?;
        let mut lines: Vec<&str> = before.split('\n').collect();
        let count = if before.ends_with('\n') { lines.len() - 1 } else { lines.len() };
        let index = edit.line.get()?.checked_sub(1).filter(|&index| index < count)?;
        let changed = format!("{}{}", indentation(lines[index]), edit.new.trim());
        if changed.contains('\n') || changed.chars().count() >= MAX_LINE_CHARS {
            return None;
        }
        lines[index] = &changed;
        let after = lines.join("\n");
        Some((path, before, after))
    }

    fn view(&self, view: &View) -> Option<String> {
        let path = self.path(view.file.as_deref())?;
        let text = std::fs::read_to_string(path).ok()?;
        let lines: Vec<&str> = text.lines().collect();
        let start = view.start.as_ref().map_or(Some(1), LineNumber::get)?.checked_sub(1)?;
        let last = start.checked_add(MAX_VIEW_LINES)?;
        let end = view.end.as_ref().map_or(Some(last), LineNumber::get)?.min(last);
        (start < end && start < lines.len()).then(|| numbered(&lines, start, end))
    }

    fn path(&self, file: Option<&str>) -> Option<PathBuf> {
        let file = file.or(self.subject.as_ref().map(|subject| subject.file.as_str()))?;
        is_file_of(&self.workspace, file).then(|| self.workspace.join(file))
    }
}
