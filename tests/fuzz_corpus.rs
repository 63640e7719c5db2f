//! The fuzz targets over their corpora: every input that fuzzing found worth keeping, on the stable compiler.

#[path = "../fuzz/targets/mod.rs"]
mod targets;

#[allow(dead_code, reason = "seeds are made of some of them")]
#[path = "common/calls.rs"]
mod calls;

use std::fs;
use std::path::Path;

use lego::capture::fuzzing::{encode, shorten};
use lego::record::{Call, JsonText};

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

/// Payloads of the journal, of calls whose bodies are harnesses' own.
#[test]
#[ignore = "writes seeds into fuzz/corpus/journal_payload, after a change of the journal's encoding"]
fn write_seeds_of_the_journal() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let body = |name: &str| {
        let text = fs::read_to_string(root.join("tests/fixtures").join(name)).expect("a fixture");
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        JsonText::new(value.to_string().chars().take(1500).collect::<String>())
            .or_else(|_| JsonText::new(serde_json::json!(value.to_string().get(..1400)).to_string()))
            .ok()
    };
    let mut seeds: Vec<Vec<Call>> =
        vec![vec![calls::call("s", &[1, 2, 3], &[4, 5])], vec![calls::failed_call("s")]];
    let mut routed = calls::call("r", &[1, 2], &[3, 4]);
    routed.routing = Some(calls::routing(0, 3, 0));
    seeds.push(vec![routed.clone(), calls::call("other", &[], &[])]);
    let base = routed.choice();
    let mut next = calls::call("r", &[1, 2, 3, 4, 5], &[6]);
    next.routing = Some(calls::routing(0, 5, 0).without_first(3, base));
    seeds.push(vec![routed, next]);
    for (number, name) in fixtures(root).iter().enumerate() {
        let ids: Vec<u32> = (0..40 * (number as u32 % 5 + 1)).collect();
        let mut one = calls::call("s", &ids, &[9; 3]);
        one.client_request = body(name);
        let mut second = calls::call("s", &[&ids[..], &[9; 3], &[1; 70]].concat(), &[8]);
        second.client_request = one.client_request.clone();
        second.upstream_request = one.client_request.clone();
        seeds.push(shorten(vec![vec![one], vec![second]]));
    }
    let folder = root.join("fuzz/corpus/journal_payload");
    fs::create_dir_all(&folder).expect("a folder");
    for (number, seed) in seeds.into_iter().enumerate() {
        let payload = encode(seed).expect("small");
        fs::write(folder.join(format!("seed-{number:02}")), payload).expect("written");
    }
}

/// Some requests of harnesses.
fn fixtures(root: &Path) -> Vec<String> {
    let names = ["claude-code", "codex", "opencode", "openhands", "pi", "qwen-code", "anthropic-python"];
    let mut found = vec![];
    for name in names {
        let mut folders = vec![root.join("tests/fixtures/harness").join(name)];
        let mut requests = vec![];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten() {
                let path = entry.expect("entry").path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.to_string_lossy().ends_with(".request.json") {
                    requests.push(path);
                }
            }
        }
        requests.sort();
        let names = requests.iter().take(2).map(|path| path.strip_prefix(root.join("tests/fixtures")));
        found.extend(names.map(|name| name.expect("within").to_string_lossy().into_owned()));
    }
    found
}
