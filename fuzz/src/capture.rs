//! The journal's records, and what is left out of calls.

#[path = "../../src/capture/frame.rs"]
mod frame;
#[path = "../../src/capture/fuzzing.rs"]
pub mod fuzzing;
#[path = "../../src/capture/history/mod.rs"]
mod history;
#[path = "../../src/capture/payload.rs"]
mod payload;

mod layout {
    /// As in lego's own.
    pub(in crate::capture) const DAY_US: i64 = 86_400_000_000;
}
