//! What an upstream refuses of that which lego adds to requests, and for how long that is believed.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::protocol::chat::Request;
use crate::protocol::error::ApiError;
use crate::record::UpstreamKind;

/// After that time an upstream is asked again for what it refused: it may have been another reason, or another release.
const REFUSAL_HOLDS: Duration = Duration::from_secs(600);
/// Most models of which a refusal is remembered: their names are clients' to choose.
const MAX_REFUSALS: usize = 1000;

/// Members that are added for capture.
const CAPTURE: [&str; 8] = [
    "logprobs",
    "return_token_ids",
    "return_weight_versions",
    "return_tokens_as_token_ids",
    "return_prompt_token_ids",
    "return_meta_info",
    "return_routed_experts",
    "include_reasoning",
];

/// What lego adds to a request besides the model's name and its sampling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Additions {
    /// What is to be captured, and the usage of a stream.
    All,
    /// The usage of a stream.
    Usage,
    Nothing,
}

/// The refusals of one upstream, by its models.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<HashMap<String, (Additions, Instant)>>);

impl Refusals {
    /// What calls for this model take.
    pub(super) fn taken(&self, model: &str, now: Instant) -> Additions {
        let refusals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let held = refusals.get(model).filter(|(_, since)| holds(*since, now));
        held.map_or(Additions::All, |(taken, _)| *taken)
    }

    /// Remembers it; true if that is news.
    pub(super) fn set(&self, model: &str, taken: Additions, now: Instant) -> bool {
        let mut refusals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if refusals.len() >= MAX_REFUSALS {
            refusals.retain(|_, (_, since)| holds(*since, now));
        }
        let known = refusals.get(model).copied();
        // A model that is not remembered is asked twice each time, and that is all.
        let is_news = !known.is_some_and(|(before, since)| before == taken && holds(since, now));
        // What is known is not kept alive by calls that go by it: after a while one finds out whether it still holds.
        if is_news && (refusals.len() < MAX_REFUSALS || known.is_some()) {
            refusals.insert(model.to_owned(), (taken, now));
        }
        is_news
    }
}

fn holds(since: Instant, now: Instant) -> bool {
    now.saturating_duration_since(since) < REFUSAL_HOLDS
}

/// What to add to the next try of a request that was refused with 400 or 422; `None`: another try would not help.
///
/// `sent` is the request as it went, `request` without what lego added, `said` the answer's body. Engines and strict
/// servers name what they refuse. Gateways (kind `openai`) often do not: there a refusal may be of what was added
/// unless it says otherwise.
#[must_use]
pub fn after_refusal(
    kind: UpstreamKind,
    tried: Additions,
    request: &Request,
    sent: &[u8],
    said: &[u8],
) -> Option<Additions> {
    let is_asked = !matches!(kind, UpstreamKind::Embedded | UpstreamKind::Anthropic);
    if !is_asked || ApiError::from_upstream(400, said, "").code == "context_length_exceeded" {
        return None;
    }
    let sent: Value = serde_json::from_slice(sent).ok()?;
    let said = String::from_utf8_lossy(said).to_lowercase();
    let is_added = |name: &str| sent.get(name).is_some_and(|value| request.get(name).as_ref() != Some(value));
    let names = |name: &str| match name {
        "logprobs" => ["logprob", "log prob", "log-prob"].iter().any(|word| said.contains(word)),
        "stream_options" => ["stream_options", "include_usage"].iter().any(|word| said.contains(word)),
        name => said.contains(name),
    };
    let mut added = CAPTURE.iter().filter(|name| is_added(name)).peekable();
    match tried {
        Additions::All | Additions::Usage if is_added("stream_options") && names("stream_options") => {
            Some(Additions::Nothing)
        }
        Additions::All if added.peek().is_some() && kind == UpstreamKind::Openai => Some(Additions::Usage),
        Additions::All if added.any(|name| names(name)) => Some(Additions::Usage),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_holds_for_its_model_and_for_a_while() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        assert_eq!(refusals.taken("a", now), Additions::All);
        assert!(refusals.set("a", Additions::Usage, now));
        assert!(!refusals.set("a", Additions::Usage, now), "no news");
        let later = now + REFUSAL_HOLDS / 2;
        assert!(!refusals.set("a", Additions::Usage, later), "nor is it renewed by who goes by it");
        assert_eq!(refusals.taken("a", now + REFUSAL_HOLDS), Additions::All);
        assert_eq!(refusals.taken("a", now), Additions::Usage);
        assert_eq!(refusals.taken("b", now), Additions::All);
        assert!(refusals.set("a", Additions::Nothing, now));
        assert_eq!(refusals.taken("a", now), Additions::Nothing);
        assert_eq!(refusals.taken("a", now + 2 * REFUSAL_HOLDS), Additions::All);
        for number in 0..2 * MAX_REFUSALS {
            refusals.set(&number.to_string(), Additions::Usage, now);
        }
        assert_eq!(refusals.0.lock().expect("whole").len(), MAX_REFUSALS);
        assert_eq!(refusals.taken("a", now), Additions::Nothing);
    }

    #[test]
    fn c20_only_a_refusal_of_what_was_added_is_answered_with_less() {
        use Additions::{All, Nothing, Usage};
        use UpstreamKind::{Anthropic, Embedded, Openai, Sglang, Vllm};
        let request =
            Request::parse(br#"{"model":"m","messages":[],"stream":true,"top_k":1}"#.as_slice().into());
        let request = request.expect("a request");
        let sent = br#"{"model":"m","messages":[],"stream":true,"top_k":1,"logprobs":true,
            "return_token_ids":true,"stream_options":{"include_usage":true}}"#;
        let overflow = "logprobs: this model's maximum context length is 10 tokens";
        for (kind, tried, said, next) in [
            (Vllm, All, "Unrecognized request arguments supplied: return_token_ids", Some(Usage)),
            (Sglang, All, "unknown field `return_token_ids`", Some(Usage)),
            (Vllm, All, "This model gives no log probabilities", Some(Usage)),
            (Vllm, All, "extra_forbidden: [body, stream_options]", Some(Nothing)),
            (Vllm, All, "unknown: return_token_ids, stream_options", Some(Nothing)),
            (Vllm, Usage, "unknown: stream_options", Some(Nothing)),
            (Openai, All, "bad request", Some(Usage)),
            (Openai, Usage, "bad request", None),
            (Openai, All, overflow, None),
            (Vllm, All, overflow, None),
            (Vllm, All, "unknown: top_k", None),
            // It was not added.
            (Vllm, All, "return_meta_info needs no stream", None),
            (Vllm, Usage, "return_token_ids", None),
            (Vllm, Nothing, "stream_options", None),
            (Embedded, All, "return_token_ids", None),
            (Anthropic, All, "return_token_ids", None),
        ] {
            let found = after_refusal(kind, tried, &request, sent, said.as_bytes());
            assert_eq!(found, next, "{kind:?} {tried:?} {said}");
        }
        // What a client asks for itself is its own.
        let own = Request::parse(sent.as_slice().into()).expect("a request");
        for said in ["return_token_ids", "logprobs", "stream_options"] {
            assert_eq!(after_refusal(Openai, All, &own, sent, said.as_bytes()), None, "{said}");
        }
    }
}
