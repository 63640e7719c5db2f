//! A byte-level BPE tokenizer trained on the conversations' own text.

use std::collections::HashMap;
use std::path::Path;
use std::str::FromStr;

use serde_json::{Value, json};
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use crate::train::TrainError;

/// Words with a leading space, runs of signs with one, line breaks, white space; digits stay single.
const SPLIT: &str = r"\d| ?[A-Za-z_]+| ?[^\sA-Za-z_\d]+|\n+|\s+(?!\S)|\s";

/// Ids 0 to 4. Those that frame turns are special (left out of text); tool-call marks are text of the reply.
const ADDED: [(&str, bool); 5] = [
    ("<|endoftext|>", true),
    ("<|im_start|>", true),
    ("<|im_end|>", true),
    ("<tool_call>", false),
    ("</tool_call>", false),
];
const PAD: &str = "<|endoftext|>";
const END_OF_TURN: &str = "<|im_end|>";

/// What to train: `vocab=768`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenizerSpec {
    /// Entries, added tokens and the 256 bytes included.
    pub vocab: usize,
}

impl FromStr for TokenizerSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let vocab = text
            .strip_prefix("vocab=")
            .and_then(|number| number.parse().ok())
            .ok_or_else(|| format!("{text:?} is not a tokenizer to train; write vocab=768"))?;
        let least = 256 + ADDED.len();
        if vocab < least {
            return Err(format!("vocab={vocab} is too small: {least} are taken by bytes and control tokens"));
        }
        Ok(Self { vocab })
    }
}

/// Trains on `texts` and writes `tokenizer.json` and `tokenizer_config.json` into `dir`. Depends on the texts alone.
///
/// # Errors
/// What the trainer says, too little text for the vocabulary, a file that cannot be written.
pub fn train_tokenizer(spec: TokenizerSpec, texts: &[String], dir: &Path) -> Result<(), TrainError> {
    let path = dir.join("tokenizer.json");
    let fail = |message: String| TrainError::File { path: path.clone(), message };
    let fail_with = |error: tokenizers::Error| fail(error.to_string());

    let split = Split::new(SplitPattern::Regex(SPLIT.to_owned()), SplitDelimiterBehavior::Isolated, false)
        .map_err(fail_with)?;
    let bytes = ByteLevel::new(false, true, false);
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![
        PreTokenizerWrapper::Split(split),
        PreTokenizerWrapper::ByteLevel(bytes),
    ])));
    tokenizer.with_decoder(Some(bytes));
    let trainer = BpeTrainer::builder()
        .vocab_size(spec.vocab)
        .show_progress(false)
        .special_tokens(ADDED.iter().map(|(token, _)| AddedToken::from(*token, true)).collect())
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let mut trainer = tokenizers::models::TrainerWrapper::BpeTrainer(trainer);
    tokenizer.train(&mut trainer, texts.iter()).map_err(fail_with)?;
    let found = tokenizer.get_vocab_size(true);
    if found != spec.vocab {
        return Err(fail(format!(
            "the texts give {found} entries, {} were asked for; give more text or a smaller vocab",
            spec.vocab
        )));
    }

    let text = tokenizer.to_string(false).map_err(fail_with)?;
    let mut json: Value = serde_json::from_str(&text).map_err(|error| fail(error.to_string()))?;
    let is_special: HashMap<&str, bool> = ADDED.into_iter().collect();
    for token in json["added_tokens"].as_array_mut().into_iter().flatten() {
        let content = token["content"].as_str().unwrap_or_default();
        let special = is_special.get(content).copied().unwrap_or(true);
        token["special"] = Value::Bool(special);
    }
    let config = json!({
        "add_prefix_space": false,
        "bos_token": null,
        "clean_up_tokenization_spaces": false,
        "eos_token": END_OF_TURN,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": null,
    });
    super::folder::write_json(&path, &json)?;
    super::folder::write_json(&dir.join("tokenizer_config.json"), &config)
}
