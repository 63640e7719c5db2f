//! Sampled text to reasoning, content and tool calls, as it arrives.
//!
//! A [`ReplyParser`] takes a reply's text in pieces and gives [`ReplyEvent`]s: reasoning and content at once, up to what
//! may be the beginning of markup; a call's name and its arguments as they become certain. Each form is a file of its
//! own ([`ToolForm`], [`ReasoningForm`]); it is recognised from the model's chat template or named as vLLM names it.
//!
//! Invariants:
//! - Nothing is lost and nothing invented. Text, reasoning, markup, the spans of calls that ended and the raw text of
//!   malformed ones, put together in order, are the sampled text.
//! - Nothing is re-serialised. Where a form writes arguments as JSON, they are the sampled bytes. Where it writes values
//!   as plain text (Qwen3-Coder, GLM), strings are quoted with their bytes kept, and other declared types are passed as
//!   they were sampled.
//! - How the text is cut changes nothing but how deltas are split.
//! - The work is linear in the text: a call's arguments are read once, in however many pieces they come.
//!
//! # When a call is certain
//! It has begun ([`ReplyEvent::CallStart`]) when its name is known and what follows the name is the beginning of
//! arguments in the form. That does not make it a call: its arguments may turn out malformed, or the reply may end.
//! It is one at [`ReplyEvent::CallEnd`]: arguments complete and valid, and the form's closing markup read, or, in the
//! JSON forms and after `</function>`, the end of the reply in its place. Whoever streams deltas to a client that acts
//! on a call without its end (some repair and execute half a call) must let such a stream fail, or ask for
//! [`ReplyParser::with_whole_calls`]: then a call is given once it has ended, and a malformed one is only its raw text.
//! The text of a malformed call never opens another one: it counts as text up to its closing tag, since what looks like
//! a call in there may be part of its arguments.
//!
//! # Control tokens
//! By default tags are found in the text, however tokens spell it: a tokenizer may have no token for a tag, and a policy
//! may spell one with ordinary tokens, which engines accept. Where the tokens are known,
//! [`ReplyParser::with_token_tags`] is exact: a tag that is a token counts only as that token, so a reply can speak of
//! `<tool_call>` or write a file that holds `</arg_value>`, and no token can stand within JSON.
//!
//! # Reasoning
//! A block counts at the beginning of a reply, after white space at most, or when the prompt left it open. Calls within
//! it are reasoning: the model did not make them. A block that never closes is reasoning to the end, and is flagged.

mod call_object;
mod deepseek;
mod form;
mod glm45;
mod hermes;
mod json;
mod kimi_k2;
mod llama3_json;
mod mistral;
mod qwen3_coder;
mod reply;
mod schemas;
mod section;
mod sink;
mod values;
mod window;

pub use form::{Forms, ReasoningForm, ToolForm, UnknownForm};
pub use reply::ReplyParser;
pub use schemas::ToolSchemas;
pub use sink::{Malformation, ReplyEvent};
pub use window::Piece;

#[cfg(test)]
mod tests;
