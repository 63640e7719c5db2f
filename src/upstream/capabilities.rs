//! What an upstream can give, as one tiny call showed it.
//!
//! Versions are not asked for: front ends and forks differ from the releases they name. A reply that has the ids, the
//! routing and the message's members in it is the proof.

use bytes::Bytes;
use serde_json::{Map, Value, json};

use crate::record::UpstreamKind;

/// How whole replies carry the ids of sampled tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdsChannel {
    /// Not at all.
    None,
    /// `return_token_ids`.
    TokenIds,
    /// SGLang's `return_meta_info`, whose log-probs have ids, and `return_prompt_token_ids` (before 0.5.18).
    MetaInfo,
    /// `return_tokens_as_token_ids`: in the place of the token's text in log-probs (vLLM before 0.10.2). There are
    /// none of the prompt.
    TokenStrings,
}

impl IdsChannel {
    /// The member that carries them, for the log.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::TokenIds => "token_ids",
            Self::MetaInfo => "meta_info",
            Self::TokenStrings => "token_strings",
        }
    }
}

/// What an upstream can give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    pub kind: UpstreamKind,
    /// A reply showed it; false: it is assumed.
    pub is_probed: bool,
    pub ids: IdsChannel,
    /// Streams carry the id of every sampled token, whatever parsers make of its text.
    pub streams_ids: bool,
    /// Whole replies carry expert routing.
    pub routing: bool,
}

/// Number of probes that are tried in turn: the next one asks for less.
pub(super) const PROBES: usize = 2;

impl Capabilities {
    /// What is assumed before any probe: a recent release, without routing.
    #[must_use]
    pub const fn assumed(kind: UpstreamKind) -> Self {
        let (ids, streams_ids) = match kind {
            UpstreamKind::Embedded | UpstreamKind::Vllm => (IdsChannel::TokenIds, true),
            UpstreamKind::Sglang => (IdsChannel::TokenIds, false),
            UpstreamKind::Openai | UpstreamKind::Anthropic => (IdsChannel::None, false),
        };
        Self { kind, is_probed: false, ids, streams_ids, routing: false }
    }

    /// What the reply to [`probe_body`] shows; `None` if it says nothing (an error, or no chat reply).
    #[must_use]
    pub fn from_reply(kind: UpstreamKind, status: u16, body: &[u8]) -> Option<Self> {
        if !(200..300).contains(&status) {
            return None;
        }
        let reply: Value = serde_json::from_slice(body).ok()?;
        let choice = reply["choices"].get(0)?;
        let message = choice["message"].as_object()?;
        let mut found = Self { is_probed: true, ..Self::assumed(kind) };
        match kind {
            UpstreamKind::Vllm => {
                found.ids = if choice["token_ids"].is_array() {
                    IdsChannel::TokenIds
                } else if has_id_strings(choice) {
                    IdsChannel::TokenStrings
                } else {
                    IdsChannel::None
                };
                // Until 0.12 chunks of what parsers swallow were left out, ids and all. Releases with
                // `reasoning_content` (until 0.14) cannot be told from those.
                found.streams_ids =
                    found.ids == IdsChannel::TokenIds && !message.contains_key("reasoning_content");
                found.routing = choice["routed_experts"].is_string();
            }
            UpstreamKind::Sglang => {
                let meta = &choice["meta_info"];
                found.ids = if choice["response_token_ids"].is_array() {
                    IdsChannel::TokenIds
                } else if meta["output_token_logprobs"].is_array() && choice["prompt_token_ids"].is_array() {
                    IdsChannel::MetaInfo
                } else {
                    IdsChannel::None
                };
                found.routing =
                    meta["routed_experts"].is_string() || reply["sglext"]["routed_experts"].is_string();
            }
            UpstreamKind::Embedded | UpstreamKind::Openai | UpstreamKind::Anthropic => {}
        }
        Some(found)
    }
}

fn has_id_strings(choice: &Value) -> bool {
    let entries = choice["logprobs"]["content"].as_array().map(Vec::as_slice).unwrap_or_default();
    let is_id = |entry: &Value| {
        let id = entry["token"].as_str().and_then(|token| token.strip_prefix("token_id:"));
        id.is_some_and(|id| id.parse::<u32>().is_ok())
    };
    !entries.is_empty() && entries.iter().all(is_id)
}

/// The body of the probe number `attempt`, a whole chat call of one token; `None`: there is nothing (more) to be
/// found out about this kind. A later attempt asks for less, for servers that refuse what they cannot do.
#[must_use]
pub fn probe_body(kind: UpstreamKind, model: &str, attempt: usize) -> Option<Bytes> {
    let extras: &[&str] = match (kind, attempt) {
        (UpstreamKind::Vllm, 0) => {
            &["return_token_ids", "return_tokens_as_token_ids", "return_weight_versions"]
        }
        (UpstreamKind::Sglang, 0) => {
            &["return_token_ids", "return_prompt_token_ids", "return_meta_info", "return_routed_experts"]
        }
        (UpstreamKind::Sglang, 1) => &["return_token_ids", "return_prompt_token_ids", "return_meta_info"],
        _ => return None,
    };
    let mut body = Map::new();
    body.insert("model".into(), model.into());
    body.insert("messages".into(), json!([{"role": "user", "content": "hi"}]));
    body.insert("max_tokens".into(), 1.into());
    body.insert("temperature".into(), 1.0.into());
    body.insert("stream".into(), false.into());
    body.insert("logprobs".into(), true.into());
    body.extend(extras.iter().map(|name| ((*name).to_owned(), Value::Bool(true))));
    Some(Value::Object(body).to_string().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> String {
        let path = format!("{}/tests/fixtures/wire/{name}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).expect("fixture")
    }

    fn seen(kind: UpstreamKind, body: &str) -> (IdsChannel, bool, bool) {
        let found = Capabilities::from_reply(kind, 200, body.as_bytes()).expect("a chat reply");
        assert!(found.is_probed);
        (found.ids, found.streams_ids, found.routing)
    }

    #[test]
    fn releases_of_vllm_are_told_apart_by_their_reply() {
        let vllm = UpstreamKind::Vllm;
        let routed = fixture("vllm_chat_routed.json");
        assert_eq!(seen(vllm, &routed), (IdsChannel::TokenIds, true, true));
        assert_eq!(seen(vllm, &fixture("vllm_chat.json")), (IdsChannel::TokenIds, true, false));
        let older = fixture("vllm_chat.json").replace("\"reasoning\"", "\"reasoning_content\"");
        assert_eq!(seen(vllm, &older), (IdsChannel::TokenIds, false, false));
        let oldest = routed.replace("\"token_ids\"", "\"x\"").replace("\"routed_experts\"", "\"y\"");
        assert_eq!(seen(vllm, &oldest), (IdsChannel::TokenStrings, false, false));
        let none = oldest.replace("token_id:", "");
        assert_eq!(seen(vllm, &none), (IdsChannel::None, false, false));
    }

    #[test]
    fn releases_of_sglang_are_told_apart_by_their_reply() {
        let sglang = UpstreamKind::Sglang;
        let text = fixture("sglang_chat.json");
        assert_eq!(seen(sglang, &text), (IdsChannel::TokenIds, false, true));
        let dense = text.replace("\"sglext\"", "\"x\"");
        assert_eq!(seen(sglang, &dense), (IdsChannel::TokenIds, false, false));
        let meta = dense.replace(
            "\"response_token_ids\"",
            "\"meta_info\":{\"output_token_logprobs\":[],\"routed_experts\":\"\"},\"y\"",
        );
        assert_eq!(seen(sglang, &meta), (IdsChannel::MetaInfo, false, true));
        let old = meta.replace("\"prompt_token_ids\"", "\"z\"");
        assert_eq!(seen(sglang, &old).0, IdsChannel::None);
    }

    #[test]
    fn a_reply_that_is_no_answer_says_nothing() {
        let body = fixture("vllm_chat.json");
        for (status, body) in [
            (503, body.as_str()),
            (400, body.as_str()),
            (200, ""),
            (200, "[]"),
            (200, r#"{"choices":[]}"#),
            (200, r#"{"error":{}}"#),
        ] {
            assert_eq!(Capabilities::from_reply(UpstreamKind::Vllm, status, body.as_bytes()), None);
        }
    }

    #[test]
    fn only_engines_whose_releases_differ_are_probed() {
        for (kind, probes) in [
            (UpstreamKind::Vllm, 1),
            (UpstreamKind::Sglang, 2),
            (UpstreamKind::Embedded, 0),
            (UpstreamKind::Openai, 0),
            (UpstreamKind::Anthropic, 0),
        ] {
            let bodies: Vec<_> = (0..PROBES).map_while(|attempt| probe_body(kind, "m\"", attempt)).collect();
            assert_eq!(bodies.len(), probes, "{kind:?}");
            assert_eq!(probe_body(kind, "m", PROBES), None);
            for body in bodies {
                let body: Value = serde_json::from_slice(&body).expect("JSON");
                assert_eq!((&body["model"], &body["max_tokens"]), (&json!("m\""), &json!(1)));
                assert_eq!(body["stream"], false);
            }
        }
    }
}
