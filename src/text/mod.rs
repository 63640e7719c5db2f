//! Text and token ids: tokenizer, chat template, tool calls.
//!
//! Invariants:
//! - Text that came from a message or a tool never becomes a control token: a file that holds `<|im_end|>`
//!   stays text ([`encode_chat`]). Without such text, the ids are those of the plain rendering.
//! - A [`Decoder`] never cuts a UTF-8 character; what it gives, put together, is what decoding all ids at once gives.
//! - Tool-call arguments are the sampled bytes, never re-serialised. Malformed tool calls stay text ([`parsers`]).
//!   Cutting the text differently does not change what is parsed.
//! - What is not supported (a tokenizer whose vocabulary is spelled in a way that lego does not know, a template that would have to be guessed) is
//!   refused when loading, with an error that names the file.

mod chat;
mod decoder;
mod extend;
mod functions;
mod marking;
pub mod parsers;
mod spelling;
mod stop;
mod template;
mod tokenizer;

pub use chat::{ChatInput, encode_chat};
pub use decoder::Decoder;
pub use extend::{Difference, Extender, Limit, NotIncremental, difference};
pub use stop::StopMatcher;
pub use template::ChatTemplate;
pub use tokenizer::{AddedToken, Tokenizer};

use std::path::{Path, PathBuf};

/// What can go wrong between text and ids.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file of the model folder is missing or unreadable.
    #[error("cannot read {path}: {source}; a model folder holds tokenizer.json and a chat template")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file of the model folder is not what it should be.
    #[error("{path}: {message}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what would be right.
        message: String,
    },
    /// The template refused the messages, or failed on them.
    #[error("the chat template cannot render these messages: {0}")]
    Render(String),
    /// The messages have a form that cannot be rendered.
    #[error("{0}")]
    Messages(String),
    /// The tokenizer failed on a text.
    #[error("the tokenizer cannot encode this text: {0}")]
    Encode(String),
    /// New messages cannot be appended to a lineage so that it is what the template makes of the conversation.
    #[error("the lineage cannot be continued, its conversation is to be rendered whole: {0}")]
    Tail(String),
    /// Message text holds a control token's text, and this tokenizer or template has no exact way to keep it text.
    #[error(
        "message text holds {token:?}, a control token's text, which cannot be kept as plain text: {why}"
    )]
    ControlToken {
        /// The control token.
        token: String,
        /// Why it cannot be kept as text.
        why: String,
    },
}

fn read(path: &Path) -> Result<Vec<u8>, TextError> {
    std::fs::read(path).map_err(|source| TextError::Read { path: path.to_owned(), source })
}

fn read_json(path: &Path) -> Result<serde_json::Value, TextError> {
    serde_json::from_slice(&read(path)?)
        .map_err(|error| TextError::File { path: path.to_owned(), message: format!("is not JSON: {error}") })
}

/// As [`read_json`]; `None` when there is no such file.
fn read_json_if_present(path: &Path) -> Result<Option<serde_json::Value>, TextError> {
    match read_json(path) {
        Ok(value) => Ok(Some(value)),
        Err(TextError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn sha256_hex(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    use std::fmt::Write;
    Sha256::digest(bytes).iter().fold(String::with_capacity(64), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
