//! What is asked of each kind of engine, and how that shows in its replies.
//!
//! | kind | token ids | log-probs | weight versions | a member nobody asked for |
//! |---|---|---|---|---|
//! | embedded | `return_token_ids` | `logprobs` | `return_weight_versions` | as vllm; no chunk for an empty text |
//! | vllm | `return_token_ids` (0.13 and later when streamed) | `logprobs` | `return_weight_versions` (0.33) | null; in a stream's chunks `weight_versions` is left out |
//! | openai | none: recorded, never trainable | `logprobs`, taken back if refused | none | `logprobs` null |
//!
//! vLLM ignores unknown keys, so an old server is asked the same and the verdict comes from the reply.

use bytes::Bytes;
use serde_json::Value;

use crate::protocol::chat::{Cut, Request, Unasked};
use crate::protocol::json::ScanError;
use crate::record::{LogprobSemantics, Sampling, UpstreamKind};

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
    /// What must come out of the reply.
    pub cut: Cut,
    pub sampling_requested: Sampling,
    pub sampling_sent: Sampling,
    /// Semantics of the log-probs that will come back.
    pub logprob_semantics: LogprobSemantics,
}

/// Members that change the distribution and that no client may set while lego decides sampling.
const UNPINNED: [&str; 10] = [
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
];

/// Edits a client's request for this kind of engine. `model` replaces the name that the client asked for.
///
/// # Errors
/// [`ScanError`] cannot happen for a parsed request.
pub fn prepare(
    kind: UpstreamKind,
    wanted: Wanted,
    plan: SamplingPlan,
    request: &Request,
    model: Option<&str>,
) -> Result<Prepared, ScanError> {
    let mut set: Vec<(&str, String)> = Vec::new();
    let mut remove: Vec<&str> = Vec::new();
    let mut cut = Cut::default();
    let gives_ids = matches!(kind, UpstreamKind::Embedded | UpstreamKind::Vllm);
    let unasked = match kind {
        UpstreamKind::Vllm | UpstreamKind::Embedded => Unasked::Null,
        _ => Unasked::Absent,
    };
    if let Some(model) = model.filter(|model| *model != request.model) {
        set.push(("model", Value::from(model).to_string()));
    }
    if model.is_some() {
        cut.model = Some(request.model.clone());
    }
    if wanted.token_ids && gives_ids {
        if !request.asks_token_ids {
            set.push(("return_token_ids", "true".to_owned()));
            cut.token_ids = Some(unasked);
            cut.prompt_token_ids = Some(unasked);
            cut.empty_text = kind == UpstreamKind::Embedded;
        }
        if !request.asks_weight_versions {
            set.push(("return_weight_versions", "true".to_owned()));
            let in_stream = if request.is_stream { Unasked::Absent } else { unasked };
            cut.weight_versions = Some(in_stream);
        }
        // With it false, vLLM drops the ids of what its reasoning parser takes.
        if request.refuses_reasoning {
            set.push(("include_reasoning", "true".to_owned()));
            cut.reasoning = true;
        }
    }
    if wanted.logprobs && !request.asks_logprobs {
        set.push(("logprobs", "true".to_owned()));
        cut.logprobs = Some(Unasked::Null);
    }
    if request.is_stream && !request.asks_usage {
        set.push(("stream_options", with_usage(request)));
        cut.usage = true;
    }
    if let SamplingPlan::Pinned { temperature, seed } = plan {
        set.push(("temperature", Value::from(temperature).to_string()));
        set.push(("top_p", "1.0".to_owned()));
        set.push(("presence_penalty", "0.0".to_owned()));
        set.push(("frequency_penalty", "0.0".to_owned()));
        set.push(("seed", seed.to_string()));
        if gives_ids || kind == UpstreamKind::Sglang {
            set.push(("top_k", "-1".to_owned()));
            set.push(("min_p", "0.0".to_owned()));
            set.push(("repetition_penalty", "1.0".to_owned()));
        }
        remove.extend(UNPINNED.iter().filter(|name| request.has(name)));
    }
    let body = if set.is_empty() && remove.is_empty() {
        request.body().clone()
    } else {
        request.edited(&set, &remove)?
    };
    let sampling_requested = sampling_of(&|name| request.get(name));
    let sampling_sent = sampling_of(&|name| {
        if remove.contains(&name) {
            return None;
        }
        match set.iter().find(|(key, _)| *key == name) {
            Some((_, text)) => serde_json::from_str(text).ok(),
            None => request.get(name),
        }
    });
    let logprob_semantics = semantics(kind, &sampling_sent);
    Ok(Prepared { body, cut, sampling_requested, sampling_sent, logprob_semantics })
}

/// The request without what lego added for capture: the retry at a gateway that refuses it.
///
/// # Errors
/// [`ScanError`] cannot happen for a parsed request.
pub fn prepare_plain(
    kind: UpstreamKind,
    plan: SamplingPlan,
    request: &Request,
    model: Option<&str>,
) -> Result<Prepared, ScanError> {
    prepare(kind, Wanted { token_ids: false, logprobs: false }, plan, request, model)
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

fn sampling_of(get: &dyn Fn(&str) -> Option<Value>) -> Sampling {
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
        max_tokens: whole("max_completion_tokens").or_else(|| whole("max_tokens")),
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
/// truncation all of an engine's modes agree; else only the embedded engine's mode is known.
fn semantics(kind: UpstreamKind, sent: &Sampling) -> LogprobSemantics {
    let all_modes_agree = is_untruncated(sent) && sent.temperature == Some(1.0);
    if all_modes_agree || kind == UpstreamKind::Embedded {
        LogprobSemantics::RawT1
    } else {
        LogprobSemantics::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Wanted = Wanted { token_ids: true, logprobs: true };
    const PINNED: SamplingPlan = SamplingPlan::Pinned { temperature: 1.0, seed: 9 };

    fn request(text: &'static str) -> Request {
        Request::parse(Bytes::from_static(text.as_bytes())).expect("request")
    }

    #[test]
    fn a_training_session_sends_its_own_sampling_in_full() {
        let request = request(
            r#"{"model":"m","messages":[],"temperature":0.2,"logit_bias":{"5":-100},"top_k":20,"min_tokens":4,"stop":"x"}"#,
        );
        let sent = prepare(UpstreamKind::Vllm, WANTED, PINNED, &request, Some("policy")).expect("object");
        let body: Value = serde_json::from_slice(&sent.body).expect("JSON");
        assert_eq!(body["model"], "policy");
        assert_eq!(body["temperature"], 1.0);
        assert_eq!(body["top_k"], -1);
        assert!(body.get("logit_bias").is_none() && body.get("min_tokens").is_none());
        assert_eq!(body["stop"], "x");
        assert_eq!(sent.logprob_semantics, LogprobSemantics::RawT1);
        assert_eq!(sent.sampling_requested.temperature, Some(0.2));
        assert_eq!(sent.sampling_requested.logit_bias.as_deref(), Some(r#"{"5":-100}"#));
        assert_eq!(sent.sampling_sent.seed, Some(9));
        assert_eq!(sent.sampling_sent.logit_bias, None);
        assert!(is_untruncated(&sent.sampling_sent));
        assert_eq!(sent.cut.model.as_deref(), Some("m"));
    }

    #[test]
    fn a_call_to_which_nothing_is_added_is_sent_as_it_came() {
        let request = request(
            r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true},"logprobs":true,"return_token_ids":true,"return_weight_versions":true}"#,
        );
        let plan = SamplingPlan::PassThrough;
        let sent = prepare(UpstreamKind::Vllm, WANTED, plan, &request, None).expect("object");
        assert_eq!(sent.body, request.body());
        assert!(sent.cut.is_nothing());
        assert_eq!(sent.sampling_sent, Sampling::default());
        assert_eq!(sent.logprob_semantics, LogprobSemantics::Unknown);
    }

    #[test]
    fn a06_usage_is_asked_for_whatever_the_client_said_short_of_true() {
        for (options, asks) in [
            ("", false),
            (r#","stream_options":null"#, false),
            (r#","stream_options":{}"#, false),
            (r#","stream_options":{"include_usage":false,"x":1}"#, false),
            (r#","stream_options":{"include_usage":true}"#, true),
        ] {
            let text = format!(r#"{{"model":"m","messages":[],"stream":true{options}}}"#);
            let request = Request::parse(Bytes::from(text)).expect("request");
            let sent = prepare(UpstreamKind::Openai, WANTED, SamplingPlan::PassThrough, &request, None)
                .expect("object");
            let body: Value = serde_json::from_slice(&sent.body).expect("JSON");
            assert_eq!(body["stream_options"]["include_usage"], true, "{options}");
            assert_eq!(sent.cut.usage, !asks, "{options}");
        }
    }

    #[test]
    fn a_plain_gateway_is_asked_for_no_ids() {
        let request = request(r#"{"model":"m","messages":[]}"#);
        let sent = prepare(UpstreamKind::Openai, WANTED, PINNED, &request, None).expect("object");
        let body: Value = serde_json::from_slice(&sent.body).expect("JSON");
        assert!(body.get("return_token_ids").is_none() && body.get("top_k").is_none());
        assert_eq!(body["logprobs"], true);
        assert!(!is_untruncated(&sent.sampling_sent));
    }
}
