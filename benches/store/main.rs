//! What the capture store costs: tokens written with everything synced, bytes a sampled token, tokens read back; beside
//! the same records as lines of JSON and as blobs in SQLite.
//!
//! ```text
//! cargo bench --bench store                                     # compare
//! cargo bench --bench store -- compare [ROUNDS [TRIALS [TURNS [TOKENS-A-REPLY]]]]
//! cargo bench --bench store -- sessions [CALLS [CALLS-A-SESSION]]   # what finding one of many sessions reads
//! cargo bench --bench store -- replies FILE                     # what a model's replies take: smol.py, moe.py
//! cargo bench --bench store -- sizes DIR                        # bytes a sampled token in a capture folder, by column
//! ```
//! CPU time is that of the whole process, or of the Python that runs SQLite (in C); the system's included.

#[path = "../../tests/common/calls.rs"]
mod calls;
mod compare;
mod replies;
mod sessions;
mod sizes;
#[path = "../../tests/common/trial.rs"]
mod trial;

use std::path::Path;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let number = |at: usize, default: usize| {
        arguments
            .get(at)
            .map_or(default, |text| text.parse().expect("a number: see the head of benches/store/main.rs"))
    };
    match arguments.first().map_or("compare", String::as_str) {
        "compare" => compare::compare(number(1, 5), number(2, 16), number(3, 20), number(4, 250)),
        "sessions" => sessions::find(number(1, 1_000_000), number(2, 50)),
        "replies" => replies::measure(path(&arguments)),
        "sizes" => sizes::print(path(&arguments)),
        other => panic!("no work {other:?}: see the head of benches/store/main.rs"),
    }
}

fn path(arguments: &[String]) -> &Path {
    arguments.get(1).expect("a path: see the head of benches/store/main.rs").as_ref()
}
