//! OpenAI's Responses protocol in front of a chat upstream, and the reading of an upstream that speaks it itself.
//!
//! - `request`, `items`, `content`, `tools`: the request becomes a chat request.
//! - `writer`, `output`, `events`, `echo`: the chat reply becomes a response.
//! - [`Assembler`], `view`: a response of an upstream's own as the [`chat::Reply`](super::chat::Reply) that the capture
//!   reads; [`cut`]: the model's name in it.
//! - `names`, `shell`, `unwrap`: ids, local shell actions and custom inputs, there and back.
//!
//! Invariants:
//! - What has no chat form is refused with its place in the request, or dropped only where the upstream could not
//!   have used it (`docs/protocols.md` lists both).
//! - The messages of a longer conversation begin with those of the shorter one.
//! - Text, reasoning and arguments of the output are those of [`chat::Reply`](super::chat::Reply), whatever the chunks.
//! - Numbers of events are dense from 0; every item that is added is done before the next is added.
//! - A reply that did not end by itself is never `completed`.

mod assembler;
mod content;
mod echo;
mod events;
mod items;
mod names;
mod output;
mod raw;
mod refuse;
mod request;
mod shell;
#[cfg(test)]
mod tests;
mod tools;
mod unwrap;
mod view;
mod writer;

use bytes::Bytes;

pub use assembler::{Assembler, cut};
pub use request::{Kept, open_call};
pub use writer::Writer;

use super::error::ApiError;
use super::translate::{ReplyNames, Translation};

/// A Responses request as a chat request, and the way back. [`open_call`] is the same with the writer by its type.
///
/// # Errors
/// As of [`open_call`].
pub fn translate(
    body: &Bytes,
    names: ReplyNames,
    earlier: Option<&[Bytes]>,
) -> Result<Translation, ApiError> {
    let (chat, writer) = open_call(body, names, earlier)?;
    Ok(Translation { chat, reply: Box::new(writer) })
}
