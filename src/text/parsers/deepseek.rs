//! `<｜tool▁calls▁begin｜>…<｜tool▁calls▁end｜>`: DeepSeek.
//!
//! - V3 and R1: ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\n{…}\n```<｜tool▁call▁end｜>``;
//! - V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.

use super::section::{Section, Spelling};

const SEPARATOR: &str = "<｜tool▁sep｜>";

pub(super) fn v3() -> Section {
    Section::new(Spelling {
        header_end: &["```json"],
        fence: Some(&["```"]),
        header: |header| {
            let (kind, name) = header.split_once(SEPARATOR)?;
            (kind.trim_ascii() == "function").then_some((name.trim_ascii(), None))
        },
        ..spelling()
    })
}

pub(super) fn v31() -> Section {
    Section::new(spelling())
}

fn spelling() -> Spelling {
    Spelling {
        tags: &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            SEPARATOR,
        ],
        open: &["<｜tool▁calls▁begin｜>"],
        between: &["<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"],
        header_end: &[SEPARATOR],
        fence: None,
        close: &["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
        header: |header| Some((header, None)),
    }
}
