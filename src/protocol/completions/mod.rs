//! OpenAI's legacy completions protocol: [`Request`] as lego needs it.
//!
//! [`destream`] makes a stream's events of a body.
//!
//! Replies are read by [`Reply`] and cut by [`cut`], which are chat's: a choice has `text` in the place of a delta,
//! its own `prompt_token_ids`, and log-probs in `token_logprobs`. With several prompts, the choices of prompt `k` are
//! `k*n .. k*n+n` ([`Request::prompt_of`], [`Reply::prompt_ids_of`]).

pub mod destream;
mod request;

pub use request::{Prompt, Request, RequestError, prompts};

pub use super::chat::{Cut, CutError, CutReply, Reply, ReplyError, Unasked, cut};

#[cfg(test)]
mod tests;
