//! The reply of `count_tokens`.

use bytes::Bytes;
use serde::Deserialize;

use crate::protocol::translate::Untranslatable;

#[derive(Deserialize)]
struct Counted {
    count: u64,
}

/// `{"input_tokens":n}` from `/tokenize`'s `{"count":n,…}`.
///
/// # Errors
/// [`Untranslatable`] when there is no count: none is made up.
pub fn count_reply(tokenized: &[u8]) -> Result<Bytes, Untranslatable> {
    let counted: Counted =
        serde_json::from_slice(tokenized).map_err(|error| Untranslatable(error.to_string()))?;
    Ok(counted_reply(counted.count))
}

/// `{"input_tokens":n}`.
#[must_use]
pub fn counted_reply(tokens: u64) -> Bytes {
    Bytes::from(format!("{{\"input_tokens\":{tokens}}}"))
}
