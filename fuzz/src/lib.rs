//! The fuzz targets over lego's pure parts.
//!
//! The sources are included, not linked: lego as a whole takes minutes to build with coverage. `targets` is the very
//! module that `tests/fuzz_corpus.rs` runs over the corpus on stable.

#![allow(dead_code, unused_imports, reason = "only a part of lego is here")]

extern crate self as lego;

pub mod capture;
#[path = "../../src/protocol/mod.rs"]
pub mod protocol;
#[path = "../../src/record/mod.rs"]
pub mod record;
#[path = "../targets/mod.rs"]
pub mod targets;
pub mod text;
pub mod upstream;
