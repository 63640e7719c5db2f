//! The house rules: rooms import from lower levels only, files stay short, `unsafe` stays in its rooms.

use std::fs;
use std::path::{Path, PathBuf};

/// Rooms by level; a room imports only from earlier lines.
const LEVELS: [&[&str]; 10] = [
    &["config", "protocol", "kernels"],
    &["record", "loss", "text"],
    &["telemetry", "model", "capture", "trajectory", "sandbox"],
    &["engine", "replay", "export", "ledger", "task", "harness"],
    &["serve", "upstream", "train"],
    &["proxy", "align"],
    &["rollout"],
    &["dashboard"],
    &["run"],
    &["cli"],
];

const MAX_LINES: usize = 500;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(folder: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else {
            continue;
        };
        for entry in entries {
            let path = entry.expect("readable").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

fn level(room: &str) -> Option<usize> {
    LEVELS.iter().position(|rooms| rooms.contains(&room))
}

/// The room that a file of `src` belongs to; `None` for `lib.rs` and `main.rs`.
fn room(path: &Path) -> Option<String> {
    let inside = path.strip_prefix(root().join("src")).expect("in src");
    let first = inside.components().next()?.as_os_str().to_str()?;
    let name = first.strip_suffix(".rs").unwrap_or(first);
    (!matches!(name, "lib" | "main")).then(|| name.to_owned())
}

/// The text without comments, and without what stands in string literals.
fn code(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(position) = rest.find(['/', '"', '\'']) {
        out.push_str(&rest[..position]);
        rest = &rest[position..];
        if rest.starts_with("//") {
            rest = rest.find('\n').map_or("", |end| &rest[end..]);
        } else if rest.starts_with("/*") {
            rest = rest.find("*/").map_or("", |end| &rest[end + 2..]);
        } else if rest.starts_with('"') {
            let hashes = out.len() - out.trim_end_matches('#').len();
            let is_raw = out[..out.len() - hashes].ends_with('r');
            let end = if is_raw {
                let close = format!("\"{}", "#".repeat(hashes));
                rest[1..].find(&close).map(|end| 1 + end + close.len())
            } else {
                string_end(rest)
            };
            out.push_str("\"\"");
            rest = end.map_or("", |end| &rest[end..]);
        } else if rest.starts_with("'\"'") || rest.starts_with("'\\\"'") {
            rest = rest[1..].find('\'').map_or("", |end| &rest[end + 2..]);
        } else {
            let first = rest.chars().next().map_or(0, char::len_utf8);
            out.push_str(&rest[..first]);
            rest = &rest[first..];
        }
    }
    out.push_str(rest);
    out
}

/// Index after the closing quote of the literal that `text` starts with.
fn string_end(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    text.char_indices().skip(1).find_map(|(index, character)| {
        let ends = character == '"' && !is_escaped;
        is_escaped = character == '\\' && !is_escaped;
        ends.then_some(index + 1)
    })
}

/// Rooms named after `crate::`, in paths, `use` lines and `use crate::{…}` lists.
fn imported_rooms(code: &str) -> Vec<String> {
    let name = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut rooms = Vec::new();
    for (position, matched) in code.match_indices("crate::") {
        let is_macro = code[..position].ends_with('$');
        let after = code[position + matched.len()..].trim_start();
        if is_macro {
            continue;
        }
        let Some(list) = after.strip_prefix('{') else {
            rooms.push(name(after));
            continue;
        };
        let mut depth = 1;
        let mut is_start = true;
        for (index, character) in list.char_indices() {
            match character {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 1 => is_start = true,
                c if is_start && depth == 1 && !c.is_whitespace() => {
                    rooms.push(name(&list[index..]));
                    is_start = false;
                }
                _ => {}
            }
            if depth == 0 {
                break;
            }
        }
    }
    rooms
}

#[test]
fn rooms_import_from_lower_levels_only() {
    let mut wrong = Vec::new();
    for path in rust_files("src") {
        let Some(room) = room(&path) else { continue };
        let Some(own) = level(&room) else {
            wrong.push(format!("{}: room {room} has no level", path.display()));
            continue;
        };
        let text = fs::read_to_string(&path).expect("readable");
        for import in imported_rooms(&code(&text)) {
            if import == room {
                continue;
            }
            match level(&import) {
                Some(other) if other < own => {}
                Some(other) => wrong.push(format!(
                    "{}: {room} (level {own}) imports {import} (level {other})",
                    path.display()
                )),
                None => wrong.push(format!("{}: crate::{import} is no room", path.display())),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn files_are_short() {
    let long: Vec<_> = ["src", "tests", "benches"]
        .into_iter()
        .flat_map(rust_files)
        .filter_map(|path| {
            let lines = fs::read_to_string(&path).expect("readable").lines().count();
            (lines > MAX_LINES).then(|| format!("{}: {lines} lines, at most {MAX_LINES}", path.display()))
        })
        .collect();
    assert!(long.is_empty(), "{}", long.join("\n"));
}

#[test]
fn unsafe_stays_in_its_rooms_and_says_why_it_is_sound() {
    let mut wrong = Vec::new();
    let mut model_files = Vec::new();
    for path in rust_files("src") {
        let text = fs::read_to_string(&path).expect("readable");
        let code = code(&text);
        let uses = code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
        if !uses {
            continue;
        }
        match room(&path).as_deref() {
            Some("kernels" | "sandbox") => {}
            Some("model") => model_files.push(path.clone()),
            // The allocator's one call.
            Some("proxy") if path.ends_with("proxy/lull.rs") => {}
            _ => wrong.push(format!("{}: unsafe outside kernels, sandbox and model's mmap", path.display())),
        }
        if !text.contains("SAFETY:") {
            wrong.push(format!("{}: unsafe without a SAFETY comment", path.display()));
        }
    }
    if model_files.len() > 1 {
        wrong.push(format!("more than one file of model is unsafe: {model_files:?}"));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_reader_sees_what_it_should() {
    let source = "use crate::{record::{A, B}, loss};\nuse crate::text::T; // crate::run\nlet s = \"crate::cli\"; $crate::x!(); '\"'; r#\"crate::\"run\"#; crate::model::f()";
    assert_eq!(imported_rooms(&code(source)), ["record", "loss", "text", "model"]);
}
