//! What a training was started with: when it goes on, it gets the same bytes, or is refused.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::RunError;
use super::folder::{RunFolder, write_json};
use crate::config::Config;

/// Files of the starting policy that decide what is sampled and trained.
const OF_MODEL: [&str; 6] = [
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
];

/// SHA-256 of each file that was there, by its name.
type Sums = BTreeMap<String, String>;

/// How a run was begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begun {
    Now,
    /// By a start that kept the sums.
    Before,
    /// By a version of lego that kept none.
    WithoutSums,
}

impl Begun {
    pub fn of(folder: &RunFolder, is_resumed: bool) -> Self {
        match is_resumed {
            false => Self::Now,
            true if folder.has_inputs() => Self::Before,
            true => Self::WithoutSums,
        }
    }
}

/// Keeps the sums of the dataset and of the starting policy in the run folder; a run that is resumed has them already,
/// and must find the same.
///
/// # Errors
/// [`RunError::OtherInput`] names the file that is another; [`RunError::NoInputs`] when the sums are gone;
/// [`RunError::Io`] names a file that cannot be read.
pub fn check(root: &Path, config: &Config, begun: Begun) -> Result<(), RunError> {
    let path = root.join("inputs.json");
    let files = files(config);
    let sums = sums(&files)?;
    match fs::read(&path) {
        _ if begun == Begun::Now => write_json(&path, &sums),
        Err(error) if error.kind() == ErrorKind::NotFound => match begun {
            Begun::WithoutSums => write_json(&path, &sums),
            Begun::Now | Begun::Before => Err(RunError::NoInputs(path)),
        },
        Err(source) => Err(RunError::Io { path, source }),
        Ok(text) => {
            let kept: Sums = serde_json::from_slice(&text)
                .map_err(|error| RunError::Broken { path, cause: error.to_string() })?;
            match files.into_iter().find(|(name, _)| kept.get(name) != sums.get(name)) {
                Some((_, other)) => Err(RunError::OtherInput(other)),
                None => Ok(()),
            }
        }
    }
}

fn files(config: &Config) -> Vec<(String, PathBuf)> {
    let folder = config.model_path();
    let of_model = OF_MODEL.map(|name| (name.to_owned(), folder.join(name)));
    let dataset = config.training.dataset.clone().map(|path| ("dataset".to_owned(), path));
    dataset.into_iter().chain(of_model).collect()
}

fn sums(files: &[(String, PathBuf)]) -> Result<Sums, RunError> {
    let mut sums = Sums::new();
    for (name, path) in files {
        let mut hash = Sha256::new();
        match File::open(path).and_then(|mut file| io::copy(&mut file, &mut hash)) {
            Ok(_) => drop(sums.insert(name.clone(), format!("{:x}", hash.finalize()))),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(source) => return Err(RunError::Io { path: path.clone(), source }),
        }
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Environment;

    #[test]
    fn a_run_goes_on_with_the_bytes_it_was_started_with() {
        let temp = tempfile::tempdir().expect("temp");
        let root = temp.path();
        let at = |name: &str| root.join(name);
        fs::write(at("tasks.jsonl"), "{}").expect("written");
        fs::write(at("model.safetensors"), "weights").expect("written");
        let set = |config: Config, key: &str, path: PathBuf| {
            config.set(key, path.to_string_lossy().into_owned().into(), "--flag").expect("a path")
        };
        let config = Config::defaults(Environment::default()).expect("defaults");
        let config = set(set(config, "training.dataset", at("tasks.jsonl")), "proxy.model_path", root.into());
        check(root, &config, Begun::Now).expect("kept");
        check(root, &config, Begun::Before).expect("the same");
        let is_refused = |name: &str| {
            let error = check(root, &config, Begun::Before).expect_err("another file").to_string();
            assert!(error.contains(name) && error.contains("start a new run"), "{error}");
        };
        fs::write(at("tokenizer.json"), "a new file").expect("written");
        is_refused("tokenizer.json");
        fs::remove_file(at("tokenizer.json")).expect("removed");
        fs::write(at("tasks.jsonl"), "{} ").expect("written");
        is_refused("tasks.jsonl");
        fs::write(at("tasks.jsonl"), "{}").expect("written");
        check(root, &config, Begun::Before).expect("put back");
        fs::remove_file(at("model.safetensors")).expect("removed");
        is_refused("model.safetensors");
        // What is there now is not taken for what was there.
        fs::remove_file(at("inputs.json")).expect("removed");
        is_refused("inputs.json");
        assert!(!at("inputs.json").exists());
        check(root, &config, Begun::WithoutSums).expect("an old run");
        check(root, &config, Begun::Before).expect("kept by now");
    }
}
