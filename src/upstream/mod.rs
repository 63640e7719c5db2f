//! What answers model calls: how to ask each kind of engine for what must be captured, and how to reach it.
//!
//! - [`dialect`]: what is added to a request for each kind of engine, how sampling is pinned (law 12), and what must
//!   be cut out of the reply because of it (law 5).
//! - [`Capabilities`]: what an upstream can give, as a probe's reply showed it.
//! - [`routing`]: expert routing out of replies.
//! - [`sglang_generate`]: replies of SGLang's native endpoint; [`sglang_request`]: what it is asked;
//!   [`sglang_completions`]: its replies as those of completions.
//! - [`vllm_generate`]: vLLM's endpoint for tokens, whose streams have the routing.
//! - [`Upstream`]: the transport. Plain http goes over a connection pool of our own ([`pool`], [`http1`]), https and
//!   proxied hosts over `reqwest`, the embedded engine over its in-process `axum` router.
//!
//! Invariants:
//! - The upstream's key is put in by the transport, replaces whatever the client sent, and appears in no error, log
//!   line or record.
//! - No redirect is followed or passed on: conversation and key go to the configured place alone.
//! - A request body is edited, never re-serialised: keys that lego does not set keep their bytes and order.
//! - Dropping a reply's body closes its connection, which makes engines abort the request.

mod body;
mod capabilities;
mod connect;
pub mod dialect;
mod environment;
mod headers;
pub mod http1;
mod key;
mod native;
mod pool;
mod probe;
mod redirect;
mod refusals;
mod responses;
pub mod routing;
pub mod sglang_completions;
pub mod sglang_generate;
pub mod sglang_request;
mod transport;
mod unpack;
mod url;
pub mod vllm_generate;

pub use body::{BodyError, UpstreamBody};
pub use capabilities::{Capabilities, IdsChannel, probe_body};
pub use connect::ConnectError;
pub use headers::{forward_reply_headers, forward_request_headers, has_session_key};
pub use native::{Native, ROUTE as NATIVE_ROUTE, is_missing, tokenized};
pub use probe::ProbeExchange;
pub use refusals::{Additions, after_refusal};
pub use transport::{Timeouts, Upstream, UpstreamError, UpstreamReply};
pub use url::{BaseUrl, InvalidUrl};

#[cfg(test)]
mod tls_tests;
