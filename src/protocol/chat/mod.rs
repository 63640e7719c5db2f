//! OpenAI's chat protocol: [`Request`] as lego needs it, [`Reply`] assembled from a copy of what came back, and
//! [`Cut`], which takes what lego caused out of the original bytes. [`destream`] makes a stream's events of a body.

mod cut;
pub mod destream;
mod forget;
mod mold;
mod reply;
mod request;
mod tools;
mod view;

pub use cut::{Cut, CutError, CutReply, Unasked, cut};
pub use mold::Stream;
pub use reply::{Choice, Fed, IdsFrom, Reply, ReplyError, ReplyUsage, StopMatch, VersionSpan};
pub use request::{Request, RequestError, inline_system_as_user, without_reasoning};
pub use tools::ToolCall;

pub(crate) use reply::error_message;
pub(in crate::protocol) use tools::{Fragment, add as add_fragment};
pub(crate) use view::{label, pairs, raw_text};
