//! vLLM's `/inference/v1/generate`: ids in, ids out. The last event of its streams has the expert routing, which streams
//! of chat and of completions lack.
//!
//! - `sampling_params` is the engine's own struct: what is left out has that struct's defaults, not those of the model's
//!   `generation_config`. So it is asked only where all of sampling is told ([`is_expressible`]).
//! - `max_tokens` null is all that there is room for. Left out it is 16 in older releases.
//! - Texts of `stop` are not asked for: a server that only knows tokens (`--tokens-only`) never looks at text. Nor are
//!   several outputs: older releases break off their stream.
//! - Older releases end the stream of a reply that they gave up without a finish reason.

use bytes::Bytes;
use serde_json::{Value, json};

use super::dialect::{Prepared, SamplingPlan, UNPINNED, is_shaping, sampling_of, semantics};
use super::native::is_missing;
use super::routing;
use super::sglang_request::{Asking, pins};
use crate::protocol::chat::{Cut, Reply};
use crate::protocol::completions::{Prompt, Request};
use crate::protocol::object::Object;
use crate::protocol::sse;
use crate::record::UpstreamKind;

/// It lies beside the version segment of OpenAI's routes.
pub const ROUTE: &str = "/../inference/v1/generate";

/// What the endpoint gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenStreams {
    /// Its streams have the expert routing.
    pub routing: bool,
    /// It leaves out the rows that it is asked to leave out (`routed_experts_prompt_start`).
    pub start: bool,
}

impl TokenStreams {
    /// A server without it, or that lets nobody use it.
    pub const MISSING: Self = Self { routing: false, start: false };

    /// What the reply to a probe shows; `None` if it says nothing (the server is busy, or refuses what it was asked).
    #[must_use]
    pub fn from_reply(status: u16, body: &[u8]) -> Option<Self> {
        match status {
            // Without `--enable-scale-out` it is forbidden.
            401 | 403 => return Some(Self::MISSING),
            _ if is_missing(status) => return Some(Self::MISSING),
            200..300 => {}
            _ => return None,
        }
        let mut reply = Reply::default();
        for data in events(body) {
            reply.feed(&data).ok()?;
        }
        // What went wrong within the reply may go well the next time.
        if reply.error.is_some() {
            return None;
        }
        let Some(choice) = reply.choices.get(&0) else {
            return Some(Self::MISSING);
        };
        // So does what the engine gave up, which older releases say by an end without a reason.
        if matches!(choice.finish_reason.as_deref(), None | Some("abort" | "error")) {
            return None;
        }
        let rows = PROBE.len() + choice.token_ids.as_ref().map_or(0, Vec::len) - 1;
        let text = choice.routed_experts.as_deref().filter(|_| choice.token_ids.is_some());
        let has = |rows: usize| {
            let hint = routing::RoutingHint::default();
            text.is_some_and(|text| routing::decode(UpstreamKind::Vllm, hint, text, 0, rows as u64).is_ok())
        };
        let start = has(rows - PROBE_START);
        Some(Self { routing: start || has(rows), start })
    }
}

/// A prompt that every vocabulary has.
const PROBE: [u32; 3] = [1, 2, 3];
/// Rows that it is asked to leave out.
const PROBE_START: usize = 1;

/// The body of the probe number `attempt`, a streamed call of one token. The second one asks for all rows, for servers
/// that do not know how to leave some out.
#[must_use]
pub fn probe_body(model: &str, attempt: usize) -> Option<Bytes> {
    let mut body = json!({
        "model": model,
        "token_ids": PROBE,
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "logprobs": 0},
        "stream": true,
        "stream_options": {"include_usage": true},
        "return_token_ids": true,
    });
    match attempt {
        0 => body["sampling_params"][START] = PROBE_START.into(),
        1 => {}
        _ => return None,
    }
    Some(body.to_string().into())
}

/// Says at which position of the prompt the rows of the routing begin.
pub const START: &str = "routed_experts_prompt_start";

/// The data of a stream's events.
pub fn events(stream: &[u8]) -> Vec<Bytes> {
    let mut parser = sse::Parser::new();
    parser.push(stream);
    let events = std::iter::from_fn(|| parser.next_event());
    events.filter(sse::Event::has_data).map(|event| event.data()).filter(|data| data != "[DONE]").collect()
}

/// Sampling parameters that it has by the names of completions, and that are none of lego's own.
const SAMPLING: [&str; 8] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
];

/// Members that both have beside the sampling parameters.
const BESIDE: [&str; 3] = ["request_id", "cache_salt", "priority"];

/// True if it can be asked for the same, and nothing of the sampling is left to it.
#[must_use]
pub fn is_expressible(plan: SamplingPlan, request: &Request) -> bool {
    let is_shaped =
        || UNPINNED.iter().any(|name| request.get(name).is_some_and(|value| is_shaping(name, &value)));
    let is_told = match plan {
        SamplingPlan::Pinned { .. } => true,
        // All but the seed.
        SamplingPlan::PassThrough => {
            SAMPLING[..SAMPLING.len() - 1].iter().all(|name| request.get(name).is_some()) && !is_shaped()
        }
    };
    let has_stop = match request.get("stop") {
        None => false,
        Some(Value::Array(texts)) => !texts.is_empty(),
        Some(text) => text != "",
    };
    is_told
        && !has_stop
        && !request.is_constrained
        && request.n == 1
        && matches!(request.prompts.as_slice(), [Prompt::TokenIds(_)])
}

/// A completions request for which [`is_expressible`] holds, as a stream. `model`: the upstream's name for it. `start`:
/// rows of the prompt's routing that are held already, which are not asked for.
#[must_use]
pub fn of_completions(asking: Asking, request: &Request, model: &str, start: Option<u32>) -> Prepared {
    let body = request.object();
    let own = |name: &str| body.raw(name).filter(|value| *value != b"null");
    let pinned = pins(asking.plan, "seed");
    let mut sampling = Object::default();
    for (name, value) in &pinned {
        sampling.member(name, value.as_bytes());
    }
    for name in SAMPLING.into_iter().filter(|name| !pinned.iter().any(|(pin, _)| pin == name)) {
        if let Some(value) = own(name) {
            sampling.member(name, value);
        }
    }
    if let Some(ids) = own("stop_token_ids") {
        sampling.member("stop_token_ids", ids);
    }
    sampling.member("max_tokens", own("max_tokens").unwrap_or(b"null"));
    if asking.wanted.logprobs {
        sampling.member("logprobs", b"0");
    }
    if let Some(start) = start {
        sampling.member(START, start.to_string().as_bytes());
    }
    let sampling = sampling.finish();
    let mut out = Object::default();
    out.member("model", Value::from(model).to_string().as_bytes());
    out.member("token_ids", own("prompt").unwrap_or_default());
    out.member("sampling_params", &sampling);
    out.member("stream", b"true");
    out.member("stream_options", b"{\"include_usage\":true}");
    // Newer releases tell the prompt's in a stream's first event.
    out.member("return_token_ids", b"true");
    for name in BESIDE {
        if let Some(value) = own(name) {
            out.member(name, value);
        }
    }
    let sampling: Value = serde_json::from_slice(&sampling).unwrap_or_default();
    let sampling_sent = sampling_of(&|name| sampling.get(name).filter(|value| !value.is_null()).cloned());
    Prepared {
        body: out.finish().into(),
        upstream_is_stream: true,
        cut: Cut::default(),
        sampling_requested: sampling_of(&|name| request.get(name)),
        logprob_semantics: semantics(UpstreamKind::Vllm, &sampling_sent),
        sampling_sent,
        is_shaped: false,
        sent_prompts: request.prompts.clone(),
        routing_start: start,
    }
}

#[cfg(test)]
#[path = "vllm_generate_tests.rs"]
mod tests;
