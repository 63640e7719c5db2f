//! Anthropic's Messages protocol in front of a chat upstream, and the reading of an upstream that speaks it itself.
//!
//! - [`translate`]: a request as a chat request; [`Writer`]: the chat reply as Messages events or a body.
//! - [`Assembler`]: a Messages reply as the [`Reply`](crate::protocol::chat::Reply) that the capture reads.
//! - [`destream`]: a whole message as the events of a stream.
//! - [`count_request`], [`count_reply`]: `count_tokens` by the upstream's `/tokenize`.
//! - [`error_body`], [`error_event`], [`error_status`]: errors as these clients understand them.
//!
//! What maps to what, what is refused and what is left out: `docs/protocols.md`.
//!
//! Invariants:
//! - All text of a request reaches the chat request, or the request is refused with the place of what could not.
//!   Strings, tool inputs and schemas are copied, not decoded and printed again.
//! - A turn gives the same chat messages whatever follows it, so prompts extend each other as the turns do. (An empty
//!   assistant turn at the end is no turn.)
//! - An end that the engine did not call one becomes an error, never a stop reason.

mod assembler;
mod body;
mod count;
mod destream;
mod error;
mod events;
mod ids;
mod node;
mod parts;
mod request;
mod stop;
#[cfg(test)]
mod tests;
mod tools;
mod turns;
mod view;
mod writer;

use bytes::Bytes;

pub use assembler::{Assembled, Assembler};
pub use count::{count_reply, counted_reply};
pub use destream::destream;
pub use error::{error_body, error_event, error_status, error_type};
pub use request::count_request;
pub use turns::is_billing_header;
pub use writer::Writer;

use super::error::ApiError;
use super::translate::{ReplyNames, Translation};

/// A Messages request as a chat request, and the writer of its reply.
///
/// # Errors
/// [`ApiError`] with status 400 that names the place in the body of what is wrong, or of what a chat upstream cannot
/// be given.
pub fn translate(body: &Bytes, names: ReplyNames) -> Result<Translation, ApiError> {
    Ok(Translation { chat: request::to_chat(body)?, reply: Box::new(Writer::new(names)) })
}
