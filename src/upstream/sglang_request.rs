//! What SGLang's native `/generate` is asked: a completions request in its words, or a client's own request with what
//! is to be captured.
//!
//! | completions | `/generate` |
//! |---|---|
//! | `prompt`, one or several | `text` or `input_ids` |
//! | `max_tokens` (16 where it is left out), `min_tokens`, `seed` | `max_new_tokens`, `min_new_tokens`, `sampling_seed` |
//! | other sampling parameters | the same, in `sampling_params` |
//! | `logprobs` | `return_logprob`, `top_logprobs_num`, `return_text_in_logprobs` |
//! | `return_token_ids` | `return_prompt_token_ids`; the sampled ids always come |
//!
//! What the server alone can do with a completions request ([`is_expressible`]) stays one.

use serde_json::Value;

use super::dialect::{Prepared, SamplingPlan, Wanted, is_shaping, sampling_of, semantics};
use crate::protocol::chat::{Cut, Unasked};
use crate::protocol::completions::{self, Prompt};
use crate::protocol::generate;
use crate::protocol::json::{self, ScanError};
use crate::protocol::object::Object;
use crate::record::{LogprobSemantics, Sampling, UpstreamKind};

/// What is asked beside what the client wants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Asking {
    pub wanted: Wanted,
    /// Expert routing: the server gives it, and it is to be captured.
    pub routing: bool,
    pub plan: SamplingPlan,
}

/// Sampling parameters by the names that completions and `/generate` have for them.
const SAMPLING: [(&str, &str); 22] = [
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("min_p", "min_p"),
    ("frequency_penalty", "frequency_penalty"),
    ("presence_penalty", "presence_penalty"),
    ("repetition_penalty", "repetition_penalty"),
    ("max_tokens", "max_new_tokens"),
    ("min_tokens", "min_new_tokens"),
    ("seed", "sampling_seed"),
    ("n", "n"),
    ("stop", "stop"),
    ("stop_token_ids", "stop_token_ids"),
    ("stop_regex", "stop_regex"),
    ("no_stop_trim", "no_stop_trim"),
    ("ignore_eos", "ignore_eos"),
    ("skip_special_tokens", "skip_special_tokens"),
    ("logit_bias", "logit_bias"),
    ("custom_params", "custom_params"),
    ("json_schema", "json_schema"),
    ("regex", "regex"),
    ("ebnf", "ebnf"),
];

/// Members that both have beside the sampling parameters.
const BESIDE: [&str; 15] = [
    "rid",
    "priority",
    "extra_key",
    "cache_salt",
    "lora_path",
    "session_params",
    "session_id",
    "data_parallel_rank",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "custom_logit_processor",
    "routed_experts_start_len",
];

/// Sampling parameters that change the distribution and that no client may set while lego decides sampling.
const UNPINNED: [&str; 4] = ["logit_bias", "min_new_tokens", "ignore_eos", "custom_params"];
/// The same beside them.
const UNPINNED_BESIDE: [&str; 1] = ["custom_logit_processor"];

/// OpenAI's number of tokens where a request leaves it out; the native endpoint's own is another.
const MAX_TOKENS: &str = "16";

/// True if `/generate` can be asked for the same. `model`: the name that the upstream would be asked for.
#[must_use]
pub fn is_expressible(request: &completions::Request, model: &str) -> bool {
    let is_given = |name: &str| request.get(name).is_some_and(|value| value != Value::Bool(false));
    let is_text = |prompt: &Prompt| matches!(prompt, Prompt::Text(_));
    let format = request.get("response_format");
    let one_kind = request.prompts.iter().all(is_text) || !request.prompts.iter().any(is_text);
    one_kind
        // What comes before the reply, after it, or instead of its text.
        && !request.asks_echo
        && !is_given("suffix")
        && !is_given("return_hidden_states")
        && !is_given("return_meta_info")
        && format.is_none_or(|format| format["type"] == "text")
        // The server takes an adapter's name off the model's.
        && !model.contains(':')
}

/// A completions request for which [`is_expressible`] holds, in the words of `/generate`. `ids`: those of its
/// prompts, as JSON, where the upstream's tokenizer has told them.
#[must_use]
pub fn of_completions(asking: Asking, request: &completions::Request, ids: Option<&[u8]>) -> Prepared {
    let Asking { wanted, routing, plan } = asking;
    let body = request.object();
    let own = |name: &str| body.raw(name).filter(|value| *value != b"null");
    let is_true = |name: &str| own(name) == Some(b"true");
    let mut out = Object::default();
    let tokenized = ids.and_then(|ids| Some((ids, completions::prompts(ids)?)));
    let (prompt, prompts) = match &tokenized {
        Some((ids, prompts)) => (*ids, prompts),
        None => (own("prompt").unwrap_or_default(), &request.prompts),
    };
    let has_text = prompts.iter().any(|prompt| matches!(prompt, Prompt::Text(_)));
    out.member(if has_text { "text" } else { "input_ids" }, only(prompt, has_text));
    let mut sampling = Object::default();
    let pinned = pins(plan, "sampling_seed");
    for (name, native) in SAMPLING {
        let is_pinned = pinned.iter().any(|(pin, _)| *pin == native);
        let is_unpinned = !pinned.is_empty() && UNPINNED.contains(&native);
        match own(name) {
            _ if is_pinned || is_unpinned => {}
            Some(value) => sampling.member(native, value),
            // All that there is room for.
            None if name == "max_tokens" && body.raw(name).is_some() => sampling.member(native, b"null"),
            None if name == "max_tokens" => sampling.member(native, MAX_TOKENS.as_bytes()),
            None => {}
        }
    }
    for (name, value) in &pinned {
        sampling.member(name, value.as_bytes());
    }
    let sampling = sampling.finish();
    out.member("sampling_params", &sampling);
    out.member("stream", if request.is_stream { b"true" } else { b"false" });
    if wanted.token_ids || wanted.logprobs || request.asks_logprobs {
        out.member("return_logprob", b"true");
        // Those of the prompt would keep the server from using what it has cached of it.
        out.member("logprob_start_len", b"-1");
    }
    if request.asks_logprobs {
        let most = request.get("logprobs").map_or(0, |most| most.as_u64().unwrap_or(1));
        out.member("top_logprobs_num", most.to_string().as_bytes());
        out.member("return_text_in_logprobs", b"true");
    }
    if (wanted.token_ids && has_text) || request.asks_token_ids || is_true("return_prompt_token_ids") {
        out.member("return_prompt_token_ids", b"true");
    }
    if routing || is_true("return_routed_experts") {
        out.member("return_routed_experts", b"true");
    }
    for name in BESIDE {
        if !pinned.is_empty() && UNPINNED_BESIDE.contains(&name) {
            continue;
        }
        if let Some(value) = own(name) {
            out.member(name, value);
        }
    }
    let sampling: Value = serde_json::from_slice(&sampling).unwrap_or_default();
    let sent = sampling_of(&|name| native_value(name, &|native| sampling.get(native).cloned()));
    let is_shaped = pinned.is_empty()
        && (UNPINNED.iter().any(|name| sampling.get(*name).is_some_and(|value| is_shaping(name, value)))
            || UNPINNED_BESIDE.iter().any(|name| own(name).is_some()));
    Prepared {
        body: out.finish().into(),
        upstream_is_stream: request.is_stream,
        cut: Cut::default(),
        sampling_requested: sampling_of(&|name| request.get(name)),
        logprob_semantics: semantics_of(is_shaped, &sent),
        sampling_sent: sent,
        sent_prompts: prompts.clone(),
        is_shaped,
        routing_start: None,
    }
}

/// A client's own request with what is to be captured.
///
/// # Errors
/// [`ScanError`] cannot happen for a parsed request.
pub fn of_native(asking: Asking, request: &generate::Request) -> Result<Prepared, ScanError> {
    let Asking { wanted, routing, plan } = asking;
    let body = request.object();
    let mut set: Vec<(&str, String)> = Vec::new();
    let mut cut = Cut::default();
    let mut ask = |name: &'static str| set.push((name, "true".to_owned()));
    if (wanted.token_ids || wanted.logprobs) && !request.asks_logprobs {
        ask("return_logprob");
        cut.logprobs = Some(Unasked::Absent);
    }
    let has_text = request.prompts.iter().any(|prompt| matches!(prompt, Prompt::Text(_)));
    if wanted.token_ids && has_text && !body.is_true("return_prompt_token_ids") {
        ask("return_prompt_token_ids");
        cut.prompt_token_ids = Some(Unasked::Absent);
    }
    if routing && !body.is_true("return_routed_experts") {
        ask("return_routed_experts");
        cut.routed_experts = Some(Unasked::Absent);
    }
    if cut.logprobs.is_some() && body.raw("logprob_start_len").is_some() {
        set.push(("logprob_start_len", "-1".to_owned()));
    }
    let pinned = pins(plan, "sampling_seed");
    let (remove, unpinned): (Vec<&str>, Vec<&str>) = if pinned.is_empty() {
        (Vec::new(), Vec::new())
    } else {
        let beside = UNPINNED_BESIDE.into_iter().filter(|name| body.raw(name).is_some());
        (beside.collect(), UNPINNED.to_vec())
    };
    let requested = sampling_of(&|name| native_value(name, &|native| request.sampling(native)));
    let sent = sampling_of(&|name| {
        native_value(name, &|native| match pinned.iter().find(|(pin, _)| *pin == native) {
            Some((_, value)) => serde_json::from_str(value).ok(),
            None if unpinned.contains(&native) => None,
            None => request.sampling(native),
        })
    });
    let is_shaped = pinned.is_empty()
        && (UNPINNED.iter().any(|name| request.has_sampling(name))
            || UNPINNED_BESIDE.iter().any(|name| body.raw(name).is_some_and(|value| value != b"null")));
    let is_untouched = set.is_empty() && remove.is_empty() && pinned.is_empty();
    let edited = if is_untouched {
        body.text().clone()
    } else {
        request.edited((&set, &remove), (&pinned, &unpinned))?
    };
    Ok(Prepared {
        body: edited,
        upstream_is_stream: request.is_stream,
        cut,
        sampling_requested: requested,
        logprob_semantics: semantics_of(is_shaped, &sent),
        sampling_sent: sent,
        sent_prompts: request.prompts.clone(),
        is_shaped,
        routing_start: None,
    })
}

/// That of the log-probs of what is sent.
fn semantics_of(is_shaped: bool, sent: &Sampling) -> LogprobSemantics {
    if is_shaped { LogprobSemantics::Unknown } else { semantics(UpstreamKind::Sglang, sent) }
}

/// The value by its native name.
fn native_value(name: &str, get: &dyn Fn(&str) -> Option<Value>) -> Option<Value> {
    let known = SAMPLING.iter().find(|(completions, _)| *completions == name);
    get(known.map_or(name, |(_, native)| native))
}

/// Law 12: lego's own sampling, in full; nothing where the client decides. `seed_name`: what the seed is called.
pub(super) fn pins(plan: SamplingPlan, seed_name: &'static str) -> Vec<(&'static str, String)> {
    let SamplingPlan::Pinned { temperature, seed } = plan else {
        return Vec::new();
    };
    vec![
        ("temperature", Value::from(temperature).to_string()),
        ("top_p", "1.0".to_owned()),
        ("top_k", "-1".to_owned()),
        ("min_p", "0.0".to_owned()),
        ("presence_penalty", "0.0".to_owned()),
        ("frequency_penalty", "0.0".to_owned()),
        ("repetition_penalty", "1.0".to_owned()),
        (seed_name, seed.to_string()),
    ]
}

/// A list of one prompt as that prompt: of a list the server makes a list.
fn only(prompt: &[u8], has_text: bool) -> &[u8] {
    let is_list = prompt.starts_with(b"[") && (has_text || prompt[1..].trim_ascii_start().starts_with(b"["));
    match json::elements(prompt, 0).as_deref() {
        Ok([one]) if is_list => &prompt[one.clone()],
        _ => prompt,
    }
}

#[cfg(test)]
#[path = "sglang_request_tests.rs"]
mod tests;
