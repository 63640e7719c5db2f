//! Dataset lines: SWE-bench's schema plus our `split`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::record::TaskId;

/// The only form of hidden tests that the verifier runs so far: files of named cases for one function.
pub const TEST_FORMAT: &str = "cases/1";

/// Which part of the dataset a task belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    Train,
    Heldout,
}

impl Split {
    /// The name in dataset files.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Heldout => "heldout",
        }
    }
}

/// One task. Unknown fields are kept in `extra`.
#[derive(Debug, Clone, Serialize)]
pub struct Task {
    pub instance_id: TaskId,
    pub repo: String,
    pub base_commit: String,
    pub problem_statement: String,
    /// Reference patch. Never reachable from a sandbox of the agent.
    pub patch: String,
    /// Adds the hidden tests. Never reachable from a sandbox of the agent.
    pub test_patch: String,
    #[serde(rename = "FAIL_TO_PASS")]
    pub fail_to_pass: Vec<String>,
    #[serde(rename = "PASS_TO_PASS")]
    pub pass_to_pass: Vec<String>,
    pub split: Split,
    /// Git bundle that holds `base_commit`; relative to the dataset's folder.
    pub bundle: PathBuf,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Task {
    /// The kind of bug, where the dataset says it.
    #[must_use]
    pub fn bug_family(&self) -> Option<&str> {
        self.extra.get("bug_family").and_then(Value::as_str)
    }

    /// A training task for unit tests of any room: test `a` has to pass.
    #[cfg(test)]
    pub(crate) fn example() -> Self {
        Self {
            instance_id: "t-1".parse().expect("id"),
            repo: "r".into(),
            base_commit: "0".repeat(40),
            problem_statement: "p".into(),
            patch: "p".into(),
            test_patch: "t".into(),
            fail_to_pass: vec!["a".into()],
            pass_to_pass: Vec::new(),
            split: Split::Train,
            bundle: "b".into(),
            extra: Map::new(),
        }
    }
}

/// A dataset file that cannot be used. The message names file, line and field.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    #[error("dataset {}: {cause}", path.display())]
    Read { path: PathBuf, cause: std::io::Error },
    #[error("dataset {}, line {line}: {cause}", path.display())]
    Line { path: PathBuf, line: usize, cause: String },
    #[error("dataset {} has no tasks", path.display())]
    Empty { path: PathBuf },
}

/// A dataset file, read and checked.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// The folder of the file: bundles are relative to it.
    pub folder: PathBuf,
    pub tasks: Vec<Task>,
}

impl Dataset {
    /// Reads a JSONL file. Blank lines are skipped.
    ///
    /// # Errors
    /// [`DatasetError`] for the first line that is unreadable, lacks a field, repeats an `instance_id`, or
    /// names a bundle that does not exist.
    pub fn load(path: &Path) -> Result<Self, DatasetError> {
        let read = |cause| DatasetError::Read { path: path.to_owned(), cause };
        let text = std::fs::read(path).map_err(read)?;
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let mut tasks = Vec::new();
        let mut lines_by_id: HashMap<TaskId, usize> = HashMap::new();
        for (index, bytes) in text.split(|&byte| byte == b'\n').enumerate() {
            let line = index + 1;
            if bytes.trim_ascii().is_empty() {
                continue;
            }
            let bad = |cause: String| DatasetError::Line { path: path.to_owned(), line, cause };
            let task = parse(bytes).map_err(bad)?;
            if let Some(first) = lines_by_id.insert(task.instance_id.clone(), line) {
                let id = &task.instance_id;
                return Err(bad(format!("instance_id {id} is already that of line {first}")));
            }
            let bundle = folder.join(&task.bundle);
            if !bundle.is_file() {
                return Err(bad(format!(
                    "field bundle: the repository {} of task {} does not exist",
                    bundle.display(),
                    task.instance_id
                )));
            }
            tasks.push(task);
        }
        if tasks.is_empty() {
            return Err(DatasetError::Empty { path: path.to_owned() });
        }
        Ok(Self { folder, tasks })
    }

    /// The tasks of one split, in the file's order.
    pub fn split(&self, split: Split) -> impl Iterator<Item = &Task> {
        self.tasks.iter().filter(move |task| task.split == split)
    }
}

fn parse(bytes: &[u8]) -> Result<Task, String> {
    let value: Value = serde_json::from_slice(bytes).map_err(|error| {
        format!("not JSON: {}", error.to_string().replace(" at line 1 column", " at column"))
    })?;
    let Value::Object(fields) = value else {
        return Err("not a JSON object".to_owned());
    };
    let mut fields = Fields(fields);
    let task = Task {
        instance_id: fields
            .text("instance_id")?
            .parse()
            .map_err(|error| format!("field instance_id: {error}"))?,
        repo: fields.text("repo")?,
        base_commit: fields.text("base_commit")?,
        problem_statement: fields.text("problem_statement")?,
        patch: fields.text("patch")?,
        test_patch: fields.text("test_patch")?,
        fail_to_pass: fields.names("FAIL_TO_PASS")?,
        pass_to_pass: fields.names("PASS_TO_PASS")?,
        split: fields.split()?,
        bundle: fields.text("bundle")?.into(),
        extra: Map::new(),
    };
    let is_hash = task.base_commit.len() == 40
        && task.base_commit.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if !is_hash {
        return Err(format!(
            "field base_commit: {:?} is not a commit hash of 40 hexadecimal digits",
            task.base_commit
        ));
    }
    if task.fail_to_pass.is_empty() {
        return Err("field FAIL_TO_PASS: empty, so doing nothing would solve the task".to_owned());
    }
    if let Some(id) = task.fail_to_pass.iter().find(|id| task.pass_to_pass.contains(id)) {
        return Err(format!("test {id:?} is in FAIL_TO_PASS and in PASS_TO_PASS"));
    }
    match fields.0.get("test_format").and_then(Value::as_str) {
        Some(TEST_FORMAT) => {}
        found => {
            let found = found.unwrap_or("absent");
            return Err(format!(
                "field test_format: {found}; this lego runs hidden tests of the form {TEST_FORMAT:?} only"
            ));
        }
    }
    Ok(Task { extra: fields.0, ..task })
}

/// The fields of a line that are not taken yet.
struct Fields(Map<String, Value>);

impl Fields {
    fn take(&mut self, name: &str) -> Result<Value, String> {
        self.0.shift_remove(name).ok_or_else(|| format!("field {name} is missing"))
    }

    fn text(&mut self, name: &str) -> Result<String, String> {
        match self.take(name)? {
            Value::String(text) if !text.is_empty() => Ok(text),
            Value::String(_) => Err(format!("field {name} is empty")),
            other => Err(format!("field {name}: expected a string, found {other}")),
        }
    }

    /// A list of names, as a list or as SWE-bench writes it: a string that holds a JSON list.
    fn names(&mut self, name: &str) -> Result<Vec<String>, String> {
        let value = self.take(name)?;
        let list = match &value {
            Value::String(text) => serde_json::from_str(text),
            other => serde_json::from_value(other.clone()),
        };
        list.map_err(|error| {
            format!("field {name}: expected a list of test names or a string that holds one: {error}")
        })
    }

    fn split(&mut self) -> Result<Split, String> {
        match self.text("split")?.as_str() {
            "train" => Ok(Split::Train),
            "heldout" => Ok(Split::Heldout),
            other => Err(format!("field split: {other:?} is neither \"train\" nor \"heldout\"")),
        }
    }
}
