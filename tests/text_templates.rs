//! The chat templates of many models, rendered as `transformers` does.
//!
//! The templates and their renderings are third parties' texts: they stay outside this repository, in
//! `../shared/golden/chat_templates.json`, and the test says so where the file is absent.

#[path = "common/lineages.rs"]
mod lineages;

use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use lego::text::{ChatInput, ChatTemplate, Extender};
use lineages::{Model, choices};
use serde_json::Value;

/// The moment that the renderings were made at: 2026-01-02 03:04:05.
const MOMENT: Duration = Duration::from_secs(1_767_323_045);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn golden() -> Option<Value> {
    let path = root().join("../shared/golden/chat_templates.json");
    let Ok(bytes) = std::fs::read(&path) else {
        eprintln!("skipped: there is no {}", path.display());
        return None;
    };
    Some(serde_json::from_slice(&bytes).expect("JSON"))
}

#[test]
fn every_golden_rendering_is_met_byte_for_byte() {
    let Some(golden) = golden() else { return };
    let cases = golden["cases"].as_array().expect("cases");
    let (mut rendered, mut raised, mut wrong) = (0, 0, Vec::new());
    for case in cases {
        let name = case["tpl"].as_str().expect("name");
        let source = golden["templates"][name].as_str().expect("source");
        let mut kwargs = case["ctx"].as_object().expect("context").clone();
        let messages = kwargs.remove("messages").expect("messages");
        let tools = kwargs.remove("tools").unwrap_or_default();
        let add_generation_prompt = kwargs.remove("add_generation_prompt") == Some(Value::Bool(true));
        let template =
            ChatTemplate::from_source(source, kwargs.clone()).expect("parses").at(UNIX_EPOCH + MOMENT);
        let input = ChatInput {
            messages: messages.as_array().expect("list"),
            tools: tools.as_array().map(Vec::as_slice),
            add_generation_prompt,
            template_kwargs: Some(&kwargs),
        };
        match (template.render_input(&input), case["ok"].as_str()) {
            (Ok(text), Some(expected)) if text == expected => rendered += 1,
            // What the template raises is its own text; what goes wrong in it, each Jinja says in its own words.
            (Err(error), None) if raises_as(case, &error.to_string()) => raised += 1,
            (result, expected) => {
                wrong.push(format!("{name} {}: {result:?} instead of {expected:?}", case["case"]));
            }
        }
    }
    eprintln!("{rendered} renderings met, {raised} refused as transformers refuses them");
    assert!(wrong.is_empty(), "{} of {} differ, the first: {}", wrong.len(), cases.len(), wrong[0]);
    assert_eq!((rendered, raised), (2128, 272));
}

fn raises_as(case: &Value, error: &str) -> bool {
    let expected = case["err"].as_str().expect("an error");
    expected.strip_prefix("TemplateError: ").is_none_or(|message| error.contains(message))
}

/// A column of the table in docs/token-in.md: a form of conversation.
const COLUMNS: [(&str, &str); 6] = [
    ("question", "an answer, then a question"),
    ("results", "a call, then results"),
    ("results of two", "two calls, then results"),
    ("words and call", "a call with words, then results"),
    ("results, question", "a call, then results and a question"),
    ("system message", "an answer, then a system message and a question"),
];

/// What stands in a cell: `yes`, that the template itself refuses such a conversation, or the number of a reason.
fn cell(extender: &Extender, form: &str, reasons: &mut Vec<String>) -> String {
    match extender.limits().iter().find(|limit| limit.form == form) {
        None => "yes".to_owned(),
        Some(limit) if limit.is_refused_whole => "refuses".to_owned(),
        Some(limit) => number_of(&limit.why, reasons),
    }
}

fn number_of(why: &str, reasons: &mut Vec<String>) -> String {
    let known = reasons.iter().position(|reason| reason == why).unwrap_or_else(|| {
        reasons.push(why.to_owned());
        reasons.len() - 1
    });
    (known + 1).to_string()
}

/// Drives lineages through the template: each tail is the end of the whole rendering, or it is refused, and it is not
/// where the template has no limit. Gives whether all of them are the whole rendering.
fn drive(name: &str, model: &Model) -> &'static str {
    let has_limit = |form| model.extender.limits().iter().any(|limit| limit.form == form);
    let mut choose = choices(7);
    let (mut made, mut same) = (0, 0);
    for _ in 0..12 {
        let lineage = match model.lineage(3, !has_limit("a call, then results"), &mut choose) {
            Ok(lineage) => lineage,
            Err(why) => {
                let is_limited = !model.extender.limits().is_empty();
                assert!(is_limited || why.contains("does not go on from its prompt"), "{name}: {why}");
                continue;
            }
        };
        let whole = model.whole(&lineage.messages, lineage.tools.as_deref()).expect("renders");
        let text = |ids: &[u32]| model.tokenizer.decode(ids, false);
        made += 1;
        same += usize::from(text(&lineage.ids) == text(&whole));
    }
    match (made, same) {
        (0, _) => "-",
        _ if made == same => "yes",
        _ => "no",
    }
}

#[test]
fn the_table_of_templates_is_what_the_docs_say() {
    let Some(golden) = golden() else { return };
    let mut reasons = Vec::new();
    let mut rows: Vec<(Vec<String>, Vec<&str>)> = Vec::new();
    let mut proven = 0;
    let templates = golden["templates"].as_object().expect("templates");
    let mut names: Vec<&String> = templates.keys().collect();
    names.sort();
    for name in names {
        let cells = match Model::new(name, templates[name].as_str().expect("text")) {
            Ok(model) => {
                proven += 1;
                let cells = COLUMNS.map(|(_, form)| cell(&model.extender, form, &mut reasons));
                cells.into_iter().chain([drive(name, &model).to_owned()]).collect()
            }
            Err(error) => vec![number_of(&error.why, &mut reasons); 1],
        };
        match rows.iter_mut().find(|(others, _)| *others == cells) {
            Some((_, names)) => names.push(name),
            None => rows.push((cells, vec![name])),
        }
    }
    let mut table = format!("{proven} of {} templates can be continued.\n\n| templates |", templates.len());
    COLUMNS.iter().for_each(|(title, _)| write!(table, " {title} |").expect("writes"));
    table += " same text |\n|---|---|---|---|---|---|---|---|\n";
    rows.sort_by_key(|(cells, names)| (cells.len() == 1, std::cmp::Reverse(names.len())));
    for (cells, names) in &rows {
        let mut cells = cells.clone();
        if let [why] = &cells[..] {
            cells = vec![format!("no: {why}"); 1];
            cells.resize(COLUMNS.len(), "no".to_owned());
            cells.push("-".to_owned());
        }
        writeln!(table, "| {} | {} |", names.join(", "), cells.join(" | ")).expect("writes");
    }
    table += "\n";
    for (index, reason) in reasons.iter().enumerate() {
        writeln!(table, "{}. {}", index + 1, reason.replace('<', "\\<")).expect("writes");
    }
    let docs = std::fs::read_to_string(root().join("docs/token-in.md")).expect("docs");
    let between = docs.split("<!-- table -->\n").nth(1);
    assert!(
        between == Some(&table),
        "docs/token-in.md needs this between its two <!-- table --> lines:\n\n{table}"
    );
}
