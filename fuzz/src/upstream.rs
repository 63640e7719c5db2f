//! The readers among lego's dialects.

#[path = "../../src/upstream/routing.rs"]
pub mod routing;
#[path = "../../src/upstream/sglang_completions.rs"]
pub mod sglang_completions;
#[path = "../../src/upstream/sglang_generate.rs"]
pub mod sglang_generate;
