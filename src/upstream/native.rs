//! SGLang's native endpoint: where it is, and what it gives, as one tiny call shows it.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method};
use serde_json::{Value, json};

use super::transport::Upstream;

/// It lies beside the version segment of OpenAI's routes.
pub const ROUTE: &str = "/../generate";
/// Longest wait for the tokenizer.
const TOKENIZER_LIMIT: Duration = Duration::from_secs(10);
/// Longest reply of the tokenizer.
const MAX_TOKENS_BYTES: usize = 64 << 20;

/// What the native endpoint gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Native {
    /// The server has it.
    pub is_there: bool,
    /// The prompt's ids, when asked.
    pub prompt_ids: bool,
    /// Expert routing, when asked.
    pub routing: bool,
}

impl Native {
    /// A recent release, without routing.
    pub const ASSUMED: Self = Self { is_there: true, prompt_ids: true, routing: false };

    /// What the reply to a probe shows; `None` if it says nothing (the server is busy, or refuses what it was asked).
    #[must_use]
    pub fn from_reply(status: u16, body: &[u8]) -> Option<Self> {
        let missing = Self { is_there: false, prompt_ids: false, routing: false };
        match status {
            // A gateway in front of it that lets only `/v1` through may call it forbidden.
            401 | 403 | 404 | 405 | 501 => return Some(missing),
            200..300 => {}
            _ => return None,
        }
        let reply: Value = serde_json::from_slice(body).ok()?;
        let meta = &reply["meta_info"];
        let has_ids = reply["output_ids"].is_array() || meta["output_token_logprobs"].is_array();
        Some(Self {
            is_there: has_ids,
            prompt_ids: reply["prompt_token_ids"].is_array(),
            routing: meta["routed_experts"].is_string(),
        })
    }
}

/// The body of the probe number `attempt`, a call of one token; later ones ask for less.
#[must_use]
pub fn probe_body(attempt: usize) -> Option<Bytes> {
    let mut body = json!({
        "text": "hi",
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "stream": false,
        "return_logprob": true,
        "return_prompt_token_ids": true,
    });
    match attempt {
        0 => body["return_routed_experts"] = true.into(),
        1 => {}
        _ => return None,
    }
    Some(body.to_string().into())
}

/// The token ids of a prompt (JSON: a text, or a list of them) by the upstream's own tokenizer, as JSON; `None` if it
/// does not say soon.
pub async fn tokenized(upstream: &Upstream, model: &str, prompt: &[u8]) -> Option<Vec<u8>> {
    tokio::time::timeout(TOKENIZER_LIMIT, ask_tokenizer(upstream, model, prompt)).await.ok()?
}

async fn ask_tokenizer(upstream: &Upstream, model: &str, prompt: &[u8]) -> Option<Vec<u8>> {
    let model = Value::from(model).to_string();
    let request = [br#"{"model":"#, model.as_bytes(), br#","prompt":"#, prompt, b"}"].concat();
    let headers = HeaderMap::new();
    let reply = upstream.send(Method::POST, "/../tokenize", None, &headers, request.into()).await.ok()?;
    if !reply.status.is_success() {
        return None;
    }
    let mut body = reply.body;
    let mut text = BytesMut::new();
    while let Some(piece) = body.next(1 << 16).await {
        text.extend_from_slice(&piece.ok()?);
        if text.len() > MAX_TOKENS_BYTES {
            return None;
        }
    }
    let reply: Value = serde_json::from_slice(&text).ok()?;
    let tokens = &reply["tokens"];
    let are_ids = |list: &Value| {
        list.as_array().is_some_and(|ids| {
            !ids.is_empty() && ids.iter().all(|id| id.as_u64().is_some_and(|id| u32::try_from(id).is_ok()))
        })
    };
    let is_right = if prompt.starts_with(b"[") {
        let count = crate::protocol::json::elements(prompt, 0).ok()?.len();
        tokens.as_array().is_some_and(|all| all.len() == count && all.iter().all(are_ids))
    } else {
        are_ids(tokens)
    };
    is_right.then(|| tokens.to_string().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_shows_what_the_endpoint_gives() {
        let path = format!("{}/tests/fixtures/wire/sglang_generate.json", env!("CARGO_MANIFEST_DIR"));
        let body = std::fs::read_to_string(path).expect("fixture");
        let seen = |body: &str| Native::from_reply(200, body.as_bytes()).expect("a reply");
        let all = Native { is_there: true, prompt_ids: true, routing: true };
        assert_eq!(seen(&body), all);
        let dense = body.replace("\"routed_experts\"", "\"x\"");
        assert_eq!(seen(&dense), Native { routing: false, ..all });
        let old = dense.replace("\"prompt_token_ids\"", "\"y\"").replace("\"output_ids\"", "\"z\"");
        assert_eq!(seen(&old), Native { is_there: true, prompt_ids: false, routing: false });
        let missing = Native { is_there: false, prompt_ids: false, routing: false };
        for status in [404, 405, 501] {
            assert_eq!(Native::from_reply(status, b""), Some(missing));
        }
        // A gateway that answers everything.
        assert_eq!(seen("{}"), missing);
        for (status, text) in [(503, body.as_str()), (400, "{}"), (200, "no JSON")] {
            assert_eq!(Native::from_reply(status, text.as_bytes()), None);
        }
    }

    #[test]
    fn the_second_probe_asks_for_no_routing_and_there_is_no_third() {
        let body =
            |attempt| serde_json::from_slice::<Value>(&probe_body(attempt).expect("a body")).expect("JSON");
        assert_eq!(body(0)["return_routed_experts"], true);
        assert_eq!(body(1).get("return_routed_experts"), None);
        assert_eq!(body(1)["sampling_params"]["max_new_tokens"], 1);
        assert_eq!(probe_body(2), None);
    }
}
