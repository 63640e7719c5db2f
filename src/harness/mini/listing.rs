//! Finds what a statement is about, and shows lines with their numbers.

use std::path::Path;

/// The file and function that a statement names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// Path relative to the workspace.
    pub file: String,
    /// Lines of the named function, 0-based, half open; `None` when the file has no function it names.
    pub function: Option<(usize, usize)>,
}

/// The first word of the statement that is a file of the workspace, and the first that is a function there.
#[must_use]
pub fn find_subject(workspace: &Path, statement: &str) -> Option<Subject> {
    let words: Vec<&str> = statement
        .split_whitespace()
        .map(|word| word.trim_end_matches(|c: char| !c.is_alphanumeric() && c != '_'))
        .map(|word| word.trim_start_matches(['`', '"', '\'', '(', '[', '*']))
        .filter(|word| !word.is_empty())
        .collect();
    let file = words.iter().find(|word| is_file_of(workspace, word))?;
    let text = std::fs::read_to_string(workspace.join(file)).ok()?;
    let lines: Vec<&str> = text.lines().collect();
    let function = words.iter().find_map(|word| find_function(&lines, word));
    Some(Subject { file: (*file).to_owned(), function })
}

/// Is this a relative path, without `..`, of a regular file of the workspace?
#[must_use]
pub fn is_file_of(workspace: &Path, path: &str) -> bool {
    let is_inside = Path::new(path).components().all(|part| matches!(part, std::path::Component::Normal(_)));
    let meta = workspace.join(path).symlink_metadata();
    is_inside && !path.is_empty() && meta.is_ok_and(|meta| meta.is_file())
}

/// Lines of a function: from the first line of the block that its `def` stands in (decorators, helpers)
/// to its last indented line.
fn find_function(lines: &[&str], name: &str) -> Option<(usize, usize)> {
    let definition = lines.iter().position(|line| {
        let rest = line.trim_start().strip_prefix("def ").and_then(|rest| rest.strip_prefix(name));
        rest.is_some_and(|rest| rest.starts_with('('))
    })?;
    let above = lines[..definition].iter().rposition(|line| line.trim().is_empty());
    let start = above.map_or(0, |blank| blank + 1);
    let margin = indentation(lines[definition]).len();
    let mut end = definition + 1;
    for (index, line) in lines.iter().enumerate().skip(definition + 1) {
        if line.trim().is_empty() {
            continue;
        }
        if indentation(line).len() <= margin {
            break;
        }
        end = index + 1;
    }
    Some((start, end))
}

/// The blanks at the start of a line.
#[must_use]
pub fn indentation(line: &str) -> &str {
    &line[..line.len() - line.trim_start().len()]
}

/// Lines `[start, end)` as `number|line`, numbered from 1.
#[must_use]
pub fn numbered(lines: &[&str], start: usize, end: usize) -> String {
    let shown: Vec<String> = lines
        .iter()
        .enumerate()
        .take(end)
        .skip(start)
        .map(|(index, line)| format!("{}|{line}", index + 1))
        .collect();
    shown.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_comes_with_the_block_it_stands_in() {
        let text = "x = 1\n\ndef sub(a, b):\n    return a - b\ndef f(p):\n    y = sub(p, 1)\n\n    return y\n\ndef g():\n    pass";
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(find_function(&lines, "f"), Some((2, 8)));
        assert_eq!(find_function(&lines, "g"), Some((9, 11)));
        assert_eq!(find_function(&lines, "fg"), None);
        assert_eq!(numbered(&lines, 9, 11), "10|def g():\n11|    pass");
    }

    #[test]
    fn the_subject_is_the_first_file_and_function_named() {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::write(folder.path().join("a.py"), "def f(x):\n    return x\n").expect("write");
        let subject = find_subject(folder.path(), "a.py: f should return the x of /etc/passwd");
        assert_eq!(subject, Some(Subject { file: "a.py".into(), function: Some((0, 2)) }));
        assert_eq!(find_subject(folder.path(), "../a.py should"), None);
    }
}
