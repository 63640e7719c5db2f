//! Wire formats as pure data and functions: no sockets, no clocks, no I/O.
//!
//! - [`sse`]: an incremental parser of server-sent events on bytes, which gives every input byte back.
//! - [`json`]: byte spans of JSON members and edits on them, so that text is changed without re-serialising it.
//! - [`chat`]: OpenAI's chat protocol: the request as lego needs it, the assembler of replies, what is cut out.
//! - [`completions`]: OpenAI's legacy completions protocol, captured in the same way.
//! - [`generate`]: SGLang's native protocol, captured in the same way.
//! - [`canonical`]: the one text of all JSON texts of a value; [`said`]: the one form of a message that harnesses print
//!   in many.
//! - [`body`]: a request's object, of which a few members are read.
//! - [`object`]: an object being written.
//! - [`responses`]: OpenAI's Responses protocol in front of a chat upstream.
//! - [`translate`]: other protocols in front of a chat upstream.
//! - [`messages`]: Anthropic's Messages protocol on that seam.
//! - [`server_tools`]: tools that only a vendor's own servers run, left out or refused.
//! - [`volatile`]: parts of prompts that change from call to call, ignored or taken out.
//! - [`error`]: the error body that clients of that protocol understand.
//!
//! Invariants:
//! - The raw bytes of the events of a stream, joined, are the stream.
//! - Cutting members out of a text and parsing it equals parsing the text and deleting the members; every byte
//!   outside the cuts is kept.
//! - Nothing here panics on any input; what cannot be read is an error value.
//!
//! `eventsource-stream` is not used here: it decodes to text and forgets the original bytes, which the relay must
//! forward unchanged, and it drops an unterminated last event.

pub mod body;
pub mod canonical;
pub mod chat;
pub mod completions;
pub mod error;
pub mod generate;
pub mod json;
pub mod messages;
pub mod object;
pub mod responses;
pub mod said;
pub mod server_tools;
pub mod sse;
pub mod translate;
pub mod volatile;
