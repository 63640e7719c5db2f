//! The tokenizer of a model folder: byte-level BPE as Qwen, Llama 3 and GPT use it, and SentencePiece-like BPE as
//! Llama 2, Mistral and Gemma do.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::spelling::Spelling;
use super::{Decoder, TextError, read, read_json_if_present, sha256_hex};

/// A token with a text of its own, outside the model's merges.
#[derive(Debug, Clone, Deserialize)]
pub struct AddedToken {
    pub id: u32,
    pub content: String,
    /// Special tokens are left out of text (`skip_special_tokens`).
    #[serde(default)]
    pub special: bool,
}

impl AddedToken {
    /// Whether text of this token steers the model. Runs of spaces, which some vocabularies list as added tokens, do not.
    fn is_control(&self) -> bool {
        self.special || !self.content.chars().all(char::is_whitespace)
    }
}

/// Tokenizer of a model folder (`tokenizer.json`), and its special tokens. Immutable; share it.
pub struct Tokenizer {
    full: tokenizers::Tokenizer,
    /// As `full`, without added tokens: for text that must stay text.
    text_only: tokenizers::Tokenizer,
    /// As `text_only`, for text that other text or tokens precede, where that makes a difference.
    continued_text: Option<tokenizers::Tokenizer>,
    spelling: Spelling,
    /// Bytes of each id; empty for ids that the vocabulary skips.
    pieces: Vec<Box<[u8]>>,
    /// Ids that SentencePiece has for bytes that no piece covers.
    are_bytes: Vec<bool>,
    added: Vec<AddedToken>,
    /// Added tokens by first byte, longest text first.
    added_by_first_byte: HashMap<u8, Vec<usize>>,
    special_ids: HashSet<u32>,
    control_ids: HashSet<u32>,
    named_special_tokens: serde_json::Map<String, Value>,
    eos_token_ids: Vec<u32>,
    sha256: String,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.pieces.len())
            .field("eos_token_ids", &self.eos_token_ids)
            .field("sha256", &self.sha256)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json`, and what `tokenizer_config.json` and `generation_config.json` say about special tokens.
    ///
    /// # Errors
    /// A missing or broken file; a tokenizer that spells its vocabulary in another way than those above.
    pub fn load(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        let fail = |message: String| TextError::File { path: path.clone(), message };
        let bytes = read(&path)?;
        let mut json: Value =
            serde_json::from_slice(&bytes).map_err(|error| fail(format!("is not JSON: {error}")))?;
        let spelling = Spelling::of(&json["decoder"])
            .filter(|&spelling| spelling == Spelling::ByteLevel || json["model"]["type"] == "BPE");
        let Some(spelling) = spelling else {
            return Err(fail(format!(
                "has the model {} with the decoder {}; lego reads byte-level tokenizers (decoder ByteLevel), as Qwen's and \
                 Llama 3's, and BPE with the decoders Replace \"▁\", ByteFallback, Fuse, and Strip or none, as Llama 2's, \
                 Mistral's and Gemma's",
                json["model"]["type"], json["decoder"]
            )));
        };
        let added: Vec<AddedToken> = match json.get("added_tokens") {
            Some(list) if !list.is_null() => Deserialize::deserialize(list)
                .map_err(|error| fail(format!("has unreadable added_tokens: {error}")))?,
            _ => Vec::new(),
        };
        // Cutting to a length or padding must never happen behind the caller's back.
        json["truncation"] = Value::Null;
        json["padding"] = Value::Null;
        let full = build(&json).map_err(&fail)?;
        // The crate numbers added tokens itself where the vocabulary does not hold them.
        if let Some(token) = added.iter().find(|token| full.token_to_id(&token.content) != Some(token.id)) {
            return Err(fail(format!(
                "lists the added token {:?} with id {}, but the crate `tokenizers` numbers it {:?}; \
                 added tokens must be in the vocabulary, or follow it without a gap",
                token.content,
                token.id,
                full.token_to_id(&token.content)
            )));
        }
        json["added_tokens"] = Value::Array(Vec::new());
        json["post_processor"] = Value::Null;
        let text_only = build(&json).map_err(&fail)?;
        let depends_on_position = without_first_space(&mut json["pre_tokenizer"]);
        let continued_text = depends_on_position.then(|| build(&json)).transpose().map_err(&fail)?;

        let (pieces, are_bytes) = spelling.pieces(full.get_vocab(true), &added);
        let mut added_by_first_byte: HashMap<u8, Vec<usize>> = HashMap::new();
        for (index, token) in added.iter().enumerate() {
            if let Some(&first) = token.content.as_bytes().first() {
                added_by_first_byte.entry(first).or_default().push(index);
            }
        }
        for list in added_by_first_byte.values_mut() {
            list.sort_by_key(|&index| std::cmp::Reverse(added[index].content.len()));
        }

        let named_special_tokens = named_special_tokens(dir)?;
        let mut tokenizer = Self {
            special_ids: added.iter().filter(|t| t.special).map(|t| t.id).collect(),
            control_ids: added.iter().filter(|t| t.is_control()).map(|t| t.id).collect(),
            full,
            text_only,
            continued_text,
            spelling,
            pieces,
            are_bytes,
            added,
            added_by_first_byte,
            named_special_tokens,
            eos_token_ids: Vec::new(),
            sha256: sha256_hex(&bytes),
        };
        tokenizer.eos_token_ids = tokenizer.find_eos(dir)?;
        Ok(tokenizer)
    }

    /// Ids that end a completion: `eos_token` of `tokenizer_config.json` and `eos_token_id` of
    /// `generation_config.json`; where neither exists, `eos_token_id` of `config.json`.
    fn find_eos(&self, dir: &Path) -> Result<Vec<u32>, TextError> {
        let mut ids: Vec<u32> = self
            .named_special_tokens
            .get("eos_token")
            .and_then(Value::as_str)
            .and_then(|content| self.token_to_id(content))
            .into_iter()
            .collect();
        for file in ["generation_config.json", "config.json"] {
            if file == "config.json" && !ids.is_empty() {
                break;
            }
            let Some(json) = read_json_if_present(&dir.join(file))? else {
                continue;
            };
            let listed = &json["eos_token_id"];
            let values = listed.as_array().cloned().unwrap_or_else(|| vec![listed.clone()]);
            ids.extend(values.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// Ids of `text`; added tokens in it become their ids, nothing is added before or after.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        run(&self.full, text)
    }

    /// Ids of `text` as text alone, behind other tokens: added tokens in it are not recognised, and where a text begins
    /// with a space that is not in it (Mistral), this one does not.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, TextError> {
        run(self.continued_text.as_ref().unwrap_or(&self.text_only), text)
    }

    /// As [`Self::encode_text`], for text that nothing precedes.
    pub(super) fn encode_first_text(&self, text: &str) -> Result<Vec<u32>, TextError> {
        run(&self.text_only, text)
    }

    /// Text of `ids` that nothing precedes: a space that encoding has put before it is dropped (Llama 2, Mistral); a
    /// [`Decoder`] keeps it, for its ids go on from others. Bytes that are not UTF-8 become U+FFFD.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let mut decoder = Decoder::at_beginning(self, skip_special_tokens);
        let mut text = String::new();
        for &id in ids {
            decoder.push(self, id, &mut text);
        }
        decoder.finish(&mut text);
        text
    }

    /// Whether the same text has other ids at the beginning than behind other text, or another text the same ids.
    #[must_use]
    pub fn depends_on_position(&self) -> bool {
        self.continued_text.is_some() || self.dropped_spaces() > 0
    }

    pub(super) fn dropped_spaces(&self) -> usize {
        match self.spelling {
            Spelling::ByteLevel => 0,
            Spelling::Pieces { dropped_spaces } => dropped_spaces,
        }
    }

    /// Whether `id` is one byte of a character that no piece covers.
    pub(super) fn is_byte(&self, id: u32) -> bool {
        self.are_bytes.get(id as usize).copied().unwrap_or_default()
    }

    /// Bytes of one id; empty for an id outside the vocabulary.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces.get(id as usize).map_or(&[], |piece| piece)
    }

    /// The id whose text is exactly `token`, in the vocabulary's own spelling.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.full.token_to_id(token)
    }

    /// The vocabulary's own spelling of `id`.
    #[must_use]
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.full.id_to_token(id)
    }

    /// One more than the highest id.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// Ids that end a completion.
    #[must_use]
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    /// `bos_token`, `eos_token`, … of `tokenizer_config.json`, by name: what templates may use.
    #[must_use]
    pub fn named_special_tokens(&self) -> &serde_json::Map<String, Value> {
        &self.named_special_tokens
    }

    /// Whether `id` is left out of text that skips special tokens.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.contains(&id)
    }

    /// Whether `id` steers the model rather than being text: special tokens and markup such as `<tool_call>`.
    #[must_use]
    pub fn is_control(&self, id: u32) -> bool {
        self.control_ids.contains(&id)
    }

    /// The text of an added token.
    pub(super) fn added_text(&self, id: u32) -> Option<&str> {
        self.added.iter().find(|token| token.id == id).map(|token| token.content.as_str())
    }

    /// The control token whose text is exactly this.
    #[must_use]
    pub fn control_id(&self, text: &str) -> Option<u32> {
        self.token_to_id(text).filter(|id| self.is_control(*id))
    }

    /// SHA-256 of `tokenizer.json`, lower-case hex.
    #[must_use]
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// The first added token in `text` at or after byte `from`, the longest where several begin: `(byte, token)`.
    pub(super) fn find_added(&self, text: &str, from: usize) -> Option<(usize, &AddedToken)> {
        let bytes = text.as_bytes();
        (from..bytes.len()).find_map(|at| {
            self.added_by_first_byte
                .get(&bytes[at])?
                .iter()
                .map(|&index| &self.added[index])
                .find(|token| bytes[at..].starts_with(token.content.as_bytes()))
                .map(|token| (at, token))
        })
    }

    /// As [`Self::find_added`], only control tokens; those that are not special count when `with_markup`.
    pub(super) fn find_control(
        &self,
        text: &str,
        from: usize,
        with_markup: bool,
    ) -> Option<(usize, &AddedToken)> {
        let mut from = from;
        while let Some((at, token)) = self.find_added(text, from) {
            if token.special || (with_markup && token.is_control()) {
                return Some((at, token));
            }
            from = at + token.content.len();
        }
        None
    }
}

fn build(json: &Value) -> Result<tokenizers::Tokenizer, String> {
    tokenizers::Tokenizer::from_bytes(json.to_string())
        .map_err(|error| format!("is not a tokenizer that the crate `tokenizers` can load: {error}"))
}

fn run(tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>, TextError> {
    let encoding =
        tokenizer.encode_fast(text, false).map_err(|error| TextError::Encode(error.to_string()))?;
    Ok(encoding.get_ids().to_vec())
}

/// Sets `Metaspace` to put no space before the first text. True if it did.
fn without_first_space(pre_tokenizer: &mut Value) -> bool {
    let steps = match pre_tokenizer.get_mut("pretokenizers").and_then(Value::as_array_mut) {
        Some(steps) => steps.iter_mut().collect(),
        None => vec![pre_tokenizer],
    };
    let mut did = false;
    for step in steps {
        if step["type"] == "Metaspace" && step["prepend_scheme"] == "first" {
            step["prepend_scheme"] = Value::from("never");
            did = true;
        }
    }
    did
}

/// `bos_token` and its like, as text.
fn named_special_tokens(dir: &Path) -> Result<serde_json::Map<String, Value>, TextError> {
    let config = read_json_if_present(&dir.join("tokenizer_config.json"))?.unwrap_or(Value::Null);
    let mut named = serde_json::Map::new();
    for name in ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"] {
        let token = &config[name];
        if let Some(content) = token.as_str().or_else(|| token["content"].as_str()) {
            named.insert(name.to_owned(), Value::from(content));
        }
    }
    Ok(named)
}
