//! The files of a model folder beside the weights.

use std::path::Path;
use std::{fs, io};

use serde_json::{Value, json};

use super::conversations::Conversation;
use super::tokenizer::{TokenizerSpec, train_tokenizer};
use crate::model::Model;
use crate::text::{ChatTemplate, Tokenizer};
use crate::train::TrainError;

const TEXT_FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// Tokenizer and chat template, loaded, with the files they came from.
#[derive(Debug)]
pub struct SourceFolder {
    /// Names and contents of [`TEXT_FILES`] that exist.
    files: Vec<(&'static str, Vec<u8>)>,
    pub tokenizer: Tokenizer,
    pub template: ChatTemplate,
}

impl SourceFolder {
    /// Loads tokenizer and template of `dir`.
    ///
    /// # Errors
    /// What the `text` room says about the files.
    pub fn load(dir: &Path) -> Result<Self, TrainError> {
        let tokenizer = Tokenizer::load(dir)?;
        let template = ChatTemplate::load(dir)?;
        let mut files = Vec::new();
        for name in TEXT_FILES {
            let path = dir.join(name);
            match fs::read(&path) {
                Ok(bytes) => files.push((name, bytes)),
                // A template may live in tokenizer_config.json.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(TrainError::Read { path, source }),
            }
        }
        Ok(Self { files, tokenizer, template })
    }

    /// A tokenizer trained on `conversations` as `template` (a file) renders them. `dir` holds its files meanwhile.
    ///
    /// # Errors
    /// What the template, the trainer or the file system refuses.
    pub fn with_new_tokenizer(
        spec: TokenizerSpec,
        conversations: &[Conversation],
        template: &Path,
        dir: &Path,
    ) -> Result<Self, TrainError> {
        let work = dir.join(".tokenizer");
        let write_error = |source| TrainError::Write { path: work.clone(), source };
        fs::create_dir_all(&work).map_err(write_error)?;
        fs::copy(template, work.join("chat_template.jinja"))
            .map_err(|source| TrainError::Read { path: template.to_owned(), source })?;
        let loaded = ChatTemplate::load(&work)?;
        let texts = conversations
            .iter()
            .map(|conversation| conversation.render(&loaded))
            .collect::<Result<Vec<_>, _>>()?;
        train_tokenizer(spec, &texts, &work)?;
        let source = Self::load(&work)?;
        fs::remove_dir_all(&work).map_err(write_error)?;
        Ok(source)
    }
}

/// Writes `model` with the text files of `source` into `dir`, as a Hugging Face folder: `config.json`,
/// `model.safetensors`, `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json`.
/// Each file is complete or absent; other files of `dir` stay.
///
/// # Errors
/// The file that cannot be read or written.
pub fn write_folder(model: &Model, source: &SourceFolder, dir: &Path) -> Result<(), TrainError> {
    let partial = dir.join(".partial");
    let write_error = |path: &Path, source| TrainError::Write { path: path.to_owned(), source };
    fs::create_dir_all(&partial).map_err(|error| write_error(&partial, error))?;
    model.save(&partial)?;
    for (name, bytes) in &source.files {
        let to = partial.join(name);
        fs::write(&to, bytes).map_err(|error| write_error(&to, error))?;
    }
    // Sampling is neutral: what is trained is the distribution itself.
    let generation = json!({
        "do_sample": true,
        "eos_token_id": source.tokenizer.eos_token_ids(),
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    });
    write_json(&partial.join("generation_config.json"), &generation)?;
    let entries =
        fs::read_dir(&partial).map_err(|source| TrainError::Read { path: partial.clone(), source })?;
    for entry in entries {
        let entry = entry.map_err(|source| TrainError::Read { path: partial.clone(), source })?;
        let to = dir.join(entry.file_name());
        fs::File::open(entry.path())
            .and_then(|file| file.sync_all())
            .and_then(|()| fs::rename(entry.path(), &to))
            .map_err(|error| write_error(&to, error))?;
    }
    fs::remove_dir(&partial).map_err(|error| write_error(&partial, error))
}

/// Writes `value` with a line break at its end.
pub(super) fn write_json(path: &Path, value: &Value) -> Result<(), TrainError> {
    let text = format!("{value:#}\n");
    fs::write(path, text).map_err(|source| TrainError::Write { path: path.to_owned(), source })
}
