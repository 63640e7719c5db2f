//! What is asked of each kind of engine, and how that shows in its replies.
//!
//! | kind | token ids | streamed | weight versions | a member nobody asked for |
//! |---|---|---|---|---|
//! | embedded | `return_token_ids` | yes | `return_weight_versions` | as vllm; no chunk for an empty text |
//! | vllm | `return_token_ids` (0.10.2), else `return_tokens_as_token_ids` | since 0.13 | `return_weight_versions` (0.33) | null; in a stream's chunks `weight_versions` is left out |
//! | sglang | `return_token_ids` (0.5.18), else ids beside the log-probs of `return_meta_info` | refused | in `meta_info` and `metadata` | left out |
//! | openai | none: recorded, never trainable | | none | `logprobs` null |
//!
//! SGLang's native endpoint is asked otherwise: [`sglang_request`](super::sglang_request).
//!
//! All are asked for `logprobs`. A server that refuses what is added is asked again without
//! ([`after_refusal`](super::after_refusal)). Expert routing comes in whole
//! replies only, but for [`vllm_generate`](super::vllm_generate): vLLM sends it when its server was started so, SGLang when asked (`return_routed_experts`).
//! [`Capabilities`] says which release it is; what a reply lacks all the same, its verdict says.

use bytes::Bytes;
use serde_json::Value;

use super::capabilities::{Capabilities, IdsChannel};
use crate::config::Relay;
use crate::protocol::chat::{Choice, Cut, IdsFrom, Reply, Request, Unasked, VersionSpan};
use crate::protocol::completions::Prompt;
use crate::protocol::json::ScanError;
use crate::record::{IdsSource, LogprobSemantics, Sampling, UpstreamKind, WeightSource, WeightSpan};

/// What the configuration wants captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    pub token_ids: bool,
    pub logprobs: bool,
}

/// Who decides how tokens are sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SamplingPlan {
    /// The client; what it leaves out the engine fills in, and nobody knows with what.
    PassThrough,
    /// lego, in full: truncation off, penalties neutral, no bias (law 12).
    Pinned { temperature: f64, seed: i64 },
}

/// A request as it goes upstream.
#[derive(Debug, Clone)]
pub struct Prepared {
    pub body: Bytes,
    /// False for a client's stream: the upstream is asked without, and its body becomes the client's events.
    pub upstream_is_stream: bool,
    /// What must come out of the reply.
    pub cut: Cut,
    pub sampling_requested: Sampling,
    pub sampling_sent: Sampling,
    /// Semantics of the log-probs that will come back.
    pub logprob_semantics: LogprobSemantics,
    /// What is sent changes the distribution in a way that `sampling_sent` does not tell.
    pub is_shaped: bool,
    /// The prompts, where they are sent as they are used: token ids among them are the prompt's own.
    pub sent_prompts: Vec<Prompt>,
    /// Position of the first row of expert routing that lego asked for; `None`: it left that to the client.
    pub routing_start: Option<u32>,
}

/// Members that change the distribution and that no client may set while lego decides sampling.
pub(super) const UNPINNED: [&str; 12] = [
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "ignore_eos",
    "logits_processors",
    "use_beam_search",
    "best_of",
    "length_penalty",
    "thinking_token_budget",
    "custom_logit_processor",
    "vllm_xargs",
];

/// Whether a member with this value changes the distribution. Clients that dump their defaults send values that do
/// nothing.
pub(super) fn is_shaping(name: &str, value: &Value) -> bool {
    match (name, value) {
        (_, Value::Null) => false,
        ("ignore_eos" | "use_beam_search", Value::Bool(is_on)) => *is_on,
        ("logit_bias" | "vllm_xargs", Value::Object(members)) => !members.is_empty(),
        ("bad_words" | "logits_processors", Value::Array(list)) => !list.is_empty(),
        ("min_tokens" | "min_new_tokens", Value::Number(number)) => number.as_u64() != Some(0),
        ("best_of" | "length_penalty", Value::Number(number)) => number.as_f64() != Some(1.0),
        _ => true,
    }
}

/// What is known of an upstream, and how its replies are to be passed on: both decide what it is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Approach {
    pub capabilities: Capabilities,
    /// Expert routing is to be captured where there is any.
    pub routing: bool,
    /// The usage of streams is asked for.
    pub usage: bool,
    /// `live` and `destreamed` bind; otherwise a stream is asked for as one unless that would lose something.
    pub relay: Relay,
}

impl From<UpstreamKind> for Approach {
    /// Nothing is known but the kind, and streams pass live.
    fn from(kind: UpstreamKind) -> Self {
        Self { capabilities: Capabilities::assumed(kind), routing: false, usage: true, relay: Relay::Live }
    }
}

impl Approach {
    /// Whether a client's stream is a stream upstream too.
    fn is_live(&self, wanted: Wanted) -> bool {
        let Capabilities { ids, streams_ids, routing, .. } = self.capabilities;
        match self.relay {
            Relay::Live => true,
            Relay::Destreamed => false,
            Relay::Auto | Relay::TokenIn => {
                let loses_ids = ids != IdsChannel::None && !streams_ids;
                let loses_routing = self.routing && routing;
                !(wanted.token_ids && (loses_ids || loses_routing))
            }
        }
    }
}

/// A request on its way to being edited.
#[derive(Default)]
struct Edits<'a> {
    set: Vec<(&'a str, String)>,
    remove: Vec<&'a str>,
    cut: Cut,
}

impl<'a> Edits<'a> {
    /// Sets `name` to true unless the client did; true if it was lego.
    fn ask(&mut self, request: &Request, name: &'a str) -> bool {
        let is_new = request.get(name) != Some(Value::Bool(true));
        if is_new {
            self.set.push((name, "true".to_owned()));
        }
        is_new
    }
}

/// Edits a client's request for this upstream. `model` replaces the name that the client asked for. An
/// [`UpstreamKind`] stands for what is assumed of it and the live relay.
///
/// # Errors
/// [`ScanError`] cannot happen for a parsed request.
pub fn prepare(
    approach: impl Into<Approach>,
    wanted: Wanted,
    plan: SamplingPlan,
    request: &Request,
    model: Option<&str>,
) -> Result<Prepared, ScanError> {
    let approach = approach.into();
    let kind = approach.capabilities.kind;
    let upstream_is_stream = request.is_stream && approach.is_live(wanted);
    let mut edits = Edits::default();
    if let Some(model) = model.filter(|model| *model != request.model) {
        edits.set.push(("model", Value::from(model).to_string()));
    }
    if model.is_some() {
        edits.cut.model = Some(request.model.clone());
    }
    // Servers of Messages and of Responses are not asked in chat's words.
    if request.is_response {
        if let SamplingPlan::Pinned { temperature, .. } = plan {
            pin_response(&mut edits, request, temperature);
        }
    } else if kind != UpstreamKind::Anthropic {
        ask_for_tokens(&mut edits, &approach, wanted, request, upstream_is_stream);
        if let SamplingPlan::Pinned { temperature, seed } = plan {
            pin(&mut edits, kind, request, temperature, seed);
        }
    }
    if request.is_stream && !upstream_is_stream {
        edits.set.push(("stream", "false".to_owned()));
        // Engines refuse it without `stream`; a whole reply has usage anyway.
        edits.remove.extend(request.has("stream_options").then_some("stream_options"));
        // The client's stream has no place for what only bodies have.
        edits.cut.routed_experts = edits.cut.routed_experts.or(Some(Unasked::Null));
    } else if upstream_is_stream && approach.usage && !request.asks_usage && kind != UpstreamKind::Anthropic {
        edits.set.push(("stream_options", with_usage(request)));
        edits.cut.usage = true;
    }
    let Edits { set, remove, cut } = edits;
    let body = if set.is_empty() && remove.is_empty() {
        request.body().clone()
    } else {
        request.edited(&set, &remove)?
    };
    let sampling_requested = sampling_of(&|name| request.get(name));
    let sent = |name: &str| {
        if remove.contains(&name) {
            return None;
        }
        match set.iter().find(|(key, _)| *key == name) {
            Some((_, text)) => serde_json::from_str(text).ok(),
            None => request.get(name),
        }
    };
    let sampling_sent = sampling_of(&sent);
    let is_shaped = UNPINNED.iter().any(|name| sent(name).is_some_and(|value| is_shaping(name, &value)));
    let logprob_semantics = match is_shaped {
        true => LogprobSemantics::Unknown,
        false => semantics(kind, &sampling_sent),
    };
    Ok(Prepared {
        body,
        upstream_is_stream,
        cut,
        sampling_requested,
        sampling_sent,
        logprob_semantics,
        is_shaped,
        sent_prompts: Vec::new(),
        routing_start: None,
    })
}

/// Asks for what is to be captured, and notes what comes back only because of it.
fn ask_for_tokens(
    edits: &mut Edits<'_>,
    approach: &Approach,
    wanted: Wanted,
    request: &Request,
    is_stream: bool,
) {
    let Capabilities { kind, ids, routing, .. } = approach.capabilities;
    let channel = if wanted.token_ids { ids } else { IdsChannel::None };
    let mut needs_logprobs = wanted.logprobs;
    match (kind, channel) {
        (UpstreamKind::Embedded | UpstreamKind::Vllm, IdsChannel::TokenIds) => {
            if edits.ask(request, "return_token_ids") {
                edits.cut.token_ids = Some(Unasked::Null);
                edits.cut.prompt_token_ids = Some(Unasked::Null);
                edits.cut.empty_text = kind == UpstreamKind::Embedded;
            }
            if edits.ask(request, "return_weight_versions") {
                edits.cut.weight_versions = Some(if is_stream { Unasked::Absent } else { Unasked::Null });
            }
            // With it false, vLLM drops the ids of what its reasoning parser takes.
            if request.refuses_reasoning {
                edits.set.push(("include_reasoning", "true".to_owned()));
                edits.cut.reasoning = true;
            }
        }
        // A client that wants log-probs itself wants the tokens' texts in them.
        (UpstreamKind::Vllm, IdsChannel::TokenStrings) if !is_stream && !request.asks_logprobs => {
            edits.ask(request, "return_tokens_as_token_ids");
            needs_logprobs = true;
        }
        // All of these are refused with `stream`.
        (UpstreamKind::Sglang, IdsChannel::TokenIds | IdsChannel::MetaInfo) if !is_stream => {
            let is_meta = channel == IdsChannel::MetaInfo;
            let name = if is_meta { "return_prompt_token_ids" } else { "return_token_ids" };
            if edits.ask(request, name) {
                edits.cut.token_ids = Some(Unasked::Absent);
                edits.cut.prompt_token_ids = Some(Unasked::Absent);
            }
            needs_logprobs |= is_meta;
            // With meta_info, routing is there and not where a client that asked for it looks.
            let asks_routing = request.get("return_routed_experts") == Some(Value::Bool(true));
            if (is_meta || !asks_routing) && edits.ask(request, "return_meta_info") {
                edits.cut.meta_info = Some(Unasked::Absent);
            }
            if approach.routing && routing && edits.ask(request, "return_routed_experts") {
                let asks_ids = ["return_input_ids_in_sglext", "return_output_ids_in_sglext"];
                edits.cut.sglext = !asks_ids.iter().any(|name| request.get(name) == Some(Value::Bool(true)));
                edits.cut.routed_experts = Some(Unasked::Absent);
            }
        }
        _ => {}
    }
    if needs_logprobs && !request.asks_logprobs {
        // Completions take the number of alternatives.
        let all = if request.is_completion { "0" } else { "true" };
        edits.set.push(("logprobs", all.to_owned()));
        edits.cut.logprobs = Some(Unasked::Null);
    }
}

/// Law 12: lego's own sampling, in full.
fn pin(edits: &mut Edits<'_>, kind: UpstreamKind, request: &Request, temperature: f64, seed: i64) {
    for (name, value) in [
        ("temperature", Value::from(temperature).to_string()),
        ("top_p", "1.0".to_owned()),
        ("presence_penalty", "0.0".to_owned()),
        ("frequency_penalty", "0.0".to_owned()),
        ("seed", seed.to_string()),
    ] {
        edits.set.push((name, value));
    }
    // Gateways refuse what OpenAI has not.
    if kind != UpstreamKind::Openai {
        edits.set.push(("top_k", "-1".to_owned()));
        edits.set.push(("min_p", "0.0".to_owned()));
        edits.set.push(("repetition_penalty", "1.0".to_owned()));
    }
    edits.remove.extend(UNPINNED.iter().filter(|name| request.has(name)));
}

/// The same as far as Responses has words for it. What it has none for is the server's, and nothing but the default.
fn pin_response(edits: &mut Edits<'_>, request: &Request, temperature: f64) {
    edits.set.push(("temperature", Value::from(temperature).to_string()));
    edits.set.push(("top_p", "1.0".to_owned()));
    let extras = ["top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"];
    let all = extras.iter().chain(&UNPINNED);
    edits.remove.extend(all.filter(|name| request.has(name)));
}

/// The request without what lego added for capture: the retry at a gateway that refuses it.
///
/// # Errors
/// [`ScanError`] cannot happen for a parsed request.
pub fn prepare_plain(
    approach: impl Into<Approach>,
    plan: SamplingPlan,
    request: &Request,
    model: Option<&str>,
) -> Result<Prepared, ScanError> {
    prepare(approach, Wanted { token_ids: false, logprobs: false }, plan, request, model)
}

/// Where a choice's ids came from.
#[must_use]
pub fn completion_ids_source(choice: &Choice) -> IdsSource {
    match (&choice.token_ids, choice.ids_from) {
        (None, _) => IdsSource::Absent,
        (Some(_), IdsFrom::Engine) => IdsSource::Engine,
        (Some(_), IdsFrom::TokenStrings) => IdsSource::TokenIdStrings,
    }
}

/// The weights that the reply says sampled a choice: spans, or else its one label. `None`: it does not say; `default`
/// is what engines call weights that nobody labelled, in a label as in spans.
#[must_use]
pub fn told_weights(reply: &Reply, choice: &Choice) -> Option<(Option<Vec<WeightSpan>>, WeightSource)> {
    let is_label = |label: &str| label != "default";
    let is_told =
        |spans: &&Vec<VersionSpan>| spans.is_empty() || spans.iter().any(|span| is_label(&span.version));
    if let Some(spans) = choice.weight_versions.as_ref().filter(is_told) {
        let spans = spans.iter().map(|span| WeightSpan {
            version: span.version.clone(),
            start: span.start,
            end: span.end,
        });
        return Some((Some(spans.collect()), WeightSource::ReplySpans));
    }
    let label = choice.weight_version.as_ref().or(reply.weight_version.as_ref());
    let version = label.filter(|label| is_label(label))?.clone();
    let end = u32::try_from(choice.token_ids.as_ref()?.len()).ok()?;
    Some((Some(vec![WeightSpan { version, start: 0, end }]), WeightSource::ReplySingle))
}

fn with_usage(request: &Request) -> String {
    match request.get("stream_options") {
        Some(Value::Object(mut options)) => {
            options.insert("include_usage".to_owned(), Value::Bool(true));
            Value::Object(options).to_string()
        }
        _ => "{\"include_usage\":true}".to_owned(),
    }
}

pub(super) fn sampling_of(get: &dyn Fn(&str) -> Option<Value>) -> Sampling {
    let number = |name: &str| get(name).and_then(|value| value.as_f64());
    let stop = get("stop").and_then(|stop| match stop {
        Value::String(text) => Some(vec![text]),
        Value::Array(list) => list.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
        _ => None,
    });
    let whole = |name: &str| get(name).and_then(|value| value.as_u64());
    Sampling {
        temperature: number("temperature"),
        top_p: number("top_p"),
        top_k: get("top_k").and_then(|value| value.as_i64()),
        min_p: number("min_p"),
        repetition_penalty: number("repetition_penalty"),
        frequency_penalty: number("frequency_penalty"),
        presence_penalty: number("presence_penalty"),
        seed: get("seed").and_then(|value| value.as_i64()),
        max_tokens: ["max_completion_tokens", "max_tokens", "max_output_tokens"].into_iter().find_map(whole),
        stop,
        n: whole("n"),
        logit_bias: get("logit_bias").map(|bias| bias.to_string()),
    }
}

/// True if every parameter was sent, and so that the engine samples from its plain softmax at this temperature.
#[must_use]
pub fn is_untruncated(sent: &Sampling) -> bool {
    sent.temperature.is_some()
        && sent.top_p == Some(1.0)
        && matches!(sent.top_k, Some(-1 | 0))
        && sent.min_p == Some(0.0)
        && sent.repetition_penalty == Some(1.0)
        && sent.frequency_penalty == Some(0.0)
        && sent.presence_penalty == Some(0.0)
        && sent.logit_bias.is_none()
}

/// The log-prob of which distribution an engine of this kind returns for this sampling. At temperature 1 without
/// truncation all of an engine's modes agree. Otherwise vLLM's and a gateway's mode is the server's secret, the
/// embedded engine gives raw values, and SGLang divides by the temperature (unless it is greedy) and gives what is
/// before truncation.
pub(super) fn semantics(kind: UpstreamKind, sent: &Sampling) -> LogprobSemantics {
    let all_modes_agree = is_untruncated(sent) && sent.temperature == Some(1.0);
    match kind {
        _ if all_modes_agree => LogprobSemantics::RawT1,
        UpstreamKind::Embedded => LogprobSemantics::RawT1,
        UpstreamKind::Sglang if sent.temperature == Some(0.0) => LogprobSemantics::RawT1,
        UpstreamKind::Sglang => LogprobSemantics::TempScaled,
        _ => LogprobSemantics::Unknown,
    }
}

#[cfg(test)]
#[path = "dialect_tests.rs"]
mod tests;
