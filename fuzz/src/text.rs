//! Of `text`, the parsers of replies: they need no tokenizer.

#[path = "../../src/text/parsers/mod.rs"]
pub mod parsers;
