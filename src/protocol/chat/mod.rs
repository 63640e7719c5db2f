//! OpenAI's chat protocol: [`Request`] as lego needs it, [`Reply`] assembled from a copy of what came back, and
//! [`Cut`], which takes what lego caused out of the original bytes.

mod cut;
mod reply;
mod request;
mod tools;

pub use cut::{Cut, CutError, CutReply, Unasked, cut};
pub use reply::{Choice, Fed, Reply, ReplyError, ReplyUsage, VersionSpan};
pub use request::{Request, RequestError};
pub use tools::ToolCall;
