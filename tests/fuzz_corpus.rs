//! The fuzz targets over their corpora: every input that fuzzing found worth keeping, on the stable compiler.

#[path = "../fuzz/targets/mod.rs"]
mod targets;

use std::fs;
use std::path::Path;

#[test]
fn every_input_of_every_corpus_holds() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    for (name, target) in targets::ALL {
        let folder = corpora.join(name);
        let mut inputs: Vec<_> = fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
            .map(|entry| entry.expect("entry").path())
            .collect();
        inputs.sort();
        assert!(inputs.len() > 10, "the corpus of {name} is there");
        for input in inputs {
            let data = fs::read(&input).expect("input");
            let ran = std::panic::catch_unwind(|| target(&data));
            assert!(ran.is_ok(), "{} fails: cargo +nightly fuzz run {name} with it", input.display());
        }
        target(b"");
    }
}

#[test]
fn every_corpus_has_a_target_and_a_binary() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    for entry in fs::read_dir(fuzz.join("corpus")).expect("corpora") {
        let name = entry.expect("entry").file_name().into_string().expect("name");
        assert!(targets::ALL.iter().any(|(target, _)| *target == name), "{name}");
    }
    for (name, _) in targets::ALL {
        assert!(fuzz.join(format!("fuzz_targets/{name}.rs")).is_file(), "{name}");
    }
}
