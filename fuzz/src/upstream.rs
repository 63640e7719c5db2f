//! The readers among lego's dialects, and that of replies' framing.

#[path = "../../src/upstream/http1.rs"]
pub mod http1;
#[path = "../../src/upstream/routing.rs"]
pub mod routing;
#[path = "../../src/upstream/sglang_completions.rs"]
pub mod sglang_completions;
#[path = "../../src/upstream/sglang_generate.rs"]
pub mod sglang_generate;
