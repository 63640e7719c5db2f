//! Ids of lego's own replies: made from the call's id, so that they are unique and repeatable, and so that items
//! which come back say which reply they are from.

use super::raw::Fields;

/// What `encrypted_content` begins with. There is nothing to hide: clients that drop ids keep this one.
const ENCRYPTED: &str = "lego.";

/// Id of an item: `prefix` says its kind, `index` its place in the output.
pub(super) fn item_id(prefix: &str, call_id: &str, index: usize) -> String {
    format!("{prefix}_{call_id}_{index}")
}

/// Id of the response.
pub(super) fn response_id(call_id: &str) -> String {
    format!("resp_{call_id}")
}

/// The `encrypted_content` of a reasoning item.
pub(super) fn encrypted(call_id: &str, index: usize) -> String {
    format!("{ENCRYPTED}{call_id}_{index}")
}

/// The call that an item came from, if it came from lego.
pub(super) fn reply_key(item: &Fields<'_>) -> Option<String> {
    let by_id = item.string("id").and_then(|id| {
        let (_, rest) = id.split_once('_')?;
        without_index(rest)
    });
    by_id.or_else(|| {
        let content = item.string("encrypted_content")?;
        without_index(content.strip_prefix(ENCRYPTED)?)
    })
}

fn without_index(text: &str) -> Option<String> {
    let (key, index) = text.rsplit_once('_')?;
    let is_index = !index.is_empty() && index.len() < 8 && index.bytes().all(|byte| byte.is_ascii_digit());
    (is_index && !key.is_empty()).then(|| key.to_owned())
}
